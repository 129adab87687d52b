"""Forward + backward time of every loss, against pytorch-metric-learning (PML) and against bare matrix products.

    python benchmarks/losses.py [--quick] [--markdown FILE]

One run, one thread, CPU, float32, D = 512, 4 samples per class. Ours and theirs take turns, and the medians are
compared, so that a busy machine disturbs both alike: trust the ratios. A cell that PML cannot do within about 6 GB or
60 s is left out and says why; its two slowest cells at N = 512 are run once (one needs 9 GB). The last table is ours
alone at N = 4096, each loss in a process of its own, with the peak memory above the start.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import miners as pml_miners
from pytorch_metric_learning import regularizers
from pytorch_metric_learning.distances import CosineSimilarity, LpDistance
from torch import Tensor

import nearkin as nk
from nearkin.losses import LOSSES

DIM, PER_CLASS = 512, 4
Step = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Peer:
    """The nearest loss of PML: how to make it for C classes, and the largest batch it can do."""

    make: Callable[[int], Step]
    limit: int = 1 << 30
    why: str = ""
    once: int = 1 << 30  # from this size on it is run once only
    near: bool = False  # the same idea, but not the same function


def _mined(loss: Any, miner: Any) -> Step:
    return lambda emb, labels: loss(emb, labels, miner(emb, labels))


def _classes(kind: Any, **settings: Any) -> Callable[[int], Step]:
    return lambda classes: kind(num_classes=classes, embedding_size=DIM, **settings)


def _with_meta_classes(loss: Any) -> Step:
    return lambda emb, labels: loss(emb, indices_tuple=labels)


def _fresh(kind: Any) -> Step:
    return lambda emb, labels: kind()(emb, labels)  # its second step cannot be differentiated


COS = CosineSimilarity
CUBE = "N^3 mask, 8.6 GB"  # known from its source: it compares all pairs with all pairs before it picks triplets
PEERS: dict[str, Peer] = {
    "contrastive": Peer(lambda _: pml.ContrastiveLoss(pos_margin=1.0, neg_margin=0.5, distance=COS())),
    "contrastive_l2": Peer(lambda _: pml.ContrastiveLoss(pos_margin=0.0, neg_margin=1.0), near=True),
    "triplet": Peer(lambda _: pml.TripletMarginLoss(margin=0.1, distance=COS()), 1024, CUBE),
    "triplet + hard": Peer(
        lambda _: _mined(pml.TripletMarginLoss(margin=0.1, distance=COS()), pml_miners.BatchHardMiner(distance=COS()))
    ),
    "triplet + semihard": Peer(
        lambda _: _mined(
            pml.TripletMarginLoss(margin=0.1, distance=COS()),
            pml_miners.TripletMarginMiner(margin=0.1, type_of_triplets="semihard", distance=COS()),
        ),
        1024,
        CUBE,
        near=True,
    ),
    "lifted_structure": Peer(
        lambda _: pml.GeneralizedLiftedStructureLoss(neg_margin=0.0, pos_margin=0.5, distance=COS())
    ),
    "lifted_song": Peer(lambda _: pml.LiftedStructureLoss(neg_margin=1, pos_margin=0), 512, "out of memory", once=512),
    "npair_mc": Peer(
        lambda _: pml.NPairsLoss(embedding_regularizer=regularizers.LpRegularizer(power=2), embedding_reg_weight=0.005)
    ),
    "margin": Peer(lambda _: pml.MarginLoss(margin=0.2, beta=1.2), 1024, CUBE, near=True),
    "multi_similarity": Peer(lambda _: pml.MultiSimilarityLoss(alpha=2, beta=50, base=0.5)),
    "multi_similarity + multi_similarity": Peer(
        lambda _: _mined(
            pml.MultiSimilarityLoss(alpha=2, beta=50, base=0.5), pml_miners.MultiSimilarityMiner(epsilon=0.1)
        )
    ),
    "snca": Peer(lambda _: pml.NCALoss(softmax_scale=10)),
    "nca": Peer(lambda _: pml.NCALoss(softmax_scale=1, distance=LpDistance(normalize_embeddings=False, power=2))),
    "ice": Peer(lambda _: pml.NTXentLoss(temperature=1.0), 512, "out of memory", once=512, near=True),
    "norm_softmax": Peer(_classes(pml.NormalizedSoftmaxLoss)),
    "proxy_nca": Peer(_classes(pml.ProxyNCALoss, softmax_scale=1), near=True),
    "arcface": Peer(_classes(pml.ArcFaceLoss)),
    "soft_triple": Peer(
        lambda classes: pml.SoftTripleLoss(
            num_classes=classes,
            embedding_size=DIM,
            centers_per_class=10,
            weight_regularizer=regularizers.SparseCentersRegularizer(num_classes=classes, centers_per_class=10),
            weight_reg_weight=0.2,
        )
    ),
    "proxy_anchor": Peer(_classes(pml.ProxyAnchorLoss)),
    "supcon": Peer(lambda _: pml.SupConLoss(temperature=0.1)),
    "nt_xent": Peer(lambda _: pml.NTXentLoss(temperature=0.07), 512, "out of memory", once=512),
    "cosface": Peer(_classes(pml.CosFaceLoss)),
    "sphereface": Peer(_classes(pml.SphereFaceLoss)),
    "large_margin_softmax": Peer(_classes(pml.LargeMarginSoftmaxLoss)),
    "subcenter_arcface": Peer(_classes(pml.SubCenterArcFaceLoss)),
    "p2sgrad": Peer(lambda classes: pml.P2SGradLoss(DIM, classes)),
    "instance": Peer(lambda _: pml.InstanceLoss(gamma=64), near=True),
    "proxy_nca_pp": Peer(_classes(pml.ProxyNCALoss, softmax_scale=9)),
    "manifold": Peer(
        lambda classes: _with_meta_classes(pml.ManifoldLoss(l=DIM, K=classes)), 512, "out of memory (24 GB)"
    ),
    "circle": Peer(lambda _: pml.CircleLoss(m=0.4, gamma=80)),
    "angular": Peer(lambda _: pml.AngularLoss(alpha=40)),
    "tuplet_margin": Peer(lambda _: pml.TupletMarginLoss(), 512, "out of memory", once=512),
    "intra_pair_variance": Peer(lambda _: pml.IntraPairVarianceLoss()),
    "threshold_consistent_margin": Peer(
        lambda _: pml.ThresholdConsistentMarginLoss(), 512, "N^2 D blocks, 17 GB", once=512
    ),
    "snr_contrastive": Peer(lambda _: pml.SignalToNoiseRatioContrastiveLoss(), 512, "N^2 D blocks, 17 GB", once=512),
    "dynamic_soft_margin": Peer(lambda _: _fresh(pml.DynamicSoftMarginLoss), 512, "all triplets", near=True),
    "fast_ap": Peer(lambda _: pml.FastAPLoss(num_bins=10)),
    "smooth_ap": Peer(lambda _: pml.SmoothAPLoss(), 512, "N^3 blocks, 34 GB each", once=512, near=True),
    "pnp": Peer(lambda _: pml.PNPLoss(variant="Dq"), 512, "N^3 blocks, 34 GB each", once=512, near=True),
    "histogram": Peer(lambda _: pml.HistogramLoss(), 512, "all triplets", once=512),
    "ranked_list": Peer(lambda _: pml.RankedListLoss(margin=0.4, Tn=5, alpha=1.2), near=True),
}


@dataclass
class Cell:
    ours: float
    theirs: float | None
    products: float
    note: str = ""


Table = dict[str, dict[int, Cell]]


def names() -> list[str]:
    mined = {
        "triplet": ["triplet + hard", "triplet + semihard"],
        "multi_similarity": ["multi_similarity + multi_similarity"],
    }
    return [row for name in LOSSES for row in (name, *mined.get(name, []))]


def make_ours(row: str, classes: int) -> Step:
    name, _, miner = row.partition(" + ")
    return nk.Objective(name, num_classes=classes, dim=DIM, miner=miner or None).train()


def batch(n: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(n)
    labels = torch.arange(n) // PER_CLASS
    return torch.randn(n // PER_CLASS, DIM)[labels] + torch.randn(n, DIM), labels


def products(row: str, n: int) -> Callable[[], None]:
    """The three bare matrix products: similarities, and the gradients of both their factors."""
    loss = LOSSES[row.partition(" + ")[0]]
    x = torch.randn(n, DIM)
    if loss.inputs.pairs:
        w = torch.randn(n, DIM)
    else:
        w = torch.randn(n // PER_CLASS * loss.inputs.builder_kwargs.get("centers", 1), DIM)

    def run() -> None:
        s = x @ w.t()
        _ = s @ w, s.t() @ x

    return run


def once(step: Step, emb: Tensor, labels: Tensor) -> float:
    emb = emb.clone().requires_grad_()
    start = time.perf_counter()
    step(emb, labels).backward()
    return time.perf_counter() - start


def measure(row: str, n: int, budget: float) -> Cell:
    emb, labels = batch(n)
    ours = make_ours(row, n // PER_CLASS)
    peer = PEERS.get(row)
    theirs = peer.make(n // PER_CLASS) if peer and n <= peer.limit else None
    bare = products(row, n)
    times: dict[str, list[float]] = {"ours": [], "theirs": [], "bare": []}
    once(ours, emb, labels)
    bare()
    single = bool(peer and n >= peer.once)
    if theirs and single:
        times["theirs"].append(once(theirs, emb, labels))
        theirs = None
    elif theirs:
        once(theirs, emb, labels)
    start, rounds = time.perf_counter(), 0
    while rounds < 5 or (time.perf_counter() - start < budget and rounds < 600):
        turns = {"ours": ours}
        if theirs and (rounds < 3 or sum(times["theirs"]) < 2 * budget):
            turns["theirs"] = theirs
        # Who comes first finds the caches filled by the bare products: they take turns at that, too.
        for name in sorted(turns, reverse=rounds % 2 == 1):
            times[name].append(once(turns[name], emb, labels))
        begin = time.perf_counter()
        bare()
        times["bare"].append(time.perf_counter() - begin)
        rounds += 1
    middle = {k: statistics.median(v) if v else None for k, v in times.items()}
    note = "" if peer is None or n <= peer.limit else peer.why
    assert middle["ours"] is not None
    assert middle["bare"] is not None
    return Cell(middle["ours"], middle["theirs"], middle["bare"], note)


def peak(row: str, n: int) -> tuple[float, float]:
    """Time, and peak memory in MB above the start, of one step in a process of its own."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(_peak, (row, n))


def _peak(row: str, n: int) -> tuple[float, float]:
    emb, labels = batch(n)
    step = make_ours(row, n // PER_CLASS)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the parent freed must not hide what this step needs
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    seconds = once(step, emb, labels)
    return seconds, _memory("VmHWM") - before


def _memory(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(key))


# --- tables -----------------------------------------------------------------------------------------------------------


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def ratio(value: float) -> str:
    return f"{value:,.0f}x" if value >= 100 else f"{value:.3g}x"


def speed_table(table: Table, sizes: list[int]) -> str:
    head = "| loss |" + "".join(f" ours {n} (ms) | PML {n} (ms) | speed-up {n} |" for n in sizes)
    lines = [head, "|---|" + "---:|---:|---:|" * len(sizes)]
    for row, cells in table.items():
        if row not in PEERS:
            continue
        mark = " ~" if PEERS[row].near else ""
        text = f"| {row}{mark} |"
        for n in sizes:
            c = cells[n]
            if c.theirs is None:
                text += f" {ms(c.ours)} | {c.note} | - |"
            else:
                text += f" {ms(c.ours)} | {ms(c.theirs)} | {ratio(c.theirs / c.ours)} |"
        lines.append(text)
    return "\n".join(lines)


def product_table(table: Table, sizes: list[int]) -> str:
    head = "| loss |" + "".join(f" {n}: ms | x products |" for n in sizes)
    lines = [head, "|---|" + "---:|---:|" * len(sizes)]
    for row, cells in table.items():
        lines.append(
            f"| {row} |" + "".join(f" {ms(c.ours)} | {c.ours / c.products:.2f} |" for c in map(cells.get, sizes))
        )
    return "\n".join(lines)


def summary(table: Table, sizes: list[int]) -> str:
    lines = []
    for n in sizes:
        ratios = {row: c[n].theirs / c[n].ours for row, c in table.items() if c[n].theirs is not None}
        worst = min(ratios, key=ratios.__getitem__)
        lines.append(
            f"N={n}: median speed-up {statistics.median(ratios.values()):.1f}x over {len(ratios)} shared losses, "
            f"least {ratios[worst]:.2f}x ({worst})"
        )
    largest = sizes[-1]
    pairs = [row for row in table if LOSSES[row.partition(" + ")[0]].inputs.pairs]
    slowest = max(pairs, key=lambda row: table[row][largest].ours / table[row][largest].products)
    c = table[slowest][largest]
    lines.append(f"N={largest}: the slowest pair loss takes {c.ours / c.products:.2f}x its three products ({slowest})")
    return "\n".join(f"- {line}" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="N = 128 and 512, short, without PML's slowest cells")
    parser.add_argument("--only", nargs="*", help="rows to run")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file as well")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = [128, 512] if args.quick else [128, 512, 2048]
    table: Table = {}
    for row in args.only or names():
        table[row] = {}
        for n in sizes:
            if args.quick and row in PEERS and n >= PEERS[row].once:
                table[row][n] = Cell(once(make_ours(row, n // PER_CLASS), *batch(n)), None, float("nan"), "skipped")
                continue
            cell = table[row][n] = measure(row, n, 0.2 if args.quick else 1.0)
            against = f"PML {ms(cell.theirs)} ms, {cell.theirs / cell.ours:.2f}x" if cell.theirs else cell.note
            print(
                f"{row:36} N={n:<5} {ms(cell.ours):>8} ms  {cell.ours / cell.products:5.2f} products  {against}",
                flush=True,
            )
    parts = [
        "## Against pytorch-metric-learning\n\n" + speed_table(table, sizes),
        "`~` marks the nearest loss of PML where it has not quite the same one.",
        summary(table, sizes),
        "## Against the three bare matrix products\n\n" + product_table(table, sizes),
    ]
    if not args.quick:
        lines = ["| loss | ms at 4096 | peak MB |", "|---|---:|---:|"]
        for row in table:
            seconds, megabytes = peak(row, 4096)
            lines.append(f"| {row} | {ms(seconds)} | {megabytes:,.0f} |")
            print(lines[-1], flush=True)
        parts.append("## Ours at N = 4096\n\n" + "\n".join(lines))
    text = "\n\n".join(parts) + "\n"
    print("\n" + text)
    if args.markdown:
        args.markdown.write_text(text)


if __name__ == "__main__":
    main()
