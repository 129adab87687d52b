"""The torch backend, for any device and without a compiler: one block of queries at a time.

The product is float64, or float32 on GPUs, most of which are slow in float64. What is closer to a relevant item than
the error bound is compared again.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from nearkin.metrics._codes import Codes
from nearkin.metrics._problem import PartialRanking, Progress, RankingProblem, Thresholds, thresholds
from nearkin.metrics._vectors import Floats, GalleryMatrix, Ints, comparable_distance, exact_distance, pair_keys
from nearkin.ops.geometry import full_precision

_MAX_LOOP = 16  # relevant items per query up to which comparing with each in turn beats sorting the row
_FLOAT32_DEVICES = ("cuda",)  # here "highest" means full float32; on XLA it may not


def count_torch(problem: RankingProblem, budget: int, progress: Progress | None) -> Iterator[PartialRanking]:
    """Count the items above every relevant item, one block of queries at a time."""
    device = problem.query.x.device
    bound32, bound64 = problem.query.error_bounds(problem.gallery)
    # The similarities of integer codes follow from float64 keys.
    dtype = torch.float32 if device.type in _FLOAT32_DEVICES and problem.query.codes is None else torch.float64
    # How far a key of the product and a float64 key may differ.
    margin = (bound64 + (bound32 if dtype == torch.float32 else bound64)).cpu().numpy()
    error_bound = bound64.cpu().numpy()
    gallery = GalleryMatrix(problem.gallery, problem.order, dtype, budget // 2)
    # Queries with equally many relevant items go together: their thresholds then fill a rectangle.
    queue = np.argsort(problem.class_relevant[problem.codes], kind="stable")
    # Bytes per cell: the key, a sorted copy, and temporaries of the comparison.
    step = max(1, min(1024, budget // 2 // (len(problem.gallery) * 32)))
    for a in range(0, len(queue), step):
        queries = queue[a : a + step]
        left = problem.query.query_matrix(torch.as_tensor(queries, device=device)).to(dtype)
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")  # anything below full float32 would break the error bound
        try:
            with full_precision(left):
                keys = gallery.keys(left)
        finally:
            torch.set_float32_matmul_precision(precision)
        yield _count_block(problem, queries, keys, margin[queries], error_bound[queries])
        if progress:
            progress(min(1.0, (a + step) / len(queue)))


def _count_block(
    problem: RankingProblem, queries: Ints, keys: Tensor, margin: Floats, error_bound: Floats
) -> PartialRanking:
    device = keys.device
    row, position = problem.relevant_pairs(queries)
    cells = (torch.as_tensor(row, device=device), torch.as_tensor(position, device=device))
    if keys.dtype == torch.float64:
        relevant_keys = keys[cells].cpu().numpy()
    else:
        relevant_keys = pair_keys(problem.query, problem.gallery, queries[row], problem.order[position])
    t = thresholds(problem, queries, row, position, relevant_keys, error_bound)
    if len(t.key) == 0:
        return t.result(queries, t.relevant, t.relevant)
    # Items that must not be counted (the relevant ones, the query itself, its group) become infinitely far.
    keys[cells] = -torch.inf
    if problem.single_set:
        keys.masked_fill_(torch.as_tensor(problem.order[None, :] == queries[:, None], device=device), -torch.inf)
    if problem.groups is not None:
        same = problem.groups[1][None, :] == problem.groups[0][queries][:, None]
        keys.masked_fill_(torch.as_tensor(same, device=device), -torch.inf)
    return t.result(queries, *_Block(problem, queries, keys, t, margin, error_bound).count())


class _Block:
    """Keys [rows, items] of some queries, to be counted against their thresholds."""

    def __init__(
        self, problem: RankingProblem, queries: Ints, keys: Tensor, t: Thresholds, margin: Floats, error_bound: Floats
    ) -> None:
        self._problem, self._queries, self._keys, self._t = problem, queries, keys, t
        self._row = np.repeat(np.arange(len(queries)), t.counts)  # of each threshold
        self._first = np.cumsum(t.counts) - t.counts  # threshold of each row
        self._cell = self._row, np.arange(len(self._row)) - self._first[self._row]
        dtype = np.float32 if keys.dtype == torch.float32 else np.float64
        self._low = np.nextafter((t.key - margin[self._row]).astype(dtype), dtype(-np.inf))
        self._high = np.nextafter((t.key + margin[self._row]).astype(dtype), dtype(np.inf))
        self._error_bound = error_bound[self._row]

    def count(self) -> tuple[Ints, Ints]:
        """Return how many items are above each threshold, and how many tie with it."""
        q, g = self._problem.query.codes, self._problem.gallery.codes
        if q is not None and g is not None:
            return self._count_codes(q, g)
        return self._place() if self._keys.dtype == torch.float32 else self._count_and_compare()

    def _pad(self, values: Floats) -> Tensor:
        """Arrange values per threshold as [rows, slots], nearest first and padded at the end."""
        out = np.full((len(self._t.counts), int(self._t.counts.max())), -np.inf, dtype=values.dtype)
        out[self._cell] = values
        return torch.as_tensor(out, device=self._keys.device)

    def _count_codes(self, q: Codes, g: Codes) -> tuple[Ints, Ints]:
        """Count integer codes: their exact similarities follow from the keys, so that equal ones are ties."""
        problem = self._problem
        root, g_root, weight = (
            torch.as_tensor(v, device=self._keys.device)
            for v in (q.root[self._queries], g.root[problem.order], g.weight[problem.order])
        )
        a = ((self._keys + q.offset) * root[:, None] * g_root).round_()
        i, s = self._queries[self._row], problem.order[self._t.sample]
        threshold = self._pad(-comparable_distance(problem.query, problem.gallery, i, s, self._t.key))
        certain, possible = _count_above(a * a.abs() / weight, threshold, threshold)
        return certain[self._cell], (possible - certain)[self._cell]

    def _count_and_compare(self) -> tuple[Ints, Ints]:
        """Count the keys above each threshold, then compare those within its band: in float64 they are few."""
        device, items = self._keys.device, self._keys.shape[1]
        certain, possible = _count_above(self._keys, self._pad(self._low), self._pad(self._high))
        above, tied = certain[self._cell], np.zeros(len(self._row), dtype=np.int64)
        ambiguous = np.flatnonzero(possible[self._cell] > above)
        row_id = torch.as_tensor(self._problem.gallery.row_id[self._problem.order], device=device)
        for group in np.split(ambiguous, range(max(1, 10**7 // items), len(ambiguous), max(1, 10**7 // items))):
            row, sample, low, high = (
                torch.as_tensor(v[group], device=device) for v in (self._row, self._t.sample, self._low, self._high)
            )
            near = (self._keys[row] >= low[:, None]) & (self._keys[row] <= high[:, None])
            same = near & (row_id == row_id[sample, None])
            tied[group] += same.sum(1).cpu().numpy()
            which, position = (near & ~same).nonzero().cpu().numpy().T
            self._compare(group[which], position, above, tied)
        return above, tied

    def _place(self) -> tuple[Ints, Ints]:
        """Find the place of every key among the thresholds, then compare those within a band.

        Nothing is sorted but the thresholds: on a GPU this costs little more than reading the keys.
        """
        low, high = self._pad(self._low), self._pad(self._high)
        slots = low.shape[1]
        edges, order = torch.cat([low, high], dim=1).sort(dim=1)
        below = torch.searchsorted(edges, self._keys)
        lows = torch.nn.functional.pad((order < slots).cumsum(1), (1, 0)).gather(1, below)
        # A key is above the thresholds from `end` on, and within the bands of those from `begin` to `end`.
        begin, end = slots - lows, slots - below + lows
        counts = torch.zeros((len(low), slots + 1), dtype=torch.int64, device=low.device)
        counts.scatter_add_(1, end, torch.ones_like(end))
        above, tied = counts.cumsum(1).cpu().numpy()[self._cell], np.zeros(len(self._row), dtype=np.int64)
        near = (begin < end).nonzero().T
        row, position = near.cpu().numpy()
        a, b = begin[tuple(near)].cpu().numpy(), end[tuple(near)].cpu().numpy()
        pair = np.repeat(np.arange(len(row)), b - a)
        group = (self._first[row] + b - np.cumsum(b - a))[pair] + np.arange(len(pair))
        self._compare(group, position[pair], above, tied)
        return above, tied

    def _compare(self, group: Ints, position: Ints, above: Ints, tied: Ints) -> None:
        """Compare items with thresholds by float64 key, then by exact distance; add to `above` and `tied`."""
        problem = self._problem
        j, s = problem.order[position], problem.order[self._t.sample[group]]
        same = problem.gallery.row_id[j] == problem.gallery.row_id[s]
        tied += np.bincount(group[same], minlength=len(tied))
        group, j, s = group[~same], j[~same], s[~same]
        i = self._queries[self._row[group]]
        gap = pair_keys(problem.query, problem.gallery, i, j) - self._t.key[group]
        close = np.abs(gap) <= 2 * self._error_bound[group]
        if close.any():
            gap[close] = exact_distance(problem.query, problem.gallery, i[close], s[close])
            gap[close] -= exact_distance(problem.query, problem.gallery, i[close], j[close])
        above += np.bincount(group[gap > 0.0], minlength=len(above))
        tied += np.bincount(group[gap == 0.0], minlength=len(tied))


def _count_above(keys: Tensor, low: Tensor, high: Tensor) -> tuple[Ints, Ints]:
    """[rows, slots] how many keys exceed `high`, and how many are at least `low`."""
    if low.shape[1] <= _MAX_LOOP:
        certain = torch.stack([(keys > high[:, k, None]).sum(1) for k in range(low.shape[1])], dim=1)
        possible = torch.stack([(keys >= low[:, k, None]).sum(1) for k in range(low.shape[1])], dim=1)
    else:
        # On a CPU NumPy sorts several times faster than torch.
        on_cpu = keys.device.type == "cpu"
        ascending = torch.from_numpy(np.sort(keys.numpy(), axis=1)) if on_cpu else keys.sort(dim=1).values
        certain = keys.shape[1] - torch.searchsorted(ascending, high, right=True)
        possible = keys.shape[1] - torch.searchsorted(ascending, low, right=False)
    return certain.cpu().numpy(), possible.cpu().numpy()
