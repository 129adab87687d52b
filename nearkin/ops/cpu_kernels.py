"""Hand-written backward passes that are faster on the CPU than autograd; used only where `on_host` is true.

Every function here has a plain counterpart, its reference in the tests, which is used on other devices, compiled,
inside `torch.func` and for second derivatives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
