"""Pictures decoded and scaled once, then read from one memory-mapped file: epochs after the first do not decode.

    <cache>/images/<key>.pixels     pixels of all pictures, then an index (JSON), then how long the index is

The pictures keep their proportions, their shorter side at most `side`, so that random crops still vary. The key hashes
what could change a pixel: each file's name below the common folder, size and time of change, its box, the side, the
channels, our version of the preprocessing and the decoder's. Contents are hashed once, when the cache is built, and
kept in its index: a data set's fingerprint is made of them, and to read every byte again at each start is what the
cache exists to save. A file changed without a new size or time is missed, as with make or rsync; the fingerprint is
then still that of the pixels which the cache gives out.

The file is written aside and renamed whole, under a lock, so that two processes build it once and a crash or a full
disk leaves nothing. Opening it checks its length, its index and a sample of pictures; every picture's checksum is
checked again when a process first reads it, and a damaged one is decoded from its own file instead.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin._common.progress import Reporter
from nearkin.data import reading
from nearkin.data.images import FileImages, Images, Rows, file_digest, stack_squares
from nearkin.data.loading import map_in_threads
from nearkin.errors import DataError

OnBroken = Literal["stop", "skip"]
_MAGIC = b"nearkin pixels 2"
_SAMPLE = 16  # pictures whose checksum is checked when a cache is opened
_INDEX_BYTES = 96  # of each picture in the index, roughly
_SPARE_BYTES = 256 * 2**20  # left free on the disk


@dataclass(frozen=True)
class Opened:
    """Images that can all be read: the rows `kept` of the given files. `broken` has the others, with the reasons.

    digests: SHA-256 of each kept file as it was when the cache was built; None without a cache.
    """

    images: Images
    kept: Rows
    broken: dict[int, str]
    digests: list[bytes] | None


def open_images(
    files: FileImages,
    *,
    cache: bool = True,
    folder: Path | None = None,
    limit_gb: float = 64.0,
    on_broken: OnBroken = "stop",
    reporter: Reporter | None = None,
) -> Opened:
    """A store of these files with a cache, built now if there is none, and with unreadable files refused or left out.

    folder: where caches are kept; by default the user's cache folder ($NEARKIN_CACHE).
    limit_gb: refuse to write a larger cache than this, or one that the disk has no room for.
    on_broken: "stop" raises a `DataError` that names files which cannot be read; "skip" leaves them out and says so.
    Without a cache "stop" shows at the first use of such a file, and "skip" decodes every file once to find out.
    """
    reporter = reporter or Reporter(quiet=True)
    rows = np.arange(len(files))
    if not cache:
        if on_broken == "stop":
            return Opened(files, rows, {}, None)
        broken = _find_broken(files, reporter)
    else:
        stored = _open_or_build(files, folder or default_folder(), limit_gb, on_broken, reporter)
        broken = stored.broken
    if broken:
        _report_broken(files, broken, on_broken, reporter)
    kept = np.delete(rows, list(broken))
    images: Images = stored if cache else files
    digests = [stored.digests[row] for row in kept] if cache else None
    return Opened(images.take(kept) if broken else images, kept, broken, digests)


class CachedImages:
    """Rows of a cache file; the same pictures as `files`, which it falls back on where the cache is damaged."""

    def __init__(self, path: Path, files: FileImages, reporter: Reporter) -> None:
        """Raises ValueError when the file is not a whole cache."""
        self.path, self.files, self.workers, self.shape = path, files, files.workers, files.shape
        self._reporter = reporter
        index = _read_index(path)
        self.heights, self.widths, self.checksums = (np.array(index[k], np.int64) for k in ("heights", "widths", "crc"))
        self.broken = {int(row): str(reason) for row, reason in index["broken"].items()}
        hashes = bytes.fromhex(index["sha256"])
        self.digests = [hashes[at : at + 32] for at in range(0, len(hashes), 32)]
        sizes = self.heights * self.widths * self.shape[0]
        self.starts = np.concatenate([[0], np.cumsum(sizes)])
        if not len(self.heights) == len(self.widths) == len(self.checksums) == len(self.digests) == len(files):
            raise ValueError("its index does not fit its files")
        if self.starts[-1] != index["bytes"]:
            raise ValueError("its pixels are not all there")
        # Copy-on-write: torch asks for memory it could write to; nothing here does, so pages stay shared.
        self._bytes = np.memmap(path, np.uint8, mode="c") if index["bytes"] else np.empty(0, np.uint8)
        self._checked = np.zeros(len(files), np.bool_)
        self.rows: Rows = np.arange(len(files))

    def __len__(self) -> int:
        return len(self.rows)

    def whole(self, row: int) -> Tensor:
        at = int(self.rows[row])
        pixels = self._pixels(at)
        if not self._checked[at]:
            if not self._intact(at, pixels):
                self._reporter.info(f"cache: {self.path.name} is damaged at {self.files.paths[at]}; reading the file")
                return self.files.whole(at)
            self._checked[at] = True
        height, width = int(self.heights[at]), int(self.widths[at])
        return torch.from_numpy(pixels).view(height, width, self.shape[0]).permute(2, 0, 1)

    def read(self, rows: Rows) -> Tensor:
        return stack_squares(self, rows)

    def take(self, rows: Rows) -> CachedImages:
        """A view; mapping and checks are shared."""
        view = object.__new__(CachedImages)
        view.__dict__.update(self.__dict__)
        view.rows = self.rows[rows]
        return view

    def damaged(self, rows: Rows | None = None) -> list[int]:
        """Rows of the cache whose pixels are not what was written; all of them are looked at unless rows are given."""
        looked_at = np.arange(len(self.heights)) if rows is None else rows
        return [int(at) for at in looked_at if not self._intact(at, self._pixels(at))]

    def _pixels(self, at: int) -> NDArray[np.uint8]:
        return self._bytes[self.starts[at] : self.starts[at + 1]]

    def _intact(self, at: int, pixels: NDArray[np.uint8]) -> bool:
        return zlib.crc32(pixels.data) == self.checksums[at] if len(pixels) else at in self.broken


def default_folder() -> Path:
    from nearkin.data.glyphs import cache_dir

    return cache_dir() / "images"


def cache_key(files: FileImages) -> str:
    """A hash of everything that could change a pixel. Moving the whole folder keeps it, touching a file does not."""
    paths = [Path(os.path.abspath(path)) for path in files.paths]
    common = Path(os.path.commonpath([path.parent for path in paths])) if paths else Path()
    digest = hashlib.sha256()
    described = (_MAGIC, reading.VERSION, reading.decoder_name(files.decoder), files.side, files.shape[0], len(paths))
    digest.update(repr(described).encode())
    for path in paths:
        try:
            state = path.stat()
            found = (state.st_size, state.st_mtime_ns)
        except OSError:  # named later as a file that cannot be read
            found = (-1, -1)
        digest.update(os.fsencode(path.relative_to(common)) + b"\0" + repr(found).encode())
    if files.boxes is not None:
        digest.update(np.ascontiguousarray(files.boxes, np.float64).tobytes())
    return digest.hexdigest()[:20]


# --- opening and building --------------------------------------------------------------------------------------------


def _open_or_build(
    files: FileImages, folder: Path, limit_gb: float, on_broken: OnBroken, reporter: Reporter
) -> CachedImages:
    path = folder / f"{cache_key(files)}.pixels"
    found = _open_whole(path, files, reporter)
    if found is not None:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock"), reporter):
            found = _open_whole(path, files, reporter)  # another process may have built it meanwhile
            if found is None:
                _build(path, files, limit_gb, reporter)
                found = CachedImages(path, files, reporter)
    except OSError as error:
        raise DataError(
            f"{folder}: cannot write the cache of {len(files):,} images ({error.strerror or error}); "
            "nothing is left of it.\nMake room, set NEARKIN_CACHE to another folder, or go without: --data.no-cache."
        ) from None
    return found


def _open_whole(path: Path, files: FileImages, reporter: Reporter) -> CachedImages | None:
    """The cache at this path, or None when there is none or it is damaged."""
    try:
        found = CachedImages(path, files, reporter)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        reporter.info(f"cache: {path.name} cannot be used ({error}); building it again")
        return None
    sample = np.linspace(0, len(files) - 1, min(_SAMPLE, len(files))).astype(np.int64)
    if found.damaged(sample):
        reporter.info(f"cache: {path.name} is damaged; building it again")
        return None
    read = _read_for_cache(files)
    if any(not read(row)[1] for row in found.broken):  # a permission was given: no time of change tells of it
        reporter.info(f"cache: files of {path.name} that could not be read now can be; building it again")
        return None
    return found


def _build(path: Path, files: FileImages, limit_gb: float, reporter: Reporter) -> None:
    """Decode every file and write the cache aside, then rename it."""
    size = _expected_bytes(files)
    free = shutil.disk_usage(path.parent).free
    reporter.info(
        f"cache: {len(files):,} images at {files.side} pixels, {_gb(size)} in {path.parent} ({_gb(free)} free)"
    )
    if size > limit_gb * 1e9:
        raise DataError(
            f"cache: {len(files):,} images at {files.side} pixels need {_gb(size)}, more than the limit of "
            f"{limit_gb:g} GB.\nRaise --data.max-cache-gb, lower --data.image-size, or go without: --data.no-cache."
        )
    if size + _SPARE_BYTES > free:
        raise DataError(
            f"cache: {len(files):,} images at {files.side} pixels need {_gb(size)}, {path.parent} has {_gb(free)} free."
            "\nMake room, set NEARKIN_CACHE to another folder, or go without: --data.no-cache."
        )
    for leftover in path.parent.glob(f"{path.stem}.*.part"):  # of a process that was killed; we hold the lock
        leftover.unlink(missing_ok=True)
    aside = path.with_name(f"{path.stem}.{os.getpid()}.part")
    heights: list[int] = []
    widths: list[int] = []
    checksums: list[int] = []
    digests: list[bytes] = []
    broken: dict[int, str] = {}
    try:
        with open(aside, "wb") as out, reporter.track("building the cache", len(files), unit="img") as bar:
            for part in map_in_threads(_read_and_hash(files), range(len(files)), workers=files.workers):
                for pixels, reason, digest in part:
                    if reason:
                        broken[len(heights)] = reason
                    heights.append(pixels.shape[0])
                    widths.append(pixels.shape[1])
                    checksums.append(zlib.crc32(pixels.data))
                    digests.append(digest)
                    out.write(pixels.data)
                bar.advance(len(part))
            index: dict[str, Any] = {"heights": heights, "widths": widths, "crc": checksums}
            index |= {"sha256": b"".join(digests).hex(), "broken": broken, "bytes": out.tell()}
            encoded = json.dumps(index).encode()
            trailer = [len(encoded).to_bytes(8), zlib.crc32(encoded).to_bytes(8), _MAGIC]
            out.write(encoded + b"".join(trailer))
            out.flush()
            os.fsync(out.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _read_for_cache(files: FileImages) -> Callable[[int], tuple[NDArray[np.uint8], str]]:
    def read(row: int) -> tuple[NDArray[np.uint8], str]:
        try:
            return np.ascontiguousarray(files.whole(row).permute(1, 2, 0).numpy()), ""
        except DataError as error:
            return np.empty((0, 0, files.shape[0]), np.uint8), str(error)

    return read


def _read_and_hash(files: FileImages) -> Callable[[int], tuple[NDArray[np.uint8], str, bytes]]:
    read = _read_for_cache(files)

    def read_and_hash(row: int) -> tuple[NDArray[np.uint8], str, bytes]:
        pixels, reason = read(row)
        return pixels, reason, bytes(32) if reason else file_digest(files.paths[row])

    return read_and_hash


def _read_index(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        total = file.seek(0, os.SEEK_END)
        tail = 16 + len(_MAGIC)
        if total < tail:
            raise ValueError("it is cut short")
        file.seek(total - tail)
        trailer = file.read(tail)
        length, checksum = int.from_bytes(trailer[:8]), int.from_bytes(trailer[8:16])
        if trailer[16:] != _MAGIC or length > total - tail:
            raise ValueError("it is cut short")
        file.seek(total - tail - length)
        encoded = file.read(length)
    if zlib.crc32(encoded) != checksum:
        raise ValueError("its index is damaged")
    index: dict[str, Any] = json.loads(encoded)
    if index["bytes"] != total - tail - length:
        raise ValueError("its pixels are not all there")
    return index


def _expected_bytes(files: FileImages) -> int:
    """The size of the cache, from the headers of the files: exact to a pixel or two each, as long as no box is cut out
    of a file that is stored turned.
    """
    total = 0
    for part in map_in_threads(_pixels_of(files), range(len(files)), workers=files.workers):
        total += sum(part)
    return total * files.shape[0] + _INDEX_BYTES * len(files)


def _pixels_of(files: FileImages) -> Callable[[int], int]:
    def count(row: int) -> int:
        try:
            box = None if files.boxes is None else files.boxes[row].tolist()
            height, width = reading.stored_shape(*reading.read_size(files.paths[row]), files.side, box=box)
        except DataError:
            return 0
        return height * width

    return count


@contextmanager
def _locked(path: Path, reporter: Reporter) -> Iterator[None]:
    """Hold this lock file; a killed process lets go of it by itself."""
    with open(path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            reporter.info("cache: another process is building it; waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# --- files that cannot be read ---------------------------------------------------------------------------------------


def _find_broken(files: FileImages, reporter: Reporter) -> dict[int, str]:
    broken: dict[int, str] = {}
    read, row = _read_for_cache(files), 0
    with reporter.track("looking for broken images", len(files), unit="img") as bar:
        for part in map_in_threads(lambda row: read(row)[1], range(len(files)), workers=files.workers):
            broken |= {row + i: reason for i, reason in enumerate(part) if reason}
            row += len(part)
            bar.advance(len(part))
    return broken


def _report_broken(files: FileImages, broken: dict[int, str], on_broken: OnBroken, reporter: Reporter) -> None:
    first = "\n".join(f"  {reason}" for reason in list(broken.values())[:3])
    more = f"\n  and {len(broken) - 3:,} more" if len(broken) > 3 else ""
    if on_broken == "stop":
        raise DataError(
            f"{len(broken):,} of {len(files):,} images cannot be read:\n{first}{more}\n"
            "Mend or remove them, or leave them out with --data.skip-broken."
        )
    if len(broken) == len(files):
        raise DataError(f"none of the {len(files):,} images can be read:\n{first}{more}")
    reporter.info(f"data: {len(broken):,} of {len(files):,} images cannot be read and are left out:\n{first}{more}")


def _gb(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 5e6 else f"{size / 1e6:,.2f} MB"
