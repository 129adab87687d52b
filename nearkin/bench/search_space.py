"""What a search may turn: each loss's declared ranges, and the learning rates around those of the recipe.

Settings are named as in a recipe's file: `loss.alpha`, `miner.epsilon`, `train.lr`, `train.class_lr`.
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

LR_REACH = 10.0  # learning rates are searched from a tenth of the recipe's to ten times it


def start_of(recipe: Recipe, loss: str) -> Recipe:
    """The recipe with this loss; another loss than its own starts from its defaults, without miner and memory."""
    if loss == recipe.loss.name:
        return recipe
    return replace(recipe, loss=ComponentConfig(LOSSES[loss].name), miner=None, memory=0)


def space(recipe: Recipe, loss: str) -> dict[str, Range]:
    """Where to look: what the loss declares, `train.lr`, and `train.class_lr` where the loss has class parameters.

    >>> {name: str(where) for name, where in space(Recipe(), "proxy_anchor").items()}
    {'loss.alpha': '8 to 64, log scale', 'loss.margin': '0 to 0.5',
     'train.lr': '0.0002 to 0.02, log scale', 'train.class_lr': '0.02 to 2, log scale'}
    """
    values = defaults(recipe, loss)
    ranges = {
        f"loss.{name}": _holding(where, values[f"loss.{name}"], f"{loss}.{name}")
        for name, where in LOSSES[loss].space.items()
    }
    ranges |= {
        name: log(float(rate) / LR_REACH, float(rate) * LR_REACH)
        for name, rate in values.items()
        if name.startswith("train.")
    }
    return ranges


def defaults(recipe: Recipe, loss: str) -> Settings:
    """The settings of `space` as the recipe and the loss have them: what the first trial runs."""
    given = {**LOSSES[loss].settings, **start_of(recipe, loss).loss.settings}
    values: Settings = {f"loss.{name}": given[name] for name in LOSSES[loss].space}
    values["train.lr"] = recipe.train.lr
    if params := LOSSES[loss].inputs.params:
        values["train.class_lr"] = recipe.train.class_lr or recipe.train.lr * params[0].lr
    return values


def _holding(where: Range, value: Scalar, name: str) -> Range:
    """The declared range, widened where the recipe's own value lies outside it."""
    if value in where:
        return where
    if where.kind == "choice" or not isinstance(value, int | float) or (where.kind == "log" and value <= 0):
        raise ConfigError(f"{name}: the recipe has {value}, which cannot be searched around ({where}).")
    return replace(where, low=min(where.low, value), high=max(where.high, value))


def apply(recipe: Recipe, loss: str, settings: Mapping[str, Scalar]) -> Recipe:
    """The recipe of a trial. A head's own learning rate keeps its ratio to the network's."""
    start = start_of(recipe, loss)
    parts: dict[str, Settings] = {"loss": {}, "miner": {}, "train": {}}
    for name, value in settings.items():
        part, _, key = name.partition(".")
        parts[part][key] = value
    train = replace(start.train, **parts["train"])  # type: ignore[arg-type]
    if start.train.head_lr is not None:
        train = replace(train, head_lr=start.train.head_lr * train.lr / start.train.lr)
    miner = start.miner
    if parts["miner"]:
        assert miner is not None
        miner = ComponentConfig(miner.name, {**miner.settings, **parts["miner"]})
    return replace(
        start, loss=ComponentConfig(start.loss.name, {**start.loss.settings, **parts["loss"]}), miner=miner, train=train
    )


def suggest(trial: Trial, name: str, where: Range) -> Scalar:
    """Let Optuna choose within a declared range; a trial that is taken up again keeps what it had."""
    if where.kind == "choice":
        chosen: Scalar = trial.suggest_categorical(name, where.options)
        return chosen
    if where.kind == "integer":
        return int(trial.suggest_int(name, int(where.low), int(where.high)))
    return float(trial.suggest_float(name, where.low, where.high, log=where.kind == "log"))
