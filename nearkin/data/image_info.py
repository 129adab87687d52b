"""Everything that the data check needs to know about one image file, from reading it once; and near-duplicates.

These are pairs of similar 64-bit perceptual hashes (dHash), confirmed on 16 x 16 grey thumbnails. dHash stores for
9 x 8 grey values whether the next one to the right is brighter. Scaling, recompression and light edits change a few
bits at most; different photos on plain backgrounds can have similar hashes too.
"""

import hashlib
import io
import os
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin.data.reading import EXIF_ORIENTATION, TooManyPixelsError, open_file, open_header, reason_of
from nearkin.errors import import_extra

HUGE_PIXELS = 50_000_000  # above this an image slows reading down without any benefit
MAX_HAMMING = 3  # hashes that differ in at most this many of 64 bits are candidates
THUMB_SIZE = 16
# Minimum correlation of two candidates' thumbnails. Among CUB's 11,788 photos there are ten candidate pairs: nine
# correlate at 0.996 or more and are duplicates to the eye; the tenth correlates at 0.54 and is not.
MIN_CORRELATION = 0.95
MIN_STD = 3.0  # grey levels; an image with a lower standard deviation has no structure to compare
_BUCKET_ROWS = 2048  # rows of a bucket compared at once, which bounds memory


def hash_image(image: Any) -> tuple[int, NDArray[np.uint8]]:
    """Compute the hash and the thumbnail of a grey image. Returns the 64-bit hash and a uint8 [16, 16] thumbnail."""
    from PIL import Image

    grey, thumb = (np.asarray(image.resize(size, Image.Resampling.BOX)) for size in ((9, 8), (THUMB_SIZE, THUMB_SIZE)))
    return int.from_bytes(np.packbits(grey[:, 1:] > grey[:, :-1]).tobytes()), thumb


def near_pairs(hashes: NDArray[np.uint64], max_hamming: int = MAX_HAMMING) -> NDArray[np.int64]:
    """Find all pairs of rows within a Hamming distance, sorted. Blank images (`is_flat`) would all match."""
    edges = np.linspace(0, 64, max_hamming + 2).astype(int).tolist()
    pairs = [np.empty((0, 2), np.int64)]
    for low, high in pairwise(edges):
        band = (hashes >> np.uint64(low)) & np.uint64(2 ** (high - low) - 1)
        order = np.argsort(band, kind="stable")
        for bucket in np.split(order, np.flatnonzero(np.diff(band[order])) + 1):
            for start in range(0, len(bucket) if len(bucket) > 1 else 0, _BUCKET_ROWS):
                rows = bucket[start : start + _BUCKET_ROWS]
                differing = hashes[rows][:, None] ^ hashes[bucket[start:]][None, :]
                for _ in range(max_hamming):  # np.bitwise_count would need NumPy 2
                    differing &= differing - np.uint64(1)  # clears the lowest bit that is set
                i, j = np.nonzero(np.triu(differing == 0, k=1))
                pairs.append(np.stack([rows[i], bucket[start:][j]], axis=1))
    return np.unique(np.sort(np.concatenate(pairs), axis=1), axis=0)  # a pair is found once for every band it shares


def is_flat(thumbs: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return which thumbnails have too little contrast to be compared."""
    flat: NDArray[np.bool_] = thumbs.reshape(len(thumbs), THUMB_SIZE**2).std(axis=1, dtype=np.float32) < MIN_STD
    return flat


def confirm_pairs(pairs: NDArray[np.int64], thumbs: NDArray[np.uint8]) -> NDArray[np.int64]:
    confirmed = []
    for chunk in np.array_split(pairs, max(1, len(pairs) // 65_536)):
        a, b = (thumbs[chunk[:, i]].reshape(len(chunk), THUMB_SIZE**2).astype(np.float64) for i in (0, 1))
        a, b = a - a.mean(axis=1, keepdims=True), b - b.mean(axis=1, keepdims=True)
        norm = np.sqrt((a * a).sum(axis=1) * (b * b).sum(axis=1))
        confirmed.append(chunk[(a * b).sum(axis=1) >= MIN_CORRELATION * norm])
    return np.concatenate(confirmed)


@dataclass(frozen=True)
class ImageInfo:
    error: str = ""  # broken_link, no_permission, unreadable or too_many_pixels; empty if the image can be used
    reason: str = ""  # the error in words
    is_link: bool = False  # whether the file is a symbolic link
    digest: bytes = b""  # SHA-256 of its content
    size: tuple[int, int] = (0, 0)  # width and height as stored
    mode: str = ""  # pillow's mode, for example RGB or CMYK
    rotated: bool = False  # whether EXIF says that it is stored rotated or flipped
    hash: int = 0  # perceptual hash
    thumb: NDArray[np.uint8] = field(default_factory=lambda: np.zeros((16, 16), np.uint8), repr=False)  # in grey


def inspect_image(path: Path) -> ImageInfo:
    is_link = path.is_symlink()
    try:
        with open_file(path) as file:
            content = file.read()
    except PermissionError:
        return ImageInfo("no_permission", "no permission to read it", is_link)
    except OSError as error:  # also a loop of links, a folder named like an image, a disk error
        reason = error.strerror or str(error)
        if is_link and isinstance(error, FileNotFoundError):
            reason = f"links to {os.readlink(path)}, which does not exist"
        return ImageInfo("broken_link" if is_link and not path.exists() else "unreadable", reason, is_link)
    digest = hashlib.sha256(content).digest()
    try:
        with open_header(io.BytesIO(content)) as image:
            size, mode = image.size, image.mode
            rotated = image.getexif().get(EXIF_ORIENTATION, 1) in range(2, 9)
            # A JPEG is decoded at reduced size, which still reads the whole file and so detects truncation.
            image.draft("L", (64, 64))
            value, thumb = hash_image(import_extra("PIL.ImageOps", extra="images").exif_transpose(_to_grey(image)))
    except TooManyPixelsError as error:
        return ImageInfo("too_many_pixels", str(error), is_link, digest)
    except Exception as error:  # decoders may raise any exception on a damaged file
        is_text = content[:512].isascii() and b"\0" not in content[:512]
        reason = ("a text file, not an image" if is_text else reason_of(error)) if content else "empty file"
        return ImageInfo("unreadable", reason, is_link, digest)
    return ImageInfo("", "", is_link, digest, size, mode, rotated, value, thumb)


def _to_grey(image: Any) -> Any:
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA").convert("RGB")
    if image.mode.startswith("I"):  # Pillow would clip these at 255
        values = np.asarray(image, np.float64)
        low, high = float(values.min()), float(values.max())
        scaled = (values - low) * (255 / (high - low) if high > low else 0.0)
        exif = image.getexif()
        image = import_extra("PIL.Image", extra="images").fromarray(scaled.astype(np.uint8))
        image.getexif().update(exif)
    return image.convert("L")
