"""WeightedSum: several objectives on one batch."""

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from nearkin.errors import ConfigError
from nearkin.losses.classes import Classifier
from nearkin.losses.objective import Objective


class WeightedSum(nn.Module):
    """A weighted sum of several objectives on one batch.

    Args:
        *parts: (weight, objective) of each.
    """

    def __init__(self, *parts: tuple[float, Objective]) -> None:
        super().__init__()
        if not parts:
            raise ConfigError("WeightedSum: pass at least one (weight, objective).")
        self.weights = [float(weight) for weight, _ in parts]
        self.parts = nn.ModuleList(objective for _, objective in parts)
        if len({part.reduction == "none" for part in self._objectives}) > 1:
            raise ConfigError("WeightedSum: use reduction='none' for all parts, or for none of them.")

    @property
    def _objectives(self) -> list[Objective]:
        return [cast(Objective, part) for part in self.parts]

    def forward(self, emb: Tensor, labels: Any = None, *constants: Tensor, **options: Any) -> Tensor:
        """Compute the weighted sum of the losses of a batch. The arguments are those of an `Objective`."""
        parts = zip(self.weights, self.parts, strict=True)
        return torch.stack([weight * part(emb, labels, *constants, **options) for weight, part in parts]).sum(0)

    def _with_classes(self) -> Objective:
        """Return the first part that learns vectors of classes."""
        for part in self._objectives:
            if part.class_vectors is not None:
                return part
        raise ConfigError("WeightedSum: no part learns anything about classes: it has no logits.")

    def logits(self, emb: Tensor) -> Tensor:
        """Compute the `logits` of the first part that learns vectors of classes."""
        return self._with_classes().logits(emb)

    def predict(self, emb: Tensor) -> Tensor:
        """Return the most likely training class of each embedding [N]; see `logits`."""
        return self._with_classes().predict(emb)

    def classifier(self) -> Classifier:
        """Return the `classifier` of the first part that learns vectors of classes."""
        return self._with_classes().classifier()

    @property
    def refreshes_from(self) -> Literal["", "labels", "embeddings"]:
        """What `refresh` needs of the training set, for any of the parts."""
        needed = [part.refreshes_from for part in self._objectives]
        return "embeddings" if "embeddings" in needed else "labels" if "labels" in needed else ""

    def init_proxies(self, emb: Tensor, labels: Tensor) -> None:
        """Set the proxies of every part to the means of their classes."""
        for part in self._objectives:
            part.init_proxies(emb, labels)

    def refresh(self, labels: Tensor | Sequence[int], emb: Tensor | None = None) -> None:
        """Recompute the state of every part that describes the whole training set."""
        for part in self._objectives:
            part.refresh(labels, emb)

    def param_groups(self, lr: float) -> list[dict[str, Any]]:
        """Return the optimizer groups of every part, their names prefixed with its index."""
        return [
            {**group, "name": f"{i}.{group['name']}"}
            for i, part in enumerate(self._objectives)
            for group in part.param_groups(lr)
        ]


AnyObjective = Objective | WeightedSum
