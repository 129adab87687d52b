"""The exact ranking engine: where every relevant item stands, without ranking the others.

A retrieval metric asks one thing of a query: at which places its relevant items stand. A place is a count of items
that are more similar, so nothing is sorted and no list of k nearest is kept. The similarity matrix is walked in blocks
and each block is counted against the similarities of the relevant items.

Ties are kept as ties. `Ranking` holds, per query, the groups of equally similar items that hold a relevant one; the
metrics (nearkin.metrics) take the expectation over a random order inside each group.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin._vectors import (
    Floats,
    Ints,
    Points,
    as_labels,
    as_matrix,
    check_similarity,
    encode,
    exact_distance,
    prepare,
)
from nearkin.errors import ConfigError, DataError

Progress = Callable[[float], None]
_LOOP_UP_TO = 24  # relevant items per query up to which comparing in turn beats a binary search per element


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
        return np.repeat(np.arange(len(self)), np.diff(self.start))

    @property
    def before(self) -> Ints:
        """[T] relevant items in the query's earlier groups."""
        ends = np.cumsum(self.relevant)
        first = np.concatenate([[0], ends])[self.start[:-1]]
        return ends - self.relevant - np.repeat(first, np.diff(self.start))

    def settled(self, order: str) -> Ranking:
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
    task = _task(query, labels, gallery, gallery_labels, similarity, groups, g_groups)
    chosen = _choose(task, path)
    budget = as_bytes(memory)
    work = len(task.query) * len(task.gallery)
    if verbose or (verbose is None and work >= 10**9):
        print(_plan(task, chosen, budget), file=sys.stderr, flush=True)
    if chosen == "numba":
        from nearkin._counting import count_blocks

        parts: Iterator[Part] = count_blocks(task, budget, progress)
    else:
        parts = _count_torch(task, budget, progress)
    return _assemble(task, list(parts))


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
    g = None if gallery is None else _same_space(q, as_matrix(gallery, "gallery"))
    alone = g is None if exclude_self is None else exclude_self
    if alone and g is not None and len(g) != len(q):
        raise ConfigError("exclude_self: needs query and gallery to be the same rows in the same order.")
    left, right = prepare(q, g, similarity)
    most = len(right) - int(alone)
    if not 1 <= k <= most:
        raise ConfigError(f"k: expected 1 to {most} (items that can be returned), got {k}.")
    _, slack = left.slack(right)
    matrix = right.right(torch.arange(len(right), device=right.x.device), torch.float64)
    step = max(1, min(1024, as_bytes(memory) // (len(right) * 24)))
    indices, values = [], []
    for a in range(0, len(left), step):
        rows = slice(a, min(a + step, len(left)))
        keys = left.left(rows) @ matrix.T
        here = torch.arange(keys.shape[0], device=keys.device)
        if alone:
            keys[here, here + a] = -torch.inf
        last = torch.topk(keys, k, dim=1).values[:, -1]
        near = (keys >= (last - 2 * slack[rows])[:, None]).nonzero()
        key = keys[near[:, 0], near[:, 1]].cpu().numpy()
        row, col = near[:, 0].cpu().numpy(), near[:, 1].cpu().numpy()
        order, run, distance = _order(left, right, row + a, row, col, key, slack[rows].cpu().numpy())
        row, col, key, run, distance = row[order], col[order], key[order], run[order], distance[order]
        order = np.lexsort((col, distance, run, row))
        first = np.searchsorted(row, np.arange(keys.shape[0]))
        take = order[(first[:, None] + np.arange(k)).ravel()]
        indices.append(col[take].reshape(-1, k))
        values.append(_similarity(left, rows, right, col[take].reshape(-1, k)))
    return np.concatenate(indices), np.concatenate(values)


def _similarity(left: Points, rows: slice, right: Points, cols: Ints) -> Floats:
    """The similarity of each row to its own columns, summed per pair so that it does not depend on the block."""
    at = torch.as_tensor(cols, device=right.x.device)
    z = left.delta(rows)[:, None, :] - right.delta(at.reshape(-1)).reshape(*at.shape, -1)
    squared = (z / left.scale).square().sum(-1)
    if left.cosine:
        known = (left.shrink[rows, None] > 0) & (right.shrink[at] > 0)
        return np.asarray(torch.where(known, 1 - squared / 2, 0.0).cpu().numpy())
    return np.asarray((-squared.sqrt() / left.power[0]).cpu().numpy())


# --------------------------------------------------------------------------------------------------- what is ranked


@dataclass(frozen=True)
class Task:
    """Checked input. Gallery positions are in class order, so that a class is a range of columns."""

    query: Points
    gallery: Points
    alone: bool  # the query is the gallery
    codes: Ints  # [Q] class of each query
    classes: NDArray[Any]
    order: Ints  # [G] gallery row at each position
    class_start: Ints  # [C + 1] first position of each class
    similarity: str
    group: Ints | None  # [Q] group of each query
    order_group: Ints | None  # [G] group of the item at each position

    def relevant(self, queries: Ints) -> tuple[Ints, Ints]:
        """(row, position) of every relevant item of the given queries; row counts within `queries`."""
        code = self.codes[queries]
        size = self.class_start[code + 1] - self.class_start[code]
        row = np.repeat(np.arange(len(queries)), size)
        first = np.cumsum(size) - size
        position = np.arange(len(row)) - first[row] + self.class_start[code][row]
        keep = np.ones(len(row), dtype=bool)
        if self.alone:
            keep &= self.order[position] != queries[row]
        if self.group is not None and self.order_group is not None:
            keep &= self.order_group[position] != self.group[queries][row]
        return row[keep], position[keep]


@dataclass(frozen=True)
class Part:
    """Groups of some queries: the result of a path, before it is put in order. Arrays as in Ranking."""

    queries: Ints
    counts: Ints  # groups per query
    above: Ints
    relevant: Ints
    size: Ints


@dataclass(frozen=True)
class Thresholds:
    """The tie groups of relevant items, which the other items are counted against. Nearest first within a row."""

    counts: Ints  # [rows] groups per row
    key: Floats  # [T] key of the group
    sample: Ints  # [T] position of one relevant item of the group
    relevant: Ints  # [T] relevant items in the group


def _task(query: Any, labels: Any, gallery: Any, g_labels: Any, similarity: str, groups: Any, g_groups: Any) -> Task:
    check_similarity(similarity)
    if (gallery is None) != (g_labels is None):
        missing = "gallery labels" if g_labels is None else "gallery"
        raise ConfigError(f"rank: the {missing} are missing. Use (emb, labels) or (query, labels, gallery, labels).")
    alone = gallery is None
    q = as_matrix(query, "embeddings" if alone else "query")
    q_labels = as_labels(labels, len(q), "labels" if alone else "query labels", "embeddings" if alone else "query")
    g, g_names = None, None
    if not alone:
        g = _same_space(q, as_matrix(gallery, "gallery"))
        g_names = as_labels(g_labels, len(g), "gallery labels", "gallery")
    codes, g_codes, classes = encode(q_labels, g_names, "labels")
    group, g_group = _groups(groups, g_groups, len(q), None if g is None else len(g))
    left, right = prepare(q, g, similarity)
    # Small classes first: blocks of rows then need about equally many comparisons.
    size = np.bincount(g_codes, minlength=len(classes))
    order = np.lexsort((np.arange(len(g_codes)), g_codes))
    start = np.concatenate([[0], np.cumsum(size)])
    return Task(
        query=left,
        gallery=right,
        alone=alone,
        codes=codes,
        classes=classes,
        order=order,
        class_start=start,
        similarity=similarity,
        group=group,
        order_group=None if g_group is None else g_group[order],
    )


def _same_space(q: Tensor, g: Tensor) -> Tensor:
    if q.shape[1] != g.shape[1]:
        raise DataError(f"gallery: vectors of {g.shape[1]} numbers, but the query's have {q.shape[1]}.")
    dtype = torch.promote_types(q.dtype, g.dtype)
    if q.dtype != dtype:
        raise DataError(
            f"gallery: float64 against a query in {q.dtype}. Convert one of them, so that equal rows compare."
        )
    return g.to(device=q.device, dtype=dtype)


def _groups(groups: Any, g_groups: Any, n: int, g: int | None) -> tuple[Ints | None, Ints | None]:
    if groups is None and g_groups is None:
        return None, None
    if groups is None or (g is not None) != (g_groups is not None):
        raise ConfigError("groups: give groups for one set, or both groups and g_groups for a query and a gallery.")
    first = as_labels(groups, n, "groups", "the query")
    second = None if g is None else as_labels(g_groups, g, "g_groups", "the gallery")
    ours, theirs, _ = encode(first, second, "groups")
    return ours, theirs


def as_bytes(memory: str | int) -> int:
    """Bytes of "512MB", "1.5GB" or a number.

    >>> as_bytes("1GB")
    1000000000
    """
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "B": 1}
    text = str(memory).strip().upper()
    for unit, factor in units.items():
        if text.endswith(unit):
            text, size = text[: -len(unit)], factor
            break
    else:
        size = 1
    try:
        found = int(float(text) * size)
    except ValueError:
        raise ConfigError(f"memory: expected a size such as '512MB' or '2GB', got {memory!r}.") from None
    if found < 10**6:
        raise ConfigError(f"memory: at least 1MB is needed, got {memory!r}.")
    return found


def has_numba() -> bool:
    try:
        import numba  # noqa: F401
    except ImportError:
        return False
    return True


def _choose(task: Task, path: str) -> str:
    if path not in ("auto", "numba", "torch"):
        raise ConfigError(f"path: expected 'auto', 'numba' or 'torch', got {path!r}.")
    if path != "auto":
        return path
    return "torch"


def _plan(task: Task, path: str, budget: int) -> str:
    q, g, d = len(task.query), len(task.gallery), task.query.x.shape[1]
    half = 2 if path == "numba" and task.alone else 1
    return (
        f"ranking {q:,} queries against {g:,} items of {d} numbers: {2e-12 * q * g * d / half:.2g} Tflop, "
        f"{path} path, at most {budget / 1e9:.2g} GB beside the vectors"
    )


# ------------------------------------------------------------------------------------------------------------- ties


def _order(
    query: Points, gallery: Points, i: Ints, row: Ints, col: Ints, key: Floats, slack: Floats
) -> tuple[Ints, Ints, Floats]:
    """Order items by row, nearest first, so that only true ties are left.

    i is the query of each item, col its row in the gallery. Returns the order, and in that order the run of keys too
    close to tell apart and the exact distance inside such runs (0 elsewhere). Ties share row, run and distance.
    """
    order = np.lexsort((-key, row))
    r, k = row[order], key[order]
    close = (r[1:] == r[:-1]) & (k[:-1] - k[1:] <= 2 * slack[r[1:]])
    run = np.concatenate([[0], np.cumsum(~close)]) if len(r) else np.zeros(0, dtype=np.int64)
    distance = np.zeros(len(r))
    doubt = np.zeros(len(r), dtype=bool)
    doubt[1:] |= close
    doubt[:-1] |= close
    where = np.nonzero(doubt)[0]
    if len(where):
        at = order[where]
        distance[where] = exact_distance(query, gallery, i[at], col[at])
        again = np.lexsort((distance, run))
        order, run, distance = order[again], run[again], distance[again]
    unsorted_run, unsorted_distance = np.empty_like(run), np.empty_like(distance)
    unsorted_run[order], unsorted_distance[order] = run, distance
    return order, unsorted_run, unsorted_distance


def thresholds(task: Task, queries: Ints, row: Ints, position: Ints, key: Floats, slack: Floats) -> Thresholds:
    """Gather relevant items (as listed by Task.relevant, with their keys) into tie groups, nearest first."""
    order, run, distance = _order(task.query, task.gallery, queries[row], row, task.order[position], key, slack)
    r, n, d = row[order], run[order], distance[order]
    new = np.ones(len(r), dtype=bool)
    new[1:] = (r[1:] != r[:-1]) | (n[1:] != n[:-1]) | (d[1:] != d[:-1])
    first = np.nonzero(new)[0]
    return Thresholds(
        counts=np.bincount(r[first], minlength=len(queries)),
        key=key[order][first],
        sample=position[order][first],
        relevant=np.diff(np.concatenate([first, [len(r)]])),
    )


# ------------------------------------------------------------------------------------------- any device, no compiler


def _count_torch(task: Task, budget: int, progress: Progress | None) -> Iterator[Part]:
    """Count block by block of queries with a float64 product, which leaves next to nothing to settle."""
    device = task.query.x.device
    order = torch.as_tensor(task.order, device=device)
    matrix = task.gallery.right(order, torch.float64)
    _, slack = task.query.slack(task.gallery)
    size = task.class_start[1:] - task.class_start[:-1]
    # Queries of equally large classes together: their thresholds fill a rectangle.
    queue = np.argsort(size[task.codes], kind="stable")
    step = max(1, min(1024, budget // (len(task.gallery) * 32)))
    for a in range(0, len(queue), step):
        queries = queue[a : a + step]
        at = torch.as_tensor(queries, device=device)
        keys = task.query.left(at) @ matrix.T
        yield _count_block(task, queries, keys, slack[at])
        if progress:
            progress(min(1.0, (a + step) / len(queue)))


def _count_block(task: Task, queries: Ints, keys: Tensor, slack: Tensor) -> Part:
    device = keys.device
    row, position = task.relevant(queries)
    at = (torch.as_tensor(row, device=device), torch.as_tensor(position, device=device))
    t = thresholds(task, queries, row, position, keys[at].cpu().numpy(), slack.cpu().numpy())
    # What must not be counted becomes infinitely far: the relevant items, the query itself, its group.
    keys[at] = -torch.inf
    if task.alone:
        keys.masked_fill_(torch.as_tensor(task.order[None, :] == queries[:, None], device=device), -torch.inf)
    if task.group is not None and task.order_group is not None:
        same = task.order_group[None, :] == task.group[queries][:, None]
        keys.masked_fill_(torch.as_tensor(same, device=device), -torch.inf)
    most = int(t.counts.max(initial=0))
    above = np.zeros(len(t.key), dtype=np.int64)
    tied = np.zeros(len(t.key), dtype=np.int64)
    if most:
        r = np.repeat(np.arange(len(queries)), t.counts)
        slot = np.arange(len(r)) - (np.cumsum(t.counts) - t.counts)[r]
        edges = torch.full((len(queries), most), torch.inf, dtype=torch.float64)
        edges[r, slot] = torch.as_tensor(t.key)
        edges = edges.to(device)
        surely, perhaps = _count_above(keys, edges, 2 * slack)
        above = surely[r, slot]
        doubt = np.nonzero(perhaps[r, slot] > above)[0]
        _settle(task, queries, keys, t, r, doubt, 2 * slack, above, tied)
    return Part(queries, t.counts, above=above + _before(t), relevant=t.relevant, size=t.relevant + tied)


def _count_above(keys: Tensor, edges: Tensor, margin: Tensor) -> tuple[Ints, Ints]:
    """[rows, slots] how many keys lie above each edge for certain, and how many may."""
    low, high = edges - margin[:, None], edges + margin[:, None]
    if edges.shape[1] <= _LOOP_UP_TO:
        surely = torch.stack([(keys > high[:, k, None]).sum(1) for k in range(edges.shape[1])], dim=1)
        perhaps = torch.stack([(keys >= low[:, k, None]).sum(1) for k in range(edges.shape[1])], dim=1)
    else:
        # Ascending edges: the number of edges a key passes, tallied, then summed from the top.
        surely = _tally(torch.searchsorted(high.flip(1).contiguous(), keys, right=False), edges.shape[1])
        perhaps = _tally(torch.searchsorted(low.flip(1).contiguous(), keys, right=True), edges.shape[1])
    return surely.cpu().numpy(), perhaps.cpu().numpy()


def _tally(passed: Tensor, slots: int) -> Tensor:
    counts = torch.zeros((len(passed), slots + 1), dtype=torch.int64, device=passed.device)
    counts.scatter_add_(1, passed, torch.ones((), dtype=torch.int64, device=passed.device).expand_as(passed))
    return counts[:, 1:].flip(1).cumsum(1)


def _settle(
    task: Task,
    queries: Ints,
    keys: Tensor,
    t: Thresholds,
    r: Ints,
    doubt: Ints,
    margin: Tensor,
    above: Ints,
    tied: Ints,
) -> None:
    """Decide by the exact distance every key too near to an edge; add to above and tied."""
    step = max(1, 10**7 // keys.shape[1])
    for a in range(0, len(doubt), step):
        edge = doubt[a : a + step]
        row = torch.as_tensor(r[edge], device=keys.device)
        gap = keys[row] - torch.as_tensor(t.key[edge], device=keys.device)[:, None]
        which, position = (gap.abs() <= margin[row, None]).nonzero().cpu().numpy().T
        edge = edge[which]
        i, j, sample = queries[r[edge]], task.order[position], task.order[t.sample[edge]]
        same = task.gallery.group[j] == task.gallery.group[sample]
        np.add.at(tied, edge[same], 1)
        edge, i, j, sample = edge[~same], i[~same], j[~same], sample[~same]
        if len(edge):
            ours = exact_distance(task.query, task.gallery, i, sample)
            theirs = exact_distance(task.query, task.gallery, i, j)
            np.add.at(above, edge[theirs < ours], 1)
            np.add.at(tied, edge[theirs == ours], 1)


def _before(t: Thresholds) -> Ints:
    """Relevant items in earlier groups of the same row: they stand above too."""
    ends = np.cumsum(t.relevant)
    first = np.cumsum(t.counts) - t.counts
    start = np.concatenate([[0], ends])[first]
    return np.asarray(ends - t.relevant - np.repeat(start, t.counts))


# ------------------------------------------------------------------------------------------------------- the result


def _assemble(task: Task, parts: list[Part]) -> Ranking:
    queries = np.concatenate([p.queries for p in parts])
    counts = np.zeros(len(queries), dtype=np.int64)
    counts[queries] = np.concatenate([p.counts for p in parts])
    start = np.concatenate([[0], np.cumsum(counts)])
    # Where each group of the parts goes: the start of its query plus its place among the query's groups.
    owner = np.repeat(queries, counts[queries])
    first = np.cumsum(counts[queries]) - counts[queries]
    to = start[owner] + np.arange(len(owner)) - np.repeat(first, counts[queries])
    fields: dict[str, Any] = {}
    for name in ("above", "relevant", "size"):
        fields[name] = np.empty(len(owner), dtype=np.int64)
        fields[name][to] = np.concatenate([getattr(p, name) for p in parts])
    items = np.full(len(task.query), len(task.gallery) - int(task.alone), dtype=np.int64)
    if task.group is not None and task.order_group is not None:
        most = int(max(task.group.max(), task.order_group.max())) + 1
        items = len(task.gallery) - np.bincount(task.order_group, minlength=most)[task.group]
    ranking = Ranking(
        start=start, items=items, codes=task.codes, classes=task.classes, similarity=task.similarity, **fields
    )
    return replace(ranking, notes=tuple(_notes(task, ranking)))


def _notes(task: Task, ranking: Ranking) -> Iterator[str]:
    lone = int((ranking.total == 0).sum())
    if lone:
        yield f"{lone:,} of {len(ranking):,} queries have no relevant item to find."
    group = task.gallery.group
    copies = len(group) - len(np.unique(group))
    if copies:
        yield f"{copies:,} of {len(group):,} gallery vectors are exact copies of another; they tie."
    tied = np.unique(ranking.query[ranking.size > ranking.relevant])
    if len(tied):
        yield f"{len(tied):,} of {len(ranking):,} queries have ties between relevant and other items."
    if copies and copies == len(group) - 1:
        yield "All vectors are the same: the model has collapsed, and the scores are what chance gives."
    if task.gallery.cosine:
        blank = int((task.gallery.shrink == 0).sum())
        if blank:
            yield f"{blank:,} gallery vectors are zero; their cosine with everything is taken as 0."
