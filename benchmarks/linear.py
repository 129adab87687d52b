"""Linear metrics and metric-learn: nearest-neighbour accuracy and time on small data and on 60,000 x 512.

    python benchmarks/linear.py [--peer PYTHON] [--limit SECONDS] [--quick] [--only small|large] [--markdown FILE]

metric-learn needs an older scikit-learn than nearkin, so it runs in its own environment, given by --peer:

    python -m venv ml && ml/bin/pip install metric-learn 'scikit-learn<1.6'
    python benchmarks/linear.py --peer ml/bin/python

Small data: standardised, three folds (the same for all methods; repeated four times for iris and wine), accuracy of 3
nearest neighbours. Large data: class centres plus noise that is strong in some directions; every method runs in its own
process, stopped after --limit seconds (metric-learn also at 8 GB of memory). Seconds are CPU seconds of `fit` alone on
one thread, which a busy machine hardly affects.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn import datasets
from sklearn.model_selection import RepeatedStratifiedKFold
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler

from nearkin.linear import Mahalanobis, MetricLearner, WithinClassWhitening
from nearkin.metrics.scores import score

HERE = Path(__file__).parent
FOLDS = 3
REPEATS = {"iris": 4, "wine": 4, "digits": 1}  # more folds for the small data sets
SMALL = {"iris": datasets.load_iris, "wine": datasets.load_wine, "digits": datasets.load_digits}
# Estimator, and the corresponding method of metric-learn.
OURS: dict[str, tuple[Callable[[], Any], str | None]] = {
    "Mahalanobis": (lambda: Mahalanobis(shrinkage=0.01), None),
    "WithinClassWhitening": (lambda: WithinClassWhitening(shrinkage=0.1), None),
    "MetricLearner pairs": (lambda: MetricLearner(draw="pairs"), None),
    # Like MMC, this minimises the distances of similar pairs.
    "MetricLearner pairs, scatter": (lambda: MetricLearner(draw="pairs", regulariser="scatter"), "mmc"),
    "MetricLearner triplets": (lambda: MetricLearner(draw="triplets"), None),
    "MetricLearner nca": (lambda: MetricLearner("nca"), "nca"),
    "MetricLearner lmnn": (lambda: MetricLearner("lmnn"), "lmnn"),
}
LARGE: dict[str, Callable[[], Any]] = {
    "WithinClassWhitening": lambda: WithinClassWhitening(dim=64, shrinkage=0.01),
    "MetricLearner pairs": lambda: MetricLearner(draw="pairs", dim=64),
    "MetricLearner triplets": lambda: MetricLearner(draw="triplets", dim=64),
    "MetricLearner triplets, form A": lambda: MetricLearner(draw="triplets", form="A", dim=64, max_iter=100),
    "MetricLearner nca": lambda: MetricLearner("nca", dim=64),
    "MetricLearner lmnn": lambda: MetricLearner("lmnn", dim=64),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="Python interpreter with metric-learn; skipped when omitted")
    parser.add_argument("--limit", type=float, default=300, help="maximum CPU seconds per fit")
    parser.add_argument("--quick", action="store_true", help="iris and wine, and 6,000 x 64 for the large part")
    parser.add_argument("--only", choices=["small", "large"], help="run one of the two parts")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    parser.add_argument("--one", nargs=2, metavar=("NAME", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(fit_large(*args.one)))
        return
    torch.set_num_threads(1)
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
    if args.peer is None:
        print("metric-learn is skipped; see --help for how to install it.", file=sys.stderr)
    parts = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "data.npz"
        if args.only != "large":
            parts.append(small(args.peer, args.limit, ["iris", "wine"] if args.quick else list(SMALL), file))
        if args.only != "small":
            parts.append(large(args.peer, args.limit, (6_000, 64) if args.quick else (60_000, 512), file))
    text = "\n".join(parts)
    print(text)
    if args.markdown:
        args.markdown.write_text(text, encoding="utf-8")


# --- small data -------------------------------------------------------------------------------------------------------


def small(peer: str | None, limit: float, names: list[str], file: Path) -> str:
    lines = ["| data | method | accuracy % (sd over folds) | minus metric-learn (sd) | CPU s per fit |"]
    lines.append("|---|---|---:|---:|---:|")
    for name in names:
        x, y = SMALL[name](return_X_y=True)
        results: dict[str, list[tuple[float, float]] | str] = {"unchanged": []}
        folds = RepeatedStratifiedKFold(n_splits=FOLDS, n_repeats=REPEATS[name], random_state=0)
        for train, test in folds.split(x, y):
            scaler = StandardScaler().fit(x[train])
            a, b = scaler.transform(x[train]), scaler.transform(x[test])
            add(results, "unchanged", (0.0, knn_accuracy(a, y[train], b, y[test])))
            np.savez(file, x=a, y=y[train], x_test=b, y_test=y[test])
            for method, (make, other) in OURS.items():
                metric = make()
                start = time.process_time()
                metric.fit(a, y[train])
                seconds = time.process_time() - start
                add(
                    results,
                    method,
                    (seconds, knn_accuracy(metric.transform(a), y[train], metric.transform(b), y[test])),
                )
                if peer and other and not isinstance(results.get(f"metric-learn {other}"), str):
                    answer = run([peer, str(HERE / "linear_peer.py"), other, str(file)], limit)
                    add(
                        results,
                        f"metric-learn {other}",
                        answer if isinstance(answer, str) else (answer["seconds"], answer["accuracy"]),
                    )
            print(f"{name}: fold finished", file=sys.stderr)
        for method, values in results.items():
            _, other = OURS.get(method, (None, None))
            lines.append(f"| {name} | {method} | {cells(values, results.get(f'metric-learn {other}'))} |")
            print(lines[-1], file=sys.stderr)
    return "\n".join(["## Small data", "", *lines, ""])


def add(results: dict[str, Any], method: str, value: tuple[float, float] | str) -> None:
    """Add the (seconds, accuracy) of a fold; an error message replaces all folds."""
    if isinstance(value, str):
        results[method] = value
    else:
        results.setdefault(method, []).append(value)


def cells(values: list[tuple[float, float]] | str, peer: list[tuple[float, float]] | str | None) -> str:
    if isinstance(values, str):
        return f"- | | {values}"
    accuracy = [100 * v[1] for v in values]
    seconds = statistics.median(v[0] for v in values)
    difference = ""
    if isinstance(peer, list):  # paired by fold, which is more precise than comparing two means
        gaps = [100 * (a[1] - b[1]) for a, b in zip(values, peer, strict=False)]
        difference = (
            f"{statistics.mean(gaps):+.1f} ({statistics.stdev(gaps):.1f})" if len(gaps) > 1 else f"{gaps[0]:+.1f}"
        )
    return f"{statistics.mean(accuracy):.1f} ({statistics.stdev(accuracy):.1f}) | {difference} | {seconds:.2f}"


def knn_accuracy(a: Any, y: Any, b: Any, y_test: Any) -> float:
    return float(KNeighborsClassifier(3).fit(a, y).score(b, y_test))


# --- large data -------------------------------------------------------------------------------------------------------


def synthetic_data(count: int, size: int) -> tuple[Any, Any]:
    """100 classes that differ in an eighth of the directions; the noise is strongest in a quarter of the others."""
    rng = np.random.default_rng(0)
    y = np.arange(count) % 100
    spread = np.ones(size, dtype=np.float32)
    spread[size // 2 : size // 2 + size // 4] = 6.0
    x = rng.standard_normal((count, size), dtype=np.float32) * spread
    x[:, : size // 8] += 0.7 * rng.standard_normal((100, size // 8), dtype=np.float32)[y]
    rotation, _ = np.linalg.qr(rng.standard_normal((size, size)))
    return x @ rotation.astype(np.float32), y


def large(peer: str | None, limit: float, shape: tuple[int, int], file: Path) -> str:
    count, size = shape
    x, y = synthetic_data(count + 5_000, size)
    np.savez(file, x=x[:count], y=y[:count], fresh=x[count:], fresh_labels=y[count:])
    raw = score(x[count:], y[count:], similarity="euclidean", ks=(1,), verbose=False)["R@1"]
    lines = [
        "| method | CPU s | peak memory | R@1 % of 5,000 new samples |",
        "|---|---:|---:|---:|",
        f"| unchanged | - | - | {100 * raw:.1f} |",
    ]
    commands = {name: [sys.executable, __file__, "--one", name, str(file)] for name in LARGE}
    if peer:
        commands |= {
            f"metric-learn {m}": [peer, str(HERE / "linear_peer.py"), m, str(file)] for m in ("mmc", "nca", "lmnn")
        }
    for name, command in commands.items():
        answer = run(command, limit)
        if isinstance(answer, str):
            lines.append(f"| {name} | {answer} | - | - |")
        else:
            lines.append(
                f"| {name} | {answer['seconds']:.1f} | {answer['peak_mb']:,.0f} MB | {100 * answer['recall']:.1f} |"
            )
        print(lines[-1], file=sys.stderr)
    return "\n".join([f"## {count:,} x {size}, 100 classes", "", *lines, ""])


def fit_large(name: str, path: str) -> dict[str, float]:
    torch.set_num_threads(1)
    with np.load(path) as file:
        x, y, fresh, labels = (file[key] for key in ("x", "y", "fresh", "fresh_labels"))
    metric = LARGE[name]()
    start = time.process_time()
    metric.fit(x, y)
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": seconds, "peak_mb": peak, "recall": metric.score(fresh, labels)}


def run(command: list[str], limit: float) -> dict[str, float] | str:
    """Run a process and return its JSON output, or the reason of failure. The limit is in CPU seconds (ulimit)."""
    max_seconds = int(limit) + 30  # including start-up and evaluation
    command = ["sh", "-c", f'ulimit -t {max_seconds}; exec "$@"', "sh", *command]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"not finished after {limit:.0f} s, or out of memory"
    if process.returncode:
        last = process.stderr.strip().splitlines()[-1] if process.stderr.strip() else f"exit {process.returncode}"
        return f"failed: {last[:80]}"
    answer: dict[str, float] = json.loads(process.stdout.splitlines()[-1])
    return answer


if __name__ == "__main__":
    main()
