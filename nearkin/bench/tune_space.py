"""The search space of a loss, its settings named as in a recipe file (`loss.alpha`, `train.lr`); the thesis's grids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
    loss_config = replace(base.loss, settings={**base.loss.settings, **sections["loss"]})
    return replace(base, loss=loss_config, miner=miner, train=train)


def suggest(trial: Trial, name: str, range_: Range) -> Scalar:
    """Let Optuna choose a value within a declared range."""
    if range_.kind == "choice":
        value: Scalar = trial.suggest_categorical(name, range_.options)
        return value
    if range_.kind == "integer":
        return int(trial.suggest_int(name, int(range_.low), int(range_.high)))
    return float(trial.suggest_float(name, range_.low, range_.high, log=range_.kind == "log"))


# --- the thesis's coordinate-wise grid search: one setting at a time, each then fixed at its best value ---
# Some values that its table 15 reports as best are not on the grids (gamma 58; in its code 0.77, 17.97, 75.66 and 0.39
# for multi_similarity), so its actual search differed. Its gamma of soft_triple is 1 / ours: its table 4 has 10
# where the authors of the loss have a temperature of 0.1.


def _grid(first: int, last: int, step: float, digits: int) -> tuple[float, ...]:
    return tuple(round(k * step, digits) for k in range(first, last + 1))


_UNIT = _grid(0, 10, 0.1, 1)  # [0, 1] in steps of 0.1
_EVEN = _grid(1, 50, 2.0, 0)  # (0, 100] in steps of 2

# In the thesis's order; its lambda is our base, its epsilon a setting of the miner.
GRIDS: dict[str, dict[str, tuple[float, ...]]] = {
    "multi_similarity": {"loss.base": _UNIT, "loss.alpha": _EVEN, "loss.beta": _EVEN, "miner.epsilon": _UNIT},
    "soft_triple": {
        "loss.margin": _UNIT,
        "loss.scale": _EVEN,
        "train.class_lr": _grid(1, 10, 1e-5, 5),  # "weights lr": of the class weights
        "loss.gamma": tuple(1 / gamma for gamma in _grid(1, 10, 10.0, 0)),
        "loss.tau": _UNIT,
    },
    "proxy_anchor": {"loss.margin": _UNIT, "loss.alpha": _EVEN},
}


@dataclass(frozen=True)
class GridPoint:
    """One trial of the grid search."""

    setting: str  # the setting that is varied
    value: Scalar
    first: int  # number of the first trial that varies this setting


def grid_points(loss: str, coarse: bool = False) -> list[GridPoint]:
    """Return all trials of a loss, in order; `coarse` keeps the ends and the middle of each grid."""
    if loss not in GRIDS:
        raise ConfigError(f"thesis_grid: the thesis has no grid for '{loss}'. Available: {', '.join(GRIDS)}.")
    points: list[GridPoint] = []
    for setting, grid in GRIDS[loss].items():
        first = len(points)
        grid = (grid[0], grid[len(grid) // 2], grid[-1]) if coarse else grid
        points += [GridPoint(setting, value, first) for value in grid]
    return points


def grid_recipe(recipe: Recipe, loss: str) -> Recipe:
    base = recipe_for_loss(recipe, loss)
    if loss != "multi_similarity":
        return base
    if base.miner is None or base.miner.name != "multi_similarity":
        base = replace(base, miner=ComponentConfig("multi_similarity"))
    if base.train.samples_per_class:
        return base
    # The thesis takes five images per class for this loss; random batches have few positives.
    batch_size = max(10, base.train.batch_size // 5 * 5)
    return replace(base, train=replace(base.train, samples_per_class=5, batch_size=batch_size))


def trial_settings(
    recipe: Recipe, loss: str, number: int, scores: Sequence[float | None], coarse: bool = False
) -> Settings:
    """Return the settings of a trial: its grid point, and the best value of each setting searched before."""
    points = grid_points(loss, coarse)
    base = grid_recipe(recipe, loss)
    known: Settings = {f"loss.{name}": value for name, value in {**LOSSES[loss].settings, **base.loss.settings}.items()}
    known["train.class_lr"] = defaults(recipe, loss).get("train.class_lr", base.train.lr)
    known["miner.epsilon"] = base.miner.settings.get("epsilon", 0.1) if base.miner is not None else 0.1
    best = {setting: known[setting] for setting in GRIDS[loss]}
    for setting in GRIDS[loss]:
        if setting == points[number].setting:
            break
        scored = [
            (score, point.value == best[setting], -k, point.value)
            for k, (point, score) in enumerate(zip(points, scores, strict=True))
            if point.setting == setting and score is not None
        ]
        if scored:  # if every trial failed, the setting keeps its value
            best[setting] = max(scored)[-1]
    return {**best, points[number].setting: points[number].value}
