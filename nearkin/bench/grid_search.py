"""The thesis's coordinate-wise grid search: one setting at a time, each then fixed at its best value.

The grids are those of its table 15. Some values it reports as best are not on them (gamma 58; in its code 0.77, 17.97,
75.66 and 0.39 for multi_similarity), so its actual search differed. Its gamma of soft_triple is taken as 1 / ours: its
table 4 has 10 where the authors of the loss have a temperature of 0.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nearkin.bench.tune_space import Settings, defaults, recipe_for_loss
from nearkin.config.recipe import ComponentConfig, Recipe, Scalar
from nearkin.errors import ConfigError
from nearkin.losses import LOSSES


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
    best = _initial_settings(recipe, loss)
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


def _initial_settings(recipe: Recipe, loss: str) -> Settings:
    base = grid_recipe(recipe, loss)
    loss_settings: Settings = {**LOSSES[loss].settings, **base.loss.settings}
    values: Settings = {f"loss.{name}": value for name, value in loss_settings.items()}
    values["train.class_lr"] = defaults(recipe, loss).get("train.class_lr", base.train.lr)
    if base.miner is not None:
        values["miner.epsilon"] = base.miner.settings.get("epsilon", 0.1)
    return {setting: values[setting] for setting in GRIDS[loss]}
