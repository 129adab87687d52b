"""Vectors and their products: lengths, cosines, distances.

Each has a hand-written backward pass that is exact where autograd would divide zero by zero: a zero vector, two
coincident points. Second derivatives are not defined.
"""

from __future__ import annotations

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
    if not g.is_sparse and g.device.type == "cpu" and len(g) > 256 and int(g[::8].count_nonzero()) * 256 < g.numel():
        at = g.nonzero().t()
        g = torch.sparse_coo_tensor(at, g[at[0], at[1]], g.shape, check_invariants=False)
    if not g.is_sparse:
        return torch.mm(g + g.t(), f)
    at, values = g._indices(), g._values()
    both = torch.sparse_coo_tensor(torch.cat([at, at.flip(0)], 1), values.repeat(2), g.shape, check_invariants=False)
    product: Tensor = torch.sparse.mm(both, f)
    return product


def takes_sparse_gradient(x: Tensor) -> bool:
    """Whether x comes straight from `gram` or `cosine_gram` and is large enough for a sparse gradient to pay."""
    made_by = x.grad_fn.name() if x.grad_fn is not None else ""
    return made_by in ("_GramBackward", "_CosineGramBackward") and x.device.type == "cpu" and len(x) > 256


def distances(products: Tensor, anchor_sq: Tensor, ref_sq: Tensor) -> Tensor:
    """Euclidean distances [N, M] from products and squared lengths; coincident points are at 0, with zero gradient."""
    return _Distances.apply(products, anchor_sq, ref_sq)  # type: ignore[no-any-return]


class _Distances(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, products: Tensor, anchor_sq: Tensor, ref_sq: Tensor) -> Tensor:
        square = torch.sub(ref_sq, products, alpha=2).add_(anchor_sq[:, None])
        # A difference of numbers of some size cannot tell less than a few of their last digits from 0. The size is that
        # of each pair: one long vector must not blot out the distances of all others.
        digits = 4 * torch.finfo(square.dtype).eps
        low, high = torch.stack(torch.cat([anchor_sq, ref_sq]).aminmax()).tolist() if products.numel() else (0.0, 0.0)
        if 4 * low >= high:  # all of about one length, as unit vectors are: one size serves, in one pass
            torch.threshold_(square, digits * 2 * high, 0.0)
        else:  # some rows at a time: a third block [N, M] would cost more than the comparison
            for part, size in zip(torch.split(square, 128), torch.split(anchor_sq, 128), strict=True):
                part.masked_fill_(part <= (size[:, None] + ref_sq).mul_(digits), 0.0)
        root = square.sqrt_()
        ctx.save_for_backward(root)
        return root

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        (root,) = ctx.saved_tensors
        # Where the distance is 0, g / inf = 0; a mask would cost one more pass.
        safe = torch.nn.functional.threshold(root, 0.0, float("-inf")).neg_()
        grad = torch.div(g, safe, out=safe)
        on_anchor = grad.sum(1).mul_(-0.5) if ctx.needs_input_grad[1] else None
        return grad, on_anchor, grad.sum(0).mul_(-0.5) if ctx.needs_input_grad[2] else None


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
