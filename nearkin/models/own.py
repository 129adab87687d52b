"""A module of the user as a backbone, and the preprocessing that it expects."""

import copy
import hashlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nearkin.data.images import apply_preprocess, as_tensor
from nearkin.errors import ConfigError, RunError, import_extra
from nearkin.models._base import Backbone, PixelNorm

OWN = "own"  # model.backbone of such a model
Preprocess = Callable[[Any], Any]  # PIL image -> float tensor [...]
_PROBE_SIDE = 256  # of the blank image that shows what a function returns


@dataclass(frozen=True)
class Inputs:
    """What a module takes."""

    shape: tuple[int, ...]  # of one input, without the batch
    dtype: torch.dtype  # uint8 for images, which are normalised; float32 or int64 for tensors that are passed on
    norm: PixelNorm  # of the pixels of images
    function: Preprocess | None = None  # turns a PIL image into an input
    identity: str = ""  # distinguishes the function from others; empty without one


class OwnBackbone(Backbone):
    """A module of the user: vectors become maps of 1 x 1, tokens [B, T, F] maps of T x 1."""

    def __init__(self, module: Any, inputs: Inputs, name: str = "") -> None:
        super().__init__()
        self.is_module = isinstance(module, nn.Module)
        self.module = module  # or a function, which cannot be trained
        self.inputs, self.pixel_norm, self.name = inputs, inputs.norm, name
        layers = re.sub(r" at 0x[0-9a-f]+", "", repr(module))
        self.identity = _hashed(type(module).__name__, layers) if self.is_module else identify(module, name, "module")
        named = module.named_parameters() if self.is_module else ()
        self.always_frozen = frozenset(f"module.{name}" for name, p in named if not p.requires_grad)

    def forward(self, inputs: Tensor) -> Tensor:
        output = self.module(inputs if self.is_module else inputs.cpu().numpy())
        if not self.is_module:
            output = as_tensor(output).float().to(inputs.device)
        elif not isinstance(output, Tensor):  # of Hugging Face
            pooled = getattr(output, "pooler_output", None)
            output = getattr(output, "last_hidden_state", output) if pooled is None else pooled
        if isinstance(output, Tensor) and output.ndim in (2, 3, 4):
            if output.ndim == 4:
                return output
            return output[:, :, None, None] if output.ndim == 2 else output.transpose(1, 2)[..., None]
        got = f"shape {list(output.shape)}" if getattr(output, "ndim", 0) else f"a {type(output).__name__}"
        expected = "vectors [B, D], tokens [B, T, F] or maps [B, F, h, w]"
        raise ConfigError(f"module: {self.identity.partition(',')[0]} returned {got}, expected {expected}.")

    def blank(self, count: int) -> Tensor:
        """Return a batch of zeros as the module takes it, where its weights are."""
        weights = self.weights()
        inputs = torch.zeros(count, *self.inputs.shape, dtype=torch.float32 if weights is None else weights.dtype)
        inputs = inputs.long() if self.inputs.dtype == torch.int64 else inputs
        return inputs if weights is None else inputs.to(weights.device)

    def weights(self) -> Tensor | None:
        """Return one of the weights of the module, if it has any."""
        return next((p for p in self.parameters() if p.is_floating_point()), None)

    def to_dict(self) -> dict[str, Any]:
        """Return what identifies the module apart from its weights, and what is needed to use it again."""
        types = {"input": str(self.inputs.dtype)[6:], "preprocess": self.inputs.identity}
        return {"module": self.identity, "name": self.name, **types}


def read_inputs(module: Any, preprocess: Any, image_size: int | None, example: Tensor | None, name: str) -> Inputs:
    """Find out what a module takes: from its preprocessing, an example batch, or its own configuration (timm)."""
    no_norm = PixelNorm((0.0,), (1.0,))
    shape = () if example is None else tuple(example.shape[1:])
    if preprocess is None and example is not None and example.dtype != torch.uint8:
        return Inputs(shape, torch.float32 if example.is_floating_point() else torch.int64, no_norm)
    found = _pixel_settings(getattr(module, "pretrained_cfg", None) if preprocess is None else preprocess)
    if found is None and preprocess is not None:
        if not callable(preprocess):
            raise ConfigError(
                f"preprocess: got a {type(preprocess).__name__}, expected (mean, std, image size), a function of a PIL "
                "image, or a transform of torchvision, timm or Hugging Face."
            )
        if example is None:
            blank = import_extra("PIL.Image", extra="images").new("RGB", (_PROBE_SIDE, _PROBE_SIDE))
            shape = tuple(apply_preprocess(preprocess, blank).shape)
        return Inputs(shape, torch.float32, no_norm, preprocess, identify(preprocess, name, "preprocess"))
    mean, std, size = found or (None, None, None)
    if example is None:
        side = image_size or size
        if side is None:
            raise ConfigError(
                "wrap: the image size is not known. Pass image_size=224, preprocess=(mean, std, 224), or for a module "
                "that takes other tensors example=batch."
            )
        shape = (3 if mean is None else len(mean), side, side)
    mean, std = mean or (0.0,) * shape[0], std or (1.0,) * shape[0]
    if not len(mean) == len(std) == shape[0]:
        raise ConfigError(f"preprocess: mean and std have {len(mean)} and {len(std)} values for {shape[0]}.")
    return Inputs(shape, torch.uint8, PixelNorm(mean, std))


def _pixel_settings(source: Any) -> tuple[tuple[float, ...], tuple[float, ...], int | None] | None:
    """Read mean, deviation and image size: given, or from a transform of torchvision, timm or Hugging Face."""
    if isinstance(source, tuple | list):
        if len(source) != 3:
            raise ConfigError(f"preprocess: expected (mean, std, image size), got {len(source)} values.")
        mean, std, size = source
    elif isinstance(source, dict) and {"mean", "std", "input_size"} <= source.keys():  # timm
        mean, std, size = source["mean"], source["std"], source["input_size"]
    elif hasattr(source, "image_mean"):  # Hugging Face
        normalizes = getattr(source, "do_normalize", True)
        mean, std = (source.image_mean, source.image_std) if normalizes else ([0.0] * 3, [1.0] * 3)
        size = source.crop_size if getattr(source, "do_center_crop", False) else source.size
        size = (size.get("height") or size.get("shortest_edge")) if hasattr(size, "get") else size
    elif hasattr(source, "mean") and hasattr(source, "std") and hasattr(source, "crop_size"):  # torchvision's weights
        mean, std, size = source.mean, source.std, source.crop_size
    else:
        return None
    if isinstance(size, tuple | list):
        size = size[-1]
    mean, std = (tuple(float(v) for v in np.atleast_1d(np.asarray(values))) for values in (mean, std))
    return mean, std, None if size is None else int(size)


def identify(function: Any, name: str, what: str) -> str:
    """Name a function so that another one has another name: as given, or by its settings or its source."""
    if not callable(function):
        raise ConfigError(f"{what}: got a {type(function).__name__}, expected an nn.Module or a function.")
    if name:
        return name
    title = getattr(function, "__qualname__", type(function).__qualname__)
    described = repr(function)
    if " at 0x" in described:  # a plain function, or an object that does not show its settings
        try:
            described = inspect.getsource(function)
        except (OSError, TypeError, SyntaxError):
            raise ConfigError(f"{what}: {title} has no source to identify it by. Pass a name: name=.") from None
    return _hashed(title, described)


def _hashed(title: str, content: str) -> str:
    return f"{title}, {hashlib.sha256(content.encode()).hexdigest()[:16]}"


def restore_own(
    folder: Path,
    backbone: str,
    shape: tuple[int, ...],
    stored: dict[str, str] | None,
    module: Any,
    preprocess: Preprocess | None,
) -> OwnBackbone | None:
    """Return the module of the user for a stored model, or None if nearkin builds its backbone itself."""
    if backbone != OWN:
        if module is not None:
            raise RunError(f"{folder}: its network is {backbone}, not a module of yours. Leave out module=.")
        return None
    wrapped = getattr(module, OWN, None)
    if isinstance(wrapped, OwnBackbone):
        module, preprocess = wrapped.module, wrapped.inputs.function
    if stored is None:
        raise RunError(f"{folder}: does not say what its module takes. Save the model again.")
    wanted = stored["preprocess"]
    if module is None or (wanted and preprocess is None):
        arguments = f"module={stored['module'].partition(',')[0]}(...)" + (", preprocess=FUNCTION" if wanted else "")
        raise RunError(
            f"{folder}: its network is a module of yours, of which only the weights are stored.\n"
            f"Pass an instance: nearkin.load({str(folder)!r}, {arguments})."
        )
    given = identify(preprocess, stored["name"], "preprocess") if wanted else ""
    if given != wanted:
        raise RunError(f"{folder}: its preprocess is {wanted}, got {given}. Pass the same function.")
    channels = shape[0] if stored["input"] == "uint8" else 1
    norm = PixelNorm((0.0,) * channels, (1.0,) * channels)  # replaced by that of the stored weights
    inputs = Inputs(shape, getattr(torch, stored["input"]), norm, preprocess if wanted else None, wanted)
    return OwnBackbone(copy.deepcopy(module), inputs, stored["name"])
