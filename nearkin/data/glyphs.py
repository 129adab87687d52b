"""`glyphs`: a small benchmark drawn on the spot from the fonts that matplotlib ships.

A class is a character (Latin, Greek, Cyrillic, phonetic, digits, currency), an image one drawing of it in one of 16
faces, bent, thickened, shifted and made noisy by a seeded generator. Nothing is downloaded and nothing is stored in
the repository. Characters that look alike across scripts (Latin A, Greek Alpha, Cyrillic A) are found by comparing
their drawings, and only the first of each such group is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import math
import os
import unicodedata
import zipfile
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin.data.images import ArrayImages
from nearkin.data.table import Table
from nearkin.errors import MissingExtraError, import_extra

SIZE = 40  # pixels, both ways
VERSION = 1  # raise when any drawing changes, so that old caches and old runs are not mistaken for new ones
PER_FACE = 3  # drawings of each character in each face
# Two characters whose blurred, size-normalised drawings agree this well (mean cosine over the faces) are one to the
# eye once bent: A/Alpha 1.00, n/Cyrillic pe 0.97, S/s 0.95, O/o 0.93; still told apart: C/G 0.87, 3/8 0.83, O/Q 0.82.
LOOK_ALIKE = 0.92
_DRAWN_AT = 56  # font size in pixels; drawn larger than SIZE so that bending does not stair-step


def load(*, seed: int = 0, cache: Path | None = None) -> Table:
    """All glyph images in one table, from the cache when there is one. Drawing them takes about ten seconds."""
    import_extra("PIL.Image", extra="vision")
    _font_folder()  # also a cache is known by the version of what draws
    target = (cache or cache_dir()) / f"glyphs-{_identity(seed)}.npz"
    stored = _read_cache(target)
    if stored is None:
        stored = draw(seed)
        _write_cache(target, *stored)
    pixels, labels, names = stored
    digest = hashlib.sha256(pixels.tobytes() + labels.tobytes()).hexdigest()
    return Table(
        source="glyphs",
        labels=labels,
        class_names=tuple(str(n) for n in names),
        images=ArrayImages(pixels),
        fingerprint=digest[:16],
    )


def draw(seed: int) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.str_]]:
    """Draw every kept character in every face: pixels [N, 1, SIZE, SIZE], labels [N] and class names [C]."""
    fonts = _faces()
    names = distinct_characters()
    rng = np.random.default_rng(seed)
    pixels = np.empty((len(names) * len(fonts) * PER_FACE, 1, SIZE, SIZE), np.uint8)
    row = 0
    for name in names:
        for font in fonts:
            stencil = _stencil(font, name)
            for _ in range(PER_FACE):
                pixels[row, 0] = _distort(stencil, rng)
                row += 1
    labels = np.repeat(np.arange(len(names), dtype=np.int64), len(fonts) * PER_FACE)
    return pixels, labels, np.array(names)


@lru_cache(maxsize=1)
def distinct_characters() -> tuple[str, ...]:
    """Characters that every face can draw, less those that look like an earlier one."""
    fonts = _faces()
    missing = [_bitmap(font, "\uffff") for font in fonts]
    candidates = [
        char
        for char in map(chr, range(0x21, 0x500))
        if unicodedata.category(char) in {"Lu", "Ll", "Lo", "Nd", "Sc"}
        and unicodedata.normalize("NFKD", char) == char  # accented letters are their base letter and a speck
        and all(_bitmap(font, char) != blank for font, blank in zip(fonts, missing, strict=True))
    ]
    shapes = np.stack([[_shape(font, char) for font in fonts] for char in candidates])
    shapes /= np.linalg.norm(shapes, axis=-1, keepdims=True)
    alike = np.einsum("afp,bfp->ab", shapes, shapes, optimize=True) / len(fonts)
    kept: list[int] = []
    for i in range(len(candidates)):
        if not any(alike[i, j] > LOOK_ALIKE for j in kept):
            kept.append(i)
    return tuple(candidates[i] for i in kept)


@lru_cache(maxsize=1)
def _faces() -> tuple[Any, ...]:
    from PIL import ImageFont

    files = sorted(p for p in _font_folder().glob("*.ttf") if p.name.startswith(("DejaVuS", "STIXGeneral")))
    text_faces = [p for p in files if "Display" not in p.name]
    return tuple(ImageFont.truetype(str(p), _DRAWN_AT) for p in text_faces)


def _font_folder() -> Path:
    # Found, not imported: importing matplotlib costs most of a second and only its font files are wanted.
    spec = importlib.util.find_spec("matplotlib")
    if spec is None or spec.origin is None:
        raise MissingExtraError("glyphs are drawn with matplotlib's fonts. Run: pip install 'nearkin[report]'")
    return Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf"


def _bitmap(font: Any, char: str) -> tuple[tuple[int, int], bytes]:
    mask = font.getmask(char)
    return mask.size, bytes(mask)


def _shape(font: Any, char: str, side: int = 24, rim: int = 4) -> NDArray[np.float64]:
    """The drawing scaled into a square and blurred, so that only its form counts, not size, place or stroke width."""
    from PIL import Image, ImageFilter

    (width, height), data = _bitmap(font, char)
    scale = side / max(width, height)
    small = Image.frombytes("L", (width, height), data).resize(
        (max(1, round(width * scale)), max(1, round(height * scale))), Image.Resampling.BOX
    )
    full = side + 2 * rim
    square = Image.new("L", (full, full))
    square.paste(small, ((full - small.width) // 2, (full - small.height) // 2))
    return np.asarray(square.filter(ImageFilter.GaussianBlur(1.0)), np.float64).ravel() / 255


def _stencil(font: Any, char: str) -> Any:
    """The character in white on black, centred, with room around it to be bent."""
    from PIL import Image

    (width, height), data = _bitmap(font, char)
    side = 2 * _DRAWN_AT
    canvas = Image.new("L", (side, side))
    canvas.paste(Image.frombytes("L", (width, height), data), ((side - width) // 2, (side - height) // 2))
    return canvas


def _distort(stencil: Any, rng: np.random.Generator) -> NDArray[np.uint8]:
    """One drawing: perhaps thicker, turned, sheared, stretched, shifted, on a shaded and noisy ground."""
    from PIL import Image, ImageFilter

    if rng.random() < 0.4:
        stencil = stencil.filter(ImageFilter.MaxFilter(3))
    turn = math.radians(rng.uniform(-22, 22))
    shear = rng.uniform(-0.25, 0.25)
    zoom = stencil.width / SIZE * 0.65 * np.exp(rng.uniform(-0.25, 0.25, 2))  # input pixels per output pixel
    shift = rng.uniform(-6, 6, 2)
    cos, sin = math.cos(turn), math.sin(turn)
    a, b = zoom[0] * cos, zoom[0] * (shear * cos - sin)
    d, e = zoom[1] * sin, zoom[1] * (shear * sin + cos)
    middle_in, middle_out = stencil.width / 2, SIZE / 2 + shift
    inverse = (
        *(a, b, middle_in - a * middle_out[0] - b * middle_out[1]),
        *(d, e, middle_in - d * middle_out[0] - e * middle_out[1]),
    )
    # A light blur before sampling keeps thin strokes from vanishing between output pixels.
    blurred = stencil.filter(ImageFilter.GaussianBlur(rng.uniform(0.8, 1.6)))
    image = blurred.transform((SIZE, SIZE), Image.Transform.AFFINE, inverse, Image.Resampling.BILINEAR)
    ink = np.asarray(image, np.float64) / 255
    slope = rng.uniform(-1, 1, 2)
    ramp = np.linspace(-0.5, 0.5, SIZE)
    ground = 0.25 + 0.15 * (slope[0] * ramp[:, None] + slope[1] * ramp[None, :])
    picture = ground + rng.uniform(0.35, 0.75) * ink + rng.normal(0, rng.uniform(0.02, 0.10), ink.shape)
    drawn: NDArray[np.uint8] = (np.clip(picture, 0, 1) * 255).round().astype(np.uint8)
    return drawn


def cache_dir() -> Path:
    """Where drawn and downloaded data is kept: $NEARKIN_CACHE, or the user's cache folder."""
    if chosen := os.environ.get("NEARKIN_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nearkin"


def _identity(seed: int) -> str:
    """Everything that could change a pixel: our version, the seed, and the libraries that draw."""
    from importlib.metadata import version

    parts = (VERSION, SIZE, PER_FACE, LOOK_ALIKE, seed, version("pillow"), version("matplotlib"))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def _read_cache(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.str_]] | None:
    try:
        with np.load(path, allow_pickle=False) as stored:
            # np.load checks each member's CRC while reading, so a damaged file raises here and is drawn again.
            return stored["pixels"], stored["labels"], stored["names"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None


def _write_cache(path: Path, pixels: NDArray[Any], labels: NDArray[Any], names: NDArray[Any]) -> None:
    aside = path.with_name(f"{path.stem}.{os.getpid()}.npz")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(aside, pixels=pixels, labels=labels, names=names)
        aside.replace(path)
    except OSError:  # a read-only home or a full disk costs ten seconds next time, nothing else
        with contextlib.suppress(OSError):
            aside.unlink()
