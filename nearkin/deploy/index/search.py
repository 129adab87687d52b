"""Exact nearest-neighbour search by cosine similarity.

`nearest` returns exactly what `nk.neighbours` returns, ties included, so search and evaluation always agree. For few
queries it first computes float32 products straight from the memory-mapped file, and re-ranks in full precision only the
candidates that the error bound of those products cannot rule out.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin.errors import ConfigError, DataError
from nearkin.metrics._vectors import U32, ZERO_NORM
from nearkin.metrics.ranking import neighbours

Vectors = NDArray[np.float32]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Label = str | int | None
Pair = tuple[int, int, float]  # two rows and their cosine

MAX_NORM = 1e15  # of a vector; above it float32 sums could overflow
_MAX_SHORTLIST_QUERIES = 32  # up to here a shortlist per query is faster than one product with all items
_BLOCK_BYTES = 64 * 2**20
_PAIR_BLOCK = 65_536


@dataclass(frozen=True)
class Hit:
    """One search result.

    Attributes:
        id: Item id.
        label: Class of the item, or None.
        similarity: Cosine similarity to the query.
        row: Row in the index, or -1 if it comes from an external store.
    """

    id: str
    label: Label
    similarity: float
    row: int = -1


@dataclass(frozen=True)
class SearchResult:
    """The result of one query.

    Attributes:
        hits: The nearest items, nearest first.
        nearest: Highest cosine of any item, before re-ranking; -1 if there is none.
        known: Whether `nearest` exceeds the threshold; None if the index is not calibrated.
    """

    hits: tuple[Hit, ...]
    nearest: float
    known: bool | None


def as_array(values: Any) -> NDArray[Any]:
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = (values.float() if values.is_floating_point() and values.element_size() < 4 else values).numpy()
    return np.asarray(values)


def check_k(k: Any) -> None:
    if not isinstance(k, int | np.integer) or k < 1:
        raise ConfigError(f"k: expected an integer of at least 1, got {k!r}.")


def check_vectors(values: Any, dim: int | None, what: str) -> Vectors:
    """Convert to finite float32 rows [N, D]."""
    try:
        array = as_array(values)
        if array.dtype.kind not in "fiu":
            raise ValueError(f"expected numbers, got {array.dtype}")
        vectors = np.ascontiguousarray(array, np.float32)
    except (TypeError, ValueError) as error:
        raise DataError(f"{what}: cannot be converted to vectors ({error}).") from None
    if vectors.ndim != 2 or vectors.shape[1] == 0:
        raise DataError(f"{what}: expected one row per item, [N, D]; got shape {list(vectors.shape)}.")
    if dim is not None and vectors.shape[1] != dim:
        raise DataError(f"{what}: expected {dim} dimensions as in the index, got {vectors.shape[1]}.")
    for start, block in blocks(vectors):
        bad = np.flatnonzero(~(_norms(block) <= MAX_NORM))  # written so that NaN counts as bad
        if len(bad):
            problem = f"norm above {MAX_NORM:g}" if np.isfinite(block[bad[0]]).all() else "NaN or infinity"
            raise DataError(f"{what}: {problem} in row {start + int(bad[0])}. Remove this row.")
    return vectors


def _norms(vectors: Vectors | Floats) -> Floats:
    return np.asarray(np.sqrt(np.square(vectors, dtype=np.float64).sum(axis=1)))


def inverse_norms(vectors: Vectors) -> Vectors:
    """Compute the factors that scale each row to unit length. Returns [N]; 0 for a row that ranking treats as zero."""
    norms = np.concatenate([np.empty(0), *(_norms(block) for _, block in blocks(vectors))])
    with np.errstate(divide="ignore"):
        return np.where(norms > ZERO_NORM, 1 / norms, 0).astype(np.float32)


def normalize_rows(vectors: Vectors | Floats) -> Floats:
    """Scale rows to unit length in float64. Returns float64 [N, D]; a row that ranking treats as zero stays 0."""
    norms = _norms(vectors)[:, None]
    return np.divide(vectors, norms, out=np.zeros(vectors.shape), where=norms > ZERO_NORM)


def nearest(queries: Vectors, items: Vectors, k: int, inv_norms: Vectors | None = None) -> tuple[Ints, Floats]:
    check_k(k)
    k = min(int(k), len(items))
    if k == 0 or len(queries) == 0:
        return np.empty((len(queries), k), np.int64), np.empty((len(queries), k))
    if len(queries) > _MAX_SHORTLIST_QUERIES:
        return neighbours(queries, items, k)
    inv_norms = inverse_norms(items) if inv_norms is None else inv_norms
    results = [nearest_among(query, items, _shortlist(query, items, k, inv_norms), k) for query in queries]
    return np.stack([rows for rows, _ in results]), np.stack([cosines for _, cosines in results])


def nearest_among(query: Vectors, items: Vectors, candidates: Ints, k: int) -> tuple[Ints, Floats]:
    rows, cosines = neighbours(query[None], np.asarray(items[candidates]), min(k, len(candidates)))
    return candidates[rows[0]], cosines[0]


def exclude_row(row: int, rows: Ints, cosines: Floats) -> tuple[Ints, Floats]:
    """Remove one item from a result. Matching by row keeps exact duplicates of it."""
    keep = rows != row
    return rows[keep], cosines[keep]


def _shortlist(query: Vectors, items: Vectors, k: int, inv_norms: Vectors) -> Ints:
    """Return the rows, ascending, that may be among the k nearest, ties included."""
    norm = math.sqrt(float(np.square(query, dtype=np.float64).sum()))
    unit = (query / np.float32(norm) if norm > ZERO_NORM else np.zeros_like(query)).astype(np.float32)
    cosines = np.empty(len(items), np.float32)
    for start, block in blocks(items):
        np.matmul(block, unit, out=cosines[start : start + len(block)])
    cosines *= inv_norms
    kth = np.partition(cosines, len(cosines) - k)[len(cosines) - k]
    # Bound on the rounding error of each of the two compared cosines, for any order of summation.
    error = 1.05 * (items.shape[1] + 16) * U32
    return np.flatnonzero(cosines >= kth - np.float32(2.1 * error))


def blocks(vectors: Vectors) -> Iterator[tuple[int, Vectors]]:
    """Iterate over rows in blocks of at most 64 MB. Yields the first row's number, and the block."""
    step = max(1, _BLOCK_BYTES // (4 * max(1, vectors.shape[1])))
    for start in range(0, len(vectors), step):
        yield start, np.asarray(vectors[start : start + step])


def near_pairs(vectors: Vectors, min_similarity: float, *, max_pairs: int = 10_000) -> tuple[list[Pair], int]:
    """Find pairs of near-duplicate rows by comparing all pairs, block by block."""
    if not -1 <= min_similarity <= 1:
        raise ConfigError(f"min_similarity: expected a cosine from -1 to 1, got {min_similarity}.")
    units = (vectors * inverse_norms(vectors)[:, None]).astype(np.float32)
    slack = 2 * 1.05 * (vectors.shape[1] + 16) * U32
    step = max(1, min(2048, _BLOCK_BYTES // (4 * max(1, len(units)))))
    pairs: list[tuple[float, int, int]] = []  # the cosine is negated, so that the most similar pair is first in order
    count = 0
    for start in range(0, len(units), step):
        product = units[start : start + step] @ units[start:].T
        first, second = np.nonzero(np.triu(product >= min_similarity - slack, k=1))
        for a in range(0, len(first), _PAIR_BLOCK):  # in a collapsed model every pair is a match
            i, j = start + first[a : a + _PAIR_BLOCK], start + second[a : a + _PAIR_BLOCK]
            x, y = normalize_rows(vectors[i]), normalize_rows(vectors[j])
            # From the difference of the unit vectors: exactly 1 for a copy, where a rounded product may not be.
            cosines = np.where(x.any(axis=1) & y.any(axis=1), 1 - np.square(x - y).sum(axis=1) / 2, 0.0)
            near = cosines >= min_similarity
            count += int(near.sum())
            pairs += zip((-cosines[near]).tolist(), i[near].tolist(), j[near].tolist(), strict=True)
            if len(pairs) > 2 * max_pairs:
                pairs = sorted(pairs)[:max_pairs]
    return [(i, j, -negative) for negative, i, j in sorted(pairs)[:max_pairs]], count
