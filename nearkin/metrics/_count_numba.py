"""The numba backend, fastest on a CPU: a float32 product in cache-sized tiles, counted by compiled loops."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import numba
import numpy as np
import torch
from numba.extending import register_jitable

from nearkin.metrics import _vectors
from nearkin.metrics._problem import PartialRanking, Progress, RankingProblem, Thresholds, thresholds
from nearkin.metrics._vectors import Floats, GalleryMatrix, Ints, VectorSet, cosine_distance, sum_products, sum_squares

# A float32 product cannot separate close similarities. Each threshold is therefore a band as wide as the error bound:
# items above the band are counted, items inside it are compared by a float64 dot product and, if that is still too
# close, by the exact distance.
TILE = 512  # rows and columns of a tile: 1 MB, about the size of a core's own cache
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


# The exact distance is the same code as in the torch backend, so the results are the same to the last bit.
for _name in ("two_sum", "two_product"):
    register_jitable(inline="always")(getattr(_vectors, _name))
for _name in ("sum_products", "sum_squares", "cosine_distance"):
    register_jitable(getattr(_vectors, _name))


@compiled()
def _exact(cosine: bool, query: Any, i: int, gallery: Any, j: int) -> Any:
    """The exact distance of row i of the query and row j of the gallery, both from _arrays."""
    x, y = query[0][i] * query[2][i], gallery[0][j] * gallery[2][j]
    if not cosine:
        return sum_squares(x, y)
    if query[1][i] == 0.0 or gallery[1][j] == 0.0:
        return 1.0
    # Squared norms are computed on first use.
    square, g_square = query[6][i], gallery[6][j]
    if square[0] < 0.0:
        square[0], square[1] = sum_products(x, x)
    if g_square[0] < 0.0:
        g_square[0], g_square[1] = sum_products(y, y)
    return cosine_distance(sum_products(x, y), (square[0], square[1]), (g_square[0], g_square[1]))


# fastmath allows sums in any order, so that they vectorise; the error bound covers every order.
@compiled(fastmath={"reassoc", "contract", "nsz"})
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
def _mask_group(tile: Any, code: Any, group_start: Any, member: Any, first: int, column: int) -> None:
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


def count_numba(problem: RankingProblem, budget: int, progress: Progress | None) -> Iterator[PartialRanking]:
    """Count the items above every relevant item, for all queries at once."""
    queries = problem.order if problem.single_set else np.argsort(problem.codes, kind="stable")
    bound32, bound64 = (bound.cpu().numpy()[queries] for bound in problem.query.error_bounds(problem.gallery))
    row, position = problem.relevant_pairs(queries)
    scale = problem.query.scale
    key = _keys(_arrays(problem.query), _arrays(problem.gallery), scale, queries[row], problem.order[position])
    t = thresholds(problem, queries, row, position, key, bound64)
    gallery = GalleryMatrix(problem.gallery, problem.order, torch.float32, budget // 2)
    counter = _TileCounter(problem, queries, gallery, t, bound32, bound64)
    # Each thread has counts of its own; with very many threads and thresholds they must share the budget.
    threads = max(1, min(torch.get_num_threads(), budget // 4 // (8 * len(t.key) + 1)))
    above, tied = counter.run(threads, progress).astype(np.int64)
    yield t.result(queries, above, tied)


def _arrays(vectors: VectorSet) -> tuple[Any, ...]:
    """(x, row_scale, pow2, bias, row_id, centre, squared norms) for compiled loops. A negative square is unknown."""
    tensors = (vectors.x, vectors.row_scale, vectors.pow2, vectors.bias)
    return (*(v.numpy() for v in tensors), vectors.row_id, vectors.centre.numpy(), np.full((len(vectors), 2), -1.0))


class _TileCounter:
    """Counts tiles against the thresholds. Threads share only the totals, integers that do not depend on the order."""

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
        rows = len(queries)
        self._next = iter(range(0, rows, TILE))
        self._total = rows * (rows + TILE) // 2 if problem.single_set else rows * len(problem.order)
        self._remaining = self._total
        self._lock = threading.Lock()
        self._stop = False

    def run(self, threads: int, progress: Progress | None) -> Any:
        """Count in several threads and return (above, tied) per threshold; one that fails stops all."""
        torch_threads = torch.get_num_threads()
        precision = torch.get_float32_matmul_precision()
        # Anything below full float32 would break the error bound.
        torch.set_float32_matmul_precision("highest")
        try:
            with ThreadPoolExecutor(threads) as pool:
                futures = {pool.submit(self._count) for _ in range(threads)}
                pending = futures
                try:
                    while pending:
                        finished, pending = wait(pending, timeout=0.5)
                        if progress:
                            progress(min(1.0, 1 - max(0, self._remaining) / self._total))
                        if any(f.exception() for f in finished):
                            break
                finally:
                    self._stop = True
            total = sum(f.result() for f in futures)
            if progress:
                progress(1.0)
            return total
        finally:
            torch.set_num_threads(torch_threads)
            torch.set_float32_matmul_precision(precision)

    def _tile_rows(self) -> Iterator[int]:
        while not self._stop:
            with self._lock:
                a = next(self._next, None)
            if a is None:
                return
            yield a

    def _count(self) -> Any:
        """Take rows of tiles until none are left: the work of one thread."""
        torch.set_num_threads(1)
        problem, queries, order = self._problem, self._queries, self._problem.order
        # Squared norms of its own too: two threads must not fill the same entry.
        gallery = _arrays(problem.gallery)
        query = gallery if problem.single_set else _arrays(problem.query)
        buffer, transposed = torch.empty(TILE * TILE), np.empty(TILE * TILE, dtype=np.float32)
        out = np.zeros((2, len(self._exact[0])), dtype=np.int32)
        shared = self._start, self._band, self._exact, query, gallery, (out[0], out[1])
        for a in self._tile_rows():
            b = min(a + TILE, len(queries))
            left = self._query_block(a, b)
            for c in range(a if problem.single_set else 0, len(order), TILE):
                d = min(c + TILE, len(order))
                product = buffer[: (b - a) * (d - c)].view(b - a, d - c)
                torch.mm(left, self._gallery.block(c, d).T, out=product)
                tile = product.numpy()
                _mask_class(tile, *self._class_range, a, c)
                if self._groups is not None:
                    _mask_group(tile, *self._groups, a, c)
                rows, cols = queries[a:b], order[c:d]
                _count_tile(tile, rows, cols, a, *shared)
                # A single set needs half the product: transposed, the columns are queries against the rows.
                if problem.single_set and c > a:
                    mirrored = transposed[: (b - a) * (d - c)].reshape(d - c, b - a)
                    _transpose(tile, mirrored)
                    _count_tile(mirrored, cols, rows, c, *shared)
                with self._lock:
                    self._remaining -= (b - a) * (d - c)
        return out

    def _query_block(self, a: int, b: int) -> torch.Tensor:
        if self._problem.single_set:
            left = self._gallery.block(a, b).clone()
            left[:, -2:] = left[:, -2:].flip(1)
            return left
        return self._problem.query.query_matrix(torch.as_tensor(self._queries[a:b])).float()


def _group_members(problem: RankingProblem, queries: Ints) -> tuple[Ints, Ints, Ints] | None:
    """(group per query, start of each group, positions by group), or None without groups."""
    if problem.groups is None:
        return None
    query_group, position_group = problem.groups
    size = np.bincount(position_group, minlength=int(query_group.max()) + 1)
    start = np.concatenate([[0], np.cumsum(size)])
    return query_group[queries], start, np.argsort(position_group, kind="stable")
