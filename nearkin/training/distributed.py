"""Several processes, one batch: training on N ranks whose gradients are those of one process.

Every rank computes the loss of the whole batch, on embeddings gathered from all of them in the order of the ranks:

    with process_group(device) as device:                     # from torchrun's environment; alone without it
        broadcast_state(model), broadcast_state(objective)    # all start from rank 0
        for x, labels in my_share_of_each_batch:
            emb, labels = gathered(model(x), labels)          # the whole batch, on every rank
            with seeded(seed, epoch, step):                   # dropout and random miners draw the same everywhere
                loss = objective(emb, labels)                 # the same number on every rank
            loss.backward()
            all_reduce_gradients([*model.parameters(), *objective.parameters()])

One rule holds for all parameters: the mean over the ranks is the gradient of one process. For the network, because the
gather hands each rank its own rows' gradient times the number of ranks. For class parameters, because every rank has
the whole gradient already. `all_reduce_gradients` takes this mean; DistributedDataParallel takes it too, so a model
may be wrapped in that instead. A cross-batch memory remembers the gathered batch and so is the same on every rank.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nearkin.data.samplers import rank_share
from nearkin.errors import ConfigError, DataError, ProcessLostError
from nearkin.ops.pairs import as_labels

T = TypeVar("T")

_BUCKET = 1 << 25  # bytes sent at once: large enough to hide the latency, small beside a model


def rank() -> int:
    """Which of the processes this is, from 0; 0 without a process group."""
    return dist.get_rank() if _grouped() else 0


def world_size() -> int:
    """How many processes train together; 1 without a process group."""
    return dist.get_world_size() if _grouped() else 1


def is_main_process() -> bool:
    """Whether this is the process that writes files and talks."""
    return rank() == 0


def _grouped() -> bool:
    return dist.is_available() and dist.is_initialized()


# --- the group --------------------------------------------------------------------------------------------------------


@contextmanager
def process_group(
    device: torch.device | str, *, timeout: float = 1800.0, meeting_file: Path | None = None
) -> Iterator[torch.device]:
    """Join the other processes that torchrun started, and leave them at the end. Yields the device to work on.

    device         "cpu" (gloo) or "cuda" (nccl, and gloo for what is on the CPU); on cuda each process takes the GPU
                   of its local rank
    timeout        seconds after which a process that does not answer counts as lost; longer than any work that one
                   process does while the others wait
    meeting_file   a file by which processes of one machine find each other, instead of torchrun's address and port

    Without torchrun, with one process, or in a group that exists already, nothing is joined and nothing is left.
    A process that dies or hangs ends the others with `ProcessLostError`. (Of nccl torch's watchdog may end them first.)
    """
    place = torch.device(device)
    if _grouped() or _environment("WORLD_SIZE", 1) == 1:
        yield place
        return
    ranks, number = _environment("WORLD_SIZE", 1), _environment("RANK")
    if place.type == "cuda":
        place = torch.device("cuda", _environment("LOCAL_RANK"))
        if place.index >= torch.cuda.device_count():
            raise ConfigError(
                f"process {number} of {ranks} needs GPU {place.index}, but there are {torch.cuda.device_count()}. "
                "Start as many processes as GPUs: torchrun --nproc-per-node N."
            )
        torch.cuda.set_device(place)
    elif place.type != "cpu":
        raise ConfigError(f"device: {ranks} processes can work on cpu or cuda, not on {place.type}.")
    who = f"process {number} of {ranks}"
    # Its functions take the group of the moment of their import as a default. Imported in the midst of training, as
    # optimizers do, they would keep the group and its threads past its end, and now and then Python aborts at its exit.
    importlib.import_module("torch.distributed.nn.functional")
    try:
        with _loopback_if_one_machine(ranks):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo",
                init_method=f"file://{meeting_file}" if meeting_file else "env://",
                rank=number,
                world_size=ranks,
                timeout=timedelta(seconds=timeout),
            )
    except ValueError as error:  # torchrun's address or port is missing
        raise ConfigError(f"{who}: {error} Start with torchrun.") from None
    except RuntimeError as error:
        raise ProcessLostError(f"{who}: the processes did not find each other ({_reason(error)}).") from None
    try:
        yield place
    except RuntimeError as error:
        if not _is_lost_connection(error):
            raise
        raise ProcessLostError(
            f"{who}: another process has died or did not answer for {timeout:g} s ({_reason(error)}). "
            "Its own message says why; started again, training goes on from its last checkpoint."
        ) from error
    finally:
        dist.destroy_process_group()


def _environment(name: str, default: int | None = None) -> int:
    """A whole number that torchrun put into the environment."""
    value = os.environ.get(name)
    if value is None and default is not None:
        return default
    if value is None or not value.isdecimal():
        raise ConfigError(f"{name}: expected a whole number in the environment, got {value!r}. Start with torchrun.")
    return int(value)


@contextmanager
def _loopback_if_one_machine(ranks: int) -> Iterator[None]:
    """Let gloo listen on the loopback only, where all processes are on this machine. A user's choice stands.

    Its own choice is the address of the host's name: open to the network, and wrong or missing on many laptops.
    """
    name = "GLOO_SOCKET_IFNAME"
    if name in os.environ or sys.platform == "win32" or _environment("LOCAL_WORLD_SIZE", 0) != ranks:
        yield
        return
    loopback = [interface for _, interface in socket.if_nameindex() if interface.startswith("lo")]
    if loopback:
        os.environ[name] = loopback[0]
    try:
        yield
    finally:
        os.environ.pop(name, None)


def _is_lost_connection(error: RuntimeError) -> bool:
    # gloo raises plain RuntimeErrors that begin with a path of its own source.
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def _reason(error: Exception) -> str:
    """The first sentence of an error, without the place in gloo's source that leads it."""
    first = str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__
    return first.rpartition("] ")[2] if first.startswith("[/") else first


# --- the batch --------------------------------------------------------------------------------------------------------


def all_gather_with_grad(emb: Tensor, labels: Tensor | Sequence[int]) -> tuple[Tensor, Tensor]:
    """The embeddings [N, D] and labels [N] of all ranks, in the order of the ranks, on every rank.

    emb      [n, D] this rank's; n may differ between ranks and may be 0
    labels   [n] integers

    The gradient goes back to this rank's own rows, times the number of ranks: see the rule at the top of this file.
    It needs no communication, because every rank computes the same loss of the same batch.

    >>> emb, labels = all_gather_with_grad(torch.ones(2, 3), [5, 6])  # one process: the batch itself
    >>> emb.shape, labels
    (torch.Size([2, 3]), tensor([5, 6]))
    """
    labels = as_labels(labels).to(emb.device)
    if world_size() == 1:
        return emb, labels
    counts, label_counts = _counts(emb, labels)
    if counts != label_counts:
        raise DataError(f"gathered: {counts} embeddings but {label_counts} labels on ranks 0 to {world_size() - 1}.")
    return _Gather.apply(emb, counts), _assemble(labels, counts)


def gather_rows(rows: Tensor) -> Tensor:
    """Rows [n, ...] of any dtype from all ranks, in the order of the ranks, on every rank; without gradient.

    With `share` it puts together what the ranks worked out in parts:

    >>> whole = torch.arange(10)
    >>> gather_rows(whole[rank_slice(len(whole))] ** 2).tolist() == (whole**2).tolist()
    True
    """
    rows = rows.detach()
    return rows if world_size() == 1 else _assemble(rows, *_counts(rows))


def rank_slice(count: int) -> slice:
    """The rows of `count` that this rank works on: a run of them, at most one longer than another rank's."""
    return rank_share(count, rank(), world_size())


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, emb: Tensor, counts: list[int]) -> Tensor:
        before = sum(counts[: rank()])
        ctx.own, ctx.ranks = slice(before, before + len(emb)), len(counts)
        return _assemble(emb, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g[ctx.own] * ctx.ranks, None


def _counts(*tensors: Tensor) -> list[list[int]]:
    """How many rows of each tensor each rank has. Rows that do not fit together are refused on all ranks alike."""
    kind = " and ".join(f"{t.dtype} [n{''.join(f', {size}' for size in t.shape[1:])}]" for t in tensors)
    *counts, kinds = _exchange([*(len(t) for t in tensors), zlib.crc32(kind.encode())], tensors[0].device)
    if len(set(kinds)) > 1:
        given = [""] * world_size()
        dist.all_gather_object(given, kind)
        raise DataError(
            f"the rows of the ranks do not fit together: {'; '.join(given)} on ranks 0 to {world_size() - 1}."
        )
    return counts


def _exchange(numbers: list[int], device: torch.device | str = "cpu") -> list[list[int]]:
    """For each of these numbers, what it is on every rank."""
    table = torch.empty(world_size(), len(numbers), dtype=torch.int64, device=device)
    dist.all_gather(list(table.unbind()), torch.tensor(numbers, dtype=torch.int64, device=device))
    return table.t().tolist()


def _assemble(rows: Tensor, counts: list[int]) -> Tensor:
    """All ranks' rows, bit for bit. They travel as bytes, because gloo does not know every dtype."""
    most = max(counts)
    whole = rows.new_empty((len(counts) * most, *rows.shape[1:]))
    if whole.numel():
        own = rows.contiguous()
        if len(rows) < most:  # what is sent must be of one size; the rest of it is never read
            own = rows.new_zeros((most, *rows.shape[1:]))
            own[: len(rows)] = rows
        dist.all_gather(list(_bytes(whole).chunk(len(counts))), _bytes(own))
    if min(counts) == most:
        return whole
    return torch.cat([part[:count] for part, count in zip(torch.split(whole, most), counts, strict=True)])


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


# --- parameters -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def all_reduce_gradients(parameters: Iterable[Tensor]) -> None:
    """Replace every gradient by its mean over the ranks: afterwards it is that of one process, equal on all ranks.

    For models that are not wrapped in DistributedDataParallel, and for class parameters, where it also takes away any
    difference of rounding. A gradient that only some ranks have counts as zero on the others (a rank without rows);
    one that no rank has stays None. Clip gradients after this, not before.
    """
    learned = [p for p in parameters if p.requires_grad]
    if world_size() == 1 or not learned:
        return
    somewhere = torch.tensor([p.grad is not None for p in learned], dtype=torch.int32, device=learned[0].device)
    dist.all_reduce(somewhere, dist.ReduceOp.MAX)
    grads = []
    for p, has_gradient in zip(learned, somewhere.tolist(), strict=True):
        if has_gradient:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            grads.append(p.grad)
    for bucket in _buckets(grads):
        flat = torch.cat([g.reshape(-1) for g in bucket])
        dist.all_reduce(flat)
        _hand_back(flat.div_(world_size()), bucket)


@torch.no_grad()
def broadcast_state(module: nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0: before the first step, and where statistics differ.

    Modules that are not alike (another number of classes, another dtype) are refused on every rank.
    """
    if world_size() == 1:
        return
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    shapes = " ".join(f"{name}:{t.dtype}:{list(t.shape)}" for name, t in tensors.items())
    [shapes_of_ranks] = _exchange([zlib.crc32(shapes.encode())])
    if len(set(shapes_of_ranks)) > 1:
        raise ConfigError(
            f"{type(module).__name__}: its parameters or buffers are of other names, sizes or dtypes on other ranks. "
            "Every process must build it with the same settings."
        )
    for bucket in _buckets([t for t in tensors.values() if t.numel()]):
        flat = torch.cat([t.reshape(-1) for t in bucket])
        dist.broadcast(_bytes(flat), 0)
        _hand_back(flat, bucket)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors in runs of one dtype and device that are sent as one."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for t in tensors:
        kinds.setdefault((t.dtype, t.device), []).append(t)
    for alike in kinds.values():
        bucket: list[Tensor] = []
        size = 0
        for t in alike:
            if bucket and size + t.nbytes > _BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(t)
            size += t.nbytes
        yield bucket


def _hand_back(flat: Tensor, bucket: list[Tensor]) -> None:
    for t, part in zip(bucket, torch.split(flat, [t.numel() for t in bucket]), strict=True):
        t.copy_(part.view(t.shape))


# --- chance and decisions ---------------------------------------------------------------------------------------------


@contextmanager
def fork_rng(*numbers: int) -> Iterator[None]:
    """Inside, torch's random numbers depend on these numbers alone; outside, nothing has changed.

    Around an objective with (seed, epoch, step) every rank draws the same dropout and the same random pairs, and so
    does a run of one process or one that was resumed: nothing need be sent or stored. GPUs must be of one kind.

    >>> with fork_rng(0, 3, 17):
    ...     first = torch.rand(2)
    >>> with fork_rng(0, 3, 17):
    ...     assert torch.equal(first, torch.rand(2))
    """
    [state] = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    seed = int(state) >> 1  # manual_seed takes 63 bits everywhere
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(gpus):
        torch.default_generator.manual_seed(seed)
        if gpus:
            torch.cuda.manual_seed(seed)
        yield


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank: ranks that stop at different steps would wait for each other for ever."""
    return flag if world_size() == 1 else any(_exchange([flag])[0])


def broadcast_object(value: T) -> T:
    """The value that rank 0 has, on every rank: for what it alone found out, such as a score or a file's existence."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]
