"""AccuracyCalculator: the retrieval and clustering metrics of pytorch-metric-learning on our ranking."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.compat.pml.coverage import absent_names
from nearkin.compat.pml.utils.inference import FaissKMeans, FaissKNN, default_device
from nearkin.errors import ConfigError, DataError
from nearkin.metrics import clustering
from nearkin.metrics.ranking import Ranking, rank
from nearkin.metrics.retrieval import mean_average_precision, precision, r_precision, reciprocal_rank

__all__ = ["AccuracyCalculator"]
__getattr__ = absent_names("utils.accuracy_calculator")

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_CLUSTERING = ("AMI", "NMI")
_AT_R = ("mean_average_precision_at_r", "r_precision")
_PREFIX = "calculate_"


@dataclass(eq=False)
class AccuracyCalculator:
    """Computes metrics of embeddings. A subclass adds its own as methods `calculate_name(**kwargs)`."""

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    avg_of_avgs: bool = False
    return_per_class: bool = False
    k: int | str | None = None
    label_comparison_fn: Callable[[Tensor, Tensor], Tensor] | None = None
    device: torch.device | str | None = None
    knn_func: Any = None
    kmeans_func: Any = None

    def __post_init__(self) -> None:
        own = [name.removeprefix(_PREFIX) for name in dir(self) if name.startswith(_PREFIX)]
        self._metrics = sorted([*_CLUSTERING, *_METRICS, *own])
        self._metrics = self._chosen(self.include, self.exclude)
        if self.avg_of_avgs and self.return_per_class:
            raise ValueError("avg_of_avgs and return_per_class are mutually exclusive")
        if self.k not in (None, "max_bin_count") and not (isinstance(self.k, int) and self.k > 0):
            raise ValueError("k must be an integer greater than 0, or None, or 'max_bin_count'")
        if self.label_comparison_fn is not None and set(self._metrics) & set(_CLUSTERING):
            raise NotImplementedError("NMI and AMI cannot be combined with label_comparison_fn: exclude them.")
        self.device = default_device(self.device)
        self.kmeans_func = self.kmeans_func or FaissKMeans(niter=20)

    def get_curr_metrics(self) -> list[str]:
        """Return the names of the metrics that are computed."""
        return list(self._metrics)

    def description(self) -> str:
        """Return "avg_of_avgs", or "" if queries are averaged directly."""
        return "avg_of_avgs" if self.avg_of_avgs else ""

    def _chosen(self, include: Sequence[str], exclude: Sequence[str]) -> list[str]:
        for names in (include, exclude):
            if not isinstance(names, tuple | list):
                raise TypeError(f"Arguments must be of type tuple, not {type(names)}.")
            unknown = set(names) - set(self._metrics)
            if unknown:
                raise ConfigError(f"Unknown metrics {sorted(unknown)}. Available: {', '.join(self._metrics)}.")
        return [name for name in self._metrics if name in (include or self._metrics) and name not in exclude]

    def get_accuracy(
        self,
        query: Any,
        query_labels: Any,
        reference: Any = None,
        reference_labels: Any = None,
        ref_includes_query: bool = False,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Return {metric: value}. Without a reference each query is ranked against the others."""
        if reference is None:
            reference, reference_labels, ref_includes_query = query, query_labels, True
        emb, labels, ref, ref_labels = (
            torch.as_tensor(x).to(self.device) for x in (query, query_labels, reference, reference_labels)
        )
        emb, ref = emb.float(), ref.float()
        if len(emb) != len(labels) or len(ref) != len(ref_labels):
            raise ValueError("embeddings and labels must have the same length")
        if ref_includes_query and not (
            torch.allclose(emb, ref[: len(emb)]) and torch.equal(labels, ref_labels[: len(emb)])
        ):
            raise ValueError("With ref_includes_query=True the reference must begin with the queries and their labels.")
        metrics = self._chosen(include, exclude)
        own = [name for name in metrics if hasattr(self, _PREFIX + name)]
        data: dict[str, Any] = {"query": emb, "reference": ref, "query_labels": labels, "reference_labels": ref_labels}
        data["ref_includes_query"] = ref_includes_query
        results: dict[str, Any] = {}
        if set(metrics) - set(_CLUSTERING):
            results = self._of_neighbours(metrics, own, data)
        if set(metrics) & set(_CLUSTERING):
            clusters = self.kmeans_func(emb, len(torch.unique(labels)))
            codes, found = (torch.as_tensor(x).flatten().cpu().numpy() for x in (labels, clusters))
            data["cluster_labels"] = clusters
            results |= {"NMI": clustering.nmi(codes, found), "AMI": clustering.ami(codes, found)}
        results |= {name: getattr(self, _PREFIX + name)(**data) for name in own}
        return {name: results[name] for name in metrics}

    def _of_neighbours(self, metrics: list[str], own: list[str], data: dict[str, Any]) -> dict[str, Any]:
        labels, ref_labels = data["query_labels"], data["reference_labels"]
        with_self = int(data["ref_includes_query"])
        names, inverse, counts, is_single = self._label_counts(labels, ref_labels, with_self)
        relevant = (counts - with_self)[inverse].cpu().numpy()
        k = self._number_of_neighbours(int(counts.max()), len(ref_labels), with_self, metrics)
        if own or self.knn_func is not None or self.label_comparison_fn is not None:
            search = FaissKNN() if self.knn_func is None else self.knn_func
            distances, index = search(data["query"], k, data["reference"], bool(with_self))
            neighbours = ref_labels[index]
            same = self._same(labels[:, None], neighbours)
            ranking = _of_hits(same.cpu().numpy(), relevant)
            data |= {"knn_labels": neighbours, "knn_distances": distances, "label_counts": (names, counts)}
            data |= {"lone_query_labels": names[is_single], "not_lone_query_mask": ~is_single[inverse]}
            data["label_comparison_fn"] = self.label_comparison_fn or torch.eq
        else:
            ranking = _ranking(data)
        used = ~is_single[inverse].cpu().numpy()
        codes = inverse.cpu().numpy()[used]
        values = {name: _METRICS[name](ranking, k)[used] for name in metrics if name in _METRICS}
        return {name: self._average(x, codes, len(names)) for name, x in values.items()}

    def _same(self, a: Tensor, b: Tensor) -> Tensor:
        return a == b if self.label_comparison_fn is None else self.label_comparison_fn(a, b)

    def _label_counts(
        self, labels: Tensor, ref_labels: Tensor, with_self: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the distinct labels of the queries, which one each has, how many references match it, and whether a
        query with it has none.
        """
        if labels.dim() > 1 and self.label_comparison_fn is None:
            raise DataError("labels: expected one per row, or a label_comparison_fn.")
        names, inverse = torch.unique(labels, dim=0, return_inverse=True)
        if self.label_comparison_fn is None:
            ordered = ref_labels.sort().values
            counts = torch.searchsorted(ordered, names, right=True) - torch.searchsorted(ordered, names)
            return names, inverse, counts, counts <= with_self
        counts = torch.stack([self._same(name[None], ref_labels).sum() for name in names])
        matches_itself = self._same(names, names).long() if with_self else 0
        return names, inverse, counts, counts - matches_itself <= 0

    def _number_of_neighbours(self, largest: int, references: int, with_self: int, metrics: list[str]) -> int:
        if self.k == "max_bin_count":
            return largest - with_self
        if not isinstance(self.k, int):
            return references - with_self
        if self.k < largest - with_self and set(metrics) & set(_AT_R):
            warnings.warn(
                f"{', '.join(sorted(set(metrics) & set(_AT_R)))}: k={self.k} is less than the largest number of "
                f"relevant items, {largest - with_self}. Set k='max_bin_count'.",
                stacklevel=4,
            )
        return min(self.k, references - with_self)

    def _average(self, values: Floats, codes: Ints, classes: int) -> Any:
        if not len(values):
            return [float("nan")] * classes if self.return_per_class else float("nan")
        if not (self.avg_of_avgs or self.return_per_class):
            return float(values.mean())
        _, index = np.unique(codes, return_inverse=True)
        means = np.bincount(index, values) / np.bincount(index)
        return means.tolist() if self.return_per_class else float(means.mean())


def _ranking(data: dict[str, Any]) -> Ranking:
    emb, labels, ref, ref_labels = (data[x] for x in ("query", "query_labels", "reference", "reference_labels"))
    codes, ref_codes = _integers(labels, ref_labels)
    if not data["ref_includes_query"]:
        return rank(emb, codes, ref, ref_codes, similarity="euclidean", verbose=False)
    if len(emb) == len(ref):
        return rank(emb, codes, similarity="euclidean", verbose=False)
    rows = np.arange(len(ref))  # one group each: a query excludes the reference with its own index
    return rank(
        emb, codes, ref, ref_codes, similarity="euclidean", groups=rows[: len(emb)], gallery_groups=rows, verbose=False
    )


def _integers(labels: Tensor, ref_labels: Tensor) -> tuple[Ints, Ints]:
    """Number the labels, which may be floats."""
    codes = torch.unique(torch.cat([labels, ref_labels]), return_inverse=True)[1].cpu().numpy()
    return codes[: len(labels)], codes[len(labels) :]


def _of_hits(same: Any, relevant: Ints) -> Ranking:
    """Return the ranks of the relevant items among the neighbours [Q, k]; those beyond are one group at the end."""
    missing = np.maximum(relevant - same.sum(1), 0)
    query, above = np.nonzero(np.concatenate([same, missing[:, None] > 0], 1))
    is_group = above == same.shape[1]
    size = np.where(is_group, missing[query], 1)
    start = np.searchsorted(query, np.arange(len(same) + 1))
    return Ranking(start, above, size, size, same.shape[1] + missing, np.zeros_like(missing), np.zeros(1))


def _within(r: Ranking, k: int, of_all: Floats, of_first: Floats) -> Floats:
    """Choose the value at R, the number of relevant items, or at k if that is less."""
    return np.where(r.total <= k, of_all, of_first)


_METRICS: dict[str, Callable[[Ranking, int], Floats]] = {
    "mean_average_precision": lambda r, k: mean_average_precision(r, k, "R"),
    "mean_average_precision_at_r": lambda r, k: _within(
        r, k, mean_average_precision(r), mean_average_precision(r, k, "R")
    ),
    "mean_reciprocal_rank": reciprocal_rank,
    "precision_at_1": lambda r, k: precision(r, 1),
    "r_precision": lambda r, k: _within(r, k, r_precision(r), precision(r, k)),
}
