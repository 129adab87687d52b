"""Sums over many pairs: the numeric primitives under the pair losses.

Each has a hand-written backward pass that holds one buffer and is exact where autograd would divide zero by zero, as in
an empty row. Second derivatives are not defined.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nearkin.ops.geometry import takes_sparse_gradient


@dataclass(frozen=True, eq=False)
class PairSet:
    """A set of pairs [N, M]: a mask and, where it is short, the list of what is inside or of what is outside."""

    mask: Tensor
    inside: tuple[Tensor, Tensor] | None = None
    outside: tuple[Tensor, Tensor] | None = None

    def fill_outside_(self, x: Tensor, value: float) -> Tensor:
        """Write a value into every entry that is not in the set."""
        if self.outside is None:
            return x.masked_fill_(~self.mask, value)
        x[self.outside] = value
        return x

    def counts(self) -> Tensor:
        """How many pairs each row holds [N], int64."""
        n, m = self.mask.shape
        if self.inside is not None:
            return torch.bincount(self.inside[0], minlength=n)
        if self.outside is not None:
            return m - torch.bincount(self.outside[0], minlength=n)
        return self.mask.sum(1, dtype=torch.int32).long()

    def listed(self) -> tuple[Tensor, Tensor]:
        """(row, column) of every pair inside, row by row."""
        return mask_indices(self.mask) if self.inside is None else self.inside


def mask_indices(mask: Tensor) -> tuple[Tensor, Tensor]:
    """(row, column) of every pair in a mask, row by row."""
    row, column = mask.nonzero(as_tuple=True)
    return row, column


# --- logarithms of sums -----------------------------------------------------------------------------------------------


def log_sum_exp(x: Tensor, over: PairSet, scale: float = 1.0) -> Tensor:
    """log of the sum over a side of exp(scale * x), per row [N]; -inf (zero gradient) for an empty row."""
    return _lse(x, over, scale, 0.0, False)


def log1p_sum_exp(x: Tensor, over: PairSet, scale: float = 1.0, offset: float = 0.0) -> Tensor:
    """log of 1 + the sum over a side of exp(scale * (x - offset)), per row [N]; 0 for an empty row."""
    return _lse(x, over, scale, offset, True)


def _lse(x: Tensor, over: PairSet, scale: float, offset: float, one: bool) -> Tensor:
    if x.numel() == 0:
        return x.sum(1) if one else x.sum(1) - float("inf")
    if over.inside is not None:
        return _ListedLSE.apply(x, *over.inside, scale, offset, one)  # type: ignore[no-any-return]
    return _DenseLSE.apply(x, over, scale, offset, one)  # type: ignore[no-any-return]


def shifted_exp(
    x: Tensor, over: PairSet, scale: float, offset: float = 0.0, one: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """exp(scale * (x - offset) - top) on a side, else 0 [N, M]; its row sums and `top` [N]. No gradient."""
    weight = x * scale if offset == 0 else (x - offset).mul_(scale)
    over.fill_outside_(weight, float("-inf"))
    top = weight.amax(1)
    # The "+1" is a zero logit, so the maximum is at least 0; an empty row is shifted by 0 rather than by -inf.
    top = top.clamp_(min=0.0) if one else top.masked_fill_(top == float("-inf"), 0.0)
    exp_(weight.sub_(top[:, None]))
    total = weight.sum(1)
    return weight, total.add_(torch.exp(-top)) if one else total, top


def exp_(x: Tensor) -> Tensor:
    """exp in place for x <= 0, with 0 for what is below 1e-30 (1e-300): underflow is slow, here and in products."""
    floor, least = (-70.0, 1e-30) if x.dtype == torch.float32 else (-700.0, 1e-300)
    return torch.threshold_(x.clamp_(min=floor).exp_(), least, 0.0)


class _DenseLSE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, over: PairSet, scale: float, offset: float, one: bool) -> Tensor:
        weight, total, top = shifted_exp(x, over, scale, offset, one)
        ctx.scale = scale
        ctx.save_for_backward(weight, total)
        return top + total.log()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None, None]:
        weight, total = ctx.saved_tensors
        row = (ctx.scale * g / total).masked_fill_(total == 0, 0.0)
        return weight * row[:, None], None, None, None, None


class _ListedLSE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, row: Tensor, column: Tensor, scale: float, offset: float, one: bool) -> Tensor:
        weight, total, top = _listed_exp(x, row, column, scale, offset, one)
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


def _listed_exp(
    x: Tensor, row: Tensor, column: Tensor, scale: float, offset: float, one: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`shifted_exp` for a list of pairs: weights [T], row sums and maxima [N]."""
    v = (x[row, column] - offset).mul_(scale)
    top = x.new_full((len(x),), 0.0 if one else float("-inf")).scatter_reduce_(0, row, v, "amax")
    weight = v.sub_(top[row]).exp_()
    total = (torch.exp(-top) if one else torch.zeros_like(top)).index_add_(0, row, weight)
    return weight, total, top


def log_sums(
    x: Tensor, near: PairSet, far: PairSet, near_scale: float, far_scale: float, offset: float = 0.0, one: bool = False
) -> tuple[Tensor, Tensor]:
    """The logarithms of two sums over disjoint sides in one go: (near [N], far [N]).

    With `one` each is `log1p_sum_exp`, otherwise `log_sum_exp`.
    """
    if x.numel() == 0 or near.inside is None or far.inside is not None:
        return _lse(x, near, near_scale, offset, one), _lse(x, far, far_scale, offset, one)
    return _TwoLSE.apply(x, near, far, near_scale, far_scale, offset, one)  # type: ignore[no-any-return]


class _TwoLSE(torch.autograd.Function):
    """A listed and a dense side: their gradients share one buffer."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, near: PairSet, far: PairSet, near_scale: float, far_scale: float, offset: float, one: bool
    ) -> tuple[Tensor, Tensor]:
        row, column = near.listed()
        pull, pull_total, pull_top = _listed_exp(x, row, column, near_scale, offset, one)
        push, push_total, push_top = shifted_exp(x, far, far_scale, offset, one)
        ctx.near_scale, ctx.far_scale = near_scale, far_scale
        ctx.save_for_backward(row, column, pull, pull_total, push, push_total)
        return pull_top + pull_total.log(), push_top + push_total.log()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_near: Tensor, g_far: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        row, column, pull, pull_total, push, push_total = ctx.saved_tensors
        grad = push * (ctx.far_scale * g_far / push_total).masked_fill_(push_total == 0, 0.0)[:, None]
        grad[row, column] = pull * (ctx.near_scale * g_near / pull_total)[row]
        return grad, None, None, None, None, None, None


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) to the last digit; softplus(-inf) is 0 with zero gradient."""
    # torch switches to x itself at 20 by default, which is wrong in the ninth digit.
    return torch.nn.functional.softplus(x, threshold=40.0)


# --- plain sums and hinges --------------------------------------------------------------------------------------------


def pick(x: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """x[row, column], with a sparse gradient where x can take one."""
    return _Pick.apply(x, row, column, takes_sparse_gradient(x))  # type: ignore[no-any-return]


class _Pick(torch.autograd.Function):
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


def row_sum(x: Tensor, over: PairSet) -> Tensor:
    """The sum over a side, per row [N]."""
    if over.inside is None:
        return (x * over.mask).sum(1)
    row, column = over.inside
    return x.new_zeros(len(x)).index_add(0, row, pick(x, row, column))


def hinge_sum(x: Tensor, over: PairSet, slope: float, at: float | Tensor, power: int = 1) -> tuple[Tensor, Tensor]:
    """Sum over a side of max(0, slope * (x - at)) ** power per row [N], and how many terms are above 0 [N].

    `at` may be a learned 0-dim tensor.
    """
    at = torch.as_tensor(at, dtype=x.dtype, device=x.device)
    if over.inside is None:
        return _HingeSum.apply(x, over, slope, at, power)  # type: ignore[no-any-return]
    row, column = over.inside
    value = torch.relu(slope * (pick(x, row, column) - at))
    zeros = x.new_zeros(len(x))
    return zeros.index_add(0, row, value**power), zeros.index_add(0, row, (value > 0).to(x.dtype)).to(torch.int32)


class _HingeSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, over: PairSet, slope: float, at: Tensor, power: int) -> tuple[Tensor, Tensor]:
        value = x - at if slope == 1 else at - x if slope == -1 else (x - at).mul_(slope)
        over.fill_outside_(value.relu_(), 0.0)
        total = (value if power == 1 else value.square()).sum(1)
        ctx.slope, ctx.any = slope * power, bool(total.any())
        if ctx.any:
            active = value > 0
            count = active.sum(1, dtype=torch.int32)
            # The slope of the hinge is 0 or 1, that of its square is twice the value.
            ctx.save_for_backward(active if power == 1 else value)
        else:
            count = torch.zeros(len(x), dtype=torch.int32, device=x.device)
        ctx.mark_non_differentiable(count)
        return total, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor | None, None, None, Tensor | None, None]:
        if not ctx.any:  # no term is above 0, as with most negatives late in training: nothing to pass on
            return None, None, None, None, None
        (weight,) = ctx.saved_tensors
        grad = weight * (ctx.slope * g)[:, None]
        return grad, None, None, -grad.sum() if ctx.needs_input_grad[3] else None, None


# --- positives in order -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RankedPositives:
    """The positives of every anchor, sorted by similarity: what turns sums over triplets into sums over pairs.

    row, column   [T] every positive pair, in row-major order
    slot          [T] its number among the positives of its anchor
    ranked        [N, P] similarities in ascending order, +inf beyond the last
    order         [N, P] the slot that stands at each rank
    """

    row: Tensor
    column: Tensor
    slot: Tensor
    ranked: Tensor
    order: Tensor


def rank_positives(sim: Tensor, positives: PairSet) -> RankedPositives:
    """Sort the positives of every anchor. Time T log P; nothing of size [N, M] is made."""
    row, column = positives.listed()
    size = torch.bincount(row, minlength=len(sim))
    slot = torch.arange(len(row), device=row.device) - (size.cumsum(0) - size)[row]
    block = sim.new_full((len(sim), max(int(size.max()), 1)), float("inf"))
    block[row, slot] = sim[row, column]
    ranked, order = block.sort(dim=1, stable=True)
    return RankedPositives(row, column, slot, ranked, order)
