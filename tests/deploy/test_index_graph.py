"""The graph for approximate search: what it promises holds, it is kept, and exact search does without faiss."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from helpers.indexing import names, random_index

import nearkin as nk
from nearkin.errors import ConfigError, UserError

pytest.importorskip("faiss", reason="faiss is not installed (nearkin[graph])")
Index = nk.Index


def test_the_graph_finds_nearly_all_and_is_kept(tmp_path):
    # As pytorch-metric-learning does: it puts another `search`, with fewer arguments, into every index of this process.
    pytest.importorskip("faiss.contrib.torch_utils", reason="faiss is not installed (nearkin[graph])")
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(1000, 16)).astype(np.float32)
    index = Index(vectors, names(1000))
    facts = index.make_graph()
    queries = rng.normal(size=(50, 16)).astype(np.float32)
    truth, _ = index.search_many(queries, 10)

    def recall(graph: nk.Index) -> float:
        found = [{hit.row for hit in graph.search(query, 10)} for query in queries]
        return float(np.mean([len(f & set(t)) / 10 for f, t in zip(found, truth.tolist(), strict=True)]))

    assert facts.recall >= 0.99
    assert facts.low <= facts.recall <= facts.high
    assert recall(index) >= 0.97
    assert [hit.row for hit in index.search(queries[0], 10, exact=True)] == truth[0].tolist()
    assert index.search_item("item 5", 3)[0].id != "item 5"
    with pytest.raises(ConfigError, match="expected a whole number from 1"):
        index.search(queries[0], 2.5)
    index.save(tmp_path / "index")
    again = Index.load(tmp_path / "index")
    assert again.graph is not None
    assert again.graph.facts == facts
    assert recall(again) == recall(index)
    again.remove(["item 1"])
    assert again.graph is None  # it would find what is gone


def test_an_index_with_a_graph_is_searched_exactly_without_faiss(tmp_path, monkeypatch):
    index = random_index(50)
    index.make_graph()
    index.save(tmp_path / "index")
    monkeypatch.setitem(sys.modules, "faiss", None)
    again = Index.load(tmp_path / "index")
    assert again.search_item("item 1", exact=True) == index.search_item("item 1", exact=True)
    again.save(tmp_path / "copy")  # the graph with it
    with pytest.raises(UserError, match=r"pip install 'nearkin\[graph\]'"):
        again.search_item("item 1")
    monkeypatch.undo()
    assert Index.load(tmp_path / "copy").search_item("item 1") == index.search_item("item 1")


def test_the_graph_finds_nearly_all_also_for_kinds_that_are_not_in_it():
    """Items in clumps: a graph that is only asked for what is in them is thought better than it is between them."""
    rng = np.random.default_rng(0)
    kinds = np.repeat(rng.normal(size=(300, 64)), 10, axis=0)
    index = Index(kinds + 0.5 * rng.normal(size=kinds.shape), names(3000))
    facts = index.make_graph()
    queries = rng.normal(size=(100, 64)).astype(np.float32)  # other kinds
    truth, _ = index.search_many(queries, 10)
    found = [{hit.row for hit in index.search(query)} for query in queries]
    assert np.mean([len(f & set(t)) for f, t in zip(found, truth.tolist(), strict=True)]) >= 9.8
    assert min(facts.recall, facts.unlike) >= 0.99
    assert "for queries unlike any item" in str(facts)
