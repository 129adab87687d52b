"""Image decoding: the only place where image files are decoded.

Training, the cache, search and reports all read images here, so they see the same pixels. JPEG files are decoded by
torchvision, other formats by Pillow, which decodes everything if torchvision is not installed; torch resizes in both
cases. (torchvision 0.29 also reads PNG, but crashes the process on a damaged one.) EXIF orientation is applied,
transparency is composited over white, 16-bit values keep their high byte, CMYK and palettes become RGB.
"""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nearkin.errors import DataError, import_extra

VERSION = 1  # increase when any pixel could change, which invalidates old caches
MAX_PIXELS = 178_956_970  # per file; Pillow's own limit against decompression bombs
MAX_ASPECT = 4  # longer images are center-cropped: a thin panorama would take as much cache space as many squares
_MIN_DRAFT_FACTOR = 4  # JPEGs at least this many times too large are decoded at reduced size, at least twice the needed
_PIXELS_PER_STRIP = 2_000_000  # pixels converted at a time
EXIF_ORIENTATION = 0x0112
FLOAT_PIXELS = "float pixels have no defined range; save the image with 8 or 16 bits per channel"

Decoder = Literal["auto", "pillow"]
Box = Sequence[float]  # x, y, width, height in pixels of the upright image


def read_image(
    source: Any, side: int, *, box: Box | None = None, channels: int = 3, decoder: Decoder = "auto"
) -> Tensor:
    """Read an image and shrink it so that its shorter side is at most `side`.

    A smaller image is not enlarged, which would only cost space.
    """
    assert channels in (1, 3)
    try:
        pixels, reduction = _decode(source, side, box, decoder)
        if box is not None:
            pixels = _crop(pixels, [value / reduction for value in box])
    except (DataError, MemoryError):
        raise
    except Exception as error:  # decoders may raise any exception on a damaged file
        raise DataError(f"{name_of(source)}: cannot be read as an image ({_reason(error)}).") from None
    pixels = _limit_aspect(pixels)
    height, width = pixels.shape[1:]
    if min(height, width) > side:
        pixels = resize(pixels, *_resized_shape(height, width, side))
    return _to_channels(pixels, channels)


def square(whole: Tensor, side: int) -> Tensor:
    """Crop the center square of an image and resize it. Returns uint8 [C, side, side]."""
    height, width = whole.shape[1:]
    short = min(height, width)
    top, left = round((height - short) / 2), round((width - short) / 2)
    center = whole[:, top : top + short, left : left + short]
    return center if short == side else resize(center, side, side)


def resize(pixels: Tensor, height: int, width: int) -> Tensor:
    """Resize with antialiased bilinear interpolation, as Pillow does. Returns uint8 [C, height, width]."""
    if pixels.shape[1:] == (height, width):
        return pixels
    resized = F.interpolate(pixels[None], size=(height, width), mode="bilinear", antialias=True, align_corners=False)
    return resized[0]


def read_size(path: Path | str) -> tuple[int, int]:
    """Read the size of an image from its header, in tens of microseconds."""
    try:
        with open(path, "rb") as file:
            size = _sniff(file.read(1 << 16)).size
        if size is None:
            with import_extra("PIL.Image", extra="images").open(path) as image:
                size = image.size
    except Exception as error:
        raise DataError(f"{path}: cannot be read as an image ({_reason(error)}).") from None
    return size


def stored_shape(width: int, height: int, side: int, *, box: Box | None = None) -> tuple[int, int]:
    """Compute the size that `read_image` returns for an upright image of this size. Returns height and width."""
    if box is not None:
        left, top, right, bottom = _clip_box(box, width, height)
        width, height = max(0, right - left), max(0, bottom - top)
    height, width = _limit_aspect_shape(height, width)
    return (height, width) if min(height, width) <= side else _resized_shape(height, width, side)


def decoder_name(decoder: Decoder = "auto") -> str:
    """Return names and versions of the decoders in use.

    It is part of the cache key, because decoders may differ in the last bit.
    """
    names = ["torchvision", "pillow"] if decoder == "auto" and _torchvision_io() is not None else ["pillow"]
    return " ".join(f"{name}-{_version(name)}" for name in names)


def name_of(source: Any) -> str:
    """Return how messages refer to an image source: its path, or the type of an in-memory image."""
    return str(source) if isinstance(source, str | os.PathLike) else f"image given as {type(source).__name__}"


# --- decoding --------------------------------------------------------------------------------------------------------


def _decode(source: Any, side: int, box: Box | None, decoder: Decoder) -> tuple[Tensor, float]:
    """Upright pixels [1 or 3, h, w], and the factor by which the decoder reduced them."""
    if not isinstance(source, str | os.PathLike | bytes):
        return _from_pillow(source), 1.0
    try:
        data = np.array(memoryview(source)) if isinstance(source, bytes) else np.fromfile(source, np.uint8)
    except OSError as error:
        assert not isinstance(source, bytes)
        raise DataError(f"{source}: cannot be read ({error.strerror}).") from None
    head = _sniff(data[: 1 << 20].tobytes())  # a camera's preview may precede the image's own header
    if head.size is not None and head.size[0] * head.size[1] > MAX_PIXELS:
        raise DataError(
            f"{name_of(source)}: {head.size[0]:,} x {head.size[1]:,} pixels, more than {MAX_PIXELS / 1e6:.0f} million."
            " Downscale it."
        )
    # How many times larger than needed the used region is.
    excess = min(box[2:] if box is not None else head.size) / side if head.format == "jpeg" and head.size else 1.0
    vision = (
        _torchvision_io() if decoder == "auto" and head.torchvision_compatible and excess < _MIN_DRAFT_FACTOR else None
    )
    if vision is not None:
        try:
            rgb = vision.ImageReadMode.RGB
            return vision.decode_image(torch.from_numpy(data), rgb, apply_exif_orientation=True), 1.0
        except RuntimeError:
            pass  # Pillow reads some files that torchvision cannot, and otherwise gives the reason
    image = import_extra("PIL.Image", extra="images").open(io.BytesIO(data.tobytes()))
    width, height = image.size
    if excess >= _MIN_DRAFT_FACTOR:
        image.draft("RGB", (int(2 * width / excess), int(2 * height / excess)))
    return _from_pillow(image), width / image.size[0]


def _from_pillow(image: Any) -> Tensor:
    """Convert a PIL image of any mode to upright pixels [1 or 3, h, w]."""
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"{image.width:,} x {image.height:,} pixels, more than {MAX_PIXELS / 1e6:.0f} million")
    image.load()  # a PNG may store its EXIF after the pixels
    if image.getexif().get(EXIF_ORIENTATION, 1) != 1:  # exif_transpose would copy an upright image
        image = import_extra("PIL.ImageOps", extra="images").exif_transpose(image)
    if image.mode == "F":
        raise ValueError(FLOAT_PIXELS)
    if image.mode.startswith("I"):  # 16 bits; Pillow's conversion would clip everything above 255
        values = np.asarray(image)
        return torch.from_numpy((values.clip(0, 65535) >> 8).astype(np.uint8))[None]
    if image.mode in {"RGBA", "LA", "PA", "RGBa", "La"} or "transparency" in image.info:
        unpremultiplied = {"La": "LA", "RGBa": "RGBA"}.get(image.mode)
        image = image.convert(unpremultiplied) if unpremultiplied else image
        return _convert_in_strips(image, 3, lambda strip: _over_white(_to_tensor(strip.convert("RGBA"))))
    mode = "L" if image.mode in {"1", "L"} else "RGB"
    return _convert_in_strips(
        image, len(mode), lambda strip: _to_tensor(strip if strip.mode == mode else strip.convert(mode))
    )


def _convert_in_strips(image: Any, channels: int, convert: Callable[[Any], Tensor]) -> Tensor:
    """Compute convert(image) a strip of rows at a time, because each intermediate result is as large as its input."""
    width, height = image.size
    rows = max(1, _PIXELS_PER_STRIP // width)
    if height <= rows:
        return convert(image)
    converted = torch.empty((height, width, channels), dtype=torch.uint8).permute(2, 0, 1)
    for top in range(0, height, rows):
        bottom = min(top + rows, height)
        converted[:, top:bottom] = convert(image.crop((0, top, width, bottom)))
    return converted


def _to_tensor(image: Any) -> Tensor:
    array = torch.from_numpy(np.array(image))  # a copy: PIL's own memory is read-only
    return array[None] if array.ndim == 2 else array.permute(2, 0, 1)


def _over_white(rgba: Tensor) -> Tensor:
    rgb, alpha = rgba[:3].to(torch.int32), rgba[3:].to(torch.int32)
    return ((rgb * alpha + 255 * (255 - alpha) + 127) // 255).to(torch.uint8)


def _to_channels(pixels: Tensor, channels: int) -> Tensor:
    if len(pixels) == channels:
        return pixels
    if channels == 3:
        return pixels.expand(3, -1, -1)
    # Pillow's RGB weights (ITU-R 601) in fixed point.
    weights = torch.tensor([19595, 38470, 7471], dtype=torch.int32).view(3, 1, 1)
    return ((pixels.to(torch.int32) * weights).sum(dim=0, keepdim=True) + 0x8000 >> 16).to(torch.uint8)


def _crop(pixels: Tensor, box: Box) -> Tensor:
    """Crop to a box, which may extend beyond the image but must overlap it."""
    left, top, right, bottom = _clip_box(box, pixels.shape[2], pixels.shape[1])
    if right <= left or bottom <= top:
        corners = ", ".join(f"{value:g}" for value in box)
        raise ValueError(f"the box ({corners}) contains no pixel of the {pixels.shape[2]} x {pixels.shape[1]} image")
    return pixels[:, top:bottom, left:right]


def _clip_box(box: Box, width: int, height: int) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of a box, clipped to an image of this size."""
    x, y, box_width, box_height = box
    return max(0, round(x)), max(0, round(y)), min(width, round(x + box_width)), min(height, round(y + box_height))


def _limit_aspect(pixels: Tensor) -> Tensor:
    height, width = pixels.shape[1:]
    new_height, new_width = _limit_aspect_shape(height, width)
    top, left = (height - new_height) // 2, (width - new_width) // 2
    return pixels[:, top : top + new_height, left : left + new_width]


def _limit_aspect_shape(height: int, width: int) -> tuple[int, int]:
    return min(height, MAX_ASPECT * width), min(width, MAX_ASPECT * height)


def _resized_shape(height: int, width: int, side: int) -> tuple[int, int]:
    """Height and width with the shorter side at `side`."""
    if height <= width:
        return side, int(side * width / height)
    return int(side * height / width), side


# --- file headers ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Header:
    """File format, (width, height) if known, and whether torchvision decodes the file as Pillow does."""

    format: str
    size: tuple[int, int] | None = None
    torchvision_compatible: bool = False


def _sniff(head: bytes) -> _Header:
    if head.startswith(b"\xff\xd8"):
        return _sniff_jpeg(head)
    if head.startswith(b"\x89PNG\r\n\x1a\n") and head[12:16] == b"IHDR" and len(head) > 26:
        return _Header("png", (int.from_bytes(head[16:20]), int.from_bytes(head[20:24])))
    return _Header("other")


def _sniff_jpeg(head: bytes) -> _Header:
    i = 2
    while i + 9 < len(head):
        if head[i] != 0xFF:
            break
        marker = head[i + 1]
        if marker == 0xFF or marker == 0x01 or 0xD0 <= marker <= 0xD8:  # padding, or markers without a length
            i += 1 if marker == 0xFF else 2
            continue
        if 0xC0 <= marker <= 0xCF and marker not in {0xC4, 0xC8, 0xCC}:  # start of frame
            size = int.from_bytes(head[i + 7 : i + 9]), int.from_bytes(head[i + 5 : i + 7])
            eight_bit, components = head[i + 4] == 8, head[i + 9]
            return _Header("jpeg", size, torchvision_compatible=eight_bit and components in {1, 3})  # 4 is CMYK
        i += 2 + int.from_bytes(head[i + 2 : i + 4])
    return _Header("jpeg")  # its frame starts after a long preview or profile: left to Pillow


@lru_cache(maxsize=1)
def _torchvision_io() -> ModuleType | None:
    try:
        module = importlib.import_module("torchvision.io")
    except Exception:  # not installed, or built for another torch, which may raise any exception
        return None
    # torchvision 0.29 announces the removal of its decoders; Pillow then reads all files, with the same pixels.
    return module if hasattr(module, "decode_image") else None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _reason(error: Exception) -> str:
    if "cannot identify image file" in str(error):  # Pillow's message names our buffer
        return "unknown image format"
    return str(error).splitlines()[0][:120] if str(error) else type(error).__name__
