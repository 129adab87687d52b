"""Miners narrow what a loss sees: `Pairs -> Pairs`. They choose, and never touch a similarity or its gradient.

    all                every pair (the same as no miner)
    hard               per anchor the farthest positive and the nearest negative
    semihard           per (anchor, positive) the nearest negative that is farther than the positive
    multi_similarity   pairs that violate the order of positives and negatives, within epsilon
    distance_weighted  per anchor a random positive, and a negative drawn evenly over distance
    random             per anchor a random positive and a random negative

Ties go to the lowest index. An anchor without positives or without negatives keeps nothing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nearkin.errors import ConfigError, did_you_mean
from nearkin.pairs import Pairs
from nearkin.registry import Registry

Miner = Callable[..., Pairs]
MINERS: Registry[Miner] = Registry("miner")


def miner(function: Miner) -> Miner:
    """Register a function `Pairs -> Pairs` under its own name. It runs without gradients."""
    known = [n for n, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY]
    name = function.__name__.rstrip("_")

    @functools.wraps(function)
    def public(p: Pairs, **settings: Any) -> Pairs:
        for key in settings:
            if key not in known:
                hint = did_you_mean(key, known) or (f" It has: {', '.join(known)}." if known else " It has none.")
                raise ConfigError(f"miner {name}: no setting '{key}'.{hint}")
        with torch.no_grad():
            return function(p, **settings)

    return MINERS.add(name, public)


@miner
def all_(p: Pairs) -> Pairs:
    """Every pair."""
    return p


@miner
def hard(p: Pairs) -> Pairs:
    """Per anchor the least similar positive and the most similar negative: one triplet per anchor that has both."""
    both = _has_both(p)
    far = torch.where(p.pos, p.sim, float("inf")).argmin(1)
    near = torch.where(p.neg, p.sim, float("-inf")).argmax(1)
    return replace(p, pos=_one(p.pos, far, both), neg=_one(p.neg, near, both), triplets=None)


@miner
def multi_similarity(p: Pairs, *, epsilon: float = 0.1) -> Pairs:
    """Negatives that come within epsilon of the farthest positive, positives within epsilon of the nearest negative.

    Wang et al. 2019. For each anchor the two kept sets are both empty or both non-empty.
    """
    nearest = torch.where(p.neg, p.sim, float("-inf")).amax(1, keepdim=True)
    farthest = torch.where(p.pos, p.sim, float("inf")).amin(1, keepdim=True)
    pos = p.pos & (p.sim - epsilon < nearest)
    neg = p.neg & (p.sim + epsilon > farthest)
    return replace(p, pos=pos, neg=neg, triplets=None)


def _has_both(p: Pairs) -> Tensor:
    return p.pos.any(1) & p.neg.any(1)


def _one(mask: Tensor, column: Tensor, rows: Tensor) -> Tensor:
    """A mask with the one given column per row, in the given rows."""
    return torch.zeros_like(mask).scatter_(1, column[:, None], rows[:, None])


def __getattr__(name: str) -> Any:
    # `all` shadows the builtin inside this file, so the function is called all_ here and all outside.
    if name == "all":
        return all_
    raise AttributeError(f"module 'nearkin.miners' has no attribute {name!r}.{did_you_mean(name, MINERS)}")
