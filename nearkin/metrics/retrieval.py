"""Retrieval metrics of a Ranking, per query and as means.

Every function takes a Ranking and gives one value per query, the expectation over a random order of tied items
(McSherry and Najork 2008), so that neither the order of the rows nor a collapsed model can earn anything. Where a
query has no relevant item at all, the metrics that divide by how many there are give NaN, and `score` decides what
that means.

    name         meaning, for a query with R relevant items
    R@k          1 if a relevant item is among the first k, else 0
    P@k          share of relevant items among the first k
    RP           the same with k = R ("R-precision")
    MAP@R        sum over places i <= R that hold a relevant item of P@i, divided by R
    MAP@k        the same over places i <= k, divided by min(k, R); MAP@k/k, MAP@k/R, MAP@k/hits divide by those
    MAP          the same over all places, divided by R
    nDCG@k       sum of 1 / log2(place + 1) over relevant items in the first k, divided by the best possible sum
    MRR          1 / place of the first relevant item
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from nearkin.errors import ConfigError, UnknownNameError, did_you_mean
from nearkin.metrics.ranking import Ranking

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
DENOMINATORS = ("min(k,R)", "k", "R", "hits")


def recall(r: Ranking, k: int) -> Floats:
    """[Q] 1 if a relevant item is among the first k, else 0; under ties the chance of it.

    >>> from nearkin import rank
    >>> recall(rank([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]], ["a", "a", "b"]), k=1).tolist()
    [1.0, 1.0, 0.0]
    """
    has, above, relevant, size = _first(_check_k(r, k))
    out = np.zeros(len(r))
    slots = np.clip(k - above, 0, size)
    out[has] = 1.0 - _each(_chance_of_none, slots, relevant, size)
    return out


def precision(r: Ranking, k: int) -> Floats:
    """[Q] relevant items among the first k, divided by k."""
    return _hits(_check_k(r, k), np.full(len(r), k)) / k


def r_precision(r: Ranking) -> Floats:
    """[Q] relevant items among the first R, divided by R."""
    return _divide(_hits(r, r.total), r.total)


def mean_average_precision(r: Ranking, k: int | str = "R", denominator: str = "min(k,R)") -> Floats:
    """[Q] the sum of P@i over the places i <= k that hold a relevant item, divided by the denominator.

    k: a number, or "R" for the query's own number of relevant items. denominator: "min(k,R)" (the usual one), "k",
    "R", or "hits" (relevant items found in the first k, so a query is not punished for what it never found).
    """
    if denominator not in DENOMINATORS:
        raise ConfigError(f"denominator: expected one of {', '.join(DENOMINATORS)}; got {denominator!r}.")
    total = r.total
    if k == "R":
        depth = total
    elif isinstance(k, int | np.integer):
        depth = np.full(len(_check_k(r, k)), k)
    else:
        raise ConfigError(f"k: expected a number of places or 'R', got {k!r}.")
    if denominator == "hits":
        return _map_by_hits(r, depth)
    below = {"min(k,R)": np.minimum(depth, total), "k": depth, "R": total}[denominator]
    return _divide(_per_query(r, _precision_sums(r, depth)), np.where(total > 0, below, 0))


def average_precision(r: Ranking) -> Floats:
    """[Q] average precision over the whole ranking, divided by R."""
    every = np.full(len(r), int(r.items.max(initial=1)))
    return _divide(_per_query(r, _precision_sums(r, every)), r.total)


def ndcg(r: Ranking, k: int) -> Floats:
    """[Q] discounted gain of the relevant items in the first k, divided by the best possible."""
    gain = _cumulative(1.0 / np.log2(np.arange(2, int(r.items.max(initial=1)) + 2)))
    inside = _inside(_check_k(r, k), np.full(len(r), k))
    per_group = r.relevant / r.size * (gain[r.above + inside] - gain[r.above])
    single = (r.size == 1) & (inside == 1)
    per_group[single] = 1.0 / np.log2(r.above[single] + 2)
    best = gain[np.minimum(np.minimum(k, r.total), len(gain) - 1)]
    return _divide(_per_query(r, per_group), best)


def reciprocal_rank(r: Ranking) -> Floats:
    """[Q] one divided by the place of the first relevant item."""
    has, above, relevant, size = _first(r)
    out = np.full(len(r), np.nan)
    out[has] = _each(_expected_reciprocal, above, relevant, size)
    return out


# ------------------------------------------------------------------------------------------------- metrics by name

_AT = re.compile(r"(R|P|nDCG|MAP)@([1-9]\d*)(?:/(k|R|hits))?")
_PLAIN: dict[str, Callable[[Ranking], Floats]] = {
    "RP": r_precision,
    "MAP@R": mean_average_precision,
    "MAP": average_precision,
    "MRR": reciprocal_rank,
}
_COUNTS_LONE = ("R", "P")  # metrics that a query without relevant items simply misses


def evaluate_metric(r: Ranking, name: str, lone: str = "auto") -> Floats:
    """[Q] the metric of that name; `lone` as in `score`.

    >>> from nearkin import rank
    >>> evaluate_metric(rank([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]], ["a", "a", "b"]), "MAP@R").tolist()
    [1.0, 1.0, nan]
    """
    values = _by_name(name)(r)
    kind = name.partition("@")[0]
    without = r.total == 0
    if lone == "drop" or (lone == "auto" and kind not in _COUNTS_LONE):
        return np.where(without, np.nan, values)
    if lone in ("keep", "auto"):
        return np.where(without, 0.0, values)
    raise ConfigError(f"lone: expected 'auto', 'drop' or 'keep', got {lone!r}.")


def metric_bounds(r: Ranking, name: str, lone: str = "auto") -> tuple[Floats, Floats]:
    """[Q] the lowest and the highest value the metric can take over all orders of tied items."""
    call = _by_name(name)
    if name.endswith("/hits"):
        low, high = _bounds_by_hits(r, int(name.split("@")[1].split("/")[0]))
    else:
        low, high = call(r.break_ties("worst")), call(r.break_ties("best"))
    expected = evaluate_metric(r, name, lone)
    fixed = r.total == 0
    return np.where(fixed, expected, low), np.where(fixed, expected, high)


def _by_name(name: str) -> Callable[[Ranking], Floats]:
    if name in _PLAIN:
        return _PLAIN[name]
    match = _AT.fullmatch(name)
    if match and (match[3] is None or match[1] == "MAP"):
        k = int(match[2])
        if match[1] == "MAP":
            return lambda r: mean_average_precision(r, k, match[3] or "min(k,R)")
        return {"R": lambda r: recall(r, k), "P": lambda r: precision(r, k), "nDCG": lambda r: ndcg(r, k)}[match[1]]
    number = re.sub(r"\D", "", name) or "10"
    known = [f"R@{number}", f"P@{number}", f"MAP@{number}", f"nDCG@{number}", *_PLAIN]
    hint = did_you_mean(name, known) or " There are: R@k, P@k, RP, MAP@R, MAP@k, MAP@k/k, MAP, nDCG@k, MRR."
    raise UnknownNameError(f"No metric named '{name}'.{hint}")


# ------------------------------------------------------------------------------------------- expectations over ties


def _check_k(r: Ranking, k: int) -> Ranking:
    if k < 1:
        raise ConfigError(f"k: expected at least 1, got {k}.")
    return r


def _divide(sums: Floats, below: Floats | Ints) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(below > 0, sums / below, np.nan)


def _cumulative(values: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values)])


def _inside(r: Ranking, depth: Ints) -> Ints:
    """[T] how many of a group's places lie within the query's first `depth`."""
    return np.asarray(np.clip(depth[r.query] - r.above, 0, r.size))


def _per_query(r: Ranking, values: Floats | Ints) -> Floats:
    """[Q] sums of a value per group, added in the order of the groups."""
    return np.asarray(np.bincount(r.query, values, minlength=len(r)), dtype=np.float64)


def _hits(r: Ranking, depth: Ints) -> Floats:
    """[Q] expected number of relevant items within the first `depth`: a group's share of its places."""
    return _per_query(r, r.relevant * _inside(r, depth) / r.size)


def _first(r: Ranking) -> tuple[NDArray[np.bool_], Ints, Ints, Ints]:
    """Which queries have a relevant item, and for those the group that holds the nearest."""
    has = np.diff(r.start) > 0
    at = r.start[:-1][has]
    return has, r.above[at], r.relevant[at], r.size[at]


def _precision_sums(r: Ranking, depth: Ints) -> Floats:
    """[T] expected sum, over a group's places within `depth` that hold a relevant item, of the precision there.

    Place above + t holds a relevant item with chance relevant/size; given that, before + 1 + (t - 1)(relevant - 1)/
    (size - 1) relevant items are expected up to it. Summed over t with harmonic numbers.
    """
    inside, before = _inside(r, depth), r.before
    out = np.where(inside > 0, (before + 1) / (r.above + 1), 0.0)
    tied = (r.size > 1) & (inside > 0)
    if tied.any():
        harmonic = _cumulative(1.0 / np.arange(1, int(r.items.max(initial=1)) + 1))
        n, g, m, a, c = (v[tied] for v in (r.size, r.relevant, inside, r.above, before))
        h = harmonic[a + m] - harmonic[a]
        # Nothing but relevant items so far, in the group and before it: the precision is 1 all along.
        full = (g == n) & (a == c)
        out[tied] = np.where(full, m, g / n * ((c + 1) * h + (g - 1) / (n - 1) * (m - (a + 1) * h)))
    return out


def _each(function: Callable[[int, int, int], float], *columns: Ints) -> Floats:
    """The function of each row of the columns, computed once per distinct row."""
    distinct, inverse = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    return np.array([function(*row) for row in distinct.tolist()])[inverse.ravel()] if len(distinct) else np.zeros(0)


def _chance_of_none(slots: int, relevant: int, size: int) -> float:
    """The chance that `slots` items drawn from `size` hold none of the `relevant`."""
    if slots == 0 or slots > size - relevant:
        return float(slots == 0)
    few, many = sorted((slots, relevant))
    t = np.arange(few)
    return float(np.prod((size - many - t) / (size - t)))


def _expected_reciprocal(above: int, relevant: int, size: int) -> float:
    """Expected 1/place of the first relevant item of a group: t - 1 others drawn before it, for every t."""
    if size == relevant:
        return 1.0 / (above + 1)
    t = np.arange(1, size - relevant + 2)
    chance = relevant / size * np.concatenate([[1.0], np.cumprod((size - relevant - t[:-1] + 1) / (size - t[:-1]))])
    return float(np.sum(chance / (above + t)))


def _split_by_cut(r: Ranking, depth: Ints) -> tuple[Floats, Floats, Ints]:
    """Sums of precision and hits of the groups wholly inside `depth`, and the groups that the cut goes through."""
    inside = _inside(r, depth)
    cut = (inside > 0) & (inside < r.size)
    whole = np.where(cut | (inside == 0), 0, r.relevant)
    hits = _per_query(r, whole)
    sums = _per_query(r, np.where(whole > 0, _precision_sums(r, depth), 0.0))
    return sums, hits, np.asarray(np.nonzero(cut)[0])


def _map_by_hits(r: Ranking, depth: Ints) -> Floats:
    """MAP divided by the hits. In a group that the cut goes through the hits are random, so every number is weighed."""
    sums, hits, cut = _split_by_cut(r, depth)
    out = np.where(hits > 0, sums / np.maximum(hits, 1), 0.0)
    factorial = _cumulative(np.log(np.arange(1, int(r.items.max(initial=1)) + 1))) if len(cut) else np.zeros(1)

    def choose(n: Ints | int, k: Ints | int) -> Floats:
        return np.asarray(factorial[n] - factorial[k] - factorial[np.asarray(n) - k])

    query, before = r.query, r.before
    for g in cut:
        q, a, n, rel, c = query[g], r.above[g], r.size[g], r.relevant[g], before[g]
        m = depth[q] - a
        h = np.arange(max(0, m - (n - rel)), min(m, rel) + 1)
        chance = np.exp(choose(rel, h) + choose(n - rel, m - h) - choose(n, m))
        harmonic = np.sum(1.0 / np.arange(a + 1, a + m + 1))
        pairs = (h - 1) / (m - 1) * (m - (a + 1) * harmonic) if m > 1 else 0.0
        part = h / m * ((c + 1) * harmonic + pairs)
        out[q] = np.sum(chance * np.where(c + h > 0, (sums[q] + part) / np.maximum(c + h, 1), 0.0))
    return np.where(r.total > 0, out, np.nan)


def _bounds_by_hits(r: Ranking, k: int) -> tuple[Floats, Floats]:
    """Bounds of MAP@k/hits, where one more hit can lower the value: every number of hits is tried."""
    out = []
    depth = np.full(len(r), k)
    _, _, cut = _split_by_cut(r, depth)
    query, before = r.query, r.before
    for order, pick in (("worst", np.min), ("best", np.max)):
        # Settling the ties orders the whole groups; those the cut goes through are redone below.
        values = _map_by_hits(r.break_ties(order), depth)
        for g in cut:
            q, a, n, rel, c = query[g], r.above[g], r.size[g], r.relevant[g], before[g]
            m = k - a
            inner = _settled_sum(r, int(q), int(g), order)
            tried = []
            for h in range(max(0, m - (n - rel)), min(m, rel) + 1):
                place = a + np.arange(1, h + 1) + (m - h if order == "worst" else 0)
                tried.append((inner + np.sum((c + np.arange(1, h + 1)) / place)) / (c + h) if c + h else 0.0)
            values[q] = pick(tried)
        out.append(np.where(r.total > 0, values, np.nan))
    return out[0], out[1]


def _settled_sum(r: Ranking, q: int, g: int, order: str) -> float:
    """Sum of precision over the groups of query q before group g, ties settled one way."""
    total, hits = 0.0, 0
    for e in range(int(r.start[q]), g):
        n, rel = int(r.size[e]), int(r.relevant[e])
        first = int(r.above[e]) + (n - rel if order == "worst" else 0)
        total += sum((hits + t) / (first + t) for t in range(1, rel + 1))
        hits += rel
    return total
