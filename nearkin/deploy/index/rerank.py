"""Re-rank search results, where it provably helps on validation classes.

    Expansion     average the query with its nearest items, weighted by a power of their similarity, and search again
                  (alpha query expansion, Radenovic, Tolias and Chum 2018)
    Reciprocal    promote items that have the query among their own nearest neighbours (k-reciprocal encoding, Zhong,
                  Zheng, Cao and Li 2017), computed among the query and its `depth` nearest items, so that the cost does
                  not depend on the size of the index

Both can hurt: wrong neighbours pull the query towards the wrong class. `choose_rerank` measures the gain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from nearkin.deploy.index.search import Floats, Ints, Vectors, exclude_row, inverse_norms, nearest, normalize_rows
from nearkin.errors import ConfigError, DataError, did_you_mean
from nearkin.metrics.bootstrap import Difference, paired_difference

SearchFn = Callable[[Vectors, int], tuple[Ints, Floats]]  # (query [D], k) -> rows and cosines, nearest first


@dataclass(frozen=True)
class Expansion:
    """Alpha query expansion."""

    k: int = 5  # number of neighbours averaged in
    alpha: float = 3.0  # a neighbour's weight is its similarity to this power

    def __post_init__(self) -> None:
        if self.k < 1 or self.alpha < 0:
            raise ConfigError(f"expansion: expected k >= 1 and alpha >= 0, got k={self.k}, alpha={self.alpha}.")


@dataclass(frozen=True)
class Reciprocal:
    """k-reciprocal re-ranking."""

    k1: int = 20  # size of the neighbourhood that must be mutual
    k2: int = 6  # number of neighbours over which encodings are averaged
    weight: float = 0.3  # weight of the cosine distance; the rest is the Jaccard distance
    depth: int = 100  # number of nearest items that are re-ranked

    def __post_init__(self) -> None:
        if self.k1 < 1 or self.k2 < 1 or self.depth < 1 or not 0 <= self.weight <= 1:
            raise ConfigError(f"reciprocal: expected k1, k2, depth >= 1 and weight in [0, 1], got {self}.")


Rerank = Expansion | Reciprocal
RERANKERS: dict[str, type[Expansion] | type[Reciprocal]] = {"expansion": Expansion, "reciprocal": Reciprocal}


def to_dict(option: Rerank) -> dict[str, Any]:
    """Return the method's name and settings, for the manifest."""
    return {"method": rerank_name(option), **asdict(option)}


def from_dict(values: dict[str, Any]) -> Rerank:
    """Restore a method from `to_dict`."""
    settings = dict(values)
    return get_reranker(settings.pop("method"))(**settings)


def get_reranker(name: str) -> type[Expansion] | type[Reciprocal]:
    """Look up a re-ranking method. Returns its settings class."""
    if name not in RERANKERS:
        hint = did_you_mean(name, RERANKERS) or f" Available: {', '.join(RERANKERS)}."
        raise ConfigError(f"rerank: unknown method '{name}'.{hint}")
    return RERANKERS[name]


def rerank_name(option: Rerank) -> str:
    """Return the name that `get_reranker` takes."""
    return type(option).__name__.lower()


# --- methods ---------------------------------------------------------------------------------------------------------


def expanded(query: Vectors, near: Vectors, cosines: Floats, alpha: float) -> Vectors:
    """Average a query with its neighbours. Returns the expanded query, unit length, [D]."""
    weights = np.maximum(cosines, 0.0) ** alpha
    total = normalize_rows(query[None])[0] + weights @ normalize_rows(near)
    return np.asarray(normalize_rows(total[None])[0], np.float32)


def k_reciprocal(query: Vectors, near: Vectors, *, k1: int, k2: int, weight: float) -> Floats:
    """Compute k-reciprocal distances of items from a query.

    Among the query and these items, with d = 1 - cosine: R(i, k) is the set of items j such that i and j are among each
    other's k nearest (i itself included). R(i, k1) is extended by R(j, k1 / 2) for every j in it if at least two thirds
    of that set are in R(i, k1). Each item is encoded by weights exp(-d) on its set, normalized to sum 1, and averaged
    over its k2 nearest (itself included). The distance is (1 - weight) * (Jaccard distance of the encodings) +
    weight * d.
    """
    points = normalize_rows(np.concatenate([query[None], near]))
    cosine = points @ points.T
    np.fill_diagonal(cosine, 2.0)  # a point is its own nearest, regardless of rounding
    rank = np.empty(cosine.shape, np.int64)
    order = np.argsort(-cosine, axis=1, kind="stable")
    np.put_along_axis(rank, order, np.arange(len(points))[None, :], axis=1)
    np.fill_diagonal(cosine, 1.0)

    def mutual(k: int) -> Any:
        return np.maximum(rank, rank.T) <= k

    full, half = mutual(k1), mutual(round(k1 / 2))
    shared = full.astype(np.int64) @ half.T.astype(np.int64)
    similar = full & (3 * shared >= 2 * half.sum(axis=1)[None, :])
    extended = full | (similar.astype(np.int64) @ half.astype(np.int64) > 0)
    weights = np.where(extended, np.exp(cosine - 1), 0.0)
    weights /= weights.sum(axis=1, keepdims=True)
    encoding = weights[order[:, :k2]].mean(axis=1)
    overlap = np.minimum(encoding[0], encoding[1:]).sum(axis=1) / np.maximum(encoding[0], encoding[1:]).sum(axis=1)
    return np.asarray((1 - weight) * (1 - overlap) + weight * (1 - cosine[0, 1:]))


def apply_rerank(query: Vectors, vectors: Vectors, k: int, option: Rerank, search: SearchFn) -> tuple[Ints, Floats]:
    """Search with re-ranking. Returns the k nearest rows in the new order, and their plain cosines to the query."""
    if isinstance(option, Expansion):
        rows, cosines = search(query, option.k)
        rows, _ = search(expanded(query, vectors[rows], cosines, option.alpha), k)
        return rows, normalize_rows(vectors[rows]) @ normalize_rows(query[None])[0]
    rows, cosines = search(query, max(k, option.depth))
    if not len(rows):
        return rows, cosines
    distance = k_reciprocal(query, vectors[rows], k1=option.k1, k2=option.k2, weight=option.weight)
    order = np.argsort(distance, kind="stable")[:k]
    return rows[order], cosines[order]


# --- selection -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RerankChoice:
    """Outcome of `choose_rerank`."""

    option: Rerank | None  # the selected method, or None if no gain is significant
    gains: tuple[tuple[Rerank, Difference], ...]  # every method with its gain over plain search

    def __str__(self) -> str:
        lines = [f"{rerank_name(option)}: {gain}" for option, gain in self.gains]
        choice = "none (no significant gain)" if self.option is None else rerank_name(self.option)
        return "\n".join([*lines, f"re-ranking: {choice}"])


def choose_rerank(
    vectors: Vectors,
    labels: Sequence[Any],
    options: Sequence[Rerank] = (Expansion(), Reciprocal()),
    *,
    queries: Sequence[int] | None = None,
    metric: str = "MAP@R",
    max_queries: int = 500,
    level: float = 0.95,
    seed: int = 0,
) -> RerankChoice:
    """Evaluate re-ranking methods with labelled items as queries, and select the best one with a significant gain.

    A gain is significant if its interval, over classes, lies above 0. With several methods the intervals are widened so
    that all of them hold jointly at `level` (Bonferroni).

    Args:
        vectors: [N, D].
        labels: [N], None where unknown.
        options: Methods to compare.
        queries: Rows to use as queries, preferably of classes that were not trained on; by default all.
        metric: "MAP@R" or "R@1".
        max_queries: A random sample of this many queries is used.
        level: Confidence level.
        seed: Of the sample and the bootstrap.

    Returns:
        The selected method and the gain of each.
    """
    if metric not in ("MAP@R", "R@1"):
        raise ConfigError(f"metric: expected 'MAP@R' or 'R@1', got {metric!r}.")
    if not options:
        raise ConfigError("options: expected at least one re-ranking method.")
    labels = list(labels)
    rows, codes = _sample_queries(labels, range(len(labels)) if queries is None else queries, max_queries, seed)
    scores = _evaluate(vectors, labels, rows, options, metric)
    adjusted = 1 - (1 - level) / len(options)
    gains = tuple(
        (option, paired_difference(metric, scores[0], scores[1 + n], codes, level=adjusted, draws=2000, seed=seed))
        for n, option in enumerate(options)
    )
    significant = [(gain.difference, option) for option, gain in gains if gain.low > 0]
    return RerankChoice(max(significant, key=lambda pair: pair[0])[1] if significant else None, gains)


def _sample_queries(labels: list[Any], rows: Sequence[int], max_queries: int, seed: int) -> tuple[Ints, Ints]:
    """Sample rows whose class has another item, with their class codes."""
    count = Counter(labels)
    usable = np.array([row for row in rows if labels[row] is not None and count[labels[row]] > 1], np.int64)
    classes, codes = np.unique([str(labels[row]) for row in usable], return_inverse=True)
    if len(classes) < 2:
        raise DataError(f"re-ranking: needs at least two classes with two images each, got {len(classes)}.")
    if len(usable) > max_queries:
        sample = np.sort(np.random.default_rng(seed).choice(len(usable), max_queries, replace=False))
        usable, codes = usable[sample], codes[sample]
    return usable, codes


def _evaluate(vectors: Vectors, labels: list[Any], rows: Ints, options: Sequence[Rerank], metric: str) -> Floats:
    """Return scores [1 + methods, queries]: plain search first, then each method."""
    count = Counter(labels)
    inv_norms = inverse_norms(vectors)
    lengths = [count[labels[row]] - 1 if metric == "MAP@R" else 1 for row in rows.tolist()]
    max_k = max([*lengths, *(option.depth if isinstance(option, Reciprocal) else option.k for option in options)])
    plain = nearest(np.asarray(vectors[rows]), vectors, max_k + 1, inv_norms)  # for all queries at once
    scores = np.empty((1 + len(options), len(rows)))
    for n, (row, k) in enumerate(zip(rows.tolist(), lengths, strict=True)):
        query, result = np.asarray(vectors[row]), exclude_row(row, plain[0][n], plain[1][n])
        search = partial(_search_cached, query, result, row, vectors, inv_norms)
        rankings = [result[0][:k], *(apply_rerank(query, vectors, k, option, search)[0] for option in options)]
        for m, ranking in enumerate(rankings):
            scores[m, n] = _average_precision(np.array([labels[other] == labels[row] for other in ranking.tolist()]))
    return scores


def _search_cached(
    cached_query: Vectors,
    cached_result: tuple[Ints, Floats],
    exclude: int,
    vectors: Vectors,
    inv_norms: Vectors,
    query: Vectors,
    k: int,
) -> tuple[Ints, Floats]:
    """Search for the k nearest other items, reusing the result of the original query."""
    rows, cosines = cached_result
    if query is not cached_query:
        result = nearest(query[None], vectors, k + 1, inv_norms)
        rows, cosines = exclude_row(exclude, result[0][0], result[1][0])
    return rows[:k], cosines[:k]


def _average_precision(correct: Any) -> float:
    """Return MAP@R of one ranking of length R (R@1 if R is 1): the mean precision at the correct positions."""
    return float((correct * np.cumsum(correct) / np.arange(1, len(correct) + 1)).sum() / len(correct))
