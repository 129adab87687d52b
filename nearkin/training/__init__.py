"""Recipes, the training loop, checkpoints, run folders, several processes and the final evaluation."""

from nearkin._common.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
