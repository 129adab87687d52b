"""Rankings and scores of embeddings on the second device are exactly those of the CPU, ties included."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.devices import DEVICE, random_batch, tied_batch

import nearkin as nk
from nearkin.errors import ConfigError
from nearkin.metrics import cluster_scores

BATCHES = {"no ties": random_batch(60, classes=5), "ties": tied_batch(), "large classes": random_batch(60, classes=2)}


@pytest.fixture(params=BATCHES)
def batch(request):
    return BATCHES[request.param]


@pytest.fixture(params=["cosine", "euclidean"])
def similarity(request):
    return request.param


def assert_same_ranking(actual: nk.Ranking, expected: nk.Ranking) -> None:
    for name in ("start", "above", "relevant", "size", "items", "codes"):
        np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name), err_msg=name)
    assert actual.notes == expected.notes


def assert_same_scores(actual: nk.Scores, expected: nk.Scores) -> None:
    assert list(actual) == list(expected)
    for name in expected:
        np.testing.assert_array_equal(actual.per_query[name], expected.per_query[name], err_msg=name)


def test_rank(batch, similarity):
    emb, labels = batch
    assert_same_ranking(
        nk.rank(emb.to(DEVICE), labels.to(DEVICE), similarity=similarity), nk.rank(emb, labels, similarity=similarity)
    )


def test_score_with_a_gallery_that_is_on_the_cpu(batch, similarity):
    emb, labels = batch
    expected = nk.score(emb[:20], labels[:20], emb[20:], labels[20:], similarity=similarity)
    for gallery in (emb[20:], emb[20:].to(DEVICE)):
        actual = nk.score(emb[:20].to(DEVICE), labels[:20], gallery, labels[20:], similarity=similarity)
        assert_same_scores(actual, expected)


def test_score_with_groups(batch, similarity):
    emb, labels = batch
    groups = torch.arange(len(emb)) % 3
    expected = nk.score(emb, labels, groups=groups, similarity=similarity)
    actual = nk.score(emb.to(DEVICE), labels.to(DEVICE), groups=groups.to(DEVICE), similarity=similarity)
    assert_same_scores(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_score_of_other_dtypes(dtype):
    emb, labels = random_batch(60, classes=5)
    assert_same_scores(nk.score(emb.to(dtype).to(DEVICE), labels), nk.score(emb.to(dtype), labels))


def test_neighbours(batch, similarity):
    emb, _ = batch
    expected, sims = nk.neighbours(emb, k=5, similarity=similarity)
    actual, device_sims = nk.neighbours(emb.to(DEVICE), k=5, similarity=similarity)
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_allclose(device_sims, sims, rtol=1e-9, atol=1e-7)


def test_the_vectors_may_exceed_the_memory():
    """A gallery matrix above half of the memory is computed block by block."""
    emb, labels = random_batch(200, dim=400, classes=40)
    assert_same_ranking(nk.rank(emb.to(DEVICE), labels, memory="1MB"), nk.rank(emb, labels))


def test_the_numba_backend_refuses_another_device():
    pytest.importorskip("numba")
    emb, labels = random_batch()
    if DEVICE.type == "mps":
        pytest.skip("vectors on MPS are ranked on the CPU")
    with pytest.raises(ConfigError, match="'numba' runs on the CPU"):
        nk.rank(emb.to(DEVICE), labels, backend="numba")


def test_clusters():
    pytest.importorskip("sklearn")
    emb, labels = random_batch(60, classes=5)
    expected = cluster_scores(emb, labels)
    actual = cluster_scores(emb.to(DEVICE), labels)
    np.testing.assert_array_equal(actual.clusters, expected.clusters)
