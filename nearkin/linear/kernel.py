"""Kernels, kernel distances, and linear metrics learned in the space of a kernel.

A kernel is a name with its settings, or any positive semi-definite function (X [N, F], Y [M, F]) -> [N, M].
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from nearkin.errors import ConfigError, DataError
from nearkin.linear.constraints import Constraints
from nearkin.linear.estimators import Array, LinearMetric
from nearkin.linear.learner import MetricLearner, check_name

from sklearn.base import clone  # isort: skip
from sklearn.metrics.pairwise import polynomial_kernel, rbf_kernel  # isort: skip
from sklearn.utils import check_random_state  # isort: skip

Kernel = Callable[[Array, Array], Array]
_BLOCK = 4096  # rows per kernel evaluation


def gaussian(x: Array, y: Array, sigma: float = 1.0) -> Array:
    """Compute the Gaussian kernel exp(-|x - y|^2 / (2 sigma^2))."""
    mean = y.mean(0)  # centring avoids cancellation far from the origin
    return np.asarray(rbf_kernel(x - mean, y - mean, gamma=1 / (2 * sigma**2)))


def polynomial(x: Array, y: Array, degree: int = 3, constant: float = 1.0) -> Array:
    """Compute the polynomial kernel (x . y + constant) ** degree."""
    if degree < 1 or degree != int(degree) or constant < 0:
        got = f"got {degree} and {constant}. Other values are not positive semi-definite."
        raise ConfigError(f"polynomial: expected an integer degree >= 1 and a constant >= 0, {got}")
    return np.asarray(polynomial_kernel(x, y, degree=int(degree), gamma=1.0, coef0=constant))


def kernel_distance(x: Any, y: Any, kernel: Kernel) -> Array:
    """Compute Euclidean distances in the space of a kernel: sqrt(k(x, x) - 2 k(x, y) + k(y, y)), clamped at 0.

    With `KNeighborsClassifier(metric="precomputed")` this is kernelised nearest-neighbour search.

    Args:
        x: [N, F].
        y: [M, F].
        kernel: A function (X, Y) -> [N, M].

    Returns:
        The distances [N, M].

    Example:
        >>> kernel_distance([[0.0, 0.0]], [[3.0, 4.0]], lambda a, b: a @ b.T).tolist()
        [[5.0]]
    """
    x, y = (np.atleast_2d(np.asarray(v, dtype=np.float64)) for v in (x, y))
    if x.shape[1] != y.shape[1]:
        raise DataError(f"kernel_distance: x has {x.shape[1]} features and y has {y.shape[1]}; they must be equal.")
    squared = _diagonal(kernel, x)[:, None] - 2 * kernel(x, y) + _diagonal(kernel, y)
    return np.asarray(np.sqrt(np.maximum(squared, 0)))


def _diagonal(kernel: Kernel, x: Array) -> Array:
    # A kernel computes whole blocks; small ones waste little.
    return np.concatenate([np.diagonal(kernel(x[a : a + 16], x[a : a + 16])) for a in range(0, len(x), 16)])


@dataclass(eq=False, repr=False)
class KernelMetricLearner(LinearMetric):
    """A linear metric in the space of a kernel: non-linear in the input.

    The learned squared distance of x and y is that of their kernel columns k_x = k(landmarks, x):
    (k_x - k_y)^T M (k_x - k_y).

    Args:
        kernel: "gaussian", "polynomial", or a function (X, Y) -> [N, M].
        sigma: Bandwidth of the Gaussian; the median distance of the data when omitted.
        degree: Of the polynomial.
        constant: Of the polynomial.
        landmarks: Number of random samples that span the space (Nystrom). None uses all samples, which is exact and
            takes N^2 memory and N^3 time.
        metric: The metric to learn in that space: a MetricLearner, or any estimator with weight_ and bias_
            (WithinClassWhitening); MetricLearner() when omitted.
        random_state: For drawing the landmarks.

    Attributes:
        landmarks_: [m, F].
        weight_: [dim, m], maps kernel columns.
        bias_: [dim].
        metric_: The fitted metric.
    """

    kernel: str | Kernel = "gaussian"
    sigma: float | None = None
    degree: int = 3
    constant: float = 1.0
    landmarks: int | None = 500
    metric: LinearMetric | None = None
    random_state: Any = 0

    def fit(self, X: Any, y: Any = None, constraints: Constraints | None = None) -> Self:
        """Learn from samples X [N, F] with labels y [N], or with constraints on the rows of X instead of labels."""
        X, y = self._validate(X, y, labels=constraints is None)
        random = check_random_state(self.random_state)
        if self.landmarks is not None and self.landmarks < 1:
            raise ConfigError(f"landmarks: expected an integer >= 1, or None for all; got {self.landmarks}.")
        count = len(X) if self.landmarks is None else min(self.landmarks, len(X))
        self.landmarks_ = X if count == len(X) else X[random.permutation(len(X))[:count]]
        sigma = self.sigma
        if sigma is None:  # the median distance
            i, j = random.randint(len(X), size=(2, 2000))
            distance = np.linalg.norm(X[i] - X[j], axis=1)
            sigma = float(np.median(distance[distance > 0])) if (distance > 0).any() else 1.0
        if not 0 < sigma < float("inf"):
            raise ConfigError(f"sigma: expected a bandwidth above 0, got {sigma}.")
        self.sigma_: float = sigma
        # With this map the inner products of mapped columns equal the kernel on the span of the landmarks.
        columns, root = self._columns(X), _inverse_root(self._columns(self.landmarks_))
        self.metric_ = MetricLearner() if self.metric is None else clone(self.metric)
        if constraints is not None and not isinstance(self.metric_, MetricLearner):
            raise ConfigError(f"constraints: {type(self.metric_).__name__} learns from labels. Use a MetricLearner.")
        self.metric_.fit(columns @ root, y, **({} if constraints is None else {"constraints": constraints}))
        self.weight_, self.bias_ = self.metric_.weight_ @ root.T, self.metric_.bias_
        return self

    def _columns(self, x: Array) -> Array:
        """Kernel values against the landmarks [N, m], in blocks of rows."""
        out = np.empty((len(x), len(self.landmarks_)), dtype=x.dtype)
        for a in range(0, len(x), _BLOCK):
            out[a : a + _BLOCK] = self._kernel(x[a : a + _BLOCK], self.landmarks_)
        if not np.isfinite(out).all():
            raise DataError("kernel: some values are NaN or infinite. Scale the features, or lower the degree.")
        return out

    def _kernel(self, x: Array, y: Array) -> Array:
        if callable(self.kernel):
            return np.asarray(self.kernel(x, y))
        check_name("kernel", self.kernel, ("gaussian", "polynomial"))
        is_gaussian = self.kernel == "gaussian"
        return gaussian(x, y, self.sigma_) if is_gaussian else polynomial(x, y, self.degree, self.constant)


def _inverse_root(kernel: Array) -> Array:
    """K^-1/2 of the landmarks' kernel matrix [m, m] as [m, rank], without directions below rounding error."""
    values, vectors = np.linalg.eigh(kernel.astype(np.float64))
    noise = len(kernel) * np.finfo(kernel.dtype).eps * values[-1]
    if values[-1] <= 0 or values[0] < -100 * noise:
        raise DataError(
            f"kernel: not positive semi-definite, its matrix has eigenvalues from {values[0]:.3g} to {values[-1]:.3g}. "
            "Use another kernel, or clip the eigenvalues."
        )
    significant = values > 10 * noise
    return np.asarray(vectors[:, significant] / np.sqrt(values[significant]), kernel.dtype)
