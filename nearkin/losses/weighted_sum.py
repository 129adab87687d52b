"""WeightedSum: several objectives on one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from nearkin.errors import ConfigError
from nearkin.losses.objective import Objective


class WeightedSum(nn.Module):
    """A weighted sum of several objectives on one batch.

    Args:
        *parts: (weight, objective) of each.

    Example:
        >>> both = WeightedSum((1.0, Objective("proxy_anchor", num_classes=3, dim=8)), (0.1, Objective("contrastive")))
        >>> loss = both(torch.randn(4, 8), torch.tensor([0, 0, 1, 2]))
        >>> [g["name"] for g in both.param_groups(lr=1e-4)]
        ['0.proxies']
    """

    def __init__(self, *parts: tuple[float, Objective]) -> None:
        super().__init__()
        if not parts:
            raise ConfigError("WeightedSum: pass at least one (weight, objective).")
        self.weights = [float(weight) for weight, _ in parts]
        self.parts = nn.ModuleList(objective for _, objective in parts)

    def forward(self, emb: Tensor, labels: Tensor | Sequence[int]) -> Tensor:
        """Compute the weighted sum of the losses of a batch."""
        terms = [w * part(emb, labels) for w, part in zip(self.weights, self.parts, strict=True)]
        return torch.stack(terms).sum(0)

    def init_proxies(self, emb: Tensor, labels: Tensor) -> None:
        """Set the proxies of every part to the means of their classes."""
        for part in self.parts:
            cast(Objective, part).init_proxies(emb, labels)

    def refresh(self, labels: Tensor | Sequence[int], emb: Tensor | None = None) -> None:
        """Recompute the state of every part that describes the whole training set."""
        for part in self.parts:
            cast(Objective, part).refresh(labels, emb)

    def param_groups(self, lr: float) -> list[dict[str, Any]]:
        """Return the optimizer groups of every part, their names prefixed with its index."""
        parts = [cast(Objective, part) for part in self.parts]
        return [{**g, "name": f"{i}.{g['name']}"} for i, part in enumerate(parts) for g in part.param_groups(lr)]
