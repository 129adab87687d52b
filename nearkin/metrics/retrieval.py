"""Retrieval metrics of a Ranking, one value per query: the expectation over a random order of tied items (McSherry and
Najork 2008), so that neither the order of the rows nor a collapsed model can gain anything.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from nearkin.errors import UnknownNameError, did_you_mean
from nearkin.metrics._vectors import Floats, Ints
from nearkin.metrics.ranking import Ranking


def recall(r: Ranking, k: int) -> Floats:
    """Compute R@k: whether a relevant item is among the first k; under ties the probability of it."""
    has_relevant, above, relevant, size = _first_group(r)
    out = np.zeros(len(r))
    slots = np.clip(k - above, 0, size)
    hit = (slots > 0).astype(np.float64)
    tied = size > relevant
    hit[tied] = 1.0 - _map_unique(_prob_no_hit, slots[tied], relevant[tied], size[tied])
    out[has_relevant] = hit
    return out


def precision(r: Ranking, k: int) -> Floats:
    """Compute P@k: relevant items among the first k, divided by k."""
    return _expected_hits(r, np.full(len(r), k)) / k


def r_precision(r: Ranking) -> Floats:
    """Compute R-precision: relevant items among the first R, divided by R."""
    return _divide(_expected_hits(r, r.total), r.total)


def mean_average_precision(r: Ranking, k: int | None = None, denominator: str = "min(k,R)") -> Floats:
    """Compute MAP@k, or MAP@R: the sum of P@i over the ranks i <= k of relevant items, divided by the denominator."""
    total = r.total
    depth = total if k is None else np.full(len(r), k)
    if denominator == "hits":
        return _map_over_hits(r, depth)
    divisor = {"min(k,R)": np.minimum(depth, total), "k": depth, "R": total}[denominator]
    first = _truncate(r, depth)
    return _divide(_sum_per_query(first, _precision_sums(first, depth)), np.where(total > 0, divisor, 0))


def average_precision(r: Ranking) -> Floats:
    """Compute the average precision over the whole ranking."""
    return mean_average_precision(r, int(r.items.max(initial=1)), "R")


def ndcg(r: Ranking, k: int) -> Floats:
    """Compute nDCG@k: discounted gain of the relevant items in the first k, divided by the best possible."""
    gain = _cumulative(1.0 / np.log2(np.arange(2, int(r.items.max(initial=1)) + 2)))
    best = gain[np.minimum(np.minimum(k, r.total), len(gain) - 1)]
    r = _truncate(r, np.full(len(r), k))
    inside = _ranks_inside(r, np.full(len(r), k))
    per_group = r.relevant / r.size * (gain[r.above + inside] - gain[r.above])
    single = (r.size == 1) & (inside == 1)
    per_group[single] = 1.0 / np.log2(r.above[single] + 2)
    return _divide(_sum_per_query(r, per_group), best)


def reciprocal_rank(r: Ranking, k: int | None = None) -> Floats:
    """Compute the reciprocal rank of the first relevant item; 0 if it is not among the first k."""
    has_relevant, above, relevant, size = _first_group(r)
    out = np.full(len(r), np.nan)
    depth = int(r.items.max(initial=1)) if k is None else k
    reciprocal = (above < depth) / (above + 1)
    tied = size > relevant
    expected = partial(_expected_reciprocal, depth)
    reciprocal[tied] = _map_unique(expected, above[tied], relevant[tied], size[tied])
    out[has_relevant] = reciprocal
    return out


_METRIC_AT_K = re.compile(r"(R|P|nDCG|MAP)@([1-9]\d*)(?:/(k|R|hits))?")
_METRICS: dict[str, Callable[[Ranking], Floats]] = {
    "RP": r_precision,
    "MAP@R": mean_average_precision,
    "MAP": average_precision,
    "MRR": reciprocal_rank,
}
_COUNT_AS_MISS = ("R", "P")  # with "auto", a query without relevant items scores 0 in these and is excluded elsewhere


def evaluate_metric(r: Ranking, name: str, singletons: str = "auto") -> Floats:
    """Compute a metric by name.

    Example:
        >>> from nearkin import rank
        >>> evaluate_metric(rank([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]], ["a", "a", "b"]), "MAP@R").tolist()
        [1.0, 1.0, nan]
    """
    values = _by_name(name)(r)
    is_miss = singletons == "zero" or (singletons == "auto" and name.partition("@")[0] in _COUNT_AS_MISS)
    return np.where(r.total == 0, 0.0 if is_miss else np.nan, values)


def metric_bounds(r: Ranking, name: str, singletons: str = "auto") -> tuple[Floats, Floats]:
    """Compute the lowest and highest value a metric can take over all orders of tied items."""
    metric = _by_name(name)
    if name.endswith("/hits"):
        low, high = _bounds_over_hits(r, int(name.split("@")[1].split("/")[0]))
    else:
        low, high = metric(r.break_ties("worst")), metric(r.break_ties("best"))
    expected = evaluate_metric(r, name, singletons)
    is_singleton = r.total == 0
    return np.where(is_singleton, expected, low), np.where(is_singleton, expected, high)


def check_metric(name: str) -> None:
    """Raise UnknownNameError, with a suggestion, unless a metric has this name."""
    _by_name(name)


def _by_name(name: str) -> Callable[[Ranking], Floats]:
    if name in _METRICS:
        return _METRICS[name]
    match = _METRIC_AT_K.fullmatch(name)
    if match and (match[3] is None or match[1] == "MAP"):
        if match[1] == "MAP":
            return partial(mean_average_precision, k=int(match[2]), denominator=match[3] or "min(k,R)")
        return partial({"R": recall, "P": precision, "nDCG": ndcg}[match[1]], k=int(match[2]))
    number = re.sub(r"\D", "", name) or "10"
    known = [f"R@{number}", f"P@{number}", f"MAP@{number}", f"nDCG@{number}", *_METRICS]
    hint = did_you_mean(name, known) or " Available: R@k, P@k, RP, MAP@R, MAP@k, MAP@k/k, MAP, nDCG@k, MRR."
    raise UnknownNameError(f"No metric named '{name}'.{hint}")


def _divide(sums: Floats, divisor: Floats | Ints) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(divisor > 0, sums / divisor, np.nan)


def _cumulative(values: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values)])


def _truncate(r: Ranking, depth: Ints) -> Ranking:
    """Drop the groups that begin after the query's first `depth` ranks: usually most of them."""
    if len(r.above) and depth.min() > r.above.max():
        return r
    same_depth = len(depth) > 0 and depth.min() == depth.max()
    keep = np.flatnonzero(r.above < (depth[0] if same_depth else depth[r.query]))
    start = np.searchsorted(keep, r.start)
    return replace(r, start=start, above=r.above[keep], relevant=r.relevant[keep], size=r.size[keep])


def _ranks_inside(r: Ranking, depth: Ints) -> Ints:
    """[T] how many of a group's ranks lie within the query's first `depth`."""
    return np.asarray(np.clip(depth[r.query] - r.above, 0, r.size))


def _sum_per_query(r: Ranking, values: Floats | Ints) -> Floats:
    """[Q] sums of a value per group, added in the order of the groups."""
    return np.asarray(np.bincount(r.query, values, minlength=len(r)), dtype=np.float64)


def _expected_hits(r: Ranking, depth: Ints) -> Floats:
    """[Q] expected number of relevant items within the first `depth`."""
    r = _truncate(r, depth)
    return _sum_per_query(r, r.relevant * _ranks_inside(r, depth) / r.size)


def _first_group(r: Ranking) -> tuple[NDArray[np.bool_], Ints, Ints, Ints]:
    """Which queries have a relevant item, and for those the group that contains the nearest."""
    has_relevant = np.diff(r.start) > 0
    group = r.start[:-1][has_relevant]
    return has_relevant, r.above[group], r.relevant[group], r.size[group]


def _precision_sums(r: Ranking, depth: Ints) -> Floats:
    """[T] expected sum of the precision at the ranks of a group's relevant items within `depth`.

    Rank above + t holds a relevant item with probability relevant / size. Given that, the expected number of relevant
    items up to it is hits_before + 1 + (t - 1)(relevant - 1) / (size - 1). Summed over t with harmonic numbers.
    """
    inside, hits_before = _ranks_inside(r, depth), r.hits_before
    out = np.where(inside > 0, (hits_before + 1) / (r.above + 1), 0.0)
    tied = (r.size > 1) & (inside > 0)
    if tied.any():
        harmonic = _cumulative(1.0 / np.arange(1, int(r.items.max(initial=1)) + 1))
        n, g, m, a, c = (v[tied] for v in (r.size, r.relevant, inside, r.above, hits_before))
        h = harmonic[a + m] - harmonic[a]
        # With only relevant items in the group and before it, the precision is exactly 1 throughout.
        perfect = (g == n) & (a == c)
        out[tied] = np.where(perfect, m, g / n * ((c + 1) * h + (g - 1) / (n - 1) * (m - (a + 1) * h)))
    return out


def _map_unique(function: Callable[[int, int, int], float], *columns: Ints) -> Floats:
    """Apply a function to each row of the columns, once per distinct row."""
    distinct, inverse = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    return np.array([function(*row) for row in distinct.tolist()])[inverse.ravel()] if len(distinct) else np.zeros(0)


def _prob_no_hit(slots: int, relevant: int, size: int) -> float:
    """The probability that `slots` items drawn from `size` contain none of the `relevant`."""
    if slots == 0 or slots > size - relevant:
        return float(slots == 0)
    few, many = sorted((slots, relevant))
    t = np.arange(few)
    return float(np.prod((size - many - t) / (size - t)))


def _expected_reciprocal(depth: int, above: int, relevant: int, size: int) -> float:
    """Expected 1 / rank of the first relevant item of a group: t - 1 others come before it, for every t."""
    t = np.arange(1, size - relevant + 2)
    prob = relevant / size * np.concatenate([[1.0], np.cumprod((size - relevant - t[:-1] + 1) / (size - t[:-1]))])
    return float(np.sum(prob * (above + t <= depth) / (above + t)))


def _split_at_depth(r: Ranking, depth: Ints) -> tuple[Floats, Floats, Ints]:
    """Sums of precision and hits of the groups entirely within `depth`, and the groups that `depth` cuts through."""
    inside = _ranks_inside(r, depth)
    cut = (inside > 0) & (inside < r.size)
    whole = np.where(cut | (inside == 0), 0, r.relevant)
    hits = _sum_per_query(r, whole)
    sums = _sum_per_query(r, np.where(whole > 0, _precision_sums(r, depth), 0.0))
    return sums, hits, np.asarray(np.nonzero(cut)[0])


def _map_over_hits(r: Ranking, depth: Ints) -> Floats:
    """MAP@k/hits. In a group that the depth cuts through the hits are random: sum over their distribution."""
    sums, hits, cut = _split_at_depth(r, depth)
    out = np.where(hits > 0, sums / np.maximum(hits, 1), 0.0)
    log_factorial = _cumulative(np.log(np.arange(1, int(r.items.max(initial=1)) + 1))) if len(cut) else np.zeros(1)

    def log_choose(n: Ints | int, k: Ints | int) -> Floats:
        return np.asarray(log_factorial[n] - log_factorial[k] - log_factorial[np.asarray(n) - k])

    query, hits_before = r.query, r.hits_before
    for g in cut:
        q, a, n, rel, c = query[g], r.above[g], r.size[g], r.relevant[g], hits_before[g]
        m = depth[q] - a
        h = np.arange(max(0, m - (n - rel)), min(m, rel) + 1)
        prob = np.exp(log_choose(rel, h) + log_choose(n - rel, m - h) - log_choose(n, m))
        harmonic = np.sum(1.0 / np.arange(a + 1, a + m + 1))
        pairs = (h - 1) / (m - 1) * (m - (a + 1) * harmonic) if m > 1 else 0.0
        part = h / m * ((c + 1) * harmonic + pairs)
        out[q] = np.sum(prob * np.where(c + h > 0, (sums[q] + part) / np.maximum(c + h, 1), 0.0))
    return np.where(r.total > 0, out, np.nan)


def _bounds_over_hits(r: Ranking, k: int) -> tuple[Floats, Floats]:
    """Bounds of MAP@k/hits, where one more hit can lower the value: try every number of hits."""
    out = []
    depth = np.full(len(r), k)
    _, _, cut = _split_at_depth(r, depth)
    query, hits_before = r.query, r.hits_before
    for order, pick in (("worst", np.min), ("best", np.max)):
        # Breaking ties orders the whole groups; those that the depth cuts through are redone below.
        ordered = r.break_ties(order)
        values = _map_over_hits(ordered, depth)
        for g in cut:
            q, a, n, rel, c = query[g], r.above[g], r.size[g], r.relevant[g], hits_before[g]
            m = k - a
            inner = np.sum(np.arange(1, c + 1) / (ordered.above[ordered.start[q] :][:c] + 1))  # of the earlier hits
            candidates = []
            for h in range(max(0, m - (n - rel)), min(m, rel) + 1):
                ranks = a + np.arange(1, h + 1) + (m - h if order == "worst" else 0)
                candidates.append((inner + np.sum((c + np.arange(1, h + 1)) / ranks)) / (c + h) if c + h else 0.0)
            values[q] = pick(candidates)
        out.append(np.where(r.total > 0, values, np.nan))
    return out[0], out[1]
