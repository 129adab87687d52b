"""Whitening as a linear map x -> weight @ x + bias: the initial weights of a head, or the whole head."""

import torch
from torch import Tensor

from nearkin.errors import ConfigError, DataError
from nearkin.ops.checks import check_finite
from nearkin.ops.geometry import full_precision, where_float64_exists
from nearkin.ops.pairs import as_batch

_BLOCK = 8192  # rows in float64 at a time


def within_class_whitening(
    features: Tensor, labels: Tensor, *, dim: int | None = None, shrinkage: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute the map that whitens the covariance within classes, then keeps the directions of largest variance.

    Directions in which samples of the same class differ carry no information about the class, so they are shrunk;
    unseen classes tend to vary in the same directions. Directions without variance within classes are left out at
    shrinkage 0, and components beyond the rank of the data are constant 0 on it.

    Args:
        features: [N, F] float; half precision is computed and returned in float32.
        labels: [N] integers; at least one class needs two samples.
        dim: Output dimensions, at most F; F by default.
        shrinkage: Multiple of the mean variance added to every variance within classes; large values approach PCA.

    Returns:
        weight [dim, F] and bias [dim]: the mapped data have mean 0 and uncorrelated components, largest variance first.

    Raises:
        ConfigError: dim or shrinkage is out of range.
        DataError: The features or labels cannot be used.

    Example:
        >>> x = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 1.0], [4.0, 1.0]])  # classes differ in the narrow direction
        >>> weight, bias = within_class_whitening(x, torch.tensor([0, 0, 1, 1]), dim=1, shrinkage=0.01)
        >>> (x @ weight.T + bias).flatten().abs() > 1
        tensor([True, True, True, True])
    """
    features, labels = as_batch(features, labels)
    _check(features, dim, shrinkage)
    with torch.no_grad(), full_precision(features):
        mean, within, total = _covariances(features, labels, "within_class_whitening")
        scale, vectors = _inverse_roots(within, shrinkage)
        inverse = (vectors * scale) @ vectors.T
        # The covariance of the whitened data, without a second pass over them.
        axes = _leading_axes(inverse @ total @ inverse, dim or features.shape[1])
        return _affine_map(mean, axes.T @ inverse, features)


def covariance_whitening(features: Tensor, *, dim: int | None = None, shrinkage: float = 0.0) -> tuple[Tensor, Tensor]:
    """Compute the map to mean 0 and identity covariance, where Euclidean distance is the Mahalanobis distance.

    Directions without variance are left out (their component is constant 0) unless shrinkage is above 0.

    Args:
        features: [N, F] float, at least two different samples; half precision is computed and returned in float32.
        dim: Output dimensions, those of largest variance, at most F; F by default.
        shrinkage: Multiple of the mean variance that is added to every variance.

    Returns:
        weight [dim, F] and bias [dim]; components in descending order of the original variance.

    Raises:
        ConfigError: dim or shrinkage is out of range.
        DataError: The features cannot be used.
    """
    features, single_class = as_batch(features, torch.zeros(len(features), dtype=torch.int64))
    _check(features, dim, shrinkage)
    if len(features) < 2:
        raise DataError("covariance_whitening: 1 sample has no covariance. Pass at least two.")
    with torch.no_grad(), full_precision(features):
        mean, covariance, _ = _covariances(features, single_class, "covariance_whitening")
        scale, axes = _inverse_roots(covariance, shrinkage)
        return _affine_map(mean, (axes * scale).flip(1)[:, :dim].T, features)


def _leading_axes(covariance: Tensor, dim: int) -> Tensor:
    """Return the `dim` directions of largest variance [F, dim]."""
    values, vectors = torch.linalg.eigh(covariance)
    values, vectors = values.flip(0), vectors.flip(1)
    tolerance = float(values[0].clamp(min=0)) * len(values) * 10 * torch.finfo(values.dtype).eps
    rank = min(dim, int((values > tolerance).sum()))
    leading: Tensor = vectors[:, :rank]
    if rank == dim:
        return leading
    # Beyond the rank of the data the solver's choice depends on rounding: two runs on the same few images would differ
    # by points of recall. Fixed random directions, orthogonal to the others, are used there instead.
    generator = torch.Generator().manual_seed(0)
    rest = torch.randn(len(values), dim - rank, dtype=values.dtype, generator=generator).to(values.device)
    for _ in range(2):  # twice, to remove what rounding leaves
        rest = rest - leading @ (leading.T @ rest)
    return torch.cat([leading, torch.linalg.qr(rest).Q], dim=1)


def _affine_map(mean: Tensor, weight: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight and bias of x -> weight @ (x - mean), with reproducible signs: each row's largest entry is > 0."""
    top = weight.gather(1, weight.abs().argmax(1, keepdim=True))
    weight = weight * torch.where(top < 0, -1.0, 1.0)
    return weight.to(like), (-weight @ mean).to(like)


def _check(features: Tensor, dim: int | None, shrinkage: float) -> None:
    check_finite(features)
    size = features.shape[1]
    if dim is not None and not (1 <= dim <= size and dim == int(dim)):
        raise ConfigError(f"dim: expected 1 to {size}, the number of features, got {dim} (--model.dim).")
    if not 0 <= shrinkage < float("inf"):
        raise ConfigError(f"shrinkage: expected a finite number, 0 or more, got {shrinkage}.")


def _inverse_roots(covariance: Tensor, shrinkage: float) -> tuple[Tensor, Tensor]:
    """Return (eigenvalues + shrinkage * their mean) ** -1/2, with 0 for no variance, and the eigenvectors."""
    values, vectors = torch.linalg.eigh(covariance)
    values = values.clamp(min=0)
    shrunk = values + shrinkage * values.mean()
    tiny = shrunk <= len(values) * torch.finfo(values.dtype).eps * shrunk.max()
    return shrunk.rsqrt().masked_fill(tiny, 0.0), vectors


def _covariances(features: Tensor, labels: Tensor, caller: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean [F], the covariance within classes and the total covariance [F, F], in float64."""
    features, labels = where_float64_exists(features), where_float64_exists(labels)
    _, index, counts = torch.unique(labels, return_inverse=True, return_counts=True)
    if len(counts) == len(labels):
        raise DataError(
            f"{caller}: no class has two samples ({len(counts)} classes, n_samples = {len(labels)}), so there is no "
            "variance within classes. Check the labels."
        )
    size = features.shape[1]
    sums = features.new_zeros(len(counts), size, dtype=torch.float64)
    for start in range(0, len(features), _BLOCK):
        sums.index_add_(0, index[start : start + _BLOCK], features[start : start + _BLOCK].double())
    mean = sums.sum(0) / len(features)
    class_means = sums / counts[:, None]
    within = torch.zeros(size, size, dtype=torch.float64, device=features.device)
    for start in range(0, len(features), _BLOCK):
        residual = features[start : start + _BLOCK].double() - class_means[index[start : start + _BLOCK]]
        within.addmm_(residual.T, residual)
    between = (class_means - mean) * counts[:, None].double().sqrt()
    total = (within + between.T @ between) / len(features)
    within /= len(features) - len(counts)
    # About what rounding leaves when every class is a single point.
    noise = size * (torch.finfo(torch.float64).eps * features.abs().max().double()) ** 2
    if not noise < within.trace() < float("inf"):
        raise DataError(
            f"{caller}: the total variance is {float(within.trace()):.3g} (within classes, if there are labels). "
            "Features that are all equal, or beyond 1e150, cannot be whitened. Check how they were computed."
        )
    return mean, within, total
