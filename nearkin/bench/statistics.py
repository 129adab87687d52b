"""The statistical tests of a tournament, as functions of plain arrays.

docs/tournament.md explains what each means for a tournament and what it assumes.
"""

import itertools
import math
from collections.abc import Iterator
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearkin.errors import import_extra

Floats = NDArray[np.float64]
MAX_EXACT_PAIRS = 100  # above, Wilcoxon's test uses the normal approximation
MAX_PERMUTATIONS = 10_000  # if there are more, Friedman's test samples this many
POWER = 0.8
MAX_EXPERIMENTS = 1000  # a larger estimate counts as infeasible
ARE = 3 / math.pi  # asymptotic relative efficiency of the signed-rank test against the t-test, for normal differences


def average_ranks(values: Floats) -> Floats:
    """Rank scores [E, K] by row, 1 for the highest; ties share the mean of their ranks, NaN is not ranked."""
    rankdata = import_extra("scipy.stats", extra="bench").rankdata
    return np.asarray(rankdata(-values, axis=1, nan_policy="omit"), dtype=np.float64)


class Friedman(NamedTuple):
    """Result of Friedman's test."""

    chi_squared: float  # the statistic, corrected for ties
    p_value: float  # by permutation of the ranks within each experiment: valid for any number of experiments
    chi_squared_p_value: float  # by the chi-squared approximation, as usually reported; inaccurate for few experiments
    experiments: int


def friedman(ranks: Floats) -> Friedman:
    """Test complete ranks [E, K]; scipy's function rejects two methods and has only the chi-squared approximation."""
    n, k = ranks.shape
    stats = import_extra("scipy.stats", extra="bench")
    between = float(_rank_sum_spread(ranks))
    within = float((ranks**2).sum()) - n * k * (k + 1) ** 2 / 4
    if within == 0:  # all methods tie in every experiment
        return Friedman(0.0, 1.0, 1.0, n)
    chi = (k - 1) * between / within
    # Permutation does not change `within`, so the spread of the rank sums orders permutations as chi-squared does.
    as_extreme = np.concatenate([_rank_sum_spread(block) >= between - 1e-6 for block in _permuted_ranks(ranks)])
    sampled = math.factorial(k) ** (n - 1) > MAX_PERMUTATIONS
    return Friedman(
        chi_squared=chi,
        p_value=float((as_extreme.sum() + sampled) / (len(as_extreme) + sampled)),  # the observed ranks count as one
        chi_squared_p_value=float(stats.chi2.sf(chi, k - 1)),
        experiments=n,
    )


def _rank_sum_spread(ranks: Floats) -> Floats:
    """Sum of squared deviations of the rank sums of ranks [..., E, K] from their mean."""
    sums: Floats = ranks.sum(-2)
    spread: Floats = np.square(sums - sums.mean(-1, keepdims=True)).sum(-1)
    return spread


def _permuted_ranks(ranks: Floats) -> Iterator[Floats]:
    """Yield blocks [B, E, K] of ranks permuted within experiments: all permutations if few, else a seeded sample.

    When enumerating, the first experiment stays fixed: only permutations relative to it matter. scipy's
    permutation_test(permutation_type="samples") would enumerate k! times as many.
    """
    n, k = ranks.shape
    if math.factorial(k) ** (n - 1) <= MAX_PERMUTATIONS:
        orders = np.array(list(itertools.permutations(range(k))))
        for chosen in itertools.product(orders, repeat=n - 1):
            yield np.vstack([ranks[:1], np.take_along_axis(ranks[1:], np.array(chosen), 1)])[None]
        return
    rng = np.random.default_rng(0)
    for _ in range(MAX_PERMUTATIONS // 1000):
        yield rng.permuted(np.broadcast_to(ranks, (1000, n, k)), axis=2)


def critical_difference(methods: int, experiments: int, alpha: float = 0.05) -> float:
    """Nemenyi's critical difference: two mean ranks at least this far apart differ significantly."""
    studentized_range = import_extra("scipy.stats", extra="bench").studentized_range
    return float(studentized_range.ppf(1 - alpha, methods, math.inf) * _rank_error(methods, experiments))


def nemenyi(mean_ranks: Floats, experiments: int) -> Floats:
    """P-values [K, K] of all pairs of mean ranks [K], as scikit-posthocs without its imports (pandas, statsmodels)."""
    studentized_range = import_extra("scipy.stats", extra="bench").studentized_range
    distances = np.abs(mean_ranks[:, None] - mean_ranks) / _rank_error(len(mean_ranks), experiments)
    return np.clip(np.asarray(studentized_range.sf(distances, len(mean_ranks), math.inf), dtype=np.float64), 0.0, 1.0)


def _rank_error(k: int, n: int) -> float:
    """Standard error of a mean rank of k methods over n experiments under the null hypothesis."""
    return math.sqrt(k * (k + 1) / (12 * n))


def nemenyi_groups(mean_ranks: Floats, critical: float) -> list[tuple[int, int]]:
    """First and last index of the maximal groups without a significant difference: the bars of the diagram."""
    groups: list[tuple[int, int]] = []
    for first, low in enumerate(mean_ranks):
        last = int(np.searchsorted(mean_ranks, low + critical, side="left")) - 1
        if last > first and (not groups or last > groups[-1][1]):
            groups.append((first, last))
    return groups


class SignedRanks(NamedTuple):
    """Result of Wilcoxon's signed-rank test."""

    p_value: float  # two-sided
    lean: float  # rank-biserial correlation in [-1, 1]: share of the ranks in favour minus share against
    pairs: int  # number of differences other than zero


def wilcoxon(differences: Floats) -> SignedRanks:
    """Test whether paired differences are centred on zero (Wilcoxon's signed-rank test, two-sided).

    Up to 100 pairs the p-value is exact, also with ties: the share of all sign patterns whose rank sum is at least as
    extreme. scipy's exact distribution assumes that there are no ties. Above, scipy's normal approximation.
    """
    nonzero = differences[differences != 0]
    n = len(nonzero)
    if not n:
        return SignedRanks(1.0, 0.0, 0)
    stats = import_extra("scipy.stats", extra="bench")
    doubled = 2 * stats.rankdata(np.abs(nonzero))  # integers, also with ties
    total = float(doubled.sum())
    distance = abs(2 * float(doubled[nonzero > 0].sum()) - total)  # twice the distance of the sum from its mean
    lean = float((np.sign(nonzero) * doubled).sum() / total)
    if n > MAX_EXACT_PAIRS:
        return SignedRanks(float(stats.wilcoxon(nonzero, method="asymptotic").pvalue), lean, n)
    probability = np.ones(1)  # probability[s]: that the doubled positive ranks sum to s
    for rank in doubled.astype(np.int64):
        longer = np.zeros(len(probability) + rank)
        longer[: len(probability)] += probability / 2
        longer[rank:] += probability / 2
        probability = longer
    as_extreme = np.abs(2 * np.arange(len(probability)) - total) >= distance
    return SignedRanks(min(1.0, float(probability[as_extreme].sum())), lean, n)


def holm(p_values: Floats) -> tuple[Floats, Floats]:
    """Holm's correction: the adjusted p-values, and the share of alpha that each raw p-value is compared with."""
    m = len(p_values)
    order = np.argsort(p_values, kind="stable")
    factors = m - np.arange(m)
    adjusted, share = np.empty(m), np.empty(m)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(p_values[order] * factors))
    share[order] = 1 / factors
    return adjusted, share


def min_experiments(level: float) -> int:
    """Return the smallest number of pairs with which a two-sided signed-rank test can reach a level at all."""
    return math.ceil(1 - math.log2(level) - 1e-9)


def experiments_needed(mean: float, std: float, level: float, power: float = POWER) -> int | None:
    """Estimate the number of pairs at which a signed-rank test would find a mean difference significant.

    Assumes that further differences are normal with the observed mean and standard deviation. Then
    n = ((z + z')^2 / d^2 + z^2 / 2) pi / 3, where d = mean / std and z, z' belong to the level and the power. None if
    the number exceeds 1000 or the mean is 0.
    """
    if mean == 0:
        return None
    z_level, z_power = NormalDist().inv_cdf(1 - level / 2), NormalDist().inv_cdf(power)
    n = (((z_level + z_power) * std / mean) ** 2 + z_level**2 / 2) / ARE if std > 0 else 0.0
    return max(min_experiments(level), math.ceil(n)) if n <= MAX_EXPERIMENTS else None


def max_std(mean: float, pairs: int, level: float, power: float = POWER) -> float:
    """The largest standard deviation at which `pairs` pairs suffice (see `experiments_needed`); 0 if none does."""
    z_level, z_power = NormalDist().inv_cdf(1 - level / 2), NormalDist().inv_cdf(power)
    room = pairs * ARE - z_level**2 / 2
    return abs(mean) * math.sqrt(room) / (z_level + z_power) if room > 0 and pairs >= min_experiments(level) else 0.0
