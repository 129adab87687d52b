"""What `nearkin doctor --core` reports of every loss: host synchronisations, graph breaks, peak memory and time."""

import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nearkin.losses.miners import MINERS
from nearkin.losses.objective import Objective
from nearkin.losses.registry import LOSSES
from nearkin.ops.checks import plain

DIM, PER_CLASS = 512, 4
# Operators that wait for the device, or whose output has a shape that depends on data, which amounts to the same.
_WAITING = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "argwhere", "masked_select", "bincount", "histc",
    "repeat_interleave", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "_unique", "_unique2",
    "_to_sparse", "to_sparse",
}  # fmt: skip
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}


@dataclass(frozen=True)
class Readiness:
    """The readiness of one loss, alone or with a miner."""

    name: str
    syncs: int  # operators that wait for the device, forward and backward
    graph_breaks: int  # of torch.compile
    blocks: float  # peak memory beyond the similarities and masks, in blocks of float32 similarities
    products: float  # time of forward and backward, in times of its three bare matrix products

    @property
    def ok(self) -> bool:
        """Whether nothing waits and nothing breaks."""
        return self.syncs == 0 and self.graph_breaks == 0


def rows() -> list[str]:
    """Return every loss, and the triplet loss with every miner."""
    mined = [f"triplet + {miner}" for miner in MINERS if miner != "all"]
    return [row for name in LOSSES for row in ([name, *mined] if name == "triplet" else [name])]


def check_row(row: str, device: torch.device | str = "cpu", n: int = 1024) -> Readiness:
    """Measure one row at a batch of n samples, 4 of each class, in 512 dimensions."""
    objective, emb, labels = _batch(row, device, n, DIM)
    few = emb[: PER_CLASS * 6], labels[: PER_CLASS * 6]
    # The similarities, and the gradients of both their factors.
    refs = torch.randn(_columns(objective, n), DIM).to(device)
    products = _time(lambda: [(sim := emb @ refs.t()) @ refs, sim.t() @ emb], device)
    return Readiness(
        row,
        len(waiting_operators(objective, *few)),
        graph_breaks(objective, *few),
        peak_blocks(row, device, n),
        _time(lambda: _step(objective, emb, labels), device) / products,
    )


def _batch(row: str, device: torch.device | str, n: int, dim: int) -> tuple[Objective, Tensor, Tensor]:
    name, _, miner = row.partition(" + ")
    objective = Objective(name, num_classes=n // PER_CLASS, dim=dim, miner=miner or None).to(device)
    emb = torch.randn(n, dim, generator=torch.Generator().manual_seed(0)).to(device)
    return objective, emb, torch.arange(n, device=device) // PER_CLASS


def _columns(objective: Objective, n: int) -> int:
    """Return how many references, or centres of classes, the batch is compared with."""
    centers = int(objective.num_classes or 1) * int(objective.builder_kwargs.get("centers", 1))
    return n if objective.loss.inputs.pairs else centers


def _step(objective: Objective, emb: Tensor, labels: Tensor) -> None:
    loss = objective(emb.detach().requires_grad_(), labels)
    loss.sum().backward()


def waiting_operators(objective: Objective, emb: Tensor, labels: Tensor) -> list[str]:
    """Return the operators of one step that wait for the device; a step on the CPU is computed as on an accelerator."""
    recorder = _Recorder()
    with plain(), recorder:
        _step(objective, emb, labels)
    return recorder.waiting


def graph_breaks(objective: Objective, emb: Tensor, labels: Tensor) -> int:
    """Return in how many places `torch.compile` breaks the objective apart."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch itself, about the parts after a break
        explanation = torch._dynamo.explain(objective)(emb.detach().requires_grad_(), labels)
    torch._dynamo.reset()
    return int(explanation.graph_break_count)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the operators that wait, and the bytes of all tensors but masks that are alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waiting: list[str] = []
        self.alive = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name in _INDEXING and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in _WAITING or masks:
            self.waiting.append(name)
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.layout == torch.strided and value.dtype != torch.bool:
                self._add(value.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.alive += size
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


def peak_blocks(row: str, device: torch.device | str, n: int) -> float:
    """Return the peak memory of one step beyond the similarities and the masks, in blocks of float32 similarities."""
    objective, emb, labels = _batch(row, device, n, dim=4)  # few dimensions, so that other tensors are small
    recorder = _Recorder()
    with recorder:
        _step(objective, emb, labels)
    return recorder.peak / (4 * n * _columns(objective, n)) - 1


def _time(function: Callable[[], object], device: torch.device | str) -> float:
    """Return the least time of five calls in seconds."""
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        function()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
