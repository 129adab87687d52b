"""Normalisation, dot products and Euclidean distances, with derivatives that are 0 where autograd would divide zero by
zero: for a zero vector or two coincident points.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from nearkin.ops import cpu_kernels
from nearkin.ops.checks import on_host, raise_if_not_finite

# A vector of at most this length has no direction: it is mapped to zero, with zero gradient.
ZERO_LENGTH = 1e-12


def full_precision(like: Tensor) -> AbstractContextManager[Any]:
    """Return a context that disables autocast: a cosine in bfloat16 has two digits."""
    device_type = like.device.type
    # torch refuses to disable what a device does not have, and before 2.7 cannot compile the question.
    if device_type in ("cpu", "cuda") or torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def where_float64_exists(x: Tensor) -> Tensor:
    """Return x, moved to the CPU if its device has no float64 (MPS)."""
    return x.cpu() if x.device.type == "mps" else x


def unit(x: Tensor) -> Tensor:
    """Normalise rows to length 1; a zero row stays zero and gets zero gradient."""
    return unit_and_squares(x)[0]


def unit_and_squares(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `unit` of rows, and their squared lengths after it: 1, or 0 for a zero row."""
    if not on_host(x):
        return _unit(x)
    length = torch.linalg.vector_norm(x.detach(), dim=-1, keepdim=True)
    if not torch.isfinite(length.sum()):  # without a pass over the batch
        raise_if_not_finite(x)
        return _unit(x)
    inverse = length.reciprocal().masked_fill_(length <= ZERO_LENGTH, 0.0)
    return cpu_kernels.unit(x, inverse, lambda x: _unit(x)[0]), (inverse > 0).squeeze(-1).to(x.dtype)


def _unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `unit_and_squares` in plain torch, for finite vectors of any length."""
    largest = x.detach().abs().amax(-1, keepdim=True).clamp(min=1.0)
    x = x / largest  # a square must not overflow
    square = x.square().sum(-1, keepdim=True)
    is_zero = square <= (ZERO_LENGTH / largest).square()
    f = (x / square.masked_fill(is_zero, 1.0).sqrt()).masked_fill(is_zero, 0.0)
    return f, (~is_zero).squeeze(-1).to(x.dtype)


def gram(f: Tensor) -> Tensor:
    """Compute all dot products between rows. Returns [N, N] or [.., N, N]."""
    return cpu_kernels.gram(f) if on_host(f) and f.dim() == 2 else f @ f.mT


def distances(products: Tensor, anchor_sq: Tensor, ref_sq: Tensor) -> Tensor:
    """Compute Euclidean distances from dot products and squared lengths."""
    if on_host(products):
        return cpu_kernels.distances(products, anchor_sq, ref_sq, _distances)
    return _distances(products, anchor_sq, ref_sq)


def _distances(products: Tensor, anchor_sq: Tensor, ref_sq: Tensor) -> Tensor:
    square = torch.sub(ref_sq, products, alpha=2).add_(anchor_sq[:, None])
    return zero_or_root(square, rounding(anchor_sq, ref_sq))


def zero_or_root(square: Tensor, tolerance: Tensor | float) -> Tensor:
    """Compute the square root; 0 with zero gradient where the square is at most the tolerance."""
    is_zero = square <= tolerance
    return square.masked_fill(is_zero, 1.0).sqrt().masked_fill(is_zero, 0.0)


def rounding(anchor_sq: Tensor, ref_sq: Tensor) -> Tensor:
    """Return the squared distances [N, M] that may be rounding: a few last digits of their operands.

    The operands are those of each pair: one long vector must not erase the distances between all others.
    """
    return (anchor_sq.detach()[:, None] + ref_sq.detach()).mul_(4 * torch.finfo(anchor_sq.dtype).eps)
