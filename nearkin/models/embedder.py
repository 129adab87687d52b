"""`Embedder`: the whole way from an image to a vector, with its preprocessing attached.

Training, evaluation, search and export all call this one module, so they cannot disagree on how pixels are scaled.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import torch as safetensors
from torch import Tensor, nn

from nearkin._common.files import atomic_write
from nearkin._common.progress import Reporter
from nearkin.config.recipe import ModelConfig, Recipe, from_dict
from nearkin.data.images import FileImages, Images
from nearkin.data.transforms import AUGMENTS, eval_batches
from nearkin.errors import ConfigError, DataError, RunError
from nearkin.models._base import Backbone, Pixels
from nearkin.models.backbones import make_backbone
from nearkin.models.heads import Head, unit
from nearkin.models.pooling import Pool
from nearkin.models.weights import fingerprint, load_checkpoint

Given = Images | Tensor | NDArray[Any] | Sequence[Any]
FORMAT = 1  # of model.json


class Embedder(nn.Module):
    """Images uint8 [B, C, H, W] in, embeddings float [B, dim] out: backbone -> pool -> head.

    `forward` gives the raw embedding, which is what losses take; `embed` works through any number of images, files or
    PIL images and gives unit vectors, which is what search and evaluation compare. Both also take pooled features
    [B, F] that were computed before, as a frozen backbone allows: `features` gives them.

    image_shape     of the model's input; (F, 1, 1) where there is no backbone and the data are features
    augment         by name: how files and stored pictures are cut to the input at evaluation
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: ModelConfig, image_shape: tuple[int, int, int], *, augment: str = "none") -> None:
        super().__init__()
        self.model, self.image_shape, self.augment = model, image_shape, augment
        channels = image_shape[0]
        self.backbone: Backbone | None = None
        parts: tuple[int, ...] = (channels,)
        if model.backbone != "none":
            self.backbone = make_backbone(model, channels)
            self.pool = Pool(model)
            parts = tuple(self.pool(m).shape[1] for m in self._first_look(self.backbone))
            self.backbone.train()
        self.num_features = sum(parts)
        self.head = Head(model, parts)
        self.dim = self.head.dim
        pixels = (self.backbone and self.backbone.pixels) or Pixels((0.5,) * channels, (0.25,) * channels)
        self.bgr = pixels.bgr
        self.register_buffer("mean", torch.tensor(pixels.mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(pixels.std).view(-1, 1, 1))
        self.freeze_backbone(False)

    @torch.no_grad()
    def _first_look(self, backbone: Backbone) -> tuple[Tensor, ...]:
        """The maps that the backbone makes of images of this size, if it takes such."""
        try:
            return self._taps(torch.zeros(1, *self.image_shape), backbone.eval())
        except (AssertionError, RuntimeError) as error:
            height, width = self.image_shape[1:]
            cure = f"--data.image-size {backbone.usual_side}" if backbone.usual_side else "another --data.image-size"
            raise ConfigError(
                f"model.backbone: {self.model.backbone} does not take images of {height} x {width} pixels "
                f"({str(error).splitlines()[0]}). Give {cure}."
            ) from None

    def forward(self, given: Tensor) -> Tensor:
        return self.head(given if given.ndim == 2 else self.features(given))  # type: ignore[no-any-return]

    def features(self, images: Tensor) -> Tensor:
        """What the pooled backbone makes of images uint8 [B, C, H, W]: [B, F], before the head."""
        if self.backbone is None:
            raise DataError("this model takes features [N, F], not images: it was trained without a backbone.")
        if self.bgr:
            images = images.flip(1)
        scaled = (images.to(self.mean.dtype) / 255 - self.mean) / self.std
        # channels_last: convolutions on a CPU run 1.4 to 2.4 times as fast.
        scaled = scaled.contiguous(memory_format=torch.channels_last)
        maps = [self.pool(m) for m in self._taps(scaled, self.backbone)]
        return maps[0] if len(maps) == 1 else torch.cat(maps, dim=1)

    def _taps(self, scaled: Tensor, backbone: Backbone) -> tuple[Tensor, ...]:
        return (backbone(scaled),) if self.model.feature_levels == "high" else tuple(backbone.stages(scaled).values())

    def train(self, mode: bool = True) -> Embedder:
        """Training mode, except where the model says that the backbone or its batch norms stand still."""
        super().train(mode)
        if mode and self.backbone is not None:
            if self.held or self.model.freeze == "backbone":
                self.backbone.eval()
            elif self.model.freeze_norm != "nothing":
                for norm in _batch_norms(self.backbone):
                    norm.eval()
        return self

    def freeze_backbone(self, held: bool) -> None:
        """Whether the backbone learns and counts statistics; what `freeze` and `freeze_norm` name never does."""
        self.held = held
        if self.backbone is None:
            return
        self.train(self.training)
        learns = not held and self.model.freeze == "nothing"
        self.backbone.requires_grad_(learns)
        self.pool.requires_grad_(learns)
        if self.model.freeze_norm == "all":
            for norm in _batch_norms(self.backbone):
                norm.requires_grad_(False)

    def calibrate(self, images: Images) -> None:
        """Take the mean and spread of each channel from (up to 4096 of) the images, unless the backbone has its own."""
        if self.backbone is None or self.backbone.pixels is not None:
            return
        rows = np.linspace(0, len(images) - 1, min(len(images), 4096)).astype(np.int64)
        total, squares = torch.zeros(2, images.shape[0], dtype=torch.float64)
        count = 0
        for part in np.array_split(rows, max(1, len(rows) // 256)):
            pixels = images.read(part).double()
            total, squares = total + pixels.sum(dim=(0, 2, 3)), squares + pixels.square().sum(dim=(0, 2, 3))
            count += pixels[:, 0].numel()
        mean = total / count / 255
        std = (squares / count / 255**2 - mean**2).clamp(min=1e-4).sqrt()
        self.mean.copy_(mean.view(-1, 1, 1))
        self.std.copy_(std.view(-1, 1, 1))

    # --- many images --------------------------------------------------------------------------------------------------

    def embed(
        self, images: Given, *, batch_size: int = 256, raw: bool = False, reporter: Reporter | None = None
    ) -> Tensor:
        """Unit vectors float32 [N, dim] on the CPU of images given as paths, PIL images, bytes [N, C, H, W], a store of
        images, or as features [N, F]. Not unit if raw, or where the model was made with normalize = false.
        """
        vectors = self._through(self, images, batch_size, reporter, self.dim)
        return vectors if raw or not self.model.normalize else unit(vectors)

    def embed_features(self, images: Given, *, batch_size: int = 256, reporter: Reporter | None = None) -> Tensor:
        """The pooled features [N, F] of images: what the backbone knows by itself, and what a frozen lane trains on."""
        return self._through(self.features, images, batch_size, reporter, self.num_features)

    @torch.inference_mode()
    def _through(self, step: Any, images: Given, batch_size: int, reporter: Reporter | None, width: int) -> Tensor:
        if isinstance(images, str | Path):
            raise DataError(f"embed takes a list of images: embed([{str(images)!r}]).")
        reporter = reporter or Reporter(quiet=True)
        was_training = self.training
        self.eval()
        parts = []
        try:
            with reporter.track("embedding", len(images), unit="img") as bar:
                for batch in self._batches(images, batch_size):
                    parts.append(step(batch.to(self.mean.device)).float().cpu())
                    bar.advance(len(batch))
        finally:
            self.train(was_training)
        return torch.cat(parts) if parts else torch.empty(0, width)

    def _batches(self, images: Given, batch_size: int) -> Iterator[Tensor]:
        """Model inputs, from a store, from arrays that are such inputs already, or from files and PIL images."""
        plan = [np.arange(s, min(s + batch_size, len(images))) for s in range(0, len(images), batch_size)]
        if isinstance(images, Tensor | np.ndarray):
            whole = self._check(torch.as_tensor(images))
            yield from (whole[rows[0] : rows[-1] + 1] for rows in plan)
            return
        channels, side, _ = self.image_shape
        augment = AUGMENTS[self.augment]
        given: Any = images
        if not hasattr(images, "read"):
            given = FileImages(given, augment.stored_side(side), channels=channels)
        yield from eval_batches(given, plan, augment)

    def _check(self, whole: Tensor) -> Tensor:
        if whole.ndim == 2 and whole.is_floating_point() and whole.shape[1] == self.num_features:
            return whole.to(self.mean.dtype)
        if whole.dtype == torch.uint8 and whole.ndim == 4 and tuple(whole.shape[1:]) == self.image_shape:
            return whole
        wanted = f"bytes of shape [N, {', '.join(map(str, self.image_shape))}] or " if self.backbone else ""
        raise DataError(
            f"embed: expected {wanted}features of shape [N, {self.num_features}], "
            f"got {whole.dtype} {list(whole.shape)}." + (" Paths and PIL images are scaled for you." if wanted else "")
        )

    # --- on disk ------------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> Path:
        """Write model.safetensors (every tensor) and model.json (how to build the network around them)."""
        folder = Path(folder)
        tensors = {name: value.detach().cpu().contiguous() for name, value in self.state_dict().items()}
        data: bytes = safetensors.save(tensors)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            atomic_write(folder / "model.safetensors", data)
            atomic_write(folder / "model.json", json.dumps(self.described(hashlib.sha256(data).hexdigest()), indent=2))
        except OSError as error:
            raise RunError(f"{folder}: cannot write the model ({error.strerror or error}).") from None
        return folder

    def described(self, sha256: str = "") -> dict[str, Any]:
        """All that is needed to build this network again, as plain values."""
        return {
            "format": FORMAT,
            "model": {k: v for k, v in dataclasses.asdict(self.model).items() if k != "weights"},
            "image_shape": list(self.image_shape),
            "augment": self.augment,
            "dim": self.dim,
            "sha256": sha256,
        }

    def fingerprint(self) -> str:
        """A hash of every weight and of the preprocessing: two models of one fingerprint give the same vectors."""
        described = json.dumps(self.described(fingerprint(self)), sort_keys=True)
        return hashlib.sha256(described.encode()).hexdigest()[:16]


def load(path: str | Path) -> Embedder:
    """A trained model, ready to embed: of a run folder, or of a folder that `Embedder.save` wrote."""
    folder = Path(path)
    if (folder / "model.json").exists():
        return _load_saved(folder)
    recipe_file, weights_file = folder / "recipe.toml", folder / "best.pt"
    if not recipe_file.exists() or not weights_file.exists():
        raise RunError(
            f"{folder}: no trained model here (recipe.toml and best.pt, or model.json). Give a folder below runs/."
        )
    stored = load_checkpoint(weights_file)
    recipe = Recipe.from_toml(recipe_file)
    model = Embedder(recipe.model, tuple(stored["image_shape"]), augment=recipe.data.augment)
    _fill(model, stored["model"], weights_file)
    return model.eval()


def _load_saved(folder: Path) -> Embedder:
    weights = folder / "model.safetensors"
    try:
        described = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        if described["format"] != FORMAT:
            raise RunError(
                f"{folder / 'model.json'}: format {described['format']}, this nearkin reads {FORMAT}. "
                f"Load it with the version that wrote it."
            )
        data = weights.read_bytes()
        if hashlib.sha256(data).hexdigest() != described["sha256"]:
            raise RunError(
                f"{weights}: not the file that model.json describes (its checksum differs). Copy both again."
            )
        state = safetensors.load(data)
        shape = tuple(described["image_shape"])
        model = Embedder(from_dict(ModelConfig, described["model"], "model."), shape, augment=described["augment"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, RunError):
            raise
        raise RunError(f"{folder}: not a readable model ({type(error).__name__}: {error}).") from None
    _fill(model, state, weights)
    return model.eval()


def _fill(model: Embedder, state: dict[str, Tensor], where: Path) -> None:
    try:
        model.load_state_dict(state)
    except (RuntimeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise RunError(f"{where}: does not fit the network that is described beside it ({reason}).") from None


def _batch_norms(backbone: nn.Module) -> list[nn.Module]:
    return [m for m in backbone.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
