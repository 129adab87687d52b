"""Whitening as a linear map x -> weight @ x + bias, ready to be the start or the whole of a head on frozen features.

Needs torch only. The scikit-learn style estimators around it are in nearkin.linear.estimators.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nearkin.errors import ConfigError, DataError
from nearkin.ops.geometry import check_finite, full_precision
from nearkin.ops.pairs import as_batch

_BLOCK = 8192  # rows that are held in float64 at once


def within_class_whitening(
    features: Tensor, labels: Tensor, *, dim: int | None = None, shrinkage: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The map that makes the spread within classes round, then keeps the `dim` directions of most variance.

    Directions in which samples of one class differ say nothing about the class, so they are shrunk in proportion;
    classes that were never seen tend to vary in the same directions. A closed form: no step size, no epochs.

    features    [N, F] float; half precision is computed and returned in float32
    labels      [N] integers; at least one class needs two samples
    dim         output dimensions, at most F; F when left out
    shrinkage   times the mean variance, added to every variance within classes: 0 trusts the estimate wholly, large
                values tend to plain PCA. 0.1 to 1 works; with few samples per class rather more.

    Returns weight [dim, F] and bias [dim], computed in float64, in the dtype of features. The mapped training data have
    mean 0 and uncorrelated components, the largest variance first. The outcome is always finite: directions without
    any spread within classes are left out at shrinkage 0, and components beyond the rank of the data are constant 0
    on it. With a single class this is the whitening of that class.

    >>> x = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 1.0], [4.0, 1.0]])  # classes differ in the narrow direction
    >>> weight, bias = within_class_whitening(x, torch.tensor([0, 0, 1, 1]), dim=1, shrinkage=0.01)
    >>> (x @ weight.T + bias).flatten().abs() > 1
    tensor([True, True, True, True])
    """
    features, labels = as_batch(features, labels)
    _check(features, dim, shrinkage)
    with torch.no_grad(), full_precision(features):
        mean, within, total = _scatter(features, labels, "within_class_whitening")
        scale, vectors = _inverse_roots(within, shrinkage)
        inverse = (vectors * scale) @ vectors.T
        # The spread of the whitened data, without a second pass over them.
        axes = _leading_axes(inverse @ total @ inverse, dim or features.shape[1])
        return _around(mean, axes.T @ inverse, features.dtype)


def covariance_whitening(features: Tensor, *, dim: int | None = None, shrinkage: float = 0.0) -> tuple[Tensor, Tensor]:
    """The map under which Euclidean distance is the Mahalanobis distance: mean 0, covariance the identity.

    features    [N, F] float, at least two samples that differ; half precision is computed and returned in float32
    dim         keep the directions of most variance, at most F; F when left out
    shrinkage   times the mean variance, added to every variance

    Returns weight [dim, F] and bias [dim]; components in the order of the variance they came from. Directions without
    variance are left out (their component is constant 0) unless shrinkage is above 0.

    >>> weight, bias = covariance_whitening(torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 6.0], [2.0, 6.0]]))
    >>> weight.tolist()  # standard deviations 2 sqrt(1/3) and 6 sqrt(1/3)
    [[0.0, 0.2886...], [0.8660..., 0.0]]
    """
    features, one = as_batch(features, torch.zeros(len(features), dtype=torch.int64))
    _check(features, dim, shrinkage)
    if len(features) < 2:
        raise DataError("covariance_whitening: 1 sample has no covariance; give at least two.")
    with torch.no_grad(), full_precision(features):
        mean, covariance, _ = _scatter(features, one, "covariance_whitening")
        scale, axes = _inverse_roots(covariance, shrinkage)
        return _around(mean, (axes * scale).flip(1)[:, :dim].T, features.dtype)


def _leading_axes(spread: Tensor, dim: int) -> Tensor:
    """The `dim` directions of most variance [F, dim].

    Beyond the rank of the data any direction is as good as another, and a solver's choice hangs on rounding: two runs
    on the same few images would differ by points of recall. There a fixed draw is taken, orthogonal to the others.
    """
    values, vectors = torch.linalg.eigh(spread)
    values, vectors = values.flip(0), vectors.flip(1)
    smallest = float(values[0].clamp(min=0)) * len(values) * 10 * torch.finfo(values.dtype).eps
    rank = min(dim, int((values > smallest).sum()))
    kept: Tensor = vectors[:, :rank]
    if rank == dim:
        return kept
    chance = torch.Generator().manual_seed(0)
    drawn = torch.randn(len(values), dim - rank, dtype=values.dtype, generator=chance).to(values.device)
    for _ in range(2):  # twice, so that rounding leaves nothing of them
        drawn = drawn - kept @ (kept.T @ drawn)
    return torch.cat([kept, torch.linalg.qr(drawn).Q], dim=1)


def _around(mean: Tensor, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Weight and bias of x -> weight @ (x - mean), the largest entry of every row positive so that machines agree."""
    top = weight.gather(1, weight.abs().argmax(1, keepdim=True))
    weight = weight * torch.where(top < 0, -1.0, 1.0)
    return weight.to(dtype), (-weight @ mean).to(dtype)


def _check(features: Tensor, dim: int | None, shrinkage: float) -> None:
    check_finite(features)
    size = features.shape[1]
    if dim is not None and not (1 <= dim <= size and dim == int(dim)):
        raise ConfigError(f"dim: expected 1 to {size}, the number of features, got {dim} (--model.dim).")
    if not 0 <= shrinkage < float("inf"):
        raise ConfigError(f"shrinkage: expected a finite number from 0, got {shrinkage}.")


def _inverse_roots(covariance: Tensor, shrinkage: float) -> tuple[Tensor, Tensor]:
    """(eigenvalues + shrinkage * their mean) ** -1/2, 0 where there is no variance at all; and the eigenvectors."""
    values, vectors = torch.linalg.eigh(covariance)
    values = values.clamp(min=0)
    shrunk = values + shrinkage * values.mean()
    tiny = shrunk <= len(values) * torch.finfo(values.dtype).eps * shrunk.max()
    return shrunk.rsqrt().masked_fill(tiny, 0.0), vectors


def _scatter(features: Tensor, labels: Tensor, who: str) -> tuple[Tensor, Tensor, Tensor]:
    """Mean [F], covariance within classes and covariance over all [F, F], in float64, by blocks of rows."""
    _, code, counts = torch.unique(labels, return_inverse=True, return_counts=True)
    if len(counts) == len(labels):
        raise DataError(
            f"{who}: no class has two samples ({len(counts)} classes over n_samples = {len(labels)}), so nothing is "
            "known of the spread within a class. Check the labels."
        )
    size = features.shape[1]
    sums = features.new_zeros(len(counts), size, dtype=torch.float64)
    for a in range(0, len(features), _BLOCK):
        sums.index_add_(0, code[a : a + _BLOCK], features[a : a + _BLOCK].double())
    mean = sums.sum(0) / len(features)
    centres = sums / counts[:, None]
    within = torch.zeros(size, size, dtype=torch.float64, device=features.device)
    for a in range(0, len(features), _BLOCK):
        rest = features[a : a + _BLOCK].double() - centres[code[a : a + _BLOCK]]
        within.addmm_(rest.T, rest)
    between = (centres - mean) * counts[:, None].double().sqrt()
    total = (within + between.T @ between) / len(features)
    within /= len(features) - len(counts)
    # Rounding leaves about this much where every class is a single point.
    noise = size * (torch.finfo(torch.float64).eps * features.abs().max().double()) ** 2
    if not noise < within.trace() < float("inf"):
        raise DataError(
            f"{who}: the total variance is {float(within.trace()):.3g} (within classes, if there are labels). Features "
            "that are all the same, or beyond 1e150, cannot be whitened; check how they were made."
        )
    return mean, within, total
