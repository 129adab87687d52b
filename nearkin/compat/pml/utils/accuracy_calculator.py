"""AccuracyCalculator: the retrieval and clustering metrics of pytorch-metric-learning on our ranking."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.compat.pml.utils.inference import FaissKMeans, FaissKNN, default_device
from nearkin.errors import ConfigError, DataError
from nearkin.metrics import clustering
from nearkin.metrics.ranking import Ranking, rank
from nearkin.metrics.retrieval import mean_average_precision, precision, r_precision, reciprocal_rank

Floats = NDArray[np.float64]
_CLUSTERING = {"AMI": clustering.ami, "NMI": clustering.nmi}
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
        self._metrics = sorted({*_CLUSTERING, *_METRICS, *own})
        self._metrics = self._chosen(self.include, self.exclude)
        if self.avg_of_avgs and self.return_per_class:
            raise ValueError("avg_of_avgs and return_per_class are mutually exclusive")
        if self.k not in (None, "max_bin_count") and not (isinstance(self.k, int) and self.k > 0):
            raise ValueError("k must be an integer greater than 0, or None, or 'max_bin_count'")
        if self.label_comparison_fn is not None and _CLUSTERING.keys() & set(self._metrics):
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
        n = len(emb)
        if n != len(labels) or len(ref) != len(ref_labels):
            raise ValueError("embeddings and labels must have the same length")
        if ref_includes_query and not (torch.allclose(emb, ref[:n]) and torch.equal(labels, ref_labels[:n])):
            raise ValueError("With ref_includes_query=True the reference must begin with the queries and their labels.")
        metrics = self._chosen(include, exclude)
        own = [name for name in metrics if hasattr(self, _PREFIX + name)]
        data: dict[str, Any] = {"query": emb, "reference": ref, "query_labels": labels, "reference_labels": ref_labels}
        data["ref_includes_query"] = ref_includes_query
        results: dict[str, Any] = {}
        if set(metrics) - _CLUSTERING.keys():
            results = self._of_neighbours(metrics, own, data)
        if set(metrics) & _CLUSTERING.keys():
            data["cluster_labels"] = clusters = self.kmeans_func(emb, len(torch.unique(labels)))
            codes, found = (torch.as_tensor(x).flatten().cpu().numpy() for x in (labels, clusters))
            results |= {name: function(codes, found) for name, function in _CLUSTERING.items() if name in metrics}
        results |= {name: getattr(self, _PREFIX + name)(**data) for name in own}
        return {name: results[name] for name in metrics}

    def _of_neighbours(self, metrics: list[str], own: list[str], data: dict[str, Any]) -> dict[str, Any]:
        labels, ref_labels, with_self = data["query_labels"], data["reference_labels"], int(data["ref_includes_query"])
        if labels.dim() > 1 and self.label_comparison_fn is None:
            raise DataError("labels: expected one per row, or a label_comparison_fn.")
        matches = self.label_comparison_fn or torch.eq
        names, inverse = torch.unique(labels, dim=0, return_inverse=True)
        counts = torch.stack([matches(name[None], ref_labels).sum() for name in names])
        is_single = counts - matches(names, names).long() * with_self <= 0
        k, largest = len(ref_labels) - with_self, int(counts.max()) - with_self
        if isinstance(self.k, int):
            k = min(self.k, k)
            if self.k < largest and {"mean_average_precision_at_r", "r_precision"} & set(metrics):
                what = f"k={self.k} is less than the largest number of relevant items, {largest}"
                warnings.warn(f"Metrics at R: {what}. Set k='max_bin_count'.", stacklevel=3)
        elif self.k == "max_bin_count":
            k = largest
        if self.knn_func is None and self.label_comparison_fn is None and not own:
            ranking = _ranking(data)
        else:
            search = FaissKNN() if self.knn_func is None else self.knn_func
            distances, index = search(data["query"], k, data["reference"], bool(with_self))
            same = matches(labels[:, None], ref_labels[index])
            ranking = _of_hits(same.cpu().numpy(), (counts - with_self)[inverse].cpu().numpy())
            data |= {"knn_labels": ref_labels[index], "knn_distances": distances, "label_counts": (names, counts)}
            data |= {"lone_query_labels": names[is_single], "not_lone_query_mask": ~is_single[inverse]}
            data["label_comparison_fn"] = matches
        codes = np.where(is_single[inverse].cpu().numpy(), -1, inverse.cpu().numpy())
        values = {name: _METRICS[name](ranking, k) for name in metrics if name in _METRICS}
        return {name: self._average(x, codes, len(names)) for name, x in values.items()}

    def _average(self, values: Floats, codes: NDArray[np.int64], classes: int) -> Any:
        """Average the values of the queries, those of class -1 left out."""
        values, codes = values[codes >= 0], codes[codes >= 0]
        if not len(values):
            return [float("nan")] * classes if self.return_per_class else float("nan")
        if not (self.avg_of_avgs or self.return_per_class):
            return float(values.mean())
        _, index = np.unique(codes, return_inverse=True)
        means = np.bincount(index, values) / np.bincount(index)
        return means.tolist() if self.return_per_class else float(means.mean())


def _ranking(data: dict[str, Any]) -> Ranking:
    emb, labels, ref, ref_labels = (data[x] for x in ("query", "query_labels", "reference", "reference_labels"))
    both = torch.unique(torch.cat([labels, ref_labels]), return_inverse=True)[1].cpu().numpy()  # labels may be floats
    codes, ref_codes = both[: len(emb)], both[len(emb) :]
    groups: dict[str, Any] = {}
    if data["ref_includes_query"] and len(emb) == len(ref):
        return rank(emb, codes, similarity="euclidean", verbose=False)
    if data["ref_includes_query"]:  # one group each: a query excludes the reference with its own index
        groups = {"groups": np.arange(len(emb)), "gallery_groups": np.arange(len(ref))}
    return rank(emb, codes, ref, ref_codes, similarity="euclidean", verbose=False, **groups)


def _of_hits(same: Any, relevant: Any) -> Ranking:
    """Return the ranks of the relevant items among the neighbours [Q, k]; those beyond are one group at the end."""
    missing = np.maximum(relevant - same.sum(1), 0)
    query, above = np.nonzero(np.concatenate([same, missing[:, None] > 0], 1))
    size = np.where(above == same.shape[1], missing[query], 1)
    start = np.searchsorted(query, np.arange(len(same) + 1))
    return Ranking(start, above, size, size, same.shape[1] + missing, np.zeros_like(missing), np.zeros(1))


_METRICS: dict[str, Callable[[Ranking, int], Floats]] = {
    "mean_average_precision": lambda r, k: mean_average_precision(r, k, "R"),
    "mean_average_precision_at_r": lambda r, k: np.where(
        r.total <= k, mean_average_precision(r), mean_average_precision(r, k, "R")
    ),
    "mean_reciprocal_rank": reciprocal_rank,
    "precision_at_1": lambda r, k: precision(r, 1),
    "r_precision": lambda r, k: np.where(r.total <= k, r_precision(r), precision(r, k)),
}
