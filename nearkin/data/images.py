"""`Images`: where a table's pixels come from. Training and evaluation ask for rows, not how they are stored."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Rows = NDArray[np.int64]


class Images(Protocol):
    """Rows of equally sized images as bytes."""

    shape: tuple[int, int, int]  # channels, height, width

    def __len__(self) -> int: ...

    def read(self, rows: Rows) -> Tensor:
        """These rows, uint8 [len(rows), channels, height, width]."""
        ...

    def take(self, rows: Rows) -> Images:
        """The same store, seen through these rows only."""
        ...


class ArrayImages:
    """Images held in memory: uint8 [N, channels, height, width]."""

    def __init__(self, pixels: NDArray[np.uint8]) -> None:
        assert pixels.dtype == np.uint8
        assert pixels.ndim == 4
        self.pixels = torch.from_numpy(pixels)
        _, channels, height, width = pixels.shape
        self.shape = (channels, height, width)

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, rows: Rows) -> Tensor:
        return self.pixels[torch.from_numpy(rows)]

    def take(self, rows: Rows) -> ArrayImages:
        return ArrayImages(self.read(rows).numpy())
