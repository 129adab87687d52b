"""Exact, tie-aware retrieval and clustering metrics: rank once, compute many, keep the value of every query."""

from nearkin._common.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
