"""Time and peak memory of pytorch-metric-learning (PML), of nearkin.compat.pml and of the native form.

    python benchmarks/compat_pml.py [--size 512] [--write]

Forward and backward of one batch on the CPU: one thread, float32, D = 128, 4 samples per class. Each cell is measured
in a process of its own: the median of several steps, and the peak memory above the start. With --write the table
replaces that of docs/from-pml.md.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import multiprocessing
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import nearkin as nk

DIM, PER_CLASS, SECONDS = 128, 4, 1.0
PAGE = Path(__file__).parents[1] / "docs" / "from-pml.md"
PACKAGES = {"PML": "pytorch_metric_learning", "compat": "nearkin.compat.pml"}
Step = Callable[[Tensor, Tensor], Tensor]


def _mined(loss: Any, miner: Any) -> Step:
    return lambda emb, labels: loss(emb, labels, miner(emb, labels))


# Name -> the loss with either library's modules for C classes, and the native objective with the same definition.
ROWS: dict[str, tuple[Callable[[Any, int], Step], Callable[[int], Step]]] = {
    "ContrastiveLoss": (
        lambda lib, c: lib.losses.ContrastiveLoss(),
        lambda c: nk.Objective("contrastive", reduction="nonzero"),
    ),
    "MultiSimilarityLoss, MultiSimilarityMiner": (
        lambda lib, c: _mined(lib.losses.MultiSimilarityLoss(), lib.miners.MultiSimilarityMiner()),
        lambda c: nk.Objective("multi_similarity", miner="multi_similarity"),
    ),
    "TripletMarginLoss, all triplets": (
        lambda lib, c: lib.losses.TripletMarginLoss(distance=lib.distances.CosineSimilarity()),
        lambda c: nk.Objective("triplet", reduction="nonzero"),
    ),
    "TripletMarginLoss, TripletMarginMiner": (
        lambda lib, c: _mined(lib.losses.TripletMarginLoss(), lib.miners.TripletMarginMiner()),
        lambda c: nk.Objective("triplet", miner="triplet_margin", reduction="nonzero"),
    ),
    "NTXentLoss": (lambda lib, c: lib.losses.NTXentLoss(), lambda c: nk.Objective("nt_xent")),
    "ProxyAnchorLoss": (
        lambda lib, c: lib.losses.ProxyAnchorLoss(c, DIM),
        lambda c: nk.Objective("proxy_anchor", num_classes=c, dim=DIM),
    ),
    "SubCenterArcFaceLoss": (
        lambda lib, c: lib.losses.SubCenterArcFaceLoss(num_classes=c, embedding_size=DIM),
        lambda c: nk.Objective("subcenter_arcface", num_classes=c, dim=DIM),
    ),
    "CrossBatchMemory(ContrastiveLoss)": (
        lambda lib, c: lib.losses.CrossBatchMemory(lib.losses.ContrastiveLoss(), DIM, memory_size=4096),
        lambda c: nk.Objective("contrastive", reduction="nonzero", memory=4096, dim=DIM),
    ),
}


def measure(row: str, column: str, n: int) -> tuple[float, float]:
    """Median seconds of a step, and peak memory in MB above the start, in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure, (row, column, n))


def _measure(row: str, column: str, n: int) -> tuple[float, float]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    labels = torch.arange(n // PER_CLASS).repeat_interleave(PER_CLASS)
    emb = (torch.randn(n // PER_CLASS, DIM)[labels] + torch.randn(n, DIM)).requires_grad_()
    shared, native = ROWS[row]
    if column == "native":
        step = native(n // PER_CLASS)
    else:
        names = ("losses", "miners", "distances")
        modules = {name: importlib.import_module(f"{PACKAGES[column]}.{name}") for name in names}
        step = shared(SimpleNamespace(**modules), n // PER_CLASS)
    for size in (16, 32):  # what is loaded and compiled once
        step(emb[:size], labels[:size]).backward()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before, times = _memory("VmRSS"), []
    while not times or (sum(times) < SECONDS and len(times) < 50):
        start = time.perf_counter()
        step(emb, labels).backward()
        times.append(time.perf_counter() - start)
    return statistics.median(times), _memory("VmHWM") - before


def _memory(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def table(n: int) -> str:
    """Return the table, and print each row as it is measured."""
    lines = [
        f"Forward and backward at N = {n}, D = {DIM}, {PER_CLASS} samples per class, one thread:",
        "",
        "| loss | PML ms | compat ms | native ms | PML MB | compat MB | native MB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in ROWS:
        cells = [measure(row, column, n) for column in (*PACKAGES, "native")]
        seconds = [f"{1e3 * s:,.3g}" if s < 1 else f"{1e3 * s:,.0f}" for s, _ in cells]
        lines.append(f"| {row} | {' | '.join([*seconds, *(f'{mb:,.0f}' for _, mb in cells)])} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=512, help="samples of a batch")
    parser.add_argument("--write", action="store_true", help="replace the table of docs/from-pml.md")
    args = parser.parse_args()
    text = table(args.size)
    if args.write:
        begin, end = (f"<!-- {word}: benchmarks/compat_pml.py -->" for word in ("begin", "end"))
        page = PAGE.read_text(encoding="utf-8")
        pattern = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.DOTALL)
        PAGE.write_text(pattern.sub(lambda _: f"{begin}\n{text}\n{end}", page), encoding="utf-8")


if __name__ == "__main__":
    main()
