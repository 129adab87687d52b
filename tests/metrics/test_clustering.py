"""Clustering metrics against golden values and scikit-learn."""

import json

import numpy as np
import pytest
from helpers.oracle import clustered
from helpers.paths import GOLDEN
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import adjusted_mutual_info_score, normalized_mutual_info_score
from sklearn.metrics.cluster import pair_confusion_matrix

from nearkin.errors import ConfigError, DataError, MissingExtraError
from nearkin.metrics import score
from nearkin.metrics.clustering import ami, cluster_scores, nmi, pair_f1


def test_golden_values():
    g = json.loads(GOLDEN.read_text())["metrics"]
    labels, clusters, want = g["labels"], g["cluster_assignments"], g["clustering"]
    assert nmi(labels, clusters) == pytest.approx(want["NMI_arithmetic"], abs=1e-12)
    assert nmi(labels, clusters, "geometric") == pytest.approx(want["NMI_geometric"], abs=1e-12)
    assert pair_f1(labels, clusters) == pytest.approx(want["F1"], abs=1e-12)


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=30))
def test_agrees_with_scikit_learn(pairs):
    a, b = np.array(pairs).T
    assert nmi(a, b) == pytest.approx(normalized_mutual_info_score(a, b), abs=1e-9)
    geometric = normalized_mutual_info_score(a, b, average_method="geometric")
    assert nmi(a, b, "geometric") == pytest.approx(geometric, abs=1e-9)
    # Two partitions into singletons are equal; scikit-learn before 1.7 gave them 0.
    singletons = len(set(a)) == len(set(b)) == len(pairs)
    assert ami(a, b) == pytest.approx(1.0 if singletons else adjusted_mutual_info_score(a, b), abs=1e-7)
    (_, fp), (fn, tp) = pair_confusion_matrix(a, b)
    assert pair_f1(a, b) == pytest.approx(2 * tp / (2 * tp + fp + fn) if tp + fp + fn else 1.0, abs=1e-12)


def test_many_small_classes_with_string_labels():
    rng = np.random.default_rng(0)
    labels = np.arange(60_000) // 5
    assert abs(ami([f"c{c}" for c in labels], rng.permutation(labels))) < 0.01
    assert nmi(labels, rng.permutation(labels)) > 0.8  # the reason for AMI


def test_kmeans_finds_clear_clusters():
    x, labels = clustered(120, 16, samples_per_class=20, noise=0.05)
    result, again = cluster_scores(x, labels), cluster_scores(x, labels)
    np.testing.assert_array_equal(result.clusters, again.clusters)
    assert result.nmi > 0.8
    assert result.f1 == pair_f1(labels, result.clusters)
    assert cluster_scores(3 * x, labels, clusters=2).clusters.max() == 1


def test_invalid_input_raises():
    x, labels = clustered(12, 4, samples_per_class=3, noise=0.5)
    with pytest.raises(ConfigError, match="clusters: expected 1 to 12"):
        cluster_scores(x, labels, clusters=13)
    with pytest.raises(ConfigError, match="average"):
        nmi(labels, labels, "max")
    with pytest.raises(DataError, match="clusters: 11 labels for 12"):
        nmi(labels, labels[1:])
    with pytest.raises(ConfigError, match="no items"):
        nmi([], [])


def test_only_clustering_needs_scikit_learn(monkeypatch):
    x, labels = clustered(12, 4, samples_per_class=3, noise=0.5)

    def not_installed(name):
        raise ModuleNotFoundError(name=name.partition(".")[0])

    monkeypatch.setattr("nearkin.errors.importlib.import_module", not_installed)
    for function in (nmi, ami, pair_f1):
        with pytest.raises(MissingExtraError, match=r"nearkin\[bench\]"):
            function(labels, labels)
    with pytest.raises(MissingExtraError, match=r"nearkin\[bench\]"):
        cluster_scores(x, labels)
    assert score(x, labels, verbose=False)["R@1"] >= 0
