"""Build what a recipe names: model, objective, initial features."""

import math
from typing import Any, cast

import numpy as np
import torch

from nearkin._common.progress import Reporter
from nearkin.config.recipe import DataConfig, Recipe
from nearkin.data.samplers import make_sampler
from nearkin.data.splits import Split
from nearkin.data.table import Table
from nearkin.data.transforms import AUGMENTS
from nearkin.errors import ConfigError
from nearkin.losses import LOSSES
from nearkin.losses.objective import Objective
from nearkin.metrics.retrieval import check_metric
from nearkin.models.backbones import check_backbone
from nearkin.models.embedder import Embedder
from nearkin.models.frozen import FrozenFeatures
from nearkin.models.heads import POOLINGS
from nearkin.models.weights import fingerprint
from nearkin.training.evaluation import MIN_VAL_CLASSES, selection_metrics


def validate_recipe(recipe: Recipe) -> None:
    """Refuse unknown names and impossible settings before any data is read."""
    objective = make_objective(recipe, recipe.model.dim or 2, num_classes=2)
    _ = POOLINGS[recipe.model.pool], AUGMENTS[recipe.data.augment]
    check_backbone(recipe.model.backbone)
    for metric in recipe.eval.metrics:
        check_metric(metric)
    model, config = recipe.model, recipe.train
    is_frozen = model.backbone == "none" or model.freeze == "backbone"
    for name in ("feature_noise", "feature_mix"):
        if getattr(config, name) and not is_frozen:
            raise ConfigError(f"train.{name}: only with a frozen backbone. Use 0, or --freeze backbone.")
    # The gradient of micro-batches goes through the network alone.
    learns = list(objective.parameters()) and not 0 < config.micro_batch_size < config.batch_size
    if config.epochs and model.dim == 0 and (is_frozen or config.frozen_epochs > 0) and not learns:
        raise ConfigError(
            "model.dim: 0 means no head, and with a frozen backbone nothing is left to train. "
            "Use --model.dim 128, or train the backbone: --model.freeze none --train.frozen-epochs 0."
        )


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
    return FrozenFeatures(initial_model, table, on_disk=recipe.data.cache, reporter=reporter)


def make_objective(recipe: Recipe, dim: int, num_classes: int) -> Objective:
    """Build the loss of a recipe, with its miner and memory.

    Args:
        recipe: Names loss, miner and memory size.
        dim: Embedding dimensions.
        num_classes: Training classes.

    Returns:
        The objective, on the CPU.
    """
    return Objective(
        recipe.loss.name,
        num_classes=num_classes,
        dim=dim,
        miner=recipe.miner.name if recipe.miner else None,
        miner_settings=dict(recipe.miner.settings) if recipe.miner else None,
        memory=recipe.memory,
        **cast(dict[str, Any], recipe.loss.settings),
    )


def warn_about_few_positives(recipe: Recipe, train: Table) -> str:
    """Return a warning if a pair loss would find few positives in its batches, else an empty string."""
    config = recipe.train
    if config.samples_per_class or recipe.memory or not LOSSES[recipe.loss.name].inputs.pairs:
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
