"""Cache of decoded and resized images in one memory-mapped file: only the first epoch decodes.

    <cache>/images/<key>.pixels     pixels of all images, then an index (JSON), then the length of the index

Images keep their aspect ratio, with their shorter side at most `side`, so that random crops still vary. The index also
holds the hash of each file: the dataset's fingerprint needs no second reading. A file changed without a new size or
time is missed, as with make or rsync; the fingerprint then still matches the cached pixels. Two processes build the
file only once, and a crash or a full disk leaves nothing behind. A damaged image is decoded from its file instead.
"""

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin._common.files import atomic_file, file_lock, remove_leftovers
from nearkin._common.progress import Reporter
from nearkin._common.words import counted
from nearkin.data import reading
from nearkin.data.cache_entries import cache_dir, mark_used
from nearkin.data.images import FileImages, Images, Rows, file_digest
from nearkin.data.loading import map_with_progress
from nearkin.errors import DataError

T = TypeVar("T")
OnBroken = Literal["stop", "skip"]
_MAGIC = b"nearkin pixels 2"
_SAMPLE_SIZE = 16  # images whose checksum is checked when a cache is opened
_INDEX_BYTES = 96  # per image, approximately
_MIN_FREE_BYTES = 256 * 2**20  # left free on the disk
_FREE_SPACE = "Free some space, set NEARKIN_CACHE to another folder, or disable the cache: --data.no-cache."


@dataclass(frozen=True)
class Opened:
    """A store of readable images."""

    images: Images  # the store
    kept: Rows  # rows of the given files that it contains
    broken: dict[int, str]  # the other rows, with the reasons
    digests: list[bytes] | None  # SHA-256 of each file in `kept` when the cache was built; None without a cache


def open_images(
    files: FileImages,
    *,
    cache: bool = True,
    folder: Path | None = None,
    limit_gb: float = 64.0,
    on_broken: OnBroken = "stop",
    reporter: Reporter | None = None,
) -> Opened:
    """Open image files through a cache, which is built if missing."""
    reporter = reporter or Reporter(quiet=True)
    images: Images = files
    broken: dict[int, str] = {}
    if cache:
        images = cached = _open_or_build(files, folder or cache_dir() / "images", limit_gb, reporter)
        broken = cached.broken
    elif on_broken == "skip":
        problems = _map_rows(lambda row: _read(files, row)[1], files, reporter, "looking for unreadable images")
        broken = {row: problem for row, problem in enumerate(problems) if problem}
    if broken:
        reasons = "\n".join(f"  {reason}" for reason in list(broken.values())[:3])
        reasons += f"\n  and {len(broken) - 3:,} more" if len(broken) > 3 else ""
        if on_broken == "stop":
            raise DataError(
                f"{len(broken):,} of {counted(len(files), 'image')} cannot be read:\n{reasons}\n"
                "Fix or remove them, or skip them with --data.skip-broken."
            )
        if len(broken) == len(files):
            raise DataError(f"none of the {len(files):,} images can be read:\n{reasons}")
        reporter.info(f"data: skipping {len(broken):,} of {len(files):,} images that cannot be read:\n{reasons}")
    kept = np.delete(np.arange(len(files)), list(broken))
    digests = [images.digests[row] for row in kept] if isinstance(images, CachedImages) else None
    return Opened(images.take(kept) if broken else images, kept, broken, digests)


class CachedImages(Images):
    """Images of a cache file; damaged ones are read from `files`."""

    def __init__(self, path: Path, files: FileImages, reporter: Reporter) -> None:
        self.path, self.files, self.workers, self.shape = path, files, files.workers, files.shape
        self._reporter = reporter
        index = _read_index(path)
        self.heights, self.widths, self.checksums = (np.array(index[k], np.int64) for k in ("heights", "widths", "crc"))
        self.broken = {int(row): str(reason) for row, reason in index["broken"].items()}
        hashes = bytes.fromhex(index["sha256"])
        self.digests = [hashes[start : start + 32] for start in range(0, len(hashes), 32)]
        self.starts = np.concatenate([[0], np.cumsum(self.heights * self.widths * self.shape[0])])
        if not len(self.heights) == len(self.widths) == len(self.checksums) == len(self.digests) == len(files):
            raise ValueError("the index does not match the files")
        if self.starts[-1] != index["bytes"]:
            raise ValueError("pixels are missing")
        # Copy-on-write, because torch requires writable memory; nothing writes to it, so pages stay shared.
        self._bytes = np.memmap(path, np.uint8, mode="c") if index["bytes"] else np.empty(0, np.uint8)
        self._verified = np.zeros(len(files), np.bool_)
        self.rows: Rows = np.arange(len(files))

    def whole(self, row: int) -> Tensor:
        """Return one full image as uint8 [channels, h, w], its shorter side at most `side`."""
        index = int(self.rows[row])
        if not self._verified[index]:
            if self.damaged(np.array([index])):
                path = self.files.paths[index]
                self._reporter.info(f"cache: {self.path.name} is damaged at {path}; reading the file instead")
                return self.files.whole(index)
            self._verified[index] = True
        height, width = int(self.heights[index]), int(self.widths[index])
        return torch.from_numpy(self._pixels(index)).view(height, width, self.shape[0]).permute(2, 0, 1)

    def original(self, row: int) -> Any:
        return self.files.original(int(self.rows[row]))

    def damaged(self, indices: Rows) -> list[int]:
        """Return which of these images have pixels that do not match their checksum."""
        return [int(i) for i in indices if zlib.crc32(self._pixels(i).data) != self.checksums[i]]

    def _pixels(self, index: int) -> NDArray[np.uint8]:
        return self._bytes[self.starts[index] : self.starts[index + 1]]


def cache_key(files: FileImages) -> str:
    """Hash everything that could change a pixel. Moving the whole folder keeps the key, touching a file does not."""
    paths = [Path(os.path.abspath(path)) for path in files.paths]
    common = _common_folder(files)
    digest = hashlib.sha256()
    settings = (_MAGIC, reading.VERSION, reading.decoder_name(), files.side, files.shape[0], len(paths))
    digest.update(repr(settings).encode())
    for path in paths:
        try:
            status = path.stat()
            size_and_time = (status.st_size, status.st_mtime_ns)
        except OSError:  # reported later as a file that cannot be read
            size_and_time = (-1, -1)
        digest.update(os.fsencode(path.relative_to(common).as_posix()) + b"\0" + repr(size_and_time).encode())
    if files.boxes is not None:
        digest.update(np.ascontiguousarray(files.boxes, np.float64).tobytes())
    return digest.hexdigest()[:20]


def _common_folder(files: FileImages) -> Path:
    folders = [os.path.dirname(os.path.abspath(path)) for path in files.paths]
    return Path(os.path.commonpath(folders)) if folders else Path()


def _open_or_build(files: FileImages, folder: Path, limit_gb: float, reporter: Reporter) -> CachedImages:
    path = folder / f"{cache_key(files)}.pixels"
    images = _open_valid(path, files, reporter)
    if images is None:
        try:
            images = _build(path, files, limit_gb, reporter)
        except OSError as error:
            raise DataError(
                f"{folder}: cannot write the cache of {len(files):,} images ({error.strerror or error}); the partial "
                f"file was removed.\n{_FREE_SPACE}"
            ) from None
    mark_used(path, f"{counted(len(files), 'image')} at {files.side} pixels, {_common_folder(files)}")
    return images


def _build(path: Path, files: FileImages, limit_gb: float, reporter: Reporter) -> CachedImages:
    path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        lock = path.with_suffix(".lock")
        if not stack.enter_context(file_lock(lock)):
            reporter.info("cache: another process is building it; waiting")
            stack.enter_context(file_lock(lock, wait=True))
        images = _open_valid(path, files, reporter)  # another process may have built it meanwhile
        if images is not None:
            return images
        remove_leftovers(path.parent)
        size = _check_size(path.parent, files, limit_gb, reporter)
        with atomic_file(path, size=size) as temporary, open(temporary, "wb") as out:
            _write(out, files, reporter)
        return CachedImages(path, files, reporter)


def _open_valid(path: Path, files: FileImages, reporter: Reporter) -> CachedImages | None:
    """The cache at this path, or None if it is missing, damaged or outdated."""
    try:
        images = CachedImages(path, files, reporter)
        sample = np.linspace(0, len(files) - 1, min(_SAMPLE_SIZE, len(files))).astype(np.int64)
        if images.damaged(sample):
            raise ValueError("pixels are damaged")
        # Changed permissions do not change the modification time.
        if any(not _read(files, row)[1] for row in images.broken):
            raise ValueError("files that could not be read now can be")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        reporter.info(f"cache: {path.name} is invalid ({error}); rebuilding")
        return None
    return images


def _check_size(folder: Path, files: FileImages, limit_gb: float, reporter: Reporter) -> int:
    """Return the size that the cache will have, after checking that there is room for it."""
    size = _expected_bytes(files, reporter)
    free = shutil.disk_usage(folder).free
    images = f"{counted(len(files), 'image')} at {files.side} pixels"
    reporter.info(f"cache: {images}, {_gb(size)} in {folder} ({_gb(free)} free)")
    if size > limit_gb * 1e9:
        raise DataError(
            f"cache: {images} need {_gb(size)}, more than the limit of {limit_gb:g} GB.\n"
            "Raise --data.max-cache-gb, lower --data.image-size, or disable the cache: --data.no-cache."
        )
    if size + _MIN_FREE_BYTES > free:
        raise DataError(f"No space left on {folder}: {images} need {_gb(size)}, {_gb(free)} are free.\n{_FREE_SPACE}")
    return size


def _expected_bytes(files: FileImages, reporter: Reporter) -> int:
    """Size by the headers of the files; off by a pixel or two per image, or more if a rotated file is cropped."""

    def num_pixels(row: int) -> int:
        try:
            height, width = reading.stored_shape(*reading.read_size(files.paths[row]), files.side, box=files.box(row))
        except DataError:
            return 0
        return height * width

    total = sum(_map_rows(num_pixels, files, reporter, "reading the sizes of the images"))
    return total * files.shape[0] + _INDEX_BYTES * len(files)


def _write(out: BinaryIO, files: FileImages, reporter: Reporter) -> None:
    def read_and_hash(row: int) -> tuple[NDArray[np.uint8], str, bytes]:
        pixels, reason = _read(files, row)
        return pixels, reason, bytes(32) if reason else file_digest(files.paths[row])

    index: dict[str, Any] = {"heights": [], "widths": [], "crc": []}
    digests: list[bytes] = []
    broken: dict[int, str] = {}
    for pixels, reason, digest in _map_rows(read_and_hash, files, reporter, "building the cache"):
        if reason:
            broken[len(digests)] = reason
        for key, value in zip(index, (*pixels.shape[:2], zlib.crc32(pixels.data)), strict=True):
            index[key].append(value)
        digests.append(digest)
        out.write(pixels.data)
    index |= {"sha256": b"".join(digests).hex(), "broken": broken, "bytes": out.tell()}
    encoded = json.dumps(index).encode()
    out.write(encoded + len(encoded).to_bytes(8) + zlib.crc32(encoded).to_bytes(8) + _MAGIC)


def _map_rows(work: Callable[[int], T], files: FileImages, reporter: Reporter, label: str) -> Iterator[T]:
    return map_with_progress(work, range(len(files)), reporter, label, workers=files.workers)


def _read(files: FileImages, row: int) -> tuple[NDArray[np.uint8], str]:
    """The pixels [h, w, channels] of a row, or no pixels and why they cannot be read."""
    try:
        return np.ascontiguousarray(files.whole(row).permute(1, 2, 0).numpy()), ""
    except DataError as error:
        return np.empty((0, 0, files.shape[0]), np.uint8), str(error)


def _read_index(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        trailer_size = 16 + len(_MAGIC)
        pixels_and_index = file.seek(0, os.SEEK_END) - trailer_size
        file.seek(max(0, pixels_and_index))
        trailer = file.read()
        length, checksum = int.from_bytes(trailer[:8]), int.from_bytes(trailer[8:16])
        if trailer[16:] != _MAGIC or length > pixels_and_index:
            raise ValueError("truncated")
        file.seek(pixels_and_index - length)
        encoded = file.read(length)
    if zlib.crc32(encoded) != checksum:
        raise ValueError("the index is damaged")
    index: dict[str, Any] = json.loads(encoded)
    if index["bytes"] != pixels_and_index - length:
        raise ValueError("pixels are missing")
    return index


def _gb(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 5e6 else f"{size / 1e6:,.2f} MB"
