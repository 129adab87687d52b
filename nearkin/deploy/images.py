"""Preprocess single images exactly as evaluation does, and choose images to check an exported file on."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearkin._common.progress import Reporter
from nearkin.data import glyphs
from nearkin.data.images import apply_preprocess
from nearkin.data.listing import list_image_files
from nearkin.data.reading import MAX_SIDE, Box, read_image, read_pixels, to_pillow
from nearkin.data.splits import make_split
from nearkin.data.transforms import AUGMENTS
from nearkin.deploy.index.sources import list_training_data
from nearkin.errors import DataError, UserError
from nearkin.models.embedder import Embedder
from nearkin.training.run import Run

_MAX_IMAGES, _RANDOM_IMAGES = 64, 16


def model_input(model: Embedder, source: Any, box: Box | None = None) -> Tensor:
    """Return what `model.embed` would pass to the network, computed in the calling thread."""
    if model.preprocess is not None:
        image = to_pillow(read_pixels(source) if box is None else read_image(source, MAX_SIDE, box=box))
        return apply_preprocess(model.preprocess, image, model.image_shape)
    if not model.takes_pixels:
        raise DataError(f"This model takes tensors of shape {list(model.image_shape)}, not images.")
    channels, side = model.image_shape[0], model.image_shape[-1]
    augment = AUGMENTS[model.augment]
    return augment.evaluate(read_image(source, augment.stored_side(side), box=box, channels=channels), side)


@dataclass(frozen=True)
class CheckImages:
    pixels: Tensor  # uint8 [N, C, H, W], or what a module of the user takes
    what: str  # description for the metadata of the exported file; names no path
    note: str = ""  # addition to it for the terminal


def check_images_from_folder(model: Embedder, folder: Path) -> CheckImages:
    if not folder.is_dir():
        raise DataError(f"--images {folder}: no such folder.")
    paths = list_image_files(folder, [], [])
    pixels = _read_images(model, [(paths[row], None) for row in _evenly_spaced(len(paths))])
    if not len(pixels):
        raise DataError(f"--images {folder}: none of its {len(paths):,} image files can be read.")
    return CheckImages(pixels, f"{len(pixels)} images of a folder", f", {folder}")


def check_images_of_run(model: Embedder, run: Run | None, reporter: Reporter) -> CheckImages:
    """Read validation images of a run (training images if it has none), or fall back to random images."""
    if run is None:
        return random_check_images(model, "the folder records no data")
    data = run.recipe.data
    if not model.takes_pixels and model.preprocess is None:
        return random_check_images(model, "the model takes no images")
    try:
        split = make_split(glyphs.load() if data.source == "glyphs" else list_training_data(data, reporter), data)[0]
        table, part = (split.train, "training") if split.val is None else (split.val, "validation")
        rows = _evenly_spaced(len(table))
        boxes = [None] * len(table) if table.boxes is None else table.boxes.tolist()
        sources = [(table.paths[row], boxes[row]) for row in rows if table.paths]
        pixels = _read_images(model, sources) if sources else table.images.read(np.array(rows))
    except (UserError, OSError) as error:
        return random_check_images(model, f"the run's data cannot be used: {str(error).splitlines()[0]}")
    if not len(pixels):
        return random_check_images(model, "none of the run's images can be read")
    return CheckImages(pixels, f"{len(pixels)} {part} images of the run")


def random_check_images(model: Embedder, reason: str = "") -> CheckImages:
    generator = torch.Generator().manual_seed(0)
    shape, dtype = (_RANDOM_IMAGES, *model.image_shape), input_dtype(model)
    if dtype == torch.float32:
        pixels = torch.randn(shape, generator=generator)
    else:  # of the ids of a module of the user, only 0 and 1 are known to exist
        pixels = torch.randint(0, 256 if dtype == torch.uint8 else 2, shape, dtype=dtype, generator=generator)
    return CheckImages(
        pixels,
        f"{len(pixels)} random {'images' if model.takes_pixels else 'inputs'}",
        f" ({reason.rstrip('.')})" if reason else "",
    )


def _read_images(model: Embedder, sources: Sequence[tuple[Path, Any]]) -> Tensor:
    pixels = [torch.empty((0, *model.image_shape), dtype=input_dtype(model))]
    for path, box in sources:
        with suppress(DataError):
            pixels.append(model_input(model, path, box)[None])
    return torch.cat(pixels)


def input_dtype(model: Embedder) -> torch.dtype:
    """Return the type of the inputs of a model that has a backbone."""
    return model.own.inputs.dtype if model.own else torch.uint8


def _evenly_spaced(count: int) -> list[int]:
    return [int(row) for row in np.linspace(0, count - 1, min(_MAX_IMAGES, count))]
