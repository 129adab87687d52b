"""What both counting paths share: the checked input, its relevant items, and ties among those."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.errors import ConfigError, DataError
from nearkin.metrics._vectors import (
    Floats,
    Ints,
    Points,
    as_labels,
    as_matrix,
    check_similarity,
    encode,
    exact_distance,
    prepare,
)

Progress = Callable[[float], None]


@dataclass(frozen=True)
class RankingProblem:
    """Checked input. Gallery positions are in class order, so that a class is a range of columns."""

    query: Points
    gallery: Points
    alone: bool  # the query is the gallery
    codes: Ints  # [Q] class of each query
    classes: NDArray[Any]
    order: Ints  # [G] gallery row at each position
    class_start: Ints  # [C + 1] first position of each class
    similarity: str
    group: Ints | None  # [Q] group of each query
    order_group: Ints | None  # [G] group of the item at each position

    @property
    def pairs(self) -> int:
        """How many relevant pairs there are, at most."""
        return int(np.diff(self.class_start)[self.codes].sum())

    def relevant(self, queries: Ints) -> tuple[Ints, Ints]:
        """(row, position) of every relevant item of the given queries; row counts within `queries`."""
        code = self.codes[queries]
        size = self.class_start[code + 1] - self.class_start[code]
        row = np.repeat(np.arange(len(queries)), size)
        first = np.cumsum(size) - size
        position = np.arange(len(row)) - first[row] + self.class_start[code][row]
        keep = np.ones(len(row), dtype=bool)
        if self.alone:
            keep &= self.order[position] != queries[row]
        if self.group is not None and self.order_group is not None:
            keep &= self.order_group[position] != self.group[queries][row]
        return row[keep], position[keep]


@dataclass(frozen=True)
class Part:
    """Groups of some queries: the result of a path, before it is put in order. Arrays as in Ranking."""

    queries: Ints
    counts: Ints  # groups per query
    above: Ints
    relevant: Ints
    size: Ints


@dataclass(frozen=True)
class Thresholds:
    """The tie groups of relevant items, which the other items are counted against. Nearest first within a row."""

    counts: Ints  # [rows] groups per row
    key: Floats  # [T] key of the group
    sample: Ints  # [T] position of one relevant item of the group
    relevant: Ints  # [T] relevant items in the group


def make_problem(
    query: Any, labels: Any, gallery: Any, g_labels: Any, similarity: str, groups: Any, g_groups: Any
) -> RankingProblem:
    check_similarity(similarity)
    if (gallery is None) != (g_labels is None):
        missing = "gallery labels" if g_labels is None else "gallery"
        raise ConfigError(f"rank: the {missing} are missing. Use (emb, labels) or (query, labels, gallery, labels).")
    alone = gallery is None
    q = as_matrix(query, "embeddings" if alone else "query")
    q_labels = as_labels(labels, len(q), "labels" if alone else "query labels", "embeddings" if alone else "query")
    g, g_names = None, None
    if not alone:
        q, g = same_space(q, as_matrix(gallery, "gallery"))
        g_names = as_labels(g_labels, len(g), "gallery labels", "gallery")
    codes, g_codes, classes = encode(q_labels, g_names, "labels")
    group, g_group = _groups(groups, g_groups, len(q), None if g is None else len(g))
    left, right = prepare(q, g, similarity)
    size = np.bincount(g_codes, minlength=len(classes))
    order = np.lexsort((np.arange(len(g_codes)), g_codes))
    start = np.concatenate([[0], np.cumsum(size)])
    return RankingProblem(
        query=left,
        gallery=right,
        alone=alone,
        codes=codes,
        classes=classes,
        order=order,
        class_start=start,
        similarity=similarity,
        group=group,
        order_group=None if g_group is None else g_group[order],
    )


def same_space(q: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Query and gallery on one device and in the wider of their two types, which changes no value."""
    if q.shape[1] != g.shape[1]:
        raise DataError(f"gallery: vectors of {g.shape[1]} numbers, but the query's have {q.shape[1]}.")
    dtype = torch.promote_types(q.dtype, g.dtype)
    return q.to(dtype), g.to(device=q.device, dtype=dtype)


def _groups(groups: Any, g_groups: Any, n: int, g: int | None) -> tuple[Ints | None, Ints | None]:
    if groups is None and g_groups is None:
        return None, None
    if groups is None or (g is not None) != (g_groups is not None):
        raise ConfigError("groups: give groups for one set, or both groups and g_groups for a query and a gallery.")
    first = as_labels(groups, n, "groups", "the query")
    second = None if g is None else as_labels(g_groups, g, "g_groups", "the gallery")
    ours, theirs, _ = encode(first, second, "groups")
    return ours, theirs


def as_bytes(memory: str | int) -> int:
    """Bytes of "512MB", "1.5GB" or a number.

    >>> as_bytes("1GB")
    1000000000
    """
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "B": 1}
    text = str(memory).strip().upper()
    for unit, factor in units.items():
        if text.endswith(unit):
            text, size = text[: -len(unit)], factor
            break
    else:
        size = 1
    try:
        found = int(float(text) * size)
    except ValueError:
        raise ConfigError(f"memory: expected a size such as '512MB' or '2GB', got {memory!r}.") from None
    if found < 10**6:
        raise ConfigError(f"memory: at least 1MB is needed, got {memory!r}.")
    return found


# ------------------------------------------------------------------------------------------------------------- ties


def order_by_distance(
    query: Points, gallery: Points, i: Ints, row: Ints, col: Ints, key: Floats, slack: Floats
) -> tuple[Ints, Ints, Floats]:
    """Order items by row, nearest first, so that only true ties are left.

    i is the query of each item, col its row in the gallery. Returns the order, and in that order the run of keys too
    close to tell apart and the exact distance inside such runs (0 elsewhere). Ties share row, run and distance.
    """
    order = np.lexsort((-key, row))
    r, k = row[order], key[order]
    close = (r[1:] == r[:-1]) & (k[:-1] - k[1:] <= 2 * slack[r[1:]])
    run = np.concatenate([[0], np.cumsum(~close)]) if len(r) else np.zeros(0, dtype=np.int64)
    distance = np.zeros(len(r))
    doubt = np.zeros(len(r), dtype=bool)
    doubt[1:] |= close
    doubt[:-1] |= close
    where = np.nonzero(doubt)[0]
    if len(where):
        at = order[where]
        distance[where] = exact_distance(query, gallery, i[at], col[at])
        again = np.lexsort((distance, run))
        order, run, distance = order[again], run[again], distance[again]
    unsorted_run, unsorted_distance = np.empty_like(run), np.empty_like(distance)
    unsorted_run[order], unsorted_distance[order] = run, distance
    return order, unsorted_run, unsorted_distance


def thresholds(
    task: RankingProblem, queries: Ints, row: Ints, position: Ints, key: Floats, slack: Floats
) -> Thresholds:
    """Gather relevant items (as listed by Task.relevant, with their keys) into tie groups, nearest first."""
    order, run, distance = order_by_distance(
        task.query, task.gallery, queries[row], row, task.order[position], key, slack
    )
    r, n, d = row[order], run[order], distance[order]
    new = np.ones(len(r), dtype=bool)
    new[1:] = (r[1:] != r[:-1]) | (n[1:] != n[:-1]) | (d[1:] != d[:-1])
    first = np.nonzero(new)[0]
    return Thresholds(
        counts=np.bincount(r[first], minlength=len(queries)),
        key=key[order][first],
        sample=position[order][first],
        relevant=np.diff(np.concatenate([first, [len(r)]])),
    )


def before(t: Thresholds) -> Ints:
    """Relevant items in earlier groups of the same row: they stand above too."""
    ends = np.cumsum(t.relevant)
    first = np.cumsum(t.counts) - t.counts
    start = np.concatenate([[0], ends])[first]
    return np.asarray(ends - t.relevant - np.repeat(start, t.counts))
