"""The check behind `nearkin doctor --distributed`: for every loss, gradients of N processes equal those of one.

The same small training step runs in this process and in N local processes that share its batches: evenly, unevenly,
and with an empty share for the last. Every registered loss runs alone, with every miner and with a memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nearkin._common.progress import Reporter
from nearkin.data.samplers import rank_share
from nearkin.errors import ConfigError, ProcessLostError
from nearkin.losses import LOSSES
from nearkin.losses.miners import MINERS
from nearkin.losses.objective import Objective
from nearkin.training import distributed

TOLERANCE = 1e-5  # relative; float32 rounds at 6e-8, and a loss with scale 64 makes that 4e-6
BATCH, PIXELS, DIM, CLASSES = 24, 12, 8, 5

Split = Literal["even shares", "uneven shares", "one rank idle"]


@dataclass(frozen=True)
class Case:
    """A loss with its miner, memory and settings, and how its batches are split over ranks."""

    loss: str
    miner: str | None = None
    memory: int = 0
    settings: tuple[tuple[str, Any], ...] = ()
    split: Split = "even shares"

    def __str__(self) -> str:
        extras = [f"miner {self.miner}"] if self.miner else []
        extras += [f"memory {self.memory}"] if self.memory else []
        extras += [f"{key}={value}" for key, value in self.settings]
        return ", ".join([self.loss, *extras, self.split])


@dataclass(frozen=True)
class GradientCheck:
    """The largest difference between N processes and one, relative to the largest entry of one process's tensor."""

    case: Case  # what was run
    embeddings: float  # of the gradient by each embedding
    network: float  # of the gradient by the network's parameters, after the mean over ranks
    parameters: float | None  # of the gradient by the class parameters and of the memory; None if there is neither

    @property
    def worst(self) -> float:
        """The largest of the differences."""
        return max(self.embeddings, self.network, self.parameters or 0.0)

    @property
    def ok(self) -> bool:
        """Whether all differences are within the tolerance."""
        return self.worst <= TOLERANCE


def check_gradients(
    processes: int = 2,
    *,
    dtype: torch.dtype = torch.float32,
    timeout: float = 300.0,
    reporter: Reporter | None = None,
) -> list[GradientCheck]:
    """Compare one process with several local ones (gloo, loopback only) on every case."""
    if processes < 2:
        raise ConfigError(f"processes: expected at least 2, got {processes}.")
    reporter = reporter or Reporter(quiet=True)
    all_cases = cases()
    with tempfile.TemporaryDirectory(prefix="nearkin-") as name:
        folder = Path(name)
        with reporter.track(f"gradients of {processes} processes", len(all_cases), unit="case") as bar:

            def watch() -> None:
                if (new := _done(folder) - bar.done) > 0:
                    bar.advance(new)

            command = [
                sys.executable,
                "-m",
                "nearkin.training.distributed_check",
                name,
                str(dtype).removeprefix("torch."),
            ]
            launch(command, processes, folder, timeout=timeout, watch=watch)
        ranks = [torch.load(folder / f"rank{r}.pt", weights_only=True) for r in range(processes)]
    alone = of_one_process(all_cases, dtype, reporter)
    return [
        compare(case, alone[replace(case, split="even shares")], [r[i] for r in ranks])
        for i, case in enumerate(all_cases)
    ]


def of_one_process(all_cases: Sequence[Case], dtype: torch.dtype, reporter: Reporter) -> dict[Case, dict[str, Tensor]]:
    """Compute the gradients in this process; how batches are split makes no difference here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are too small for several threads
    try:
        distinct = list(dict.fromkeys(replace(case, split="even shares") for case in all_cases))
        found = {}
        with reporter.track("gradients of one process", len(distinct), unit="case") as bar:
            for case in distinct:
                found[case] = gradients(case, 1, dtype)
                bar.advance()
        return found
    finally:
        torch.set_num_threads(threads)


def cases() -> list[Case]:
    """Return every built-in loss alone, with every miner, with a memory and with both; each with every split."""
    found: list[Case] = []
    for name, entry in LOSSES.items():
        if not entry.function.__module__.startswith("nearkin."):
            continue  # registered by the caller: unknown to the other processes
        miners = [None, *(m for m in MINERS if m != "all")] if entry.inputs.pairs else [None]
        found += [Case(name, miner) for miner in miners]
        if entry.inputs.memory:
            found += [Case(name, miner, memory=40) for miner in miners]
        switches = [scalar.switch for scalar in entry.inputs.learned_scalars if scalar.switch]
        found += [Case(name, miner, settings=((switch, True),)) for switch in switches for miner in miners]
    splits: tuple[Split, ...] = ("even shares", "uneven shares", "one rank idle")
    return [replace(case, split=split) for split in splits for case in found]


def own_rows(count: int, split: Split, rank: int, world_size: int) -> slice:
    """Return the rows of a batch that a rank holds."""
    if world_size == 1:
        return slice(0, count)
    if split == "even shares":
        return rank_share(count, rank, world_size)
    if split == "one rank idle":
        return slice(count, count) if rank == world_size - 1 else rank_share(count, rank, world_size - 1)
    ends = [
        count * r * (r + 1) // (world_size * (world_size + 1)) for r in range(world_size + 1)
    ]  # rank r holds about r + 1 parts
    return slice(*list(pairwise(ends))[rank])


def gradients(case: Case, world_size: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a rank's gradients by embeddings, network and class parameters after a batch (two with a memory).

    Ranks start with different weights and random states, so that a missing broadcast shows.
    """
    torch.default_generator.manual_seed(distributed.rank())
    network = nn.Linear(PIXELS, DIM, dtype=dtype)
    objective = Objective(
        case.loss, num_classes=CLASSES, dim=DIM, miner=case.miner, memory=case.memory, **dict(case.settings)
    ).to(dtype)
    for value in objective.parameters():
        if value.dim():  # a head starts at zero, which would hide mistakes
            nn.init.normal_(value)
    both = nn.ModuleList([network, objective])
    distributed.broadcast_state(both)

    found: dict[str, Tensor] = {}
    for step in range(2 if case.memory else 1):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(BATCH, PIXELS, generator=generator, dtype=torch.float64).to(dtype)
        labels = torch.randint(CLASSES, (BATCH,), generator=generator)
        own = own_rows(BATCH, case.split, distributed.rank(), world_size)
        emb = network(x[own])
        emb.retain_grad()
        whole_emb, whole_labels = distributed.all_gather_with_grad(emb, labels[own])
        with distributed.fork_rng(0, 0, step):
            loss = objective(whole_emb, whole_labels)
        loss.backward()
        assert emb.grad is not None
        found[f"embeddings {step}"] = distributed.gather_rows(emb.grad) / world_size
    distributed.all_reduce_gradients(both.parameters())
    # As one vector: some losses are invariant to a shift of all embeddings, so the bias alone would be rounding noise.
    found["network"] = torch.cat([value.grad.flatten() for value in network.parameters() if value.grad is not None])
    found |= {f"parameters {name}": p.grad for name, p in objective.named_parameters() if p.grad is not None}
    found |= {f"parameters {name}": value for name, value in objective.named_buffers()}
    return found


def compare(case: Case, alone: dict[str, Tensor], ranks: Sequence[dict[str, Tensor]]) -> GradientCheck:
    """Return the largest difference over ranks, by kind of tensor."""
    worst: dict[str, float] = {}
    for found in ranks:
        if found.keys() != alone.keys():
            raise AssertionError(f"{case}: tensors {sorted(found)} where one process has {sorted(alone)}")
        for name, tensor in alone.items():
            kind = name.partition(" ")[0]
            worst[kind] = max(worst.get(kind, 0.0), relative(found[name], tensor))
    return GradientCheck(case, worst["embeddings"], worst["network"], worst.get("parameters"))


def relative(got: Tensor, want: Tensor) -> float:
    """Return the largest difference over the largest entry; infinite if shapes differ or a value is not finite."""
    if got.shape != want.shape:
        return float("inf")
    difference, size = float((got - want).abs().max()), float(want.abs().max())
    if difference == 0.0:
        return 0.0
    return difference / size if size > 0.0 and difference < float("inf") else float("inf")


# --- processes --------------------------------------------------------------------------------------------------------


def launch(
    command: Sequence[str],
    processes: int,
    folder: Path,
    *,
    timeout: float,
    watch: Callable[[], None] = lambda: None,
) -> None:
    """Run a command once per rank on this machine, as torchrun does, and wait for all. No process outlives the call."""
    package = str(Path(__file__).resolve().parents[2])
    shared = {
        **os.environ,
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    logs = [folder / f"rank{r}.log" for r in range(processes)]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for r, log in enumerate(logs):
            with open(log, "wb") as out:
                env = {**shared, "RANK": str(r), "LOCAL_RANK": str(r)}
                started.append(subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out))
        deadline = time.monotonic() + timeout
        while None in (codes := [process.poll() for process in started]):
            watch()
            if any(codes):
                break
            if time.monotonic() > deadline:
                busy = [str(r) for r, code in enumerate(codes) if code is None]
                raise ProcessLostError(f"process {' and '.join(busy)} of {processes} timed out after {timeout:g} s.")
            time.sleep(0.05)
        failed = [r for r, code in enumerate(codes) if code]
        if failed:
            # Report the cause, not a process that only noticed the loss of another.
            first = min(failed, key=lambda r: "ProcessLostError" in _last_line(logs[r]))
            code = started[first].returncode
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            raise ProcessLostError(f"process {first} of {processes} {how}: {_last_line(logs[first]) or 'no output'}")
        watch()
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def _done(folder: Path) -> int:
    """Return how many cases rank 0 has finished; it writes a byte for each."""
    path = folder / "done"
    return path.stat().st_size if path.exists() else 0


def _work(folder: Path, dtype: torch.dtype) -> None:
    """Run every case in one of the processes, and write its gradients to a file."""
    found = []
    with (
        distributed.process_group("cpu", timeout=60.0, meeting_file=folder / "meeting"),
        open(folder / "done", "ab") as done,
    ):
        for case in cases():
            found.append(gradients(case, distributed.world_size(), dtype))
            if distributed.is_main_process():
                done.write(b".")
                done.flush()
    torch.save(found, folder / f"rank{os.environ['RANK']}.pt")


if __name__ == "__main__":
    _work(Path(sys.argv[1]), getattr(torch, sys.argv[2]))
