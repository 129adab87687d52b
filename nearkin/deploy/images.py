"""One picture as a model takes it: read, cut and scaled as evaluation does."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nearkin.data.reading import Box, read_image
from nearkin.data.transforms import AUGMENTS
from nearkin.models.embedder import Embedder


def model_input(model: Embedder, source: Any, box: Box | None = None) -> Tensor:
    """A path, a PIL image or a file's bytes as uint8 [C, H, W]: the pixels that `model.embed` would give the network.

    It is done in the calling thread, so that many threads may do it side by side.
    """
    channels, side, _ = model.image_shape
    augment = AUGMENTS[model.augment]
    return augment.view(read_image(source, augment.stored_side(side), box=box, channels=channels), side)
