"""Tensor operations: pairs, masked reductions, geometry, whitening."""

from nearkin.ops.checks import plain
from nearkin.ops.pairs import Pairs, one_pair_per_class, pair_up, select_pairs
from nearkin.ops.reductions import log1p_sum_exp, log_sum_exp, softplus
from nearkin.ops.whitening import covariance_whitening, within_class_whitening

# fmt: off
__all__ = [
    "Pairs", "covariance_whitening", "log1p_sum_exp", "log_sum_exp", "one_pair_per_class", "pair_up", "plain",
    "select_pairs", "softplus", "within_class_whitening",
]
