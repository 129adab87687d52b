"""`Images`: where a table's pixels come from. Training and evaluation ask for rows, not how they are stored."""

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
from nearkin.data.reading import Decoder, read_image, square
from nearkin.errors import DataError

Rows = NDArray[np.int64]


class Images(Protocol):
    """Rows of equally sized images as bytes.

    A store may also have `whole(row) -> uint8 [channels, h, w]`: the picture with its own proportions, which random
    crops are cut from. `whole_of` gives it for any store.
    """

    shape: tuple[int, int, int]  # channels, height, width

    def __len__(self) -> int: ...

    def read(self, rows: Rows) -> Tensor:
        """These rows, uint8 [len(rows), channels, height, width]."""
        ...

    def take(self, rows: Rows) -> Images:
        """The same store, seen through these rows only."""
        ...


def whole_of(images: Images, row: int) -> Tensor:
    """One picture, uint8 [channels, h, w], uncut where the store keeps it so."""
    if hasattr(images, "whole"):
        return images.whole(row)  # type: ignore[no-any-return]
    return images.read(np.array([row]))[0]


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


class FileImages:
    """Image files, decoded each time they are asked for.

    side: `read` gives the middle square at this side; `whole` the picture with its shorter side at most this.
    boxes: [N, 4] as x, y, width, height in pixels of the upright picture; what lies outside is cut off first.
    workers: threads that decode (the decoders let go of Python's lock); 0 takes one per core. Never changes a pixel.
    A file that cannot be read is a `DataError` that names it; `cache.open_images` can leave such files out instead.
    """

    def __init__(
        self,
        paths: Sequence[Any],
        side: int,
        *,
        boxes: NDArray[np.float64] | None = None,
        channels: int = 3,
        workers: int = 0,
        decoder: Decoder = "auto",
    ) -> None:
        if boxes is not None and boxes.shape != (len(paths), 4):
            raise DataError(f"boxes: expected [{len(paths)}, 4] (x, y, width, height), got {list(boxes.shape)}.")
        self.paths, self.boxes, self.side, self.workers, self.decoder = tuple(paths), boxes, side, workers, decoder
        self.shape = (channels, side, side)

    def __len__(self) -> int:
        return len(self.paths)

    def whole(self, row: int) -> Tensor:
        path = self.paths[row]
        path = Path(path) if isinstance(path, str) else path
        box = None if self.boxes is None else self.boxes[row].tolist()
        return read_image(path, self.side, box=box, channels=self.shape[0], decoder=self.decoder)

    def read(self, rows: Rows) -> Tensor:
        return stack_squares(self, rows)

    def take(self, rows: Rows) -> FileImages:
        return FileImages(
            [self.paths[row] for row in rows],
            self.side,
            boxes=None if self.boxes is None else self.boxes[rows],
            channels=self.shape[0],
            workers=self.workers,
            decoder=self.decoder,
        )


def file_digest(path: Path) -> bytes:
    """SHA-256 of a file's bytes: the identity of an image, whatever it is called and however it is scaled."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}). Mend or remove it, or leave it out: --data.skip-broken."
        ) from None


def stack_squares(images: Any, rows: Rows) -> Tensor:
    """The middle squares of pictures that a store gives one by one."""
    squares = empty_batch(len(rows), *images.shape)

    def fill(place: int) -> None:
        squares[place] = square(images.whole(int(rows[place])), images.shape[1])

    for _ in map_in_threads(fill, range(len(rows)), workers=images.workers):
        pass
    return squares
