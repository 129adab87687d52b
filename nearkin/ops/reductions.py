"""Masked reductions over similarity matrices, stable for any scale and with zero gradient for an empty row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nearkin.ops import cpu_kernels
from nearkin.ops.checks import on_host


def log_sum_exp(x: Tensor, mask: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """Compute log sum exp(scale * x) over the pairs of a mask, per row.

    Args:
        x: [N, M].
        mask: [N, M] bool: the pairs to sum over, `Pairs.pos` for example.
        scale: Factor on x.

    Returns:
        [N]; -inf with zero gradient for an empty row.
    """

    def in_plain_torch(x: Tensor) -> Tensor:
        return log_sum((x * scale).masked_fill_(~mask, float("-inf")))

    if on_host(x) and not isinstance(scale, Tensor) and x.numel():
        return cpu_kernels.log_sum_exp(x, mask, scale, in_plain_torch)
    return in_plain_torch(x)


def log1p_sum_exp(x: Tensor, mask: Tensor, scale: float | Tensor = 1.0, offset: float | Tensor = 0.0) -> Tensor:
    """Compute log(1 + sum exp(scale * (x - offset))) over the pairs of a mask, per row.

    Args:
        x: [N, M].
        mask: [N, M] bool: the pairs to sum over.
        scale: Factor on x - offset.
        offset: Subtracted from x.

    Returns:
        [N]; 0 for an empty row.
    """
    return softplus(log_sum_exp(x, mask, scale) - scale * offset)


def log_sum(logits: Tensor, dim: int = 1) -> Tensor:
    """Compute log sum exp along a dimension, in place of the logits; -inf with zero gradient if all are -inf."""
    if logits.numel() == 0:
        return logits.sum(dim) - float("inf")
    top = logits.detach().amax(dim, keepdim=True)
    top = top.masked_fill(top == float("-inf"), 0.0)
    total = logits.sub_(top).exp_().sum(dim)
    is_empty = total == 0
    return (top.squeeze(dim) + total.masked_fill(is_empty, 1.0).log()).masked_fill(is_empty, float("-inf"))


def hinge_sums(x: Tensor, up: Tensor, low: float | Tensor, down: Tensor, high: float | Tensor) -> tuple[Tensor, Tensor]:
    """Sum max(0, x - low) over the pairs `up` and max(0, high - x) over the pairs `down`, per row.

    Args:
        x: [N, M].
        up: [N, M] bool: the pairs that should be below `low`.
        low: Where their hinge opens.
        down: [N, M] bool: the pairs that should be above `high`.
        high: Where their hinge opens.

    Returns:
        Sums [N], and the number of terms above 0.
    """
    above, below = up & (x > low), down & (x < high)
    weight = above.to(x.dtype).masked_fill_(below, -1.0)  # the sums are linear in x where the hinges are open
    n_above, n_below = above.sum(1).to(x.dtype), below.sum(1).to(x.dtype)
    return (weight * x).sum(1) - low * n_above + high * n_below, (n_above + n_below).sum()


def softplus(x: Tensor) -> Tensor:
    """Compute log(1 + exp(x)) to full precision.

    Args:
        x: Any shape; -inf gives 0 with zero gradient.

    Returns:
        The same shape.
    """
    # torch switches to x itself at 20 by default, which is wrong in the ninth digit.
    return torch.nn.functional.softplus(x, threshold=40.0)


def by_rows(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Apply a function to rows of tensors; on the host by blocks of rows, so that its buffers stay small."""
    if not on_host(tensors[0]):
        return function(*tensors)
    return torch.cat([function(*rows) for rows in zip(*(torch.split(t, 128) for t in tensors), strict=True)])
