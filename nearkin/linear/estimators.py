"""Whitenings as scikit-learn estimators, and what all linear metrics share: a fitted map x -> weight @ x + bias."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.errors import import_extra
from nearkin.metrics.scores import score
from nearkin.ops.whitening import covariance_whitening, within_class_whitening

import_extra("sklearn", extra="bench")
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin  # noqa: E402
from sklearn.metrics import pairwise_distances  # noqa: E402
from sklearn.utils.multiclass import check_classification_targets  # noqa: E402
from sklearn.utils.validation import check_is_fitted, validate_data  # noqa: E402

FLOATS = [np.float64, np.float32]


# scikit-learn's own bases: they are its contract (get_params, clone, pipelines, set_output), not ours.
class LinearMetric(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """A fitted linear map: `transform`, `distance`, `score`, and the map itself as tensors `weight` and `bias`.

    After fit: weight_ [dim, F] and bias_ [dim] as arrays, n_features_in_. Euclidean distances after `transform` are
    the learned distances; the squared ones are (x - y)^T A (x - y) with A = `matrix`.
    """

    weight_: NDArray[Any]
    bias_: NDArray[Any]

    def transform(self, X: Any) -> NDArray[Any]:
        """Samples [N, F] in the learned space [N, dim], float32 if they are, else float64."""
        check_is_fitted(self, "weight_")
        x = validate_data(self, X, reset=False, dtype=FLOATS)
        mapped: NDArray[Any] = x @ self.weight_.T.astype(x.dtype, copy=False) + self.bias_.astype(x.dtype, copy=False)
        return mapped

    def distance(self, X: Any, Y: Any = None) -> NDArray[np.float64]:
        """Learned distances (not squared) between the rows of X and of Y [N, M], or among those of X."""
        other = None if Y is None else self.transform(Y)
        found: NDArray[np.float64] = pairwise_distances(self.transform(X), other)
        return found

    def score(self, X: Any, y: Any, similarity: str = "euclidean") -> float:
        """R@1: the share of samples whose nearest other sample is of their class. Works for classes never seen."""
        return score(self.transform(X), as_codes(np.ravel(y)), similarity=similarity, ks=(1,), verbose=False)["R@1"]

    @property
    def weight(self) -> Tensor:
        """[dim, F], for a head: torch.nn.functional.linear(features, metric.weight, metric.bias)."""
        check_is_fitted(self, "weight_")
        return torch.as_tensor(self.weight_)

    @property
    def bias(self) -> Tensor:
        """[dim]: minus the mapped mean of the training data."""
        check_is_fitted(self, "weight_")
        return torch.as_tensor(self.bias_)

    @property
    def matrix(self) -> NDArray[Any]:
        """A = weight^T weight [F, F], positive semi-definite."""
        check_is_fitted(self, "weight_")
        matrix: NDArray[Any] = self.weight_.T @ self.weight_
        return matrix

    @property
    def _n_features_out(self) -> int:
        return len(self.weight_)

    def _keep(self, weight: Tensor, bias: Tensor) -> None:
        self.weight_, self.bias_ = weight.numpy(), bias.numpy()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        tags.target_tags.required = True
        return tags


def as_tensor(x: NDArray[Any]) -> Tensor:
    """An array as a tensor, copied only if it is read-only: torch has no such thing."""
    return torch.from_numpy(x if x.flags.writeable else x.copy())


def as_codes(y: Any) -> Tensor:
    """Labels of any kind as 0, 1, ..."""
    check_classification_targets(y)
    return torch.from_numpy(np.unique(y, return_inverse=True)[1].astype(np.int64).reshape(-1))


class Mahalanobis(LinearMetric):
    """Whitening by the covariance of the data: Euclidean distance in it is the Mahalanobis distance. Needs no labels.

    dim         keep the directions of most variance; all when left out
    shrinkage   times the mean variance, added to every variance; above 0 when features are many and samples few

    >>> x = np.array([[0.0, 0.0], [2.0, 0.0], [0.0, 6.0], [2.0, 6.0]])
    >>> (np.cov(Mahalanobis().fit_transform(x).T).round(6) + 0.0).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """

    def __init__(self, dim: int | None = None, shrinkage: float = 0.0) -> None:
        self.dim = dim
        self.shrinkage = shrinkage

    def fit(self, X: Any, y: Any = None) -> Mahalanobis:
        x = validate_data(self, X, dtype=FLOATS, ensure_min_samples=2)
        self._keep(*covariance_whitening(as_tensor(x), dim=self.dim, shrinkage=self.shrinkage))
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = False
        return tags


class WithinClassWhitening(LinearMetric):
    """Whitening by the covariance within classes, then PCA: the strongest closed form on frozen features.

    dim         output dimensions; all when left out
    shrinkage   times the mean variance within classes, added to every variance; 0.1 to 1, more with few samples

    The same function, `nearkin.ops.whitening.within_class_whitening`, makes the heads of networks.

    >>> x = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 1.0], [4.0, 1.0]])  # classes differ in the narrow direction
    >>> metric = WithinClassWhitening(shrinkage=0.01).fit(x, ["a", "a", "b", "b"])
    >>> metric.score(x, ["a", "a", "b", "b"])
    1.0
    """

    def __init__(self, dim: int | None = None, shrinkage: float = 1.0) -> None:
        self.dim = dim
        self.shrinkage = shrinkage

    def fit(self, X: Any, y: Any) -> WithinClassWhitening:
        x, labels = validate_data(self, X, y, dtype=FLOATS, ensure_min_samples=2)
        self._keep(*within_class_whitening(as_tensor(x), as_codes(labels), dim=self.dim, shrinkage=self.shrinkage))
        return self
