"""Confidence intervals and paired comparisons of mean scores. Queries of one class are correlated, and resampling
single ones would give intervals that are too narrow, so whole classes are resampled, and swapped in the test.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearkin.errors import ConfigError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_MAX_CELLS = 2**22  # random numbers drawn at a time


def mean(values: Floats) -> float:
    """Mean without NaN, rounded once, so that it does not depend on the order of the values; NaN if all values are."""
    known = values[~np.isnan(values)]
    return math.fsum(known.tolist()) / len(known) if len(known) else math.nan


def class_sums(values: Floats, codes: Ints) -> tuple[Floats, Floats]:
    """Sums and counts [M, C] of the values [M, Q] of each class, ignoring NaN; codes [Q] are the classes."""
    _, code = np.unique(codes, return_inverse=True)
    sums = np.empty((len(values), int(code.max()) + 1))
    counts = np.empty_like(sums)
    for m, row in enumerate(values):
        # Sorted by value within each class, so that the result does not depend on the order of the queries.
        order = np.lexsort((row, code))
        known = ~np.isnan(row[order])
        index = code[order][known]
        sums[m] = np.bincount(index, row[order][known], minlength=sums.shape[1])
        counts[m] = np.bincount(index, minlength=sums.shape[1])
    return sums, counts


def bootstrap(values: Floats, codes: Ints, *, draws: int = 2000, seed: int = 0) -> Floats:
    """Means [draws, M] of values [M, Q], NaN ignored, over classes (codes [Q]) drawn with replacement.

    Not scipy.stats.bootstrap: the metrics do not depend on scipy, and its random numbers would change every interval.
    """
    sums, counts = class_sums(values, codes)
    n = sums.shape[1]
    rng = np.random.default_rng(seed)
    step = max(1, _MAX_CELLS // n)
    out = np.empty((draws, len(values)))
    for a in range(0, draws, step):
        b = min(draws, a + step)
        drawn = rng.integers(0, n, (b - a, n)) + np.arange(b - a)[:, None] * n
        times = np.bincount(drawn.ravel(), minlength=(b - a) * n).reshape(b - a, n).astype(np.float64)
        with np.errstate(invalid="ignore"):
            out[a:b] = (times @ sums.T) / (times @ counts.T)
    return out


def percentiles(means: Floats, level: float) -> tuple[float, float]:
    """Percentile interval of bootstrapped means, ignoring NaN; level is the fraction inside, for example 0.95."""
    if not 0 < level < 1:
        raise ConfigError(f"level: expected a fraction between 0 and 1, for example 0.95; got {level}.")
    known = means[~np.isnan(means)]
    if not len(known):
        return math.nan, math.nan
    low, high = np.quantile(known, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


@dataclass(frozen=True)
class Difference:
    """How two models differ on the same queries: second minus first."""

    name: str
    first: float  # mean of the first model
    second: float  # mean of the second model
    difference: float  # mean of second minus first
    low: float  # lower end of the interval of the difference
    high: float  # upper end
    p_value: float  # of the sign-flip test
    level: float  # of the interval
    queries: int  # number of queries that both models score
    classes: int  # number of their classes

    def __str__(self) -> str:
        return (
            f"{self.name}: {100 * self.first:.2f} -> {100 * self.second:.2f}, difference {100 * self.difference:+.2f} "
            f"({100 * self.level:g} % interval {100 * self.low:+.2f} to {100 * self.high:+.2f}), "
            f"p = {self.p_value:.4f}, {self.queries:,} queries of {self.classes:,} classes"
        )


def paired_difference(
    name: str, first: Floats, second: Floats, codes: Ints, *, level: float, draws: int, seed: int
) -> Difference:
    """Compare two models query by query.

    The interval is a cluster bootstrap of the mean difference. The p-value is that of a sign-flip test: under the null
    hypothesis, swapping the models for all queries of a class is as likely as not. It is the fraction of random swaps
    with a mean difference at least as large, counting the observed one.
    """
    both = ~np.isnan(first) & ~np.isnan(second)
    change = np.where(both, second - first, np.nan)
    low, high = percentiles(bootstrap(change[None], codes, draws=draws, seed=seed)[:, 0], level)
    sums, counts = class_sums(change[None], codes)
    used = counts[0] > 0
    flipped = _sign_flip_totals(sums[0][used], draws=max(draws, 9999), seed=seed)
    observed = abs(math.fsum(sums[0]))
    # A sum in another order may fall short of the observed one by rounding alone.
    extreme = int((np.abs(flipped) >= observed * (1 - 1e-12)).sum())
    return Difference(
        name=name,
        first=mean(np.where(both, first, np.nan)),
        second=mean(np.where(both, second, np.nan)),
        difference=mean(change),
        low=low,
        high=high,
        p_value=(1 + extreme) / (1 + len(flipped)),
        level=level,
        queries=int(both.sum()),
        classes=int(used.sum()),
    )


def _sign_flip_totals(sums: Floats, *, draws: int, seed: int) -> Floats:
    """[draws] totals of the class sums under random signs."""
    nonzero = sums[sums != 0]  # a class without a difference has no sign to flip
    rng = np.random.default_rng(seed)
    step = max(1, _MAX_CELLS // max(1, len(nonzero)))
    out = np.zeros(draws)
    for a in range(0, draws, step):
        b = min(draws, a + step)
        signs = rng.integers(0, 2, (b - a, len(nonzero)), dtype=np.int8)
        out[a:b] = (2.0 * signs - 1.0) @ nonzero
    return out
