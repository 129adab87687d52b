"""Linear and kernel metrics on the features of a frozen network, judged on classes never seen.

    python benchmarks/linear_cub.py FEATURES.npz [--quick] [--markdown FILE]

The file holds `features` [N, F] and `labels` 0, 1, ...; the first half of the classes is for learning, the second half
is the test. The settings of each method are chosen inside the first half: fitted on 70 % of its classes, judged by R@1
on the rest. Then each method is fitted once more on the whole first half with the settings chosen, and the test classes
are looked at once. The same protocol as benchmarks/fast_lane.py, whose trained heads are the ones to compare with.
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
    """Method -> {settings in words: estimator}."""
    learned = {
        f"{name}, {steps} steps, shrinkage {shrinkage:g}": MetricLearner(
            objective, draw="triplets", dim=dim, shrinkage=shrinkage, max_iter=steps, batch_size=size, rate=0.05
        )
        for name, objective, size in (("triplets", "hinge", 512), ("nca", "nca", 256), ("lmnn", "lmnn", 128))
        for steps in (20, 80)
        for shrinkage in (0.3, 1.0)
    }
    bent = {
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
        "kernel metric": bent,
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
    seen, new = y < half, y >= half
    fit, judge = y < int(0.7 * half), (y >= int(0.7 * half)) & seen
    lines = [
        "| method | settings | val R@1 | test R@1 | 95 % interval | gain over raw | over whitening | MAP@R | fit |",
        "|---|---|---:|---:|---|---|---|---:|---:|",
    ]
    chosen: dict[str, tuple[str, float, Any]] = {}
    for method, choices in candidates(args.dim).items():
        for words, estimator in list(choices.items())[: 1 if args.quick else None]:
            value = recall(clone(estimator), x, y, fit, judge)["R@1"]
            print(f"{method}: {words}  val {100 * value:.2f}", file=sys.stderr, flush=True)
            if method not in chosen or value > chosen[method][1]:
                chosen[method] = words, value, estimator
    # Nothing is chosen from here on: the test classes.
    found: dict[str, Scores] = {}
    for method, (words, value, estimator) in chosen.items():
        began = time.perf_counter()
        metric = clone(estimator).fit(x[seen], y[seen])
        seconds = time.perf_counter() - began
        found[method] = scores = score(metric.transform(x[new]), y[new], verbose=False)
        low, high = scores.interval("R@1")
        cells = [method, words, f"{100 * value:.2f}", f"{100 * scores['R@1']:.2f}"]
        cells += [f"{100 * low:.1f} to {100 * high:.1f}", gain(found, "raw", method)]
        cells += [gain(found, "within-class whitening", method), f"{100 * scores['MAP@R']:.2f}", f"{seconds:.1f} s"]
        lines.append("| " + " | ".join(cells) + " |")
        print(lines[-1], file=sys.stderr, flush=True)
    text = "\n".join([*lines, ""])
    print(text)
    if args.markdown:
        args.markdown.write_text(text, encoding="utf-8")


def recall(estimator: Any, x: Any, y: Any, fit: Any, judge: Any) -> Scores:
    return score(estimator.fit(x[fit], y[fit]).transform(x[judge]), y[judge], ks=(1,), verbose=False)


def gain(found: dict[str, Scores], base: str, method: str) -> str:
    """The paired interval over classes."""
    if base not in found or base == method:
        return ""
    between = compare(found[base], found[method], "R@1")
    return f"{100 * between.low:+.1f} to {100 * between.high:+.1f}"


if __name__ == "__main__":
    main()
