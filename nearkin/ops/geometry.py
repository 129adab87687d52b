"""Normalisation, dot products, cosines and Euclidean distances, each with a backward pass that is exact where autograd
would divide zero by zero: for a zero vector or two coincident points. Second derivatives are not defined.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nearkin.errors import DataError

# A vector of at most this length has no direction: it is mapped to zero, with zero gradient.
ZERO_LENGTH = 1e-12


def full_precision(like: Tensor) -> AbstractContextManager[Any]:
    """Return a context that disables autocast: a cosine in bfloat16 has two digits."""
    device_type = like.device.type
    # torch refuses to disable what a device does not have.
    return torch.autocast(device_type, enabled=False) if torch.amp.is_autocast_available(device_type) else nullcontext()


def where_float64_exists(x: Tensor) -> Tensor:
    """Return x, moved to the CPU if its device has no float64 (MPS)."""
    return x.cpu() if x.device.type == "mps" else x


def raise_if_not_finite(x: Tensor) -> None:
    """Raise DataError if a row holds NaN or infinity."""
    bad = torch.nonzero(~torch.isfinite(x.detach()).reshape(-1, x.shape[-1]).all(1)).flatten().tolist()
    if bad:
        raise DataError(
            f"{len(bad)} of {x[..., 0].numel()} rows hold NaN or infinity (first: row {bad[0]}). "
            "Check the learning rate, the mixed precision and the inputs of the network."
        )


def check_finite(x: Tensor) -> None:
    """Raise DataError if a row holds NaN or infinity, at the cost of one sum; `unit` includes this check."""
    if not torch.isfinite(x.detach().sum()):
        raise_if_not_finite(x)


def unit(x: Tensor) -> Tensor:
    """Normalise rows to length 1; a zero row stays zero and gets zero gradient."""
    return _Unit.apply(x)  # type: ignore[no-any-return]


def _normalise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return unit rows and the inverse lengths (0 for a zero row)."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    # The sum of the lengths is finite only if all entries are, so the check needs no pass over the batch.
    if not torch.isfinite(length.sum()):
        raise_if_not_finite(x)
        # Finite, but a square overflows: divide by the largest entry first.
        top = x.abs().amax(-1, keepdim=True).clamp_(min=1.0)
        length = torch.linalg.vector_norm(x / top, dim=-1, keepdim=True) * top
    inverse = length.reciprocal().masked_fill_(length <= ZERO_LENGTH, 0.0)
    return x * inverse, inverse


def _normalise_backward(g: Tensor, f: Tensor, inverse: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the gradient on x of f = x / |x|, given that on f."""
    radial = (f * g).sum(-1, keepdim=True)
    return torch.addcmul(g, f, radial, value=-1, out=out).mul_(inverse)


class _Unit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        f, inverse = _normalise(x)
        ctx.save_for_backward(f, inverse)
        return f

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return _normalise_backward(g, *ctx.saved_tensors)


def gram(f: Tensor) -> Tensor:
    """Compute all dot products between rows. Returns [N, N] or [.., N, N]."""
    return _Gram.apply(f)  # type: ignore[no-any-return]


def cosine_gram(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute all cosines between rows."""
    return _CosineGram.apply(x)  # type: ignore[no-any-return]


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


class _Gram(torch.autograd.Function):
    """f f^T. Its backward pass is (G + G^T) f: one product and one addition, where autograd needs two products."""

    @staticmethod
    def forward(ctx: Any, f: Tensor) -> Tensor:
        ctx.save_for_backward(f)
        return _symmetric_product(f) if f.dim() == 2 else f @ f.mT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (f,) = ctx.saved_tensors
        with full_precision(f):
            return _gram_backward(g, f) if f.dim() == 2 else torch.matmul(g + g.mT, f)


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
            grad = _gram_backward(g, f)
            return _normalise_backward(grad, f, inverse, out=grad)


def _gram_backward(g: Tensor, f: Tensor) -> Tensor:
    """Return (G + G^T) f, the gradient on f of f f^T given the gradient G."""
    # A hinge or a miner leaves few pairs with a gradient; above one in 32 (estimated from every eighth row) the dense
    # product is faster.
    if not g.is_sparse and g.device.type == "cpu" and len(g) > 256 and int(g[::8].count_nonzero()) * 256 < g.numel():
        index = g.nonzero().t()
        g = torch.sparse_coo_tensor(index, g[index[0], index[1]], g.shape, check_invariants=False)
    if not g.is_sparse:
        return torch.mm(g + g.t(), f)
    index, values = g._indices(), g._values()
    both = torch.cat([index, index.flip(0)], 1)
    symmetric = torch.sparse_coo_tensor(both, values.repeat(2), g.shape, check_invariants=False)
    product: Tensor = torch.sparse.mm(symmetric, f)
    return product


def accepts_sparse_gradient(x: Tensor) -> bool:
    """Return whether x comes straight from `gram` or `cosine_gram` and a sparse gradient would be faster."""
    source = x.grad_fn.name() if x.grad_fn is not None else ""
    return source in ("_GramBackward", "_CosineGramBackward") and x.device.type == "cpu" and len(x) > 256


def distances(products: Tensor, anchor_sq: Tensor, ref_sq: Tensor) -> Tensor:
    """Compute Euclidean distances from dot products and squared lengths."""
    return _Distances.apply(products, anchor_sq, ref_sq)  # type: ignore[no-any-return]


class _Distances(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, products: Tensor, anchor_sq: Tensor, ref_sq: Tensor) -> Tensor:
        square = torch.sub(ref_sq, products, alpha=2).add_(anchor_sq[:, None])
        # A difference below a few last digits of its operands is rounding, and becomes 0. The operands are those of
        # each pair: one long vector must not erase the distances between all others.
        tolerance = 4 * torch.finfo(square.dtype).eps
        low, high = torch.stack(torch.cat([anchor_sq, ref_sq]).aminmax()).tolist() if products.numel() else (0.0, 0.0)
        if 4 * low >= high:  # similar lengths, as for unit vectors: one threshold for all
            torch.threshold_(square, tolerance * 2 * high, 0.0)
        else:  # in chunks of rows: a third block [N, M] would cost more than the comparison
            for chunk, size in zip(torch.split(square, 128), torch.split(anchor_sq, 128), strict=True):
                chunk.masked_fill_(chunk <= (size[:, None] + ref_sq).mul_(tolerance), 0.0)
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
        anchor_grad = grad.sum(1).mul_(-0.5) if ctx.needs_input_grad[1] else None
        return grad, anchor_grad, grad.sum(0).mul_(-0.5) if ctx.needs_input_grad[2] else None


def safe_sqrt(square: Tensor, scale: float = 1.0) -> Tensor:
    """Compute the square root of a difference, with 0 and zero gradient where it is within rounding of 0."""
    return _Root.apply(square, 4 * torch.finfo(square.dtype).eps * scale)  # type: ignore[no-any-return]


class _Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, square: Tensor, tolerance: float) -> Tensor:
        root = torch.nn.functional.threshold(square, tolerance, 0.0).sqrt_()
        ctx.save_for_backward(root)
        return root

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (root,) = ctx.saved_tensors
        # Where the root is 0, g / inf = 0; a mask would cost one more pass.
        safe = torch.nn.functional.threshold(root, 0.0, float("inf"))
        return torch.div(g, safe, out=safe).mul_(0.5), None
