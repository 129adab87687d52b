"""The search space of a loss: its declared ranges, and learning rates around those of the recipe.

Settings are named as in a recipe file: `loss.alpha`, `miner.epsilon`, `train.lr`, `train.class_lr`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from nearkin.config.recipe import ComponentConfig, Recipe, Scalar
from nearkin.errors import ConfigError
from nearkin.losses import LOSSES, Range, log

if TYPE_CHECKING:
    from optuna.trial import Trial

Settings = dict[str, Scalar]

LR_FACTOR = 10.0  # learning rates are searched from a tenth of the recipe's to ten times it


def recipe_for_loss(recipe: Recipe, loss: str) -> Recipe:
    if loss == recipe.loss.name:
        return recipe
    return replace(recipe, loss=ComponentConfig(LOSSES[loss].name), miner=None, memory=0)


def space(recipe: Recipe, loss: str) -> dict[str, Range]:
    values = defaults(recipe, loss)
    ranges = {
        f"loss.{name}": _widen(range_, values[f"loss.{name}"], f"{loss}.{name}")
        for name, range_ in LOSSES[loss].space.items()
    }
    rates = {name: float(rate) for name, rate in values.items() if name.startswith("train.")}
    return ranges | {name: log(rate / LR_FACTOR, rate * LR_FACTOR) for name, rate in rates.items()}


def defaults(recipe: Recipe, loss: str) -> Settings:
    known = {**LOSSES[loss].settings, **recipe_for_loss(recipe, loss).loss.settings}
    values: Settings = {f"loss.{name}": known[name] for name in LOSSES[loss].space}
    values["train.lr"] = recipe.train.lr
    if params := LOSSES[loss].inputs.params:
        values["train.class_lr"] = recipe.train.class_lr or recipe.train.lr * params[0].lr
    return values


def _widen(range_: Range, value: Scalar, name: str) -> Range:
    """Widen a declared range to include the recipe's value."""
    if value in range_:
        return range_
    if range_.kind == "choice" or not isinstance(value, int | float) or (range_.kind == "log" and value <= 0):
        raise ConfigError(f"{name}: the recipe has {value}, which is outside the search range ({range_}).")
    return replace(range_, low=min(range_.low, value), high=max(range_.high, value))


def apply(recipe: Recipe, loss: str, settings: Mapping[str, Scalar]) -> Recipe:
    base = recipe_for_loss(recipe, loss)
    sections: dict[str, Settings] = {"loss": {}, "miner": {}, "train": {}}
    for name, value in settings.items():
        section, _, key = name.partition(".")
        sections[section][key] = value
    train = replace(base.train, **sections["train"])  # type: ignore[arg-type]
    if base.train.head_lr is not None:
        train = replace(train, head_lr=base.train.head_lr * train.lr / base.train.lr)
    miner = base.miner
    if sections["miner"]:
        assert miner is not None
        miner = ComponentConfig(miner.name, {**miner.settings, **sections["miner"]})
    loss_config = ComponentConfig(base.loss.name, {**base.loss.settings, **sections["loss"]})
    return replace(base, loss=loss_config, miner=miner, train=train)


def suggest(trial: Trial, name: str, range_: Range) -> Scalar:
    """Let Optuna choose a value within a declared range."""
    if range_.kind == "choice":
        value: Scalar = trial.suggest_categorical(name, range_.options)
        return value
    if range_.kind == "integer":
        return int(trial.suggest_int(name, int(range_.low), int(range_.high)))
    return float(trial.suggest_float(name, range_.low, range_.high, log=range_.kind == "log"))
