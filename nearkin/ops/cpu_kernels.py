"""Hand-written backward passes that are faster on the CPU than autograd; used only where `on_host` is true.

Every function here has a plain counterpart, its reference in the tests, which is used on other devices, compiled,
inside `torch.func` and for second derivatives.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Plain = Callable[..., Any]


def unit(x: Tensor, inverse: Tensor, plain: Plain) -> Tensor:
    """Multiply rows by their inverse lengths, given as a constant; `plain` computes the same from x."""
    return _Unit.apply(x, inverse, plain)  # type: ignore[no-any-return]


class _Unit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, inverse: Tensor, plain: Plain) -> Tensor:
        f = x * inverse
        ctx.plain = plain
        ctx.save_for_backward(x, f, inverse)
        return f

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, f, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *differentiable(ctx.plain, g, x), None, None
        radial = (f * g).sum(-1, keepdim=True)
        return torch.addcmul(g, f, radial, value=-1).mul_(inverse), None, None


def differentiable(plain: Plain, g: Any, *inputs: Tensor) -> list[Tensor | None]:
    """Return the gradients of the plain path with a graph of their own, for second derivatives."""
    wanted = [x for x in inputs if x.requires_grad]
    grads = iter(torch.autograd.grad(plain(*inputs), wanted, g, create_graph=True, allow_unused=True))
    return [next(grads) if x.requires_grad else None for x in inputs]


def gram(f: Tensor) -> Tensor:
    """Compute f f^T."""
    return _Gram.apply(f)  # type: ignore[no-any-return]


class _Gram(torch.autograd.Function):
    """The backward pass is (G + G^T) f: one product and one addition, where autograd needs two products."""

    @staticmethod
    def forward(ctx: Any, f: Tensor) -> Tensor:
        ctx.save_for_backward(f)
        return _symmetric_product(f)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (f,) = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):
            # A hinge or a miner leaves few pairs with a gradient; above one in 32 (estimated from every eighth row) the
            # dense product is faster.
            if torch.is_grad_enabled() or len(g) <= 256 or int(g[::8].count_nonzero()) * 256 >= g.numel():
                return torch.mm(g + g.t(), f)
            index = g.nonzero().t()
            both, values = torch.cat([index, index.flip(0)], 1), g[index[0], index[1]].repeat(2)
            symmetric = torch.sparse_coo_tensor(both, values, g.shape, check_invariants=False)
            return torch.sparse.mm(symmetric, f)  # type: ignore[no-any-return]


def _symmetric_product(f: Tensor) -> Tensor:
    n = len(f)
    block = max(128, n // 8)
    if n <= 2 * block:
        return f @ f.t()
    # Only the lower blocks are multiplied, the upper ones are copied: a quarter of the time at N = 512.
    product = f.new_empty(n, n)
    for i in range(0, n, block):
        torch.mm(f[i : i + block], f[: i + block].t(), out=product[i : i + block, : i + block])
    for i in range(block, n, block):
        product[i - block : i, i:] = product[i:, i - block : i].t()
    return product


def log_sum_exp(x: Tensor, mask: Tensor, scale: float, plain: Plain) -> Tensor:
    """Compute log sum exp(scale * x) over the pairs of a mask, per row."""
    few = int(mask.count_nonzero()) * 16 <= mask.numel()
    return (_SparseLSE if few else _DenseLSE).apply(x, mask, scale, plain)  # type: ignore[no-any-return]


def _exp_and_sum(logits: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Replace logits by their exponentials over the largest along a dimension; return the largest, and the sum."""
    top = logits.amax(dim)
    top.masked_fill_(top == float("-inf"), 0.0)
    # Denormal numbers are slow: what is below 1e-30 becomes 0.
    floor, smallest = (-70.0, 1e-30) if logits.dtype == torch.float32 else (-700.0, 1e-300)
    torch.threshold_(logits.sub_(top.unsqueeze(dim)).clamp_(min=floor).exp_(), smallest, 0.0)
    return top, logits.sum(dim)


class _DenseLSE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float, plain: Plain) -> Tensor:
        weight = (x * scale).masked_fill_(~mask, float("-inf"))
        top, total = _exp_and_sum(weight, 1)
        ctx.scale, ctx.plain = scale, plain
        ctx.save_for_backward(x, weight, total)
        return top + total.log()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, total = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *differentiable(ctx.plain, g, x), None, None, None
        factor = (ctx.scale * g / total).masked_fill_(total == 0, 0.0)
        return weight * factor[:, None], None, None, None


class _SparseLSE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float, plain: Plain) -> Tensor:
        row, column = mask.nonzero(as_tuple=True)
        logit = x[row, column].mul_(scale)
        top = x.new_full((len(x),), float("-inf")).scatter_reduce_(0, row, logit, "amax")
        weight = logit.sub_(top[row]).exp_()
        total = torch.zeros_like(top).index_add_(0, row, weight)
        ctx.scale, ctx.plain = scale, plain
        ctx.save_for_backward(x, row, column, weight, total)
        return top + total.log()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, row, column, weight, total = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *differentiable(ctx.plain, g, x), None, None, None
        grad = torch.zeros_like(x)
        grad[row, column] = weight * (ctx.scale * g / total)[row]
        return grad, None, None, None


def own_and_others(x: Tensor, index: Tensor, scale: float, dim: int, plain: Plain) -> tuple[Tensor, Tensor]:
    """Compute the column index [N, 1] of each row, and log sum exp(scale * x) along a dimension without it."""
    return _OwnAndOthers.apply(x, index, scale, dim, plain)  # type: ignore[no-any-return]


class _OwnAndOthers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, scale: float, dim: int, plain: Plain) -> tuple[Tensor, Tensor]:
        weight = (x * scale).scatter_(1, index, float("-inf"))
        top, total = _exp_and_sum(weight, dim)
        ctx.scale, ctx.dim, ctx.plain = scale, dim, plain
        ctx.save_for_backward(x, index, weight, total)
        return x.gather(1, index).squeeze(1), top + total.log()

    @staticmethod
    def backward(ctx: Any, g_own: Tensor, g_others: Tensor) -> tuple[Tensor | None, ...]:
        x, index, weight, total = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *differentiable(ctx.plain, (g_own, g_others), x), None, None, None, None
        factor = (ctx.scale * g_others / total).masked_fill_(total == 0, 0.0)
        return (weight * factor.unsqueeze(ctx.dim)).scatter_(1, index, g_own[:, None]), None, None, None, None


def signed_sum(x: Tensor, plus: Tensor, minus: Tensor, plain: Plain) -> Tensor:
    """Sum each row over the pairs `plus`, less the sum over the pairs `minus`."""
    used = plus | minus
    if int(used.count_nonzero()) * 16 > used.numel():
        return plain(x)  # type: ignore[no-any-return]
    row, column = used.nonzero(as_tuple=True)
    sign = plus[row, column].to(x.dtype).mul_(2).sub_(1)
    return _SparseSum.apply(x, row, column, sign, plain)  # type: ignore[no-any-return]


class _SparseSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, row: Tensor, column: Tensor, sign: Tensor, plain: Plain) -> Tensor:
        ctx.plain = plain
        ctx.save_for_backward(x, row, column, sign)
        return x.new_zeros(len(x)).index_add_(0, row, x[row, column] * sign)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, row, column, sign = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *differentiable(ctx.plain, g, x), None, None, None, None
        grad = torch.zeros_like(x)
        grad[row, column] = sign * g[row]
        return grad, None, None, None, None


def distances(products: Tensor, anchor_sq: Tensor, ref_sq: Tensor, plain: Plain) -> Tensor:
    """Compute Euclidean distances, 0 where the square is within rounding of 0."""
    return _Distances.apply(products, anchor_sq, ref_sq, plain)  # type: ignore[no-any-return]


class _Distances(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, products: Tensor, anchor_sq: Tensor, ref_sq: Tensor, plain: Plain) -> Tensor:
        root = torch.sub(ref_sq, products, alpha=2).add_(anchor_sq[:, None])
        tolerance = 4 * torch.finfo(root.dtype).eps
        for chunk, size in zip(
            torch.split(root, 128), torch.split(anchor_sq, 128), strict=True
        ):  # without a further block [N, M]
            chunk.masked_fill_(chunk <= (size[:, None] + ref_sq).mul_(tolerance), 0.0)
        ctx.plain = plain
        ctx.save_for_backward(products, anchor_sq, ref_sq, root.sqrt_())
        return root

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, root = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *differentiable(ctx.plain, g, *inputs), None
        # Where the distance is 0, g / inf = 0; a mask would cost one more pass.
        safe = torch.nn.functional.threshold(root, 0.0, float("-inf")).neg_()
        grad = torch.div(g, safe, out=safe)
        anchor_grad = grad.sum(1).mul_(-0.5) if ctx.needs_input_grad[1] else None
        return grad, anchor_grad, grad.sum(0).mul_(-0.5) if ctx.needs_input_grad[2] else None, None
