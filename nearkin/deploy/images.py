"""Preprocess a single image for a model, exactly as evaluation does."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nearkin.data.reading import Box, read_image
from nearkin.data.transforms import AUGMENTS
from nearkin.models.embedder import Embedder


def model_input(model: Embedder, source: Any, box: Box | None = None) -> Tensor:
    """Return the pixels that `model.embed` would pass to the network.

    Runs in the calling thread, so several threads can preprocess images in parallel.

    Args:
        model: Its image shape and augmentation determine the crop.
        source: A path, a PIL image, or the bytes of an image file.
        box: Crop to (x, y, width, height) first.

    Returns:
        uint8 [C, H, W].
    """
    channels, side, _ = model.image_shape
    augment = AUGMENTS[model.augment]
    return augment.evaluate(read_image(source, augment.stored_side(side), box=box, channels=channels), side)
