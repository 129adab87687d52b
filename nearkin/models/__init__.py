"""Embedding models: backbone, pooling and head; pretrained weights; cached features of a frozen backbone."""

from nearkin._common.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
