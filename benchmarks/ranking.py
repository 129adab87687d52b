"""Time and memory of exact evaluation: nearkin, the bare matrix product and other libraries, in one run.

    python benchmarks/ranking.py                       all sizes (about half an hour on two cores)
    python benchmarks/ranking.py --quick               about a minute
    python benchmarks/ranking.py --sizes 60502 --repeat 3
    python benchmarks/ranking.py --cases               ties, equal vectors, large classes, the torch backend (minutes)

Every method runs in its own process on the same vectors with the same number of threads. The best of the repeats
counts, as a ratio to the bare product of the same run. Prints a Markdown table.

    product   all similarities, block by block into one reused buffer, without using them: the lower bound of any method
              that computes them all. (nearkin computes half of them, as the matrix is symmetric.)
    default   nk.score with its default metrics, at 1, 2, 4 and 8
    ours      nk.score: R, P, MAP and nDCG at 1, 10, 100 and 1000, RP, MAP@R, MAP, MRR: per query and
              expected values under ties
    faiss     faiss-cpu flat search for the 1000 nearest, and the same metrics from the lists with NumPy
    PML 1000  AccuracyCalculator of pytorch-metric-learning with k = 1000: P@1, R-precision, MAP@R
    PML least the same with the smallest k that MAP@R allows; it cannot compute R@1000
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

# Items: (dimensions, classes).
SIZES = {5924: (512, 100), 12000: (512, 2400), 60502: (512, 11316), 200000: (256, 40000)}
METHODS = ("product", "default", "ours", "faiss", "PML 1000", "PML least")
NAMES = ("R@1", "R@10", "R@100", "R@1000", "MAP@R", "nDCG@10", "nDCG@100")


def data(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Vectors of a realistic model: R@1 is about 75 %."""
    dim, classes = SIZES[n]
    rng = np.random.default_rng(0)
    labels = np.sort(np.concatenate([np.arange(classes).repeat(2), rng.integers(0, classes, n - 2 * classes)]))
    centres = rng.standard_normal((classes, dim), dtype=np.float32)
    # With more positives per query, more noise is needed for the same R@1.
    noise = np.float32({5924: 3.2, 200000: 1.8}.get(n, 2.2))
    x = centres[labels] + noise * rng.standard_normal((n, dim), dtype=np.float32)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    order = rng.permutation(n)
    return np.ascontiguousarray(x[order]), labels[order]


def product(x: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    import torch

    t = torch.from_numpy(x)
    rows = 2048
    block = torch.empty(rows, len(t))
    for a in range(0, len(t), rows):
        part = t[a : a + rows]
        torch.mm(part, t.T, out=block[: len(part)])
    return {}


def ours(x: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    import nearkin as nk

    return nk.score(x, labels, ks=(1, 10, 100, 1000), verbose=False).means()


def faiss(x: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    import faiss

    index = faiss.IndexFlatIP(x.shape[1])
    index.add(x)
    k = min(1001, len(x))
    values: dict[str, list[np.ndarray]] = {name: [] for name in NAMES}
    total = np.bincount(labels)
    discount = 1 / np.log2(np.arange(2, k + 1))
    for a in range(0, len(x), 4096):
        _, near = index.search(x[a : a + 4096], k)
        own = np.arange(a, a + len(near))[:, None]
        # Exclude the query by index; where it is not in the list, drop the last item.
        keep = near != own
        keep[keep.all(1), -1] = False
        near = near[keep].reshape(len(near), -1)
        hit = labels[near] == labels[own]
        relevant = total[labels[own[:, 0]]] - 1
        rank = np.arange(1, hit.shape[1] + 1)
        for m in (1, 10, 100, 1000):
            values[f"R@{m}"].append(hit[:, :m].any(1))
        precision = np.cumsum(hit, axis=1) / rank
        inside = rank[None, :] <= relevant[:, None]
        values["MAP@R"].append((precision * hit * inside).sum(1) / np.maximum(relevant, 1))
        for m in (10, 100):
            best = np.cumsum(discount)[np.minimum(relevant, m) - 1]
            values[f"nDCG@{m}"].append((hit[:, :m] * discount[:m]).sum(1) / best)
    return {name: float(np.concatenate(parts).mean()) for name, parts in values.items()}


def pml(x: np.ndarray, labels: np.ndarray, k: int | str) -> dict[str, float]:
    import torch
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    include = ("precision_at_1", "r_precision", "mean_average_precision_at_r")
    calculator = AccuracyCalculator(include=include, k=k, device=torch.device("cpu"))
    got = calculator.get_accuracy(torch.from_numpy(x), torch.from_numpy(labels))
    return {"R@1": got["precision_at_1"], "MAP@R": got["mean_average_precision_at_r"]}


def default(x: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    import nearkin as nk

    return nk.score(x, labels, verbose=False).means()


RUN = {
    "product": product,
    "default": default,
    "ours": ours,
    "faiss": faiss,
    "PML 1000": lambda x, labels: pml(x, labels, 1000),
    "PML least": lambda x, labels: pml(x, labels, "max_bin_count"),
}


def run_one(method: str, n: int, threads: int) -> None:
    """Measure one method in this process and print the result as JSON."""
    import torch

    torch.set_num_threads(threads)
    x, labels = data(n)
    small, few = x[:4000], np.arange(4000) // 4
    # Warm up: loading libraries and compiled loops is not measured.
    for _ in range(2):
        RUN[method](small.copy(), few)
    start_memory = reset_peak()
    start = time.perf_counter()
    values = RUN[method](x, labels)
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "bytes": peak() - start_memory, "values": values}))


def reset_peak() -> int:
    """Reset the peak memory of the process and return the current one (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    line = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def measure(method: str, n: int, threads: int, repeat: int) -> dict[str, object]:
    command = [sys.executable, __file__, "--one", method, "--sizes", str(n), "--threads", str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(Path(__file__).parents[1])}
    best: dict[str, object] = {}
    for _ in range(repeat):
        process = subprocess.run(command, env=environment, capture_output=True, text=True)
        if process.returncode:
            reason = (process.stderr.strip().splitlines() or [f"killed by signal {-process.returncode}"])[-1]
            return {"failed": reason}
        got = json.loads(process.stdout.splitlines()[-1])
        if not best or got["seconds"] < best["seconds"]:
            best = got
    return best


def table(sizes: list[int], threads: int, repeat: int, peers_up_to: int) -> None:
    print(f"{threads} threads, best of {repeat}\n", flush=True)
    print("| items x dimensions, classes | method | seconds | x product | x ours | extra MB | R@1 | MAP@R | nDCG@100 |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    for n in sizes:
        dim, classes = SIZES[n]
        seconds: dict[str, float] = {}
        for method in METHODS:
            label = f"{n:,} x {dim}, {classes:,}"
            if n > peers_up_to and method not in ("product", "default", "ours"):
                print(f"| {label} | {method} | not run | | | | | | |", flush=True)
                continue
            got = measure(method, n, threads, repeat)
            if "failed" in got:
                print(f"| {label} | {method} | failed: {got['failed']} | | | | | | |", flush=True)
                continue
            s = seconds[method] = got["seconds"]
            shown = [
                f"{100 * got['values'][v]:.2f}" if v in got["values"] else "" for v in ("R@1", "MAP@R", "nDCG@100")
            ]
            of_product = f"{s / seconds['product']:.2f}" if "product" in seconds else ""
            of_ours = f"{s / seconds['ours']:.1f}" if "ours" in seconds else ""
            cells = [label, method, f"{s:.2f}", of_product, of_ours, f"{got['bytes'] / 1e6:,.0f}", *shown]
            print("| " + " | ".join(cells) + " |", flush=True)


# Name: (dimensions, items per class, form of the vectors); each is compared with the case at the head of its group.
CASES = {
    "512 dimensions, 60 per class": (512, 60, "plain"),
    "200 per class": (512, 200, "plain"),
    "1000 per class": (512, 1000, "plain"),
    "10,000 equal vectors, 60 per class": (512, 60, "equal"),
    "10,000 equal vectors, 1000 per class": (512, 1000, "equal"),
    "64 dimensions, 60 per class": (64, 60, "plain"),
    "codes of -1 and 1": (64, 60, "signs"),
    "codes of 0 and 1": (64, 60, "bits"),
}


def case(dim: int, per_class: int, form: str) -> tuple[np.ndarray, np.ndarray]:
    """12,000 vectors, as in `data`."""
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.arange(12000) // per_class)
    x = rng.standard_normal((labels.max() + 1, dim), dtype=np.float32)[labels]
    x += np.float32(3.2 if dim == 512 else 1.5) * rng.standard_normal(x.shape, dtype=np.float32)
    if form == "equal":
        x[:10000] = x[0]
    elif form != "plain":
        x = np.sign(x) if form == "signs" else (x > 0).astype(np.float32)
    return x, labels


def seconds_of(function: Callable[[], object], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def cases(threads: int, repeat: int) -> None:
    """Time 12,000 vectors with ties or large classes, and both products of the torch backend."""
    import torch

    import nearkin as nk
    from nearkin.metrics import _count_torch

    torch.set_num_threads(threads)
    print(f"12,000 items, {threads} threads, best of {repeat}\n\n| case | seconds | x untied |\n|---|---:|---:|")
    first = 0.0
    for name, settings in CASES.items():
        x, labels = case(*settings)
        ours(x[:4000], labels[:4000])
        s = seconds_of(lambda x=x, labels=labels: ours(x, labels), repeat)
        first = s if "dimensions" in name else first
        print(f"| {name} | {s:.2f} | {s / first:.2f} |", flush=True)
    print("\n| torch backend, 5,924 x 512 | seconds | x its product |\n|---|---:|---:|")
    x, labels = data(5924)
    for dtype, devices in ((torch.float64, ()), (torch.float32, ("cpu",))):
        _count_torch._FLOAT32_DEVICES = devices
        t = torch.from_numpy(x).to(dtype)
        bare = seconds_of(lambda t=t: [t[a : a + 1024] @ t.T for a in range(0, len(t), 1024)], repeat)
        s = seconds_of(lambda: nk.score(x, labels, backend="torch").means(), repeat)
        print(f"| {str(dtype).removeprefix('torch.')} | {s:.2f} | {s / bare:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="5,924 and 12,000 items only")
    parser.add_argument("--sizes", help=f"comma-separated, of {', '.join(map(str, SIZES))}")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--peers-up-to", type=int, default=100_000, help="largest size for the other libraries")
    parser.add_argument("--cases", action="store_true", help="ties and large classes instead of the table")
    parser.add_argument("--one", choices=METHODS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = (
        [int(s) for s in args.sizes.split(",")]
        if args.sizes
        else [5924, 12000]
        if args.quick
        else [5924, 60502, 200000]
    )
    if unknown := [n for n in sizes if n not in SIZES]:
        parser.error(f"--sizes: {unknown} not among {list(SIZES)}")
    if args.one:
        run_one(args.one, sizes[0], args.threads)
    elif args.cases:
        cases(args.threads, args.repeat)
    else:
        table(sizes, args.threads, args.repeat, args.peers_up_to)


if __name__ == "__main__":
    main()
