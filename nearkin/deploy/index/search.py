"""The nearest items of a query, exactly; and, past a size, by a graph whose recall is measured.

`nearest` gives what `nk.neighbours` gives, ties included, so that search and score cannot disagree. For
few queries it first multiplies in float32, straight from the memory-mapped file, and hands over only the items that
the error bound of that product cannot rule out.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin.errors import ConfigError, DataError, import_extra
from nearkin.metrics._vectors import U32, ZERO_NORM
from nearkin.metrics.bootstrap import bootstrap, percentiles
from nearkin.metrics.ranking import neighbours

Vectors = NDArray[np.float32]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Label = str | int | None

LONGEST = 1e15  # of a vector; beyond it float32 sums could overflow
_FEW = 32  # queries up to which a shortlist per query is faster than one product with all
_BLOCK_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Hit:
    """One neighbour: the item's id and label, its cosine similarity to the query, and its row in the index, if any."""

    id: str
    label: Label
    similarity: float
    row: int = -1


def as_array(values: Any) -> NDArray[Any]:
    """An array, a tensor or lists as an array; numpy has no bfloat16, so half-precision tensors become float32."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = (values.float() if values.is_floating_point() and values.element_size() < 4 else values).numpy()
    return np.asarray(values)


def check_k(k: Any) -> None:
    if not isinstance(k, int | np.integer) or k < 1:
        raise ConfigError(f"k: expected a whole number from 1, got {k!r}.")


def check_vectors(values: Any, dim: int | None, what: str) -> Vectors:
    """Finite float32 rows [N, D] of the right width, or a DataError that says why not."""
    try:
        given = as_array(values)
        if given.dtype.kind not in "fiu":
            raise ValueError(f"numbers are needed, got {given.dtype}")
        vectors = np.ascontiguousarray(given, np.float32)
    except (TypeError, ValueError) as error:
        raise DataError(f"{what}: cannot be read as vectors ({error}).") from None
    if vectors.ndim != 2:
        raise DataError(f"{what}: expected one row per item, [N, D]; got shape {list(vectors.shape)}.")
    if dim is not None and vectors.shape[1] != dim:
        raise DataError(f"{what}: vectors of {vectors.shape[1]} numbers, the index holds vectors of {dim}.")
    if vectors.shape[1] == 0:
        raise DataError(f"{what}: vectors without numbers, shape {list(vectors.shape)}.")
    for start, block in blocks(vectors):
        lengths = np.sqrt(np.square(block, dtype=np.float64).sum(axis=1))
        bad = np.flatnonzero(~(lengths <= LONGEST))  # NaN is not
        if len(bad):
            kind = f"a length above {LONGEST:g}" if np.isfinite(block[bad[0]]).all() else "NaN or infinity"
            raise DataError(f"{what}: {kind} in row {start + int(bad[0])}. Nothing can be near it; leave it out.")
    return vectors


def inverse_lengths(vectors: Vectors) -> Vectors:
    """[N] the factor that makes each row a unit vector; 0 for a row that counts as zero, as in ranking."""
    factors = np.empty(len(vectors), np.float32)
    for start, block in blocks(vectors):
        lengths = np.sqrt(np.square(block, dtype=np.float64).sum(axis=1))
        with np.errstate(divide="ignore"):
            factors[start : start + len(block)] = np.where(lengths > ZERO_NORM, 1 / lengths, 0)
    return factors


def unit_rows(vectors: Vectors | Floats) -> Floats:
    """The rows scaled to length 1 in float64; a row that counts as zero stays 0."""
    lengths = np.sqrt(np.square(vectors, dtype=np.float64).sum(axis=1, keepdims=True))
    known = lengths > ZERO_NORM
    return np.asarray(np.where(known, vectors / np.where(known, lengths, 1.0), 0.0))


def nearest(queries: Vectors, items: Vectors, k: int, factors: Vectors | None = None) -> tuple[Ints, Floats]:
    """Rows and cosines [Q, min(k, N)] of the nearest items, nearest first, ties in the order of the rows.

    factors: `inverse_lengths(items)` where the caller keeps them.
    """
    check_k(k)
    most = min(int(k), len(items))
    if most == 0 or len(queries) == 0:
        return np.empty((len(queries), most), np.int64), np.empty((len(queries), most))
    if len(queries) > _FEW:
        return neighbours(queries, items, most)
    factors = inverse_lengths(items) if factors is None else factors
    found = [among(query, items, _shortlist(query, items, most, factors), most) for query in queries]
    return np.stack([rows for rows, _ in found]), np.stack([cosines for _, cosines in found])


def among(query: Vectors, items: Vectors, candidates: Ints, k: int) -> tuple[Ints, Floats]:
    """The nearest of some candidates (rows in rising order): rows and cosines [k]."""
    rows, cosines = neighbours(query[None], np.asarray(items[candidates]), min(k, len(candidates)))
    return candidates[rows[0]], cosines[0]


def without(own: int, rows: Ints, cosines: Floats) -> tuple[Ints, Floats]:
    """One answer less the item that asked; it is left out by its row, so that a duplicate never takes its place."""
    keep = rows != own
    return rows[keep], cosines[keep]


def _shortlist(query: Vectors, items: Vectors, k: int, factors: Vectors) -> Ints:
    """Rows, in rising order, that may be among the k nearest, ties included."""
    length = math.sqrt(float(np.square(query, dtype=np.float64).sum()))
    unit = (query / np.float32(length) if length > ZERO_NORM else np.zeros_like(query)).astype(np.float32)
    cosines = np.empty(len(items), np.float32)
    for start, block in blocks(items):
        np.matmul(block, unit, out=cosines[start : start + len(block)])
    cosines *= factors
    last = np.partition(cosines, len(cosines) - k)[len(cosines) - k]
    # Each of the two compared cosines is off by at most this, whatever the order of its sum.
    error = 1.05 * (items.shape[1] + 16) * U32
    return np.flatnonzero(cosines >= last - np.float32(2.1 * error))


def blocks(vectors: Vectors) -> Iterator[tuple[int, Vectors]]:
    """The rows some tens of megabytes at a time, each block with the number of its first row."""
    step = max(1, _BLOCK_BYTES // (4 * max(1, vectors.shape[1])))
    for start in range(0, len(vectors), step):
        yield start, np.asarray(vectors[start : start + step])


# --- pairs that are nearly the same ----------------------------------------------------------------------------------


def near_pairs(vectors: Vectors, at_least: float, *, most: int = 10_000) -> tuple[list[tuple[int, int, float]], int]:
    """Pairs of rows (i < j, cosine) with a cosine of at least `at_least`, nearest first; and how many there are.

    Every pair is compared, block by block. At most `most` pairs are returned, the nearest.
    """
    if not -1 <= at_least <= 1:
        raise ConfigError(f"at_least: expected a cosine from -1 to 1, got {at_least}.")
    units = (vectors * inverse_lengths(vectors)[:, None]).astype(np.float32)
    slack = 2 * 1.05 * (vectors.shape[1] + 16) * U32
    step = max(1, min(2048, _BLOCK_BYTES // (4 * max(1, len(units)))))
    kept: list[tuple[int, int, float]] = []
    count = 0
    for start in range(0, len(units), step):
        product = units[start : start + step] @ units[start:].T
        first, second = np.nonzero(np.triu(product >= at_least - slack, k=1))
        for a in range(0, len(first), 65_536):  # a collapsed model has as many pairs as there are
            i, j = start + first[a : a + 65_536], start + second[a : a + 65_536]
            cosines = _pair_cosines(vectors, i, j)
            near = cosines >= at_least
            count += int(near.sum())
            kept += zip(i[near].tolist(), j[near].tolist(), cosines[near].tolist(), strict=True)
            if len(kept) > 2 * most:
                kept = sorted(kept, key=_nearest_first)[:most]
    return sorted(kept, key=_nearest_first)[:most], count


def _nearest_first(pair: tuple[int, int, float]) -> tuple[float, int, int]:
    return -pair[2], pair[0], pair[1]


def _pair_cosines(vectors: Vectors, i: Ints, j: Ints) -> Floats:
    one, other = unit_rows(vectors[i]), unit_rows(vectors[j])
    # From the difference of the unit vectors: exactly 1 for a copy, where a rounded product may miss it.
    return np.where(one.any(axis=1) & other.any(axis=1), 1 - np.square(one - other).sum(axis=1) / 2, 0.0)


# --- the graph for large indexes -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GraphFacts:
    """How a graph was made, and what share of the true k nearest it finds.

    recall: for stored items, which are not among what they must find. unlike: for queries of no stored kind, which a
    graph of items in clumps finds harder; None in an index that was made before it was measured.
    """

    links: int
    effort: int  # candidates looked at per query (faiss: efSearch)
    recall: float
    low: float  # 95 % interval of the recall
    high: float
    k: int
    queries: int  # of each sort
    unlike: float | None = None

    def __str__(self) -> str:
        unlike = "" if self.unlike is None else f"; {100 * self.unlike:.2f} % for queries unlike any item"
        return (
            f"recall@{self.k} {100 * self.recall:.2f} % (95 % interval {100 * self.low:.2f} to {100 * self.high:.2f}, "
            f"{self.queries:,} stored items as queries, against exact search){unlike}"
        )


class Graph:
    """A hierarchical small-world graph (Malkov and Yashunin 2018) by faiss over the unit vectors."""

    def __init__(self, graph: Any, facts: GraphFacts) -> None:
        """graph: a faiss index, or its bytes, which are read when it is first searched: exact search needs no faiss."""
        self._graph, self.facts = graph, facts
        self._one_at_a_time = threading.Lock()

    @classmethod
    def build(cls, vectors: Vectors, *, links: int = 32, recall: float = 0.99, k: int = 10, sample: int = 200) -> Graph:
        """Build the graph, then raise its effort until both measured recalls are reached (or 1024 candidates)."""
        faiss = import_extra("faiss", extra="graph")
        if len(vectors) < 2:
            raise ConfigError("graph: at least two items are needed.")
        graph = faiss.IndexHNSWFlat(vectors.shape[1], links, faiss.METRIC_INNER_PRODUCT)
        factors = inverse_lengths(vectors)
        for start, block in blocks(vectors):
            graph.add((block * factors[start : start + len(block), None]).astype(np.float32))
        k = min(k, len(vectors) - 1)
        rows = np.random.default_rng(0).choice(len(vectors), min(sample, len(vectors)), replace=False)
        # An item finds itself in any graph. It is left out, as in `nearest` of an item.
        asked = [(np.asarray(vectors[row]), row) for row in rows.tolist()]
        asked += [(query, -1) for query in _unlike(vectors, len(rows))]
        exact = neighbours(np.stack([query for query, _ in asked]), vectors, k + 1)
        truth = [without(own, *found)[1][:k] for (_, own), *found in zip(asked, *exact, strict=True)]
        effort = 16
        while True:
            effort *= 2
            made = cls(graph, GraphFacts(links, effort, 0.0, 0.0, 0.0, k, len(rows)))
            answers = [without(own, *made.search(query, vectors, k + 1)) for query, own in asked]
            shares = np.array([_share(answer, cosines) for answer, cosines in zip(answers, truth, strict=True)])
            stored, unlike = shares[: len(rows)], float(shares[len(rows) :].mean())
            if min(float(stored.mean()), unlike) >= recall or effort >= 1024:
                break
        low, high = percentiles(bootstrap(stored[None], np.arange(len(stored)))[:, 0], 0.95)
        return cls(graph, replace(made.facts, recall=float(stored.mean()), low=low, high=high, unlike=unlike))

    def search(self, query: Vectors, items: Vectors, k: int) -> tuple[Ints, Floats]:
        """Like `nearest` for one query, among what the graph finds; those are put in exact order."""
        length = math.sqrt(float(np.square(query, dtype=np.float64).sum()))
        unit = (query / np.float32(length or 1.0)).astype(np.float32)
        effort = max(2 * k, self.facts.effort)
        # Set on the graph, one search at a time: as an argument it is unknown to the `search` that faiss indexes get
        # once anything, such as pytorch-metric-learning, has imported faiss.contrib.torch_utils.
        with self._one_at_a_time:
            graph = self._opened()
            graph.hnsw.efSearch = effort
            _, found = graph.search(unit[None], min(effort, len(items)))
        candidates = np.unique(found[0][found[0] >= 0]).astype(np.int64)
        return among(query, items, candidates, min(k, len(items)))

    def to_bytes(self) -> bytes:
        if isinstance(self._graph, bytes):
            return self._graph
        serialized: NDArray[np.uint8] = import_extra("faiss", extra="graph").serialize_index(self._graph)
        return serialized.tobytes()

    def _opened(self) -> Any:
        if isinstance(self._graph, bytes):
            faiss = import_extra("faiss", extra="graph")
            try:
                self._graph = faiss.deserialize_index(np.frombuffer(self._graph, np.uint8))
            except RuntimeError as error:
                raise DataError(f"the graph cannot be read by this faiss ({str(error).splitlines()[0]}).") from None
        return self._graph


def _unlike(vectors: Vectors, count: int) -> Vectors:
    """Queries of no stored kind: normal draws with the mean and the spread that (a sample of) the items have."""
    rng = np.random.default_rng(1)
    units = unit_rows(vectors[rng.choice(len(vectors), min(2000, len(vectors)), replace=False)])
    mean = units.mean(axis=0)
    drawn = mean + rng.normal(size=(count, len(units))) @ (units - mean) / math.sqrt(len(units))
    return np.asarray(drawn, np.float32)


def _share(found: tuple[Ints, Floats], truth: Floats) -> float:
    """The share of the true k nearest that was found; an item as near as the last of them counts as one of them."""
    return float((found[1][: len(truth)] >= truth[-1] - 1e-12).sum() / len(truth))
