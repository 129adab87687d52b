"""Features of all images of a source by a pretrained backbone: in an .npz file, or in the cache that trials share."""

from pathlib import Path
from typing import Any

import numpy as np

from nearkin._common.files import NPZ_ERRORS, atomic_file
from nearkin._common.progress import Reporter
from nearkin.config.recipe import Recipe
from nearkin.data import sources
from nearkin.data.splits import make_split
from nearkin.data.table import Table
from nearkin.errors import ConfigError
from nearkin.models.frozen import FrozenFeatures
from nearkin.training import factory
from nearkin.training.device import choose_device

_MARK = "backbone"  # an array that only files written here have


def write_features(recipe: Recipe, out: Path, *, device: str = "auto", reporter: Reporter) -> Table:
    """Save the features of all images of a recipe's data; an interrupted call resumes."""
    table = sources.load(recipe.data, reporter)
    model = factory.make_model(recipe, table, reporter)
    model.fit_pixel_norm(table.images)
    table = FrozenFeatures(model.to(choose_device(device)), table, reporter=reporter).add_to(table)
    assert table.features is not None
    arrays: dict[str, Any] = {"features": table.features, "labels": np.array(table.class_names)[table.labels]}
    arrays |= {"paths": np.array([str(path) for path in table.paths]), _MARK: np.array(recipe.model.backbone)}
    if table.part is not None:
        arrays["part"] = table.part
    with atomic_file(out, size=table.features.nbytes) as temporary, open(temporary, "wb") as file:
        np.savez(file, **arrays)
    return table


def check_overwritten(out: Path) -> None:
    """Refuse to replace an .npz file that `write_features` did not write."""
    if not out.exists():
        return
    try:
        with out.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            ours = _MARK in stored.files
    except (*NPZ_ERRORS, AttributeError):
        ours = False
    if not ours:
        raise ConfigError(f"{out}: would be replaced by the features, and was not written by nearkin. Move it away.")


def cache_features(recipe: Recipe, *, test: bool, device: str, reporter: Reporter) -> None:
    """Compute the features that trials with a frozen backbone share; of the test classes only if `test`."""
    if recipe.model.freeze != "backbone" or recipe.model.backbone == "none" or not recipe.data.cache:
        return
    table = sources.load(recipe.data, reporter)
    split, _ = make_split(table, recipe.data)
    model = factory.make_model(recipe, table, reporter)
    model.fit_pixel_norm(split.train.images)
    features = factory.initial_features(recipe, model.to(choose_device(device)), table, reporter)
    assert features is not None
    for part in [table] if test else [split.train, split.val]:
        if part is not None:
            features.add_to(part)
