"""Clustering metrics: how well k-means on the embeddings recovers the classes. They need scikit-learn."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from nearkin.errors import ConfigError, import_extra
from nearkin.metrics._problem import as_labels, encode
from nearkin.metrics._vectors import Ints, as_matrix, prepare


def nmi(labels: Any, clusters: Any, average: str = "arithmetic") -> float:
    """Compute the normalised mutual information of two labelings.

    Two partitions without any information (one class, one cluster) count as equal.

    Args:
        labels: [N] integers or strings.
        clusters: [N] integers or strings.
        average: Mean of the entropies to divide by: "arithmetic" or "geometric".

    Returns:
        A value in [0, 1]; 1 for equal partitions.

    Example:
        >>> nmi(["a", "a", "b", "b"], [1, 1, 0, 0])
        1.0
    """
    if average not in ("arithmetic", "geometric"):
        raise ConfigError(f"average: expected 'arithmetic' or 'geometric', got {average!r}.")
    metrics = import_extra("sklearn.metrics", extra="bench")
    return float(metrics.normalized_mutual_info_score(*_partitions(labels, clusters), average_method=average))


def ami(labels: Any, clusters: Any) -> float:
    """Compute the mutual information adjusted for chance (Vinh et al. 2010, arithmetic mean).

    Args:
        labels: [N] integers or strings.
        clusters: [N] integers or strings.

    Returns:
        1 for equal partitions, 0 on average for random ones.
    """
    information_score = import_extra("sklearn.metrics", extra="bench").mutual_info_score
    entropy = import_extra("scipy.stats", extra="bench").entropy
    first, second = _partitions(labels, clusters)
    a, b = np.bincount(first), np.bincount(second)
    if len(a) == len(b) == len(np.unique(first * len(b) + second)):
        return 1.0  # one cluster per class
    information = information_score(first, second)
    expected = _expected_information(a, b)
    divisor = (entropy(a) + entropy(b)) / 2 - expected
    tiny = np.finfo(np.float64).eps
    return float((information - expected) / (min(divisor, -tiny) if divisor < 0 else max(divisor, tiny)))


def pair_f1(labels: Any, clusters: Any) -> float:
    """Compute F1 over pairs of items: a pair in one cluster should be a pair of one class.

    Args:
        labels: [N] integers or strings.
        clusters: [N] integers or strings.

    Returns:
        A value in [0, 1].
    """
    cluster = import_extra("sklearn.metrics.cluster", extra="bench")
    (_, wrong), (missed, right) = cluster.pair_confusion_matrix(*_partitions(labels, clusters)).tolist()
    return 2 * right / (2 * right + wrong + missed) if right + wrong + missed else 1.0


@dataclass(frozen=True)
class Clustering:
    """Agreement of k-means clusters with the classes.

    Attributes:
        nmi: Normalised mutual information.
        ami: Adjusted mutual information.
        f1: Pairwise F1.
        clusters: [N] cluster of each item.
    """

    nmi: float
    ami: float
    f1: float
    clusters: Ints


def cluster_scores(
    embeddings: Any, labels: Any, *, clusters: int | None = None, similarity: str = "cosine", seed: int = 0
) -> Clustering:
    """Run k-means and compare the clusters with the labels.

    Args:
        embeddings: [N, D].
        labels: [N] integers or strings.
        clusters: Number of clusters; the number of classes when omitted.
        similarity: "cosine" clusters unit vectors, "euclidean" the raw ones.
        seed: Of the three initialisations, of which the best is used.

    Returns:
        The scores and the clusters.
    """
    x = as_matrix(embeddings, "embeddings")
    codes, _, classes = encode(as_labels(labels, len(x), "labels", "embeddings"), None, "labels")
    count = len(classes) if clusters is None else clusters
    if not 1 <= count <= len(x):
        raise ConfigError(f"clusters: expected 1 to {len(x)} (the number of items), got {count}.")
    vectors, _ = prepare(x, None, similarity)
    z = (vectors.x.double() * vectors.row_scale[:, None]).float().cpu().numpy()
    kmeans = import_extra("sklearn.cluster", extra="bench").KMeans(count, n_init=3, random_state=seed)
    assigned = kmeans.fit_predict(z).astype(np.int64)
    return Clustering(nmi(codes, assigned), ami(codes, assigned), pair_f1(codes, assigned), assigned)


def _partitions(labels: Any, clusters: Any) -> list[Ints]:
    """Two labelings as integers."""
    if len(labels) == 0:
        raise ConfigError("labels: no items to compare.")
    first = as_labels(labels, len(labels), "labels", "the data")
    second = as_labels(clusters, len(labels), "clusters", "the data")
    return [np.unique(names, return_inverse=True)[1] for names in (first, second)]


def _expected_information(a: Ints, b: Ints) -> float:
    """Expected mutual information of random clusters of the same sizes."""
    # Ours, because scikit-learn visits every pair of class and cluster, 10^8 for the ten thousand classes of SOP; here
    # equal sizes are computed once. The overlap of a class of size s with a cluster of size t is hypergeometric.
    n = int(a.sum())
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])
    total = 0.0
    for s, classes in zip(*np.unique(a, return_counts=True), strict=True):
        for t, groups in zip(*np.unique(b, return_counts=True), strict=True):
            k = np.arange(max(1, s + t - n), min(s, t) + 1)
            prob = np.exp(
                log_factorial[s] + log_factorial[t] + log_factorial[n - s] + log_factorial[n - t] - log_factorial[n]
                - log_factorial[k] - log_factorial[s - k] - log_factorial[t - k] - log_factorial[n - s - t + k]
            )  # fmt: skip
            total += classes * groups * float((k / n * (np.log(n * k) - np.log(s * t)) * prob).sum())
    return total
