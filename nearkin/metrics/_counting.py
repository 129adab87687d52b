"""The fast path on a CPU: a float32 product in tiles that stay in cache, counted by compiled loops.

When queries are the gallery a tile serves both sides: its rows as queries against its columns, then, turned over, its
columns as queries against its rows. That is half the product. Each thread multiplies and counts its own tiles with
single-threaded calls: nothing is shared but the totals, which are integers and do not care about order.

A float32 product cannot tell close similarities apart. Each threshold therefore is a band, as wide as the error bound:
what lies above it is counted, what lies in it is looked at again with a float64 dot product, and if that is still too
close, with the exact distance (nearkin.metrics._vectors.exact_distance, whose arithmetic is repeated here operation by
operation).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import numba
import numpy as np
import torch

from nearkin.metrics._problem import Part, Progress, RankingProblem, before, thresholds
from nearkin.metrics._vectors import SNAP, Columns, Ints, Points

TILE = 512  # rows and columns of a tile: 1 MB, about what a core's own cache holds
_SPLIT = 134217729.0
_F = TypeVar("_F", bound=Callable[..., Any])


def compiled(**options: Any) -> Callable[[_F], _F]:
    """numba.njit that keeps its result on disk where it can, and goes on without where it cannot (read-only homes)."""

    def wrap(function: _F) -> _F:
        try:
            made: _F = numba.njit(nogil=True, cache=True, **options)(function)
        except RuntimeError:
            made = numba.njit(nogil=True, **options)(function)
        return made

    return wrap


# Lets a sum be taken in any order, so that it runs several at a time; the error bound covers every order.
FAST = {"reassoc", "contract", "nsz"}


# ------------------------------------------------------------------------------------------------ the exact distance


@compiled(inline="always")
def _two_sum(a: float, b: float) -> tuple[float, float]:
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


@compiled(inline="always")
def _two_product(a: float, b: float) -> tuple[float, float]:
    p = a * b
    t = _SPLIT * a
    a1 = t - (t - a)
    a2 = a - a1
    t = _SPLIT * b
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
    return float(np.rint((d + (e - rest)) * SNAP) / SNAP)


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
    """The exact distance of row i of the query and row j of the gallery, each as given by _arrays."""
    x, shrink, power, square = query[0], query[1], query[2], query[6]
    y, g_shrink, g_power, g_square = gallery[0], gallery[1], gallery[2], gallery[6]
    if not cosine:
        return _exact_square(x[i], power[i], y[j], g_power[j])
    if shrink[i] == 0.0 or g_shrink[j] == 0.0:
        return 1.0
    # Squares are computed when first needed.
    if square[i, 0] < 0.0:
        xx, xx1 = _sum_products(x[i], power[i], x[i], power[i])
        square[i, 1] = xx1
        square[i, 0] = xx
    if g_square[j, 0] < 0.0:
        yy, yy1 = _sum_products(y[j], g_power[j], y[j], g_power[j])
        g_square[j, 1] = yy1
        g_square[j, 0] = yy
    xy, xy1 = _sum_products(x[i], power[i], y[j], g_power[j])
    return _exact_cosine(xy, xy1, square[i, 0], square[i, 1], g_square[j, 0], g_square[j, 1])


# ---------------------------------------------------------------------------------------------------------- counting


@compiled(fastmath=FAST)
def _key(x: Any, zx: float, y: Any, zy: float, centre: Any) -> float:
    total = 0.0
    for k in range(len(x)):
        total += (np.float64(x[k]) * zx - centre[k]) * (np.float64(y[k]) * zy - centre[k])
    return total


@compiled()
def _keys(query: Any, gallery: Any, scale: float, row: Any, item: Any) -> Any:
    """The float64 keys of pairs (row of the query, row of the gallery)."""
    x, shrink, bias = query[0], query[1], query[3]
    y, g_shrink, g_bias, centre = gallery[0], gallery[1], gallery[3], gallery[5]
    out = np.empty(len(row))
    for t in range(len(row)):
        i, j = row[t], item[t]
        out[t] = _key(x[i], shrink[i], y[j], g_shrink[j], centre) * scale * scale + bias[i] + g_bias[j]
    return out


@compiled()
def _passing(values: Any, low: Any, high: Any) -> Any:
    """How many values lie above `high`, and how many at or above `low`."""
    # Kept to int32 at every step, or the loop runs four at a time instead of eight.
    over, near = np.int32(0), np.int32(0)
    for k in range(len(values)):
        over = np.int32(over + np.int32(values[k] > high))
        near = np.int32(near + np.int32(values[k] >= low))
    return over, near


@compiled()
def _count(
    tile: Any, rows: Any, cols: Any, first: int, start: Any, band: Any, edge: Any, query: Any, gallery: Any, out: Any
) -> None:
    """Add the items of a tile to the counts of its rows.

    rows, cols: row in x of each tile row and column; first: position of the first row, into start.
    band: (low, high) float32 per threshold; edge: (key, sample row, slack per position, scale, cosine).
    query, gallery: as made by _arrays; out: (above, tied) per threshold.
    """
    low, high = band
    key, sample, slack, scale, cosine = edge
    x, shrink, _, bias, _, centre, _ = query
    y, g_shrink, _, g_bias, group, _, _ = gallery
    above, tied = out
    for r in range(tile.shape[0]):
        begin, end = start[first + r], start[first + r + 1]
        if begin == end:
            continue
        line = tile[r]
        # From the farthest relevant item to the nearest: where nothing passes one, nothing passes the rest.
        for t in range(end - 1, begin - 1, -1):
            over, near = _passing(line, low[t], high[t])
            if near == 0:
                break
            above[t] += over
            if near == over:
                continue
            i, s, ours = rows[r], sample[t], -1.0
            for piece in range(0, len(line), 64):
                part = line[piece : piece + 64]
                over, near = _passing(part, low[t], high[t])
                if near == over:
                    continue
                for c in range(len(part)):
                    if not low[t] <= part[c] <= high[t]:
                        continue
                    j = cols[piece + c]
                    if group[j] == group[s]:
                        tied[t] += 1
                        continue
                    gap = _key(x[i], shrink[i], y[j], g_shrink[j], centre) * scale * scale
                    gap += bias[i] + g_bias[j] - key[t]
                    if gap > 2.0 * slack[first + r]:
                        above[t] += 1
                    elif gap >= -2.0 * slack[first + r]:
                        if ours == -1.0:
                            ours = _exact(cosine, query, i, gallery, s)
                        theirs = _exact(cosine, query, i, gallery, j)
                        above[t] += theirs < ours
                        tied[t] += theirs == ours


@compiled()
def _hide(tile: Any, begin: Any, end: Any, first: int, column: int) -> None:
    """Put the row's own class out of reach: its relevant items, and itself."""
    for r in range(tile.shape[0]):
        a, b = max(begin[first + r] - column, 0), min(end[first + r] - column, tile.shape[1])
        for c in range(a, b):
            tile[r, c] = -np.inf


@compiled()
def _hide_group(tile: Any, code: Any, first: int, column: int, group_start: Any, member: Any) -> None:
    """Put the items of the row's group out of reach; `member` lists the positions of each group, ascending."""
    for r in range(tile.shape[0]):
        begin, end = group_start[code[first + r]], group_start[code[first + r] + 1]
        for at in range(begin + np.searchsorted(member[begin:end], column), end):
            if member[at] >= column + tile.shape[1]:
                break
            tile[r, member[at] - column] = -np.inf


@compiled()
def _turn(tile: Any, out: Any) -> None:
    """out = tile.T, in patches that stay in the nearest cache."""
    n, m = tile.shape
    for a in range(0, n, 16):
        for b in range(0, m, 16):
            for c in range(b, min(b + 16, m)):
                for r in range(a, min(a + 16, n)):
                    out[c, r] = tile[r, c]


# ---------------------------------------------------------------------------------------------------------- the walk


def count_blocks(task: RankingProblem, budget: int, progress: Progress | None) -> Iterator[Part]:
    """Count all queries at once; see nearkin.metrics.ranking.rank."""
    queries = task.order if task.alone else np.argsort(task.codes, kind="stable")
    narrow, wide = (s.cpu().numpy()[queries] for s in task.query.slack(task.gallery))
    scale = task.query.scale
    row, position = task.relevant(queries)
    key = _keys(_arrays(task.query), _arrays(task.gallery), scale, queries[row], task.order[position])
    t = thresholds(task, queries, row, position, key, wide)
    owner = np.repeat(np.arange(len(queries)), t.counts)
    start = np.concatenate([[0], np.cumsum(t.counts)])
    band = (
        np.nextafter((t.key - narrow[owner] - wide[owner]).astype(np.float32), np.float32(-np.inf)),
        np.nextafter((t.key + narrow[owner] + wide[owner]).astype(np.float32), np.float32(np.inf)),
    )
    edge = (t.key, task.order[t.sample], wide, scale, task.query.cosine)
    code = task.codes[queries]
    begin, end = task.class_start[code], task.class_start[code + 1]
    columns = Columns(task.gallery, task.order, torch.float32, budget // 2)

    def hide(tile: Any, a: int, c: int) -> None:
        _hide(tile, begin, end, a, c)
        if groups is not None:
            _hide_group(tile, groups[0], a, c, groups[1], groups[2])

    groups = _group_lists(task, queries)
    walk = _Walk(len(queries), len(task.order), task.alone, progress)

    def work() -> Any:
        """One thread: take rows of tiles until none are left. Returns its own counts."""
        torch.set_num_threads(1)
        # Its own squares too: two threads must not fill one pair of numbers.
        gallery = _arrays(task.gallery)
        query = gallery if task.alone else _arrays(task.query)
        flat, turned = torch.empty(TILE * TILE), np.empty(TILE * TILE, dtype=np.float32)
        out = np.zeros((2, len(t.key)), dtype=np.int32)
        for a in walk.rows():
            b = min(a + TILE, len(queries))
            if task.alone:
                left = columns.block(a, b).clone()
                left[:, -2:] = left[:, -2:].flip(1)
            else:
                left = task.query.left(torch.as_tensor(queries[a:b])).float()
            for c in range(a if task.alone else 0, len(task.order), TILE):
                d = min(c + TILE, len(task.order))
                tile = flat[: (b - a) * (d - c)].view(b - a, d - c)
                torch.mm(left, columns.block(c, d).T, out=tile)
                array = tile.numpy()
                hide(array, a, c)
                rows, cols = queries[a:b], task.order[c:d]
                _count(array, rows, cols, a, start, band, edge, query, gallery, (out[0], out[1]))
                if task.alone and c > a:
                    other = turned[: (b - a) * (d - c)].reshape(d - c, b - a)
                    _turn(array, other)
                    _count(other, cols, rows, c, start, band, edge, query, gallery, (out[0], out[1]))
                walk.done((b - a) * (d - c))
        return out

    # Each thread counts for itself; very many threads and thresholds must share the budget.
    threads = max(1, min(torch.get_num_threads(), budget // 4 // (8 * len(t.key) + 1)))
    above, tied = walk.run(work, threads).astype(np.int64)
    yield Part(queries, t.counts, above=above + before(t), relevant=t.relevant, size=t.relevant + tied)


def _arrays(points: Points) -> tuple[Any, ...]:
    """(x, shrink, power, bias, group, centre, squares) for compiled loops. A square below 0 is not yet known."""
    tensors = (points.x, points.shrink, points.power, points.bias)
    return (*(v.numpy() for v in tensors), points.group, points.centre.numpy(), np.full((len(points), 2), -1.0))


def _group_lists(task: RankingProblem, queries: Ints) -> tuple[Ints, Ints, Ints] | None:
    if task.group is None or task.order_group is None:
        return None
    most = int(max(task.group.max(), task.order_group.max())) + 1
    start = np.concatenate([[0], np.cumsum(np.bincount(task.order_group, minlength=most))])
    return task.group[queries], start, np.argsort(task.order_group, kind="stable")


class _Walk:
    """Hands rows of tiles to threads, adds up what they bring back, and stops them all when one fails."""

    def __init__(self, rows: int, cols: int, half: bool, progress: Progress | None) -> None:
        self._next = iter(range(0, rows, TILE))
        self._lock = threading.Lock()
        self._left = rows * (rows + TILE) // 2 if half else rows * cols
        self._whole = self._left
        self._stop = False
        self._progress = progress

    def rows(self) -> Iterator[int]:
        while not self._stop:
            with self._lock:
                a = next(self._next, None)
            if a is None:
                return
            yield a

    def done(self, cells: int) -> None:
        with self._lock:
            self._left -= cells

    def run(self, work: Callable[[], Any], threads: int) -> Any:
        """The sum of what `work` returns in each thread."""
        allowed = torch.get_num_threads()
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
                            self._progress(min(1.0, 1 - max(0, self._left) / self._whole))
                        if any(f.exception() for f in finished):
                            break
                finally:
                    self._stop = True
            total = sum(f.result() for f in futures)
            if self._progress:
                self._progress(1.0)
            return total
        finally:
            torch.set_num_threads(allowed)
            torch.set_float32_matmul_precision(precision)
