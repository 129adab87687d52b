"""Masked reductions over similarity matrices, stable for any scale and with zero gradient for an empty row."""

from __future__ import annotations  # torch 2.6 cannot compile nested functions with evaluated annotations

import torch
from torch import Tensor

from nearkin.ops import cpu_kernels
from nearkin.ops.checks import on_host
from nearkin.ops.pairs import Pairs


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
    """Sum max(0, x - low) over the pairs `up` and max(0, high - x) over `down`, per row; and count the open terms."""
    above, below = up & (x > low), down & (x < high)
    n_above, n_below = above.sum(1).to(x.dtype), below.sum(1).to(x.dtype)
    # Where the hinges are open the sums are linear in x.
    return signed_sum(x, above, below) - low * n_above + high * n_below, (n_above + n_below).sum()


def signed_sum(x: Tensor, plus: Tensor, minus: Tensor) -> Tensor:
    """Sum each row over the pairs `plus`, less the sum over the pairs `minus`."""

    def in_plain_torch(x: Tensor) -> Tensor:
        return (plus.to(x.dtype).masked_fill_(minus, -1.0) * x).sum(1)

    return cpu_kernels.signed_sum(x, plus, minus, in_plain_torch) if on_host(x) else in_plain_torch(x)


def softplus(x: Tensor) -> Tensor:
    """Compute log(1 + exp(x)) to full precision.

    Args:
        x: Any shape; -inf gives 0 with zero gradient.

    Returns:
        The same shape.
    """
    # torch switches to x itself at 20 by default, which is wrong in the ninth digit.
    return torch.nn.functional.softplus(x, threshold=40.0)


def own_and_others(sim: Tensor, labels: Tensor, scale: float = 1.0, dim: int = 1) -> tuple[Tensor, Tensor]:
    """Compute each sample's similarity to its class [N], and log sum exp(scale * sim) over the others.

    These are the other classes [N] for dim 1, the other samples [C] for dim 0; -inf with zero gradient without others.
    """
    index = labels[:, None]

    def in_plain_torch(sim: Tensor) -> tuple[Tensor, Tensor]:
        own = sim.gather(1, index).squeeze(1)
        return own, log_sum((sim * scale).scatter_(1, index, float("-inf")), dim)

    return cpu_kernels.own_and_others(sim, index, scale, dim, in_plain_torch) if on_host(sim) else in_plain_torch(sim)


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum each row over a mask; entries outside may be infinite."""
    return torch.where(mask, x, 0.0).sum(1)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Compute the mean of all entries in a mask, as a 0-dim tensor; 0 if there are none."""
    return masked_sum(x, mask).sum() / mask.sum().clamp(min=1)


def row_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Compute the mean of each row over a mask; 0 for an empty row."""
    return masked_sum(x, mask) / mask.sum(1).clamp(min=1)


def soft_histogram(x: Tensor, mask: Tensor, bins: int) -> Tensor:
    """Spread each entry of x, in [0, bins], over its two nearest bin edges. Returns counts per row [N, bins + 1]."""
    lower = x.detach().nan_to_num().floor().clamp(0, bins - 1)
    share = torch.where(mask, x - lower, 0.0)
    index, rest = lower.long(), mask.to(x.dtype) - share
    return x.new_zeros(len(x), bins + 1).scatter_add(1, index, rest).scatter_add(1, index + 1, share)


def sine(cosine: Tensor) -> Tensor:
    """Return the sine of an angle in [0, pi] from its cosine, with zero gradient at |cosine| = 1."""
    return (1 - cosine.square()).clamp(min=1e-12).sqrt()


def sum_of_violations(p: Pairs, margin: Tensor, column: Tensor | None = None) -> Tensor:
    """Sum max(0, s_n - s_p + margin) over all triplets of each anchor.

    The margins are [N, 1], or [N, C] with the column [M] of each reference.

    By sorting the positives of each anchor: a negative n violates the margin against those below s_n + margin, the
    first c of them, and a positive of rank r is violated by the negatives with c > r. Exact, in time N M log P.
    """

    def values(q: Pairs, margin: Tensor) -> Tensor:
        with torch.no_grad():
            margin = margin if column is None else margin[:, column]
            columns, is_positive = q.positive_columns()
            ranked, order = q.sim.gather(1, columns).masked_fill(~is_positive, float("inf")).sort(1)
            reach = (q.sim + margin).masked_fill_(~q.neg, float("-inf"))
            below = torch.searchsorted(ranked, reach)  # [n, M] number of positives
            zeros = reach.new_zeros(len(reach), ranked.shape[1] + 1)
            histogram = zeros.scatter_add(1, below, torch.ones_like(reach))
            above = histogram.flip(1).cumsum(1).flip(1)[:, 1:]  # [n, K] number of negatives, by rank
            violated = torch.where(ranked < float("inf"), above, 0.0)
            weight = below.to(reach.dtype)
            offset = (weight * margin).sum(1)
            weight.scatter_add_(1, columns.gather(1, order), -violated)
        # Each violated triplet adds s_n - s_p + margin: a sum of similarities with fixed weights.
        return (weight * q.sim).sum(1) + offset

    return p.per_anchor(values, margin)
