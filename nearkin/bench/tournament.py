"""A tournament: methods are ranked in every experiment, and tests say which differences are settled.

    judged = judge(results)
    judged.standings      the thesis's table: total, mean and deviation of the ranks, medals
    judged.friedman       is there any difference at all?
    judged.pairs          every pair: who leads, how sure that is, what would settle it

An method that failed in an experiment is not ranked there, neither last nor 0: the others are ranked among themselves
and the standing shows how many experiments stand behind it. Friedman's and Nemenyi's tests take the experiments in
which nobody failed; a pair is tested on the experiments in which both have a value.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from nearkin.bench.results import DIGITS, Floats, Result, Table, read_results, tabulate
from nearkin.bench.statistics import (
    Friedman,
    average_ranks,
    critical_difference,
    deviation_allowed,
    experiments_needed,
    friedman,
    holm,
    min_experiments,
    nemenyi,
    together,
    wilcoxon,
)
from nearkin.errors import ConfigError, DataError
from nearkin.metrics.bootstrap import bootstrap, mean, percentiles

__all__ = ["Pair", "Result", "Standing", "Tournament", "read_results", "run_tournament", "tabulate"]

Unit = Literal["auto", "experiment", "run"]


@dataclass(frozen=True)
class Standing:
    """An method's ranks, summed up. `low` and `high` bound its mean rank (bootstrap over experiments)."""

    method: str
    total: float
    mean: float
    std: float
    """Sample deviation of its ranks; NaN for one experiment."""
    medals: tuple[int, int, int]
    """Experiments in which it was first, second, third; methods that are equal both get the medal."""
    ranked: int
    """Experiments behind these numbers."""
    experiments: int
    """Experiments that were held."""
    failed: int
    """Runs without a value."""
    low: float = math.nan
    high: float = math.nan


@dataclass(frozen=True)
class Pair:
    """Two methods compared; `first` has the better (lower) mean rank."""

    first: str
    second: str
    wins: int
    losses: int
    ties: int
    """Experiments, or runs, in which the first is higher, lower, equal."""
    difference: float
    """Mean of first minus second."""
    lean: float
    """Which way Wilcoxon's test leans: above 0 to the first, 1 if all differences do."""
    p_value: float
    """Wilcoxon's signed-rank test."""
    p_holm: float
    """The same, corrected for all pairs of the tournament."""
    p_nemenyi: float
    """From mean ranks alone; NaN where Friedman's test could not be held."""
    ahead: float
    """Share of bootstrap draws of the experiments in which the first has the better mean rank, equals counted half."""
    next_win: float
    """Chance that the first is higher in one more: (wins + ties / 2 + 1) / (all + 2); even odds before the first."""
    significant: bool
    """Whether p_holm is at most alpha."""
    more_experiments: int | None = None
    """About how many more would settle it; None if settled, out of reach, or compared run by run."""
    more_seeds: int | None = None
    """About how many more seeds for each experiment would; None if settled, out of reach, or not to be known."""

    @property
    def leader(self) -> str:
        """Whom the test favours; the first where it favours neither."""
        return self.first if self.lean >= 0 else self.second

    @property
    def trailer(self) -> str:
        return self.second if self.lean >= 0 else self.first


@dataclass(frozen=True, eq=False)
class Tournament:
    """All that `judge` found."""

    table: Table
    ranks: Floats
    """[E, K] in the order of the table; NaN where an method failed."""
    standings: tuple[Standing, ...]
    """Best first."""
    pairs: tuple[Pair, ...]
    """In the order of the standings: first with second, first with third, ..."""
    friedman: Friedman | None
    """None with fewer than two complete experiments."""
    critical: float
    """Nemenyi's critical difference; NaN without Friedman's test."""
    complete_ranks: tuple[tuple[str, float], ...]
    """Mean ranks over the complete experiments, best first: what the critical difference applies to."""
    groups: tuple[tuple[str, ...], ...]
    """Entrants that Nemenyi's test cannot tell apart."""
    unit: Literal["experiment", "run"]
    """What a pair is compared on: experiments, or runs paired by seed."""
    alpha: float


def run_tournament(
    results: Iterable[Result] | Table, *, alpha: float = 0.05, draws: int = 10_000, seed: int = 0, unit: Unit = "auto"
) -> Tournament:
    """Hold the tournament.

    alpha   chance of calling any difference settled that is none; intervals are of level 1 - alpha
    draws   bootstrap draws of the experiments, started from `seed`
    unit    what a pair is compared on. "experiment": the mean over seeds, paired by seed; says what holds for
            experiments like these. "run": every run with its twin of the same seed; says what holds for these very
            experiments. "auto": experiments, unless there are too few for a test to find anything and seeds to go by

    >>> judged = run_tournament([Result(f"cub {dim}", name, 0, 60 + dim / 100 + gain)
    ...                 for dim in (64, 128, 256, 512, 768, 1024) for name, gain in (("a", 1.0), ("b", 0.0))])
    >>> judged.standings[0].method, judged.standings[0].medals, judged.pairs[0].p_holm
    ('a', (6, 0, 0), 0.03125)
    """
    if not 0 < alpha < 1:
        raise ConfigError(f"alpha: expected a fraction between 0 and 1, for example 0.05; got {alpha}.")
    if draws < 100:
        raise ConfigError(f"draws: at least 100 are needed for an interval; got {draws}.")
    table = results if isinstance(results, Table) else tabulate(results)
    if len(table.methods) < 2:
        raise DataError(f"A tournament needs at least two methods; got {table.methods[0]} alone.")
    ranks = average_ranks(table.means)
    drawn = _draw(ranks, draws, seed)
    best = _standings(table, ranks, drawn, 1 - alpha)
    order = [table.methods.index(standing.method) for standing in best]
    whole = average_ranks(table.means[table.complete])
    n, k = whole.shape
    kind = _unit(table, unit, alpha)
    test, critical, groups, apart = None, math.nan, [], np.full((k, k), math.nan)
    complete: list[tuple[float, int]] = []
    if n >= 2:
        test, critical = friedman(whole), critical_difference(k, n, alpha)
        means = whole.mean(0)
        complete = sorted((float(means[j]), order.index(j)) for j in range(k))
        groups = together(np.array([mean for mean, _ in complete]), critical)
        apart = nemenyi(means, n)
    return Tournament(
        table=table,
        ranks=ranks,
        standings=best,
        pairs=_pairs(table, order, kind, drawn, apart, alpha),
        friedman=test,
        critical=critical,
        complete_ranks=tuple((best[place].method, mean) for mean, place in complete),
        groups=tuple(tuple(best[place].method for _, place in complete[a : b + 1]) for a, b in groups),
        unit=kind,
        alpha=alpha,
    )


def _draw(ranks: Floats, draws: int, seed: int) -> Floats:
    """[draws, K] mean ranks when experiments are drawn with replacement."""
    return bootstrap(ranks.T, np.arange(len(ranks)), draws=draws, seed=seed)


def _standings(table: Table, ranks: Floats, drawn: Floats, level: float) -> tuple[Standing, ...]:
    out = []
    places = 1 + (table.means[:, None, :] > table.means[:, :, None]).sum(2)  # equals share the better place
    for j, method in enumerate(table.methods):
        held = ~np.isnan(ranks[:, j])
        mine, n = ranks[held, j], int(held.sum())
        low, high = percentiles(drawn[:, j], level) if n > 1 else (math.nan, math.nan)
        first, second, third = (int((places[held, j] == place).sum()) for place in (1, 2, 3))
        out.append(
            Standing(
                method=method,
                total=float(mine.sum()),
                mean=float(mine.sum() / n) if n else math.nan,
                std=float(mine.std(ddof=1)) if n > 1 else math.nan,
                medals=(first, second, third),
                ranked=n,
                experiments=len(table.experiments),
                failed=table.failed(method),
                low=low,
                high=high,
            )
        )
    return tuple(sorted(out, key=lambda s: (math.isnan(s.mean), s.mean)))


# --- pairs -----------------------------------------------------------------------------------------------------------


def _unit(table: Table, unit: Unit, alpha: float) -> Literal["experiment", "run"]:
    if unit not in ("auto", "experiment", "run"):
        raise ConfigError(f"unit: expected auto, experiment or run; got '{unit}'.")
    if unit != "auto":
        return unit
    return "run" if len(table.experiments) < min_experiments(alpha) and table.seeds > 1 else "experiment"


def _seed_differences(table: Table, first: str, second: str) -> list[Floats]:
    """First minus second, an array for each experiment in which both have a value: by seed, or one of the means."""
    out = []
    for i, experiment in enumerate(table.experiments):
        a, b = table.runs[experiment, first], table.runs[experiment, second]
        common = sorted(a.keys() & b.keys())
        if common:
            out.append(np.array([a[seed] - b[seed] for seed in common]))
        elif a and b:
            j, k = table.methods.index(first), table.methods.index(second)
            out.append(np.array([table.means[i, j] - table.means[i, k]]))
    return out


def _differences(by_seed: list[Floats], unit: Literal["experiment", "run"]) -> Floats:
    """What a pair is tested on: one difference for each experiment, or all of them."""
    kept: list[float] = [d.mean() for d in by_seed] if unit == "experiment" else [run for d in by_seed for run in d]
    return np.array([round(float(d), DIGITS) for d in kept], dtype=np.float64)


def _pairs(
    table: Table, order: list[int], unit: Literal["experiment", "run"], drawn: Floats, apart: Floats, alpha: float
) -> tuple[Pair, ...]:
    chosen = list(itertools.combinations(order, 2))
    seeds = [_seed_differences(table, table.methods[i], table.methods[j]) for i, j in chosen]
    differences = [_differences(found, unit) for found in seeds]
    tests = [wilcoxon(d) for d in differences]
    adjusted, share = holm(np.array([test.p_value for test in tests]))
    out = []
    for at, (i, j) in enumerate(chosen):
        d, test = differences[at], tests[at]
        wins, losses = int((d > 0).sum()), int((d < 0).sum())
        significant = bool(adjusted[at] <= alpha)
        experiments, more_seeds = (None, None) if significant else _needed(d, seeds[at], unit, alpha * share[at])
        out.append(
            Pair(
                first=table.methods[i],
                second=table.methods[j],
                wins=wins,
                losses=losses,
                ties=len(d) - wins - losses,
                difference=mean(d),
                lean=test.lean,
                p_value=test.p_value,
                p_holm=float(adjusted[at]),
                p_nemenyi=float(apart[i, j]),
                ahead=mean(np.sign(drawn[:, j] - drawn[:, i]) / 2 + 0.5),
                next_win=(wins + (len(d) - wins - losses) / 2 + 1) / (len(d) + 2),
                significant=significant,
                more_experiments=experiments,
                more_seeds=more_seeds,
            )
        )
    return tuple(out)


def _needed(
    d: Floats, by_seed: list[Floats], unit: Literal["experiment", "run"], level: float
) -> tuple[int | None, int | None]:
    """How many more experiments, or how many more seeds for each experiment, would settle a pair.

    More seeds average away the part of the scatter that comes from seeds; what differs from experiment to experiment
    stays. Its variance is that of the experiments' differences less the share that the seeds explain.
    """
    n = len(d)
    if n < 2:
        return None, None
    gain, variance = float(d.mean()), float(d.var(ddof=1))
    total = experiments_needed(gain, math.sqrt(variance), level)
    more = None if total is None else max(1, total - n)
    if unit == "run":
        return None, None if more is None else math.ceil(more / len(by_seed))
    if min(len(seeds) for seeds in by_seed) < 2:
        return more, None
    count = float(np.mean([len(seeds) for seeds in by_seed]))
    from_seeds = float(np.mean([seeds.var(ddof=1) for seeds in by_seed]))
    stays = max(0.0, variance - from_seeds / count)
    room = deviation_allowed(gain, n, level) ** 2 - stays
    return more, max(1, math.ceil(from_seeds / room - count)) if room > 0 and from_seeds > 0 else None
