"""Datasets, class-disjoint splits, samplers, transforms, the image cache and data validation."""

from typing import TYPE_CHECKING

from nearkin._common.lazy import lazy_exports

if TYPE_CHECKING:
    from nearkin.data.benchmarks import BENCHMARKS
    from nearkin.data.check import check_target
    from nearkin.data.samplers import BalancedSampler, RandomSampler, make_sampler
    from nearkin.data.sources import load, load_features
    from nearkin.data.splits import Holdout, Split, make_split
    from nearkin.data.table import Table
    from nearkin.data.transforms import AUGMENTS

__all__ = [
    "AUGMENTS",
    "BENCHMARKS",
    "BalancedSampler",
    "Holdout",
    "RandomSampler",
    "Split",
    "Table",
    "check_target",
    "load",
    "load_features",
    "make_sampler",
    "make_split",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "benchmarks": ("BENCHMARKS",),
        "check": ("check_target",),
        "samplers": ("BalancedSampler", "RandomSampler", "make_sampler"),
        "sources": ("load", "load_features"),
        "splits": ("Holdout", "Split", "make_split"),
        "table": ("Table",),
        "transforms": ("AUGMENTS",),
    },
)
