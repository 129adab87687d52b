"""Whitening as scikit-learn estimators, and the base class of all linear metrics, a map x -> weight @ x + bias."""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

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

Array = NDArray[Any]
FLOATS = [np.float64, np.float32]


# The scikit-learn bases provide get_params, clone, pipelines and set_output. Subclasses are dataclasses.
class LinearMetric(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Base class: Euclidean distances after `transform`, whose squares are (x - y)^T A (x - y) with A = `matrix`."""

    weight_: Array  # [dim, F], after fit
    bias_: Array  # [dim]
    _needs_labels: ClassVar[bool] = True

    def transform(self, X: Any) -> Array:
        """Map samples to the learned space."""
        check_is_fitted(self, "weight_")
        x = self._columns(validate_data(self, X, reset=False, dtype=FLOATS))
        return np.asarray(x @ self.weight_.T.astype(x.dtype, copy=False) + self.bias_.astype(x.dtype, copy=False))

    def distance(self, X: Any, Y: Any = None) -> NDArray[np.float64]:
        """Compute the learned distances (not squared) between rows."""
        return np.asarray(pairwise_distances(self.transform(X), None if Y is None else self.transform(Y)))

    def score(self, X: Any, y: Any, similarity: str = "euclidean") -> float:
        """Compute R@1: the fraction of samples whose nearest other sample is of their class."""
        return score(self.transform(X), as_codes(np.ravel(y)), similarity=similarity, ks=(1,), verbose=False)["R@1"]

    @property
    def weight(self) -> Tensor:
        """[dim, F] tensor, for torch.nn.functional.linear(features, metric.weight, metric.bias)."""
        check_is_fitted(self, "weight_")
        return torch.as_tensor(self.weight_)

    @property
    def bias(self) -> Tensor:
        """[dim] tensor: minus the mapped mean of the training data."""
        check_is_fitted(self, "weight_")
        return torch.as_tensor(self.bias_)

    @property
    def matrix(self) -> Array:
        """A = weight^T weight [F, F], positive semi-definite."""
        check_is_fitted(self, "weight_")
        return np.asarray(self.weight_.T @ self.weight_)

    @property
    def _n_features_out(self) -> int:
        return len(self.weight_)

    def _columns(self, x: Array) -> Array:
        return x

    def _validate(self, X: Any, y: Any = None, *, labels: bool = True) -> Any:
        """Check the training data, and return X and y; without labels, y is ignored."""
        if labels:
            return validate_data(self, X, y, dtype=FLOATS, ensure_min_samples=2)
        return validate_data(self, X, dtype=FLOATS, ensure_min_samples=2), None

    def _set_map(self, weight: Tensor, bias: Tensor) -> None:
        self.weight_, self.bias_ = weight.numpy(), bias.numpy()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        tags.target_tags.required = self._needs_labels
        return tags


def as_tensor(x: Array) -> Tensor:
    """Convert an array to a tensor, copying only read-only arrays, which torch does not support."""
    return torch.from_numpy(x if x.flags.writeable else x.copy())


def as_codes(y: Any) -> Tensor:
    check_classification_targets(y)
    return torch.from_numpy(np.unique(y, return_inverse=True)[1].astype(np.int64).reshape(-1))


@dataclass(eq=False, repr=False)
class Mahalanobis(LinearMetric):
    """Whitening by the covariance of the data, without labels. Its Euclidean distance is the Mahalanobis distance.

    Args:
        dim: Keep the directions of largest variance; all when omitted.
        shrinkage: Multiple of the mean variance added to every variance; above 0 with few samples per feature.

    Example:
        >>> x = np.array([[0.0, 0.0], [2.0, 0.0], [0.0, 6.0], [2.0, 6.0]])
        >>> (np.cov(Mahalanobis().fit_transform(x).T).round(6) + 0.0).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """

    dim: int | None = None
    shrinkage: float = 0.0
    _needs_labels: ClassVar[bool] = False

    def fit(self, X: Any, y: Any = None) -> Self:
        """Fit the whitening to samples X [N, F]; y is ignored."""
        x, _ = self._validate(X, labels=False)
        self._set_map(*covariance_whitening(as_tensor(x), dim=self.dim, shrinkage=self.shrinkage))
        return self


@dataclass(eq=False, repr=False)
class WithinClassWhitening(LinearMetric):
    """Whitening by the covariance within classes, then PCA: the strongest closed form on frozen features.

    The same function, `nearkin.ops.whitening.within_class_whitening`, initialises the heads of networks.

    Args:
        dim: Output dimensions; all when omitted.
        shrinkage: Multiple of the mean within-class variance added to every variance; 0.1 to 1, more with few samples.
    """

    dim: int | None = None
    shrinkage: float = 1.0

    def fit(self, X: Any, y: Any) -> Self:
        """Fit the whitening to samples X [N, F] with labels y [N]."""
        x, labels = self._validate(X, y)
        self._set_map(*within_class_whitening(as_tensor(x), as_codes(labels), dim=self.dim, shrinkage=self.shrinkage))
        return self
