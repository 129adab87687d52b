"""Hard classes, confused pairs of classes, hard queries and hubs, from Scores and neighbours; duplicate images."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin.errors import ConfigError, DataError
from nearkin.metrics._problem import Progress, as_labels, encode, parse_bytes
from nearkin.metrics._vectors import as_matrix, identical_rows
from nearkin.metrics.bootstrap import mean
from nearkin.metrics.scores import Scores
from nearkin.ops.geometry import unit

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class ClassRow:
    """Scores of one class."""

    label: Any
    queries: int
    means: dict[str, float]  # mean of each metric over them


def class_table(scores: Scores, names: tuple[str, ...] = ("R@1", "MAP@R")) -> list[ClassRow]:
    """Compute the means of each class.

    Args:
        scores: Scores of all queries.
        names: Metrics; the first one sorts the table.

    Returns:
        One row per class, hardest first, then by label; classes whose queries the metric excludes come last.
    """
    if not names:
        raise ConfigError("names: expected at least one metric, for example ('R@1',).")
    rows = []
    order = np.argsort(scores.codes, kind="stable")
    for code, members in enumerate(np.split(order, np.cumsum(np.bincount(scores.codes))[:-1])):
        means = {name: mean(scores.per_query[name][members]) for name in names}
        rows.append(ClassRow(scores.classes[code : code + 1].tolist()[0], len(members), means))
    return sorted(rows, key=lambda row: (np.isnan(row.means[names[0]]), row.means[names[0]]))


@dataclass(frozen=True)
class Confusion:
    """Two confused classes."""

    label: Any  # class of the queries
    taken_for: Any  # class of their nearest item
    count: int  # number of such queries
    share: float  # their fraction of the queries of `label`


def confused_pairs(
    neighbours: Any, labels: Any, gallery_labels: Any = None, *, top: int | None = 20
) -> list[Confusion]:
    """Find pairs of classes where the nearest item of a query is of another class.

    Args:
        neighbours: [Q, k] gallery indices, nearest first, from `nearkin.metrics.neighbours`; only the first is used.
        labels: [Q] labels of the queries.
        gallery_labels: [G]; those of the queries when omitted.
        top: Maximum number of pairs; None for all.

    Returns:
        The pairs, most frequent first.

    Example:
        >>> confused_pairs([[1], [0], [1]], ["cat", "dog", "cat"])[0]
        Confusion(label='cat', taken_for='dog', count=2, share=1.0)
    """
    index, codes, gallery_codes, classes = _encode(neighbours, labels, gallery_labels)
    predicted = gallery_codes[index[:, 0]]
    wrong = predicted != codes
    pair, count = np.unique(codes[wrong] * len(classes) + predicted[wrong], return_counts=True)
    order = np.lexsort((pair, -count))[:top]
    size, names = np.bincount(codes, minlength=len(classes)), classes.tolist()
    found = [(*divmod(int(pair[i]), len(classes)), int(count[i])) for i in order]
    return [Confusion(names[a], names[b], n, n / int(size[a])) for a, b, n in found]


@dataclass(frozen=True)
class Hub:
    """An item that is a neighbour of many queries."""

    item: int  # gallery index
    lists: int  # number of neighbour lists that contain it
    wrong: int  # how many of those belong to queries of another class


def hubs(neighbours: Any, labels: Any, gallery_labels: Any = None, *, top: int | None = 20) -> list[Hub]:
    """Find the gallery items that are neighbours of the most queries.

    Args:
        neighbours: [Q, k] gallery indices.
        labels: [Q] labels of the queries.
        gallery_labels: [G]; those of the queries when omitted.
        top: Maximum number of items; None for all.

    Returns:
        The items, most frequent first.
    """
    index, codes, gallery_codes, _ = _encode(neighbours, labels, gallery_labels)
    count = np.bincount(index.ravel(), minlength=len(gallery_codes))
    wrong = np.bincount(index[gallery_codes[index] != codes[:, None]], minlength=len(gallery_codes))
    order = np.lexsort((np.arange(len(count)), -wrong, -count))[:top]
    return [Hub(int(j), int(count[j]), int(wrong[j])) for j in order if count[j]]


def hubness(neighbours: Any, items: int) -> float:
    """Compute the skewness of how often an item is a neighbour.

    Args:
        neighbours: [Q, k] gallery indices.
        items: Number of gallery items.

    Returns:
        About 0 for an even distribution; above 1 a few items dominate the lists.
    """
    index = _as_indices(neighbours, items)
    count = np.bincount(index.ravel(), minlength=items).astype(np.float64)
    std = count.std()
    return float((((count - count.mean()) / std) ** 3).mean()) if std > 0 else 0.0


def hardest(scores: Scores, name: str = "MAP@R", *, top: int = 20) -> Ints:
    """Find the queries with the lowest values. Equal values are ordered by the rank of their first relevant item.

    Args:
        scores: Scores of all queries.
        name: The metric.
        top: Maximum number of queries.

    Returns:
        Indices of the queries, hardest first; queries that the metric excludes (NaN) are left out.
    """
    values, first = scores.per_query[name], scores.per_query["MRR"]
    order = np.lexsort((np.arange(len(values)), first, values))
    return np.asarray(order[~np.isnan(values[order])][:top])


def _as_indices(neighbours: Any, items: int) -> Ints:
    index = np.asarray(neighbours)
    if index.ndim != 2 or index.dtype.kind not in "iu":
        raise ConfigError(f"neighbours: expected integer indices [Q, k], got {index.dtype} of shape {index.shape}.")
    if index.size and not 0 <= index.min() <= index.max() < items:
        raise ConfigError(f"neighbours: expected indices of {items} items, got {index.min()} to {index.max()}.")
    return index.astype(np.int64)


def _encode(neighbours: Any, labels: Any, gallery_labels: Any) -> tuple[Ints, Ints, Ints, NDArray[Any]]:
    """Indices [Q, k], codes of the queries [Q] and of the gallery [G], and the classes."""
    query = as_labels(labels, len(neighbours), "labels", "neighbours")
    given = gallery_labels is not None
    gallery = as_labels(gallery_labels, len(gallery_labels), "gallery labels", "gallery") if given else None
    codes, gallery_codes, classes = encode(query, gallery, "labels")
    return _as_indices(neighbours, len(gallery_codes)), codes, gallery_codes, classes


_CHUNK = 8192  # pairs converted to float64 at a time


@dataclass(frozen=True)
class Duplicate:
    """Two identical or nearly identical rows."""

    first: int
    second: int  # row, larger than `first`
    similarity: float  # cosine
    exact: bool  # equal in every dimension
    same_label: bool


def find_duplicates(
    emb: Any,
    labels: Any,
    *,
    threshold: float = 0.96,
    max_pairs: int = 10_000,
    memory: str | int = "1GB",
    progress: Progress | None = None,
) -> list[Duplicate]:
    """Find all pairs of rows at least as similar as the threshold.

    Use features of a network that was not trained on these classes: training pulls the images of a class together
    until they look like duplicates. On ImageNet features of CUB, 0.96 finds the duplicates and no two photos of the
    same bird.

    Args:
        emb: [N, D] features.
        labels: [N] integers or strings.
        threshold: Minimum cosine.
        max_pairs: Raise an error beyond this number of pairs: the threshold then means "same class", not "same image".
        memory: Maximum extra memory, for example "1GB".
        progress: Called with the fraction done.

    Returns:
        The pairs, those with different labels first, then by descending similarity.
    """
    if not -1 <= threshold <= 1:
        raise ConfigError(f"threshold: expected a cosine from -1 to 1, got {threshold}.")
    x = as_matrix(emb, "embeddings")
    codes, _, _ = encode(as_labels(labels, len(x), "labels", "embeddings"), None, "labels")
    unit_x = unit(x.float())
    (row_id,) = identical_rows([x], [torch.zeros(len(x), dtype=torch.bool)])
    step = max(1, min(2048, parse_bytes(memory) // (8 * len(x))))
    duplicates: list[Duplicate] = []
    for a in range(0, len(x), step):
        sim = unit_x[a : a + step] @ unit_x[a:].T
        # The margin covers the float32 error; candidates are recomputed in float64.
        candidates = torch.nonzero((sim >= threshold - 1e-5).triu_(1)) + a
        for pairs in torch.split(candidates, _CHUNK):
            left, right = (unit(x[pairs[:, side]].double()) for side in (0, 1))
            cosine = (left * right).sum(1).clamp(-1, 1)
            for i, j, s in zip(*pairs.T.tolist(), cosine.tolist(), strict=True):
                exact = bool(row_id[i] == row_id[j]) and s != 0
                if exact or s >= threshold:
                    duplicates.append(Duplicate(i, j, 1.0 if exact else s, exact, bool(codes[i] == codes[j])))
            if len(duplicates) > max_pairs:
                raise DataError(
                    f"threshold: more than {max_pairs:,} pairs are as similar as {threshold}. Raise it, or use "
                    "features of a network that was not trained on these classes."
                )
        if progress:
            progress(min(1.0, (a + step) / len(x)))
    return sorted(duplicates, key=lambda d: (d.same_label, -d.similarity, d.first, d.second))
