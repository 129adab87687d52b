"""`Embedder`: the model from image to vector, including preprocessing.

Training, evaluation, search and export all call this module, so that they preprocess images identically.
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

from nearkin._common.files import atomic_write, read_json
from nearkin._common.progress import Reporter
from nearkin.config._parsing import from_dict
from nearkin.config.recipe import ModelConfig, Recipe
from nearkin.data.images import FileImages, Images
from nearkin.data.transforms import AUGMENTS, eval_batches
from nearkin.errors import ConfigError, DataError, RunError
from nearkin.models._base import Backbone, PixelNorm
from nearkin.models.backbones import make_backbone
from nearkin.models.heads import Head, Pool, unit
from nearkin.models.weights import fingerprint, load_checkpoint, load_weights

ImageInput = Images | Tensor | NDArray[Any] | Sequence[Any]
FORMAT = 1  # version of model.json


class Embedder(nn.Module):
    """Maps images uint8 [B, C, H, W] to embeddings float [B, dim]: backbone -> pool -> head.

    `forward` returns the raw embedding, for losses. `embed` takes any number of images, files or PIL images and returns
    unit vectors, for search and evaluation. Both also accept the pooled features [B, F] that `features` computes, so a
    frozen backbone need run only once.

    Args:
        model: Configuration of the network; the backbone starts with its `weights`.
        image_shape: Shape (C, H, W) of the input; (F, 1, 1) if there is no backbone and the data are features.
        augment: Name of the augmentation whose evaluation transform crops files and stored images to the input.
        reporter: Shows what is ignored of a file of weights; by default nothing is shown.

    Attributes:
        dim: Dimension of the embedding.
        num_features: Number F of pooled features.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        model: ModelConfig,
        image_shape: tuple[int, int, int],
        *,
        augment: str = "none",
        reporter: Reporter | None = None,
    ) -> None:
        super().__init__()
        self.model, self.image_shape, self.augment = model, image_shape, augment
        channels = image_shape[0]
        self.backbone: Backbone | None = None
        parts: tuple[int, ...] = (channels,)
        if model.backbone != "none":
            self.backbone = make_backbone(model, channels)
            self.pool = Pool(model)
            parts = tuple(self.pool(maps).shape[1] for maps in self._probe(self.backbone))
            self.backbone.train()
        self.num_features = sum(parts)
        self.head = Head(model, parts)
        self.dim = self.head.dim
        norm = (self.backbone and self.backbone.pixel_norm) or PixelNorm((0.5,) * channels, (0.25,) * channels)
        self.bgr = norm.bgr
        self.register_buffer("mean", torch.tensor(norm.mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(norm.std).view(-1, 1, 1))
        self.freeze_backbone(False)
        if self.backbone is not None:
            load_weights(self.backbone, model.backbone, model.weights, reporter or Reporter(quiet=True))

    @torch.no_grad()
    def _probe(self, backbone: Backbone) -> tuple[Tensor, ...]:
        """Return the feature maps of one blank image, or raise if the backbone does not accept this image size."""
        try:
            return self._feature_maps(torch.zeros(1, *self.image_shape), backbone.eval())
        except (AssertionError, RuntimeError) as error:
            height, width = self.image_shape[1:]
            size = backbone.default_image_size
            fix = f"--data.image-size {size}" if size else "another --data.image-size"
            raise ConfigError(
                f"model.backbone: {self.model.backbone} does not accept images of {height} x {width} pixels "
                f"({str(error).splitlines()[0]}). Use {fix}."
            ) from None

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute raw embeddings [B, dim] of images uint8 [B, C, H, W] or pooled features [B, F]."""
        return self.head(inputs if inputs.ndim == 2 else self.features(inputs))  # type: ignore[no-any-return]

    def features(self, images: Tensor) -> Tensor:
        """Compute the pooled features [B, F] of images uint8 [B, C, H, W]: the input of the head."""
        if self.backbone is None:
            raise DataError("This model has no backbone: it expects features [N, F], not images.")
        if self.bgr:
            images = images.flip(1)
        scaled = (images.to(self.mean.dtype) / 255 - self.mean) / self.std
        # channels_last: convolutions on a CPU run 1.4 to 2.4 times as fast.
        scaled = scaled.contiguous(memory_format=torch.channels_last)
        pooled = [self.pool(maps) for maps in self._feature_maps(scaled, self.backbone)]
        return pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)

    def _feature_maps(self, scaled: Tensor, backbone: Backbone) -> tuple[Tensor, ...]:
        if self.model.feature_levels == "high":
            return (backbone(scaled),)
        return tuple(backbone.forward_levels(scaled).values())

    def train(self, mode: bool = True) -> Embedder:
        """Set training mode; a frozen backbone and frozen batch norms stay in evaluation mode."""
        super().train(mode)
        if mode and self.backbone is not None:
            if self.backbone_frozen or self.model.freeze == "backbone":
                self.backbone.eval()
            elif self.model.freeze_norm != "none":
                for norm in _batch_norms(self.backbone):
                    norm.eval()
        return self

    def freeze_backbone(self, frozen: bool) -> None:
        """Freeze the backbone, parameters and batch-norm statistics; False unfreezes what the configuration allows."""
        self.backbone_frozen = frozen
        if self.backbone is None:
            return
        self.train(self.training)
        trainable = not frozen and self.model.freeze == "none"
        self.backbone.requires_grad_(trainable)
        self.pool.requires_grad_(trainable)
        if self.model.freeze_norm == "all":
            for norm in _batch_norms(self.backbone):
                norm.requires_grad_(False)

    def fit_pixel_norm(self, images: Images) -> None:
        """Set the mean and deviation of each channel from at most 4096 images, unless the backbone defines them."""
        if self.backbone is None or self.backbone.pixel_norm is not None:
            return
        rows = np.linspace(0, len(images) - 1, min(len(images), 4096)).astype(np.int64)
        total, squares = torch.zeros(2, images.shape[0], dtype=torch.float64)
        count = 0
        for chunk in np.array_split(rows, max(1, len(rows) // 256)):
            pixels = images.read(chunk).double()
            total, squares = total + pixels.sum(dim=(0, 2, 3)), squares + pixels.square().sum(dim=(0, 2, 3))
            count += pixels[:, 0].numel()
        mean = total / count / 255
        std = (squares / count / 255**2 - mean**2).clamp(min=1e-4).sqrt()
        self.mean.copy_(mean.view(-1, 1, 1))
        self.std.copy_(std.view(-1, 1, 1))

    def embed(
        self, images: ImageInput, *, batch_size: int = 256, raw: bool = False, reporter: Reporter | None = None
    ) -> Tensor:
        """Embed any number of images.

        Args:
            images: Paths, PIL images, bytes uint8 [N, C, H, W], an image store, or features [N, F].
            batch_size: Images per forward pass.
            raw: Do not normalise the vectors.
            reporter: Shows the progress; by default nothing is shown.

        Returns:
            Vectors float32 [N, dim] on the CPU; unit vectors unless `raw` is set or the model has normalize = false.
        """
        vectors = self._run_batches(self, images, batch_size, reporter, self.dim)
        return vectors if raw or not self.model.normalize else unit(vectors)

    def embed_features(self, images: ImageInput, *, batch_size: int = 256, reporter: Reporter | None = None) -> Tensor:
        """Compute the pooled features float32 [N, F] of any number of images, given as for `embed`."""
        return self._run_batches(self.features, images, batch_size, reporter, self.num_features)

    def _run_batches(
        self, function: Any, images: ImageInput, batch_size: int, reporter: Reporter | None, width: int
    ) -> Tensor:
        """Apply a function to all images; `width` is that of an empty result."""
        if isinstance(images, str | Path):
            raise DataError(f"embed: expected a list of images, got one path. Use embed([{str(images)!r}]).")
        outputs = []
        with (reporter or Reporter(quiet=True)).track("embedding", len(images), unit="img") as bar:
            for output in self.stream(function, images, batch_size):
                outputs.append(output)
                bar.advance(len(output))
        return torch.cat(outputs) if outputs else torch.empty(0, width)

    @torch.no_grad()  # not inference_mode(), which some devices (XLA) do not support
    def stream(self, function: Any, images: ImageInput, batch_size: int) -> Iterator[Tensor]:
        """Yield a function of each batch of images, computed in evaluation mode, as float32 on the CPU."""
        was_training = self.training
        self.eval()
        try:
            for batch in self._batches(images, batch_size):
                yield function(batch.to(self.mean.device)).float().cpu()
        finally:
            self.train(was_training)

    def _batches(self, images: ImageInput, batch_size: int) -> Iterator[Tensor]:
        """Yield batches of model inputs from an image store, from arrays of inputs, or from files and PIL images."""
        plan = [np.arange(s, min(s + batch_size, len(images))) for s in range(0, len(images), batch_size)]
        if isinstance(images, Tensor | np.ndarray):
            inputs = torch.as_tensor(images)
            if inputs.ndim == 2 and inputs.is_floating_point() and inputs.shape[1] == self.num_features:
                inputs = inputs.to(self.mean.dtype)
            elif inputs.dtype != torch.uint8 or inputs.ndim != 4 or tuple(inputs.shape[1:]) != self.image_shape:
                bytes_or = f"bytes of shape [N, {', '.join(map(str, self.image_shape))}] or " if self.backbone else ""
                hint = " To have images resized, pass paths or PIL images." if self.backbone else ""
                raise DataError(
                    f"embed: expected {bytes_or}features of shape [N, {self.num_features}], "
                    f"got {inputs.dtype} {list(inputs.shape)}.{hint}"
                )
            yield from (inputs[rows[0] : rows[-1] + 1] for rows in plan)
            return
        channels, side, _ = self.image_shape
        augment = AUGMENTS[self.augment]
        store: Any = images
        if not hasattr(images, "read"):
            store = FileImages(store, augment.stored_side(side), channels=channels)
        yield from eval_batches(store, plan, augment)

    def save(self, folder: str | Path) -> Path:
        """Write model.safetensors and model.json into a folder, for `nearkin.load`. Returns the folder."""
        folder = Path(folder)
        tensors = {name: value.detach().cpu().contiguous() for name, value in self.state_dict().items()}
        data: bytes = safetensors.save(tensors)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            atomic_write(folder / "model.safetensors", data)
            config = self.config_dict(hashlib.sha256(data).hexdigest())
            atomic_write(folder / "model.json", json.dumps(config, indent=2))
        except OSError as error:
            raise RunError(f"{folder}: cannot write the model ({error.strerror or error}).") from None
        return folder

    def config_dict(self, sha256: str = "") -> dict[str, Any]:
        """Return the content of model.json: what is needed to rebuild the network, and the checksum of its weights."""
        return {
            "format": FORMAT,
            "model": {k: v for k, v in dataclasses.asdict(self.model).items() if k != "weights"},
            "image_shape": list(self.image_shape),
            "augment": self.augment,
            "dim": self.dim,
            "sha256": sha256,
        }

    def fingerprint(self) -> str:
        """Hash the weights and the preprocessing; models with the same fingerprint give the same vectors."""
        config = json.dumps(self.config_dict(fingerprint(self)), sort_keys=True)
        return hashlib.sha256(config.encode()).hexdigest()[:16]


def load(path: str | Path) -> Embedder:
    """Load a trained model.

    Args:
        path: A run folder, or a folder written by `Embedder.save`.

    Returns:
        The model in evaluation mode.

    Raises:
        RunError: The folder has no model, or its files are damaged.
    """
    folder = Path(path)
    if (folder / "model.json").exists():
        return _load_saved(folder)
    recipe_file, weights_file = folder / "recipe.toml", folder / "best.pt"
    if not recipe_file.exists() or not weights_file.exists():
        raise RunError(
            f"{folder}: no trained model here (recipe.toml and best.pt, or model.json). Give a folder below runs/."
        )
    checkpoint = load_checkpoint(weights_file, keys=("model", "image_shape"))
    recipe = Recipe.from_toml(recipe_file)
    config = dataclasses.replace(recipe.model, weights="none")  # the initial ones may be gone, and are not needed
    model = Embedder(config, tuple(checkpoint["image_shape"]), augment=recipe.data.augment)
    _load_state(model, checkpoint["model"], weights_file)
    return model.eval()


def _load_saved(folder: Path) -> Embedder:
    weights = folder / "model.safetensors"
    try:
        config = read_json(folder / "model.json")
        if config["format"] != FORMAT:
            raise RunError(
                f"{folder / 'model.json'}: format {config['format']}, but this version of nearkin reads "
                f"format {FORMAT}. Load it with the version that wrote it."
            )
        data = weights.read_bytes()
        if hashlib.sha256(data).hexdigest() != config["sha256"]:
            raise RunError(f"{weights}: does not match model.json (its checksum differs). Copy both files again.")
        state = safetensors.load(data)
        shape = tuple(config["image_shape"])
        model = Embedder(from_dict(ModelConfig, config["model"], "model."), shape, augment=config["augment"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, RunError):
            raise
        raise RunError(f"{folder}: not a readable model ({type(error).__name__}: {error}).") from None
    _load_state(model, state, weights)
    return model.eval()


def _load_state(model: Embedder, state: dict[str, Tensor], path: Path) -> None:
    try:
        model.load_state_dict(state)
    except (RuntimeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise RunError(f"{path}: does not fit the configuration in the same folder ({reason}).") from None


def _batch_norms(backbone: nn.Module) -> list[nn.Module]:
    return [m for m in backbone.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
