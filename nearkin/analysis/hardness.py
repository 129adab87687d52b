"""What is hard: classes, pairs of classes, single queries, and items that turn up everywhere.

Small functions over Scores and lists of neighbours, used by the report and free to use alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin.errors import ConfigError
from nearkin.metrics._vectors import as_labels, encode
from nearkin.metrics.bootstrap import mean
from nearkin.metrics.scores import Scores

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class ClassRow:
    label: Any
    queries: int
    means: dict[str, float]


def class_table(scores: Scores, names: tuple[str, ...] = ("R@1", "MAP@R")) -> list[ClassRow]:
    """Means of each class, hardest first by the first metric, then by label.

    >>> from nearkin import score
    >>> rows = class_table(score([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]], ["a", "a", "b", "b"]))
    >>> [(row.label, row.queries, row.means["R@1"]) for row in rows]
    [('a', 2, 1.0), ('b', 2, 1.0)]
    """
    if not names:
        raise ConfigError("names: expected at least one metric, for example ('R@1',).")
    rows = []
    order = np.argsort(scores.codes, kind="stable")
    for code, members in enumerate(np.split(order, np.cumsum(np.bincount(scores.codes))[:-1])):
        means = {name: mean(scores.per_query[name][members]) for name in names}
        rows.append(ClassRow(scores.classes[code : code + 1].tolist()[0], len(members), means))
    # NaN (no query of the class counts) goes last.
    return sorted(rows, key=lambda row: (np.isnan(row.means[names[0]]), row.means[names[0]]))


@dataclass(frozen=True)
class Confusion:
    label: Any
    taken_for: Any
    count: int
    share: float  # of the queries of `label`


def confused_pairs(
    neighbours: Any, labels: Any, gallery_labels: Any = None, *, top: int | None = 20
) -> list[Confusion]:
    """Pairs of classes where the nearest item of a query is of another class, most frequent first.

    neighbours: [Q, k] gallery indices, nearest first (from `nearkin.metrics.neighbours`); only the first is used.

    >>> confused_pairs([[1], [0], [1]], ["cat", "dog", "cat"])[0]
    Confusion(label='cat', taken_for='dog', count=2, share=1.0)
    """
    nearest = _indices(neighbours)[:, 0]
    ours, theirs, classes = _codes(labels, gallery_labels, len(nearest))
    _check_range(nearest, len(theirs))
    found = theirs[nearest]
    wrong = found != ours
    pair, count = np.unique(ours[wrong] * len(classes) + found[wrong], return_counts=True)
    order = np.lexsort((pair, -count))[:top]
    size = np.bincount(ours, minlength=len(classes))
    names = classes.tolist()
    out = []
    for p, c in zip(pair[order].tolist(), count[order].tolist(), strict=True):
        a, b = divmod(p, len(classes))
        out.append(Confusion(names[a], names[b], c, c / int(size[a])))
    return out


@dataclass(frozen=True)
class Hub:
    item: int
    lists: int  # lists of neighbours it is in
    wrong: int  # of those, lists of queries of another class


def hubs(neighbours: Any, labels: Any, gallery_labels: Any = None, *, top: int | None = 20) -> list[Hub]:
    """Gallery items that are among the neighbours of the most queries, most frequent first.

    >>> hubs([[1], [0], [1]], ["cat", "dog", "cat"])[0]
    Hub(item=1, lists=2, wrong=2)
    """
    index = _indices(neighbours)
    ours, theirs, _ = _codes(labels, gallery_labels, len(index))
    _check_range(index, len(theirs))
    count = np.bincount(index.ravel(), minlength=len(theirs))
    wrong = np.bincount(index[theirs[index] != ours[:, None]], minlength=len(theirs))
    order = np.lexsort((np.arange(len(count)), -wrong, -count))[:top]
    return [Hub(int(j), int(count[j]), int(wrong[j])) for j in order if count[j]]


def hubness(neighbours: Any, items: int) -> float:
    """Skewness of how often an item is a neighbour: about 0 is even, above 1 a few items crowd the lists.

    >>> hubness([[1], [2], [0]], items=3)
    0.0
    """
    index = _indices(neighbours)
    _check_range(index, items)
    count = np.bincount(index.ravel(), minlength=items).astype(np.float64)
    spread = count.std()
    return float((((count - count.mean()) / spread) ** 3).mean()) if spread > 0 else 0.0


def hardest(scores: Scores, name: str = "MAP@R", *, top: int = 20) -> Ints:
    """Indices of the queries with the lowest values, those equal by the place of their first relevant item, then index.

    Queries that the metric leaves out (NaN) are not listed.
    """
    values, first = scores.per_query[name], scores.per_query["MRR"]
    order = np.lexsort((np.arange(len(values)), first, values))
    return np.asarray(order[~np.isnan(values[order])][:top])


def _indices(neighbours: Any) -> Ints:
    index = np.asarray(neighbours)
    if index.ndim != 2 or index.dtype.kind not in "iu":
        raise ConfigError(f"neighbours: expected integer indices [Q, k], got {index.dtype} of shape {index.shape}.")
    return index.astype(np.int64)


def _check_range(index: Ints, items: int) -> None:
    if index.size and not 0 <= index.min() <= index.max() < items:
        raise ConfigError(f"neighbours: expected indices of {items} items, got {index.min()} to {index.max()}.")


def _codes(labels: Any, gallery_labels: Any, queries: int) -> tuple[Ints, Ints, NDArray[Any]]:
    ours = as_labels(labels, queries, "labels", "neighbours")
    other = (
        None if gallery_labels is None else as_labels(gallery_labels, len(gallery_labels), "gallery labels", "gallery")
    )
    return encode(ours, other, "labels")
