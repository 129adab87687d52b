"""Run all attacks and print the table of docs/reliability.md: python -m torture [--quick] [--seed N]."""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torture import archives, hostile_requests, kills, mutations, shared
from torture.table import Row, markdown

IMAGES, FILES, BITS, REQUESTS, ARCHIVES = 2000, 500, 100, 900, 300
CHECKED = ("best.pt", "last.pt", "model.safetensors", "vectors.npy")  # formats in which every flipped bit is noticed


def prepare(root: Path) -> None:
    """Import, and make the inputs, including a trained run."""
    for name in ("inputs", "work", "orders", "files", "archives"):
        (root / name).mkdir()
    kills.warm_up()
    kills.make_inputs(root / "inputs")
    training = kills.Scenario("inputs", lambda: kills.train("--train.epochs", "2", "--runs", "../inputs/runs"), 0)
    kills.run_to_the_end(training, root, [])


def attacks(root: Path, seed: int, share: float, *, quick: bool = False) -> Iterator[Row]:
    """Carry out all attacks, `share` of the full number of each; quick: without those that take long to start."""

    def part(count: int) -> int:
        return max(1, round(count * share))

    yield from archives.attack_extraction(root / "archives", part(ARCHIVES), seed)
    yield mutations.attack_images(root / "files", part(IMAGES), seed)
    targets = mutations.make_targets(root / "files")
    for target in targets:
        yield mutations.attack_file(target, part(FILES), seed)
    for target in targets:
        if target.name in CHECKED:
            yield mutations.attack_file(target, part(BITS), seed, mutations.flip_one_bit)
    for scenario in kills.SCENARIOS:
        if not quick or not (scenario.workers or scenario.name == "export"):
            yield kills.torture(scenario, root, random.Random(seed), part(scenario.kills))
    if quick:
        return
    rng = random.Random(seed)
    yield shared.attack_together(root, "image cache", 4, rng)
    yield shared.attack_together(root, "study, two workers", 3, rng)
    yield from shared.attack_permissions(root)
    yield hostile_requests.attack_server(kills.make_index(root), part(REQUESTS), seed)


def main() -> int:
    parser = argparse.ArgumentParser(prog="torture", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="of the full number of attacks; more than 1 is longer")
    parser.add_argument("--quick", action="store_true", help="a small share, without servers and workers")
    args = parser.parse_args()
    if args.quick:
        args.share = 0.03
    rows, began = [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="nearkin-torture-") as folder:
        root = Path(folder).resolve()
        prepare(root)
        for row in attacks(root, args.seed, args.share, quick=args.quick):
            rows.append(row)
            print(f"{time.monotonic() - began:6.0f} s  {'passed' if row.passed else 'FAILED'}  {row}", flush=True)
    print(f"\n{markdown(rows)}\n\nseed {args.seed}, {(time.monotonic() - began) / 60:.0f} minutes")
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
