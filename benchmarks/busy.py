"""Slowdown of training and of feature extraction when another process is busy, by OpenMP waiting policy.

    python benchmarks/busy.py                 # an epoch of glyphs_small, frozen features of generated photos
    python benchmarks/busy.py --repeats 5

Every case runs in a process of its own, because OpenMP reads its settings when torch is imported, and takes the median
of three epochs or five extractions. Policies alternate, first on an idle machine, then beside processes that each keep
one core busy. The table gives the median time of each case as a ratio of the idle time with OpenMP's default policy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

POLICIES = {
    "OpenMP's default": {},
    # What the commands set when they start on a busy machine; on an idle one they leave OpenMP's default.
    "nearkin, busy machine": {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "0"},
    "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
WORK = {
    "epoch of glyphs_small": """
import statistics
import time
from dataclasses import replace
import tempfile
import nearkin as nk
from nearkin._common.progress import Reporter
from nearkin.training import loop
times = []
train_epoch = loop.train_epoch
def timed(*args):
    start = time.perf_counter()
    train_epoch(*args)
    times.append(time.perf_counter() - start)
loop.train_epoch = timed
recipe = nk.recipes.glyphs_small()
recipe = replace(recipe, train=replace(recipe.train, epochs=3))
with tempfile.TemporaryDirectory() as runs:
    nk.fit(recipe, runs, final=False, reporter=Reporter(quiet=True))
print(statistics.median(times))
""",
    "frozen features": """
import statistics
import time
import torch
from nearkin.config import ModelConfig
from nearkin.models import Embedder
model = Embedder(ModelConfig(backbone="efficientnet_lite0", freeze="backbone"), (3, 224, 224), augment="thesis").eval()
images = torch.randint(0, 256, (64, 3, 224, 224), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
model.embed(images[:8])
times = []
for _ in range(5):
    start = time.perf_counter()
    model.embed(images)
    times.append(time.perf_counter() - start)
print(statistics.median(times))
""",
}
BUSY = "while True: pass"


def seconds(code: str, settings: dict[str, str]) -> float:
    """Run a piece of work in a new process and return the seconds that it prints."""
    unset = {"OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}
    environment = {name: value for name, value in os.environ.items() if name not in unset} | settings
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--busy", type=int, default=1, help="number of competing processes")
    parser.add_argument("--out", type=Path, help="write the seconds as JSON")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES), help="default: all")
    args = parser.parse_args()
    policies = {name: POLICIES[name] for name in dict.fromkeys(["OpenMP's default", *args.policies])}
    found: dict[str, list[float]] = {}
    for busy in (0, args.busy):
        competitors = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(busy)]
        try:
            for _ in range(args.repeats):
                for work, code in WORK.items():
                    for policy, settings in policies.items():
                        case = f"{work} | {policy} | {busy}"
                        found.setdefault(case, []).append(seconds(code, settings))
                        print(f"{case}: {found[case][-1]:.2f} s", file=sys.stderr)
        finally:
            for process in competitors:
                process.kill()
                process.wait()
    if args.out:
        args.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(f"median of {args.repeats}, as a ratio of the idle time with OpenMP's default")
    for work in WORK:
        base = statistics.median(found[f"{work} | OpenMP's default | 0"])
        print(f"\n{work} ({base:.1f} s)")
        for policy in policies:
            idle, busy = (statistics.median(found[f"{work} | {policy} | {n}"]) / base for n in (0, args.busy))
            print(f"  {policy:26}  idle {idle:4.2f}x   {args.busy} busy {busy:5.2f}x")


if __name__ == "__main__":
    main()
