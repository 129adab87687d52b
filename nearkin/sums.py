"""Sums over many pairs: the numeric primitives under the losses.

Each has a hand-written backward pass that holds one buffer and is exact where autograd would divide zero by zero: a
zero vector, an empty row, two coincident points. Second derivatives are not defined.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nearkin.errors import DataError

# A vector no longer than this has no direction: it is mapped to zero, with zero gradient.
ZERO_LENGTH = 1e-12


def full_precision(like: Tensor) -> torch.autocast:
    """A context in which autocast does not touch the products: a cosine in bfloat16 has two digits."""
    return torch.autocast(like.device.type, enabled=False)


def refuse_non_finite(x: Tensor) -> None:
    """Raise if a row [.., D] holds NaN or infinity."""
    bad = torch.nonzero(~torch.isfinite(x.detach()).reshape(-1, x.shape[-1]).all(1)).flatten().tolist()
    if bad:
        raise DataError(
            f"{len(bad)} of {x[..., 0].numel()} rows hold NaN or infinity (first: row {bad[0]}). "
            "Look at the learning rate, the mixed precision or the input that made them."
        )


def check_finite(x: Tensor) -> None:
    """The same at the price of one sum; `unit` checks by itself, losses on raw embeddings ask here."""
    if not torch.isfinite(x.detach().sum()):
        refuse_non_finite(x)


@dataclass(frozen=True, eq=False)
class Side:
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

    def listed(self) -> tuple[Tensor, Tensor]:
        """(row, column) of every pair inside, row by row."""
        return list_of(self.mask) if self.inside is None else self.inside

    def any_in_row(self) -> Tensor:
        """[N] bool: whether a row holds a pair at all."""
        if self.inside is None:
            return self.mask.any(1)
        found = torch.zeros(len(self.mask), dtype=torch.bool, device=self.mask.device)
        found[self.inside[0]] = True
        return found


def list_of(mask: Tensor) -> tuple[Tensor, Tensor]:
    """(row, column) of every pair in a mask, row by row."""
    row, column = mask.nonzero(as_tuple=True)
    return row, column


# --- vectors ----------------------------------------------------------------------------------------------------------


def unit(x: Tensor) -> Tensor:
    """Rows (last dimension) scaled to length 1; a zero row stays zero and gets zero gradient.

    >>> unit(torch.tensor([[3.0, 4.0], [0.0, 0.0]])).tolist()
    [[0.6..., 0.8...], [0.0, 0.0]]
    """
    return _Unit.apply(x)  # type: ignore[no-any-return]


def _normalise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Unit rows, and the inverse lengths (0 for a zero row)."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    # One number tells of a NaN or infinity anywhere, so the check costs no pass over the batch.
    if not torch.isfinite(length.sum()):
        refuse_non_finite(x)
        # Finite, but its square overflows: go by way of the largest entry.
        top = x.abs().amax(-1, keepdim=True).clamp_(min=1.0)
        length = torch.linalg.vector_norm(x / top, dim=-1, keepdim=True) * top
    inverse = length.reciprocal().masked_fill_(length <= ZERO_LENGTH, 0.0)
    return x * inverse, inverse


def _tangent(g: Tensor, f: Tensor, inverse: Tensor, out: Tensor | None = None) -> Tensor:
    """The gradient on x of f = x / |x|, given that on f."""
    along = (f * g).sum(-1, keepdim=True)
    return torch.addcmul(g, f, along, value=-1, out=out).mul_(inverse)


class _Unit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        f, inverse = _normalise(x)
        ctx.save_for_backward(f, inverse)
        return f

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return _tangent(g, *ctx.saved_tensors)


def gram(f: Tensor) -> Tensor:
    """All products of the rows of f [N, D] with each other [N, N]; of each of several such blocks [.., N, D]."""
    return _Gram.apply(f)  # type: ignore[no-any-return]


def cosine_gram(x: Tensor) -> tuple[Tensor, Tensor]:
    """All cosines of the rows of x with each other [N, N], and the squared lengths of the unit rows [N]: 1, or 0."""
    return _CosineGram.apply(x)  # type: ignore[no-any-return]


def _symmetric_product(f: Tensor) -> Tensor:
    n = len(f)
    block = max(128, n // 8)
    if n <= 2 * block:
        return f @ f.t()
    # Only the lower blocks are multiplied, the upper ones are copied: a quarter of the time at N = 512.
    s = f.new_empty(n, n)
    for i in range(0, n, block):
        torch.mm(f[i : i + block], f[: i + block].t(), out=s[i : i + block, : i + block])
    for i in range(block, n, block):
        s[i - block : i, i:] = s[i:, i - block : i].t()
    return s


class _Gram(torch.autograd.Function):
    """f f^T. Its backward is (G + G^T) f: one product and one addition where autograd does two products."""

    @staticmethod
    def forward(ctx: Any, f: Tensor) -> Tensor:
        ctx.save_for_backward(f)
        return _symmetric_product(f) if f.dim() == 2 else f @ f.mT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (f,) = ctx.saved_tensors
        with full_precision(f):
            return _both_ways(g, f) if f.dim() == 2 else torch.matmul(g + g.mT, f)


class _CosineGram(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        f, inverse = _normalise(x)
        square = (inverse > 0).squeeze(1).to(x.dtype)
        ctx.save_for_backward(f, inverse)
        ctx.mark_non_differentiable(square)
        return _symmetric_product(f), square

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, _: Tensor) -> Tensor:
        f, inverse = ctx.saved_tensors
        with full_precision(f):
            both = _both_ways(g, f)
            return _tangent(both, f, inverse, out=both)


def _both_ways(g: Tensor, f: Tensor) -> Tensor:
    """(G + G^T) f: what the gradient G on f f^T gives each row for its two roles."""
    # A hinge or a miner leaves few pairs with a gradient; from one in 32 on (judged by every eighth row) the dense
    # product is faster.
    if g.device.type == "cpu" and len(g) > 256 and int(g[::8].count_nonzero()) * 256 < g.numel():
        at = g.nonzero().t()
        both = torch.sparse_coo_tensor(
            torch.cat([at, at.flip(0)], 1), g[at[0], at[1]].repeat(2), g.shape, check_invariants=False
        )
        product: Tensor = torch.sparse.mm(both, f)
        return product
    return torch.mm(g + g.t(), f)


def safe_sqrt(square: Tensor, scale: float = 1.0) -> Tensor:
    """Square root of a difference of numbers of size `scale`; what rounding cannot tell from 0 is 0, gradient 0.

    >>> safe_sqrt(torch.tensor([4.0, 1e-9, -1e-9])).tolist()
    [2.0, 0.0, 0.0]
    """
    return _Root.apply(square, 4 * torch.finfo(square.dtype).eps * scale)  # type: ignore[no-any-return]


class _Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, square: Tensor, noise: float) -> Tensor:
        root = torch.nn.functional.threshold(square, noise, 0.0).sqrt_()
        ctx.save_for_backward(root)
        return root

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (root,) = ctx.saved_tensors
        # Where the root is 0, g / inf = 0; a mask would cost one more pass.
        safe = torch.nn.functional.threshold(root, 0.0, float("inf"))
        return torch.div(g, safe, out=safe).mul_(0.5), None


# --- logarithms of sums -----------------------------------------------------------------------------------------------


def log_sum_exp(x: Tensor, over: Side, scale: float = 1.0) -> Tensor:
    """log of the sum over a side of exp(scale * x), per row [N]; -inf (zero gradient) for an empty row."""
    return _lse(x, over, scale, 0.0, False)


def log1p_sum_exp(x: Tensor, over: Side, scale: float = 1.0, offset: float = 0.0) -> Tensor:
    """log of 1 + the sum over a side of exp(scale * (x - offset)), per row [N]; 0 for an empty row."""
    return _lse(x, over, scale, offset, True)


def _lse(x: Tensor, over: Side, scale: float, offset: float, one: bool) -> Tensor:
    if x.numel() == 0:
        return x.sum(1) if one else x.sum(1) - float("inf")
    if over.inside is not None:
        return _ListedLSE.apply(x, *over.inside, scale, offset, one)  # type: ignore[no-any-return]
    return _DenseLSE.apply(x, over, scale, offset, one)  # type: ignore[no-any-return]


def shifted_exp(
    x: Tensor, over: Side, scale: float, offset: float = 0.0, one: bool = False
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
    def forward(ctx: Any, x: Tensor, over: Side, scale: float, offset: float, one: bool) -> Tensor:
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
        v = (x[row, column] - offset).mul_(scale)
        top = x.new_full((len(x),), 0.0 if one else float("-inf")).scatter_reduce_(0, row, v, "amax")
        weight = v.sub_(top[row]).exp_()
        total = (torch.exp(-top) if one else torch.zeros_like(top)).index_add_(0, row, weight)
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


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) to the last digit; softplus(-inf) is 0 with zero gradient."""
    # torch switches to x itself at 20 by default, which is wrong in the ninth digit.
    return torch.nn.functional.softplus(x, threshold=40.0)


# --- plain sums and hinges --------------------------------------------------------------------------------------------


def pick(x: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """x[row, column] for a list without repetitions."""
    return _Pick.apply(x, row, column)  # type: ignore[no-any-return]


class _Pick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, row: Tensor, column: Tensor) -> Tensor:
        ctx.shape = x.shape
        ctx.save_for_backward(row, column)
        return x[row, column]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        grad = g.new_zeros(ctx.shape)
        grad[ctx.saved_tensors] = g
        return grad, None, None


def row_sum(x: Tensor, over: Side) -> Tensor:
    """The sum over a side, per row [N]."""
    if over.inside is None:
        return (x * over.mask).sum(1)
    row, column = over.inside
    return x.new_zeros(len(x)).index_add(0, row, pick(x, row, column))


def hinge_sum(x: Tensor, over: Side, slope: float, at: float | Tensor, power: int = 1) -> tuple[Tensor, Tensor]:
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
    def forward(ctx: Any, x: Tensor, over: Side, slope: float, at: Tensor, power: int) -> tuple[Tensor, Tensor]:
        value = x - at if slope == 1 else (x - at).mul_(slope)
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


def rank_positives(sim: Tensor, positives: Side) -> RankedPositives:
    """Sort the positives of every anchor. Time T log P; nothing of size [N, M] is made."""
    row, column = positives.listed()
    size = torch.bincount(row, minlength=len(sim))
    slot = torch.arange(len(row), device=row.device) - (size.cumsum(0) - size)[row]
    block = sim.new_full((len(sim), max(int(size.max()), 1)), float("inf"))
    block[row, slot] = sim[row, column]
    ranked, order = block.sort(dim=1, stable=True)
    return RankedPositives(row, column, slot, ranked, order)
