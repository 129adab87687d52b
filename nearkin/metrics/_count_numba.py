"""The numba backend, fastest on a CPU: a float32 product in cache-sized tiles, counted by compiled loops.

When the query is the gallery a tile serves both sides: its rows as queries against its columns and, transposed, its
columns as queries against its rows. That halves the product. Each thread multiplies and counts its own tiles with
single-threaded calls; threads share only the totals, which are integers and do not depend on the order.

A float32 product cannot separate close similarities. Each threshold is therefore a band as wide as the error bound:
items above the band are counted, items inside it are compared by a float64 dot product and, if that is still too close,
by the exact distance (the arithmetic of nearkin.metrics._vectors.exact_distance, repeated operation by operation).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import numba
import numpy as np
import torch

from nearkin.metrics._problem import PartialRanking, Progress, RankingProblem, Thresholds, hits_before, thresholds
from nearkin.metrics._vectors import COSINE_GRID, Floats, GalleryMatrix, Ints, VectorSet

TILE = 512  # rows and columns of a tile: 1 MB, about the size of a core's own cache
_SPLITTER = 134217729.0
_F = TypeVar("_F", bound=Callable[..., Any])


def compiled(**options: Any) -> Callable[[_F], _F]:
    """numba.njit with an on-disk cache where possible (a read-only home directory allows none)."""

    def wrap(function: _F) -> _F:
        try:
            jitted: _F = numba.njit(nogil=True, cache=True, **options)(function)
        except RuntimeError:
            jitted = numba.njit(nogil=True, **options)(function)
        return jitted

    return wrap


# Allows sums in any order, so that they vectorise; the error bound covers every order.
FASTMATH = {"reassoc", "contract", "nsz"}


# ------------------------------------------------------------------------------------------------ the exact distance


@compiled(inline="always")
def _two_sum(a: float, b: float) -> tuple[float, float]:
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


@compiled(inline="always")
def _two_product(a: float, b: float) -> tuple[float, float]:
    p = a * b
    t = _SPLITTER * a
    a1 = t - (t - a)
    a2 = a - a1
    t = _SPLITTER * b
    b1 = t - (t - b)
    b2 = b - b1
    return p, a2 * b2 - (((p - a1 * b1) - a2 * b1) - a1 * b2)


@compiled()
def _sum_products(x: Any, px: float, y: Any, py: float) -> tuple[float, float]:
    total = low = 0.0
    for k in range(len(x)):
        p, e = _two_product(np.float64(x[k]) * px, np.float64(y[k]) * py)
        total, r = _two_sum(total, p)
        low = low + (e + r)
    return total, low


@compiled()
def _exact_cosine(xy: float, xy1: float, xx: float, xx1: float, yy: float, yy1: float) -> float:
    p, e = _two_product(xx, yy)
    e = e + (xx * yy1 + xx1 * yy)
    root = np.sqrt(p)
    f, g = _two_product(root, root)
    low = (((p - f) - g) + e) / (2.0 * root)
    q = xy / root
    f, g = _two_product(q, root)
    rest = (((xy - f) - g) + xy1 - q * low) / root
    d, e = _two_sum(1.0, -q)
    return float(np.rint((d + (e - rest)) * COSINE_GRID) / COSINE_GRID)


@compiled()
def _exact_square(x: Any, px: float, y: Any, py: float) -> float:
    s = c = 0.0
    for k in range(len(x)):
        d, e = _two_sum(np.float64(x[k]) * px, -(np.float64(y[k]) * py))
        p, q = _two_product(d, d)
        s, r = _two_sum(s, p)
        c = c + ((q + 2.0 * d * e) + r)
    return s + c


@compiled()
def _exact(cosine: bool, query: Any, i: int, gallery: Any, j: int) -> float:
    """The exact distance of row i of the query and row j of the gallery, both from _arrays."""
    x, scale, pow2, square = query[0], query[1], query[2], query[6]
    y, g_scale, g_pow2, g_square = gallery[0], gallery[1], gallery[2], gallery[6]
    if not cosine:
        return _exact_square(x[i], pow2[i], y[j], g_pow2[j])
    if scale[i] == 0.0 or g_scale[j] == 0.0:
        return 1.0
    # Squared norms are computed on first use.
    if square[i, 0] < 0.0:
        xx, xx1 = _sum_products(x[i], pow2[i], x[i], pow2[i])
        square[i, 1] = xx1
        square[i, 0] = xx
    if g_square[j, 0] < 0.0:
        yy, yy1 = _sum_products(y[j], g_pow2[j], y[j], g_pow2[j])
        g_square[j, 1] = yy1
        g_square[j, 0] = yy
    xy, xy1 = _sum_products(x[i], pow2[i], y[j], g_pow2[j])
    return _exact_cosine(xy, xy1, square[i, 0], square[i, 1], g_square[j, 0], g_square[j, 1])


# ---------------------------------------------------------------------------------------------------------- counting


@compiled(fastmath=FASTMATH)
def _key(x: Any, zx: float, y: Any, zy: float, centre: Any) -> float:
    total = 0.0
    for k in range(len(x)):
        total += (np.float64(x[k]) * zx - centre[k]) * (np.float64(y[k]) * zy - centre[k])
    return total


@compiled()
def _keys(query: Any, gallery: Any, scale: float, row: Any, item: Any) -> Any:
    """The float64 keys of pairs (row of the query, row of the gallery)."""
    x, row_scale, bias = query[0], query[1], query[3]
    y, g_row_scale, g_bias, centre = gallery[0], gallery[1], gallery[3], gallery[5]
    out = np.empty(len(row))
    for t in range(len(row)):
        i, j = row[t], item[t]
        out[t] = _key(x[i], row_scale[i], y[j], g_row_scale[j], centre) * scale * scale + bias[i] + g_bias[j]
    return out


@compiled()
def _count_in_band(values: Any, low: Any, high: Any) -> Any:
    """How many values exceed `high`, and how many are at least `low`."""
    # int32 at every step, or the loop runs four at a time instead of eight.
    over, near = np.int32(0), np.int32(0)
    for k in range(len(values)):
        over = np.int32(over + np.int32(values[k] > high))
        near = np.int32(near + np.int32(values[k] >= low))
    return over, near


@compiled()
def _count_tile(
    tile: Any, rows: Any, cols: Any, first: int, start: Any, band: Any, exact: Any, query: Any, gallery: Any, out: Any
) -> None:
    """Add the items of a tile to the counts of its rows.

    rows, cols: row in x of each tile row and column; first: index of the first tile row into `start`.
    band: (low, high) float32 per threshold; exact: (key, sample row, error bound per query, scale, cosine).
    query, gallery: from _arrays; out: (above, tied) per threshold.
    """
    low, high = band
    key, sample, error_bound, scale, cosine = exact
    x, row_scale, _, bias, _, centre, _ = query
    y, g_row_scale, _, g_bias, row_id, _, _ = gallery
    above, tied = out
    for r in range(tile.shape[0]):
        begin, end = start[first + r], start[first + r + 1]
        if begin == end:
            continue
        line = tile[r]
        # From the farthest relevant item to the nearest: once nothing exceeds one, nothing exceeds the rest.
        for t in range(end - 1, begin - 1, -1):
            over, near = _count_in_band(line, low[t], high[t])
            if near == 0:
                break
            above[t] += over
            if near == over:
                continue
            i, s, relevant_distance = rows[r], sample[t], -1.0
            for piece in range(0, len(line), 64):
                part = line[piece : piece + 64]
                over, near = _count_in_band(part, low[t], high[t])
                if near == over:
                    continue
                for c in range(len(part)):
                    if not low[t] <= part[c] <= high[t]:
                        continue
                    j = cols[piece + c]
                    if row_id[j] == row_id[s]:
                        tied[t] += 1
                        continue
                    gap = _key(x[i], row_scale[i], y[j], g_row_scale[j], centre) * scale * scale
                    gap += bias[i] + g_bias[j] - key[t]
                    if gap > 2.0 * error_bound[first + r]:
                        above[t] += 1
                    elif gap >= -2.0 * error_bound[first + r]:
                        if relevant_distance == -1.0:
                            relevant_distance = _exact(cosine, query, i, gallery, s)
                        other_distance = _exact(cosine, query, i, gallery, j)
                        above[t] += other_distance < relevant_distance
                        tied[t] += other_distance == relevant_distance


@compiled()
def _mask_class(tile: Any, begin: Any, end: Any, first: int, column: int) -> None:
    """Exclude the query's own class: its relevant items and itself."""
    for r in range(tile.shape[0]):
        a, b = max(begin[first + r] - column, 0), min(end[first + r] - column, tile.shape[1])
        for c in range(a, b):
            tile[r, c] = -np.inf


@compiled()
def _mask_group(tile: Any, code: Any, first: int, column: int, group_start: Any, member: Any) -> None:
    """Exclude the items of the query's group; `member` lists the positions of each group, ascending."""
    for r in range(tile.shape[0]):
        begin, end = group_start[code[first + r]], group_start[code[first + r] + 1]
        for m in range(begin + np.searchsorted(member[begin:end], column), end):
            if member[m] >= column + tile.shape[1]:
                break
            tile[r, member[m] - column] = -np.inf


@compiled()
def _transpose(tile: Any, out: Any) -> None:
    """out = tile.T, in patches that stay in the nearest cache."""
    n, m = tile.shape
    for a in range(0, n, 16):
        for b in range(0, m, 16):
            for c in range(b, min(b + 16, m)):
                for r in range(a, min(a + 16, n)):
                    out[c, r] = tile[r, c]


# --------------------------------------------------------------------------------------------------- tiles and threads


def count_numba(problem: RankingProblem, budget: int, progress: Progress | None) -> Iterator[PartialRanking]:
    """Count the items above every relevant item, for all queries at once."""
    queries = problem.order if problem.single_set else np.argsort(problem.codes, kind="stable")
    bound32, bound64 = (bound.cpu().numpy()[queries] for bound in problem.query.error_bounds(problem.gallery))
    row, position = problem.relevant_pairs(queries)
    scale = problem.query.scale
    key = _keys(_arrays(problem.query), _arrays(problem.gallery), scale, queries[row], problem.order[position])
    t = thresholds(problem, queries, row, position, key, bound64)
    gallery = GalleryMatrix(problem.gallery, problem.order, torch.float32, budget // 2)
    scheduler = _TileScheduler(len(queries), len(problem.order), problem.single_set, progress)
    counter = _TileCounter(problem, queries, gallery, t, bound32, bound64)
    # Each thread has counts of its own; with very many threads and thresholds they must share the budget.
    threads = max(1, min(torch.get_num_threads(), budget // 4 // (8 * len(t.key) + 1)))
    above, tied = scheduler.run(lambda: counter.count(scheduler), threads).astype(np.int64)
    yield PartialRanking(queries, t.counts, above=above + hits_before(t), relevant=t.relevant, size=t.relevant + tied)


def _arrays(vectors: VectorSet) -> tuple[Any, ...]:
    """(x, row_scale, pow2, bias, row_id, centre, squared norms) for compiled loops. A negative square is unknown."""
    tensors = (vectors.x, vectors.row_scale, vectors.pow2, vectors.bias)
    return (*(v.numpy() for v in tensors), vectors.row_id, vectors.centre.numpy(), np.full((len(vectors), 2), -1.0))


class _TileCounter:
    """Counts tiles against the thresholds; `count` is the work of one thread."""

    def __init__(
        self,
        problem: RankingProblem,
        queries: Ints,
        gallery: GalleryMatrix,
        t: Thresholds,
        bound32: Floats,
        bound64: Floats,
    ) -> None:
        self._problem, self._queries, self._gallery = problem, queries, gallery
        owner = np.repeat(np.arange(len(queries)), t.counts)
        self._start = np.concatenate([[0], np.cumsum(t.counts)])
        self._band = (
            np.nextafter((t.key - bound32[owner] - bound64[owner]).astype(np.float32), np.float32(-np.inf)),
            np.nextafter((t.key + bound32[owner] + bound64[owner]).astype(np.float32), np.float32(np.inf)),
        )
        self._exact = (t.key, problem.order[t.sample], bound64, problem.query.scale, problem.query.cosine)
        code = problem.codes[queries]
        self._class_range = problem.class_start[code], problem.class_start[code + 1]
        self._groups = _group_members(problem, queries)

    def count(self, scheduler: _TileScheduler) -> Any:
        """Take rows of tiles until none are left; return (above, tied) per threshold."""
        torch.set_num_threads(1)
        problem, queries, order = self._problem, self._queries, self._problem.order
        # Squared norms of its own too: two threads must not fill the same entry.
        gallery = _arrays(problem.gallery)
        query = gallery if problem.single_set else _arrays(problem.query)
        buffer, transposed = torch.empty(TILE * TILE), np.empty(TILE * TILE, dtype=np.float32)
        out = np.zeros((2, len(self._exact[0])), dtype=np.int32)
        shared = self._start, self._band, self._exact, query, gallery, (out[0], out[1])
        for a in scheduler.rows():
            b = min(a + TILE, len(queries))
            left = self._query_block(a, b)
            for c in range(a if problem.single_set else 0, len(order), TILE):
                d = min(c + TILE, len(order))
                product = buffer[: (b - a) * (d - c)].view(b - a, d - c)
                torch.mm(left, self._gallery.block(c, d).T, out=product)
                tile = product.numpy()
                self._mask(tile, a, c)
                rows, cols = queries[a:b], order[c:d]
                _count_tile(tile, rows, cols, a, *shared)
                if problem.single_set and c > a:
                    mirrored = transposed[: (b - a) * (d - c)].reshape(d - c, b - a)
                    _transpose(tile, mirrored)
                    _count_tile(mirrored, cols, rows, c, *shared)
                scheduler.finish((b - a) * (d - c))
        return out

    def _query_block(self, a: int, b: int) -> torch.Tensor:
        if self._problem.single_set:
            left = self._gallery.block(a, b).clone()
            left[:, -2:] = left[:, -2:].flip(1)
            return left
        return self._problem.query.query_matrix(torch.as_tensor(self._queries[a:b])).float()

    def _mask(self, tile: Any, a: int, c: int) -> None:
        _mask_class(tile, *self._class_range, a, c)
        if self._groups is not None:
            code, start, member = self._groups
            _mask_group(tile, code, a, c, start, member)


def _group_members(problem: RankingProblem, queries: Ints) -> tuple[Ints, Ints, Ints] | None:
    """(group per query, start of each group, positions by group), or None without groups."""
    if problem.query_group is None or problem.position_group is None:
        return None
    count = int(max(problem.query_group.max(), problem.position_group.max())) + 1
    start = np.concatenate([[0], np.cumsum(np.bincount(problem.position_group, minlength=count))])
    return problem.query_group[queries], start, np.argsort(problem.position_group, kind="stable")


class _TileScheduler:
    """Hands rows of tiles to threads, sums their results, and stops all threads when one fails."""

    def __init__(self, rows: int, cols: int, half: bool, progress: Progress | None) -> None:
        self._next = iter(range(0, rows, TILE))
        self._lock = threading.Lock()
        self._remaining = rows * (rows + TILE) // 2 if half else rows * cols
        self._total = self._remaining
        self._stop = False
        self._progress = progress

    def rows(self) -> Iterator[int]:
        while not self._stop:
            with self._lock:
                a = next(self._next, None)
            if a is None:
                return
            yield a

    def finish(self, cells: int) -> None:
        with self._lock:
            self._remaining -= cells

    def run(self, work: Callable[[], Any], threads: int) -> Any:
        """Run `work` in every thread and return the sum of the results."""
        torch_threads = torch.get_num_threads()
        precision = torch.get_float32_matmul_precision()
        # Anything below full float32 would break the error bound.
        torch.set_float32_matmul_precision("highest")
        try:
            with ThreadPoolExecutor(threads) as pool:
                pending = {pool.submit(work) for _ in range(threads)}
                try:
                    futures = set(pending)
                    while pending:
                        finished, pending = wait(pending, timeout=0.5)
                        if self._progress:
                            self._progress(min(1.0, 1 - max(0, self._remaining) / self._total))
                        if any(f.exception() for f in finished):
                            break
                finally:
                    self._stop = True
            total = sum(f.result() for f in futures)
            if self._progress:
                self._progress(1.0)
            return total
        finally:
            torch.set_num_threads(torch_threads)
            torch.set_float32_matmul_precision(precision)
