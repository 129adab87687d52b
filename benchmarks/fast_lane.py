"""Train a head on frozen features with every loss and compare it with the whitened features, in minutes on two cores.

    python benchmarks/fast_lane.py features.npz            # `features` [N, F] and `labels` [N]; the first half trains
    python benchmarks/fast_lane.py features.npz --losses proxy_anchor triplet --dim 128

For each loss, the learning rate and the number of epochs are selected on held-out validation classes (30 of CUB's 100
training classes). The head is then trained again on all training classes with these settings and evaluated once on the
test classes. Runs are ordinary run folders: complete runs are not repeated.
"""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch

import nearkin as nk
from nearkin._common.progress import Reporter
from nearkin.bench.presets import SCALES
from nearkin.config import ComponentConfig, Recipe
from nearkin.errors import UserError
from nearkin.losses import LOSSES

LEARNING_RATES = (2e-4, 1e-3)
SAMPLES_PER_CLASS = 4  # pair losses need several; proxy losses do not suffer


def candidates(features: Path, dim: int, loss: str) -> list[Recipe]:
    """Return the recipes to select from on the validation classes."""
    base = nk.recipes.features_default()
    base = replace(
        base,
        data=replace(base.data, root=features, split="half", val_fraction=0.3),
        model=replace(base.model, dim=dim),
        loss=ComponentConfig(loss, SCALES.get(loss, {}).get("loss", {})),
    )
    # A constant learning rate, so that training again for the selected number of epochs follows the same curve.
    train = replace(base.train, epochs=6, batch_size=128, samples_per_class=SAMPLES_PER_CLASS, lr_schedule="constant")
    return [replace(base, train=replace(train, lr=lr, class_lr=max(lr, 1e-3))) for lr in LEARNING_RATES]


Row = tuple[str, float, int, float, dict, list[float] | None]


def measure(name: str, features: Path, dim: int, runs: Path) -> tuple[Row, dict] | str:
    """Select the settings of one loss on the validation classes and evaluate it; a reason if it cannot be used."""
    quiet = Reporter(quiet=True)
    try:
        fitted = [(nk.fit(r, runs, final=False, reporter=quiet), r) for r in candidates(features, dim, name)]
    except UserError as error:
        return f"{name}: {str(error).splitlines()[0]}"
    run, recipe = max(fitted, key=lambda pair: pair[0].result["val_R@1"])
    epoch = run.result["protocol"]["epoch"]
    # Epoch 0 means that training did not help: the whitened features themselves are reported.
    final = replace(recipe, data=replace(recipe.data, val_fraction=0.0), train=replace(recipe.train, epochs=epoch))
    result = nk.fit(final, runs, reporter=quiet).result
    whitened = result["test"]["whitened start"]
    trained = result["test"]["trained"] if epoch else whitened
    gain = [100 * bound for bound in result["differences"]["raw backbone"]["R@1"]["interval"]] if epoch else None
    return (name, recipe.train.lr, epoch, run.result["val_R@1"], trained, gain), whitened


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features", type=Path)
    parser.add_argument("--losses", nargs="*", default=list(LOSSES))
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--runs", type=Path, default=Path("runs/fast_lane"))
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes of one thread each")
    args = parser.parse_args()
    start, rows, skipped = time.perf_counter(), [], []
    whitened: dict = {}
    with ProcessPoolExecutor(args.workers, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for done in as_completed([pool.submit(measure, n, args.features, args.dim, args.runs) for n in args.losses]):
            if isinstance(done.result(), str):
                skipped.append(done.result())
                continue
            row, whitened = done.result()
            rows.append(row)
            name, lr, epoch, val, trained, _ = row
            low, high = trained["R@1"]["interval"]
            recall = f"{100 * trained['R@1']['mean']:.2f} ({100 * low:.1f}-{100 * high:.1f})"
            print(f"{name:24} lr {lr:g}  epoch {epoch:2}  val {100 * val:.2f}  test R@1 {recall}", flush=True)
    print(f"\n{len(rows)} losses in {time.perf_counter() - start:.0f} s\n")
    print(markdown(rows, whitened))
    for line in skipped:
        print(f"skipped: {line}")


def markdown(rows: list[Row], whitened: dict) -> str:
    """Return the table of docs/fast-lane.md."""
    lines = ["| loss | lr | epoch | val R@1 | test R@1 | 95 % interval | gain over raw features | MAP@R |"]
    lines += ["|---|---|---|---|---|---|---|---|", _line("(whitened start)", "", "", None, whitened, None)]
    for row in sorted(rows, key=lambda row: -row[4]["R@1"]["mean"]):
        lines.append(_line(*row))
    return "\n".join(lines)


def _line(name: str, lr: object, epoch: object, val: float | None, scores: dict, gain: list[float] | None) -> str:
    low, high = (100 * bound for bound in scores["R@1"]["interval"])
    cells = [name, lr, epoch, "" if val is None else f"{100 * val:.2f}", f"{100 * scores['R@1']['mean']:.2f}"]
    cells += [f"{low:.1f} to {high:.1f}", f"{gain[0]:+.1f} to {gain[1]:+.1f}" if gain else ""]
    return f"| {' | '.join(map(str, cells))} | {100 * scores['MAP@R']['mean']:.2f} |"


if __name__ == "__main__":
    main()
