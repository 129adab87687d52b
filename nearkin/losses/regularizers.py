"""Regularisers: terms that `Objective(..., regularizers={"lp": 0.1})` adds to any loss, by name and weight.

A regulariser takes some of these by name: `emb` [N, D], the embeddings as the network returns them; `labels` [N];
`proxies` [C, D] or [C, K, D], the vectors of the classes (also the weight of a linear head); `centers` [C, K, D], the
same where a class has several. It returns a 0-dim tensor.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearkin._common.registry import Registry, is_number, to_python_scalar
from nearkin.errors import ConfigError
from nearkin.losses.classes import center_spread
from nearkin.losses.registry import LOSSES, summary
from nearkin.ops.checks import squared_norms
from nearkin.ops.geometry import unit
from nearkin.ops.pairs import pair_up

RegularizerFunction = Callable[..., Tensor]


class Regularizer(NamedTuple):
    """A registered regulariser."""

    function: RegularizerFunction
    inputs: tuple[str, ...]  # which of `emb`, `labels`, `proxies` and `centers` it takes

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return summary(self.function)


REGULARIZERS: Registry[Regularizer] = Registry("regularizer")


def regularizer(function: RegularizerFunction) -> RegularizerFunction:
    """Register a function as a regulariser under its own name.

    Args:
        function: Takes `emb`, `labels`, `proxies` or `centers`, by these names, and returns a 0-dim tensor.

    Returns:
        The function.
    """
    parameters = inspect.signature(function).parameters
    inputs = tuple(name for name in ("emb", "labels", "proxies", "centers") if name in parameters)
    REGULARIZERS.add(function.__name__.rstrip("_"), Regularizer(function, inputs))
    return function


@regularizer
def lp(emb: Tensor, *, p: float = 2.0, power: float = 1.0) -> Tensor:
    """Keep embeddings short: the mean of their p-norms.

    Args:
        emb: [N, D] embeddings.
        p: Exponent of the norm; 1 or more.
        power: Exponent of each norm: 2 with p = 2 is the mean squared length.

    Returns:
        A 0-dim tensor.

    Example:
        >>> float(lp(torch.tensor([[3.0, 4.0], [0.0, 1.0]])))
        3.0
    """
    squared_norms(emb)  # refuses lengths that overflow
    lengths: Tensor = torch.linalg.vector_norm(emb, p, dim=1)
    return lengths.pow(power).mean()


@regularizer
def zero_mean(emb: Tensor) -> Tensor:
    """Centre the coordinates of every embedding at 0: the mean of the absolute sums of its coordinates.

    Args:
        emb: [N, D] embeddings.

    Returns:
        A 0-dim tensor.
    """
    return emb.sum(1).abs().mean()


@regularizer
def regular_face(proxies: Tensor) -> Tensor:
    """Spread the classes: the mean over them of the cosine to the nearest other class (RegularFace, Zhao et al. 2019).

    Args:
        proxies: [C, D] or [C, K, D] of any length; of several centres, each is compared with those of other classes.

    Returns:
        A 0-dim tensor; 0 for one class.
    """
    classes, centers = len(proxies), proxies.shape[1] if proxies.dim() == 3 else 1
    w = unit(proxies.flatten(0, -2))
    if classes == 1:
        return w.sum() * 0.0
    owner = torch.arange(len(w), device=w.device) // centers
    nearest = (w @ w.t()).masked_fill(owner[:, None] == owner, -2.0).max(1).values
    return nearest.mean()


@regularizer
def center_invariant(proxies: Tensor) -> Tensor:
    """Give classes equal lengths, so that none dominates: the variance of the squared lengths, over 4 (Wu et al. 2017).

    Args:
        proxies: [C, D] or [C, K, D].

    Returns:
        A 0-dim tensor.
    """
    squared = proxies.square().sum(-1)
    return (squared - squared.mean()).square().mean() / 4


@regularizer
def sparse_centers(centers: Tensor) -> Tensor:
    """Merge the centres of a class that are not needed: half their mean distance (SoftTriple, Qian et al. 2019).

    Args:
        centers: [C, K, D] of any length. Centres that coincide get no gradient.

    Returns:
        A 0-dim tensor; 0 for K = 1.
    """
    return center_spread(unit(centers))


@regularizer
def threshold_consistent_margin_(emb: Tensor, labels: Tensor) -> Tensor:
    """Pull positives above cosine 0.9 and push negatives below 0.5, so that one threshold suits all classes."""
    value: Tensor = LOSSES["threshold_consistent_margin"].function(pair_up(emb, labels))  # type: ignore[assignment]
    return value


def check_regularizers(
    weights: Mapping[str, Any] | None, loss: str, reduction: str, vectors: Tensor | None
) -> dict[str, float]:
    """Return the weights of regularisers; ConfigError if the loss cannot have one of them."""
    checked = {name: to_python_scalar(weight) for name, weight in (weights or {}).items()}
    for name, weight in checked.items():
        needed = REGULARIZERS[name].inputs
        if not is_number(weight, float) or weight < 0:
            raise ConfigError(f"regularizers: the weight of {name} must be a number, 0 or above; got {weight!r}.")
        if reduction == "none":
            raise ConfigError(f"regularizers: {name} has no value per sample. Use another reduction than 'none'.")
        if vectors is None and {"proxies", "centers"} & set(needed):
            raise ConfigError(
                f"regularizers: {name} needs vectors of the classes, and {loss} learns none. "
                "Use a proxy or softmax loss, or a regularizer of the embeddings such as lp."
            )
        if "centers" in needed and (vectors is None or vectors.dim() < 3 or vectors.shape[1] < 2):
            raise ConfigError(
                f"regularizers: {name} needs several centres per class, and {loss} has one. "
                "Use a loss such as soft_triple, with centers=2 or more."
            )
    return checked


def regularization(
    weights: Mapping[str, float], emb: Tensor, labels: Tensor | None, vectors: Tensor | None
) -> Tensor | float:
    """Compute the weighted sum of regularisers."""
    given = {"emb": emb, "labels": labels, "proxies": vectors, "centers": vectors}
    total: Tensor | float = 0.0
    for name, weight in weights.items():
        entry = REGULARIZERS[name]
        if "labels" in entry.inputs and labels is None:
            raise ConfigError(f"regularizers: {name} needs one label per sample: it cannot use several, or own pairs.")
        total = total + weight * entry.function(**{key: given[key] for key in entry.inputs})
    return total
