"""The tests of a tournament, each a function of plain arrays.

    average_ranks         1 for the highest of a row; equals share the mean of their places
    friedman              is any method different from any other?  by shuffling, which also holds for few experiments
    critical_difference   how far apart two mean ranks must lie (Nemenyi)
    wilcoxon              do paired differences lean to one side?  exact, ties and all
    holm                  many p-values made honest
    experiments_needed    how many experiments would settle a pair

What each means for a tournament, and what it assumes, is told in docs/tournament.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from nearkin.errors import import_extra

Floats = NDArray[np.float64]
EXACT = 100  # pairs up to which every pattern of signs is counted; above, the normal curve is as good
SHUFFLES = 10_000  # of ranks; up to as many ways of shuffling are counted one by one
POWER = 0.8
MOST = 1000  # an estimate above this means: do not wait for it
ARE = 3 / math.pi  # a signed-rank test needs 1/ARE as many pairs as a t-test when differences are normal


def average_ranks(values: Floats) -> Floats:
    """Ranks [E, K] of values [E, K] by row: 1 for the highest, the mean of their places for equals, NaN for NaN.

    >>> average_ranks(np.array([[60.0, 70.0, 60.0, np.nan]]))
    array([[2.5, 1. , 2.5, nan]])
    """
    mine, other = values[:, :, None], values[:, None, :]
    higher, equal = (other > mine).sum(2), (other == mine).sum(2)
    return np.where(np.isnan(values), np.nan, higher + (equal + 1) / 2)


@dataclass(frozen=True)
class Friedman:
    """Whether ranks differ at all between methods."""

    chi_squared: float
    p_value: float
    """How often ranks shuffled within each experiment differ as much: right for any number of experiments."""
    curve_p_value: float
    """By the chi-squared curve, as usually printed: for few experiments too cautious or too bold."""
    experiments: int
    methods: int


def friedman(ranks: Floats) -> Friedman:
    """Friedman's test on complete ranks [E, K], corrected for ties."""
    n, k = ranks.shape
    assert min(n, k) >= 2
    assert not np.isnan(ranks).any()
    stats = import_extra("scipy.stats", extra="bench")
    between = float(_spread(ranks))
    within = float((ranks**2).sum()) - n * k * (k + 1) ** 2 / 4
    if within == 0:  # all methods equal in every experiment
        return Friedman(0.0, 1.0, 1.0, n, k)
    chi = (k - 1) * between / within
    # Shuffling leaves `within` as it is, so that the spread of the rank sums orders the draws as chi-squared does.
    as_far = np.concatenate([_spread(draw) >= between - 1e-6 for draw in _shuffled(ranks)])
    drawn = math.factorial(k) ** (n - 1) > SHUFFLES
    return Friedman(
        chi_squared=chi,
        p_value=float((as_far.sum() + drawn) / (len(as_far) + drawn)),  # of draws, what was seen is one
        curve_p_value=float(stats.chi2.sf(chi, k - 1)),
        experiments=n,
        methods=k,
    )


def _spread(ranks: Floats) -> Floats:
    """How far the rank sums of ranks [..., E, K] lie from each other: the sum of squares about their mean."""
    sums: Floats = ranks.sum(-2)
    spread: Floats = np.square(sums - sums.mean(-1, keepdims=True)).sum(-1)
    return spread


def _shuffled(ranks: Floats) -> Iterator[Floats]:
    """Blocks [B, E, K] of ranks shuffled within experiments: every way where they are few, else draws of a fixed seed.

    The first experiment stays as it is: only how the others lie to it counts.
    """
    n, k = ranks.shape
    if math.factorial(k) ** (n - 1) <= SHUFFLES:
        orders = np.array(list(itertools.permutations(range(k))))
        for chosen in itertools.product(orders, repeat=n - 1):
            yield np.vstack([ranks[:1], np.take_along_axis(ranks[1:], np.array(chosen), 1)])[None]
        return
    random = np.random.default_rng(0)
    for _ in range(SHUFFLES // 1000):
        yield random.permuted(np.broadcast_to(ranks, (1000, n, k)), axis=2)


def critical_difference(methods: int, experiments: int, alpha: float = 0.05) -> float:
    """Nemenyi's critical difference: mean ranks that lie nearer to each other cannot be told apart."""
    stats = import_extra("scipy.stats", extra="bench")
    return float(stats.studentized_range.ppf(1 - alpha, methods, math.inf) * _rank_error(methods, experiments))


def nemenyi(mean_ranks: Floats, experiments: int) -> Floats:
    """p-values [K, K] of Nemenyi's test for every pair of mean ranks [K]."""
    stats = import_extra("scipy.stats", extra="bench")
    k = len(mean_ranks)
    apart = np.abs(mean_ranks[:, None] - mean_ranks[None, :]) / _rank_error(k, experiments)
    return np.clip(np.asarray(stats.studentized_range.sf(apart, k, math.inf), dtype=np.float64), 0.0, 1.0)


def _rank_error(k: int, n: int) -> float:
    """The standard error of one mean rank of k methods over n experiments, were all methods equal."""
    return math.sqrt(k * (k + 1) / (12 * n))


def together(mean_ranks: Floats, critical: float) -> list[tuple[int, int]]:
    """Groups that cannot be told apart, as first and last place in ascending mean ranks; none inside another.

    >>> together(np.array([1.0, 2.0, 2.5, 6.0]), critical=1.6)
    [(0, 2)]
    """
    assert (np.diff(mean_ranks) >= 0).all()
    groups: list[tuple[int, int]] = []
    for first, low in enumerate(mean_ranks):
        last = int(np.searchsorted(mean_ranks, low + critical, side="left")) - 1
        if last > first and (not groups or last > groups[-1][1]):
            groups.append((first, last))
    return groups


@dataclass(frozen=True)
class SignedRanks:
    """Wilcoxon's signed-rank test: `lean` in [-1, 1] is the share of the ranks for the first minus that against it."""

    p_value: float
    lean: float
    pairs: int


def wilcoxon(differences: Floats) -> SignedRanks:
    """Two-sided; zero differences are dropped, equal sizes share their ranks.

    Up to 100 pairs the p-value is exact, ties or not: the share of all patterns of signs whose sum of ranks lies as far
    from even as the one seen. Above, the normal curve with the variance of the ranks that are there.
    """
    known = differences[differences != 0]
    if not len(known):
        return SignedRanks(1.0, 0.0, 0)
    doubled = 2 * (len(known) + 1 - average_ranks(np.abs(known)[None])[0])  # whole numbers, 2 for the smallest
    total = float(doubled.sum())
    away = abs(2 * float(doubled[known > 0].sum()) - total)  # twice the distance of the sum from even
    lean = float((np.sign(known) * doubled).sum() / total)
    if len(known) > EXACT:
        p = 2 * NormalDist().cdf(-away / math.sqrt(float((doubled**2).sum())))
        return SignedRanks(min(1.0, p), lean, len(known))
    chance = np.ones(1)  # chance[s]: of the doubled positive ranks adding up to s
    for rank in doubled.astype(np.int64):
        longer = np.zeros(len(chance) + rank)
        longer[: len(chance)] += chance / 2
        longer[rank:] += chance / 2
        chance = longer
    far = np.abs(2 * np.arange(len(chance)) - total) >= away
    return SignedRanks(min(1.0, float(chance[far].sum())), lean, len(known))


def holm(p_values: Floats) -> tuple[Floats, Floats]:
    """Holm's adjusted p-values, and the share of alpha that each raw one had to stay below.

    >>> holm(np.array([0.01, 0.04, 0.03]))[0].round(4).tolist()
    [0.03, 0.06, 0.06]
    """
    m = len(p_values)
    order = np.argsort(p_values, kind="stable")
    times = m - np.arange(m)
    adjusted, share = np.empty(m), np.empty(m)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(p_values[order] * times))
    share[order] = 1 / times
    return adjusted, share


def min_experiments(level: float) -> int:
    """The fewest pairs with which a two-sided signed-rank test can reach a level at all.

    >>> min_experiments(0.05), min_experiments(0.05 / 45)
    (6, 11)
    """
    return math.ceil(1 - math.log2(level) - 1e-9)


def experiments_needed(mean: float, deviation: float, level: float, power: float = POWER) -> int | None:
    """Pairs with which a signed-rank test at `level` would find this mean difference with probability `power`.

    Assumes that further differences are normal with the mean and deviation seen so far. Then
    n = ((z + z')^2 / d^2 + z^2 / 2) pi / 3, where d = mean / deviation and z, z' belong to the level and the power;
    never fewer than can reach the level. None if it is above a thousand, or if the mean is 0: no number would do.
    """
    if mean == 0:
        return None
    z, more = NormalDist().inv_cdf(1 - level / 2), NormalDist().inv_cdf(power)
    n = (((z + more) * deviation / mean) ** 2 + z**2 / 2) / ARE if deviation > 0 else 0.0
    return max(min_experiments(level), math.ceil(n)) if n <= MOST else None


def deviation_allowed(mean: float, pairs: int, level: float, power: float = POWER) -> float:
    """The same equation solved for the deviation: what `pairs` pairs can bear. 0 if they cannot reach the level."""
    z, more = NormalDist().inv_cdf(1 - level / 2), NormalDist().inv_cdf(power)
    room = pairs * ARE - z**2 / 2
    return abs(mean) * math.sqrt(room) / (z + more) if room > 0 and pairs >= min_experiments(level) else 0.0
