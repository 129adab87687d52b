"""Losses and miners over the batches of all processes."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from nearkin.compat.pml._loss_base import BaseMetricLossFunction
from nearkin.compat.pml._module import SettingsModule
from nearkin.compat.pml._tuples import match_masks
from nearkin.compat.pml._wrappers import CrossBatchMemory, without_self
from nearkin.compat.pml.miners import BaseMiner
from nearkin.errors import ConfigError


def is_distributed() -> bool:
    """Return whether torch.distributed is initialised."""
    return dist.is_available() and dist.is_initialized()


def _gather(x: Tensor | None) -> Any:
    """Return the own rows, with their gradient, and after them those of the other processes, without."""
    if x is None:
        return None
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    own = dist.get_rank()
    return torch.cat([x, *parts[:own], *parts[own + 1 :]])


class DistributedLossWrapper(SettingsModule):
    """A loss over the batches of all processes, for DistributedDataParallel."""

    loss: nn.Module
    efficient: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.loss, BaseMetricLossFunction | CrossBatchMemory):
            raise TypeError("The input loss must extend BaseMetricLossFunction or CrossBatchMemory")
        if isinstance(self.loss, CrossBatchMemory) and self.efficient:
            raise ConfigError("DistributedLossWrapper: efficient=True does not support CrossBatchMemory.")

    def forward(
        self, embeddings: Tensor, labels: Any = None, indices_tuple: Any = None, ref_emb: Any = None,
        ref_labels: Any = None, enqueue_mask: Any = None,
    ) -> Any:  # fmt: skip
        is_memory = isinstance(self.loss, CrossBatchMemory)
        if is_memory and (ref_emb is not None or ref_labels is not None):
            raise ValueError("CrossBatchMemory is not compatible with ref_emb and ref_labels")
        if not is_distributed():
            warnings.warn("DistributedLossWrapper: torch.distributed is not initialised.", stacklevel=2)
        size = dist.get_world_size() if is_distributed() else 1
        labels = None if labels is None else labels.to(embeddings.device)
        if size > 1:
            own, own_labels = embeddings, labels
            embeddings, labels, ref_emb, ref_labels = map(_gather, (embeddings, labels, ref_emb, ref_labels))
            enqueue_mask = _gather(enqueue_mask)
            if self.efficient:
                ref_emb = embeddings if ref_emb is None else ref_emb
                ref_labels = labels if ref_labels is None else ref_labels
                if indices_tuple is None and own_labels is not None and ref_labels is not None:
                    masks = match_masks(own_labels, ref_labels)
                    indices_tuple = without_self(tuple(x for m in masks for x in m.nonzero(as_tuple=True)))
                embeddings, labels = own, own_labels
        others = {"enqueue_mask": enqueue_mask} if is_memory else {"ref_emb": ref_emb, "ref_labels": ref_labels}
        return self.loss(embeddings, labels, indices_tuple, **others) * size


class DistributedMinerWrapper(SettingsModule):
    """A miner over the batches of all processes."""

    miner: nn.Module
    efficient: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.miner, BaseMiner):
            raise TypeError("The input miner must extend BaseMiner")

    def forward(
        self, emb: Tensor, labels: Tensor, ref_emb: Tensor | None = None, ref_labels: Tensor | None = None
    ) -> Any:
        if not is_distributed() or dist.get_world_size() <= 1:
            return self.miner(emb, labels, ref_emb, ref_labels)
        labels = labels.to(emb.device)
        all_emb, all_labels, all_ref, all_ref_labels = map(_gather, (emb, labels, ref_emb, ref_labels))
        if not self.efficient:
            return self.miner(all_emb, all_labels, all_ref, all_ref_labels)
        refs = (all_emb, all_labels) if all_ref is None else (all_ref, all_ref_labels)
        return without_self(self.miner(emb, labels, *refs))
