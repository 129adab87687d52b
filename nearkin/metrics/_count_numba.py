"""The numba backend, fastest on a CPU: a float32 product in cache-sized tiles, counted by compiled loops."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import fields
from functools import reduce
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from nearkin.metrics import _tile_kernels as kernels
from nearkin.metrics._problem import PartialRanking, Progress, RankingProblem, Thresholds, thresholds
from nearkin.metrics._vectors import (
    Floats,
    GalleryMatrix,
    Ints,
    VectorSet,
    code_products,
    comparable_distance,
    one_torch_thread,
)

# A float32 product cannot separate close similarities. Each threshold is therefore a band as wide as the error bound:
# items above the band are counted, items inside it are compared by a float64 dot product and, if that is still too
# close, by the exact distance.
PIECE = 512  # queries whose relevant items are sorted at a time
TILE = 768  # rows and columns of a tile: large enough for a fast product, small enough for the cache
PART = 264  # terms of a float32 product summed at a time, which bounds its error: 256 and the two biases
_MAX_FLOAT32 = 128  # with more relevant items per query, too many others lie within a float32 error of one of them
_BYTES_PER_PAIR = 250  # memory for each pair of a query and a relevant item


def count_numba(problem: RankingProblem, budget: int, progress: Progress | None) -> Iterator[PartialRanking]:
    """Count the items above every relevant item, for all queries at once or, with huge classes, some at a time."""
    queries = problem.order if problem.single_set else np.argsort(problem.codes, kind="stable")
    pairs = np.cumsum(np.diff(problem.class_start)[problem.codes[queries]])
    block = pairs // (budget // _BYTES_PER_PAIR + 1)
    bound32, bound64 = problem.query.error_bounds(problem.gallery, PART)
    large = problem.query.codes is not None or pairs[-1] > _MAX_FLOAT32 * len(queries)
    dtype = torch.float64 if large else torch.float32
    with one_torch_thread():
        gallery = GalleryMatrix(problem.gallery, problem.order, dtype, budget // 2)
    bounds = (bound64 + bound32 if dtype == torch.float32 else 2 * bound64).numpy(), bound64.numpy()
    arrays = _arrays(problem.query), _arrays(problem.gallery)
    done = 0

    def report(fraction: float) -> None:
        if progress:
            progress((done + fraction * len(part)) / len(queries))

    for part in np.split(queries, np.flatnonzero(np.diff(block)) + 1):
        symmetric = problem.single_set and len(part) == len(queries)
        pieces = np.split(part, range(PIECE, len(part), PIECE))
        with _thread_pool(torch.get_num_threads()) as pool:
            found = list(pool.map(lambda piece: _tie_groups(problem, piece, gallery, arrays, bound64.numpy()), pieces))
        t = Thresholds(*(np.concatenate([getattr(f, name.name) for f in found]) for name in fields(Thresholds)))
        # Each thread has counts of its own; with very many threads and thresholds they must share the budget.
        threads = max(1, min(torch.get_num_threads(), budget // 4 // (16 * len(t.key) + 1)))
        counter = _TileCounter(problem, part, gallery, t, bounds, symmetric)
        above, tied = counter.run(threads, report)
        yield PartialRanking(part, t.counts, above, t.relevant, t.relevant + tied)
        done += len(part)


@contextmanager
def _thread_pool(threads: int) -> Iterator[ThreadPoolExecutor]:
    with one_torch_thread(), ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield pool


def _tie_groups(
    problem: RankingProblem, queries: Ints, gallery: GalleryMatrix, arrays: Any, bound: Floats
) -> Thresholds:
    """The tie groups of the relevant items of some queries."""
    row, position = problem.relevant_pairs(queries)
    key = np.empty(len(row))
    if gallery.dtype == torch.float32:
        query, items = arrays
        kernels.pair_keys(query, items, problem.query.scale, queries[row], problem.order[position], key)
    else:
        # Large classes, or codes: products of some queries with all items of their classes.
        code = problem.codes[queries]
        for a in range(0, len(queries), 64):
            b = min(a + 64, len(queries))
            first, last = problem.class_start[code[a]], problem.class_start[code[b - 1] + 1]
            products = problem.query.query_matrix(torch.as_tensor(queries[a:b])) @ gallery.block(first, last).T
            pairs = slice(*np.searchsorted(row, [a, b]))
            key[pairs] = products.numpy()[row[pairs] - a, position[pairs] - first]
    return thresholds(problem, queries, row, position, key, bound[queries])


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
        start = np.concatenate([[0], np.cumsum(t.counts)])
        dtype = np.float64 if gallery.dtype == torch.float64 else np.float32
        sample, codes = problem.order[t.sample], problem.query.codes
        value, margin, eps = t.key, bounds[0][queries], float(np.finfo(dtype).eps)
        if codes is not None:
            owner = np.repeat(queries, t.counts)
            value = -comparable_distance(problem.query, problem.gallery, owner, sample, t.key)
            margin, eps = np.zeros(len(queries)), 0.0
        count, rows = len(value), len(queries)
        low, high, grid = np.empty(count, dtype), np.empty(count, dtype), np.empty((rows, 4), dtype)
        small = dtype == np.float32 and t.counts.max() <= kernels.MAX_INT8
        table = np.empty(kernels.BUCKETS * count + kernels.BELOW * rows, dtype=np.int8 if small else np.int32)
        self._bands = start, value, margin, eps, (low, high, grid, table)
        self._thresholds = start, low, high, grid, table, problem.gallery.row_id[sample], codes is not None
        self._bound, self._relevant = bounds[1][queries], t.relevant
        self._exact = (t.key, sample, problem.query.scale, problem.query.cosine)
        code = problem.codes[queries]
        self._class_range = problem.class_start[code], problem.class_start[code + 1]
        self._groups = _group_members(problem, queries)
        self._total = rows * (rows + TILE) // 2 if symmetric else rows * len(problem.order)
        self._remaining = self._total
        self._lock = threading.Lock()
        self._stop = False

    def run(self, threads: int, progress: Progress) -> Any:
        """Count in several threads and return (above, tied) per threshold; one that fails stops all."""
        rows = len(self._queries)
        self._step = TILE if self._symmetric else max(1, min(TILE, -(-rows // threads)))
        self._next = iter(range(0, rows, self._step))
        precision = torch.get_float32_matmul_precision()
        # Anything below full float32 would break the error bound.
        torch.set_float32_matmul_precision("highest")
        try:
            with _thread_pool(threads) as pool:
                self._use_onednn = self._gallery.dtype == torch.float32 and _has_fast_onednn()
                list(pool.map(lambda q: kernels.make_bands(q, *self._bands), np.array_split(np.arange(rows), threads)))
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
            progress(1.0)
            between, tied = (sum(f.result()[k] for f in futures) for k in range(2))
            above = np.empty(len(tied), dtype=np.int64)
            kernels.sum_above(self._thresholds[0], between, self._relevant, above)
            return above, tied
        finally:
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
        problem, queries, order = self._problem, self._queries, self._problem.order
        # Squared norms of its own too: two threads must not fill the same entry.
        gallery = _arrays(problem.gallery)
        query = gallery if problem.single_set else _arrays(problem.query)
        buffer = torch.empty(TILE * TILE, dtype=self._gallery.dtype)
        count, counters = len(self._exact[0]), len(self._exact[0]) + kernels.BELOW * len(queries)
        out = np.zeros(counters, dtype=np.int32), np.zeros(count, dtype=np.int32), np.full(count, -1.0)
        near = np.empty((2 * kernels.MAX_COMPARED * TILE, 4), dtype=np.int32)
        for a in self._tile_rows():
            b = min(a + self._step, len(queries))
            left = self._query_block(a, b)
            for c in range(a if self._symmetric else 0, len(order), TILE):
                d = min(c + TILE, len(order))
                product = self._product(left, self._gallery.block(c, d))
                rows, cols, tile = queries[a:b], order[c:d], product.numpy()
                if problem.query.codes is not None:
                    code_products(tile, problem.query, problem.gallery, rows, cols)
                kernels.mask_class(tile, *self._class_range, a, c)
                if self._groups is not None:
                    kernels.mask_group(tile, *self._groups, a, c)
                # A single set needs half the product: transposed, the columns are queries against the rows.
                if self._symmetric and c > a:
                    mirrored = buffer[: product.numel()].view(d - c, b - a).copy_(product.T)
                    self._count_tile(mirrored.numpy(), cols, rows, c, query, gallery, out, near)
                self._count_tile(tile, rows, cols, a, query, gallery, out, near)
                with self._lock:
                    self._remaining -= (b - a) * (d - c)
        return out

    def _product(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """The product, in float32 as a sum of parts."""
        width = left.shape[1] if left.dtype == torch.float64 else PART
        pairs = zip(torch.split(left, width, 1), torch.split(right, width, 1), strict=True)
        products = (_onednn_product(a, b) if self._use_onednn else a @ b.T for a, b in pairs)
        return reduce(torch.Tensor.add_, products)

    def _count_tile(
        self, tile: Any, rows: Ints, cols: Ints, first: int, query: Any, gallery: Any, out: Any, near: Any
    ) -> None:
        row, codes, row_id = 0, self._problem.gallery.codes, self._problem.gallery.row_id
        if codes is not None:
            tile /= codes.weight[cols]
        while row < len(tile):
            found, row = kernels.count_tile(tile, row_id[cols], row, first, self._thresholds, out[0], out[1], near)
            kernels.resolve(near[:found], rows, cols, first, self._bound, self._exact, query, gallery, out)

    def _query_block(self, a: int, b: int) -> torch.Tensor:
        if self._symmetric:
            left = self._gallery.block(a, b).clone()
            left[:, -2:] = left[:, -2:].flip(1)
            return left
        return self._problem.query.query_matrix(torch.as_tensor(self._queries[a:b])).to(self._gallery.dtype)


def _onednn_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return F.linear(left.to_mkldnn(), right.to_mkldnn()).to_dense()


def _has_fast_onednn() -> bool:
    """Whether oneDNN multiplies float32 with AVX-512, which MKL uses on Intel only, and does not round it first."""
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not has_onednn or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    x = torch.full((256, PART), 1 + 2.0**-12)  # 1 in bfloat16 and TF32, which some settings allow
    return bool(((_onednn_product(x, x) / PART - (1 + 2.0**-12) ** 2).abs() < 1e-5).all())


def _group_members(problem: RankingProblem, queries: Ints) -> tuple[Ints, Ints, Ints] | None:
    """(group per query, start of each group, positions by group), or None without groups."""
    if problem.groups is None:
        return None
    query_group, position_group = problem.groups
    size = np.bincount(position_group, minlength=int(query_group.max()) + 1)
    start = np.concatenate([[0], np.cumsum(size)])
    return query_group[queries], start, np.argsort(position_group, kind="stable")
