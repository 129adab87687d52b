"""Classical metric learning on features: whitening, linear and kernel metrics, scikit-learn style.

    from nearkin import linear

    metric = linear.WithinClassWhitening(dim=512).fit(features, labels)
    embeddings = metric.transform(features)

The estimators need scikit-learn (`pip install 'nearkin[bench]'`); nearkin.linear.whitening does not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nearkin.linear.constraints import Constraints, draw_constraints
    from nearkin.linear.estimators import Mahalanobis, WithinClassWhitening
    from nearkin.linear.kernel import KernelMetricLearner, kernel_distance
    from nearkin.linear.learner import MetricLearner
    from nearkin.linear.whitening import covariance_whitening, within_class_whitening

# Public name -> its module. Loaded when first used: whitening serves networks, which do not need scikit-learn.
_HOME = {
    "Constraints": "constraints",
    "KernelMetricLearner": "kernel",
    "Mahalanobis": "estimators",
    "MetricLearner": "learner",
    "WithinClassWhitening": "estimators",
    "covariance_whitening": "whitening",
    "draw_constraints": "constraints",
    "kernel_distance": "kernel",
    "within_class_whitening": "whitening",
}

__all__ = [
    "Constraints",
    "KernelMetricLearner",
    "Mahalanobis",
    "MetricLearner",
    "WithinClassWhitening",
    "covariance_whitening",
    "draw_constraints",
    "kernel_distance",
    "within_class_whitening",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'nearkin.linear' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"nearkin.linear.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
