"""Small studies on synthetic features that train in a second."""

from pathlib import Path

import numpy as np

from nearkin.bench.protocols import Protocol
from nearkin.bench.study import Dataset, Study


def write_features(path: Path, *, classes: int = 24, samples_per_class: int = 8, dim: int = 12, seed: int = 0) -> Path:
    """Write noisy classes around random centres."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((classes, dim))
    labels = np.repeat(np.arange(classes), samples_per_class)
    features = centres[labels] + 0.9 * rng.standard_normal((len(labels), dim))
    np.savez(path, features=features.astype(np.float32), labels=labels)
    return path


def small_study(features: Path, **changed) -> Study:
    """Return a study of two losses at two sizes on precomputed features."""
    settings = {
        "name": "small",
        "base": "features_default",
        "losses": ("norm_softmax", "triplet"),
        "datasets": (Dataset("clouds", "features", features),),
        "sizes": (4, 8),
        "seeds": (0, 1),
        "protocol": Protocol("fixed"),
        "val_fractions": (0.25,),
        "keep_models": False,
        "change": {"data": {"split": "half"}, "train": {"epochs": 2, "batch_size": 32}},
    }
    return Study(**{**settings, **changed})
