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
    """
    channels, side, _ = model.image_shape
    augment = AUGMENTS[model.augment]
    return augment.evaluate(read_image(source, augment.stored_side(side), box=box, channels=channels), side)
