"""One image file as bytes of red, green and blue: the only place where files are decoded.

Training, the cache, search and reports all read through here, so they cannot disagree. JPEG files go to torchvision's
decoder, everything else (and everything, where torchvision is not installed) to Pillow; scaling is torch's own in both
cases. (torchvision 0.29 also reads PNG, but ends the process on a damaged one.) The picture is turned upright as its
camera meant (EXIF), transparent pixels are laid over white, 16-bit values keep their high byte, CMYK and palettes
become RGB.
"""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Callable, Sequence
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

VERSION = 1  # raise when any pixel could change, so that old caches are not taken for new ones
MAX_PIXELS = 178_956_970  # of one file; Pillow's own bound against files that unpack to fill the memory
MAX_ASPECT = 4  # a longer picture is cut to its middle: a panorama's thin strip would cost a cache many squares
_DRAFT_FROM = 4  # decode a JPEG at a fraction once it is this many times larger than needed; 2 remain to average over
_PART = 2_000_000  # pixels converted at a time
ORIENTATION = 0x0112  # in EXIF
NO_RANGE = "its pixels are fractions without an agreed range; save the picture with 8 or 16 bits"

Decoder = Literal["auto", "pillow"]
Box = Sequence[float]  # x, y, width, height in pixels of the upright picture


def read_image(
    source: Any, side: int, *, box: Box | None = None, channels: int = 3, decoder: Decoder = "auto"
) -> Tensor:
    """The whole picture, uint8 [channels, h, w], scaled down so that its shorter side is at most `side`.

    source: a path, a PIL image, or the bytes of a file. A smaller picture is left as it is: enlarging it here would
    only cost space.
    box: cut this part out first. channels: 3 (RGB) or 1 (grey).
    A file that is missing, damaged or no image is a `DataError` that names it.
    """
    assert channels in (1, 3)
    try:
        pixels, shrunk = _decode(source, side, box, decoder)
        if box is not None:
            pixels = _cut(pixels, [value / shrunk for value in box])
    except (DataError, MemoryError):
        raise
    except Exception as error:  # decoders raise anything at all on a damaged file
        raise DataError(f"{name_of(source)}: cannot be read as an image ({_reason(error)}).") from None
    pixels = _at_most_aspect(pixels)
    height, width = pixels.shape[1:]
    if min(height, width) > side:
        pixels = scale(pixels, *_short_side(height, width, side))
    return _as_channels(pixels, channels)


def square(whole: Tensor, side: int) -> Tensor:
    """The middle square of a picture [C, h, w] as [C, side, side]."""
    height, width = whole.shape[1:]
    short = min(height, width)
    top, left = round((height - short) / 2), round((width - short) / 2)
    middle = whole[:, top : top + short, left : left + short]
    return middle if short == side else scale(middle, side, side)


def scale(pixels: Tensor, height: int, width: int) -> Tensor:
    """Bytes [C, h, w] as [C, height, width]: bilinear, averaged where it shrinks (antialiased), as Pillow does."""
    if pixels.shape[1:] == (height, width):
        return pixels
    sized = F.interpolate(pixels[None], size=(height, width), mode="bilinear", antialias=True, align_corners=False)
    return sized[0]


def read_size(path: Path | str) -> tuple[int, int]:
    """Width and height as they are stored, from the first bytes of the file: tens of microseconds."""
    try:
        with open(path, "rb") as file:
            found = _sniff(file.read(1 << 16)).size
        if found is None:
            with import_extra("PIL.Image", extra="vision").open(path) as image:
                found = image.size
    except Exception as error:
        raise DataError(f"{path}: cannot be read as an image ({_reason(error)}).") from None
    return found


def stored_shape(width: int, height: int, side: int, *, box: Box | None = None) -> tuple[int, int]:
    """Height and width that `read_whole` gives a picture of this size that stands upright."""
    if box is not None:
        left, top, right, bottom = _inside(box, width, height)
        width, height = max(0, right - left), max(0, bottom - top)
    height, width = _aspect_bound(height, width)
    return (height, width) if min(height, width) <= side else _short_side(height, width, side)


def decoder_name(decoder: Decoder = "auto") -> str:
    """What decodes here and in which version; part of a cache's key, because decoders may differ in a last bit."""
    names = ["torchvision", "pillow"] if decoder == "auto" and _torchvision_io() is not None else ["pillow"]
    return " ".join(f"{name}-{_version(name)}" for name in names)


def name_of(source: Any) -> str:
    return str(source) if isinstance(source, str | os.PathLike) else f"image given as {type(source).__name__}"


# --- decoding --------------------------------------------------------------------------------------------------------


def _decode(source: Any, side: int, box: Box | None, decoder: Decoder) -> tuple[Tensor, float]:
    """Upright bytes [1 or 3, h, w], and how many times smaller than the file they were decoded."""
    if not isinstance(source, str | os.PathLike | bytes):
        return _from_pillow(source), 1.0
    try:
        data = np.array(memoryview(source)) if isinstance(source, bytes) else np.fromfile(source, np.uint8)
    except OSError as error:
        assert not isinstance(source, bytes)
        raise DataError(f"{source}: cannot be read ({error.strerror}).") from None
    head = _sniff(data[: 1 << 20].tobytes())  # a camera's preview may come before the picture's own size
    if head.size is not None and head.size[0] * head.size[1] > MAX_PIXELS:
        raise DataError(
            f"{name_of(source)}: {head.size[0]:,} x {head.size[1]:,} pixels, more than {MAX_PIXELS / 1e6:.0f} million."
            " Shrink the file."
        )
    # How many times larger than needed the part that is kept is stored.
    excess = min(box[2:] if box is not None else head.size) / side if head.kind == "jpeg" and head.size else 1.0
    vision = _torchvision_io() if decoder == "auto" and head.plain and excess < _DRAFT_FROM else None
    if vision is not None:
        try:
            rgb = vision.ImageReadMode.RGB
            return vision.decode_image(torch.from_numpy(data), rgb, apply_exif_orientation=True), 1.0
        except RuntimeError:
            pass  # Pillow reads some files that torchvision does not, and otherwise names the reason
    image = import_extra("PIL.Image", extra="vision").open(io.BytesIO(data.tobytes()))
    width, height = image.size
    if excess >= _DRAFT_FROM:
        image.draft("RGB", (int(2 * width / excess), int(2 * height / excess)))
    return _from_pillow(image), width / image.size[0]


def _from_pillow(image: Any) -> Tensor:
    """A PIL image of any mode, upright, as bytes [1 or 3, h, w]."""
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"{image.width:,} x {image.height:,} pixels, more than {MAX_PIXELS / 1e6:.0f} million")
    image.load()  # a PNG may say only behind its pixels how it stands
    if image.getexif().get(ORIENTATION, 1) != 1:  # else it would be copied as it is
        image = import_extra("PIL.ImageOps", extra="vision").exif_transpose(image)
    if image.mode == "F":
        raise ValueError(NO_RANGE)
    if image.mode.startswith("I"):  # 16 bits; Pillow's own conversion would clip everything above 255 to white
        values = np.asarray(image)
        return torch.from_numpy((values.clip(0, 65535) >> 8).astype(np.uint8))[None]
    if image.mode in {"RGBA", "LA", "PA", "RGBa", "La"} or "transparency" in image.info:
        straight = {"La": "LA", "RGBa": "RGBA"}.get(image.mode)
        image = image.convert(straight) if straight else image
        return _in_parts(image, 3, lambda part: _over_white(_planes(part.convert("RGBA"))))
    mode = "L" if image.mode in {"1", "L"} else "RGB"
    return _in_parts(image, len(mode), lambda part: _planes(part if part.mode == mode else part.convert(mode)))


def _in_parts(image: Any, channels: int, make: Callable[[Any], Tensor]) -> Tensor:
    """make(image), some rows at a time where it is large: each step in between would take its whole size again."""
    width, height = image.size
    rows = max(1, _PART // width)
    if height <= rows:
        return make(image)
    whole = torch.empty((height, width, channels), dtype=torch.uint8).permute(2, 0, 1)
    for top in range(0, height, rows):
        bottom = min(top + rows, height)
        whole[:, top:bottom] = make(image.crop((0, top, width, bottom)))
    return whole


def _planes(image: Any) -> Tensor:
    array = torch.from_numpy(np.array(image))  # a copy: PIL's own memory may not be written to
    return array[None] if array.ndim == 2 else array.permute(2, 0, 1)


def _over_white(rgba: Tensor) -> Tensor:
    colour, alpha = rgba[:3].to(torch.int32), rgba[3:].to(torch.int32)
    return ((colour * alpha + 255 * (255 - alpha) + 127) // 255).to(torch.uint8)


def _as_channels(pixels: Tensor, channels: int) -> Tensor:
    if len(pixels) == channels:
        return pixels
    if channels == 3:
        return pixels.expand(3, -1, -1)
    # Pillow's weights of red, green and blue (ITU-R 601), in whole numbers.
    weights = torch.tensor([19595, 38470, 7471], dtype=torch.int32).view(3, 1, 1)
    return ((pixels.to(torch.int32) * weights).sum(dim=0, keepdim=True) + 0x8000 >> 16).to(torch.uint8)


def _cut(pixels: Tensor, box: Box) -> Tensor:
    """The part inside a box, which may reach over the edge but not lie outside."""
    left, top, right, bottom = _inside(box, pixels.shape[2], pixels.shape[1])
    if right <= left or bottom <= top:
        shown = ", ".join(f"{value:g}" for value in box)
        raise ValueError(f"the box ({shown}) holds none of its {pixels.shape[2]} x {pixels.shape[1]} pixels")
    return pixels[:, top:bottom, left:right]


def _inside(box: Box, width: int, height: int) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of a box as far as it lies in a picture of this size."""
    x, y, box_width, box_height = box
    return max(0, round(x)), max(0, round(y)), min(width, round(x + box_width)), min(height, round(y + box_height))


def _at_most_aspect(pixels: Tensor) -> Tensor:
    height, width = pixels.shape[1:]
    kept_height, kept_width = _aspect_bound(height, width)
    top, left = (height - kept_height) // 2, (width - kept_width) // 2
    return pixels[:, top : top + kept_height, left : left + kept_width]


def _aspect_bound(height: int, width: int) -> tuple[int, int]:
    return min(height, MAX_ASPECT * width), min(width, MAX_ASPECT * height)


def _short_side(height: int, width: int, side: int) -> tuple[int, int]:
    if height <= width:
        return side, int(side * width / height)
    return int(side * height / width), side


# --- what a file is, from its first bytes ----------------------------------------------------------------------------


class _Head:
    """kind; size (width, height) if known; plain: torchvision decodes it as Pillow does."""

    def __init__(self, kind: str, size: tuple[int, int] | None = None, plain: bool = False):
        self.kind, self.size, self.plain = kind, size, plain


def _sniff(head: bytes) -> _Head:
    if head.startswith(b"\xff\xd8"):
        return _sniff_jpeg(head)
    if head.startswith(b"\x89PNG\r\n\x1a\n") and head[12:16] == b"IHDR" and len(head) > 26:
        return _Head("png", (int.from_bytes(head[16:20]), int.from_bytes(head[20:24])))
    return _Head("other")


def _sniff_jpeg(head: bytes) -> _Head:
    at = 2
    while at + 9 < len(head):
        if head[at] != 0xFF:
            break
        marker = head[at + 1]
        if marker == 0xFF or marker == 0x01 or 0xD0 <= marker <= 0xD8:  # padding, or markers without a length
            at += 1 if marker == 0xFF else 2
            continue
        if 0xC0 <= marker <= 0xCF and marker not in {0xC4, 0xC8, 0xCC}:  # start of frame
            size = int.from_bytes(head[at + 7 : at + 9]), int.from_bytes(head[at + 5 : at + 7])
            return _Head("jpeg", size, plain=head[at + 4] == 8 and head[at + 9] in {1, 3})  # 4 components: CMYK
        at += 2 + int.from_bytes(head[at + 2 : at + 4])
    return _Head("jpeg")  # its frame starts after a long preview or profile: left to Pillow


@lru_cache(maxsize=1)
def _torchvision_io() -> ModuleType | None:
    try:
        module = importlib.import_module("torchvision.io")
    except Exception:  # not installed, or built for another torch, which fails in any way it likes
        return None
    # torchvision 0.29 says that its decoders will go in some later release; Pillow then reads everything, and alike.
    return module if hasattr(module, "decode_image") else None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _reason(error: Exception) -> str:
    if "cannot identify image file" in str(error):  # Pillow names a buffer of ours, which helps nobody
        return "no known image format"
    return str(error).splitlines()[0][:120] if str(error) else type(error).__name__
