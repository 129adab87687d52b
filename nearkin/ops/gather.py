"""Rows of all processes: gathered in rank order, so that every rank computes the loss of the whole batch."""

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from nearkin.errors import DataError
from nearkin.ops.pairs import as_labels


def rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Return the number of processes; 1 without a process group."""
    return dist.get_world_size() if is_distributed() else 1


def is_distributed() -> bool:
    """Whether a process group is initialised."""
    return dist.is_available() and dist.is_initialized()


def all_gather_with_grad(emb: Tensor, labels: Tensor | Sequence[int]) -> tuple[Tensor, Tensor]:
    """Gather the embeddings and labels of all ranks, in rank order, on every rank.

    The gradient returns to this rank's own rows, times the number of ranks (`all_reduce_gradients` takes the mean). It
    needs no communication, because every rank computes the same loss of the same batch. Labels may be [N] integers, or
    have two dimensions.

    Example:
        >>> emb, labels = all_gather_with_grad(torch.ones(2, 3), [5, 6])  # one process: the batch itself
        >>> emb.shape, labels
        (torch.Size([2, 3]), tensor([5, 6]))
    """
    labels = (labels if isinstance(labels, Tensor) and labels.dim() == 2 else as_labels(labels)).to(emb.device)
    if world_size() == 1:
        return emb, labels
    counts, label_counts = _counts(emb, labels)
    if counts != label_counts:
        raise DataError(
            f"all_gather_with_grad: {counts} embeddings but {label_counts} labels on ranks 0 to {world_size() - 1}."
        )
    return _Gather.apply(emb, counts), _assemble(labels, counts)


def is_gathered(emb: Tensor) -> bool:
    """Whether embeddings are the result of `all_gather_with_grad`."""
    return type(emb.grad_fn).__name__ == "_GatherBackward"


def gather_rows(rows: Tensor) -> Tensor:
    """Gather rows of any dtype from all ranks, in rank order, on every rank, without gradient."""
    rows = rows.detach()
    return rows if world_size() == 1 else _assemble(rows, *_counts(rows))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, emb: Tensor, counts: list[int]) -> Tensor:
        start = sum(counts[: rank()])
        ctx.own_rows, ctx.ranks = slice(start, start + len(emb)), len(counts)
        return _assemble(emb, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g[ctx.own_rows] * ctx.ranks, None


def _counts(*tensors: Tensor) -> list[list[int]]:
    """Return how many rows of each tensor each rank has; rows that do not match are refused on every rank."""
    layout = " and ".join(f"{t.dtype} [n{''.join(f', {size}' for size in t.shape[1:])}]" for t in tensors)
    *counts, layouts = exchange([*(len(t) for t in tensors), zlib.crc32(layout.encode())], tensors[0].device)
    if len(set(layouts)) > 1:
        all_layouts = [""] * world_size()
        dist.all_gather_object(all_layouts, layout)
        raise DataError(
            f"rows differ in shape or dtype between ranks 0 to {world_size() - 1}: {'; '.join(all_layouts)}."
        )
    return counts


def exchange(numbers: list[int], device: torch.device | str = "cpu") -> list[list[int]]:
    """Return, for each of these numbers, its value on every rank."""
    table = torch.empty(world_size(), len(numbers), dtype=torch.int64, device=device)
    dist.all_gather(list(table.unbind()), torch.tensor(numbers, dtype=torch.int64, device=device))
    return table.t().tolist()


def _assemble(rows: Tensor, counts: list[int]) -> Tensor:
    """Gather all ranks' rows, bit for bit; sent as bytes, because gloo does not support every dtype."""
    max_rows = max(counts)
    whole = rows.new_empty((len(counts) * max_rows, *rows.shape[1:]))
    if whole.numel():
        sent = rows.contiguous()
        if len(rows) < max_rows:  # all ranks must send the same size; the padding is never read
            sent = rows.new_zeros((max_rows, *rows.shape[1:]))
            sent[: len(rows)] = rows
        dist.all_gather(list(as_bytes(whole).chunk(len(counts))), as_bytes(sent))
    if min(counts) == max_rows:
        return whole
    return torch.cat([part[:count] for part, count in zip(torch.split(whole, max_rows), counts, strict=True)])


def as_bytes(tensor: Tensor) -> Tensor:
    """View a tensor as bytes."""
    return tensor.view(-1).view(torch.uint8)
