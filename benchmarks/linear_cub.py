"""Linear and kernel metrics on frozen features, judged on classes never seen.

    python benchmarks/linear_cub.py FEATURES.npz [--markdown FILE]

The file holds `features` [N, F] and `labels` 0, 1, ...; the first half of the classes is for learning, the second half
is the test. Every setting is chosen inside the first half: fit on one half of it, judge on the other, and the reverse
(halves in label order, since neighbouring labels are alike in CUB and the test is split in the same way). What is
chosen by is the mean of MAP@R, which moves less from chance than R@1. Then each method is fitted once more on the
whole first half with the settings chosen, and the test classes are looked at once.

Similarities are cosines. Metrics are learned after whitening to 512 dimensions, in the same pipeline.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.pipeline import Pipeline, make_pipeline

from nearkin.linear import KernelMetricLearner, Mahalanobis, MetricLearner, WithinClassWhitening
from nearkin.metrics import Scores, compare, score

DIM = 512


def candidates() -> dict[str, dict[str, Any]]:
    """Method -> {settings in words: estimator}."""
    white = {f"shrinkage {s:g}": WithinClassWhitening(DIM, s) for s in (0.1, 0.3, 1.0, 3.0, 10.0)}
    return {
        "raw": {"": make_pipeline("passthrough")},
        "covariance whitening": {f"shrinkage {s:g}": Mahalanobis(DIM, s) for s in (0.1, 1.0, 10.0)},
        "within-class whitening": white,
    }


if __name__ == "__main__":
    pass
