"""Modules around a loss: a memory of earlier batches, a weighted sum, two views without labels."""

from collections.abc import Mapping
from dataclasses import field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from nearkin.compat.pml._module import SettingsModule, is_ours
from nearkin.compat.pml._tuples import PairList, as_pairs, as_triplets
from nearkin.errors import ConfigError

_WITH_REFS = (
    "AngularLoss", "CircleLoss", "ContrastiveLoss", "GeneralizedLiftedStructureLoss", "IntraPairVarianceLoss",
    "LiftedStructureLoss", "MultiSimilarityLoss", "NCALoss", "NTXentLoss", "SignalToNoiseRatioContrastiveLoss",
    "SupConLoss", "TripletMarginLoss", "TupletMarginLoss",
)  # fmt: skip


class BaseLossWrapper(SettingsModule):
    """A module around one of the losses that it supports."""

    loss: nn.Module

    supported: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_loss_support(type(self.loss).__name__)

    @classmethod
    def supported_losses(cls) -> list[str]:
        return list(cls.supported)

    @classmethod
    def check_loss_support(cls, loss_name: str) -> None:
        if loss_name not in cls.supported_losses():
            raise ConfigError(f"{cls.__name__} does not support {loss_name}. Supported: {cls.supported_losses()}")


class CrossBatchMemory(BaseLossWrapper, supported=(*_WITH_REFS, "MarginLoss")):
    """A loss between each batch and the last embeddings, those of the batch included."""

    embedding_size: int
    memory_size: int = 1024
    miner: nn.Module | None = None
    embedding_memory: Tensor = field(init=False)
    label_memory: Tensor = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reset_queue()

    def reset_queue(self) -> None:
        """Empty the memory."""
        self.register_buffer("embedding_memory", torch.zeros(self.memory_size, self.embedding_size))
        self.register_buffer("label_memory", torch.zeros(self.memory_size, dtype=torch.int64))
        self.has_been_filled, self.queue_idx = False, 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"has_been_filled": self.has_been_filled, "queue_idx": self.queue_idx}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.has_been_filled, self.queue_idx = state["has_been_filled"], state["queue_idx"]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # A state of pytorch-metric-learning does not have it: the memory counts as empty, as there.
        state_dict.setdefault(f"{prefix}_extra_state", {"has_been_filled": False, "queue_idx": 0})
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: Any = None, enqueue_mask: Tensor | None = None
    ) -> Any:
        if indices_tuple is not None and enqueue_mask is not None:
            raise ValueError("indices_tuple and enqueue_mask are mutually exclusive")
        labels, own = labels.to(embeddings.device), None
        self.embedding_memory, self.label_memory = self.embedding_memory.to(embeddings), self.label_memory.to(labels)
        if enqueue_mask is None:
            own = self._enqueue(embeddings, labels)
        else:
            self._enqueue(embeddings[enqueue_mask], labels[enqueue_mask])
            embeddings, labels = embeddings[~enqueue_mask], labels[~enqueue_mask]
        filled = self.memory_size if self.has_been_filled else self.queue_idx
        # A copy: the memory changes before the backward pass if the loss is called twice.
        refs = self.embedding_memory[:filled].clone(), self.label_memory[:filled].clone()
        mined: Any
        if self.miner is not None:
            mined = self.miner(embeddings, labels, *refs)
            mined = mined if own is None else without_self(mined, own)
        else:  # all pairs with the memory, without those of a sample and its own copy
            same = labels[:, None] == refs[1]
            pos = same if own is None else same.scatter(1, own[:, None], False)
            mined = PairList(same.shape, pos), PairList(same.shape, ~same)
            if indices_tuple is not None or not is_ours(type(self.loss)):
                mined = (*mined[0], *mined[1])
        if indices_tuple is not None:
            given = as_triplets(indices_tuple) if len(mined) == 3 else as_pairs(indices_tuple)
            mined = tuple(torch.cat([x, y.to(x.device)]) for x, y in zip(mined, given, strict=True))
        return self.loss(embeddings, labels, mined, *refs)

    def _enqueue(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Store a batch over the oldest embeddings. Returns its rows in the memory."""
        n = len(embeddings)
        if n > self.memory_size:
            raise ConfigError(f"CrossBatchMemory: a batch of {n} exceeds memory_size={self.memory_size}.")
        rows = torch.arange(self.queue_idx, self.queue_idx + n, device=labels.device) % self.memory_size
        self.embedding_memory[rows] = embeddings.detach()
        self.label_memory[rows] = labels
        self.has_been_filled = self.has_been_filled or self.queue_idx + n >= self.memory_size
        self.queue_idx = (self.queue_idx + n) % self.memory_size
        return rows


def without_self(indices: tuple[Tensor, ...], own: Tensor | None = None) -> tuple[Tensor, ...]:
    """Remove pairs, or triplets, whose positive is the anchor; `own` [N] has the rows of the anchors as references."""
    kept = indices[1] != (indices[0] if own is None else own[indices[0]])
    n = 3 if len(indices) == 3 else 2
    return (*(x[kept] for x in indices[:n]), *indices[n:])


class MultipleLosses(SettingsModule):
    """A weighted sum of losses, each with an optional miner."""

    losses: Any
    miners: Any = None
    weights: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        parts, miners, weights = (
            dict(x) if isinstance(x, Mapping) else {str(i): value for i, value in enumerate(x or ())}
            for x in (self.losses, self.miners, self.weights)
        )
        if set(miners) - set(parts) or (weights and set(weights) != set(parts)):
            raise ConfigError(f"MultipleLosses: miners and weights must belong to the losses {', '.join(parts)}.")
        self.losses = nn.ModuleDict(parts) if isinstance(self.losses, Mapping) else nn.ModuleList(parts.values())
        self.miners = nn.ModuleDict({name: miner for name, miner in miners.items() if miner is not None})
        self.weights = weights or dict.fromkeys(parts, 1)

    def forward(self, embeddings: Tensor, labels: Tensor, indices_tuple: Any = None) -> Any:
        if len(self.miners) and indices_tuple is not None:
            raise ConfigError("MultipleLosses: indices_tuple and miners are mutually exclusive.")
        total: Any = 0
        for name, loss in self.losses.named_children():
            indices = self.miners[name](embeddings, labels) if name in self.miners else indices_tuple
            total = total + loss(embeddings, labels, indices) * self.weights[name]
        return total


class SelfSupervisedLoss(BaseLossWrapper, supported=_WITH_REFS):
    """A loss of two views: row i of both is a class of its own."""

    symmetric: bool = True

    def forward(self, embeddings: Tensor, ref_emb: Tensor) -> Any:
        labels = torch.arange(len(embeddings), device=embeddings.device)
        if self.symmetric:
            return self.loss(torch.cat([embeddings, ref_emb]), labels.repeat(2))
        return self.loss(embeddings, labels, ref_emb=ref_emb, ref_labels=labels.clone())
