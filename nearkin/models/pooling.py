"""From feature maps [B, F, h, w] to one vector per image."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from nearkin.registry import Registry

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


@_pooling
def grid(maps: Tensor) -> Tensor:
    """Every place kept: [B, F * h * w]. For tiny images, where layout says as much as texture."""
    return maps.flatten(1)
