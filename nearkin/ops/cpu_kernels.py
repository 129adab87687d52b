"""Hand-written backward passes that are faster on the CPU than autograd; used only where `on_host` is true.

Every function here has a plain counterpart, its reference in the tests, which is used on other devices, compiled,
inside `torch.func` and for second derivatives.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Plain = Callable[..., Any]


class _Kernel(torch.autograd.Function):
    """A function whose backward pass is written by hand.

    `compute(*inputs)` returns the value and the tensors that `gradients(g, *inputs, *tensors)` needs.
    """

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Any], gradients: Callable[..., Any], plain: Plain, *x: Tensor) -> Any:
        value, saved = compute(*x)
        ctx.gradients, ctx.plain, ctx.n_inputs = gradients, plain, len(x)
        ctx.save_for_backward(*x, *saved)
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        g, saved = grads if len(grads) > 1 else grads[0], ctx.saved_tensors
        if torch.is_grad_enabled():
            return None, None, None, *differentiable(ctx.plain, g, *saved[: ctx.n_inputs])
        return None, None, None, *ctx.gradients(g, *saved)


def differentiable(plain: Plain, g: Any, *inputs: Tensor) -> list[Tensor | None]:
    """Return the gradients of the plain path with a graph of their own, for second derivatives."""
    wanted = [x for x in inputs if x.requires_grad]
    grads = iter(torch.autograd.grad(plain(*inputs), wanted, g, create_graph=True, allow_unused=True))
    return [next(grads) if x.requires_grad else None for x in inputs]


def unit(x: Tensor, inverse: Tensor, plain: Plain) -> Tensor:
    """Multiply rows by their inverse lengths, given as a constant; `plain` computes the same from x."""

    def compute(x: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        f = x * inverse
        return f, [f]

    def gradients(g: Tensor, x: Tensor, f: Tensor) -> list[Tensor]:
        radial = (f * g).sum(-1, keepdim=True)
        return [torch.addcmul(g, f, radial, value=-1).mul_(inverse)]

    return _Kernel.apply(compute, gradients, plain, x)  # type: ignore[no-any-return]


def gram(f: Tensor) -> Tensor:
    """Compute f f^T. Its gradient is (G + G^T) f: one product and one addition, where autograd needs two products."""

    def gradients(g: Tensor, f: Tensor) -> list[Tensor]:
        with torch.autocast("cpu", enabled=False):
            # A hinge or a miner leaves few pairs with a gradient; above one in 32 (estimated from every eighth row) the
            # dense product is faster.
            if len(g) <= 256 or int(g[::8].count_nonzero()) * 256 >= g.numel():
                return [torch.mm(g + g.t(), f)]
            index = g.nonzero().t()
            both, values = torch.cat([index, index.flip(0)], 1), g[index[0], index[1]].repeat(2)
            symmetric = torch.sparse_coo_tensor(both, values, g.shape, check_invariants=False)
            return [torch.sparse.mm(symmetric, f)]

    plain = lambda f: f @ f.t()  # noqa: E731
    return _Kernel.apply(lambda f: (_symmetric_product(f), ()), gradients, plain, f)  # type: ignore[no-any-return]


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

    def dense(x: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        weight = (x * scale).masked_fill_(~mask, float("-inf"))
        top, total = _exp_and_sum(weight, 1)
        return top + total.log(), (weight, total)

    def dense_gradients(g: Tensor, x: Tensor, weight: Tensor, total: Tensor) -> list[Tensor]:
        return [weight * (scale * g / total).masked_fill_(total == 0, 0.0)[:, None]]

    def sparse(x: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        row, column = mask.nonzero(as_tuple=True)
        logit = x[row, column].mul_(scale)
        top = x.new_full((len(x),), float("-inf")).scatter_reduce_(0, row, logit, "amax")
        weight = logit.sub_(top[row]).exp_()
        total = torch.zeros_like(top).index_add_(0, row, weight)
        return top + total.log(), (row, column, weight, total)

    def sparse_gradients(g: Tensor, x: Tensor, row: Tensor, column: Tensor, *sums: Tensor) -> list[Tensor]:
        weight, total = sums
        return [_scatter(x, row, column, weight * (scale * g / total)[row])]

    few = int(mask.count_nonzero()) * 16 <= mask.numel()
    functions = (sparse, sparse_gradients) if few else (dense, dense_gradients)
    return _Kernel.apply(*functions, plain, x)  # type: ignore[no-any-return]


def _scatter(like: Tensor, row: Tensor, column: Tensor, values: Tensor) -> Tensor:
    grad = torch.zeros_like(like)
    grad[row, column] = values
    return grad


def _exp_and_sum(logits: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Replace logits by their exponentials over the largest along a dimension; return the largest, and the sum."""
    top = logits.amax(dim)
    top.masked_fill_(top == float("-inf"), 0.0)
    # Denormal numbers are slow: what is below 1e-30 becomes 0.
    floor, smallest = (-70.0, 1e-30) if logits.dtype == torch.float32 else (-700.0, 1e-300)
    torch.threshold_(logits.sub_(top.unsqueeze(dim)).clamp_(min=floor).exp_(), smallest, 0.0)
    return top, logits.sum(dim)


def own_and_others(x: Tensor, index: Tensor, scale: float, dim: int, plain: Plain) -> tuple[Tensor, Tensor]:
    """Compute the column index [N, 1] of each row, and log sum exp(scale * x) along a dimension without it."""

    def compute(x: Tensor) -> tuple[Any, Sequence[Tensor]]:
        weight = (x * scale).scatter_(1, index, float("-inf"))
        top, total = _exp_and_sum(weight, dim)
        return (x.gather(1, index).squeeze(1), top + total.log()), (weight, total)

    def gradients(g: tuple[Tensor, Tensor], x: Tensor, weight: Tensor, total: Tensor) -> list[Tensor]:
        factor = (scale * g[1] / total).masked_fill_(total == 0, 0.0)
        return [(weight * factor.unsqueeze(dim)).scatter_(1, index, g[0][:, None])]

    return _Kernel.apply(compute, gradients, plain, x)  # type: ignore[no-any-return]


def signed_sum(x: Tensor, plus: Tensor, minus: Tensor, plain: Plain) -> Tensor:
    """Sum each row over the pairs `plus`, less the sum over the pairs `minus`."""
    used = plus | minus
    if int(used.count_nonzero()) * 16 > used.numel():
        return plain(x)  # type: ignore[no-any-return]
    row, column = used.nonzero(as_tuple=True)
    sign = plus[row, column].to(x.dtype).mul_(2).sub_(1)

    def compute(x: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        return x.new_zeros(len(x)).index_add_(0, row, x[row, column] * sign), (row, column, sign)

    def gradients(g: Tensor, x: Tensor, row: Tensor, column: Tensor, sign: Tensor) -> list[Tensor]:
        return [_scatter(x, row, column, sign * g[row])]

    return _Kernel.apply(compute, gradients, plain, x)  # type: ignore[no-any-return]


def distances(products: Tensor, anchor_sq: Tensor, ref_sq: Tensor, plain: Plain) -> Tensor:
    """Compute Euclidean distances, 0 where the square is within rounding of 0."""

    def compute(products: Tensor, anchor_sq: Tensor, ref_sq: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        root = torch.sub(ref_sq, products, alpha=2).add_(anchor_sq[:, None])
        tolerance = 4 * torch.finfo(root.dtype).eps
        # In parts, without a further block [N, M].
        for part, size in zip(torch.split(root, 128), torch.split(anchor_sq, 128), strict=True):
            part.masked_fill_(part <= (size[:, None] + ref_sq).mul_(tolerance), 0.0)
        return root, (root.sqrt_(),)

    def gradients(g: Tensor, _: Tensor, anchor_sq: Tensor, ref_sq: Tensor, root: Tensor) -> list[Tensor | None]:
        # Where the distance is 0, g / inf = 0; a mask would cost one more pass.
        safe = torch.nn.functional.threshold(root, 0.0, float("-inf")).neg_()
        grad = torch.div(g, safe, out=safe)
        anchor_grad = grad.sum(1).mul_(-0.5) if anchor_sq.requires_grad else None
        return [grad, anchor_grad, grad.sum(0).mul_(-0.5) if ref_sq.requires_grad else None]

    return _Kernel.apply(compute, gradients, plain, products, anchor_sq, ref_sq)  # type: ignore[no-any-return]
