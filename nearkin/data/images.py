"""`Images`: random access to a table's pixels by row, independent of how they are stored."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.data.loading import empty_batch, map_in_threads
from nearkin.data.reading import open_file, read_image, square
from nearkin.errors import DataError

Rows = NDArray[np.int64]


class Images(Protocol):
    """A store of uint8 images."""

    shape: tuple[int, int, int]  # (channels, height, width) of the images that `read` returns

    def __len__(self) -> int: ...

    def read(self, rows: Rows) -> Tensor:
        """Return these rows as uint8 [len(rows), channels, height, width]."""
        ...

    def whole(self, row: int) -> Tensor:
        """Return one image as uint8 [channels, h, w], uncropped, for random crops."""
        ...

    def take(self, rows: Rows) -> Images:
        """Return a view of the store restricted to these rows."""
        ...


class ArrayImages:
    """Images in memory."""

    def __init__(self, pixels: NDArray[np.uint8]) -> None:
        assert pixels.dtype == np.uint8
        _, channels, height, width = pixels.shape
        self.pixels = torch.from_numpy(pixels)
        self.shape = (channels, height, width)

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, rows: Rows) -> Tensor:
        return self.pixels[torch.from_numpy(rows)]

    def whole(self, row: int) -> Tensor:
        return self.pixels[row]

    def take(self, rows: Rows) -> ArrayImages:
        """Return a copy of these rows as a new store."""
        return ArrayImages(self.read(rows).numpy())


class FileImages:
    """Image files, decoded on every access; one that cannot be read raises a `DataError` that names it."""

    def __init__(
        self,
        paths: Sequence[Any],
        side: int,
        *,
        boxes: NDArray[np.float64] | None = None,
        channels: int = 3,
        workers: int = 0,
    ) -> None:
        if boxes is not None and boxes.shape != (len(paths), 4):
            raise DataError(f"boxes: expected [{len(paths)}, 4] (x, y, width, height), got {list(boxes.shape)}.")
        self.paths, self.boxes, self.side, self.workers = tuple(paths), boxes, side, workers
        self.shape = (channels, side, side)

    def __len__(self) -> int:
        return len(self.paths)

    def box(self, row: int) -> list[float] | None:
        return None if self.boxes is None else self.boxes[row].tolist()

    def whole(self, row: int) -> Tensor:
        """Return one full image as uint8 [channels, h, w], its shorter side at most `side`."""
        return read_image(self.paths[row], self.side, box=self.box(row), channels=self.shape[0])

    def read(self, rows: Rows) -> Tensor:
        return stack_squares(self, rows)

    def take(self, rows: Rows) -> FileImages:
        paths = [self.paths[row] for row in rows]
        boxes = None if self.boxes is None else self.boxes[rows]
        return FileImages(paths, self.side, boxes=boxes, channels=self.shape[0], workers=self.workers)


def file_digest(path: Path) -> bytes:
    """Return the SHA-256 of a file, which identifies an image independently of its name and scaling."""
    try:
        with open_file(path) as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}). Fix or remove it, or skip it with --data.skip-broken."
        ) from None


def stack_squares(images: Any, rows: Rows) -> Tensor:
    """Stack the center squares [len(rows), channels, side, side] of a store that defines `whole`."""
    squares = empty_batch(len(rows), *images.shape)

    def fill(index: int) -> None:
        squares[index] = square(images.whole(int(rows[index])), images.shape[1])

    for _ in map_in_threads(fill, range(len(rows)), workers=images.workers):
        pass
    return squares
