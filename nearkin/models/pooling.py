"""Pooling: feature maps [B, F, h, w] to one vector per image."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from nearkin._common.registry import Registry
from nearkin.config.recipe import ModelConfig


def gem(maps: Tensor, p: Tensor | float = 3.0) -> Tensor:
    """Generalised-mean pooling: (mean max(x, 1e-6)^p)^(1/p) over positions. Returns pooled features [B, F]."""
    # Divided by the maximum first: x^p under- and overflows float32 for large p or large x.
    positive = maps.clamp(min=1e-6)
    largest = positive.amax(dim=(2, 3), keepdim=True).detach()
    return (positive / largest).pow(p).mean(dim=(2, 3)).pow(1.0 / p) * largest[:, :, 0, 0]


POOLINGS: Registry[Callable[[Tensor], Tensor]] = Registry("pooling")
POOLINGS.add("average", lambda maps: maps.mean(dim=(2, 3)))
POOLINGS.add("maximum", lambda maps: maps.amax(dim=(2, 3)))
POOLINGS.add("average_maximum", lambda maps: maps.mean(dim=(2, 3)) + maps.amax(dim=(2, 3)))
POOLINGS.add("gem", gem)
# All positions, [B, F * h * w]: for very small images, where layout matters as much as texture.
POOLINGS.add("grid", lambda maps: maps.flatten(1))


class Pool(nn.Module):
    """The pooling that a model configuration names."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.name = model.pool
        POOLINGS[model.pool]  # raises on an unknown name
        self.p: nn.Parameter | float = nn.Parameter(torch.tensor(model.gem_p)) if model.learn_gem_p else model.gem_p

    def forward(self, maps: Tensor) -> Tensor:
        return gem(maps, self.p) if self.name == "gem" else POOLINGS[self.name](maps)

    def extra_repr(self) -> str:
        return self.name
