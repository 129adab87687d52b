"""The HNSW graph: its measured recall holds, it is saved, and exact search works without faiss."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from helpers.indexing import names, random_index

import nearkin as nk
from nearkin.errors import ConfigError, UserError

pytest.importorskip("faiss", reason="faiss is not installed (nearkin[stores])")
Index = nk.Index


def test_recall_is_as_measured_and_the_graph_is_saved(tmp_path):
    # Imported as by pytorch-metric-learning: it replaces `search` of every faiss index by one with fewer arguments.
    pytest.importorskip("faiss.contrib.torch_utils", reason="faiss is not installed (nearkin[stores])")
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(1000, 16)).astype(np.float32)
    index = Index(vectors, names(1000))
    stats = index.build_graph()
    queries = rng.normal(size=(50, 16)).astype(np.float32)
    truth, _ = index.search_many(queries, 10)

    def recall(index: nk.Index) -> float:
        found = [{hit.row for hit in index.search(query, 10)} for query in queries]
        return float(np.mean([len(f & set(t)) / 10 for f, t in zip(found, truth.tolist(), strict=True)]))

    assert stats.recall >= 0.99
    assert stats.recall_low <= stats.recall <= stats.recall_high
    assert recall(index) >= 0.97
    assert [hit.row for hit in index.search(queries[0], 10, exact=True)] == truth[0].tolist()
    assert index.search_item("item 5", 3)[0].id != "item 5"
    with pytest.raises(ConfigError, match="expected an integer of at least 1"):
        index.search(queries[0], 2.5)
    index.save(tmp_path / "index")
    again = Index.load(tmp_path / "index")
    assert again.graph is not None
    assert again.graph.stats == stats
    assert recall(again) == recall(index)
    again.remove(["item 1"])
    assert again.graph is None  # it still contains the removed item


def test_exact_search_of_an_index_with_a_graph_needs_no_faiss(tmp_path, monkeypatch):
    index = random_index(50)
    index.build_graph()
    index.save(tmp_path / "index")
    monkeypatch.setitem(sys.modules, "faiss", None)
    again = Index.load(tmp_path / "index")
    assert again.search_item("item 1", exact=True) == index.search_item("item 1", exact=True)
    again.save(tmp_path / "copy")  # with the graph
    with pytest.raises(UserError, match=r"pip install 'nearkin\[stores\]'"):
        again.search_item("item 1")
    monkeypatch.undo()
    assert Index.load(tmp_path / "copy").search_item("item 1") == index.search_item("item 1")


@pytest.mark.slow
def test_recall_for_classes_that_are_not_in_the_index():
    """With clustered items, recall measured on stored items alone would overestimate the recall between clusters."""
    rng = np.random.default_rng(0)
    centres = np.repeat(rng.normal(size=(300, 64)), 10, axis=0)
    index = Index(centres + 0.5 * rng.normal(size=centres.shape), names(3000))
    stats = index.build_graph()
    queries = rng.normal(size=(100, 64)).astype(np.float32)  # other classes
    truth, _ = index.search_many(queries, 10)
    found = [{hit.row for hit in index.search(query)} for query in queries]
    assert np.mean([len(f & set(t)) for f, t in zip(found, truth.tolist(), strict=True)]) >= 9.8
    assert min(stats.recall, stats.random_recall) >= 0.99
    assert "% for random queries" in str(stats)
