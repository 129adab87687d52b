"""Masked reductions over similarity matrices, stable for any scale and with zero gradient for an empty row."""

from __future__ import annotations

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


def softplus(x: Tensor) -> Tensor:
    """Compute log(1 + exp(x)) to full precision.

    Args:
        x: Any shape; -inf gives 0 with zero gradient.

    Returns:
        The same shape.
    """
    # torch switches to x itself at 20 by default, which is wrong in the ninth digit.
    return torch.nn.functional.softplus(x, threshold=40.0)
