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
from nearkin.metrics._vectors import (
    Floats,
    GalleryMatrix,
    Ints,
    VectorSet,
    code_products,
    comparable_distance,
    cosine_distance,
    sum_products,
    sum_squares,
)

# A float32 product cannot separate close similarities. Each threshold is therefore a band as wide as the error bound:
# items above the band are counted, items inside it are compared by a float64 dot product and, if that is still too
# close, by the exact distance.
TILE = 512  # rows and columns of a tile: 1 MB, about the size of a core's own cache
_MAX_COMPARED = 8  # relevant items per query up to which comparing with each in turn is fastest
_MAX_FLOAT32 = 128  # with more relevant items per query, too many others lie within a float32 error of one of them
_BUCKETS = 8  # per threshold, in the table that finds the place of a value among the thresholds
_BYTES_PER_PAIR = 250  # memory for each pair of a query and a relevant item
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
def _keys(query: Any, gallery: Any, scale: float, row: Any, item: Any, out: Any) -> None:
    """The float64 keys of pairs (row of the query, row of the gallery)."""
    x, row_scale, bias = query[0], query[1], query[3]
    y, g_row_scale, g_bias, centre = gallery[0], gallery[1], gallery[3], gallery[5]
    for t in range(len(row)):
        i, j = row[t], item[t]
        out[t] = _key(x[i], row_scale[i], y[j], g_row_scale[j], centre) * scale * scale + bias[i] + g_bias[j]


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
def _bucket(value: Any, origin: Any, factor: Any, last: Any) -> Any:
    """The bucket of a value: 0 to `last`, ascending with the value."""
    scaled = (value - origin) * factor
    scaled = scaled if scaled > last - last else last - last
    return np.int32(scaled if scaled < last else last)


@compiled()
def _make_table(start: Any, low: Any, high: Any, grid: Any, table: Any) -> None:
    """Count for each bucket of a query's range of thresholds how many of them are above it.

    The number n is stored as -1 - n where the bucket overlaps the band of a threshold.
    """
    for q in range(len(start) - 1):
        begin, end = start[q], start[q + 1]
        part = table[_BUCKETS * begin + q : _BUCKETS * end + q + 1]
        origin, factor, last = grid[q]
        for t in range(begin, end):
            part[_bucket(low[t], origin, factor, last)] += 1
        above = 0
        for k in range(len(part) - 1, -1, -1):
            part[k], above = above, above + part[k]
        marked = len(part)
        for t in range(begin, end):
            first = _bucket(low[t], origin, factor, last)
            for k in range(first, min(_bucket(high[t], origin, factor, last) + 1, marked)):
                part[k] = -1 - part[k]
            marked = min(marked, first)


@compiled()
def _count_tile(tile: Any, ids: Any, row: int, first: int, thresholds: Any, above: Any, tied: Any, near: Any) -> Any:
    """Add the items of a tile to the counts of its rows, from `row` on.

    Query first + r is row r of the tile; ids: row_id of its columns. above: items between each threshold and the one
    before it, and for each query those below all. Of the items within the band of a threshold, copies of it tie, and
    so do all if the values are exact. near: receives (row, column, a, b) of the others, within the bands of thresholds
    a to b and counted as if below those. Returns the number of them and, if `near` is full, the row to continue from.
    """
    start, low, high, grid, table, sample_id, is_exact = thresholds
    width, found = tile.shape[1], 0
    buckets = np.empty(width, dtype=np.int32)
    for r in range(row, tile.shape[0]):
        q, line = first + r, tile[r]
        begin, end = start[q], start[q + 1]
        if found + _MAX_COMPARED * width > len(near):
            return found, r
        if end - begin <= _MAX_COMPARED:
            # From the farthest relevant item to the nearest: once nothing exceeds one, nothing exceeds the rest.
            for t in range(end - 1, begin - 1, -1):
                over, possible = _count_in_band(line, low[t], high[t])
                if possible == 0:
                    break
                above[t + q] += over
                above[t + q + 1] -= over
                if is_exact:
                    tied[t] += possible - over
                    continue
                for piece in range(0, width if possible > over else 0, 64):
                    part = line[piece : piece + 64]
                    over, possible = _count_in_band(part, low[t], high[t])
                    for c in range(len(part) if possible > over else 0):
                        if not low[t] <= part[c] <= high[t]:
                            continue
                        if ids[piece + c] == sample_id[t]:
                            tied[t] += 1
                        else:
                            near[found] = r, piece + c, t, t + 1
                            found += 1
            continue
        places = table[_BUCKETS * begin + q : _BUCKETS * end + q + 1]
        origin, factor, last = grid[q]
        for c in range(width):
            buckets[c] = _bucket(line[c], origin, factor, last)
        for c in range(width):
            k = buckets[c]
            t = places[k]
            if t < 0:
                # The first threshold whose band is not above the value: between this bucket's and the next lower one's.
                t, b = -1 - t, end - begin if k == 0 else max(places[k - 1], -1 - places[k - 1])
                if t + 1 == b:  # the usual case, without a branch to mispredict
                    t += line[c] < low[begin + t]
                while t < b:
                    middle = (t + b) // 2
                    if low[begin + middle] <= line[c]:
                        b = middle
                    else:
                        t = middle + 1
                while begin + b < end and line[c] <= high[begin + b]:
                    b += 1
                if t + 1 == b and (is_exact or ids[c] == sample_id[begin + t]):
                    tied[begin + t] += 1
                elif t < b:
                    near[found] = r, c, begin + t, begin + b
                    found += 1
                t = b
            above[begin + q + t] += 1
    return found, tile.shape[0]


@compiled()
def _resolve(
    near: Any, rows: Any, cols: Any, first: int, bound: Any, exact: Any, query: Any, gallery: Any, out: Any
) -> None:
    """Find the place of items among the thresholds whose bands contain them, and correct the counts.

    rows, cols: row in x of each tile row and column; bound: error bound of a float64 key per query.
    exact: (key and sample row per threshold, scale, cosine); query, gallery: from _arrays.
    out: (above, tied, exact distance) per threshold; negative if unknown.
    """
    key, sample, scale, cosine = exact
    x, row_scale, _, bias, _, _, _ = query
    y, g_row_scale, _, g_bias, row_id, centre, _ = gallery
    above, tied, distance = out
    for n in range(len(near)):
        r, c, a, b = near[n]
        i, j, q, last = rows[r], cols[c], first + r, b
        value, other = np.nan, -1.0
        while a < b:
            t = (a + b) // 2
            s = sample[t]
            if row_id[j] == row_id[s]:
                gap = 0.0
            else:
                if np.isnan(value):
                    value = _key(x[i], row_scale[i], y[j], g_row_scale[j], centre) * scale * scale + bias[i] + g_bias[j]
                gap = value - key[t]
                if abs(gap) <= 2.0 * bound[q]:
                    if distance[t] < 0.0:
                        distance[t] = _exact(cosine, query, i, gallery, s)
                    if other < 0.0:
                        other = _exact(cosine, query, i, gallery, j)
                    gap = distance[t] - other
            if gap > 0.0:
                b = t
            else:
                a = t + 1
                if gap == 0.0:
                    tied[t] += 1
                    b = a
        above[a + q] += 1
        above[last + q] -= 1


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
    """Count the items above every relevant item, for all queries at once or, with huge classes, some at a time."""
    queries = problem.order if problem.single_set else np.argsort(problem.codes, kind="stable")
    pairs = np.cumsum(np.diff(problem.class_start)[problem.codes[queries]])
    block = pairs // (budget // _BYTES_PER_PAIR + 1)
    bound32, bound64 = problem.query.error_bounds(problem.gallery)
    large = problem.query.codes is not None or pairs[-1] > _MAX_FLOAT32 * len(queries)
    dtype = torch.float64 if large else torch.float32
    gallery = GalleryMatrix(problem.gallery, problem.order, dtype, budget // 2)
    bounds = (bound64 + bound32 if dtype == torch.float32 else 2 * bound64).numpy(), bound64.numpy()
    done = 0

    def report(fraction: float) -> None:
        if progress:
            progress((done + fraction * len(part)) / len(queries))

    for part in np.split(queries, np.flatnonzero(np.diff(block)) + 1):
        symmetric = problem.single_set and len(part) == len(queries)
        row, position = problem.relevant_pairs(part)
        key = _relevant_keys(problem, part, row, position, gallery)
        t = thresholds(problem, part, row, position, key, bounds[1][part])
        counter = _TileCounter(problem, part, gallery, t, bounds, symmetric)
        # Each thread has counts of its own; with very many threads and thresholds they must share the budget.
        threads = max(1, min(torch.get_num_threads(), budget // 4 // (16 * len(t.key) + 1)))
        yield t.result(part, *counter.run(threads, report))
        done += len(part)


def _relevant_keys(problem: RankingProblem, queries: Ints, row: Ints, position: Ints, gallery: GalleryMatrix) -> Floats:
    """The float64 keys of the relevant items."""
    out = np.empty(len(row))
    if gallery.dtype == torch.float32:
        arrays = _arrays(problem.query), _arrays(problem.gallery), problem.query.scale
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            parts = np.array_split(np.arange(len(row)), torch.get_num_threads())
            ranges = [slice(part[0], part[-1] + 1) for part in parts if len(part)]
            list(pool.map(lambda p: _keys(*arrays, queries[row[p]], problem.order[position[p]], out[p]), ranges))
        return out
    # Large classes, or codes: products of some queries with all items of their classes.
    code = problem.codes[queries]
    for a in range(0, len(queries), 64):
        b = min(a + 64, len(queries))
        first, last = problem.class_start[code[a]], problem.class_start[code[b - 1] + 1]
        keys = problem.query.query_matrix(torch.as_tensor(queries[a:b])) @ gallery.block(first, last).T
        pairs = slice(*np.searchsorted(row, [a, b]))
        out[pairs] = keys.numpy()[row[pairs] - a, position[pairs] - first]
    return out


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
        bounds: tuple[Floats, Floats],
        symmetric: bool,
    ) -> None:
        self._problem, self._queries, self._gallery, self._symmetric = problem, queries, gallery, symmetric
        self._counts = t.counts
        start = np.concatenate([[0], np.cumsum(t.counts)])
        dtype = np.float64 if gallery.dtype == torch.float64 else np.float32
        sample, owner = problem.order[t.sample], np.repeat(queries, t.counts)
        if problem.query.codes is None:
            margin = bounds[0][owner]
            low = np.nextafter((t.key - margin).astype(dtype), dtype(-np.inf))
            high = np.nextafter((t.key + margin).astype(dtype), dtype(np.inf))
        else:
            low = high = -comparable_distance(problem.query, problem.gallery, owner, sample, t.key)
        same = problem.gallery.row_id[sample], problem.query.codes is not None
        self._thresholds = (start, low, high, *_make_grid(start, low, high), *same)
        self._bound = bounds[1][queries]
        self._exact = (t.key, sample, problem.query.scale, problem.query.cosine)
        code = problem.codes[queries]
        self._class_range = problem.class_start[code], problem.class_start[code + 1]
        self._groups = _group_members(problem, queries)
        rows = len(queries)
        self._total = rows * (rows + TILE) // 2 if symmetric else rows * len(problem.order)
        self._remaining = self._total
        self._lock = threading.Lock()
        self._stop = False

    def run(self, threads: int, progress: Progress) -> Any:
        """Count in several threads and return (above, tied) per threshold; one that fails stops all."""
        rows = len(self._queries)
        self._step = TILE if self._symmetric else max(1, min(TILE, -(-rows // threads)))
        self._next = iter(range(0, rows, self._step))
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
                        progress(min(1.0, 1 - max(0, self._remaining) / self._total))
                        if any(f.exception() for f in finished):
                            break
                finally:
                    self._stop = True
            above, tied = (sum(f.result()[k].astype(np.int64) for f in futures) for k in range(2))
            progress(1.0)
            return self._items_above(above), tied
        finally:
            torch.set_num_threads(torch_threads)
            torch.set_float32_matmul_precision(precision)

    def _items_above(self, between: Ints) -> Ints:
        """Sum the items between thresholds, from the nearest threshold of each query on."""
        start, total = self._thresholds[0], np.cumsum(between)
        owner = np.repeat(np.arange(len(self._queries)), self._counts)
        before = np.concatenate([[0], total])[start[:-1] + np.arange(len(self._queries))]
        return np.asarray(total[np.arange(len(owner)) + owner] - before[owner])

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
        buffer = torch.empty(TILE * TILE, dtype=self._gallery.dtype)
        transposed = torch.empty_like(buffer).numpy()
        count = len(self._exact[0])
        out = np.zeros(count + len(queries), dtype=np.int32), np.zeros(count, dtype=np.int32), np.full(count, -1.0)
        near = np.empty((2 * _MAX_COMPARED * TILE, 4), dtype=np.int32)
        for a in self._tile_rows():
            b = min(a + self._step, len(queries))
            left = self._query_block(a, b)
            for c in range(a if self._symmetric else 0, len(order), TILE):
                d = min(c + TILE, len(order))
                product = buffer[: (b - a) * (d - c)].view(b - a, d - c)
                torch.mm(left, self._gallery.block(c, d).T, out=product)
                rows, cols, tile = queries[a:b], order[c:d], product.numpy()
                if problem.query.codes is not None:
                    code_products(tile, problem.query, problem.gallery, rows, cols)
                _mask_class(tile, *self._class_range, a, c)
                if self._groups is not None:
                    _mask_group(tile, *self._groups, a, c)
                # A single set needs half the product: transposed, the columns are queries against the rows.
                if self._symmetric and c > a:
                    mirrored = transposed[: (b - a) * (d - c)].reshape(d - c, b - a)
                    _transpose(tile, mirrored)
                    self._count_tile(mirrored, cols, rows, c, query, gallery, out, near)
                self._count_tile(tile, rows, cols, a, query, gallery, out, near)
                with self._lock:
                    self._remaining -= (b - a) * (d - c)
        return out

    def _count_tile(
        self, tile: Any, rows: Ints, cols: Ints, first: int, query: Any, gallery: Any, out: Any, near: Any
    ) -> None:
        row, codes, row_id = 0, self._problem.gallery.codes, self._problem.gallery.row_id
        if codes is not None:
            tile /= codes.weight[cols]
        while row < len(tile):
            found, row = _count_tile(tile, row_id[cols], row, first, self._thresholds, out[0], out[1], near)
            _resolve(near[:found], rows, cols, first, self._bound, self._exact, query, gallery, out)

    def _query_block(self, a: int, b: int) -> torch.Tensor:
        if self._symmetric:
            left = self._gallery.block(a, b).clone()
            left[:, -2:] = left[:, -2:].flip(1)
            return left
        return self._problem.query.query_matrix(torch.as_tensor(self._queries[a:b])).to(self._gallery.dtype)


def _make_grid(start: Ints, low: Any, high: Any) -> tuple[Any, Any]:
    """(origin, buckets per unit, last bucket) of each query, and the table of its buckets; see _make_table."""
    count = np.diff(start)
    grid = np.zeros((len(count), 3), dtype=low.dtype)
    table = np.zeros(_BUCKETS * len(low) + len(count), dtype=np.int32)
    some = np.flatnonzero(count)
    origin, last = low[start[some + 1] - 1], (_BUCKETS * count[some]).astype(low.dtype)
    width = np.maximum(high[start[some]] - origin, low.dtype.type(1e-30))
    grid[some] = np.stack([origin - width / last, last / width, last], axis=1)
    _make_table(start, low, high, grid, table)
    return grid, table


def _group_members(problem: RankingProblem, queries: Ints) -> tuple[Ints, Ints, Ints] | None:
    """(group per query, start of each group, positions by group), or None without groups."""
    if problem.groups is None:
        return None
    query_group, position_group = problem.groups
    size = np.bincount(position_group, minlength=int(query_group.max()) + 1)
    start = np.concatenate([[0], np.cumsum(size)])
    return query_group[queries], start, np.argsort(position_group, kind="stable")
