"""Functions of rows, computed by blocks of rows: their buffers are as small as a block, also in the backward pass."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from nearkin.ops.checks import on_host
from nearkin.ops.cpu_kernels import differentiable

Function = Callable[..., Tensor]

# Elements of a buffer of one block. On the CPU it fits into the cache; a GPU needs large blocks to be busy.
_CPU_BLOCK, _SMALL_BLOCK, _GPU_BLOCK = 1 << 16, 1 << 14, 1 << 24


def by_rows(function: Function, *rows: Tensor, shared: Sequence[Tensor] = (), width: int | None = None) -> Tensor:
    """Compute `function(*rows, *shared)`, whose rows depend on the same rows of its inputs only, by blocks of rows.

    `torch.compile` and `torch.func` see one call with all rows. Gradients reach `rows` and `shared`, but not what the
    function takes from elsewhere. The width is that of its largest buffer per row; by default that of the first tensor.
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
    return _values(function, size, len(rows), tensors)


def per_row(value: float | Tensor, like: Tensor) -> Tensor:
    """Return a number, or a learned 0-dim tensor, for every row of a tensor [N, ...]: what `by_rows` can split."""
    return torch.as_tensor(value, dtype=like.dtype, device=like.device).expand(len(like))


def _rows_per_block(x: Tensor, width: int) -> int:
    if not on_host(x):
        return max(1, _GPU_BLOCK // width)
    # At least four blocks, unless they would be too small to be worth a call.
    return max(1, min(_CPU_BLOCK // width, -(-len(x) // 4)), _SMALL_BLOCK // width)


def _blocks(size: int, n_rows: int, tensors: Sequence[Tensor]) -> Iterator[tuple[slice, list[Tensor]]]:
    for start in range(0, len(tensors[0]), size):
        rows = slice(start, start + size)
        yield rows, [*(t[rows] for t in tensors[:n_rows]), *tensors[n_rows:]]


def _values(function: Function, size: int, n_rows: int, tensors: Sequence[Tensor]) -> Tensor:
    result = None
    for rows, block in _blocks(size, n_rows, tensors):
        values = function(*block)
        if result is None:
            result = values.new_empty(len(tensors[0]), *values.shape[1:])
        result[rows] = values
    assert result is not None
    return result


def _gradients(
    function: Function, size: int, n_rows: int, tensors: Sequence[Tensor], needed: Sequence[bool], g: Tensor | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients of the needed tensors, for the gradient g of the values; for 1, and the values, if None."""
    wanted = [i for i, need in enumerate(needed) if need]
    grads, values = [torch.zeros_like(tensors[i]) for i in wanted], []
    for rows, block in _blocks(size, n_rows, tensors):
        leaves = [t.detach().requires_grad_(need) for t, need in zip(block, needed, strict=True)]
        with torch.enable_grad():
            out = function(*leaves)
        if g is None:
            values.append(out.detach())
        outer = torch.ones_like(out) if g is None else g[rows]
        of_block = torch.autograd.grad(out, [leaves[i] for i in wanted], outer, allow_unused=True)
        for i, total, grad in zip(wanted, grads, of_block, strict=True):
            if grad is not None:
                (total[rows] if i < n_rows else total).add_(grad)
    return grads, values


class _ByRows(torch.autograd.Function):
    """One value per row has its gradient computed at once, in the forward pass; else blocks are computed again."""

    @staticmethod
    def forward(ctx: Any, function: Function, size: int, n_rows: int, *tensors: Tensor) -> Tensor:
        ctx.function, ctx.size, ctx.n_rows = function, size, n_rows
        needed = ctx.needs_input_grad[3:]
        _, block = next(_blocks(1, n_rows, tensors))
        if any(needed[n_rows:]) or function(*block).dim() > 1:
            ctx.save_for_backward(*tensors)
            return _values(function, size, n_rows, tensors)
        grads, values = _gradients(function, size, n_rows, tensors, needed, None)
        ctx.save_for_backward(*tensors, *grads)
        return torch.cat(values)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[3:]
        tensors, ready = ctx.saved_tensors[: len(needed)], ctx.saved_tensors[len(needed) :]
        if torch.is_grad_enabled():
            return None, None, None, *differentiable(ctx.function, g, *tensors)
        if ready:
            grads = [grad * g.view(-1, *[1] * (grad.dim() - 1)) for grad in ready]
        else:
            grads, _ = _gradients(ctx.function, ctx.size, ctx.n_rows, tensors, needed, g)
        remaining = iter(grads)
        return None, None, None, *(next(remaining) if need else None for need in needed)
