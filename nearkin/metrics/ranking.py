"""The exact ranking engine. A rank is a count of items that are more similar, so nothing is sorted: the similarity
matrix is computed in blocks, and each block is counted against the similarities of the relevant items.
"""

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.errors import ConfigError, import_extra
from nearkin.metrics import _problem
from nearkin.metrics._count_torch import count_torch
from nearkin.metrics._problem import PartialRanking, Progress, RankingProblem, make_problem, parse_bytes
from nearkin.metrics._vectors import ZERO_NORM, Floats, GalleryMatrix, Ints, VectorSet, as_matrix, prepare

_MIN_NUMBA_PAIRS = 3000**2  # below this, loading the compiled loops costs more than it saves


@dataclass(frozen=True)
class Ranking:
    """The ranks of the relevant items of every query, as tie groups.

    Query q owns the groups start[q]:start[q + 1], nearest first. A group is a set of items equally similar to the
    query that contains at least one relevant item. Without ties size = relevant = 1 and the rank of the item is
    above + 1.

    Attributes:
        start: [Q + 1] first group of each query.
        above: [T] items strictly nearer than the group.
        relevant: [T] relevant items in the group.
        size: [T] items in the group.
        items: [Q] items ranked for the query: the gallery without the query itself and its group.
        codes: [Q] class of the query, an index into `classes`.
        classes: [C] distinct labels, those of the queries first, sorted; or sets of labels, such as "0 3".
        similarity: "cosine" or "euclidean".
        notes: Remarks on the data: queries without relevant items, copies, ties, zero vectors.
    """

    start: Ints
    above: Ints
    relevant: Ints
    size: Ints
    items: Ints
    codes: Ints
    classes: NDArray[Any]
    similarity: str = "cosine"
    notes: tuple[str, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.start) - 1

    @cached_property
    def total(self) -> Ints:
        """[Q] relevant items of each query (R)."""
        return np.asarray(np.diff(np.concatenate([[0], np.cumsum(self.relevant)])[self.start]))

    @cached_property
    def query(self) -> Ints:
        """[T] the query that each group belongs to."""
        return np.asarray(np.repeat(np.arange(len(self)), np.diff(self.start)))

    @cached_property
    def hits_before(self) -> Ints:
        """[T] relevant items in the query's earlier groups."""
        return _problem.hits_before(np.diff(self.start), self.relevant)

    def break_ties(self, order: str) -> "Ranking":
        """Break all ties: "best" puts relevant items first within a group, "worst" last."""
        if order not in ("best", "worst"):
            raise ConfigError(f"order: expected 'best' or 'worst', got {order!r}.")
        offset = np.zeros_like(self.size) if order == "best" else self.size - self.relevant
        group = np.repeat(np.arange(len(self.above)), self.relevant)
        first = np.cumsum(self.relevant) - self.relevant
        above = (self.above + offset)[group] + np.arange(len(group)) - first[group]
        ones = np.ones(len(group), dtype=np.int64)
        start = np.concatenate([[0], np.cumsum(self.total)])
        return replace(self, start=start, above=above, relevant=ones, size=ones)


def rank(
    query: Any,
    labels: Any,
    gallery: Any = None,
    gallery_labels: Any = None,
    *,
    similarity: str = "cosine",
    groups: Any = None,
    gallery_groups: Any = None,
    memory: str | int = "1GB",
    backend: str = "auto",
    progress: Progress | None = None,
    verbose: bool | None = None,
) -> Ranking:
    """Rank a gallery for every query: `rank(emb, labels)` or `rank(query, labels, gallery, gallery_labels)`.

    With a single set every item is a query against all others. The query itself is excluded by index, so an exact copy
    of it is still ranked.

    Args:
        query: [Q, D] array or tensor.
        labels: [Q] integers of any size, or strings; or bool [Q, T], where items that share a label are relevant.
        gallery: [G, D]; the query itself when omitted.
        gallery_labels: [G].
        similarity: "cosine", or "euclidean" on the raw vectors.
        groups: [Q] integers or strings. Items of the query's own group (the same camera, the same sequence) are
            excluded, neither right nor wrong. For "same person and same camera" use one group per such pair.
        gallery_groups: [G] groups of the gallery.
        memory: Maximum extra memory beside the vectors and the result, for example "1GB".
        backend: "numba" (fastest on a CPU), "torch" (any device) or "auto". The results are identical.
        progress: Called with the fraction done.
        verbose: Print the plan before starting; by default only for large problems.

    Returns:
        The ranks of the relevant items of every query.

    Example:
        >>> rank([[1.0, 0.0], [0.9, 0.1], [0.8, 0.1]], [5, 5, 7]).above.tolist()
        [0, 1]
    """
    problem = make_problem(query, labels, gallery, gallery_labels, similarity, groups, gallery_groups)
    ranking = assemble(problem, list(count_hits(problem, parse_bytes(memory), backend, progress, verbose)))
    return replace(ranking, notes=tuple(data_notes(problem, *count_singletons_and_ties(ranking))))


def count_hits(
    problem: RankingProblem, budget: int, backend: str, progress: Progress | None, verbose: bool | None
) -> Iterator[PartialRanking]:
    """Count with the chosen backend, some queries at a time."""
    backend = _choose_backend(problem, backend)
    q, g, d = len(problem.query), len(problem.gallery), problem.query.x.shape[1]
    if verbose or (verbose is None and q * g >= 10**9):
        work = 2e-12 * q * g * d / (2 if backend == "numba" and problem.single_set else 1)
        plan = f"ranking {q:,} queries against {g:,} items of {d} dimensions: {work:.2g} Tflop, {backend} backend"
        print(f"{plan}, at most {budget / 1e9:.2g} GB beside the vectors", file=sys.stderr, flush=True)
    if backend == "numba":
        from nearkin.metrics._count_numba import count_numba

        return count_numba(problem, budget, progress)
    return count_torch(problem, budget, progress)


def has_numba() -> bool:
    """Return whether numba is installed."""
    return importlib.util.find_spec("numba") is not None


def _choose_backend(problem: RankingProblem, backend: str) -> str:
    if backend not in ("auto", "numba", "torch"):
        raise ConfigError(f"backend: expected 'auto', 'numba' or 'torch', got {backend!r}.")
    on_cpu = problem.query.x.device.type == "cpu"
    if backend == "numba":
        import_extra("numba", extra="images")
        if not on_cpu:
            raise ConfigError("backend: 'numba' runs on the CPU. Move the vectors with .cpu(), or use backend='torch'.")
        if problem.label_sets is not None:
            raise ConfigError("backend: 'numba' takes one label per row. Use backend='torch' for several.")
    if backend != "auto":
        return backend
    large = len(problem.query) * len(problem.gallery) >= _MIN_NUMBA_PAIRS
    fits = large and on_cpu and problem.label_sets is None
    return "numba" if fits and has_numba() else "torch"


def neighbours(
    query: Any, gallery: Any = None, k: int = 10, *, similarity: str = "cosine", memory: str | int = "1GB"
) -> tuple[Ints, Floats]:
    """Find the k nearest gallery items of every query, exactly. Equally similar items are ordered by index.

    Args:
        query: [Q, D] array or tensor.
        gallery: [G, D]; when omitted the query itself, without the item with the query's own index.
        k: Items per query.
        similarity: "cosine" or "euclidean".
        memory: Maximum extra memory, for example "1GB".

    Returns:
        Indices [Q, k] and similarities [Q, k], nearest first. The similarity is the cosine, or minus the Euclidean
        distance.

    Example:
        >>> neighbours([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], k=2)[0].tolist()
        [[1, 2], [0, 2], [0, 1]]
    """
    q = as_matrix(query, "query")
    g = None
    if gallery is not None:
        q, g = _problem.match_dtype_and_device(q, as_matrix(gallery, "gallery"))
    q_vectors, g_vectors = prepare(q, g, similarity)
    max_k = len(g_vectors) - int(g is None)
    if not 1 <= k <= max_k:
        raise ConfigError(f"k: expected 1 to {max_k} (items that can be returned), got {k}.")
    _, error_bound = q_vectors.error_bounds(g_vectors)
    # Of identical items only the first k can be returned, plus one where the query is among them. This keeps a
    # collapsed model, which has one vector for everything, as cheap as any other.
    order = np.argsort(g_vectors.row_id, kind="stable")
    ordered = g_vectors.row_id[order]
    copy = np.arange(len(order)) - np.searchsorted(ordered, ordered)  # the number of identical items before each
    candidates = np.sort(order[copy < k + int(g is None)])
    budget = parse_bytes(memory)
    matrix = GalleryMatrix(g_vectors, candidates, torch.float64, budget // 2)
    step = max(1, min(1024, budget // 2 // (len(candidates) * 24)))
    indices, values = [], []
    for a in range(0, len(q_vectors), step):
        rows = slice(a, min(a + step, len(q_vectors)))
        keys = matrix.keys(q_vectors.query_matrix(rows))
        if g is None:
            own = np.arange(a, a + len(keys))
            column = np.searchsorted(candidates, own)
            found = np.flatnonzero(candidates[np.minimum(column, len(candidates) - 1)] == own)
            keys[found, column[found]] = -torch.inf
        nearest = _nearest(q_vectors, g_vectors, rows, keys, candidates, k, error_bound[rows])
        indices.append(nearest)
        values.append(_similarities(q_vectors, rows, g_vectors, nearest))
    return np.concatenate(indices), np.concatenate(values)


def _nearest(
    query: VectorSet, gallery: VectorSet, rows: slice, keys: Tensor, candidates: Ints, k: int, error_bound: Tensor
) -> Ints:
    """[n, k] gallery rows of the k largest keys, near-ties resolved by exact distance and ties by index."""
    kth = torch.topk(keys, k, dim=1).values[:, -1]
    near = (keys >= (kth - 2 * error_bound)[:, None]).nonzero()
    key = keys[near[:, 0], near[:, 1]].cpu().numpy()
    row, col = near[:, 0].cpu().numpy(), candidates[near[:, 1].cpu().numpy()]
    bound = error_bound.cpu().numpy()
    order, run, distance = _problem.order_by_distance(query, gallery, row + rows.start, row, col, key, bound)
    row, col = row[order], col[order]
    order = np.lexsort((col, distance, run, row))
    first = np.searchsorted(row, np.arange(keys.shape[0]))
    return np.asarray(col[order[(first[:, None] + np.arange(k)).ravel()]].reshape(-1, k))


def _similarities(query: VectorSet, rows: slice, gallery: VectorSet, cols: Ints) -> Floats:
    """The similarity of each row to its own columns, summed per pair so that it does not depend on the block size."""
    index = torch.as_tensor(cols, device=gallery.x.device)
    gap = query.centred(rows)[:, None, :] - gallery.centred(index.reshape(-1)).reshape(*index.shape, -1)
    squared = (gap / query.scale).square().sum(-1)
    if query.cosine:
        nonzero = (query.row_scale[rows, None] > 0) & (gallery.row_scale[index] > 0)
        return np.asarray(torch.where(nonzero, 1 - squared / 2, 0.0).cpu().numpy())
    return np.asarray((-squared.sqrt() / query.pow2[0]).cpu().numpy())


def assemble(problem: RankingProblem, parts: list[PartialRanking]) -> Ranking:
    """Merge partial rankings into one, with the queries in ascending order."""
    queries, counts = (np.concatenate([getattr(p, name) for p in parts]) for name in ("queries", "counts"))
    by_query = np.argsort(queries)
    ordered, ordered_counts = queries[by_query], counts[by_query]
    start = np.concatenate([[0], np.cumsum(ordered_counts)])
    # Source of each group: the first of its query plus its index among the query's groups.
    first = np.cumsum(counts) - counts
    source = np.repeat(first[by_query] - start[:-1], ordered_counts) + np.arange(start[-1])
    fields = {name: np.concatenate([getattr(p, name) for p in parts])[source] for name in ("above", "relevant", "size")}
    items = np.full(len(ordered), len(problem.gallery) - int(problem.single_set), dtype=np.int64)
    if problem.groups is not None:
        query_group, position_group = problem.groups
        group_size = np.bincount(position_group, minlength=int(query_group.max()) + 1)
        items = len(problem.gallery) - group_size[query_group[ordered]]
    codes, similarity = problem.codes[ordered], problem.similarity
    return Ranking(start=start, items=items, codes=codes, classes=problem.classes, similarity=similarity, **fields)


def count_singletons_and_ties(ranking: Ranking) -> tuple[int, int]:
    """Count the queries without a relevant item, and those with a tie between a relevant and another item."""
    tied = np.unique(ranking.query[ranking.size > ranking.relevant])
    return int((np.diff(ranking.start) == 0).sum()), len(tied)


def data_notes(problem: RankingProblem, singletons: int, tied: int) -> Iterator[str]:
    """Yield what a reader of the scores should know about the data."""
    if singletons:
        yield f"{singletons:,} of {len(problem.query):,} queries have no relevant item."
    row_id, zero = problem.gallery.row_id, np.zeros(len(problem.gallery), dtype=bool)
    if problem.gallery.cosine:
        zero = (problem.gallery.row_scale == 0).cpu().numpy()
    copies = int((~zero).sum()) - len(np.unique(row_id[~zero]))  # zero vectors tie without being equal
    if copies:
        yield f"{copies:,} of {len(row_id):,} gallery vectors equal another one in float32; they tie."
    if tied:
        yield f"{tied:,} of {len(problem.query):,} queries have ties between relevant and other items."
    if copies and copies == len(row_id) - 1:
        yield "All vectors are identical: the model has collapsed, and the scores are at chance level."
    if zero.any():
        few = f"{int(zero.sum()):,} of {len(row_id):,} gallery vectors have a norm of at most {ZERO_NORM:g}"
        yield f"{few}, too small for a direction; their cosine with everything counts as 0."
