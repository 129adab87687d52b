"""Everything that the data check needs to know about one image file, from reading it once."""

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
from nearkin.data.reading import EXIF_ORIENTATION, FLOAT_PIXELS, MAX_PIXELS
from nearkin.errors import import_extra

HUGE_PIXELS = 50_000_000  # above this an image slows reading down without any benefit


@dataclass(frozen=True)
class ImageInfo:
    """Properties of one image file."""

    error: str = ""  # broken_link, no_permission, unreadable or too_many_pixels; empty if the image can be used
    reason: str = ""  # the error in words
    is_link: bool = False  # whether the file is a symbolic link
    digest: bytes = b""  # SHA-256 of its content
    width: int = 0  # width as stored
    height: int = 0  # height as stored
    mode: str = ""  # pillow's mode, for example RGB or CMYK
    rotated: bool = False  # whether EXIF says that it is stored rotated or flipped
    hash: int = 0  # perceptual hash
    thumb: NDArray[np.uint8] | None = field(default=None, repr=False)  # grey thumbnail [16, 16]

    @property
    def pixels(self) -> int:
        """Number of pixels."""
        return self.width * self.height


def inspect_image(path: Path) -> ImageInfo:
    """Read and decode one file."""
    is_link = path.is_symlink()
    try:
        content = path.read_bytes()
    except PermissionError:
        return ImageInfo("no_permission", "no permission to read it", is_link)
    except FileNotFoundError:
        reason = f"links to {os.readlink(path)}, which does not exist" if is_link else "does not exist"
        return ImageInfo("broken_link" if is_link else "unreadable", reason, is_link)
    except OSError as error:  # a loop of links, a folder named like an image, a disk error
        return ImageInfo("broken_link" if is_link else "unreadable", error.strerror or str(error), is_link)
    digest = hashlib.sha256(content).digest()
    image_module, ops = import_extra("PIL.Image", extra="images"), import_extra("PIL.ImageOps", extra="images")
    width = height = 0
    try:
        with _no_pixel_limit(image_module):
            image = image_module.open(io.BytesIO(content))
        with image:
            (width, height), mode = image.size, image.mode
            if width * height > MAX_PIXELS:
                reason = f"{width} x {height} pixels, more than {MAX_PIXELS / 1e6:.0f} million"
                return ImageInfo("too_many_pixels", reason, is_link, digest, width, height, mode)
            if mode == "F":
                raise ValueError(FLOAT_PIXELS)
            rotated = image.getexif().get(EXIF_ORIENTATION, 1) in range(2, 9)
            # A JPEG is decoded at reduced size, which still reads the whole file and so detects truncation.
            image.draft("L", (64, 64))
            grey = ops.exif_transpose(_to_grey(image))
            value, thumb = hash_image(grey)
    except Exception as error:  # decoders may raise any exception on a damaged file
        reason = "empty file" if not content else _reason(error, content)
        return ImageInfo("unreadable", reason, is_link, digest, width, height)
    return ImageInfo("", "", is_link, digest, width, height, mode, rotated, value, thumb)


def inspect_images(paths: Sequence[Path], reporter: Reporter, name: str) -> list[ImageInfo]:
    """Read and decode files with a progress bar. Returns the properties of each file, in order."""
    infos = []
    with reporter.track(f"checking {name}", len(paths), unit="img") as bar, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns about unusual metadata, one line per file
        for path in paths:
            infos.append(inspect_image(path))
            bar.advance()
    return infos


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


def _reason(error: Exception, content: bytes) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "cannot identify image file" in text:
        is_text = content[:512].isascii() and b"\0" not in content[:512]
        return "a text file, not an image" if is_text else "not an image"
    return text


@contextmanager
def _no_pixel_limit(image_module: Any) -> Iterator[None]:
    """Let Pillow open a decompression bomb: reading only its header, which gives the size, is harmless."""
    limit, image_module.MAX_IMAGE_PIXELS = image_module.MAX_IMAGE_PIXELS, None
    try:
        yield
    finally:
        image_module.MAX_IMAGE_PIXELS = limit
