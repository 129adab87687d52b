"""Modules around a loss: a memory of earlier batches, a weighted sum, two views without labels."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nearkin.compat.pml._module import is_ours
from nearkin.compat.pml._tuples import PairList, as_pairs, as_triplets
from nearkin.errors import ConfigError

_WITH_REFS = (
    "AngularLoss", "CircleLoss", "ContrastiveLoss", "GeneralizedLiftedStructureLoss", "IntraPairVarianceLoss",
    "LiftedStructureLoss", "MultiSimilarityLoss", "NCALoss", "NTXentLoss", "SignalToNoiseRatioContrastiveLoss",
    "SupConLoss", "TripletMarginLoss", "TupletMarginLoss",
)  # fmt: skip


class BaseLossWrapper(nn.Module):
    """A module around one of the losses that it supports."""

    def __init__(self, loss: nn.Module, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.check_loss_support(type(loss).__name__)
        self.loss = loss

    @staticmethod
    def supported_losses() -> list[str]:
        raise NotImplementedError

    @classmethod
    def check_loss_support(cls, loss_name: str) -> None:
        if loss_name not in cls.supported_losses():
            raise ConfigError(f"{cls.__name__} does not support {loss_name}. Supported: {cls.supported_losses()}")


class CrossBatchMemory(BaseLossWrapper):
    """A loss between each batch and the last embeddings, those of the batch included."""

    embedding_memory: Tensor
    label_memory: Tensor

    def __init__(
        self, loss: nn.Module, embedding_size: int, memory_size: int = 1024, miner: nn.Module | None = None
    ) -> None:
        super().__init__(loss=loss)
        self.embedding_size, self.memory_size, self.miner = embedding_size, memory_size, miner
        self.reset_queue()

    @staticmethod
    def supported_losses() -> list[str]:
        return [*_WITH_REFS, "MarginLoss"]

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
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: Sequence[Tensor] | None = None,
        enqueue_mask: Tensor | None = None,
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
        if self.miner is None:
            mined = self._all_pairs(labels, refs[1], own)
        else:
            mined = self.miner(embeddings, labels, *refs)
            mined = mined if own is None else without_self(mined, own)
        if indices_tuple is not None:
            given = as_triplets(indices_tuple) if len(mined) == 3 else as_pairs(indices_tuple)
            mined = [*mined[0], *mined[1]] if isinstance(mined[0], PairList) else mined
            mined = tuple(torch.cat([x, y.to(x.device)]) for x, y in zip(mined, given, strict=True))
        elif isinstance(mined[0], PairList) and not is_ours(type(self.loss)):
            mined = (*mined[0], *mined[1])
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

    def _all_pairs(self, labels: Tensor, memory_labels: Tensor, own: Tensor | None) -> tuple[PairList, PairList]:
        """Return all pairs with the memory, without those of a sample and its own copy."""
        same = labels[:, None] == memory_labels
        pos = same if own is None else same.scatter(1, own[:, None], False)
        shape = len(labels), len(memory_labels)
        return PairList(shape, pos), PairList(shape, ~same)


def without_self(indices: tuple[Tensor, ...], own: Tensor | None = None) -> tuple[Tensor, ...]:
    """Remove pairs, or triplets, whose positive is the anchor; `own` [N] has the rows of the anchors as references."""
    kept = indices[1] != (indices[0] if own is None else own[indices[0]])
    n = 3 if len(indices) == 3 else 2
    return (*(x[kept] for x in indices[:n]), *indices[n:])


class MultipleLosses(nn.Module):
    """A weighted sum of losses, each with an optional miner."""

    def __init__(
        self,
        losses: Sequence[nn.Module] | Mapping[str, nn.Module],
        miners: Sequence[nn.Module | None] | Mapping[str, nn.Module] | None = None,
        weights: Sequence[float] | Mapping[str, float] | None = None,
    ) -> None:
        super().__init__()
        parts, chosen, factors = (_as_dict(x) for x in (losses, miners, weights))
        if set(chosen) - set(parts) or (factors and set(factors) != set(parts)):
            raise ConfigError(f"MultipleLosses: miners and weights must belong to the losses {', '.join(parts)}.")
        self.losses = nn.ModuleDict(parts) if isinstance(losses, Mapping) else nn.ModuleList(parts.values())
        self.miners = nn.ModuleDict({name: miner for name, miner in chosen.items() if miner is not None})
        self.weights = factors or dict.fromkeys(parts, 1)

    def forward(self, embeddings: Tensor, labels: Tensor, indices_tuple: Any = None) -> Any:
        if len(self.miners) and indices_tuple is not None:
            raise ConfigError("MultipleLosses: indices_tuple and miners are mutually exclusive.")
        total: Any = 0
        for name, loss in self.losses.named_children():
            indices = self.miners[name](embeddings, labels) if name in self.miners else indices_tuple
            total = total + loss(embeddings, labels, indices) * self.weights[name]
        return total


def _as_dict(x: Sequence[Any] | Mapping[str, Any] | None) -> dict[str, Any]:
    return dict(x) if isinstance(x, Mapping) else {str(i): value for i, value in enumerate(x or ())}


class SelfSupervisedLoss(BaseLossWrapper):
    """A loss of two views: row i of both is a class of its own."""

    def __init__(self, loss: nn.Module, symmetric: bool = True, **kwargs: Any) -> None:
        super().__init__(loss=loss, **kwargs)
        self.symmetric = symmetric

    @staticmethod
    def supported_losses() -> list[str]:
        return [*_WITH_REFS]

    def forward(self, embeddings: Tensor, ref_emb: Tensor) -> Any:
        labels = torch.arange(len(embeddings), device=embeddings.device)
        if self.symmetric:
            return self.loss(torch.cat([embeddings, ref_emb]), labels.repeat(2))
        return self.loss(embeddings, labels, ref_emb=ref_emb, ref_labels=labels.clone())
