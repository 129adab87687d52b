"""From feature maps [B, F, h, w] to one vector per image."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from nearkin._common.registry import Registry
from nearkin.config.recipe import ModelConfig

POOLINGS: Registry[Callable[[Tensor], Tensor]] = Registry("pooling")


def _pooling(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return POOLINGS.add(function.__name__, function)


@_pooling
def average(maps: Tensor) -> Tensor:
    """Mean over places: [B, F]."""
    return maps.mean(dim=(2, 3))


@_pooling
def maximum(maps: Tensor) -> Tensor:
    """Strongest answer anywhere: [B, F]."""
    return maps.amax(dim=(2, 3))


@_pooling
def average_maximum(maps: Tensor) -> Tensor:
    """Sum of both: [B, F]."""
    return average(maps) + maximum(maps)


def gem(maps: Tensor, p: Tensor | float = 3.0) -> Tensor:
    """Generalised mean over places, (mean max(x, 1e-6)^p)^(1/p): between average (p = 1) and maximum: [B, F]."""
    # x^p under- and overflows float32 for large p or large x: work with x as a share of its largest value.
    positive = maps.clamp(min=1e-6)
    largest = positive.amax(dim=(2, 3), keepdim=True).detach()
    return (positive / largest).pow(p).mean(dim=(2, 3)).pow(1.0 / p) * largest[:, :, 0, 0]


POOLINGS.add("gem", gem)


@_pooling
def grid(maps: Tensor) -> Tensor:
    """Every place kept: [B, F * h * w]. For tiny images, where layout says as much as texture."""
    return maps.flatten(1)


class Pool(nn.Module):
    """The pooling that a model names, with gem's power as a parameter where it is learned."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.name = model.pool
        POOLINGS[model.pool]  # an unknown name is refused here, with a suggestion
        self.p: nn.Parameter | float = nn.Parameter(torch.tensor(model.gem_p)) if model.learn_gem_p else model.gem_p

    def forward(self, maps: Tensor) -> Tensor:
        return gem(maps, self.p) if self.name == "gem" else POOLINGS[self.name](maps)

    def extra_repr(self) -> str:
        return self.name
