"""Where a recipe's images come from: `load(recipe.data)` returns one `Table`."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearkin.data import glyphs
from nearkin.data.images import ArrayImages
from nearkin.data.table import Table
from nearkin.errors import DataError, UserError, did_you_mean, need
from nearkin.progress import Reporter
from nearkin.recipe import Data

IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
MOST_BYTES = 8 * 2**30  # the images of a run are held in memory, scaled


def load(data: Data, reporter: Reporter) -> Table:
    """The images and labels that a recipe names."""
    if data.source == "glyphs":
        reporter.say("data: glyphs, drawn from matplotlib's fonts")
        return glyphs.load()
    if data.source == "folder":
        if data.root is None:
            raise DataError("data.root: a folder of class folders is needed. Give it with --data FOLDER.")
        return load_folder(data.root, image_size=data.image_size, skip_broken=data.skip_broken, reporter=reporter)
    hint = did_you_mean(data.source, ["glyphs", "folder"]) or " There are: glyphs, folder."
    raise UserError(f"data.source: no source named '{data.source}'.{hint}")


def load_folder(root: Path, *, image_size: int, skip_broken: bool, reporter: Reporter) -> Table:
    """Images of `root/CLASS/...`, one class per folder directly below root, cut to a square and scaled."""
    if not root.is_dir():
        raise DataError(f"{root}: there is no such folder. Give a folder that holds one folder of images per class.")
    by_class = {folder.name: _images_below(folder) for folder in sorted(root.iterdir()) if folder.is_dir()}
    empty = [name for name, files in by_class.items() if not files]
    by_class = {name: files for name, files in by_class.items() if files}
    if len(by_class) < 2:
        raise DataError(
            f"{root}: found images in {len(by_class)} class folders, need at least 6: {root}/CLASS/IMAGE.jpg."
        )
    if empty:
        reporter.say(f"data: {len(empty)} folders hold no image and are left out: {', '.join(empty[:3])}")

    files = [path for class_files in by_class.values() for path in class_files]
    size = len(files) * 3 * image_size**2
    if size > MOST_BYTES:
        raise DataError(
            f"{root}: {len(files):,} images at {image_size} pixels need {size / 2**30:.0f} GiB of memory, "
            f"more than {MOST_BYTES / 2**30:.0f}. Lower data.image_size."
        )
    labels = np.repeat(np.arange(len(by_class)), [len(f) for f in by_class.values()]).astype(np.int64)
    pixels = np.empty((len(files), 3, image_size, image_size), np.uint8)
    need("PIL.Image", extra="vision")
    broken: list[int] = []
    first_reason = ""
    with reporter.track(f"reading {root.name}", len(files), unit="img") as bar:
        for row, path in enumerate(files):
            try:
                pixels[row] = read_square(path, image_size)
            except Exception as error:  # decoders raise anything at all on a damaged file
                broken.append(row)
                first_reason = first_reason or str(error)
            bar.advance()
    if broken:
        names = ", ".join(str(files[row].relative_to(root)) for row in broken[:3])
        if not skip_broken:
            raise DataError(
                f"{root}: {len(broken)} of {len(files)} images cannot be read, first {names} ({first_reason}).\n"
                f"Mend or remove them, or leave them out with --data.skip-broken."
            )
        reporter.say(f"data: {len(broken)} images cannot be read and are left out: {names}")
        kept = np.delete(np.arange(len(files)), broken)
        files, labels, pixels = [files[row] for row in kept], labels[kept], pixels[kept]

    present, labels = np.unique(labels, return_inverse=True)
    names_kept = tuple(list(by_class)[c] for c in present)
    digest = hashlib.sha256(repr(names_kept).encode() + labels.tobytes() + pixels.tobytes()).hexdigest()[:16]
    return Table(root.name, labels.astype(np.int64), names_kept, ArrayImages(pixels), digest, tuple(files))


def _images_below(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file())


def read_square(path: Path, side: int) -> NDArray[np.uint8]:
    """One image as RGB [3, side, side]: turned upright as its camera meant, its middle square scaled."""
    image_module, ops = need("PIL.Image", extra="vision"), need("PIL.ImageOps", extra="vision")
    with image_module.open(path) as image:
        image.draft("RGB", (2 * side, 2 * side))  # lets a JPEG be decoded at a fraction of its size
        upright = ops.exif_transpose(image).convert("RGB")
    square = ops.fit(upright, (side, side), image_module.Resampling.BILINEAR)
    return np.asarray(square, np.uint8).transpose(2, 0, 1)
