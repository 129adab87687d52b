"""A better order for an answer, from what its items say of each other; kept only where validation classes agree.

    Expansion     the query is averaged with its nearest items, weighted by a power of their similarity, and asked again
                  (alpha query expansion, Radenovic, Tolias and Chum 2018)
    Reciprocal    items that count the query among their own nearest move up (k-reciprocal encoding, Zhong, Zheng, Cao
                  and Li 2017), worked out among the query and its `depth` nearest items, so that it costs the same
                  however large the index is

Both can do harm: where neighbours are wrong they pull the query towards the wrong class. `choose_rerank` measures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from nearkin.deploy.index.search import Floats, Ints, Vectors, inverse_lengths, nearest, unit_rows, without
from nearkin.errors import ConfigError, DataError, did_you_mean
from nearkin.metrics.bootstrap import Difference, paired_difference

Find = Callable[[Vectors, int], tuple[Ints, Floats]]  # (query [D], how many) -> rows and cosines, nearest first


@dataclass(frozen=True)
class Expansion:
    """k: how many neighbours are averaged in. alpha: the power of their similarity that weighs them."""

    k: int = 5
    alpha: float = 3.0

    def __post_init__(self) -> None:
        if self.k < 1 or self.alpha < 0:
            raise ConfigError(f"expansion: expected k from 1 and alpha from 0, got k={self.k}, alpha={self.alpha}.")


@dataclass(frozen=True)
class Reciprocal:
    """k1: neighbours that must be mutual. k2: neighbours whose sets are averaged. weight: of the plain distance."""

    k1: int = 20
    k2: int = 6
    weight: float = 0.3
    depth: int = 100

    def __post_init__(self) -> None:
        if self.k1 < 1 or self.k2 < 1 or self.depth < 1 or not 0 <= self.weight <= 1:
            raise ConfigError(f"reciprocal: expected k1, k2 and depth from 1 and a weight from 0 to 1, got {self}.")


Rerank = Expansion | Reciprocal
KINDS: dict[str, type[Expansion] | type[Reciprocal]] = {"expansion": Expansion, "reciprocal": Reciprocal}


def to_dict(option: Rerank) -> dict[str, Any]:
    return {"kind": name_of(option), **asdict(option)}


def from_dict(values: dict[str, Any]) -> Rerank:
    settings = dict(values)
    return find_reranker(settings.pop("kind"))(**settings)


def find_reranker(name: str) -> type[Expansion] | type[Reciprocal]:
    if name not in KINDS:
        hint = did_you_mean(name, KINDS) or f" There are: {', '.join(KINDS)}."
        raise ConfigError(f"rerank: no way named '{name}'.{hint}")
    return KINDS[name]


def name_of(option: Rerank) -> str:
    return type(option).__name__.lower()


# --- the two ways ----------------------------------------------------------------------------------------------------


def expanded(query: Vectors, near: Vectors, cosines: Floats, alpha: float) -> Vectors:
    """The query [D] averaged with its neighbours [n, D] of the given cosines [n]; each counts cosine^alpha, or 0."""
    weights = np.maximum(cosines, 0.0) ** alpha
    total = unit_rows(query[None])[0] + weights @ unit_rows(near)
    return np.asarray(unit_rows(total[None])[0], np.float32)


def k_reciprocal(query: Vectors, near: Vectors, *, k1: int, k2: int, weight: float) -> Floats:
    """Distances [n] of the items `near` [n, D] from the query [D], by whom they have for neighbours; small is near.

    Among the query and these items, with d = 1 - cosine: R(i, k) holds those that are among the k nearest of i and
    have i among theirs (i itself counts). It is widened by R(j, k1 / 2) of every j in it that shares two thirds of that
    set. Each item becomes weights exp(-d) on its set, of sum 1, averaged over its k2 nearest (itself included). The
    distance is (1 - weight) times one minus what two items' weights share (Jaccard), plus weight times d.
    """
    points = unit_rows(np.concatenate([query[None], near]))
    cosine = points @ points.T
    np.fill_diagonal(cosine, 2.0)  # itself first, whatever rounding says
    place = np.empty(cosine.shape, np.int64)
    order = np.argsort(-cosine, axis=1, kind="stable")
    np.put_along_axis(place, order, np.arange(len(points))[None, :], axis=1)
    np.fill_diagonal(cosine, 1.0)

    def mutual(k: int) -> Any:
        return np.maximum(place, place.T) <= k

    own, half = mutual(k1), mutual(round(k1 / 2))
    shared = own.astype(np.int64) @ half.T.astype(np.int64)
    agree = own & (3 * shared >= 2 * half.sum(axis=1)[None, :])
    wide = own | (agree.astype(np.int64) @ half.astype(np.int64) > 0)
    weights = np.where(wide, np.exp(cosine - 1), 0.0)
    weights /= weights.sum(axis=1, keepdims=True)
    smooth = weights[order[:, :k2]].mean(axis=1)
    both = np.minimum(smooth[0], smooth[1:]).sum(axis=1) / np.maximum(smooth[0], smooth[1:]).sum(axis=1)
    return np.asarray((1 - weight) * (1 - both) + weight * (1 - cosine[0, 1:]))


def reranked(query: Vectors, vectors: Vectors, k: int, option: Rerank, find: Find) -> tuple[Ints, Floats]:
    """The k nearest rows in the order that `option` gives them, with their plain cosines to the query."""
    if isinstance(option, Expansion):
        rows, cosines = find(query, option.k)
        rows, _ = find(expanded(query, vectors[rows], cosines, option.alpha), k)
        return rows, unit_rows(vectors[rows]) @ unit_rows(query[None])[0]
    rows, cosines = find(query, max(k, option.depth))
    if not len(rows):
        return rows, cosines
    distance = k_reciprocal(query, vectors[rows], k1=option.k1, k2=option.k2, weight=option.weight)
    order = np.argsort(distance, kind="stable")[:k]
    return rows[order], cosines[order]


# --- whether to ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chosen:
    """What the validation classes say. option: the way that is kept, or None; gains: of each way over plain search."""

    option: Rerank | None
    gains: tuple[tuple[Rerank, Difference], ...]

    def __str__(self) -> str:
        lines = [f"{name_of(option)}: {gain}" for option, gain in self.gains]
        kept = "none is kept" if self.option is None else f"{name_of(self.option)} is kept"
        return "\n".join([*lines, f"re-ranking: {kept}"])


def choose_rerank(
    vectors: Vectors,
    labels: Sequence[Any],
    options: Sequence[Rerank] = (Expansion(), Reciprocal()),
    *,
    queries: Sequence[int] | None = None,
    metric: str = "MAP@R",
    most: int = 500,
    level: float = 0.95,
    seed: int = 0,
) -> Chosen:
    """Measure each way of re-ranking on labelled items, each asking all others, and keep the best that surely helps.

    queries: the rows that may ask, at best items of classes that were not trained on; a draw of `most` of them does.
    metric: "MAP@R" or "R@1". A way is kept when the interval of its gain, over classes, lies above 0; with several
    ways each interval is widened so that all hold together at `level` (Bonferroni).
    """
    if metric not in ("MAP@R", "R@1"):
        raise ConfigError(f"metric: expected 'MAP@R' or 'R@1', got {metric!r}.")
    if not options:
        raise ConfigError("options: nothing to choose from. Give at least one way of re-ranking.")
    names = list(labels)
    count: dict[Any, int] = {}
    for name in names:
        count[name] = count.get(name, 0) + 1
    rows = range(len(names)) if queries is None else queries
    able = np.array([row for row in rows if names[row] is not None and count[names[row]] > 1], np.int64)
    classes, codes = np.unique([str(names[row]) for row in able], return_inverse=True)
    if len(classes) < 2:
        raise DataError(
            f"re-ranking: needs items of at least two classes with two images each to judge by, got {len(classes)}."
        )
    if len(able) > most:
        drawn = np.sort(np.random.default_rng(seed).choice(len(able), most, replace=False))
        able, codes = able[drawn], codes[drawn]
    factors = inverse_lengths(vectors)
    lengths = [count[names[row]] - 1 if metric == "MAP@R" else 1 for row in able.tolist()]
    deepest = max([*lengths, *(option.depth if isinstance(option, Reciprocal) else option.k for option in options)])
    plain = nearest(np.asarray(vectors[able]), vectors, deepest + 1, factors)  # for all queries at once
    values = np.empty((1 + len(options), len(able)))
    for n, (row, k) in enumerate(zip(able.tolist(), lengths, strict=True)):
        query, first = np.asarray(vectors[row]), without(row, plain[0][n], plain[1][n])
        find = partial(_find, query, first, row, vectors, factors)
        answers = [first[0][:k], *(reranked(query, vectors, k, option, find)[0] for option in options)]
        for m, answer in enumerate(answers):
            values[m, n] = _precision(np.array([names[other] == names[row] for other in answer.tolist()]))
    each = 1 - (1 - level) / len(options)
    gains = tuple(
        (option, paired_difference(metric, values[0], values[1 + m], codes, level=each, draws=2000, seed=seed))
        for m, option in enumerate(options)
    )
    sure = [(gain.difference, option) for option, gain in gains if gain.low > 0]
    return Chosen(max(sure, key=lambda pair: pair[0])[1] if sure else None, gains)


def _find(
    asked: Vectors, known: tuple[Ints, Floats], own: int, vectors: Vectors, factors: Vectors, query: Vectors, k: int
) -> tuple[Ints, Floats]:
    """The k nearest other items of a query; for the one that was asked already its answer is at hand."""
    rows, cosines = known
    if query is not asked:
        found = nearest(query[None], vectors, k + 1, factors)
        rows, cosines = without(own, found[0][0], found[1][0])
    return rows[:k], cosines[:k]


def _precision(right: Any) -> float:
    """MAP@R of one answer of length R (and R@1 where R is 1): the mean over places of precision where it is right."""
    return float((right * np.cumsum(right) / np.arange(1, len(right) + 1)).sum() / len(right))
