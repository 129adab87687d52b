"""Images on which an exported file is compared with its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearkin._common.progress import Reporter
from nearkin.data import glyphs
from nearkin.data.listing import list_image_files
from nearkin.data.splits import make_split
from nearkin.data.table import Table
from nearkin.deploy.images import model_input
from nearkin.deploy.index.trained import list_training_data
from nearkin.errors import DataError, UserError
from nearkin.models.embedder import Embedder
from nearkin.training.run import Run

MAX_IMAGES = 64
_RANDOM_IMAGES = 16


@dataclass(frozen=True)
class CheckImages:
    """Images to compare on."""

    pixels: Tensor  # uint8 [N, C, H, W]
    what: str  # description for the metadata of the exported file; names no path
    note: str = ""  # addition to it for the terminal


def check_images_from_folder(model: Embedder, folder: Path, max_images: int = MAX_IMAGES) -> CheckImages:
    """Read images of a folder, evenly spaced in its listing."""
    if not folder.is_dir():
        raise DataError(f"--images {folder}: no such folder.")
    paths = list_image_files(folder, [], [])
    pixels = _read_images(model, [(path, None) for path in _evenly_spaced(paths, max_images)])
    if not len(pixels):
        raise DataError(f"--images {folder}: none of its {len(paths):,} image files can be read.")
    return CheckImages(pixels, f"{len(pixels)} images of a folder", f", {folder}")


def check_images_of_run(model: Embedder, run: Run | None, reporter: Reporter) -> CheckImages:
    """Read validation images of a run (training images if it has none), or fall back to random images."""
    if run is None:
        return random_check_images(model, "the folder records no data")
    try:
        table, part = _table_of(run, reporter)
        rows = np.array(_evenly_spaced(range(len(table)), MAX_IMAGES))
        if not table.paths:
            pixels = table.images.read(rows)
        else:
            boxes = [None if table.boxes is None else table.boxes[row].tolist() for row in rows]
            pixels = _read_images(model, [(table.paths[row], box) for row, box in zip(rows, boxes, strict=True)])
    except (UserError, OSError) as error:
        return random_check_images(model, f"the run's data cannot be used: {str(error).splitlines()[0]}")
    if not len(pixels):
        return random_check_images(model, "none of the run's images can be read")
    return CheckImages(pixels, f"{len(pixels)} {part} images of the run")


def random_check_images(model: Embedder, reason: str = "") -> CheckImages:
    """Generate images of random pixels."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (_RANDOM_IMAGES, *model.image_shape), dtype=torch.uint8, generator=generator)
    return CheckImages(pixels, f"{len(pixels)} random images", f" ({reason.rstrip('.')})" if reason else "")


def _table_of(run: Run, reporter: Reporter) -> tuple[Table, str]:
    """Return the run's validation images, or else its training images, and the name of the part."""
    data = run.recipe.data
    table = glyphs.load() if data.source == "glyphs" else list_training_data(data, reporter)
    split = make_split(table, data)[0]
    return (split.train, "training") if split.val is None else (split.val, "validation")


def _read_images(model: Embedder, sources: Sequence[tuple[Path, Any]]) -> Tensor:
    pixels = []
    for path, box in sources:
        try:
            pixels.append(model_input(model, path, box))
        except DataError:
            continue
    return torch.stack(pixels) if pixels else torch.empty((0, *model.image_shape), dtype=torch.uint8)


def _evenly_spaced(items: Sequence[Any], max_items: int) -> list[Any]:
    return [items[i] for i in np.linspace(0, len(items) - 1, min(max_items, len(items))).astype(int)]
