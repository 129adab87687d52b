"""The compiled loops of the numba backend."""

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numba.extending import register_jitable

from nearkin.metrics import _vectors
from nearkin.metrics._vectors import cosine_distance, sum_products, sum_squares

MAX_COMPARED = 8  # relevant items per query up to which comparing with each in turn is fastest
BUCKETS = 16  # per threshold, in the table that finds the place of a value among the thresholds
BELOW = 8  # buckets and counters for values below all thresholds: to increment a single one again and again is slow
MAX_INT8 = 127 - BELOW  # thresholds per query up to which a table of int8, which needs the least cache, can count them
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
def exact_pair(cosine: bool, query: Any, i: int, gallery: Any, j: int) -> Any:
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
def pair_key(x: Any, zx: float, y: Any, zy: float, centre: Any) -> float:
    total = 0.0
    for k in range(len(x)):
        total += (np.float64(x[k]) * zx - centre[k]) * (np.float64(y[k]) * zy - centre[k])
    return total


@compiled()
def pair_keys(query: Any, gallery: Any, scale: float, row: Any, item: Any, out: Any) -> None:
    """The float64 keys of pairs (row of the query, row of the gallery)."""
    x, row_scale, bias = query[0], query[1], query[3]
    y, g_row_scale, g_bias, centre = gallery[0], gallery[1], gallery[3], gallery[5]
    for t in range(len(row)):
        i, j = row[t], item[t]
        out[t] = pair_key(x[i], row_scale[i], y[j], g_row_scale[j], centre) * scale * scale + bias[i] + g_bias[j]


@compiled()
def count_in_band(values: Any, low: Any, high: Any) -> Any:
    """How many values exceed `high`, and how many are at least `low`."""
    # int32 at every step, or the loop runs four at a time instead of eight.
    over, near = np.int32(0), np.int32(0)
    for k in range(len(values)):
        over = np.int32(over + np.int32(values[k] > high))
        near = np.int32(near + np.int32(values[k] >= low))
    return over, near


@compiled()
def bucket_of(value: Any, origin: Any, factor: Any, below: Any, last: Any) -> Any:
    """The bucket of a value: 0 to `last`, ascending with the value; less than `below` only below the origin."""
    zero = below - below
    scaled = (value - origin) * factor + below
    scaled = scaled if scaled > zero else zero
    return np.int32(scaled if scaled < last else last)


@compiled()
def make_bands(queries: Any, start: Any, value: Any, margin: Any, eps: float, bands: Any) -> None:
    """Prepare the counting of some queries: bands of thresholds, and a table to find a value among them.

    Query q owns the thresholds start[q]:start[q + 1]. Fills (low, high, grid, table). low, high: value -+ margin,
    rounded outwards by a relative `eps`. grid: origin, buckets per unit, BELOW and last bucket of each query. table:
    for each bucket how many thresholds are above it; this number n is stored as -1 - n where the bucket overlaps the
    band of a threshold.
    """
    low, high, grid, table = bands
    for q in queries:
        begin, end = start[q], start[q + 1]
        for t in range(begin, end):
            low[t] = value[t] - (margin[q] + eps * abs(value[t]))
            high[t] = value[t] + (margin[q] + eps * abs(value[t]))
        if end - begin <= MAX_COMPARED:
            continue
        part = table[BUCKETS * begin + BELOW * q : BUCKETS * end + BELOW * (q + 1)]
        used = len(part) - BELOW
        grid[q, 0], grid[q, 1] = low[end - 1], (used - 1) / max(high[begin] - low[end - 1], 1e-30)
        grid[q, 2], grid[q, 3] = BELOW, len(part) - 1
        origin, factor, below, last = grid[q]
        part[:] = 0
        for t in range(begin, end):
            part[bucket_of(low[t], origin, factor, below, last)] += 1
        above = 0
        for k in range(len(part) - 1, BELOW - 1, -1):
            part[k], above = above, above + part[k]
        for k in range(BELOW):
            part[k] = above + BELOW - 1 - k
        marked = len(part)
        for t in range(begin, end):
            first = bucket_of(low[t], origin, factor, below, last)
            for k in range(first, min(bucket_of(high[t], origin, factor, below, last) + 1, marked)):
                part[k] = -1 - part[k]
            marked = min(marked, first)


@compiled()
def count_tile(tile: Any, ids: Any, row: int, first: int, thresholds: Any, above: Any, tied: Any, near: Any) -> Any:
    """Add the items of a tile to the counts of its rows, from `row` on.

    Query first + r is row r of the tile; ids: row_id of its columns. above: items between each threshold and the one
    before it, and BELOW counters for those below all. Of the items within the band of a threshold, copies of it tie,
    and so do all if the values are exact. near: receives (row, column, a, b) of the others, within the bands of
    thresholds a to b and counted as if below those. Returns the number of them and, if `near` is full, the row to
    continue from.
    """
    start, low, high, grid, table, sample_id, is_exact = thresholds
    width, found = tile.shape[1], 0
    buckets, listed = np.empty(width, dtype=np.int32), np.empty(width + 1, dtype=np.int64)
    for r in range(row, tile.shape[0]):
        q, line = first + r, tile[r]
        begin, end = start[q], start[q + 1]
        if found + MAX_COMPARED * width > len(near):
            return found, r
        if end - begin <= MAX_COMPARED:
            # From the farthest relevant item to the nearest: once nothing exceeds one, nothing exceeds the rest.
            for t in range(end - 1, begin - 1, -1):
                over, possible = count_in_band(line, low[t], high[t])
                if possible == 0:
                    break
                above[t + BELOW * q] += over
                above[t + BELOW * q + 1] -= over
                if is_exact:
                    tied[t] += possible - over
                    continue
                for piece in range(0, width if possible > over else 0, 64):
                    part = line[piece : piece + 64]
                    over, possible = count_in_band(part, low[t], high[t])
                    for c in range(len(part) if possible > over else 0):
                        if not low[t] <= part[c] <= high[t]:
                            continue
                        if ids[piece + c] == sample_id[t]:
                            tied[t] += 1
                        else:
                            near[found] = r, piece + c, t, t + 1
                            found += 1
            continue
        places = table[BUCKETS * begin + BELOW * q : BUCKETS * end + BELOW * (q + 1)]
        counts = above[begin + BELOW * q : end + BELOW * (q + 1)]
        origin, factor, below, last = grid[q]
        for c in range(width):
            bucket = bucket_of(line[c], origin, factor, below, last)
            buckets[c] = max(bucket, np.int32(c & (BELOW - 1)))
        # Few items are in a bucket with a band. They are listed, as to branch on a coin toss takes longer. Unsigned
        # indices spare the test for negative ones.
        some = np.uint64(0)
        for c in range(width):
            place = places[buckets[c]]
            listed[some] = c
            some += np.uint64(place < 0)
            counts[np.uint32(place ^ (place >> 31))] += 1
        for n in range(some):
            c = listed[n]
            k = buckets[c]
            # The first threshold whose band is not above the value: between this bucket's and the next lower one's.
            t, b = -1 - places[k], max(places[k - 1], -1 - places[k - 1])
            counts[t] -= 1
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
            counts[b] += 1
    return found, tile.shape[0]


@compiled()
def resolve(
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
                    value = (
                        pair_key(x[i], row_scale[i], y[j], g_row_scale[j], centre) * scale * scale + bias[i] + g_bias[j]
                    )
                gap = value - key[t]
                if abs(gap) <= 2.0 * bound[q]:
                    if distance[t] < 0.0:
                        distance[t] = exact_pair(cosine, query, i, gallery, s)
                    if other < 0.0:
                        other = exact_pair(cosine, query, i, gallery, j)
                    gap = distance[t] - other
            if gap > 0.0:
                b = t
            else:
                a = t + 1
                if gap == 0.0:
                    tied[t] += 1
                    b = a
        above[a + BELOW * q] += 1
        above[last + BELOW * q] -= 1


@compiled()
def sum_above(start: Any, between: Any, relevant: Any, above: Any) -> None:
    """Sum the items between thresholds, and their own relevant items, from the nearest threshold of each query on."""
    for q in range(len(start) - 1):
        total = 0
        for t in range(start[q], start[q + 1]):
            total += between[t + BELOW * q]
            above[t] = total
            total += relevant[t]


@compiled()
def mask_class(tile: Any, begin: Any, end: Any, first: int, column: int) -> None:
    """Exclude the query's own class: its relevant items and itself."""
    for r in range(tile.shape[0]):
        a, b = max(begin[first + r] - column, 0), min(end[first + r] - column, tile.shape[1])
        for c in range(a, b):
            tile[r, c] = -np.inf


@compiled()
def mask_group(tile: Any, code: Any, group_start: Any, member: Any, first: int, column: int) -> None:
    """Exclude the items of the query's group; `member` lists the positions of each group, ascending."""
    for r in range(tile.shape[0]):
        begin, end = group_start[code[first + r]], group_start[code[first + r] + 1]
        for m in range(begin + np.searchsorted(member[begin:end], column), end):
            if member[m] >= column + tile.shape[1]:
                break
            tile[r, member[m] - column] = -np.inf
