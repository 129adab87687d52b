"""Fair comparisons: studies under one protocol, tuning with equal budgets, tournaments and their statistics."""

from nearkin._common.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
