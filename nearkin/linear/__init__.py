"""Classical metric learning on features: whitening, linear and kernel metrics as scikit-learn estimators.

They need scikit-learn (`pip install 'nearkin[bench]'`); nearkin.ops.whitening does not.
"""

from nearkin.linear.constraints import Constraints, draw_constraints
from nearkin.linear.estimators import Mahalanobis, WithinClassWhitening
from nearkin.linear.kernel import KernelMetricLearner, kernel_distance
from nearkin.linear.learner import MetricLearner
from nearkin.ops.whitening import covariance_whitening, within_class_whitening

# fmt: off
__all__ = [
    "Constraints", "KernelMetricLearner", "Mahalanobis", "MetricLearner", "WithinClassWhitening",
    "covariance_whitening", "draw_constraints", "kernel_distance", "within_class_whitening",
]
