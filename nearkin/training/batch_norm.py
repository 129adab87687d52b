"""Batch norm with the statistics of the whole batch: N ranks then compute what one process computes.

`torch.nn.SyncBatchNorm` needs a GPU and replaces modules. This works on the CPU (gloo) too, and changes the function
that every batch norm calls, so that subclasses (such as timm's) take part and checkpoints keep their names.
"""

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from nearkin.errors import DataError
from nearkin.training.distributed import world_size


def sync_batch_norm() -> AbstractContextManager[object]:
    """Let batch norms in training mode normalise by the mean and variance of all ranks' images.

    Ranks may hold different numbers of images. The running statistics are those of one process, on every rank. All
    ranks must call the same layers in the same order. With one process it does nothing.

    Returns:
        A context manager.

    Example:
        >>> norm = torch.nn.BatchNorm1d(3)
        >>> with sync_batch_norm():
        ...     emb = norm(torch.randn(8, 3))
    """
    return nullcontext() if world_size() == 1 else _SyncMode()


class _SyncMode(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        # torch.compile cannot trace the collectives, and would try again for every layer. Where it is not in use, its
        # import would take seconds.
        self.batch_norm = torch.compiler.disable(_synced) if "torch._dynamo" in sys.modules else _synced  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        call = self.batch_norm if func is F.batch_norm else func
        return call(*args, **(kwargs or {}))


def _synced(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`F.batch_norm`, in training mode with the statistics of all ranks."""
    if not training:
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
    mean, var, count = _statistics(x.detach())
    if count == 1:
        raise DataError(f"batch norm: expected more than one value per channel in all ranks, got {list(x.shape)}.")
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_((var * count / (count - 1)).to(running_var.dtype), momentum)
    return _Normalize.apply(x, weight, bias, mean, var, count, eps)  # type: ignore[no-any-return]


def _statistics(x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return mean, variance and count of the values of each channel over all ranks, from those of each rank."""
    channels, count = x.shape[1], x.numel() // max(1, x.shape[1])
    own = x.new_zeros(2 * channels + 1, dtype=torch.float64)
    own[-1] = count
    if count:
        own[:-1] = torch.cat(torch.batch_norm_update_stats(x, None, None, 0.0))
    gathered = own.new_empty(world_size(), len(own))
    dist.all_gather(list(gathered.unbind()), own)
    means, variances, counts = torch.split(gathered, [channels, channels, 1], dim=1)
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    var = (counts * (variances + (means - mean).square())).sum(0) / total
    dtype = torch.promote_types(x.dtype, torch.float32)
    return mean.to(dtype), var.to(dtype), int(total)


class _Normalize(torch.autograd.Function):
    """(x - mean) / sqrt(var + eps) * weight + bias, with the gradient through the mean and variance of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, *settings: Any
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, var)
        ctx.count, ctx.eps = settings
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, ctx.eps) if len(x) else torch.empty_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, var = ctx.saved_tensors
        if len(x):
            # As in evaluation mode: the gradient with mean and var fixed, and the sums of g * normalised x and of g.
            grad, weight_grad, bias_grad = torch.ops.aten.native_batch_norm_backward(
                g, x, weight, mean, var, None, None, False, ctx.eps, (True, True, True)
            )
        else:  # torch divides by the number of rows
            grad, weight_grad, bias_grad = torch.zeros_like(x), torch.zeros_like(mean), torch.zeros_like(mean)
        if ctx.needs_input_grad[0]:
            sums = torch.stack([weight_grad, bias_grad]).to(mean.dtype)
            dist.all_reduce(sums)
            inv_std = (var + ctx.eps).rsqrt()
            scale = -inv_std / ctx.count * (1.0 if weight is None else weight)
            slope = scale * inv_std * sums[0]
            shape = (1, -1, *[1] * (x.dim() - 2))
            grad += torch.addcmul((scale * sums[1] - slope * mean).view(shape), x, slope.view(shape)).to(grad.dtype)
        grads = zip((grad, weight_grad, bias_grad), ctx.needs_input_grad, strict=False)
        return *(value if needed else None for value, needed in grads), None, None, None, None
