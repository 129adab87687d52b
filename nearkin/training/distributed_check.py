"""The check behind `nearkin doctor --distributed`: for every loss, gradients of N processes equal those of one.

Each process runs the same small training steps alone and then with its share of the batches.
"""

import json
import os
import tempfile
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessException, spawn

from nearkin._common.progress import Reporter
from nearkin.data.samplers import rank_share
from nearkin.errors import ProcessLostError
from nearkin.losses import LOSSES
from nearkin.losses.miners import MINERS
from nearkin.losses.objective import Objective
from nearkin.training import distributed

TOLERANCE = 1e-5  # relative; float32 rounds at 6e-8, and a loss with scale 64 makes that 4e-6
BATCH, PIXELS, DIM, CLASSES = 24, 12, 8, 5
EVERY_MINER = ("contrastive", "triplet")  # losses that are run with every miner: one of pairs, one of triplets

Split = Literal["even shares", "uneven shares", "one rank idle"]


@dataclass(frozen=True)
class Case:
    """A loss with its miner, memory, references and settings, and how its batches are split over ranks."""

    loss: str
    miner: str | None = None
    memory: int = 0
    refs: bool = False  # the batch is compared with a second tower
    settings: tuple[tuple[str, Any], ...] = ()
    split: Split = "even shares"

    def __str__(self) -> str:
        extras = [f"miner {self.miner}"] if self.miner else []
        extras += [f"memory {self.memory}"] if self.memory else []
        extras += ["references"] if self.refs else []
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
        return max(self.embeddings, self.network, self.parameters or 0.0)

    @property
    def ok(self) -> bool:
        return self.worst <= TOLERANCE


def check_gradients(
    processes: int = 2, *, dtype: torch.dtype = torch.float32, quiet: bool = True
) -> list[GradientCheck]:
    """Compare one process with several local ones (gloo, loopback only) on every case."""
    with tempfile.TemporaryDirectory(prefix="nearkin-") as folder:
        try:
            spawn(_work, (processes, Path(folder), dtype, quiet), nprocs=processes)  # type: ignore[no-untyped-call]
        except ProcessException as error:
            raise ProcessLostError(f"distributed check: {str(error).strip().splitlines()[-1]}") from None
        of_ranks = [json.loads((Path(folder) / f"rank{r}.json").read_text()) for r in range(processes)]
    rows = []
    for case, *found in zip(cases(), *of_ranks, strict=True):
        worst = {kind: max(differences[kind] for differences in found) for kind in found[0]}
        rows.append(GradientCheck(case, worst["embeddings"], worst["network"], worst.get("parameters")))
    return rows


def _work(rank: int, processes: int, folder: Path, dtype: torch.dtype, quiet: bool) -> None:
    """Run every case in one of the processes, and write the differences from a process alone to a file."""
    torch.set_num_threads(1)  # the tensors are too small for several threads
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    found = []
    distinct = dict.fromkeys(replace(case, split="even shares") for case in cases())
    reporter = Reporter(quiet=quiet or rank > 0)
    with reporter.track("gradients of one process", len(distinct), unit="case") as bar:
        alone = {}
        for case in distinct:
            alone[case] = gradients(case, dtype)
            bar.advance()
    with (
        distributed.process_group("cpu", timeout=60.0, meeting_file=folder / "meeting"),
        reporter.track(f"gradients of {processes} processes", len(cases()), unit="case") as bar,
    ):
        for case in cases():
            found.append(differences(gradients(case, dtype), alone[replace(case, split="even shares")]))
            bar.advance()
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


def cases() -> list[Case]:
    """Return every loss alone, with a miner, a memory and references; and every miner; each with every split."""
    found: list[Case] = []
    for name, entry in LOSSES.items():
        if not entry.function.__module__.startswith("nearkin."):
            continue  # registered by the caller: unknown to the other processes
        miners: list[str | None] = [None, "multi_similarity"] if entry.inputs.pairs else [None]
        if name in EVERY_MINER:
            miners = [None, *(m for m in MINERS if m != "all")]
        found += [Case(name, miner) for miner in miners]
        if entry.inputs.memory:  # the miner angular compares a batch with itself
            others = [miner for miner in miners if miner != "angular"]
            found += [Case(name, miner, memory=40) for miner in others]
            found += [Case(name, miner, refs=True) for miner in others]
        switches = dict.fromkeys(scalar.switch for scalar in entry.inputs.learned_scalars if scalar.switch)
        found += [Case(name, miner, settings=((switch, True),)) for switch in switches for miner in miners]
    splits: tuple[Split, ...] = ("even shares", "uneven shares", "one rank idle")
    return [replace(case, split=split) for split in splits for case in found]


def own_rows(count: int, split: Split, rank: int, world_size: int) -> slice:
    if world_size == 1 or split == "even shares":
        return rank_share(count, rank, world_size)
    if split == "one rank idle":
        return slice(count, count) if rank == world_size - 1 else rank_share(count, rank, world_size - 1)
    parts = world_size * (world_size + 1)  # rank r holds about r + 1 of half as many
    ends = [count * r * (r + 1) // parts for r in range(world_size + 1)]
    return slice(*list(pairwise(ends))[rank])


def gradients(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return this rank's gradients; ranks start with different weights, so that a missing broadcast shows."""
    rank, world_size = distributed.rank(), distributed.world_size()
    torch.default_generator.manual_seed(rank)
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
        own = own_rows(BATCH, case.split, rank, world_size)
        emb = network(x[own])
        emb.retain_grad()
        whole_emb, whole_labels = distributed.all_gather_with_grad(emb, labels[own])
        tower: dict[str, Tensor] = {}
        if case.refs:
            second = network(x.flip(1)[own])
            tower = dict(
                zip(("refs", "ref_labels"), distributed.all_gather_with_grad(second, labels[own]), strict=True)
            )
        with distributed.fork_rng(0, 0, step):
            loss = objective(whole_emb, whole_labels, **tower)
        loss.backward()
        assert emb.grad is not None
        found[f"embeddings {step}"] = distributed.gather_rows(emb.grad) / world_size
    distributed.all_reduce_gradients(both.parameters())
    # As one vector: some losses are invariant to a shift of all embeddings, so the bias alone would be rounding noise.
    found["network"] = torch.cat([value.grad.flatten() for value in network.parameters() if value.grad is not None])
    found |= {f"parameters {name}": p.grad for name, p in objective.named_parameters() if p.grad is not None}
    found |= {f"parameters {name}": value for name, value in objective.named_buffers()}
    return found


def differences(found: dict[str, Tensor], alone: dict[str, Tensor]) -> dict[str, float]:
    """Return the largest difference from one process by kind of tensor; infinite if there is nothing to compare."""
    if found.keys() != alone.keys():
        raise AssertionError(f"tensors {sorted(found)} where one process has {sorted(alone)}")
    worst: dict[str, float] = {}
    for name, tensor in alone.items():
        kind = name.partition(" ")[0]
        worst[kind] = max(worst.get(kind, 0.0), relative(found[name], tensor))
    return worst if alone["network"].any() else {**worst, "network": float("inf")}


def relative(got: Tensor, want: Tensor) -> float:
    """Return the largest difference over the largest entry; infinite if shapes differ or a value is not finite."""
    if got.shape != want.shape:
        return float("inf")
    difference, size = float((got - want).abs().max()), float(want.abs().max())
    if difference == 0.0:
        return 0.0
    return difference / size if size > 0.0 and difference < float("inf") else float("inf")
