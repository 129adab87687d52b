"""Masked reductions in plain torch: static shapes, no wait for the device, differentiable any number of times.

`positive_values` is the exception: outside torch.compile it reads one number, the largest number of positives.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nearkin.errors import ConfigError
from nearkin.ops.pairs import Pairs

EMPTY = -1e30  # the logit of an absent term: finite, so that no difference of two of them is NaN
_CHUNK = 1 << 23  # elements of the largest temporary block


def log_sum_exp(x: Tensor, mask: Tensor, dim: int = 1) -> Tensor:
    """Compute log sum exp(x) over a mask; about -1e30 with zero gradient where the mask is empty."""
    return torch.where(mask, x, EMPTY).logsumexp(dim)


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum each row over a mask; entries outside may be infinite."""
    return torch.where(mask, x, 0.0).sum(1)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Compute the mean of all entries in a mask, as a 0-dim tensor; 0 if there are none."""
    return torch.where(mask, x, 0.0).sum() / mask.sum().clamp(min=1)


def row_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Compute the mean of each row over a mask; 0 for an empty row."""
    return masked_sum(x, mask) / mask.sum(1).clamp(min=1)


def own_and_others(sim: Tensor, labels: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the similarity to the own class, and the log-sum-exp of scale * similarity over the other classes."""
    own = sim.gather(1, labels[:, None]).squeeze(1)
    return own, log_sum_exp(scale * sim, ~is_own(sim, labels))


def is_own(sim: Tensor, labels: Tensor) -> Tensor:
    """Return the mask [N, C] of each sample's own class."""
    return torch.arange(sim.shape[1], device=sim.device) == labels[:, None]


def sine(cosine: Tensor) -> Tensor:
    """Return the sine of an angle in [0, pi] from its cosine, with zero gradient at |cosine| = 1."""
    return (1 - cosine.square()).clamp(min=1e-12).sqrt()


def positive_values(p: Pairs) -> tuple[Tensor, Tensor]:
    """Return the similarities of each anchor's positives in descending order [N, P], and which of them exist.

    P is the largest number of positives; under torch.compile, where it must not depend on the data, it is M.
    """
    most = p.sim.shape[1] if torch.compiler.is_compiling() else max(1, int(p.pos.sum(1).max()))
    values, _ = torch.where(p.pos, p.sim, EMPTY).topk(most, dim=1)
    valid = values > EMPTY / 2
    return torch.where(valid, values, 0.0), valid


def sum_over_references(function: Callable[[Tensor], Tensor], values: Tensor, sim: Tensor, mask: Tensor) -> Tensor:
    """Compute sum_k function(sim[i, k] - values[i, a]) over a mask of references k. Returns [N, P].

    The block [N, P, M] is computed in chunks of anchors, and computed again in the backward pass.
    """

    def chunk_sum(v: Tensor, s: Tensor, m: Tensor) -> Tensor:
        return torch.where(m[:, None], function(s[:, None] - v[:, :, None]), 0.0).sum(2)

    rows = max(1, _CHUNK // (values.shape[1] * sim.shape[1]))
    if rows >= len(sim):
        return chunk_sum(values, sim, mask)
    chunks = zip(*(torch.split(x, rows) for x in (values, sim, mask)), strict=True)
    return torch.cat([checkpoint(chunk_sum, *chunk, use_reentrant=False) for chunk in chunks])


def sum_of_violations(positive: Tensor, negative: Tensor, p: Pairs) -> Tensor:
    """Compute, per anchor, the sum over all (positive, negative) of max(0, negative - positive).

    By sorting: a negative counts once for every positive below it. The counts are constants almost everywhere, so the
    sum is linear in the values with the counts as weights.
    """
    x = torch.where(p.pos, positive, negative)
    with torch.no_grad():
        order = x.argsort(1)
        pos, neg = (mask.gather(1, order).to(x.dtype) for mask in (p.pos, p.neg))
        below = pos.cumsum(1)
        above = neg.flip(1).cumsum(1).flip(1)
        weight = torch.zeros_like(x).scatter(1, order, neg * below - pos * above)
    return (weight * x).sum(1)


def first_max(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mask of each row's largest entry in a mask, the first of equal ones; an empty row stays empty."""
    index = torch.where(mask, x, float("-inf")).argmax(1, keepdim=True)
    return torch.zeros_like(mask).scatter(1, index, True) & mask


def require_square(p: Pairs, name: str) -> None:
    """Raise a ConfigError unless the pairs compare a batch with itself."""
    if p.sim.shape[0] != p.sim.shape[1]:
        raise ConfigError(f"{name} takes Pairs [N, N], a batch with itself, got {list(p.sim.shape)}.")
