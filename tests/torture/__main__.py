"""Run all attacks and print the table of docs/reliability.md: python -m torture [GROUP ...] [--seed N] [--share X]."""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torture import archives, hostile_requests, kills, mutations, shared
from torture.table import Row, markdown

IMAGES, FILES, BITS, REQUESTS, ARCHIVES = 2000, 500, 100, 900, 300
Attack = Callable[[], Row | list[Row]]
CHECKED = ("best.pt", "last.pt", "model.safetensors", "vectors.npy")  # formats in which every flipped bit is noticed


def prepare(root: Path) -> None:
    """Import, and make the inputs, including a trained run."""
    for name in ("inputs", "work", "orders", "files", "archives"):
        (root / name).mkdir()
    kills.warm_up(root)
    kills.make_inputs(root / "inputs")
    training = kills.Scenario("inputs", lambda: kills.train("--train.epochs", "2", "--runs", "../inputs/runs"), 0)
    kills.run_to_the_end(training, root, [])


def attacks(root: Path, seed: int, share: float) -> dict[str, Iterator[Attack]]:
    """Return all attacks by group, `share` of the full number of each."""

    def part(count: int) -> int:
        return max(1, round(count * share))

    def files() -> Iterator[Attack]:
        yield partial(archives.attack_extraction, root / "archives", part(ARCHIVES), seed)
        yield partial(mutations.attack_images, root / "files", part(IMAGES), seed)
        targets = mutations.make_targets(root / "files")
        for target in targets:
            yield partial(mutations.attack_file, target, part(FILES), seed)
        for target in targets:
            if target.name in CHECKED:
                yield partial(mutations.attack_file, target, part(BITS), seed, mutations.flip_one_bit)

    def kill(scenarios: list[kills.Scenario]) -> Iterator[Attack]:
        for scenario in scenarios:
            yield partial(kills.torture, scenario, root, random.Random(seed), part(scenario.kills))

    def together() -> Iterator[Attack]:
        yield partial(shared.attack_together, root, "image cache", 4, random.Random(seed))
        yield partial(shared.attack_together, root, "study, two workers", 3, random.Random(seed))
        yield partial(shared.attack_permissions, root)

    def server() -> Iterator[Attack]:
        yield lambda: hostile_requests.attack_server(kills.make_index(root), part(REQUESTS), seed)

    return {
        "files": files(),
        "kills": kill([scenario for scenario in kills.SCENARIOS if not scenario.slow]),
        "slow-kills": kill([scenario for scenario in kills.SCENARIOS if scenario.slow]),
        "together": together(),
        "server": server(),
    }


def carry_out(attack: Attack) -> list[Row]:
    """Return the rows of an attack, or one that says why it could not be carried out."""
    try:
        rows = attack()
    except Exception as error:
        traceback.print_exc()
        rows = Row(f"{type(error).__name__}", 1, 0, 0, 1, str(error).splitlines()[0])
    return rows if isinstance(rows, list) else [rows]


def main() -> int:
    parser = argparse.ArgumentParser(prog="torture", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="of the full number of attacks; more than 1 is longer")
    parser.add_argument("groups", nargs="*", help="files, kills, slow-kills, together, server; default: all")
    args = parser.parse_args()
    rows, began = [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="nearkin-torture-") as folder:
        root = Path(folder).resolve()
        prepare(root)
        groups = attacks(root, args.seed, args.share)
        for attack in chain.from_iterable(groups[name] for name in args.groups or groups):
            for row in carry_out(attack):
                rows.append(row)
                print(f"{time.monotonic() - began:6.0f} s  {'passed' if row.passed else 'FAILED'}  {row}", flush=True)
    print(f"\n{markdown(rows)}\n\nseed {args.seed}, {(time.monotonic() - began) / 60:.0f} minutes")
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
