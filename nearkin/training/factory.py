"""What a recipe names, built: model, objective, features of the starting backbone, device."""

from __future__ import annotations

from typing import Any, cast

import torch

from nearkin._common.progress import Reporter
from nearkin.config.recipe import Recipe
from nearkin.data.table import Table
from nearkin.data.transforms import AUGMENTS
from nearkin.errors import ConfigError
from nearkin.losses.objective import Objective
from nearkin.models.backbones import check_backbone
from nearkin.models.embedder import Embedder
from nearkin.models.frozen import FrozenFeatures
from nearkin.models.pooling import POOLINGS
from nearkin.models.weights import fingerprint, load_weights


def validate_recipe(recipe: Recipe) -> None:
    """Refuse a wrong name or setting before the time is spent to read the data."""
    objective = make_objective(recipe, recipe.model.dim or 2, num_classes=2)
    _ = POOLINGS[recipe.model.pool], AUGMENTS[recipe.data.augment]
    check_backbone(recipe.model.backbone)
    whitened = recipe.model.head_init == "whitened"
    if whitened and recipe.model.head == "mlp":
        raise ConfigError("model.head_init: whitened needs a linear or residual head. Give --model.head linear.")
    _check_something_learns(recipe, objective)


def _check_something_learns(recipe: Recipe, objective: Objective) -> None:
    model, hyper = recipe.model, recipe.train
    held = model.backbone == "none" or model.freeze == "backbone" or hyper.frozen_epochs > 0
    pieces = 0 < hyper.micro_batch_size < hyper.batch_size  # whose gradient goes through the network alone
    if model.dim == 0 and held and (pieces or not list(objective.parameters())):
        raise ConfigError(
            "model.dim: 0 leaves no head, and nothing else learns while the backbone stands still. "
            "Give --model.dim 128, or let the backbone learn: --model.freeze nothing --train.frozen-epochs 0."
        )


def make_model(recipe: Recipe, table: Table, reporter: Reporter) -> Embedder:
    """The network that a recipe names, for the images or features of a table, with the weights it starts from."""
    torch.manual_seed(recipe.seed)
    if table.features is not None:
        if recipe.model.backbone != "none":
            raise ConfigError(f"{table.source}: holds features, which need no backbone. Give --model.backbone none.")
        return Embedder(recipe.model, (table.features.shape[1], 1, 1))
    if recipe.model.backbone == "none":
        raise ConfigError(f"{table.source}: holds images, which need a backbone: --model.backbone NAME.")
    augment = AUGMENTS[recipe.data.augment]
    model = Embedder(recipe.model, augment.input_shape(table.images.shape), augment=recipe.data.augment)
    assert model.backbone is not None
    load_weights(model.backbone, recipe.model.backbone, recipe.model.weights, reporter)
    return model


def model_fingerprint(recipe: Recipe, model: Embedder) -> str:
    """What the weights that training starts from add to the run's key: nothing where they are drawn by the seed."""
    if recipe.model.weights == "none" or model.backbone is None:
        return ""
    return f"-{fingerprint(model.backbone)}"


def initial_features(recipe: Recipe, start: Embedder, table: Table, reporter: Reporter) -> FrozenFeatures | None:
    """The features of the starting backbone, where they say something: it is pretrained, frozen, or to be whitened."""
    used = recipe.model.weights != "none" or recipe.model.freeze == "backbone" or recipe.model.head_init == "whitened"
    if start.backbone is None or not used:
        return None
    return FrozenFeatures(start, table, on_disk=recipe.data.cache, reporter=reporter)


def make_objective(recipe: Recipe, dim: int, num_classes: int) -> Objective:
    """The loss that a recipe names, with its miner and memory."""
    return Objective(
        recipe.loss.name,
        num_classes=num_classes,
        dim=dim,
        miner=recipe.miner.name if recipe.miner else None,
        miner_settings=dict(recipe.miner.settings) if recipe.miner else None,
        memory=recipe.memory,
        **cast(dict[str, Any], recipe.loss.settings),
    )


def choose_device(name: str) -> torch.device:
    """ "auto" takes a GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device '{name}' cannot be used here ({str(error).splitlines()[0]}). Try cpu.") from None
