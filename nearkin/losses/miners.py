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
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nearkin._common.registry import Registry, is_number, to_python_scalar
from nearkin.errors import ConfigError, did_you_mean
from nearkin.ops.pairs import Pairs
from nearkin.ops.reductions import PairSet, rank_positives, shifted_exp

Miner = Callable[..., Pairs]
MINERS: Registry[Miner] = Registry("miner")


def miner(function: Miner) -> Miner:
    """Register a function `Pairs -> Pairs` under its own name. It runs without gradients.

    The public call has the function's settings checked; `check` of it does that alone, before there are any pairs.
    """
    parameters = inspect.signature(function).parameters
    known = {n: str(p.annotation) for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    name = function.__name__.rstrip("_")

    def check(settings: Mapping[str, Any]) -> dict[str, Any]:
        for key, value in settings.items():
            if key not in known:
                hint = did_you_mean(key, known) or (f" It has: {', '.join(known)}." if known else " It has none.")
                raise ConfigError(f"miner {name}: no setting '{key}'.{hint}")
            kind = known[key].removesuffix(" | None")
            left_out = value is None and known[key] != kind
            if kind in _KINDS and not left_out and not _KINDS[kind][0](to_python_scalar(value)):
                raise ConfigError(f"miner {name}: {key} must be {_KINDS[kind][1]}, got {value!r}.")
        return {key: to_python_scalar(value) for key, value in settings.items()}

    @functools.wraps(function)
    def public(p: Pairs, **settings: Any) -> Pairs:
        with torch.no_grad():
            return function(p, **check(settings))

    public.check = check  # type: ignore[attr-defined]
    return MINERS.add(name, public)


# What the settings of a miner may be, by their annotation.
_KINDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "float": (lambda value: is_number(value, float), "a finite number"),
    "int": (lambda value: is_number(value, int), "a whole number"),
    "torch.Generator": (lambda value: isinstance(value, torch.Generator), "a torch.Generator"),
}


@miner
def all_(p: Pairs) -> Pairs:
    """Every pair."""
    return p


@miner
def hard(p: Pairs) -> Pairs:
    """Per anchor the least similar positive and the most similar negative: one triplet per anchor that has both."""
    row, column, sim, farthest = _farthest_positive(p)
    last = p.sim.shape[1]
    far = torch.full_like(farthest, last, dtype=torch.int64)
    far.scatter_reduce_(0, row, torch.where(sim == farthest[row], column, last), "amin")
    near = _negatives_only(p).max(1)
    rows = torch.nonzero((far < last) & (near.values > float("-inf"))).squeeze(1)
    return _keep_triplets(p, torch.stack([rows, far[rows], near.indices[rows]], 1))


@miner
def multi_similarity(p: Pairs, *, epsilon: float = 0.1) -> Pairs:
    """Negatives that come within epsilon of the farthest positive, positives within epsilon of the nearest negative.

    Wang et al. 2019. For each anchor the two kept sets are both empty or both non-empty.
    """
    nearest = _negatives_only(p).amax(1)
    row, column, sim, farthest = _farthest_positive(p)
    pos = torch.zeros_like(p.pos)
    pos[row, column] = sim - epsilon < nearest[row]
    neg = (p.sim > (farthest - epsilon)[:, None]).logical_and_(p.neg)
    return replace(p, pos=pos, neg=neg, triplets=None)


@miner
def semihard(p: Pairs, *, band: float | None = None) -> Pairs:
    """Per (anchor, positive) the most similar negative among those strictly less similar than the positive.

    band   keep only triplets whose negative is less than this below the positive (the FaceNet rule: set it to the
           margin of the loss). The others have zero loss either way, but count in the mean.

    The negatives are put into the gaps between the sorted positives; the best for a positive is the largest of the
    nearest gap below it that holds any. Time N M log P, no triplet is enumerated but those returned.
    """
    r = rank_positives(p.sim, p.positives)
    columns = torch.arange(p.sim.shape[1], device=p.sim.device)
    gap = torch.searchsorted(r.ranked, p.sim, right=True)  # how many positives are not above
    best = p.sim.new_full((len(p.sim), r.ranked.shape[1] + 1), float("-inf"))
    best.scatter_reduce_(1, gap, p.sim.masked_fill(~p.neg, float("-inf")), "amax")
    is_best = p.neg & (p.sim == best.gather(1, gap))
    first = torch.full(best.shape, len(columns), device=p.sim.device)
    first.scatter_reduce_(1, gap, torch.where(is_best, columns, len(columns)), "amin")

    filled = torch.where(best > float("-inf"), torch.arange(best.shape[1], device=best.device), -1).cummax(1).values
    rank = r.order.argsort(1)
    nearest_gap = filled[r.row, rank[r.row, r.slot]]
    negative = first[r.row, nearest_gap.clamp(min=0)]
    keep = nearest_gap >= 0
    triplets = torch.stack([r.row, r.column, negative], 1)[keep]
    if band is not None:
        a, i, j = triplets.unbind(1)
        triplets = triplets[p.sim[a, i] - p.sim[a, j] < band]
    return _keep_triplets(p, triplets)


@miner
def distance_weighted(
    p: Pairs,
    *,
    cutoff: float = 0.5,
    limit: float = 1.4,
    dim: int | None = None,
    generator: torch.Generator | None = None,
) -> Pairs:
    """Per anchor a random positive, and a negative drawn so that all distances are about equally likely.

    Wu et al. 2017. On the sphere most negatives are at distance 1.41; weighting by the inverse of that density gives
    near ones a chance. An anchor without a negative nearer than `limit` is skipped.

    cutoff      distances below this count as this: very near negatives are noise
    limit       negatives beyond this have no loss and are not drawn
    dim         embedding dimensions, if the pairs do not know them
    generator   the source of randomness; torch's global one if left out
    """
    chance = distance_weights(p, cutoff=cutoff, limit=limit, dim=dim)
    rows = p.pos.any(1) & (chance.sum(1) > 0)
    neg = _one(p.neg, _draw(chance, rows, generator), rows)
    pos = _one(p.pos, _draw(p.pos.to(chance.dtype), rows, generator), rows)
    return replace(p, pos=pos, neg=neg, triplets=None)


def distance_weights(p: Pairs, *, cutoff: float = 0.5, limit: float = 1.4, dim: int | None = None) -> Tensor:
    """The chance of each negative in `distance_weighted` [N, M]; a row without an eligible negative is zero."""
    dim = dim or p.dim
    if dim is None:
        raise ConfigError("miner distance_weighted: the pairs do not know their dimension; pass dim=...")
    distance = p.distance().detach()
    d = distance.clamp(cutoff, limit)
    log_density = (dim - 2) * d.log() + (dim - 3) / 2 * torch.log1p(-d.square() / 4)
    weight, total, _ = shifted_exp(-log_density, PairSet(p.neg & (distance < limit)), 1.0)
    return weight / total.clamp(min=1e-30)[:, None]


@miner
def random(p: Pairs, *, generator: torch.Generator | None = None) -> Pairs:
    """Per anchor one positive and one negative, each drawn evenly."""
    rows = _has_both(p)
    pos = _one(p.pos, _draw(p.pos.to(p.sim.dtype), rows, generator), rows)
    neg = _one(p.neg, _draw(p.neg.to(p.sim.dtype), rows, generator), rows)
    return replace(p, pos=pos, neg=neg, triplets=None)


def _draw(chance: Tensor, rows: Tensor, generator: torch.Generator | None) -> Tensor:
    """One column per row, drawn by weight; column 0 in the rows that are not asked for."""
    column = torch.zeros(len(chance), dtype=torch.int64, device=chance.device)
    if rows.any():
        column[rows] = torch.multinomial(chance[rows], 1, generator=generator).squeeze(1)
    return column


def _keep_triplets(p: Pairs, triplets: Tensor) -> Pairs:
    """These triplets, and as pairs those that occur in them."""
    a, i, j = triplets.unbind(1)
    pos, neg = torch.zeros_like(p.pos), torch.zeros_like(p.neg)
    pos[a, i], neg[a, j] = True, True
    return replace(p, pos=pos, neg=neg, triplets=triplets)


def _has_both(p: Pairs) -> Tensor:
    return p.pos.any(1) & p.neg.any(1)


def _one(mask: Tensor, column: Tensor, rows: Tensor) -> Tensor:
    """A mask with the one given column per row, in the given rows."""
    return torch.zeros_like(mask).scatter_(1, column.view(-1, 1), rows.view(-1, 1))


def _farthest_positive(p: Pairs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The positives as a list (row, column, similarity), and the least similarity of each anchor's [N], or +inf."""
    row, column = p.positives.listed()
    sim = p.sim[row, column]
    return row, column, sim, p.sim.new_full((len(p.sim),), float("inf")).scatter_reduce_(0, row, sim, "amin")


def _negatives_only(p: Pairs) -> Tensor:
    """The similarities, with -inf for what is not a negative."""
    return p.negatives.fill_outside_(p.sim.detach().clone(), float("-inf"))


def __getattr__(name: str) -> Any:
    # `all` shadows the builtin inside this file, so the function is called all_ here and all outside.
    if name == "all":
        return all_
    raise AttributeError(f"module 'nearkin.losses.miners' has no attribute {name!r}.{did_you_mean(name, MINERS)}")
