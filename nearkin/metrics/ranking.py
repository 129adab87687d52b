"""The exact ranking engine: where every relevant item stands, without ranking the others.

A retrieval metric asks one thing of a query: at which places its relevant items stand. A place is a count of items
that are more similar, so nothing is sorted and no list of k nearest is kept. The similarity matrix is walked in blocks
and each block is counted against the similarities of the relevant items.

Ties are kept as ties. `Ranking` holds, per query, the groups of equally similar items that hold a relevant one; the
metrics (nearkin.metrics.scores) take the expectation over a random order inside each group.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin.errors import ConfigError, import_extra
from nearkin.metrics._blocks import count_torch
from nearkin.metrics._problem import (
    Part,
    Progress,
    RankingProblem,
    as_bytes,
    make_problem,
    order_by_distance,
    same_space,
)
from nearkin.metrics._vectors import Columns, Floats, Ints, Points, as_matrix, check_similarity, prepare

_SMALL = 3000**2  # pairs up to which loading compiled loops would cost more than it saves


@dataclass(frozen=True)
class Ranking:
    """The places of the relevant items of every query.

    Query q owns the groups start[q]:start[q + 1], nearest first. A group is a set of items equally similar to the
    query that holds at least one relevant item: `above` items are strictly nearer than the group, `size` items are in
    it, `relevant` of those are relevant. Without ties size = relevant = 1 and the place of the item is above + 1.

    >>> r = rank([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]], ["a", "a", "b"])
    >>> r.above.tolist(), r.total.tolist()
    ([0, 0], [1, 1, 0])
    """

    start: Ints  # [Q + 1]
    above: Ints  # [T]
    relevant: Ints  # [T]
    size: Ints  # [T]
    items: Ints  # [Q] how many items were ranked for the query (gallery, less itself and what is ignored)
    codes: Ints  # [Q] class of the query, an index into classes
    classes: NDArray[Any]  # [C] the distinct labels, queries' first in sorted order
    similarity: str = "cosine"
    notes: tuple[str, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.start) - 1

    @property
    def total(self) -> Ints:
        """[Q] how many relevant items each query has (R)."""
        return np.asarray(np.diff(np.concatenate([[0], np.cumsum(self.relevant)])[self.start]))

    @property
    def query(self) -> Ints:
        """[T] the query each group belongs to."""
        return np.asarray(np.repeat(np.arange(len(self)), np.diff(self.start)))

    @property
    def before(self) -> Ints:
        """[T] relevant items in the query's earlier groups."""
        ends = np.cumsum(self.relevant)
        first = np.concatenate([[0], ends])[self.start[:-1]]
        return np.asarray(ends - self.relevant - np.repeat(first, np.diff(self.start)))

    def break_ties(self, order: str) -> Ranking:
        """The same ranking with ties broken for the query ("best": relevant items first) or against it ("worst")."""
        if order not in ("best", "worst"):
            raise ConfigError(f"order: expected 'best' or 'worst', got {order!r}.")
        offset = np.zeros_like(self.size) if order == "best" else self.size - self.relevant
        each = np.repeat(np.arange(len(self.above)), self.relevant)
        first = np.cumsum(self.relevant) - self.relevant
        above = (self.above + offset)[each] + np.arange(len(each)) - first[each]
        ones = np.ones(len(each), dtype=np.int64)
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
    g_groups: Any = None,
    memory: str | int = "1GB",
    path: str = "auto",
    progress: Progress | None = None,
    verbose: bool | None = None,
) -> Ranking:
    """Find where the relevant items of every query stand: `rank(emb, labels)`, or `rank(query, q, gallery, g)`.

    query, gallery: [N, D] arrays or tensors. labels: [N] integers of any size, or strings. With one set every item is a
    query against all others; itself is left out by index, so that a duplicate never takes its place.

    similarity  "cosine", or "euclidean" on the vectors as they are.
    groups      [N] integers or strings, also g_groups for a gallery: items of the query's own group (the same camera,
                the same sequence) are left out, neither right nor wrong. For "same person and same camera" make one
                group per such pair.
    memory      most extra memory to use, for example "1GB", beside the vectors and the result.
    path        "numba" (fastest on a CPU), "torch" (any device), "auto". The result is the same to the last digit.
    progress    called now and then with the fraction done.
    verbose     print the plan before starting; by default only when the work is large.

    >>> rank([[1.0, 0.0], [0.9, 0.1], [0.8, 0.1]], [5, 5, 7]).above.tolist()
    [0, 1]
    """
    task = make_problem(query, labels, gallery, gallery_labels, similarity, groups, g_groups)
    ranking = assemble(task, list(count_hits(task, as_bytes(memory), path, progress, verbose)))
    return replace(ranking, notes=tuple(describe(task, *tally(ranking))))


def count_hits(
    task: RankingProblem, budget: int, path: str, progress: Progress | None, verbose: bool | None
) -> Iterator[Part]:
    """Count along the chosen path, some queries at a time."""
    chosen = _choose(task, path, budget)
    work = len(task.query) * len(task.gallery)
    if verbose or (verbose is None and work >= 10**9):
        print(_plan(task, chosen, budget), file=sys.stderr, flush=True)
    if chosen == "numba":
        from nearkin.metrics._counting import count_blocks

        return count_blocks(task, budget, progress)
    return count_torch(task, budget, progress)


def has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


def _choose(task: RankingProblem, path: str, budget: int) -> str:
    if path not in ("auto", "numba", "torch"):
        raise ConfigError(f"path: expected 'auto', 'numba' or 'torch', got {path!r}.")
    if path == "numba":
        import_extra("numba", extra="fast")
        if task.query.x.device.type != "cpu":
            raise ConfigError("path: 'numba' counts on the CPU. Move the vectors with .cpu(), or use path='torch'.")
    if path != "auto":
        return path
    # Small work is done before the compiler is loaded; with very large classes sorting beats comparing.
    fits = len(task.query) * len(task.gallery) >= _SMALL and task.pairs <= min(128 * len(task.query), budget // 250)
    return "numba" if fits and task.query.x.device.type == "cpu" and has_numba() else "torch"


def _plan(task: RankingProblem, path: str, budget: int) -> str:
    q, g, d = len(task.query), len(task.gallery), task.query.x.shape[1]
    half = 2 if path == "numba" and task.alone else 1
    return (
        f"ranking {q:,} queries against {g:,} items of {d} numbers: {2e-12 * q * g * d / half:.2g} Tflop, "
        f"{path} path, at most {budget / 1e9:.2g} GB beside the vectors"
    )


def neighbours(
    query: Any,
    gallery: Any = None,
    k: int = 10,
    *,
    exclude_self: bool | None = None,
    similarity: str = "cosine",
    memory: str | int = "1GB",
) -> tuple[Ints, Floats]:
    """The k nearest gallery items of every query, exactly: indices and similarities, both [Q, k], nearest first.

    Items equally similar come in the order of their index. Without a gallery the query is its own, and itself is left
    out (exclude_self=False keeps it). The similarity is the cosine, or minus the Euclidean distance.

    >>> neighbours([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], k=2)[0].tolist()
    [[1, 2], [0, 2], [0, 1]]
    """
    check_similarity(similarity)
    q = as_matrix(query, "query")
    g = None
    if gallery is not None:
        q, g = same_space(q, as_matrix(gallery, "gallery"))
    alone = g is None if exclude_self is None else exclude_self
    if alone and g is not None and len(g) != len(q):
        raise ConfigError("exclude_self: needs query and gallery to be the same rows in the same order.")
    left, right = prepare(q, g, similarity)
    most = len(right) - int(alone)
    if not 1 <= k <= most:
        raise ConfigError(f"k: expected 1 to {most} (items that can be returned), got {k}.")
    _, slack = left.slack(right)
    # Of identical items only the first k can be returned, and one more where the query is one of them. A collapsed
    # model, which has one vector for everything, then costs no more than another.
    worth = np.flatnonzero(_place_among_equals(right.group) < k + int(alone))
    columns = Columns(right, worth, torch.float64, as_bytes(memory) // 2)
    step = max(1, min(1024, as_bytes(memory) // 2 // (len(worth) * 24)))
    indices, values = [], []
    for a in range(0, len(left), step):
        rows = slice(a, min(a + step, len(left)))
        keys = columns.keys(left.left(rows))
        if alone:
            at = np.searchsorted(worth, np.arange(a, a + len(keys)))
            own = np.flatnonzero(worth[np.minimum(at, len(worth) - 1)] == np.arange(a, a + len(keys)))
            keys[own, at[own]] = -torch.inf
        last = torch.topk(keys, k, dim=1).values[:, -1]
        near = (keys >= (last - 2 * slack[rows])[:, None]).nonzero()
        key = keys[near[:, 0], near[:, 1]].cpu().numpy()
        row, col = near[:, 0].cpu().numpy(), worth[near[:, 1].cpu().numpy()]
        order, run, distance = order_by_distance(left, right, row + a, row, col, key, slack[rows].cpu().numpy())
        row, col, key, run, distance = row[order], col[order], key[order], run[order], distance[order]
        order = np.lexsort((col, distance, run, row))
        first = np.searchsorted(row, np.arange(keys.shape[0]))
        take = order[(first[:, None] + np.arange(k)).ravel()]
        indices.append(col[take].reshape(-1, k))
        values.append(_similarity(left, rows, right, col[take].reshape(-1, k)))
    return np.concatenate(indices), np.concatenate(values)


def _place_among_equals(group: Ints) -> Ints:
    """For each item how many of the same number come before it."""
    order = np.argsort(group, kind="stable")
    ordered = group[order]
    place = np.empty(len(group), dtype=np.int64)
    place[order] = np.arange(len(group)) - np.searchsorted(ordered, ordered)
    return place


def _similarity(left: Points, rows: slice, right: Points, cols: Ints) -> Floats:
    """The similarity of each row to its own columns, summed per pair so that it does not depend on the block."""
    at = torch.as_tensor(cols, device=right.x.device)
    z = left.delta(rows)[:, None, :] - right.delta(at.reshape(-1)).reshape(*at.shape, -1)
    squared = (z / left.scale).square().sum(-1)
    if left.cosine:
        known = (left.shrink[rows, None] > 0) & (right.shrink[at] > 0)
        return np.asarray(torch.where(known, 1 - squared / 2, 0.0).cpu().numpy())
    return np.asarray((-squared.sqrt() / left.power[0]).cpu().numpy())


# ------------------------------------------------------------------------------------------------------- the result


def assemble(task: RankingProblem, parts: list[Part]) -> Ranking:
    """The ranking of the queries in `parts`, in the order of their numbers."""
    queries = np.concatenate([p.queries for p in parts])
    chosen = np.sort(queries)
    place = np.searchsorted(chosen, queries)
    each = np.concatenate([p.counts for p in parts])
    counts = np.empty(len(queries), dtype=np.int64)
    counts[place] = each
    start = np.concatenate([[0], np.cumsum(counts)])
    # Where each group of the parts goes: the start of its query plus its place among the query's groups.
    to = np.repeat(start[place] - (np.cumsum(each) - each), each) + np.arange(each.sum())
    fields: dict[str, Any] = {}
    for name in ("above", "relevant", "size"):
        fields[name] = np.empty(len(to), dtype=np.int64)
        fields[name][to] = np.concatenate([getattr(p, name) for p in parts])
    items = np.full(len(chosen), len(task.gallery) - int(task.alone), dtype=np.int64)
    if task.group is not None and task.order_group is not None:
        most = int(max(task.group.max(), task.order_group.max())) + 1
        items = len(task.gallery) - np.bincount(task.order_group, minlength=most)[task.group[chosen]]
    codes = task.codes[chosen]
    return Ranking(start=start, items=items, codes=codes, classes=task.classes, similarity=task.similarity, **fields)


def tally(ranking: Ranking) -> tuple[int, int]:
    """How many queries have no relevant item, and how many have one that ties with an item that is not."""
    tied = np.unique(ranking.query[ranking.size > ranking.relevant])
    return int((np.diff(ranking.start) == 0).sum()), len(tied)


def describe(task: RankingProblem, lone: int, tied: int) -> Iterator[str]:
    """What a reader of the scores should know about the data."""
    if lone:
        yield f"{lone:,} of {len(task.query):,} queries have no relevant item to find."
    group = task.gallery.group
    copies = len(group) - len(np.unique(group))
    if copies:
        yield f"{copies:,} of {len(group):,} gallery vectors are exact copies of another; they tie."
    if tied:
        yield f"{tied:,} of {len(task.query):,} queries have ties between relevant and other items."
    if copies and copies == len(group) - 1:
        yield "All vectors are the same: the model has collapsed, and the scores are what chance gives."
    if task.gallery.cosine and (blank := int((task.gallery.shrink == 0).sum())):
        yield f"{blank:,} gallery vectors are zero; their cosine with everything is taken as 0."
