"""Clustering metrics: how well k-means on the embeddings recovers the classes.

NMI, AMI and pairwise F1 compare any two labelings through their contingency table.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin.errors import ConfigError, MissingExtraError
from nearkin.metrics._vectors import as_labels, as_matrix, check_similarity, encode, prepare

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


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
    joint, a, b = _contingency(labels, clusters)
    if len(joint[0]) == len(a) == len(b):
        return 1.0  # one cluster per class
    h, g = _entropy(a), _entropy(b)
    divisor = (h + g) / 2 if average == "arithmetic" else float(np.sqrt(h * g))
    return min(1.0, max(0.0, _information(joint, a, b) / divisor)) if divisor > 0 else 0.0


def ami(labels: Any, clusters: Any) -> float:
    """Compute the mutual information adjusted for chance (Vinh et al. 2010, arithmetic mean).

    Args:
        labels: [N] integers or strings.
        clusters: [N] integers or strings.

    Returns:
        1 for equal partitions, 0 on average for random ones.

    Example:
        >>> ami(["a", "a", "b", "b"], [1, 1, 0, 0])
        1.0
    """
    joint, a, b = _contingency(labels, clusters)
    if len(joint[0]) == len(a) == len(b):
        return 1.0  # one cluster per class
    expected = _expected_information(a, b)
    excess = _information(joint, a, b) - expected
    divisor = (_entropy(a) + _entropy(b)) / 2 - expected
    tiny = np.finfo(np.float64).eps
    return float(excess / (min(divisor, -tiny) if divisor < 0 else max(divisor, tiny)))


def pair_f1(labels: Any, clusters: Any) -> float:
    """Compute F1 over pairs of items: a pair in one cluster should be a pair of one class.

    Args:
        labels: [N] integers or strings.
        clusters: [N] integers or strings.

    Returns:
        A value in [0, 1].

    Example:
        >>> pair_f1([0, 0, 1, 1], [0, 0, 0, 1])
        0.4
    """
    joint, a, b = _contingency(labels, clusters)
    together = float((joint[2] * (joint[2] - 1)).sum())
    pairs = float((a * (a - 1)).sum() + (b * (b - 1)).sum())
    return 2 * together / pairs if pairs else 1.0


@dataclass(frozen=True)
class Clustering:
    """Agreement of k-means clusters with the classes.

    Attributes:
        nmi: Normalised mutual information.
        ami: Adjusted mutual information.
        f1: Pairwise F1.
        clusters: [N] cluster of each item.
        backend: Library that ran k-means.
    """

    nmi: float
    ami: float
    f1: float
    clusters: Ints
    backend: str


def cluster_scores(
    embeddings: Any,
    labels: Any,
    *,
    clusters: int | None = None,
    similarity: str = "cosine",
    seed: int = 0,
    tries: int = 3,
    backend: str = "auto",
) -> Clustering:
    """Run k-means and compare the clusters with the labels.

    The backends initialise differently, so compare only scores of the same one; the result records which it was.

    Args:
        embeddings: [N, D].
        labels: [N] integers or strings.
        clusters: Number of clusters; the number of classes when omitted.
        similarity: "cosine" clusters unit vectors, "euclidean" the raw ones.
        seed: Of the initialisation.
        tries: Number of initialisations; the best is used.
        backend: "faiss", "sklearn", or "auto" for the first that is installed.

    Returns:
        The scores and the clusters.
    """
    check_similarity(similarity)
    x = as_matrix(embeddings, "embeddings")
    names = as_labels(labels, len(x), "labels", "embeddings")
    codes, _, classes = encode(names, None, "labels")
    count = len(classes) if clusters is None else clusters
    if not 1 <= count <= len(x):
        raise ConfigError(f"clusters: expected 1 to {len(x)} (the number of items), got {count}.")
    vectors, _ = prepare(x, None, similarity)
    z = (vectors.x.double() * vectors.row_scale[:, None]).float().cpu().numpy()
    assigned, used = _kmeans(z, count, seed, tries, backend)
    return Clustering(nmi(codes, assigned), ami(codes, assigned), pair_f1(codes, assigned), assigned, used)


def _kmeans(z: NDArray[np.float32], count: int, seed: int, tries: int, backend: str) -> tuple[Ints, str]:
    if backend not in ("auto", "faiss", "sklearn"):
        raise ConfigError(f"backend: expected 'auto', 'faiss' or 'sklearn', got {backend!r}.")
    installed = [name for name in ("faiss", "sklearn") if importlib.util.find_spec(name)]
    chosen = next(iter(installed), None) if backend == "auto" else backend
    if chosen not in installed:
        extra = "stores" if backend == "faiss" else "bench"
        raise MissingExtraError(f"k-means needs faiss or scikit-learn. Run: pip install 'nearkin[{extra}]'")
    if chosen == "faiss":
        import faiss

        # Train on every item: by default faiss samples 256 items per cluster, and warns below 39.
        kmeans = faiss.Kmeans(
            z.shape[1], count, niter=30, nredo=tries, seed=seed + 1, min_points_per_centroid=1,
            max_points_per_centroid=len(z),
        )  # fmt: skip
        kmeans.train(z)
        return kmeans.index.search(z, 1)[1].ravel().astype(np.int64), chosen
    from sklearn.cluster import KMeans

    return KMeans(count, n_init=tries, random_state=seed).fit_predict(z).astype(np.int64), "sklearn"


# -------------------------------------------------------------------------------------------------- contingency table


def _contingency(labels: Any, clusters: Any) -> tuple[tuple[Ints, Ints, Ints], Ints, Ints]:
    """((row, column, count) of the non-empty cells, row sums, column sums)."""
    length = len(labels)
    first = as_labels(labels, length, "labels", "the data")
    second = as_labels(clusters, length, "clusters", "the data")
    if length == 0:
        raise ConfigError("labels: no items to compare.")
    _, row = np.unique(first, return_inverse=True)
    b, col = np.unique(second, return_inverse=True)
    cell, count = np.unique(row.astype(np.int64) * len(b) + col, return_counts=True)
    return (cell // len(b), cell % len(b), count), np.bincount(row), np.bincount(col)


def _entropy(counts: Ints) -> float:
    p = counts / counts.sum()
    return float(-(p * np.log(p)).sum()) if len(counts) > 1 else 0.0


def _information(joint: tuple[Ints, Ints, Ints], a: Ints, b: Ints) -> float:
    row, col, count = joint
    n = count.sum()
    return float((count / n * (np.log(count) + np.log(n) - np.log(a[row]) - np.log(b[col]))).sum())


def _expected_information(a: Ints, b: Ints) -> float:
    """Expected mutual information of random clusters of the same sizes.

    The overlap of a class of size s with a cluster of size t is hypergeometric. Equal sizes are computed once, which
    makes ten thousand small classes fast.
    """
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
