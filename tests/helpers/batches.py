"""Random batches and objectives in float64, for the tests of losses."""

from __future__ import annotations

import torch
from torch import Tensor

import nearkin as nk
from helpers.rows import Row

DOUBLE = torch.float64


def batch(n: int, classes: int, dim: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, dim, generator=g, dtype=DOUBLE), torch.randint(0, classes, (n,), generator=g)


def balanced(classes: int, each: int, dim: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    emb, _ = batch(classes * each, classes, dim, seed)
    return emb, torch.arange(classes).repeat(each)


def proxies(classes: int, dim: int = 6, seed: int = 9) -> Tensor:
    return torch.randn(classes, dim, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def build(row: Row, classes: int, dim: int) -> nk.Objective:
    """The objective of a row in float64 with random class parameters."""
    objective = nk.Objective(
        row.name,
        num_classes=classes,
        dim=dim,
        miner=row.miner,
        miner_settings=row.miner_settings,
        reduction=row.reduction,
        **row.settings,
    )
    objective = objective.double().eval()
    g = torch.Generator().manual_seed(5)
    for value in objective.parameters():
        value.data = torch.randn(value.shape, generator=g, dtype=DOUBLE)
    return objective


def listed(triplets: Tensor) -> list[list[int]]:
    """Return mined triplets as a sorted list of [anchor, positive, negative]."""
    return sorted([a, *pair] for a, row in enumerate(triplets.tolist()) for pair in row if pair[0] >= 0)
