"""Linear and kernel metrics on the features of a frozen network, evaluated on unseen classes.

    python benchmarks/linear_cub.py FEATURES.npz [--quick] [--markdown FILE]

The file contains `features` [N, F] and `labels` 0, 1, ...; the first half of the classes is for training, the second
half for testing. The settings of each method are chosen within the first half: fitted on 70 % of its classes, validated
by R@1 on the rest. Each method is then refitted on the whole first half with the chosen settings and evaluated on the
test classes once. This is the protocol of benchmarks/fast_lane.py, whose trained heads are comparable.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, Normalizer

from nearkin.linear import KernelMetricLearner, Mahalanobis, MetricLearner, WithinClassWhitening
from nearkin.metrics.scores import Scores, compare, score


def candidates(dim: int) -> dict[str, dict[str, Any]]:
    """Method -> {description of the settings: estimator}."""
    learned = {
        f"{name}, {steps} steps, shrinkage {shrinkage:g}": MetricLearner(
            objective, draw="triplets", dim=dim, shrinkage=shrinkage, max_iter=steps, batch_size=size, rate=0.05
        )
        for name, objective, size in (("triplets", "hinge", 512), ("nca", "nca", 256), ("lmnn", "lmnn", 128))
        for steps in (20, 80)
        for shrinkage in (0.3, 1.0)
    }
    kernels = {
        f"Gaussian, sigma {sigma:g}, shrinkage {shrinkage:g}": make_pipeline(
            WithinClassWhitening(dim, 1.0),
            Normalizer(),
            KernelMetricLearner(sigma=sigma, landmarks=1000, metric=WithinClassWhitening(shrinkage=shrinkage)),
        )
        for sigma in (1.0, 2.0, 4.0)
        for shrinkage in (0.3, 1.0)
    }
    return {
        "raw": {"": FunctionTransformer()},
        "covariance whitening": {f"shrinkage {s:g}": Mahalanobis(dim, s) for s in (0.3, 1.0, 3.0)},
        "within-class whitening": {f"shrinkage {s:g}": WithinClassWhitening(dim, s) for s in (0.3, 1.0, 3.0)},
        "linear metric": learned,
        "kernel metric": kernels,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features", type=Path)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--quick", action="store_true", help="one candidate per method")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    with np.load(args.features) as file:
        x, y = file["features"].astype(np.float32), file["labels"]
    half = (y.max() + 1) // 2
    train, test = y < half, y >= half
    fit, validation = y < int(0.7 * half), (y >= int(0.7 * half)) & train
    lines = [
        "| method | settings | val R@1 | test R@1 | 95 % interval | gain over raw | over whitening | MAP@R | fit |",
        "|---|---|---:|---:|---|---|---|---:|---:|",
    ]
    chosen: dict[str, tuple[str, float, Any]] = {}
    for method, choices in candidates(args.dim).items():
        for settings, estimator in list(choices.items())[: 1 if args.quick else None]:
            value = recall(clone(estimator), x, y, fit, validation)["R@1"]
            print(f"{method}: {settings}  val {100 * value:.2f}", file=sys.stderr, flush=True)
            if method not in chosen or value > chosen[method][1]:
                chosen[method] = settings, value, estimator
    # From here on the test classes are used and nothing is chosen.
    results: dict[str, Scores] = {}
    for method, (settings, value, estimator) in chosen.items():
        start = time.perf_counter()
        metric = clone(estimator).fit(x[train], y[train])
        seconds = time.perf_counter() - start
        results[method] = scores = score(metric.transform(x[test]), y[test], verbose=False)
        low, high = scores.interval("R@1")
        cells = [method, settings, f"{100 * value:.2f}", f"{100 * scores['R@1']:.2f}"]
        cells += [f"{100 * low:.1f} to {100 * high:.1f}", gain(results, "raw", method)]
        cells += [gain(results, "within-class whitening", method), f"{100 * scores['MAP@R']:.2f}", f"{seconds:.1f} s"]
        lines.append("| " + " | ".join(cells) + " |")
        print(lines[-1], file=sys.stderr, flush=True)
    text = "\n".join([*lines, ""])
    print(text)
    if args.markdown:
        args.markdown.write_text(text, encoding="utf-8")


def recall(estimator: Any, x: Any, y: Any, fit: Any, validation: Any) -> Scores:
    return score(estimator.fit(x[fit], y[fit]).transform(x[validation]), y[validation], ks=(1,), verbose=False)


def gain(results: dict[str, Scores], baseline: str, method: str) -> str:
    """The paired interval of the difference in R@1."""
    if baseline not in results or baseline == method:
        return ""
    difference = compare(results[baseline], results[method], "R@1")
    return f"{100 * difference.low:+.1f} to {100 * difference.high:+.1f}"


if __name__ == "__main__":
    main()
