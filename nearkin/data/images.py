"""`Images`: random access to a table's pixels (or tensors) by row, independent of how they are stored."""

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.data.loading import empty_batch, map_in_threads
from nearkin.data.reading import MAX_SIDE, open_file, read_image, read_pixels, reason_of, square, to_pillow
from nearkin.errors import DataError

Rows = NDArray[np.int64]


class Images(ABC):
    """A store of uint8 images."""

    shape: tuple[int, int, int]  # (channels, height, width) of the images that `read` returns
    rows: Rows  # number of each image in the data that all views share
    workers = 0  # threads that read; 0: one per core
    is_pixels = True  # False if `read` returns other tensors than images

    def __len__(self) -> int:
        return len(self.rows)

    @abstractmethod
    def whole(self, row: int) -> Tensor:
        """Return one image as uint8 [channels, h, w], uncropped, for random crops."""

    def take(self, rows: Rows) -> Self:
        """Return a view of the store restricted to these rows."""
        view = copy.copy(self)
        view.rows = self.rows[rows]
        return view

    def original(self, row: int) -> Any:
        """Return one image as a PIL image, at its full size where the store has it."""
        return to_pillow(self.whole(row))

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

    is_pixels = False

    def __init__(self, source: str, count: int) -> None:
        self.source, self.rows, self.shape = source, np.arange(count), (0, 0, 0)

    def read(self, rows: Rows) -> Tensor:
        raise DataError(f"{self.source}: contains features, not images. Use `table.features`.")

    def whole(self, row: int) -> Tensor:
        return self.read(np.array([row]))


class ArrayImages(Images):
    """Images uint8 [N, C, H, W] in memory, or tensors of any other type and shape [N, ...] for a module of the user."""

    def __init__(self, pixels: NDArray[Any]) -> None:
        self.pixels = torch.from_numpy(pixels)
        self.shape = pixels.shape[1:]  # three for images, any number for other tensors
        self.rows, self.is_pixels = np.arange(len(pixels)), pixels.dtype == np.uint8

    def read(self, rows: Rows) -> Tensor:
        return self.pixels[torch.from_numpy(rows)]

    def whole(self, row: int) -> Tensor:
        return self.pixels[row]

    def take(self, rows: Rows) -> Self:
        return type(self)(self.read(rows).numpy())


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
        self.rows, self.shape = np.arange(len(paths)), (channels, side, side)

    def box(self, row: int) -> list[float] | None:
        return None if self.boxes is None else self.boxes[row].tolist()

    def whole(self, row: int) -> Tensor:
        """Return one full image as uint8 [channels, h, w], its shorter side at most `side`."""
        return read_image(self.paths[row], self.side, box=self.box(row), channels=self.shape[0])

    def original(self, row: int) -> Any:
        if hasattr(self.paths[row], "getbands"):  # a PIL image already
            return self.paths[row]
        if self.boxes is None:
            return to_pillow(read_pixels(self.paths[row]))
        return to_pillow(read_image(self.paths[row], MAX_SIDE, box=self.box(row)))

    def take(self, rows: Rows) -> Self:
        taken = super().take(rows)
        taken.paths, taken.boxes = tuple(self.paths[r] for r in rows), None if self.boxes is None else self.boxes[rows]
        return taken


class MemoryImages(Images):
    """Images of any size in memory, shrunk as those of files are; the data that they come from has the originals."""

    workers = 1  # the data may not be safe to use in threads

    def __init__(self, pixels: Sequence[Tensor], side: int, original: Callable[[int], Any]) -> None:
        self.pixels, self.get_original, self.rows = pixels, original, np.arange(len(pixels))
        self.shape = (len(pixels[0]), side, side)

    def whole(self, row: int) -> Tensor:
        return self.pixels[int(self.rows[row])]

    def original(self, row: int) -> Any:
        return self.get_original(int(self.rows[row]))


class PreparedImages(Images):
    """Images that a function of the user turns into the inputs of a model; reports and baselines read the pixels."""

    def __init__(self, images: Images, preprocess: Callable[[Any], Any], input_shape: tuple[int, ...]) -> None:
        self.images, self.preprocess, self.input_shape = images, preprocess, input_shape
        self.rows, self.shape, self.workers = np.arange(len(images)), images.shape, images.workers

    def whole(self, row: int) -> Tensor:
        return self.images.whole(int(self.rows[row]))

    def inputs(self, rows: Rows) -> Tensor:
        """Return the inputs of these rows [len(rows), ...]."""
        originals = (self.images.original(int(self.rows[row])) for row in rows)
        return torch.stack([apply_preprocess(self.preprocess, image, self.input_shape) for image in originals])


def apply_preprocess(preprocess: Callable[[Any], Any], image: Any, shape: tuple[int, ...] = ()) -> Tensor:
    """Apply a function of the user to a PIL image, and check the shape of the tensor that it returns, if given."""
    try:
        output = as_tensor(preprocess(image))
    except Exception as error:  # the function may raise any exception
        raise DataError(f"preprocess: failed on an image ({type(error).__name__}: {reason_of(error)}).") from None
    if output.dtype == torch.uint8:
        raise DataError("preprocess: returned uint8 pixels, expected a float tensor. Add ToTensor() or the like.")
    if shape and output.shape != shape:
        raise DataError(
            f"preprocess: returned shape {list(output.shape)} instead of {list(shape)}. "
            "Make it return one shape, with a resize and a crop, or pass example= to Embedder.wrap."
        )
    return output


def as_tensor(values: Any) -> Tensor:
    """Convert what the user gives to a tensor. Arrays are copied: torch rejects reversed and read-only ones."""
    return values.detach() if isinstance(values, Tensor) else torch.from_numpy(np.array(values))


def file_digest(path: Path) -> bytes:
    """Return the SHA-256 of a file, which identifies an image independently of its name and scaling."""
    try:
        with open_file(path) as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        fix = "Fix or remove it, or skip it with --data.skip-broken."
        raise DataError(f"{path}: cannot be read ({error.strerror}). {fix}") from None
