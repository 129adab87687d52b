"""`glyphs`: a small benchmark drawn from the fonts that matplotlib ships; nothing is downloaded.

A class is a character; an image is one drawing of it in one of 16 fonts, distorted with a seeded generator. Of the
characters that look alike across scripts (Latin A, Greek Alpha, Cyrillic A), only the first is used.
"""

import contextlib
import hashlib
import importlib.util
import math
import unicodedata
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin._common.files import NPZ_ERRORS, atomic_file
from nearkin.data.cache_entries import cache_dir
from nearkin.data.images import ArrayImages
from nearkin.data.table import Table
from nearkin.errors import MissingExtraError, import_extra

SIZE = 40  # height and width in pixels
VERSION = 1  # increase when any drawing changes, so that old caches and runs are not mistaken for new ones
IMAGES_PER_FONT = 3  # of each character
# Two characters whose blurred, size-normalised drawings are this similar (mean cosine over the fonts) cannot be
# distinguished once distorted: A/Alpha 1.00, n/Cyrillic pe 0.97, S/s 0.95, O/o 0.93. Still distinct: C/G 0.87,
# 3/8 0.83, O/Q 0.82.
MAX_SIMILARITY = 0.92
_FONT_SIZE = 56  # pixels; larger than SIZE so that distorted edges stay smooth


def load(*, seed: int = 0, cache: Path | None = None) -> Table:
    """Load the glyph images from the cache, or draw them, which takes about ten seconds."""
    import_extra("PIL.Image", extra="images")
    _font_folder()  # even a cache needs matplotlib: its key contains the version
    # Everything that could change a pixel: our version, the seed, and the libraries that draw.
    parts = (VERSION, SIZE, IMAGES_PER_FONT, MAX_SIMILARITY, seed, version("pillow"), version("matplotlib"))
    target = (cache or cache_dir()) / f"glyphs-{hashlib.sha256(repr(parts).encode()).hexdigest()[:12]}.npz"
    try:
        with target.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            # np.load checks each member's CRC while reading, so a damaged file raises here and is redrawn.
            pixels, labels, names = stored["pixels"], stored["labels"], stored["names"]
    except NPZ_ERRORS:
        pixels, labels, names = draw(seed)
        with contextlib.suppress(OSError):  # without the cache, the next load takes ten seconds longer
            target.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(target) as temporary, open(temporary, "wb") as out:
                np.savez_compressed(out, pixels=pixels, labels=labels, names=names)
    digest = hashlib.sha256(pixels.tobytes() + labels.tobytes()).hexdigest()
    return Table("glyphs", labels, tuple(str(name) for name in names), ArrayImages(pixels), digest[:16])


def draw(seed: int) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.str_]]:
    """Draw every character in every font. Returns pixels [N, 1, SIZE, SIZE], labels [N] and class names [C]."""
    fonts = _fonts()
    names = distinct_characters()
    rng = np.random.default_rng(seed)
    stencils = (_stencil(font, name) for name in names for font in fonts)
    pixels = np.stack([_distort(stencil, rng)[None] for stencil in stencils for _ in range(IMAGES_PER_FONT)])
    labels = np.repeat(np.arange(len(names), dtype=np.int64), len(fonts) * IMAGES_PER_FONT)
    return pixels, labels, np.array(names)


@lru_cache(maxsize=1)
def distinct_characters() -> tuple[str, ...]:
    """Return the characters that every font has, without those that look like an earlier one."""
    fonts = _fonts()
    placeholders = [_bitmap(font, "\uffff") for font in fonts]
    candidates = [
        char
        for char in map(chr, range(0x21, 0x500))
        if unicodedata.category(char) in {"Lu", "Ll", "Lo", "Nd", "Sc"}
        and unicodedata.normalize("NFKD", char) == char  # an accented letter is its base letter plus a few pixels
        and all(_bitmap(font, char) != placeholder for font, placeholder in zip(fonts, placeholders, strict=True))
    ]
    shapes = np.stack([[_shape(font, char) for font in fonts] for char in candidates])
    shapes /= np.linalg.norm(shapes, axis=-1, keepdims=True)
    similarity = np.einsum("afp,bfp->ab", shapes, shapes, optimize=True) / len(fonts)
    distinct: list[int] = []
    for i in range(len(candidates)):
        if not (similarity[i, distinct] > MAX_SIMILARITY).any():
            distinct.append(i)
    return tuple(candidates[i] for i in distinct)


@lru_cache(maxsize=1)
def _fonts() -> tuple[Any, ...]:
    from PIL import ImageFont

    files = sorted(p for p in _font_folder().glob("*.ttf") if p.name.startswith(("DejaVuS", "STIXGeneral")))
    return tuple(ImageFont.truetype(str(p), _FONT_SIZE) for p in files if "Display" not in p.name)


def _font_folder() -> Path:
    # Not imported: that takes most of a second, and only the font files are needed.
    spec = importlib.util.find_spec("matplotlib")
    if spec is None or spec.origin is None:
        raise MissingExtraError("glyphs: needs matplotlib's fonts. Run: pip install 'nearkin[images]'")
    return Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf"


def _bitmap(font: Any, char: str) -> tuple[tuple[int, int], bytes]:
    mask = font.getmask(char)
    return mask.size, bytes(mask)


def _shape(font: Any, char: str, side: int = 24, margin: int = 4) -> NDArray[np.float64]:
    """The drawing scaled to a square and blurred, so that size, position and stroke width do not matter."""
    from PIL import Image, ImageFilter

    size, data = _bitmap(font, char)
    scale = side / max(size)
    small_size = max(1, round(size[0] * scale)), max(1, round(size[1] * scale))
    small = Image.frombytes("L", size, data).resize(small_size, Image.Resampling.BOX)
    blurred = _centred(small, side + 2 * margin).filter(ImageFilter.GaussianBlur(1.0))
    return np.asarray(blurred, np.float64).ravel() / 255


def _stencil(font: Any, char: str) -> Any:
    """The character in white on black, centred, with a margin for the distortion."""
    from PIL import Image

    return _centred(Image.frombytes("L", *_bitmap(font, char)), 2 * _FONT_SIZE)


def _centred(image: Any, side: int) -> Any:
    from PIL import Image

    canvas = Image.new("L", (side, side))
    canvas.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return canvas


def _distort(stencil: Any, rng: np.random.Generator) -> NDArray[np.uint8]:
    """One drawing: dilated at random, then rotated, sheared, stretched and shifted, on a noisy gradient."""
    from PIL import Image, ImageFilter

    if rng.random() < 0.4:
        stencil = stencil.filter(ImageFilter.MaxFilter(3))
    angle = math.radians(rng.uniform(-22, 22))
    shear = rng.uniform(-0.25, 0.25)
    zoom = stencil.width / SIZE * 0.65 * np.exp(rng.uniform(-0.25, 0.25, 2))  # input pixels per output pixel
    shift = rng.uniform(-6, 6, 2)
    cos, sin = math.cos(angle), math.sin(angle)
    a, b = zoom[0] * cos, zoom[0] * (shear * cos - sin)
    d, e = zoom[1] * sin, zoom[1] * (shear * sin + cos)
    center_in, center_out = stencil.width / 2, SIZE / 2 + shift
    c, f = center_in - a * center_out[0] - b * center_out[1], center_in - d * center_out[0] - e * center_out[1]
    # A light blur before sampling, so that thin strokes do not vanish between output pixels.
    blurred = stencil.filter(ImageFilter.GaussianBlur(rng.uniform(0.8, 1.6)))
    image = blurred.transform((SIZE, SIZE), Image.Transform.AFFINE, (a, b, c, d, e, f), Image.Resampling.BILINEAR)
    ink = np.asarray(image, np.float64) / 255
    slope = rng.uniform(-1, 1, 2)
    ramp = np.linspace(-0.5, 0.5, SIZE)
    background = 0.25 + 0.15 * (slope[0] * ramp[:, None] + slope[1] * ramp[None, :])
    pixels = background + rng.uniform(0.35, 0.75) * ink + rng.normal(0, rng.uniform(0.02, 0.10), ink.shape)
    return np.asarray((np.clip(pixels, 0, 1) * 255).round().astype(np.uint8))
