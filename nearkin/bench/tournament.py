"""Tournament: methods are ranked in every experiment, and tests tell which differences are significant.

A method that failed in an experiment is not ranked there, neither last nor 0. Friedman's and Nemenyi's tests use the
experiments in which every method has a value; a pair is tested on the experiments in which both have one.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from nearkin.bench import statistics
from nearkin.bench.results import DIGITS, Floats, Result, Table, tabulate
from nearkin.bench.statistics import Friedman, average_ranks
from nearkin.errors import ConfigError, DataError
from nearkin.metrics.bootstrap import bootstrap, mean, percentiles

PairUnit = Literal["experiment", "run"]
Unit = Literal["auto", "experiment", "run"]


@dataclass(frozen=True)
class Standing:
    """The ranks of one method."""

    method: str
    total: float
    mean: float
    std: float  # sample standard deviation of its ranks; NaN for one experiment
    # experiments in which it was first, second and third; tied methods both get the better medal
    medals: tuple[int, int, int]
    ranked: int  # experiments in which it is ranked
    experiments: int  # experiments of the tournament
    failed: int
    low: float = math.nan  # lower end of the interval of the mean rank (bootstrap over experiments)
    high: float = math.nan  # upper end of that interval


@dataclass(frozen=True)
class Pair:
    """Comparison of two methods; `first` has the better (lower) mean rank."""

    first: str
    second: str
    wins: int  # experiments (or runs) in which the first scores higher
    losses: int  # experiments (or runs) in which it scores lower
    ties: int  # experiments (or runs) in which both score the same
    difference: float  # mean of first minus second
    lean: float  # rank-biserial correlation of Wilcoxon's test: 1 if all differences favour the first, -1 the second
    p_value: float  # Wilcoxon's signed-rank test
    p_holm: float  # the same, corrected for all pairs of the tournament
    p_nemenyi: float  # Nemenyi's test on the mean ranks; NaN without Friedman's test
    # share of bootstrap samples of the experiments in which the first has the better mean rank, ties counted half
    ahead: float
    next_win: float  # probability that the first scores higher in one more: (wins + ties / 2 + 1) / (all + 2)
    significant: bool
    # about how many more experiments, or seeds per experiment, it takes to be significant; None if it already is, if
    # infeasible or unknown, and for experiments if compared run by run
    more_experiments: int | None = None
    more_seeds: int | None = None

    @property
    def leader(self) -> str:
        """The method that the test favours; the first if neither."""
        return self.first if self.lean >= 0 else self.second

    @property
    def trailer(self) -> str:
        return self.second if self.lean >= 0 else self.first


@dataclass(frozen=True, eq=False)
class Tournament:
    """The result of `run_tournament`.

    Attributes:
        table: The results.
        ranks: [E, K] ranks in the order of the table; NaN where a method failed.
        standings: Best mean rank first.
        pairs: In the order of the standings: first with second, first with third, ...
        friedman: None with fewer than two complete experiments.
        critical: Nemenyi's critical difference; NaN without Friedman's test.
        complete_ranks: (method, mean rank) over the complete experiments, best first: what the critical difference
            applies to.
        groups: Methods without a significant difference by Nemenyi's test.
        unit: What pairs are compared on: experiments, or runs paired by seed.
        alpha: Significance level.
    """

    table: Table
    ranks: Floats
    standings: tuple[Standing, ...]
    pairs: tuple[Pair, ...]
    friedman: Friedman | None
    critical: float
    complete_ranks: tuple[tuple[str, float], ...]
    groups: tuple[tuple[str, ...], ...]
    unit: PairUnit
    alpha: float


def run_tournament(
    results: Iterable[Result] | Table, *, alpha: float = 0.05, draws: int = 10_000, seed: int = 0, unit: Unit = "auto"
) -> Tournament:
    """Rank methods over experiments and test their differences.

    Args:
        results: Runs of at least two methods.
        alpha: Significance level: the probability of any false positive among all pairs. Intervals have level
            1 - alpha.
        draws: Bootstrap samples of the experiments.
        seed: Seed of the bootstrap.
        unit: What pairs are compared on. "experiment": the mean over seeds, paired by seed; generalizes to similar
            experiments. "run": every run against the run of the same seed; holds for these experiments only. "auto":
            experiments, unless there are too few for any test to be significant and several seeds.

    Returns:
        Standings, pairs and tests.

    Raises:
        ConfigError: A setting is out of range.
        DataError: Fewer than two methods, or invalid results.

    Example:
        >>> tournament = run_tournament(
        ...     [
        ...         Result(f"cub {dim}", name, 0, 60 + dim / 100 + gain)
        ...         for dim in (64, 128, 256, 512, 768, 1024)
        ...         for name, gain in (("a", 1.0), ("b", 0.0))
        ...     ]
        ... )
        >>> tournament.standings[0].method, tournament.standings[0].medals, tournament.pairs[0].p_holm
        ('a', (6, 0, 0), 0.03125)
    """
    if not 0 < alpha < 1:
        raise ConfigError(f"alpha: expected a fraction between 0 and 1, for example 0.05; got {alpha}.")
    if draws < 100:
        raise ConfigError(f"draws: at least 100 are needed for an interval; got {draws}.")
    table = results if isinstance(results, Table) else tabulate(results)
    if len(table.methods) < 2:
        raise DataError(f"A tournament needs at least two methods; got only {table.methods[0]}.")
    if unit not in ("auto", "experiment", "run"):
        raise ConfigError(f"unit: expected auto, experiment or run; got '{unit}'.")
    few = len(table.experiments) < statistics.min_experiments(alpha) and table.seeds > 1
    pair_unit: PairUnit = unit if unit != "auto" else "run" if few else "experiment"
    ranks = average_ranks(table.means)
    samples = bootstrap(ranks.T, np.arange(len(ranks)), draws=draws, seed=seed)  # [draws, K] mean ranks
    standings = _standings(table, ranks, samples, 1 - alpha)
    order = [table.methods.index(standing.method) for standing in standings]
    complete = average_ranks(table.means[table.complete])
    n, k = complete.shape
    test, critical, groups, p_nemenyi = None, math.nan, [], np.full((k, k), math.nan)
    mean_ranks: list[tuple[float, int]] = []  # mean rank and index in the standings
    if n >= 2:
        test, critical = statistics.friedman(complete), statistics.critical_difference(k, n, alpha)
        means = complete.mean(0)
        mean_ranks = sorted((float(means[j]), order.index(j)) for j in range(k))
        groups = statistics.nemenyi_groups(np.array([mean for mean, _ in mean_ranks]), critical)
        p_nemenyi = statistics.nemenyi(means, n)
    return Tournament(
        table=table,
        ranks=ranks,
        standings=standings,
        pairs=_pairs(table, order, pair_unit, samples, p_nemenyi, alpha),
        friedman=test,
        critical=critical,
        complete_ranks=tuple((standings[index].method, mean) for mean, index in mean_ranks),
        groups=tuple(tuple(standings[index].method for _, index in mean_ranks[a : b + 1]) for a, b in groups),
        unit=pair_unit,
        alpha=alpha,
    )


def _standings(table: Table, ranks: Floats, samples: Floats, level: float) -> tuple[Standing, ...]:
    standings = []
    positions = 1 + (table.means[:, None, :] > table.means[:, :, None]).sum(2)  # ties share the better position
    for j, method in enumerate(table.methods):
        ranked = ~np.isnan(ranks[:, j])
        values, n = ranks[ranked, j], int(ranked.sum())
        low, high = percentiles(samples[:, j], level) if n > 1 else (math.nan, math.nan)
        first, second, third = (int((positions[ranked, j] == position).sum()) for position in (1, 2, 3))
        standings.append(
            Standing(
                method=method,
                total=float(values.sum()),
                mean=float(values.sum() / n) if n else math.nan,
                std=float(values.std(ddof=1)) if n > 1 else math.nan,
                medals=(first, second, third),
                ranked=n,
                experiments=len(table.experiments),
                failed=sum(result.method == method for result in table.failures),
                low=low,
                high=high,
            )
        )
    return tuple(sorted(standings, key=lambda s: (math.isnan(s.mean), s.mean)))


def _seed_differences(table: Table, j: int, k: int) -> list[Floats]:
    """Method j minus k by seed, one array per experiment with both; the means if they have no seed in common."""
    differences = []
    for experiment, means in zip(table.experiments, table.means, strict=True):
        a, b = table.runs[experiment, table.methods[j]], table.runs[experiment, table.methods[k]]
        common = sorted(a.keys() & b.keys())
        if a and b:
            differences.append(np.array([a[seed] - b[seed] for seed in common] or [means[j] - means[k]]))
    return differences


def _pairs(
    table: Table, order: list[int], unit: PairUnit, samples: Floats, p_nemenyi: Floats, alpha: float
) -> tuple[Pair, ...]:
    combinations = list(itertools.combinations(order, 2))
    by_seed = [_seed_differences(table, *pair) for pair in combinations]
    differences = []  # what each pair is tested on: one difference per experiment, or per run
    for seeds in by_seed:
        values = [float(d.mean()) for d in seeds] if unit == "experiment" else [float(run) for d in seeds for run in d]
        differences.append(np.array([round(value, DIGITS) for value in values], dtype=np.float64))
    tests = [statistics.wilcoxon(d) for d in differences]
    p_holm, share = statistics.holm(np.array([test.p_value for test in tests]))
    pairs = []
    for index, (i, j) in enumerate(combinations):
        d, test = differences[index], tests[index]
        wins, losses = int((d > 0).sum()), int((d < 0).sum())
        significant = bool(p_holm[index] <= alpha)
        more_experiments, more_seeds = None, None
        if not significant:
            more_experiments, more_seeds = _more_needed(d, by_seed[index], unit, alpha * share[index])
        pairs.append(
            Pair(
                first=table.methods[i],
                second=table.methods[j],
                wins=wins,
                losses=losses,
                ties=len(d) - wins - losses,
                difference=mean(d),
                lean=test.lean,
                p_value=test.p_value,
                p_holm=float(p_holm[index]),
                p_nemenyi=float(p_nemenyi[i, j]),
                ahead=mean(np.sign(samples[:, j] - samples[:, i]) / 2 + 0.5),
                next_win=(wins + (len(d) - wins - losses) / 2 + 1) / (len(d) + 2),
                significant=significant,
                more_experiments=more_experiments,
                more_seeds=more_seeds,
            )
        )
    return tuple(pairs)


def _more_needed(d: Floats, by_seed: list[Floats], unit: PairUnit, level: float) -> tuple[int | None, int | None]:
    """Estimate how many more experiments, or more seeds per experiment, would make a pair significant.

    More seeds average out the variance between seeds; the variance between experiments remains. It is the variance of
    the experiments' differences minus the part that the seeds explain.
    """
    n = len(d)
    if n < 2:
        return None, None
    gain, variance = float(d.mean()), float(d.var(ddof=1))
    needed = statistics.experiments_needed(gain, math.sqrt(variance), level)
    more = None if needed is None else max(1, needed - n)
    if unit == "run":
        return None, None if more is None else math.ceil(more / len(by_seed))
    if min(len(seeds) for seeds in by_seed) < 2:
        return more, None
    num_seeds = float(np.mean([len(seeds) for seeds in by_seed]))
    seed_variance = float(np.mean([seeds.var(ddof=1) for seeds in by_seed]))
    experiment_variance = max(0.0, variance - seed_variance / num_seeds)
    allowed = statistics.max_std(gain, n, level) ** 2 - experiment_variance
    if allowed <= 0 or seed_variance <= 0:
        return more, None
    return more, max(1, math.ceil(seed_variance / allowed - num_seeds))
