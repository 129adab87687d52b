"""Miners select pairs for a loss: `Pairs -> Pairs`. They never change a similarity or its gradient.

Ties go to the lowest index. An anchor without positives or without negatives gets no pairs, except with `all`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nearkin._common.registry import Registry, is_number, to_python_scalar
from nearkin.errors import ConfigError, did_you_mean
from nearkin.losses.registry import check_known
from nearkin.ops.geometry import distances
from nearkin.ops.pairs import Pairs
from nearkin.ops.reductions import by_rows

Miner = Callable[..., Pairs]
MINERS: Registry[Miner] = Registry("miner")


def miner(function: Miner) -> Miner:
    """Register a function `Pairs -> Pairs` as a miner under its own name. It runs without gradients.

    Args:
        function: Takes Pairs and keyword-only settings.

    Returns:
        The public function, which checks the settings first; its `check` attribute only checks them.
    """
    parameters = inspect.signature(function).parameters
    known = {n: str(p.annotation) for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    name = function.__name__.rstrip("_")

    def check(settings: Mapping[str, Any]) -> dict[str, Any]:
        for key, value in settings.items():
            check_known(f"miner {name}", key, known)
            annotation = known[key].removesuffix(" | None")
            if annotation not in _SETTING_TYPES or (value is None and known[key] != annotation):
                continue
            is_valid, expected = _SETTING_TYPES[annotation]
            if not is_valid(to_python_scalar(value)):
                raise ConfigError(f"miner {name}: {key} must be {expected}, got {value!r}.")
        return {key: to_python_scalar(value) for key, value in settings.items()}

    @functools.wraps(function)
    def public(p: Pairs, **settings: Any) -> Pairs:
        with torch.no_grad():
            return function(p, **check(settings))

    public.check = check  # type: ignore[attr-defined]
    return MINERS.add(name, public)


# Annotation of a setting -> its check, and the words for it.
_SETTING_TYPES: dict[str, tuple[Callable[[object], bool], str]] = {
    "float": (lambda value: is_number(value, float), "a finite number"),
    "int": (lambda value: is_number(value, int), "an integer"),
    "torch.Generator": (lambda value: isinstance(value, torch.Generator), "a torch.Generator"),
}


@miner
def all_(p: Pairs) -> Pairs:
    """Select all pairs."""
    return p


@miner
def hard(p: Pairs) -> Pairs:
    """Select, per anchor, the least similar positive and the most similar negative."""
    positive = p.sim.masked_fill(~p.pos, float("inf")).min(1).indices
    negative = p.sim.masked_fill(~p.neg, float("-inf")).max(1).indices
    has_both = p.pos.any(1) & p.neg.any(1)
    return _select_triplets(p, torch.stack([positive, negative], 1).masked_fill(~has_both[:, None], -1)[:, None])


@miner
def multi_similarity(p: Pairs, *, epsilon: float = 0.1) -> Pairs:
    """Select negatives within epsilon of the farthest positive, and positives within epsilon of the nearest negative.

    Wang et al. 2019. For each anchor the two sets are both empty or both non-empty.
    """
    farthest = p.sim.masked_fill(~p.pos, float("inf")).amin(1, keepdim=True)
    nearest = p.sim.masked_fill(~p.neg, float("-inf")).amax(1, keepdim=True)
    return replace(p, pos=p.pos & (p.sim - epsilon < nearest), neg=p.neg & (p.sim > farthest - epsilon), triplets=None)


@miner
def semihard(p: Pairs, *, band: float | None = None) -> Pairs:
    """Select, per (anchor, positive), the most similar negative that is less similar than the positive.

    The negatives are binned between the sorted positives; the best one for a positive is the largest of the nearest
    non-empty bin below it. Time N M log P.
    """

    def select(sim: Tensor, neg: Tensor, columns: Tensor, is_positive: Tensor) -> Tensor:
        ranked, order = sim.gather(1, columns).masked_fill(~is_positive, float("inf")).sort(1)
        bins = torch.searchsorted(ranked, sim, right=True)  # number of positives that are not above
        none = sim.shape[1]
        best = sim.new_full((len(sim), ranked.shape[1] + 1), float("-inf"))
        best.scatter_reduce_(1, bins, sim.masked_fill(~neg, float("-inf")), "amax")
        is_best = neg & (sim == best.gather(1, bins))
        first = torch.full(best.shape, none, device=sim.device)
        first.scatter_reduce_(1, bins, torch.where(is_best, torch.arange(none, device=sim.device), none), "amin")
        # The last non-empty bin up to each bin is where the count of non-empty bins reached its value. Not by cummax,
        # which crashes on XLA.
        count = (best > float("-inf")).cumsum(1, dtype=torch.int64)[:, :-1].contiguous()
        nearest_bin = torch.searchsorted(count, count)
        selected = is_positive.gather(1, order) & (count > 0)
        if band is not None:
            selected &= ranked - best.gather(1, nearest_bin) < band
        triplets = torch.stack([columns.gather(1, order), first.gather(1, nearest_bin)], 2)
        return triplets.masked_fill_(~selected[..., None], -1)

    return _select_triplets(p, by_rows(select, p.sim.detach(), p.neg, *p.positive_columns()))


@miner
def distance_weighted(
    p: Pairs,
    *,
    cutoff: float = 0.5,
    limit: float = 1.4,
    dim: int | None = None,
    generator: torch.Generator | None = None,
) -> Pairs:
    """Select, per anchor, a random positive, and a negative such that all distances are about equally likely.

    Wu et al. 2017. On the sphere most negatives are at distance 1.41; weights inverse to that density favour near ones.
    An anchor without a negative nearer than `limit` is skipped.
    """
    probability = distance_weights(p, cutoff=cutoff, limit=limit, dim=dim)
    rows = p.pos.any(1) & (probability.sum(1) > 0)
    neg = _draw(probability, rows, generator)
    pos = _draw(p.pos, rows, generator)
    return replace(p, pos=pos, neg=neg, triplets=None)


def distance_weights(p: Pairs, *, cutoff: float = 0.5, limit: float = 1.4, dim: int | None = None) -> Tensor:
    """Compute the probability of each negative in `distance_weighted`."""
    dim = dim or p.dim
    if dim is None:
        raise ConfigError("miner distance_weighted: the embedding dimensions are unknown. Pass dim=...")
    anchor_sq, ref_sq = p.squared_norms()

    def probability(sim: Tensor, neg: Tensor, square: Tensor) -> Tensor:
        distance = distances(sim, square, ref_sq)
        d = distance.clamp(cutoff, limit)
        log_density = (dim - 2) * d.log() + (dim - 3) / 2 * torch.log1p(-d.square() / 4)
        logits = (-log_density).masked_fill_(~(neg & (distance < limit)), float("-inf"))
        return torch.softmax(logits, 1).nan_to_num_(0.0)  # an empty row is 0/0

    return by_rows(probability, p.sim.detach(), p.neg, anchor_sq.detach())


@miner
def random(p: Pairs, *, generator: torch.Generator | None = None) -> Pairs:
    """Select, per anchor, one positive and one negative, each drawn uniformly."""
    rows = p.pos.any(1) & p.neg.any(1)
    pos, neg = (_draw(mask, rows, generator) for mask in (p.pos, p.neg))
    return replace(p, pos=pos, neg=neg, triplets=None)


def _draw(weight: Tensor, rows: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw one column by weight (bool: all True equally) in each selected row; returns a mask."""
    # Column j has the largest weight / exponential with probability weight_j / sum. torch.multinomial does the same,
    # but rejects a row without weights, which would have to be left out by index.
    device = generator.device if generator else weight.device
    dtype = torch.float32 if weight.dtype == torch.bool else weight.dtype
    noise = torch.empty(weight.shape, dtype=dtype, device=device).exponential_(generator=generator)
    column = torch.div(weight, noise.to(weight.device)).argmax(1, keepdim=True)
    return torch.zeros_like(weight, dtype=torch.bool).scatter_(1, column, rows[:, None])


def _select_triplets(p: Pairs, triplets: Tensor) -> Pairs:
    """Return Pairs with these triplets [N, K, 2], and the pairs that occur in them."""
    selected, none = (triplets[..., 0] >= 0).to(torch.uint8), torch.zeros_like(p.pos, dtype=torch.uint8)
    pos, neg = (none.scatter_reduce(1, c.clamp(min=0), selected, "amax").bool() for c in triplets.unbind(2))
    return replace(p, pos=pos, neg=neg, triplets=triplets)


def __getattr__(name: str) -> Any:
    # `all` shadows the builtin inside this file, so the function is called all_ here and all outside.
    if name == "all":
        return all_
    raise AttributeError(f"module 'nearkin.losses.miners' has no attribute {name!r}.{did_you_mean(name, MINERS)}")
