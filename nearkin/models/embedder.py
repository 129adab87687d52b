"""`Embedder`: the whole way from an image to a vector, with its preprocessing attached.

Training, evaluation, search and export all call this one module, so they cannot disagree on how pixels are scaled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from nearkin.data.images import FileImages, Images
from nearkin.data.transforms import AUGMENTS, Augment, viewing_batches
from nearkin.errors import DataError, RunError
from nearkin.models.backbones import BACKBONES
from nearkin.models.pooling import POOLINGS
from nearkin.progress import Reporter
from nearkin.recipe import Model, Recipe

Given = Images | Tensor | NDArray[np.uint8] | Sequence[Any]


class Embedder(nn.Module):
    """Images uint8 [B, C, H, W] in, embeddings float32 [B, dim] out.

    `forward` gives the raw embedding, which is what losses take; `embed` works through any number of images, files or
    PIL images and gives unit vectors, which is what search and evaluation compare.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: Model, image_shape: tuple[int, int, int], *, augment: Augment = AUGMENTS["none"]) -> None:
        """image_shape: of the model's input. augment: how files and stored pictures are cut to it at evaluation."""
        super().__init__()
        self.image_shape, self.augment = image_shape, augment
        channels = image_shape[0]
        self.backbone = BACKBONES[model.backbone](channels, model.width)
        self.pool = POOLINGS[model.pool]
        with torch.no_grad():
            features = self.pool(self.backbone.eval()(torch.zeros(1, *image_shape))).shape[1]
        self.backbone.train()
        self.head = nn.Linear(features, model.dim)
        self.register_buffer("mean", torch.full((channels, 1, 1), 0.5))
        self.register_buffer("std", torch.full((channels, 1, 1), 0.25))

    def forward(self, images: Tensor) -> Tensor:
        scaled = (images.to(self.mean.dtype) / 255 - self.mean) / self.std
        # channels_last: convolutions on a CPU run 1.4 to 2.4 times as fast.
        maps = self.backbone(scaled.contiguous(memory_format=torch.channels_last))
        return self.head(self.pool(maps))  # type: ignore[no-any-return]

    def calibrate(self, images: Images) -> None:
        """Take the mean and spread of each channel from (up to 4096 of) the training images."""
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

    @torch.inference_mode()
    def embed(self, images: Given, *, batch_size: int = 256, reporter: Reporter | None = None) -> Tensor:
        """Unit vectors [N, dim] of images given as an array [N, C, H, W] of bytes, or as paths or PIL images."""
        reporter = reporter or Reporter(quiet=True)
        was_training = self.training
        self.eval()
        parts = []
        try:
            with reporter.track("embedding", len(images), unit="img") as bar:
                for batch in self._batches(images, batch_size):
                    parts.append(F.normalize(self(batch.to(self.mean.device)), dim=1).cpu())
                    bar.advance(len(batch))
        finally:
            self.train(was_training)
        return torch.cat(parts) if parts else torch.empty(0, self.head.out_features)

    def _batches(self, images: Given, batch_size: int) -> Iterator[Tensor]:
        """Model inputs, from a store, from bytes that are such inputs already, or from files and PIL images."""
        plan = [np.arange(s, min(s + batch_size, len(images))) for s in range(0, len(images), batch_size)]
        if isinstance(images, Tensor | np.ndarray):
            whole = torch.as_tensor(images)
            if whole.dtype != torch.uint8 or whole.ndim != 4 or tuple(whole.shape[1:]) != self.image_shape:
                raise DataError(
                    f"embed: expected bytes of shape [N, {', '.join(map(str, self.image_shape))}], "
                    f"got {whole.dtype} {list(whole.shape)}. Paths and PIL images are scaled for you."
                )
            yield from (whole[rows[0] : rows[-1] + 1] for rows in plan)
            return
        channels, side, _ = self.image_shape
        given: Any = images
        if not hasattr(images, "read"):
            given = FileImages(given, self.augment.stored_side(side), channels=channels)
        yield from viewing_batches(given, plan, self.augment)


def load(path: str | Path) -> Embedder:
    """The trained model of a run folder, ready to embed."""
    folder = Path(path)
    recipe_file, weights_file = folder / "recipe.toml", folder / "best.pt"
    if not recipe_file.exists() or not weights_file.exists():
        raise RunError(f"{folder}: no trained model here (recipe.toml and best.pt). Give a folder below runs/.")
    stored = load_checkpoint(weights_file)
    recipe = Recipe.from_toml(recipe_file)
    model = Embedder(recipe.model, tuple(stored["image_shape"]), augment=AUGMENTS[recipe.data.augment])
    model.load_state_dict(stored["model"])
    return model.eval()


def load_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint as plain tensors and numbers; code inside the file is refused."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
    except Exception as error:  # a cut or foreign file fails in the unzipper, the unpickler or the tensor reader
        raise RunError(f"{path}: not a readable checkpoint ({str(error).splitlines()[0]}).") from None
