"""Distributed training: N ranks share one batch, and their gradients equal those of one process (docs/distributed.md).

Every rank computes the loss of the whole batch, on the embeddings gathered from all ranks in rank order.
"""

import importlib
import os
import socket
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors

from nearkin.data.samplers import rank_share
from nearkin.errors import ConfigError, ProcessLostError
from nearkin.ops.gather import (
    all_gather_with_grad,
    as_bytes,
    exchange,
    gather_rows,
    is_distributed,
    rank,
    world_size,
)
from nearkin.training.device import seed_device

__all__ = [
    "all_gather_with_grad",
    "all_reduce_gradients",
    "any_rank",
    "broadcast_object",
    "broadcast_state",
    "fork_rng",
    "gather_rows",
    "is_main_process",
    "process_group",
    "rank",
    "rank_slice",
    "world_size",
]

T = TypeVar("T")

_BUCKET = 1 << 25  # bytes sent at once: large enough to hide the latency, small beside a model


def is_main_process() -> bool:
    """Whether this is rank 0, the process that writes files and prints."""
    return rank() == 0


@contextmanager
def process_group(
    device: torch.device | str, *, timeout: float = 1800.0, meeting_file: Path | None = None
) -> Iterator[torch.device]:
    """Join the process group that torchrun started, if there is one with several processes, and leave it at the end."""
    device = torch.device(device)
    if is_distributed() or _environment("WORLD_SIZE", 1) == 1:
        yield device
        return
    ranks, number = _environment("WORLD_SIZE", 1), _environment("RANK")
    device = _own_device(device, number, ranks)
    who = f"process {number} of {ranks}"
    # Its functions bind the current group as a default argument at import. Imported during training, as optimisers do,
    # they would keep the group and its threads alive past its end, and Python occasionally aborts at exit.
    importlib.import_module("torch.distributed.nn.functional")
    try:
        with _loopback_if_one_machine(ranks):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                init_method=f"file://{meeting_file}" if meeting_file else "env://",
                rank=number,
                world_size=ranks,
                timeout=timedelta(seconds=timeout),
            )
    except ValueError as error:  # torchrun's address or port is missing
        raise ConfigError(f"{who}: {error} Start with torchrun.") from None
    except RuntimeError as error:
        raise ProcessLostError(f"{who}: could not connect to the other processes ({_reason(error)}).") from None
    try:
        yield device
    except RuntimeError as error:
        # gloo raises plain RuntimeErrors that begin with a path of its own source.
        if not isinstance(error, dist.DistError) and "gloo/transport" not in str(error):
            raise
        raise ProcessLostError(
            f"{who}: another process died or did not respond for {timeout:g} s ({_reason(error)}). "
            "See its own message for the cause. Run the same command again to resume from the last checkpoint."
        ) from error
    finally:
        dist.destroy_process_group()


def _own_device(device: torch.device, number: int, ranks: int) -> torch.device:
    """Return the device of this process: its own GPU, or the CPU that all share."""
    if device.type == "cuda":
        device = torch.device("cuda", _environment("LOCAL_RANK"))
        if device.index >= torch.cuda.device_count():
            raise ConfigError(
                f"process {number} of {ranks} needs GPU {device.index}; there are {torch.cuda.device_count()}. "
                "Start one process per GPU: torchrun --nproc-per-node N."
            )
        torch.cuda.set_device(device)
    elif device.type != "cpu":
        raise ConfigError(f"device: training in {ranks} processes works on cpu or cuda, not on {device.type}.")
    return device


def _environment(name: str, default: int | None = None) -> int:
    """Return a whole number that torchrun put into the environment."""
    value = os.environ.get(name)
    if value is None and default is not None:
        return default
    if value is None or not value.isdecimal():
        raise ConfigError(f"{name}: expected a whole number in the environment, got {value!r}. Start with torchrun.")
    return int(value)


@contextmanager
def _loopback_if_one_machine(ranks: int) -> Iterator[None]:
    """Let gloo listen on loopback only, if all processes are here: by default it is open to the network."""
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


def _reason(error: Exception) -> str:
    """Return the first sentence of an error, without gloo's source location."""
    first = str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__
    return first.rpartition("] ")[2] if first.startswith("[/") else first


def rank_slice(count: int) -> slice:
    """Return the contiguous share of `count` rows that this rank works on; shares differ by at most one row."""
    return rank_share(count, rank(), world_size())


@torch.no_grad()
def all_reduce_gradients(parameters: Iterable[Tensor]) -> None:
    """Replace every gradient by its mean over ranks, which is the gradient of one process.

    Of the network, because `all_gather_with_grad` multiplies by the number of ranks; of class parameters, because every
    rank has the whole gradient. DistributedDataParallel takes the same mean, so a model may be wrapped in that instead.
    A gradient that only some ranks have counts as zero on the others (a rank without rows); one that no rank has stays
    None. Clip gradients after this, not before.
    """
    trainable = [p for p in parameters if p.requires_grad]
    if world_size() == 1 or not trainable:
        return
    on_any_rank = torch.tensor([p.grad is not None for p in trainable], dtype=torch.int32, device=trainable[0].device)
    dist.all_reduce(on_any_rank, dist.ReduceOp.MAX)
    grads = []
    for p, has_gradient in zip(trainable, on_any_rank.tolist(), strict=True):
        if has_gradient:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            grads.append(p.grad)
    for message in _messages(grads):
        dist.all_reduce(message)
        message.div_(world_size())


@torch.no_grad()
def broadcast_state(module: nn.Module) -> None:
    """Copy rank 0's parameters and buffers to every rank: before the first step, and whenever batch norms differ."""
    if world_size() == 1:
        return
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    shapes = " ".join(f"{name}:{t.dtype}:{list(t.shape)}" for name, t in tensors.items())
    [shapes_of_ranks] = exchange([zlib.crc32(shapes.encode())])
    if len(set(shapes_of_ranks)) > 1:
        raise ConfigError(
            f"{type(module).__name__}: parameters or buffers differ in name, shape or dtype between ranks. "
            "Build it with the same settings in every process."
        )
    for message in _messages([t for t in tensors.values() if t.numel()]):
        dist.broadcast(as_bytes(message), 0)


def _messages(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors joined into flat ones of about `_BUCKET` bytes; what becomes of each is copied back."""
    for bucket in _take_tensors(tensors, _BUCKET):  # type: ignore[no-untyped-call]
        message = _flatten_dense_tensors(bucket)  # type: ignore[no-untyped-call]
        yield message
        for t, part in zip(bucket, _unflatten_dense_tensors(message, bucket), strict=True):  # type: ignore[no-untyped-call]
            t.copy_(part)


@contextmanager
def fork_rng(*numbers: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed torch's random numbers with these integers inside the block, and restore the generator afterwards.

    With (seed, epoch, step) around an objective, every rank draws the same dropout mask and the same random pairs, and
    so does a resumed run: nothing has to be sent or stored. All GPUs must be of the same model.

    Example:
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
        seed_device(torch.device(device), seed)
        yield


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank; ranks that stopped at different steps would deadlock."""
    return flag if world_size() == 1 else any(exchange([flag])[0])


def broadcast_object(value: T) -> T:
    """Return rank 0's value on every rank, such as whether a file exists. Also a barrier."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]
