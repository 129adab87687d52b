"""Build what a recipe names: model, objective, initial features."""

import math
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from nearkin._common.progress import Reporter
from nearkin.config.recipe import DataConfig, ModelConfig, Recipe
from nearkin.data.images import ArrayImages, Images, PreparedImages
from nearkin.data.samplers import make_sampler
from nearkin.data.sources import OWN as OWN_DATA
from nearkin.data.splits import Split
from nearkin.data.table import Table
from nearkin.data.transforms import AUGMENTS
from nearkin.errors import ConfigError
from nearkin.losses import LOSSES
from nearkin.losses.objective import Objective
from nearkin.losses.registry import check_known
from nearkin.losses.weighted_sum import AnyObjective, WeightedSum
from nearkin.metrics.retrieval import check_metric
from nearkin.models.backbones import BACKBONES, FIXED_WIDTH, check_backbone
from nearkin.models.embedder import Embedder
from nearkin.models.frozen import FrozenFeatures
from nearkin.models.heads import POOLINGS
from nearkin.models.weights import fingerprint
from nearkin.training.evaluation import MIN_VAL_CLASSES, selection_metrics


def with_own(recipe: Recipe, data: Any, model: Embedder | None) -> Recipe:
    """Return a recipe that records what was passed to `fit`: data of the user, and the settings of a wrapped model."""
    if data is not None:
        recipe = replace(recipe, data=replace(recipe.data, source=OWN_DATA, root=None))
    if model is None:
        return recipe
    if not isinstance(model, Embedder) or model.own is None:
        raise ConfigError(
            f"model: got a {type(model).__name__}, expected your network as nk.Embedder.wrap(module, ...). "
            "Other networks are set in the recipe: model.backbone and model.weights."
        )
    if not model.own.is_module:
        raise ConfigError("model: a function cannot be trained, only evaluated and indexed. Wrap an nn.Module.")
    return replace(recipe, data=model.data_config(recipe.data), model=model.model)


def validate_recipe(recipe: Recipe, model: Embedder | None = None) -> None:
    """Refuse unknown names and impossible settings before any data is read."""
    objective = make_objective(recipe, recipe.model.dim or 2, num_classes=2)
    _ = POOLINGS[recipe.model.pool], AUGMENTS[recipe.data.augment]
    if model is None:
        check_backbone(recipe.model.backbone)
    elif not model.takes_pixels and recipe.data.augment != "none":
        raise ConfigError(
            f"data.augment: {recipe.data.augment} changes pixels, but this model takes what its preprocessing returns. "
            "Use none."
        )
    for metric in recipe.eval.metrics:
        check_metric(metric)
    network, config = recipe.model, recipe.train
    is_frozen = network.backbone == "none" or network.freeze == "backbone"
    if network.shrinkage != ModelConfig.shrinkage and network.head_init != "whitened":
        raise ConfigError("model.shrinkage: only with a whitened head. Remove it, or use --model.head-init whitened.")
    if network.width != ModelConfig.width and (
        network.backbone in FIXED_WIDTH or network.backbone not in ("none", *BACKBONES)
    ):
        raise ConfigError(f"model.width: {network.backbone} has a fixed width. Remove it, or use small_conv.")
    for name in ("feature_noise", "feature_mix"):
        if getattr(config, name) and not is_frozen:
            raise ConfigError(f"train.{name}: only with a frozen backbone. Use 0, or --freeze backbone.")
    # The gradient of micro-batches goes through the network alone.
    learns = list(objective.parameters()) and not 0 < config.micro_batch_size < config.batch_size
    if config.epochs and network.dim == 0 and (is_frozen or config.frozen_epochs > 0) and not learns:
        raise ConfigError(
            "model.dim: 0 means no head, and with a frozen backbone nothing is left to train. "
            "Use --model.dim 128, or train the backbone: --model.freeze none --train.frozen-epochs 0."
        )


def match_table(table: Table, model: Embedder) -> Table:
    """Return the rows as a model of the user takes them: images through its preprocessing, tensors as they are."""
    images: Images = table.images if table.features is None else ArrayImages(table.features)
    shape = AUGMENTS[model.augment].input_shape(images.shape) if images.is_pixels else images.shape
    if images.is_pixels and model.preprocess is not None:
        images = PreparedImages(images, model.preprocess, model.image_shape)
    elif shape != model.image_shape or (images.is_pixels and not model.takes_pixels):
        what, takes = ("images" if pixels else "tensors" for pixels in (images.is_pixels, model.takes_pixels))
        raise ConfigError(
            f"{table.source}: contains {what} of shape {list(shape)}, but the module takes {takes} of shape "
            f"{list(model.image_shape)}. Pass the matching example= or image_size= to Embedder.wrap."
        )
    return replace(table, images=images, features=None)


def make_model(recipe: Recipe, table: Table, reporter: Reporter) -> Embedder:
    """Build the network of a recipe with its initial weights.

    Args:
        recipe: Names backbone, head, weights and seed.
        table: The images or features it will see.
        reporter: Where loading of weights is reported.

    Returns:
        The model, on the CPU.

    Raises:
        ConfigError: The data are images but the backbone is "none", or features but it is not.
    """
    torch.manual_seed(recipe.seed)
    if table.features is None and not table.images.is_pixels:
        raise ConfigError(
            f"{table.source}: contains tensors of shape {list(table.images.shape)}, which need a module of yours: "
            "nk.fit(recipe, data=..., model=nk.Embedder.wrap(module, example=batch)).\n"
            "Pass images as PIL images or uint8, without ToTensor() and Normalize(), and features as floats [N, D]."
        )
    if table.features is not None:
        if recipe.model.backbone != "none":
            raise ConfigError(
                f"{table.source}: contains features, which need no backbone. Use --model.backbone none --weights none."
            )
        return Embedder(recipe.model, (table.features.shape[1], 1, 1))
    if recipe.model.backbone == "none":
        raise ConfigError(f"{table.source}: contains images, which need a backbone. Use --model.backbone NAME.")
    augment = AUGMENTS[recipe.data.augment]
    shape = augment.input_shape(table.images.shape)
    return Embedder(recipe.model, shape, augment=recipe.data.augment, reporter=reporter)


def model_fingerprint(recipe: Recipe, model: Embedder) -> str:
    """Return what the initial weights add to the run key: nothing if they are random, as the seed determines them."""
    if model.own is not None:
        return f"-{model.fingerprint()}"
    if recipe.model.weights == "none" or model.backbone is None:
        return ""
    return f"-{fingerprint(model.backbone)}"


def initial_features(
    recipe: Recipe, initial_model: Embedder, table: Table, reporter: Reporter
) -> FrozenFeatures | None:
    """Return the features of the initial backbone if it is pretrained, frozen, or the head is to be whitened."""
    model = recipe.model
    needed = model.weights != "none" or model.freeze == "backbone" or model.head_init == "whitened"
    if initial_model.backbone is None or not needed:
        return None
    if initial_model.image_shape == (initial_model.num_features,):  # an input of the module could be one of the head
        if model.head_init == "whitened":
            raise ConfigError("model.head_init: this module returns vectors of the size that it takes. Use random.")
        return None
    return FrozenFeatures(initial_model, table, on_disk=recipe.data.cache, reporter=reporter)


def make_objective(recipe: Recipe, dim: int, num_classes: int) -> AnyObjective:
    """Build the loss of a recipe, with its miner and memory; of a sum, all parts that can use these have them.

    Args:
        recipe: Names loss, miner and memory size.
        dim: Embedding dimensions.
        num_classes: Training classes.

    Returns:
        The objective, on the CPU.
    """
    miner = recipe.miner
    parts = []
    for weight, loss in recipe.loss.terms:
        inputs = LOSSES[loss.name].inputs
        for key in loss.settings:  # not the other arguments of Objective, which the recipe sets itself
            check_known(loss.name, key, [*LOSSES[loss.name].settings, "reduction", "chunk_size"])
        if loss.settings.get("reduction") == "none":
            raise ConfigError("loss.reduction: training needs a single value. Use mean, sum or nonzero.")
        mined = miner if inputs.pairs or not recipe.loss.parts else None
        objective = Objective(
            loss.name,
            num_classes=num_classes,
            dim=dim,
            miner=mined.name if mined else None,
            miner_settings=dict(mined.settings) if mined else None,
            memory=recipe.memory if inputs.memory or not recipe.loss.parts else 0,
            regularizers=loss.regularizers,
            gather=False,  # the step gathers
            **cast(dict[str, Any], loss.settings),
        )
        parts.append((weight, objective))
    for name, is_given, is_used in (
        ("miner", miner is not None, any(part.miner is not None for _, part in parts)),
        ("memory", recipe.memory > 0, any(part.memory_size for _, part in parts)),
    ):
        if is_given and not is_used:
            raise ConfigError(f"{name}: no loss of {recipe.loss.name} can use it. Remove it, or add a pair loss.")
    return WeightedSum(*parts) if recipe.loss.parts else parts[0][1]


def warn_about_few_positives(recipe: Recipe, train: Table) -> str:
    """Return a warning if a pair loss would find few positives in its batches, else an empty string."""
    config = recipe.train
    if (
        config.samples_per_class
        or recipe.memory
        or not any(LOSSES[loss.name].inputs.pairs for _, loss in recipe.loss.terms)
    ):
        return ""
    sampler = make_sampler(train.labels, batch_size=config.batch_size, samples_per_class=0, seed=recipe.seed)
    batch = sampler.epoch(0)[0]
    counts = np.bincount(train.labels[batch])
    fraction = counts[counts > 1].sum() / len(batch)
    if fraction >= 0.5:
        return ""
    suggested = next(count for count in (4, 3, 2, config.batch_size) if config.batch_size % count == 0)
    return (
        f"warning: {recipe.loss.name} needs positives, and only {fraction:.0%} of the images have one in their batch; "
        f"try --train.samples-per-class {suggested}"
    )


def warn_about_few_classes(data: DataConfig, table: Table, split: Split) -> str:
    """Return a warning if there are too few validation classes to select an epoch on, else an empty string."""
    if split.val is None or data.select_on == "test" or split.val.num_classes >= MIN_VAL_CLASSES:
        return ""
    train, val = split.train.num_classes, split.val.num_classes
    by_class = split.val.split.startswith("by class") and not data.folds
    total = table.num_classes if by_class else train + val  # what val_fraction refers to
    left = train + val - MIN_VAL_CLASSES
    fix = f"{MIN_VAL_CLASSES} would do"
    if data.folds:
        fix += f": --data.folds {total // MIN_VAL_CLASSES}" if total >= 2 * MIN_VAL_CLASSES else ""
    elif left >= MIN_VAL_CLASSES and "own validation part" not in split.val.split:
        fix += f": --data.val-fraction {math.ceil(100 * MIN_VAL_CLASSES / total) / 100:g}, which leaves {left} to train"
    else:
        fix += ", but the data has too few classes"
    metric = selection_metrics(val)[0]
    return (
        f"warning: only {val} validation classes, on which R@1 hardly distinguishes epochs; {metric} selects instead, "
        f"with little certainty. {fix}"
    )
