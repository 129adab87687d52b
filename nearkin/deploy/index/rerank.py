"""Re-rank search results, where it provably helps on validation classes.

Both methods can hurt: wrong neighbours pull the query towards the wrong class. `choose_rerank` measures the gain.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nearkin._common.registry import Registry
from nearkin.deploy.index.search import Floats, Ints, Vectors, exclude_row, inverse_norms, nearest, normalize_rows
from nearkin.errors import ConfigError, DataError
from nearkin.metrics.bootstrap import Difference, paired_difference

SearchFn = Callable[[Vectors, int], tuple[Ints, Floats]]  # (query [D], k) -> rows and cosines, nearest first
LEVEL = 0.95  # confidence that all gains lie in their intervals
MAX_QUERIES = 500  # a random sample of the items


@dataclass(frozen=True)
class Expansion:
    """Average the query with its nearest items and search again (alpha query expansion, Radenovic et al. 2018)."""

    k: int = 5  # number of neighbours averaged in
    alpha: float = 3.0  # a neighbour's weight is its similarity to this power

    def __post_init__(self) -> None:
        if self.k < 1 or self.alpha < 0:
            raise ConfigError(f"expansion: expected k >= 1 and alpha >= 0, got k={self.k}, alpha={self.alpha}.")


@dataclass(frozen=True)
class Reciprocal:
    """Promote items that have the query among their own neighbours (k-reciprocal encoding, Zhong et al. 2017)."""

    k1: int = 20  # size of the neighbourhood that must be mutual
    k2: int = 6  # number of neighbours over which encodings are averaged
    weight: float = 0.3  # weight of the cosine distance; the rest is the Jaccard distance
    depth: int = 100  # number of nearest items that are re-ranked

    def __post_init__(self) -> None:
        if min(self.k1, self.k2, self.depth) < 1 or not 0 <= self.weight <= 1:
            raise ConfigError(f"reciprocal: expected k1, k2, depth >= 1 and weight in [0, 1], got {self}.")


Rerank = Expansion | Reciprocal
RERANKERS = Registry[type[Expansion] | type[Reciprocal]]("re-ranking method")
RERANKERS.update(expansion=Expansion, reciprocal=Reciprocal)


def rerank_name(option: Rerank) -> str:
    return type(option).__name__.lower()


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
    order = np.argsort(-cosine, axis=1, kind="stable")
    rank = np.argsort(order, axis=1)  # the inverse permutation
    np.fill_diagonal(cosine, 1.0)
    mutual_rank = np.maximum(rank, rank.T)
    full, half = mutual_rank <= k1, mutual_rank <= round(k1 / 2)
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


@dataclass(frozen=True)
class RerankChoice:
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
) -> RerankChoice:
    """Select the method with the best significant gain (over classes, Bonferroni) on labelled items as queries."""
    if metric not in ("MAP@R", "R@1"):
        raise ConfigError(f"metric: expected 'MAP@R' or 'R@1', got {metric!r}.")
    labels = list(labels)
    rows, codes = _sample_queries(labels, range(len(labels)) if queries is None else queries)
    scores = _evaluate(vectors, labels, rows, options, metric)
    adjusted = 1 - (1 - LEVEL) / len(options)
    gains = tuple(
        (option, paired_difference(metric, scores[0], scores[1 + n], codes, level=adjusted, draws=2000, seed=0))
        for n, option in enumerate(options)
    )
    significant = [(gain.difference, option) for option, gain in gains if gain.low > 0]
    return RerankChoice(max(significant, key=lambda pair: pair[0])[1] if significant else None, gains)


def _sample_queries(labels: list[Any], rows: Sequence[int]) -> tuple[Ints, Ints]:
    """Sample rows whose class has another item, with their class codes."""
    count = Counter(labels)
    usable = np.array([row for row in rows if labels[row] is not None and count[labels[row]] > 1], np.int64)
    classes, codes = np.unique([str(labels[row]) for row in usable], return_inverse=True)
    if len(classes) < 2:
        raise DataError(f"re-ranking: needs at least two classes with two images each, got {len(classes)}.")
    if len(usable) > MAX_QUERIES:
        sample = np.sort(np.random.default_rng(0).choice(len(usable), MAX_QUERIES, replace=False))
        usable, codes = usable[sample], codes[sample]
    return usable, codes


def _evaluate(vectors: Vectors, labels: list[Any], rows: Ints, options: Sequence[Rerank], metric: str) -> Floats:
    """Return scores [1 + methods, queries]: plain search first, then each method."""
    count = Counter(labels)
    inv_norms = inverse_norms(vectors)
    lengths = [count[labels[row]] - 1 if metric == "MAP@R" else 1 for row in rows.tolist()]
    max_k = max([*lengths, *(option.depth if isinstance(option, Reciprocal) else option.k for option in options)])
    found = nearest(np.asarray(vectors[rows]), vectors, max_k + 1, inv_norms)  # for all queries at once

    def rankings(row: int, length: int, plain: tuple[Ints, Floats]) -> list[Ints]:
        own = np.asarray(vectors[row])

        def search(query: Vectors, k: int) -> tuple[Ints, Floats]:
            near, cosines = plain
            if query is not own:
                [near], [cosines] = nearest(query[None], vectors, k + 1, inv_norms)
                near, cosines = exclude_row(row, near, cosines)
            return near[:k], cosines[:k]

        return [plain[0][:length], *(apply_rerank(own, vectors, length, option, search)[0] for option in options)]

    scores = np.empty((1 + len(options), len(rows)))
    for n, (row, length) in enumerate(zip(rows.tolist(), lengths, strict=True)):
        for m, ranking in enumerate(rankings(row, length, exclude_row(row, found[0][n], found[1][n]))):
            # MAP@R of a ranking of length R (R@1 if R is 1): the mean precision at the correct positions.
            correct = np.array([labels[other] == labels[row] for other in ranking.tolist()])
            scores[m, n] = (correct * np.cumsum(correct) / np.arange(1, len(correct) + 1)).sum() / len(correct)
    return scores
