"""Approximate search in large indexes by an HNSW graph (Malkov and Yashunin 2018, with faiss) of measured recall."""

import math
import threading
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from nearkin.deploy.index import search
from nearkin.deploy.index.search import Floats, Ints, Vectors, exclude_row, normalize_rows
from nearkin.errors import ConfigError, DataError, import_extra
from nearkin.metrics.bootstrap import bootstrap, percentiles
from nearkin.metrics.ranking import neighbours

LINKS = 32  # per item
NEIGHBOURS = 10  # of which the recall is measured
NUM_QUERIES = 200  # of each type
MAX_EF_SEARCH = 1024


@dataclass(frozen=True)
class GraphStats:
    m: int  # links per item (faiss: M)
    ef_search: int  # candidates examined per query (faiss: efSearch)
    recall: float  # recall@k with stored items as queries; an item does not count as its own neighbour
    recall_low: float  # lower end of the 95 % interval of the recall
    recall_high: float  # upper end
    k: int  # neighbours per query
    num_queries: int  # queries of each type, stored and random
    random_recall: float  # recall@k with random queries unlike any item. Clustered items make these harder

    def __str__(self) -> str:
        return (
            f"recall@{self.k} {100 * self.recall:.2f} % (95 % interval {100 * self.recall_low:.2f} to "
            f"{100 * self.recall_high:.2f}, {self.num_queries:,} stored items as queries, compared with exact search); "
            f"{100 * self.random_recall:.2f} % for random queries"
        )


class HNSWGraph:
    def __init__(self, graph: Any, stats: GraphStats) -> None:
        self._graph, self.stats = graph, stats
        self._lock = threading.Lock()

    @classmethod
    def build(cls, vectors: Vectors, *, recall: float = 0.99) -> Self:
        """Build a graph, then double `ef_search` until both recalls reach the target (or it reaches 1024)."""
        faiss = import_extra("faiss", extra="stores")
        if len(vectors) < 2:
            raise ConfigError("graph: needs at least two items.")
        graph = faiss.IndexHNSWFlat(vectors.shape[1], LINKS, faiss.METRIC_INNER_PRODUCT)
        for _, block in search.blocks(vectors):
            graph.add((block * search.inverse_norms(block)[:, None]).astype(np.float32))
        k = min(NEIGHBOURS, len(vectors) - 1)
        rows = np.random.default_rng(0).choice(len(vectors), min(NUM_QUERIES, len(vectors)), replace=False)
        # Any graph finds a stored item itself, so it is excluded from its own neighbours.
        queries = [(np.asarray(vectors[row]), row) for row in rows.tolist()]
        queries += [(query, -1) for query in _random_queries(vectors, len(rows))]
        exact = neighbours(np.stack([query for query, _ in queries]), vectors, k + 1)
        truth = [exclude_row(row, *result)[1][:k] for (_, row), *result in zip(queries, *exact, strict=True)]
        for ef_search in (32, 64, 128, 256, 512, MAX_EF_SEARCH):
            candidate = cls(graph, GraphStats(LINKS, ef_search, 0.0, 0.0, 0.0, k, len(rows), 0.0))
            results = [exclude_row(row, *candidate.search(query, vectors, k + 1)) for query, row in queries]
            pairs = zip((cosines[:k] for _, cosines in results), truth, strict=True)
            # An item as near as the k-th true neighbour counts as found.
            recalls = np.array([(found >= exact_k[-1] - 1e-12).sum() / len(exact_k) for found, exact_k in pairs])
            stored, random_recall = recalls[: len(rows)], float(recalls[len(rows) :].mean())
            if min(float(stored.mean()), random_recall) >= recall:
                break
        low, high = percentiles(bootstrap(stored[None], np.arange(len(stored)))[:, 0], 0.95)
        return cls(graph, GraphStats(LINKS, ef_search, float(stored.mean()), low, high, k, len(rows), random_recall))

    def search(self, query: Vectors, items: Vectors, k: int) -> tuple[Ints, Floats]:
        """Find the nearest items that the graph reaches, ranked exactly."""
        norm = math.sqrt(float(np.square(query, dtype=np.float64).sum()))
        unit = (query / np.float32(norm or 1.0)).astype(np.float32)
        ef_search = max(2 * k, self.stats.ef_search)
        # Set on the graph under a lock instead of passed to `search`: importing faiss.contrib.torch_utils, as
        # pytorch-metric-learning does, replaces that method by one without the argument.
        with self._lock:
            graph = self._load()
            graph.hnsw.efSearch = ef_search
            _, found = graph.search(unit[None], min(ef_search, len(items)))
        candidates = np.unique(found[0][found[0] >= 0]).astype(np.int64)
        return search.nearest_among(query, items, candidates, min(k, len(items)))

    def to_bytes(self) -> bytes:
        if isinstance(self._graph, bytes):
            return self._graph
        serialized: NDArray[np.uint8] = import_extra("faiss", extra="stores").serialize_index(self._graph)
        return serialized.tobytes()

    def _load(self) -> Any:
        if isinstance(self._graph, bytes):
            faiss = import_extra("faiss", extra="stores")
            try:
                self._graph = faiss.deserialize_index(np.frombuffer(self._graph, np.uint8))
            except RuntimeError as error:
                raise DataError(
                    f"graph: the installed faiss cannot read it ({str(error).splitlines()[0]}). Use exact search."
                ) from None
        return self._graph


def _random_queries(vectors: Vectors, count: int) -> Vectors:
    """Sample queries from a normal distribution with mean and covariance of (a sample of) the items."""
    rng = np.random.default_rng(1)
    units = normalize_rows(vectors[rng.choice(len(vectors), min(2000, len(vectors)), replace=False)])
    mean = units.mean(axis=0)
    queries = mean + rng.normal(size=(count, len(units))) @ (units - mean) / math.sqrt(len(units))
    return np.asarray(queries, np.float32)
