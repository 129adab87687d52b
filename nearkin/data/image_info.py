"""Everything that the data check needs to know about one image file, from reading it once."""

from __future__ import annotations

import hashlib
import io
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin.data.perceptual_hash import hash_image
from nearkin.data.reading import EXIF_ORIENTATION, TooManyPixelsError, open_file, open_header, reason_of
from nearkin.errors import import_extra

HUGE_PIXELS = 50_000_000  # above this an image slows reading down without any benefit


@dataclass(frozen=True)
class ImageInfo:
    """Properties of one image file."""

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
    """Read and decode one file."""
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
