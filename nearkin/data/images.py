"""`Images`: random access to a table's pixels by row, independent of how they are stored."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.data.loading import empty_batch, map_in_threads
from nearkin.data.reading import open_file, read_image, square
from nearkin.errors import DataError

Rows = NDArray[np.int64]


class Images(ABC):
    """A store of uint8 images."""

    shape: tuple[int, int, int]  # (channels, height, width) of the images that `read` returns
    workers = 0  # threads that read; 0: one per core

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def whole(self, row: int) -> Tensor:
        """Return one image as uint8 [channels, h, w], uncropped, for random crops."""

    @abstractmethod
    def take(self, rows: Rows) -> Images:
        """Return a view of the store restricted to these rows."""

    def read(self, rows: Rows) -> Tensor:
        """Return the center squares of these rows as uint8 [len(rows), channels, height, width]."""
        squares = empty_batch(len(rows), *self.shape)

        def fill(index: int) -> None:
            squares[index] = square(self.whole(int(rows[index])), self.shape[1])

        for _ in map_in_threads(fill, range(len(rows)), workers=self.workers):
            pass
        return squares


class NoImages(Images):
    """Placeholder for the images of a table of features; reading from it raises a `DataError`."""

    def __init__(self, source: str, count: int) -> None:
        self.source, self.count, self.shape = source, count, (0, 0, 0)

    def __len__(self) -> int:
        return self.count

    def read(self, rows: Rows) -> Tensor:
        raise DataError(f"{self.source}: contains features, not images. Use `table.features`.")

    def whole(self, row: int) -> Tensor:
        return self.read(np.array([row]))

    def take(self, rows: Rows) -> NoImages:
        return NoImages(self.source, len(rows))


class ArrayImages(Images):
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
        return ArrayImages(self.read(rows).numpy())


class FileImages(Images):
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
