"""How sure is a mean? Intervals and paired comparisons that respect classes.

Queries of one class stand or fall together: they share a look, a photographer, a set of rivals. Drawing queries one by
one would treat them as independent and promise too narrow an interval, so whole classes are drawn (a cluster
bootstrap), and whole classes change sides in the test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearkin.errors import ConfigError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_CELLS = 2**22  # random numbers drawn at a time


def mean(values: Floats) -> float:
    """The mean of what is not NaN, rounded once, so that the order of the values cannot change a digit."""
    known = values[~np.isnan(values)]
    return math.fsum(known) / len(known) if len(known) else math.nan


def class_sums(values: Floats, codes: Ints) -> tuple[Floats, Floats]:
    """[M, C] sums and counts of the values [M, Q] of each class, NaN left out; C is the number of classes met."""
    _, code = np.unique(codes, return_inverse=True)
    sums = np.empty((len(values), int(code.max()) + 1))
    counts = np.empty_like(sums)
    for m, row in enumerate(values):
        # Sorted by value inside each class, so that the order of the queries cannot change a digit.
        order = np.lexsort((row, code))
        known = ~np.isnan(row[order])
        at = code[order][known]
        sums[m] = np.bincount(at, row[order][known], minlength=sums.shape[1])
        counts[m] = np.bincount(at, minlength=sums.shape[1])
    return sums, counts


def bootstrap(values: Floats, codes: Ints, *, draws: int = 2000, seed: int = 0) -> Floats:
    """[draws, M] means of the values [M, Q] when classes are drawn with replacement."""
    sums, counts = class_sums(values, codes)
    n = sums.shape[1]
    rng = np.random.default_rng(seed)
    step = max(1, _CELLS // n)
    out = np.empty((draws, len(values)))
    for a in range(0, draws, step):
        b = min(draws, a + step)
        drawn = rng.integers(0, n, (b - a, n)) + np.arange(b - a)[:, None] * n
        times = np.bincount(drawn.ravel(), minlength=(b - a) * n).reshape(b - a, n).astype(np.float64)
        with np.errstate(invalid="ignore"):
            out[a:b] = (times @ sums.T) / (times @ counts.T)
    return out


def percentiles(means: Floats, level: float) -> tuple[float, float]:
    """The middle `level` of the drawn means; NaN when there is nothing to vary."""
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
    first: float
    second: float
    difference: float
    low: float
    high: float
    p_value: float
    level: float
    queries: int
    classes: int

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

    The interval is a cluster bootstrap of the mean difference. The p-value is that of a sign-flip test: were the
    models alike, swapping them for all queries of a class would be as likely as not; it is the share of random swaps
    with a mean difference at least as large, the one observed counted among them.
    """
    both = ~np.isnan(first) & ~np.isnan(second)
    change = np.where(both, second - first, np.nan)
    low, high = percentiles(bootstrap(change[None], codes, draws=draws, seed=seed)[:, 0], level)
    sums, counts = class_sums(change[None], codes)
    met = counts[0] > 0
    flips = _flips(sums[0][met], draws=max(draws, 9999), seed=seed)
    seen = abs(math.fsum(sums[0]))
    # A sum in another order may fall short of the observed one by rounding alone.
    extreme = int((np.abs(flips) >= seen * (1 - 1e-12)).sum())
    return Difference(
        name=name,
        first=mean(np.where(both, first, np.nan)),
        second=mean(np.where(both, second, np.nan)),
        difference=mean(change),
        low=low,
        high=high,
        p_value=(1 + extreme) / (1 + len(flips)),
        level=level,
        queries=int(both.sum()),
        classes=int(met.sum()),
    )


def _flips(sums: Floats, *, draws: int, seed: int) -> Floats:
    """[draws] totals of the class sums under random signs."""
    moved = sums[sums != 0]  # a class without a difference has no sign to flip
    rng = np.random.default_rng(seed)
    step = max(1, _CELLS // max(1, len(moved)))
    out = np.zeros(draws)
    for a in range(0, draws, step):
        b = min(draws, a + step)
        signs = rng.integers(0, 2, (b - a, len(moved)), dtype=np.int8)
        out[a:b] = (2.0 * signs - 1.0) @ moved
    return out
