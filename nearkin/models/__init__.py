"""Embedding models: backbone, pooling and head; pretrained weights; cached features of a frozen backbone."""

from typing import TYPE_CHECKING

from nearkin._common.lazy import lazy_exports

if TYPE_CHECKING:
    from nearkin.models.backbones import BACKBONES
    from nearkin.models.bn_inception import BNInception
    from nearkin.models.embedder import Embedder, load
    from nearkin.models.frozen import FrozenFeatures
    from nearkin.models.heads import POOLINGS

__all__ = ["BACKBONES", "POOLINGS", "BNInception", "Embedder", "FrozenFeatures", "load"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "backbones": ("BACKBONES",),
        "bn_inception": ("BNInception",),
        "embedder": ("Embedder", "load"),
        "frozen": ("FrozenFeatures",),
        "heads": ("POOLINGS",),
    },
)
