"""Masked reductions over similarity matrices, each with a backward pass that needs one buffer and is exact where
autograd would divide zero by zero, as for an empty row. Second derivatives are not defined.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nearkin.ops.geometry import accepts_sparse_gradient


@dataclass(frozen=True, eq=False)
class PairSet:
    """A set of pairs [N, M]: a mask and, where that is short, an index of the pairs inside or outside.

    Attributes:
        mask: [N, M] bool.
        inside: (row, column) of the pairs in the set, if they are few.
        outside: (row, column) of the pairs that are not in the set, if they are few.
    """

    mask: Tensor
    inside: tuple[Tensor, Tensor] | None = None
    outside: tuple[Tensor, Tensor] | None = None

    def fill_outside_(self, x: Tensor, value: float) -> Tensor:
        """Fill every entry of x [N, M] that is not in the set, in place."""
        if self.outside is None:
            return x.masked_fill_(~self.mask, value)
        x[self.outside] = value
        return x

    def counts(self) -> Tensor:
        """Return the number of pairs in each row [N], int64."""
        n, m = self.mask.shape
        if self.inside is not None:
            return torch.bincount(self.inside[0], minlength=n)
        if self.outside is not None:
            return m - torch.bincount(self.outside[0], minlength=n)
        return self.mask.sum(1, dtype=torch.int32).long()

    def indices(self) -> tuple[Tensor, Tensor]:
        """Return (row, column) of every pair in the set, in row-major order."""
        return mask_indices(self.mask) if self.inside is None else self.inside


def mask_indices(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return (row, column) of every True entry."""
    row, column = mask.nonzero(as_tuple=True)
    return row, column


def log_sum_exp(x: Tensor, pairs: PairSet, scale: float = 1.0) -> Tensor:
    """Compute log sum exp(scale * x) over a set of pairs, per row.

    Args:
        x: [N, M].
        pairs: The pairs to sum over.
        scale: Factor on x.

    Returns:
        [N]; -inf with zero gradient for an empty row.
    """
    return _lse(x, pairs, scale, 0.0, False)


def log1p_sum_exp(x: Tensor, pairs: PairSet, scale: float = 1.0, offset: float = 0.0) -> Tensor:
    """Compute log(1 + sum exp(scale * (x - offset))) over a set of pairs, per row.

    Args:
        x: [N, M].
        pairs: The pairs to sum over.
        scale: Factor on x - offset.
        offset: Subtracted from x.

    Returns:
        [N]; 0 for an empty row.
    """
    return _lse(x, pairs, scale, offset, True)


def _lse(x: Tensor, pairs: PairSet, scale: float, offset: float, add_one: bool) -> Tensor:
    if x.numel() == 0:
        return x.sum(1) if add_one else x.sum(1) - float("inf")
    if pairs.inside is not None:
        return _IndexedLSE.apply(x, *pairs.inside, scale, offset, add_one)  # type: ignore[no-any-return]
    return _DenseLSE.apply(x, pairs, scale, offset, add_one)  # type: ignore[no-any-return]


def shifted_exp(
    x: Tensor, pairs: PairSet, scale: float, offset: float = 0.0, add_one: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute exp(scale * (x - offset) - top) on a set of pairs, where top is the maximum of the row. No gradient."""
    weight = x * scale if offset == 0 else (x - offset).mul_(scale)
    pairs.fill_outside_(weight, float("-inf"))
    top = weight.amax(1)
    # The "+1" is a zero logit, so the maximum is at least 0; an empty row is shifted by 0 rather than by -inf.
    top = top.clamp_(min=0.0) if add_one else top.masked_fill_(top == float("-inf"), 0.0)
    exp_(weight.sub_(top[:, None]))
    total = weight.sum(1)
    return weight, total.add_(torch.exp(-top)) if add_one else total, top


def exp_(x: Tensor) -> Tensor:
    """Compute exp in place for x <= 0, with 0 below 1e-30 (1e-300 in float64): denormal numbers are slow."""
    floor, smallest = (-70.0, 1e-30) if x.dtype == torch.float32 else (-700.0, 1e-300)
    return torch.threshold_(x.clamp_(min=floor).exp_(), smallest, 0.0)


class _DenseLSE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pairs: PairSet, scale: float, offset: float, add_one: bool) -> Tensor:
        weight, total, top = shifted_exp(x, pairs, scale, offset, add_one)
        ctx.scale = scale
        ctx.save_for_backward(weight, total)
        return top + total.log()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None, None]:
        weight, total = ctx.saved_tensors
        factor = (ctx.scale * g / total).masked_fill_(total == 0, 0.0)
        return weight * factor[:, None], None, None, None, None


class _IndexedLSE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, row: Tensor, column: Tensor, scale: float, offset: float, add_one: bool) -> Tensor:
        weight, total, top = _indexed_exp(x, row, column, scale, offset, add_one)
        ctx.scale, ctx.shape = scale, x.shape
        ctx.save_for_backward(row, column, weight, total)
        return top + total.log()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        row, column, weight, total = ctx.saved_tensors
        grad = g.new_zeros(ctx.shape)
        grad[row, column] = weight * (ctx.scale * g / total)[row]
        return grad, None, None, None, None, None


def _indexed_exp(
    x: Tensor, row: Tensor, column: Tensor, scale: float, offset: float, add_one: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`shifted_exp` for indexed pairs: exponentials [T], row sums and maxima [N]."""
    logit = (x[row, column] - offset).mul_(scale)
    top = x.new_full((len(x),), 0.0 if add_one else float("-inf")).scatter_reduce_(0, row, logit, "amax")
    weight = logit.sub_(top[row]).exp_()
    total = (torch.exp(-top) if add_one else torch.zeros_like(top)).index_add_(0, row, weight)
    return weight, total, top


def log_sums(
    x: Tensor,
    positives: PairSet,
    negatives: PairSet,
    pos_scale: float,
    neg_scale: float,
    offset: float = 0.0,
    add_one: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute `log_sum_exp` (with add_one, `log1p_sum_exp`) over two disjoint sets of pairs in one pass."""
    if x.numel() == 0 or positives.inside is None or negatives.inside is not None:
        return _lse(x, positives, pos_scale, offset, add_one), _lse(x, negatives, neg_scale, offset, add_one)
    return _TwoLSE.apply(x, positives, negatives, pos_scale, neg_scale, offset, add_one)  # type: ignore[no-any-return]


class _TwoLSE(torch.autograd.Function):
    """Indexed positives and dense negatives: their gradients share one buffer."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        positives: PairSet,
        negatives: PairSet,
        pos_scale: float,
        neg_scale: float,
        offset: float,
        add_one: bool,
    ) -> tuple[Tensor, Tensor]:
        row, column = positives.indices()
        pull, pull_total, pull_top = _indexed_exp(x, row, column, pos_scale, offset, add_one)
        push, push_total, push_top = shifted_exp(x, negatives, neg_scale, offset, add_one)
        ctx.pos_scale, ctx.neg_scale = pos_scale, neg_scale
        ctx.save_for_backward(row, column, pull, pull_total, push, push_total)
        return pull_top + pull_total.log(), push_top + push_total.log()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_pull: Tensor, g_push: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        row, column, pull, pull_total, push, push_total = ctx.saved_tensors
        grad = push * (ctx.neg_scale * g_push / push_total).masked_fill_(push_total == 0, 0.0)[:, None]
        grad[row, column] = pull * (ctx.pos_scale * g_pull / pull_total)[row]
        return grad, None, None, None, None, None, None


def softplus(x: Tensor) -> Tensor:
    """Compute log(1 + exp(x)) to full precision.

    Args:
        x: Any shape; -inf gives 0 with zero gradient.

    Returns:
        The same shape.
    """
    # torch switches to x itself at 20 by default, which is wrong in the ninth digit.
    return torch.nn.functional.softplus(x, threshold=40.0)


def gather_pairs(x: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Return x[row, column], with a sparse gradient where x accepts one."""
    return _GatherPairs.apply(x, row, column, accepts_sparse_gradient(x))  # type: ignore[no-any-return]


class _GatherPairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, row: Tensor, column: Tensor, sparse: bool) -> Tensor:
        ctx.shape, ctx.sparse = x.shape, sparse
        ctx.save_for_backward(row, column)
        return x[row, column]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        row, column = ctx.saved_tensors
        if ctx.sparse:
            grad = torch.sparse_coo_tensor(torch.stack([row, column]), g, ctx.shape, check_invariants=False)
        else:
            grad = g.new_zeros(ctx.shape).index_put_((row, column), g, accumulate=True)
        return grad, None, None, None


def row_sum(x: Tensor, pairs: PairSet) -> Tensor:
    """Sum over a set of pairs, per row. Returns [N]."""
    if pairs.inside is None:
        return (x * pairs.mask).sum(1)
    row, column = pairs.inside
    return x.new_zeros(len(x)).index_add(0, row, gather_pairs(x, row, column))


def hinge_sum(
    x: Tensor, pairs: PairSet, slope: float, threshold: float | Tensor, power: int = 1
) -> tuple[Tensor, Tensor]:
    """Sum max(0, slope * (x - threshold)) ** power over a set of pairs, per row."""
    threshold = torch.as_tensor(threshold, dtype=x.dtype, device=x.device)
    if pairs.inside is None:
        return _HingeSum.apply(x, pairs, slope, threshold, power)  # type: ignore[no-any-return]
    row, column = pairs.inside
    value = torch.relu(slope * (gather_pairs(x, row, column) - threshold))
    zeros = x.new_zeros(len(x))
    return zeros.index_add(0, row, value**power), zeros.index_add(0, row, (value > 0).to(x.dtype)).to(torch.int32)


class _HingeSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, pairs: PairSet, slope: float, threshold: Tensor, power: int
    ) -> tuple[Tensor, Tensor]:
        value = x - threshold if slope == 1 else threshold - x if slope == -1 else (x - threshold).mul_(slope)
        pairs.fill_outside_(value.relu_(), 0.0)
        total = (value if power == 1 else value.square()).sum(1)
        ctx.slope, ctx.any = slope * power, bool(total.any())
        if ctx.any:
            active = value > 0
            count = active.sum(1, dtype=torch.int32)
            # The derivative of the hinge is 0 or 1, that of its square is twice the value.
            ctx.save_for_backward(active if power == 1 else value)
        else:
            count = torch.zeros(len(x), dtype=torch.int32, device=x.device)
        ctx.mark_non_differentiable(count)
        return total, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor | None, None, None, Tensor | None, None]:
        if not ctx.any:  # no term above 0, as for most negatives late in training
            return None, None, None, None, None
        (weight,) = ctx.saved_tensors
        grad = weight * (ctx.slope * g)[:, None]
        return grad, None, None, -grad.sum() if ctx.needs_input_grad[3] else None, None


@dataclass(frozen=True, eq=False)
class RankedPositives:
    """The positives of every anchor sorted by similarity, which turns sums over triplets into sums over pairs."""

    row: Tensor  # [T] row of every positive pair, in row-major order
    column: Tensor  # [T] its column
    slot: Tensor  # [T] its position among the positives of its anchor
    ranked: Tensor  # [N, P] similarities in ascending order, padded with +inf
    order: Tensor  # [N, P] the slot at each rank


def rank_positives(sim: Tensor, positives: PairSet) -> RankedPositives:
    """Sort the positives of every anchor, in time T log P and without a buffer [N, M]."""
    row, column = positives.indices()
    size = torch.bincount(row, minlength=len(sim))
    slot = torch.arange(len(row), device=row.device) - (size.cumsum(0) - size)[row]
    padded = sim.new_full((len(sim), max(int(size.max()), 1)), float("inf"))
    padded[row, slot] = sim[row, column]
    ranked, order = padded.sort(dim=1, stable=True)
    return RankedPositives(row, column, slot, ranked, order)
