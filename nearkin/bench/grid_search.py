"""The thesis's way of searching: one setting at a time on a fixed grid, each held at its best for those that follow.

The grids are those of its table 15. The values it prints as found are not all on them (gamma 58; in its code 0.77,
17.97, 75.66 and 0.39 for multi_similarity), so its search was not exactly this one. Its gamma of soft_triple is taken
as 1 / ours: its table 4 has 10 where the loss's authors have a temperature of 0.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nearkin.bench.search_space import Settings, start_of
from nearkin.config.recipe import ComponentConfig, Recipe, Scalar
from nearkin.errors import ConfigError
from nearkin.losses import LOSSES


def _steps(first: int, last: int, unit: float, digits: int) -> tuple[float, ...]:
    return tuple(round(k * unit, digits) for k in range(first, last + 1))


_SHARES = _steps(0, 10, 0.1, 1)  # [0, 1] in steps of 0.1
_EVEN = _steps(1, 50, 2.0, 0)  # (0, 100] in steps of 2

# In the order in which the thesis lists them; its lambda is our base, its epsilon a setting of the miner.
GRIDS: dict[str, dict[str, tuple[float, ...]]] = {
    "multi_similarity": {"loss.base": _SHARES, "loss.alpha": _EVEN, "loss.beta": _EVEN, "miner.epsilon": _SHARES},
    "soft_triple": {
        "loss.margin": _SHARES,
        "loss.scale": _EVEN,
        "train.lr": _steps(1, 10, 1e-5, 5),
        "loss.gamma": tuple(1 / gamma for gamma in _steps(1, 10, 10.0, 0)),
        "loss.tau": _SHARES,
    },
    "proxy_anchor": {"loss.margin": _SHARES, "loss.alpha": _EVEN},
}


@dataclass(frozen=True)
class Point:
    """One trial of the search: a setting's value on its grid, counted from `first`, the number of its first trial."""

    setting: str
    value: Scalar
    first: int


def points(loss: str) -> list[Point]:
    """All trials of a loss, in order.

    >>> len(points("proxy_anchor")), points("proxy_anchor")[11]
    (61, Point(setting='loss.alpha', value=2.0, first=11))
    """
    if loss not in GRIDS:
        raise ConfigError(f"thesis_grid: the thesis has no grid for '{loss}'; it has for {', '.join(GRIDS)}.")
    made: list[Point] = []
    for setting, grid in GRIDS[loss].items():
        first = len(made)
        made += [Point(setting, value, first) for value in grid]
    return made


def start_for_grid(recipe: Recipe, loss: str) -> Recipe:
    """The recipe as the grid needs it: multi_similarity with its miner, whose epsilon is searched."""
    start = start_of(recipe, loss)
    if loss == "multi_similarity" and (start.miner is None or start.miner.name != "multi_similarity"):
        return replace(start, miner=ComponentConfig("multi_similarity"))
    return start


def settings_at(recipe: Recipe, loss: str, number: int, scores: Sequence[float | None]) -> Settings:
    """What trial `number` runs: its own point, and the best of each setting that was searched before.

    scores   of all trials before its setting's first; None for one that has none. Of equals the setting's value so far
             wins, else the first of the grid.
    """
    point = points(loss)[number]
    chosen = _start(recipe, loss)
    for setting, grid in GRIDS[loss].items():
        if setting == point.setting:
            break
        first = next(p.first for p in points(loss) if p.setting == setting)
        tried = zip(scores[first : first + len(grid)], grid, strict=True)
        scored = [
            (score, value == chosen[setting], -k, value) for k, (score, value) in enumerate(tried) if score is not None
        ]
        if scored:  # where every trial failed, the setting stays as it was
            chosen[setting] = max(scored)[-1]
    return {**chosen, point.setting: point.value}


def _start(recipe: Recipe, loss: str) -> Settings:
    start = start_for_grid(recipe, loss)
    known: Settings = {**LOSSES[loss].settings, **start.loss.settings}
    known = {"train.lr": start.train.lr, **{f"loss.{name}": value for name, value in known.items()}}
    if start.miner is not None:
        known["miner.epsilon"] = start.miner.settings.get("epsilon", 0.1)
    return {setting: known[setting] for setting in GRIDS[loss]}
