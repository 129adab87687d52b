"""Datasets, class-disjoint splits, samplers, transforms, the image cache and data validation."""

from nearkin._common.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
