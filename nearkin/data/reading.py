"""Image decoding: the only place where image files are decoded, so training, search and reports see the same pixels.

torchvision decodes JPEG (it crashes the process on a damaged PNG), Pillow everything else, or everything if torchvision
is missing. EXIF orientation is applied, transparency goes over white, 16-bit values keep their high byte.
"""

import errno
import importlib
import io
import os
import stat
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nearkin._common.version import installed_version
from nearkin.errors import DataError, import_extra

VERSION = 1  # increase when any pixel could change, which invalidates old caches
MAX_PIXELS = 178_956_970  # per file; Pillow's own limit against decompression bombs
MAX_SIDE = 100_000  # per file, in pixels; a row of a longer one could exhaust the memory
MAX_FILE_BYTES = 1 << 30
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")  # for others Pillow may start programs, as for EPS
MAX_ASPECT = 4  # longer images are center-cropped: a thin panorama would take as much cache space as many squares
MIN_DRAFT_FACTOR = 4  # JPEGs at least this many times too large are decoded at reduced size, at least twice the needed
_PIXELS_PER_STRIP = 2_000_000  # pixels converted at a time
_FREE_READS, _BYTES_PER_READ = 5000, 100  # see ImageData
EXIF_ORIENTATION = 0x0112
_limit_lock = threading.Lock()

Box = Sequence[float]  # x, y, width, height in pixels of the upright image


class TooManyPixelsError(ValueError):
    """Decoding the image could exhaust the memory."""


class ImageData(io.BytesIO):
    """An image file in memory. One made of a million empty parts is refused: Pillow would take seconds to skip them."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._reads_left = _FREE_READS + len(data) // _BYTES_PER_READ

    def read(self, size: int | None = -1, /) -> bytes:
        self._reads_left -= 1
        if self._reads_left < 0:
            raise ValueError("too many parts in the file")
        return super().read(size)


def read_image(source: Any, side: int, *, box: Box | None = None, channels: int = 3) -> Tensor:
    """Read an image, shrunk so that its shorter side is at most `side`; a smaller one is not enlarged."""
    assert channels in (1, 3)
    try:
        pixels, reduction = _decode(source, side, box)
        height, width = pixels.shape[1:]
        if box is not None:  # it may extend beyond the image but must overlap it
            box = [value / reduction for value in box]
            left, top, right, bottom = _clip_box(box, width, height)
            if right <= left or bottom <= top:
                corners = ", ".join(f"{value:g}" for value in box)
                raise ValueError(f"the box ({corners}) contains no pixel of the {width} x {height} image")
            pixels = pixels[:, top:bottom, left:right]
    except Exception as error:  # decoders may raise any exception on a damaged file
        raise _unreadable(source, error) from None
    height, width = pixels.shape[1:]
    new_height, new_width = _limit_aspect(height, width)
    top, left = (height - new_height) // 2, (width - new_width) // 2
    pixels = pixels[:, top : top + new_height, left : left + new_width]
    pixels = resize(pixels, *_resized_shape(new_height, new_width, side))
    if len(pixels) == channels:
        return pixels
    if channels == 3:
        return pixels.expand(3, -1, -1)
    # Pillow's RGB weights (ITU-R 601) in fixed point.
    weights = torch.tensor([19595, 38470, 7471], dtype=torch.int32).view(3, 1, 1)
    return ((pixels.to(torch.int32) * weights).sum(dim=0, keepdim=True) + 0x8000 >> 16).to(torch.uint8)


def read_pixels(source: Any) -> Tensor:
    """Read an image at its full size. Returns uint8 [1 or 3, h, w]."""
    try:
        return _decode(source, MAX_SIDE, None)[0]
    except Exception as error:  # as in `read_image`
        raise _unreadable(source, error) from None


def to_pillow(pixels: Tensor) -> Any:
    """Convert pixels uint8 [1 or 3, h, w] to a PIL image in RGB."""
    array = pixels.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy()
    return import_extra("PIL.Image", extra="images").fromarray(array)


def square(whole: Tensor, side: int) -> Tensor:
    """Crop the center square of an image and resize it. Returns uint8 [C, side, side]."""
    height, width = whole.shape[1:]
    short = min(height, width)
    top, left = round((height - short) / 2), round((width - short) / 2)
    return resize(whole[:, top : top + short, left : left + short], side, side)


def resize(pixels: Tensor, height: int, width: int) -> Tensor:
    """Resize with antialiased bilinear interpolation, as Pillow does. Returns uint8 [C, height, width]."""
    if pixels.shape[1:] == (height, width):
        return pixels
    resized = F.interpolate(pixels[None], size=(height, width), mode="bilinear", antialias=True, align_corners=False)
    return resized[0]


def read_size(path: Path | str) -> tuple[int, int]:
    try:
        with open_file(path) as file, open_header(file) as image:
            width, height = image.size
    except Exception as error:
        raise _unreadable(path, error) from None
    return width, height


def stored_shape(width: int, height: int, side: int, *, box: Box | None = None) -> tuple[int, int]:
    """Compute the size that `read_image` returns for an upright image of this size. Returns height and width."""
    if box is not None:
        left, top, right, bottom = _clip_box(box, width, height)
        width, height = max(0, right - left), max(0, bottom - top)
    return _resized_shape(*_limit_aspect(height, width), side)


def decoder_name() -> str:
    """Return names and versions of the decoders in use, for cache keys: they may differ in the last bit."""
    names = ["torchvision", "pillow"] if _torchvision_io() is not None else ["pillow"]
    return " ".join(f"{name}-{installed_version(name) or 'none'}" for name in names)


def name_of(source: Any) -> str:
    """Return how messages refer to an image source: its path, or the type of an in-memory image."""
    return str(source) if isinstance(source, str | os.PathLike) else f"image given as {type(source).__name__}"


def open_file(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open an image file for reading. Anything but a regular file is refused: a pipe may block, a device never end."""

    def open_checked(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | getattr(os, "O_NONBLOCK", 0))
        info = os.fstat(descriptor)
        if stat.S_ISREG(info.st_mode) and info.st_size <= MAX_FILE_BYTES:
            return descriptor
        os.close(descriptor)
        if stat.S_ISREG(info.st_mode):
            raise OSError(errno.EFBIG, f"{info.st_size / 1e9:.1f} GB, more than {MAX_FILE_BYTES / 1e9:.1f}")
        raise OSError(errno.EINVAL, "not a regular file")

    return open(path, "rb", opener=open_checked)


def open_header(file: Any) -> Any:
    """Open an image with Pillow, which reads only its header. Raises an exception if it is too large to decode."""
    pillow: Any = import_extra("PIL.Image", extra="images")
    pillow.init()  # registers all formats, once
    with _limit_lock:  # Pillow's own limit would give neither width nor height
        limit, pillow.MAX_IMAGE_PIXELS = pillow.MAX_IMAGE_PIXELS, None
        try:
            image = pillow.open(file, formats=FORMATS)
        finally:
            pillow.MAX_IMAGE_PIXELS = limit
    check_pillow(image)
    return image


def check_pillow(image: Any) -> None:
    """Raise an exception for a PIL image that is too large to decode or has no defined range of values."""
    is_long = max(image.size) > MAX_SIDE
    if is_long or image.width * image.height > MAX_PIXELS:
        limit = f"a side of more than {MAX_SIDE:,}" if is_long else f"more than {MAX_PIXELS / 1e6:.0f} million"
        raise TooManyPixelsError(f"{image.width:,} x {image.height:,} pixels, {limit}. Downscale it")
    if image.mode == "F":
        raise ValueError("float pixels have no defined range; save the image with 8 or 16 bits per channel")


def reason_of(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if "cannot identify image file" in str(error):  # Pillow's message names our buffer
        return "unknown image format"
    if isinstance(error, MemoryError):
        return "it does not fit into memory"
    return str(error).splitlines()[0][:120] if str(error) else type(error).__name__


def _unreadable(source: Any, error: Exception) -> DataError:
    return DataError(f"{name_of(source)}: cannot be read ({reason_of(error)}).")


def _decode(source: Any, side: int, box: Box | None) -> tuple[Tensor, float]:
    """Upright pixels [1 or 3, h, w], and the factor by which the decoder reduced them."""
    if isinstance(source, Tensor):  # pixels already
        return source, 1.0
    if not isinstance(source, str | os.PathLike | bytes):
        check_pillow(source)
        return _from_pillow(source), 1.0
    if isinstance(source, bytes):
        data = source
    else:
        with open_file(source) as file:
            data = file.read()
    image = open_header(ImageData(data))
    width, height = image.size
    is_jpeg = image.format in {"JPEG", "MPO"}
    excess = min(box[2:] if box is not None else image.size) / side if is_jpeg else 1.0  # of the used region
    if excess >= MIN_DRAFT_FACTOR:
        image.draft("RGB", (int(2 * width / excess), int(2 * height / excess)))
    elif is_jpeg and image.mode in {"L", "RGB"} and (vision := _torchvision_io()) is not None:
        try:
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            return vision.decode_image(buffer, vision.ImageReadMode.RGB, apply_exif_orientation=True), 1.0
        except RuntimeError:
            pass  # Pillow reads some files that torchvision cannot, and otherwise gives the reason
    return _from_pillow(image), width / image.size[0]


def _from_pillow(image: Any) -> Tensor:
    """Convert a PIL image of any mode to upright pixels [1 or 3, h, w]."""
    image.load()  # a PNG may store its EXIF after the pixels
    if image.getexif().get(EXIF_ORIENTATION, 1) != 1:  # exif_transpose would copy an upright image
        image = import_extra("PIL.ImageOps", extra="images").exif_transpose(image)
    if image.mode.startswith("I"):  # 16 bits; Pillow's conversion would clip everything above 255
        values = np.asarray(image)
        return torch.from_numpy((values.clip(0, 65535) >> 8).astype(np.uint8))[None]
    if image.mode in {"RGBA", "LA", "PA", "RGBa", "La"} or "transparency" in image.info:
        unpremultiplied = {"La": "LA", "RGBa": "RGBA"}.get(image.mode)
        image = image.convert(unpremultiplied) if unpremultiplied else image
        return _convert_in_strips(image, 3, lambda strip: _over_white(_to_tensor(strip.convert("RGBA"))))
    mode = "L" if image.mode in {"1", "L"} else "RGB"
    return _convert_in_strips(image, len(mode), lambda strip: _to_tensor(strip.convert(mode)))


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


def _clip_box(box: Box, width: int, height: int) -> tuple[int, int, int, int]:
    x, y, box_width, box_height = box
    return max(0, round(x)), max(0, round(y)), min(width, round(x + box_width)), min(height, round(y + box_height))


def _limit_aspect(height: int, width: int) -> tuple[int, int]:
    return min(height, MAX_ASPECT * width), min(width, MAX_ASPECT * height)


def _resized_shape(height: int, width: int, side: int) -> tuple[int, int]:
    """Height and width with the shorter side at most `side`."""
    if min(height, width) <= side:
        return height, width
    return (side, int(side * width / height)) if height <= width else (int(side * height / width), side)


@lru_cache(maxsize=1)
def _torchvision_io() -> ModuleType | None:
    try:
        module = importlib.import_module("torchvision.io")
    except Exception:  # not installed, or built for another torch, which may raise any exception
        return None
    # torchvision 0.29 announces the removal of its decoders; Pillow then reads all files, with the same pixels.
    return module if hasattr(module, "decode_image") else None
