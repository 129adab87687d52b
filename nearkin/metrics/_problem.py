"""The validated ranking problem, its labels, its relevant items and the ties among them: shared by both backends."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.errors import ConfigError, DataError
from nearkin.metrics._vectors import Floats, Ints, VectorSet, as_matrix, comparable_distance, one_torch_thread, prepare

Progress = Callable[[float], None]


@dataclass(frozen=True)
class RankingProblem:
    """Validated input. Gallery positions are in class order, so that a class is a range of columns."""

    query: VectorSet  # query vectors
    gallery: VectorSet  # gallery vectors
    single_set: bool  # the query is the gallery; an item is never ranked for itself
    codes: Ints  # [Q] class of each query
    classes: NDArray[Any]  # [C] distinct labels
    order: Ints  # [G] gallery row at each position
    class_start: Ints  # [C + 1] first position of each class
    similarity: str  # "cosine" or "euclidean"
    groups: tuple[Ints, Ints] | None  # group of each query [Q] and of the item at each position [G]
    label_sets: Floats | None = None  # [C, T] 0 or 1: with several labels per item a class is a set of labels

    @cached_property
    def class_relevant(self) -> Ints:
        """[C] gallery items that are relevant to the queries of each class, if nothing is excluded."""
        size = np.diff(self.class_start)
        if self.label_sets is None:
            return size
        blocks = np.array_split(np.arange(len(size)), len(size) // 1024 + 1)
        return np.concatenate([self._classes_that_share(block) @ size for block in blocks])

    def _classes_that_share(self, code: Ints) -> NDArray[np.bool_]:
        """[n, C] which classes share a label with each of these."""
        assert self.label_sets is not None
        return self.label_sets[code] @ self.label_sets.T > 0

    @property
    def max_pairs(self) -> int:
        """An upper bound of the number of relevant pairs."""
        return int(self.class_relevant[self.codes].sum())

    def relevant_pairs(self, queries: Ints) -> tuple[Ints, Ints]:
        """Return (row, position) of every relevant item; `row` indexes into `queries`."""
        row, code = np.arange(len(queries)), self.codes[queries]
        if self.label_sets is not None:
            row, other = self._classes_that_share(code).nonzero()
            code = np.asarray(other)
        size = self.class_start[code + 1] - self.class_start[code]
        block = np.repeat(np.arange(len(code)), size)
        first = np.cumsum(size) - size
        position = np.arange(len(block)) - first[block] + self.class_start[code][block]
        row = row[block]
        keep = np.ones(len(row), dtype=bool)
        if self.single_set:
            keep &= self.order[position] != queries[row]
        if self.groups is not None:
            keep &= self.groups[1][position] != self.groups[0][queries][row]
        return row[keep], position[keep]


@dataclass(frozen=True)
class PartialRanking:
    """The tie groups of some queries, as counted by a backend. Arrays as in Ranking."""

    queries: Ints  # [n] queries
    counts: Ints  # [n] tie groups per query
    above: Ints  # [T] items strictly nearer than the group
    relevant: Ints  # [T] relevant items in the group
    size: Ints  # [T] items in the group


@dataclass(frozen=True)
class Thresholds:
    """Tie groups of relevant items, against which the other items are counted. Nearest first within a row."""

    counts: Ints  # [rows] groups per row
    key: Floats  # [T] key of the group
    sample: Ints  # [T] position of one relevant item of the group
    relevant: Ints  # [T] relevant items in the group

    def result(self, queries: Ints, above: Ints, tied: Ints) -> PartialRanking:
        """Return the ranking of the queries, given the counts of other items above and in each group."""
        above = above + hits_before(self.counts, self.relevant)
        return PartialRanking(queries, self.counts, above=above, relevant=self.relevant, size=self.relevant + tied)


@one_torch_thread()
def make_problem(
    query: Any, labels: Any, gallery: Any, gallery_labels: Any, similarity: str, groups: Any, gallery_groups: Any
) -> RankingProblem:
    """Validate the arguments of `nearkin.metrics.rank` and prepare the vectors."""
    if (gallery is None) != (gallery_labels is None):
        missing = "gallery labels are" if gallery_labels is None else "gallery is"
        raise ConfigError(f"rank: the {missing} missing. Use (emb, labels) or (query, labels, gallery, labels).")
    single_set = gallery is None
    name = "embeddings" if single_set else "query"
    q = as_matrix(query, name)
    q_labels = as_labels(labels, len(q), "labels" if single_set else "query labels", name, several=True)
    g, g_labels = None, None
    if not single_set:
        q, g = match_dtype_and_device(q, as_matrix(gallery, "gallery"))
        g_labels = as_labels(gallery_labels, len(g), "gallery labels", "gallery", several=True)
    sets = None
    if q_labels.ndim == 2 or (g_labels is not None and g_labels.ndim == 2):
        codes, g_codes, sets = encode_label_sets(q_labels, g_labels)
        classes = np.array([" ".join(map(str, np.flatnonzero(row))) for row in sets])
    else:
        codes, g_codes, classes = encode(q_labels, g_labels, "labels")
    pair = _encode_groups(groups, gallery_groups, len(q), None if g is None else len(g))
    q_vectors, g_vectors = prepare(q, g, similarity)
    size = np.bincount(g_codes, minlength=len(classes))
    order = np.argsort(g_codes, kind="stable")
    return RankingProblem(
        query=q_vectors,
        gallery=g_vectors,
        single_set=single_set,
        codes=codes,
        classes=classes,
        order=order,
        class_start=np.concatenate([[0], np.cumsum(size)]),
        similarity=similarity,
        groups=None if pair is None else (pair[0], pair[1][order]),
        label_sets=sets,
    )


def match_dtype_and_device(query: Tensor, gallery: Tensor) -> tuple[Tensor, Tensor]:
    """Put query and gallery on one device and in the wider of their two dtypes, which changes no value."""
    if query.shape[1] != gallery.shape[1]:
        raise DataError(
            f"gallery: {gallery.shape[1]} dimensions, but the query has {query.shape[1]}. Embed both with one model."
        )
    dtype = torch.promote_types(query.dtype, gallery.dtype)
    return query.to(dtype), gallery.to(device=query.device, dtype=dtype)


def _encode_groups(groups: Any, gallery_groups: Any, queries: int, items: int | None) -> tuple[Ints, Ints] | None:
    if groups is None and gallery_groups is None:
        return None
    if groups is None or (items is not None) != (gallery_groups is not None):
        fix = "give groups for one set, or both groups and gallery_groups for a query and a gallery."
        raise ConfigError(f"groups: {fix}")
    first = as_labels(groups, queries, "groups", "the query")
    second = None if items is None else as_labels(gallery_groups, items, "gallery_groups", "the gallery")
    return encode(first, second, "groups")[:2]


def parse_bytes(memory: str | int) -> int:
    """Parse a size such as "512MB", "1.5GB" or a number of bytes.

    Example:
        >>> parse_bytes("1GB")
        1000000000
    """
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "B": 1}
    text = str(memory).strip().upper()
    unit = next((u for u in units if text.endswith(u)), "")
    try:
        size = int(float(text.removesuffix(unit)) * units.get(unit, 1))
    except ValueError:
        raise ConfigError(f"memory: expected a size such as '512MB' or '2GB', got {memory!r}.") from None
    if size < 10**6:
        raise ConfigError(f"memory: expected at least 1MB, got {memory!r}.")
    return size


def sort_rows(row: Ints, value: Floats) -> Ints:
    """Order by row, then by value: `np.lexsort((value, row))`, several times as fast."""
    order = np.argsort(value)
    # NumPy sorts integers of 16 bits by radix.
    for shift in range(0, int(row.max(initial=0)).bit_length(), 16):
        digit = ((row[order] >> shift) & 0xFFFF).astype(np.uint16)
        order = order[np.argsort(digit, kind="stable")]
    return order


def order_by_distance(
    query: VectorSet, gallery: VectorSet, i: Ints, row: Ints, col: Ints, key: Floats, error_bound: Floats
) -> tuple[Ints, Ints, Floats]:
    """Order items (query i, gallery row col) by row, nearest first, comparing near-ties by their exact distance.

    Returns the order; then, in that order, the run of indistinguishable keys that an item belongs to and its exact
    distance (0 for items alone in their run). Ties share row, run and distance.
    """
    order = sort_rows(row, -key)
    r, k = row[order], key[order]
    close = (r[1:] == r[:-1]) & (k[:-1] - k[1:] <= 2 * error_bound[r[1:]])
    run = np.concatenate([[0], np.cumsum(~close)]) if len(r) else np.zeros(0, dtype=np.int64)
    distance = np.zeros(len(r))
    ambiguous = np.zeros(len(r), dtype=bool)
    ambiguous[1:] |= close
    ambiguous[:-1] |= close
    where = np.nonzero(ambiguous)[0]
    if len(where):
        index = order[where]
        exact = comparable_distance(query, gallery, i[index], col[index], key[index])
        resorted = sort_rows(run[where], exact)
        order[where], distance[where] = index[resorted], exact[resorted]
    return order, run, distance


def thresholds(
    problem: RankingProblem, queries: Ints, row: Ints, position: Ints, key: Floats, error_bound: Floats
) -> Thresholds:
    """Merge relevant items, from `RankingProblem.relevant_pairs` and with their keys, into tie groups."""
    order, run, distance = order_by_distance(
        problem.query, problem.gallery, queries[row], row, problem.order[position], key, error_bound
    )
    r = row[order]
    new = np.ones(len(r), dtype=bool)
    new[1:] = (run[1:] != run[:-1]) | (distance[1:] != distance[:-1])
    first = np.nonzero(new)[0]
    return Thresholds(
        counts=np.bincount(r[first], minlength=len(queries)),
        key=key[order][first],
        sample=position[order][first],
        relevant=np.diff(np.concatenate([first, [len(r)]])),
    )


def hits_before(counts: Ints, relevant: Ints) -> Ints:
    """[T] the relevant items in earlier groups of the same row, which are above as well."""
    ends = np.cumsum(relevant)
    start = np.concatenate([[0], ends])[np.cumsum(counts) - counts]
    return np.asarray(ends - relevant - np.repeat(start, counts))


def as_labels(values: Any, length: int, name: str, of: str, *, several: bool = False) -> NDArray[Any]:
    """Convert labels to a 1-D array of integers or strings, exact for integers of any size, or, if `several` are
    allowed, to bool [N, T]."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    labels = np.asarray(values)
    if labels.dtype.kind == "f" and isinstance(values, list | tuple) and all(isinstance(v, int) for v in values):
        labels = np.array(values, dtype=object)  # integers too large or too mixed for one machine type
    if labels.dtype == object:
        types = {type(v) for v in labels.ravel().tolist()}
        if types <= {str, np.str_}:
            labels = labels.astype(np.str_)
        elif all(issubclass(t, int | np.integer) for t in types):
            labels = np.array([int(v) for v in labels.ravel()], dtype=object).reshape(labels.shape)
        else:
            names = ", ".join(sorted(t.__name__ for t in types))
            raise DataError(f"{name}: expected integers or strings, got {names}.")
    elif labels.dtype.kind not in "iubUS":
        fix = "Convert them, for example labels.astype(int): large ids collide as floats."
        raise DataError(f"{name}: expected integers or strings, got {labels.dtype}. {fix}")
    if labels.dtype.kind == "S":  # some file formats store names as bytes; they must match the same names as text
        try:
            labels = np.char.decode(labels, "utf-8")
        except UnicodeDecodeError:
            raise DataError(f"{name}: byte strings that are not UTF-8. Decode them first.") from None
    if labels.ndim != 1 and not (several and labels.ndim == 2 and labels.dtype == bool):
        fix = " Several labels per row are bool [N, T]; for levels of a hierarchy use score_levels." if several else ""
        raise DataError(f"{name}: expected one label per row, [N]; got {labels.dtype} of shape {labels.shape}.{fix}")
    if len(labels) != length:
        raise DataError(f"{name}: {len(labels)} labels for {length} rows of {of}.")
    return labels


def encode(first: NDArray[Any], second: NDArray[Any] | None, name: str) -> tuple[Ints, Ints, NDArray[Any]]:
    """Encode one or two label arrays as indices into one array of distinct labels.

    Distinct labels are matched as Python objects: NumPy would join int64 and uint64 as float64 and confuse large ids.
    """
    names, codes = np.unique(first, return_inverse=True)
    codes = codes.astype(np.int64)
    if second is None:
        return codes, codes, names
    if (first.dtype.kind in "US") != (second.dtype.kind in "US"):
        raise DataError(
            f"{name}: the query has {first.dtype} labels and the gallery {second.dtype}; nothing can match."
        )
    others, other_codes = np.unique(second, return_inverse=True)
    index = {label: i for i, label in enumerate(names.tolist())}
    extra = [label for label in others.tolist() if label not in index]
    index |= {label: len(names) + i for i, label in enumerate(extra)}
    to_code = np.array([index[label] for label in others.tolist()], dtype=np.int64)
    distinct = list(index)
    joined = np.array(distinct) if isinstance(distinct[0], str | bytes) else np.array(distinct, dtype=object)
    if joined.dtype == object and all(-(2**63) <= int(v) < 2**63 for v in distinct):
        joined = joined.astype(np.int64)
    return codes, to_code[other_codes], joined


def encode_label_sets(first: NDArray[Any], second: NDArray[Any] | None) -> tuple[Ints, Ints, Floats]:
    """Encode one or two bool arrays [N, T] as indices into one array of distinct rows [C, T]."""
    second = first if second is None else second
    if first.shape[1:] != second.shape[1:]:
        raise DataError(f"labels: the query has shape {first.shape} and the gallery {second.shape}; nothing can match.")
    sets, codes = np.unique(np.concatenate([first, second]), axis=0, return_inverse=True)
    codes = codes.reshape(-1).astype(np.int64)  # NumPy 2.0 returns another shape
    return codes[: len(first)], codes[len(codes) - len(second) :], sets.astype(np.float32)
