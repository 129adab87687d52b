"""`look`: everything the guard wants to know of one image file, from one reading of it."""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin._common.progress import Reporter
from nearkin.data.perceptual_hash import hash_image
from nearkin.data.reading import MAX_PIXELS, NO_RANGE, ORIENTATION
from nearkin.errors import import_extra

HUGE = 50_000_000  # pixels above which an image slows reading down for nothing


@dataclass(frozen=True)
class ImageInfo:
    """One file. `trouble` is its kind with `reason` in words, or empty for an image that can be used.

    Kinds: broken_link, no_permission, unreadable, too_many_pixels.
    """

    trouble: str = ""
    reason: str = ""
    link: bool = False
    digest: bytes = b""
    width: int = 0
    height: int = 0
    mode: str = ""
    turned: bool = False
    hash: int = 0
    thumb: NDArray[np.uint8] | None = field(default=None, repr=False)

    @property
    def pixels(self) -> int:
        return self.width * self.height


def inspect_image(path: Path) -> ImageInfo:
    """Read and decode one file. Never raises for what is wrong with the file itself."""
    link = path.is_symlink()
    try:
        content = path.read_bytes()
    except PermissionError:
        return ImageInfo("no_permission", "no permission to read it", link)
    except FileNotFoundError:
        where = f"leads to {os.readlink(path)}, which is not there" if link else "is not there"
        return ImageInfo("broken_link" if link else "unreadable", where, link)
    except OSError as error:  # a loop of links, a folder named like an image, a disk error
        return ImageInfo("broken_link" if link else "unreadable", error.strerror or str(error), link)
    digest = hashlib.sha256(content).digest()
    image_module, ops = import_extra("PIL.Image", extra="vision"), import_extra("PIL.ImageOps", extra="vision")
    width = height = 0
    try:
        with _headers_of_any_size(image_module):
            image = image_module.open(io.BytesIO(content))
        with image:
            (width, height), mode = image.size, image.mode
            if width * height > MAX_PIXELS:
                reason = f"{width} x {height} pixels, more than {MAX_PIXELS / 1e6:.0f} million"
                return ImageInfo("too_many_pixels", reason, link, digest, width, height, mode)
            if mode == "F":
                raise ValueError(NO_RANGE)
            turned = image.getexif().get(ORIENTATION, 1) in range(2, 9)
            # A JPEG is decoded at a fraction of its size, which still reads all of it and so finds a cut file.
            image.draft("L", (64, 64))
            grey = ops.exif_transpose(_grey(image))
            value, thumb = hash_image(grey)
    except Exception as error:  # decoders raise anything at all on a damaged file
        reason = "empty file" if not content else _reason(error, content)
        return ImageInfo("unreadable", reason, link, digest, width, height)
    return ImageInfo("", "", link, digest, width, height, mode, turned, value, thumb)


def inspect_images(paths: Sequence[Path], reporter: Reporter, name: str) -> list[ImageInfo]:
    looks = []
    with reporter.track(f"checking {name}", len(paths), unit="img") as bar, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of odd metadata, one line per file
        for path in paths:
            looks.append(inspect_image(path))
            bar.advance()
    return looks


def _grey(image: Any) -> Any:
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA").convert("RGB")
    if image.mode.startswith("I"):  # Pillow would clip these at 255
        values = np.asarray(image, np.float64)
        low, high = float(values.min()), float(values.max())
        scaled = (values - low) * (255 / (high - low) if high > low else 0.0)
        exif = image.getexif()
        image = import_extra("PIL.Image", extra="vision").fromarray(scaled.astype(np.uint8))
        image.getexif().update(exif)
    return image.convert("L")


def _reason(error: Exception, content: bytes) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "cannot identify image file" in text:
        return "not an image" + (", but text" if content[:512].isascii() and b"\0" not in content[:512] else "")
    return text


@contextmanager
def _headers_of_any_size(image_module: Any) -> Iterator[None]:
    """Pillow refuses to open a decompression bomb; its header alone is harmless and says how large it is."""
    limit, image_module.MAX_IMAGE_PIXELS = image_module.MAX_IMAGE_PIXELS, None
    try:
        yield
    finally:
        image_module.MAX_IMAGE_PIXELS = limit
