"""Functions of rows, computed by blocks of rows: their buffers are as small as a block, also in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nearkin.ops.checks import on_host
from nearkin.ops.cpu_kernels import differentiable

Function = Callable[..., Tensor]

# Elements of a buffer of one block. On the CPU it fits into the cache; a GPU needs large blocks to be busy.
_CPU_BLOCK, _SMALL_BLOCK, _GPU_BLOCK = 1 << 16, 1 << 13, 1 << 24


def by_rows(function: Function, *rows: Tensor, shared: Sequence[Tensor] = (), width: int | None = None) -> Tensor:
    """Compute `function(*rows, *shared)`, whose rows depend on the same rows of its inputs only, by blocks of rows.

    `torch.compile` and `torch.func` see one call with all rows. Gradients reach `rows` and `shared`, but not what the
    function takes from elsewhere.

    Args:
        function: Takes blocks of rows [n, ...] and the shared tensors; returns [n, ...].
        *rows: Tensors [N, ...] that are split.
        shared: Tensors that every block gets whole.
        width: Elements of the function's largest buffer per row; those of the first tensor by default.

    Returns:
        [N, ...].
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function(*rows, *shared)
    n = len(rows[0])
    size = _rows_per_block(rows[0], width or max(1, rows[0].numel() // n))
    if size >= n:
        return function(*rows, *shared)
    tensors = (*rows, *shared)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return _ByRows.apply(function, size, len(rows), *tensors)  # type: ignore[no-any-return]
    return torch.cat([function(*(t[i : i + size] for t in rows), *shared) for i in range(0, n, size)])


def per_row(value: float | Tensor, like: Tensor) -> Tensor:
    """Return a number, or a learned 0-dim tensor, for every row of a tensor [N, ...]: what `by_rows` can split."""
    return torch.as_tensor(value, dtype=like.dtype, device=like.device).expand(len(like))


def _rows_per_block(x: Tensor, width: int) -> int:
    if not on_host(x):
        return max(1, _GPU_BLOCK // width)
    # At least eight blocks, unless they would be too small to be worth a call.
    return max(1, min(_CPU_BLOCK // width, -(-len(x) // 8)), _SMALL_BLOCK // width)


class _ByRows(torch.autograd.Function):
    """One value per row has its gradient computed at once, in the forward pass; else blocks are computed again."""

    @staticmethod
    def forward(ctx: Any, function: Function, size: int, n_rows: int, *tensors: Tensor) -> Tensor:
        ctx.function, ctx.size, ctx.n_rows = function, size, n_rows
        needed = ctx.needs_input_grad[3:]
        first = function(*(t[:size] for t in tensors[:n_rows]), *tensors[n_rows:])
        ctx.early = first.dim() == 1 and not any(needed[n_rows:])
        if ctx.early:
            out, grads = _value_and_grads(function, size, n_rows, tensors, needed, None)
            ctx.save_for_backward(*tensors, *grads)
            return out
        ctx.save_for_backward(*tensors)
        blocks = (
            function(*(t[i : i + size] for t in tensors[:n_rows]), *tensors[n_rows:])
            for i in range(size, len(tensors[0]), size)
        )
        return torch.cat([first, *blocks])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[3:]
        tensors, grads = ctx.saved_tensors[: len(needed)], ctx.saved_tensors[len(needed) :]
        if torch.is_grad_enabled():
            return None, None, None, *differentiable(ctx.function, g, *tensors)
        if ctx.early:
            scaled = iter([grad * g.view(-1, *[1] * (grad.dim() - 1)) for grad in grads])
        else:
            scaled = iter(_value_and_grads(ctx.function, ctx.size, ctx.n_rows, tensors, needed, g)[1])
        return None, None, None, *(next(scaled) if need else None for need in needed)


def _value_and_grads(
    function: Function, size: int, n_rows: int, tensors: Sequence[Tensor], needed: Sequence[bool], g: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """Return the values, and the gradients of the needed tensors for the gradient g of the values; 1 if None."""
    n = len(tensors[0])
    grads = [torch.zeros_like(t) for t, need in zip(tensors, needed, strict=True) if need]
    values = []
    for i in range(0, n, size):
        block = [*(t[i : i + size] for t in tensors[:n_rows]), *tensors[n_rows:]]
        leaves = [t.detach().requires_grad_(need) for t, need in zip(block, needed, strict=True)]
        with torch.enable_grad():
            out = function(*leaves)
        values.append(out.detach())
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        outer = torch.ones_like(out) if g is None else g[i : i + size]
        for position, grad in enumerate(torch.autograd.grad(out, wanted, outer, allow_unused=True)):
            if grad is not None:
                is_row = sum(needed[:n_rows]) > position
                (grads[position][i : i + size] if is_row else grads[position]).add_(grad)
    return torch.cat(values), grads
