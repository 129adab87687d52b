"""Miners select pairs for a loss: `Pairs -> Pairs`. They never change a similarity or its gradient.

Ties go to the lowest index. An anchor without positives or without negatives gets no pairs, except with the miners that
select positive pairs and negative pairs independently: `all`, `pair_margin`, `hard_aware` and `uniform_histogram`.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin

import torch
from torch import Generator, Tensor

from nearkin._common.registry import Registry
from nearkin.errors import ConfigError, did_you_mean
from nearkin.losses.registry import TYPES, check_known, check_value
from nearkin.ops.geometry import distances
from nearkin.ops.pairs import Pairs
from nearkin.ops.row_blocks import by_rows

Miner = Callable[..., Pairs]
MINERS: Registry[Miner] = Registry("miner")


def miner(function: Miner) -> Miner:
    """Register a function `Pairs -> Pairs` as a miner under its own name. It runs without gradients.

    Args:
        function: Takes Pairs and keyword-only settings.

    Returns:
        The public function, which checks the settings first; its `check` attribute only checks them.
    """
    parameters = inspect.signature(function, eval_str=True).parameters
    types = {n: p.annotation for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    name = function.__name__.rstrip("_")

    def check_setting(key: str, value: Any) -> Any:
        check_known(f"miner {name}", key, types)
        options = get_args(types[key])  # of a Literal, or of a union with None
        if get_origin(types[key]) is Literal:
            return check_value(f"miner {name}: {key}", value, str, options)
        kind = next((kind for kind in TYPES if kind in (types[key], *options)), object)
        return None if value is None and type(None) in options else check_value(f"miner {name}: {key}", value, kind)

    def check(settings: Mapping[str, Any]) -> dict[str, Any]:
        return {key: check_setting(key, value) for key, value in settings.items()}

    @functools.wraps(function)
    def public(p: Pairs, **settings: Any) -> Pairs:
        with torch.no_grad():
            return function(p, **check(settings))

    public.check = check  # type: ignore[attr-defined]
    return MINERS.add(name, public)


Hardness = Literal["all", "hard", "semihard", "easy"]
Negatives = Literal["semihard", "hard"]


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
    p: Pairs, *, cutoff: float = 0.5, limit: float = 1.4, dim: int | None = None, generator: Generator | None = None
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
def random(p: Pairs, *, generator: Generator | None = None) -> Pairs:
    """Select, per anchor, one positive and one negative, each drawn uniformly."""
    rows = p.pos.any(1) & p.neg.any(1)
    pos, neg = (_draw(mask, rows, generator) for mask in (p.pos, p.neg))
    return replace(p, pos=pos, neg=neg, triplets=None)


@miner
def easy_positive(p: Pairs, *, negatives: Negatives = "semihard") -> Pairs:
    """Select, per anchor, the most similar positive and negative; a semihard negative is less similar than it.

    Xuan et al. 2020: with semihard negatives it is EPSHN. An anchor without such a negative is skipped.
    """
    pos = _first_max(p.sim, p.pos)
    allowed = p.neg
    if negatives == "semihard":
        allowed = allowed & (p.sim < (p.sim * pos).sum(1, keepdim=True))
    neg = _first_max(p.sim, allowed)
    return _keep_complete(p, pos, neg)


@miner
def n_hardest(p: Pairs, *, positives: int = 1, negatives: int = 10) -> Pairs:
    """Select, per anchor, the least similar positives and the most similar negatives, up to a number of each."""

    def select(sim: Tensor, pos: Tensor, neg: Tensor) -> Tensor:
        return torch.stack([_first(sim, pos, positives), _first(-sim, neg, negatives)], 2)

    return _keep_complete(p, *by_rows(select, p.sim, p.pos, p.neg).unbind(2))


@miner
def pair_margin(p: Pairs, *, pos_margin: float = 0.98, neg_margin: float = 0.68) -> Pairs:
    """Select positives below a cosine and negatives above another; the defaults are the distances 0.2 and 0.8."""
    return replace(p, pos=p.pos & (p.sim < pos_margin), neg=p.neg & (p.sim > neg_margin), triplets=None)


@miner
def triplet_margin(p: Pairs, *, margin: float = 0.1, kind: Hardness = "all") -> Pairs:
    """Select the pairs of the triplets whose positive is not more similar than the negative by a margin.

    With g = s_positive - s_negative: all: g <= margin. hard: g <= 0. semihard: 0 < g <= margin. easy: g > margin.
    A pair is selected if it occurs in such a triplet; no triplet is enumerated.
    """
    inf = float("inf")
    if kind == "semihard":
        positives, negatives = torch.where(p.pos, p.sim, inf).sort(1)[0], torch.where(p.neg, p.sim, -inf).sort(1)[0]
        below = torch.searchsorted(negatives, p.sim.contiguous())  # negatives that are less similar
        nearest = negatives.gather(1, (below - 1).clamp(min=0)).masked_fill(below == 0, -inf)
        above = torch.searchsorted(positives, p.sim.contiguous(), right=True).clamp(max=p.sim.shape[1] - 1)
        farthest = positives.gather(1, above)
        more = farthest > p.sim
        return _keep_complete(p, p.pos & (p.sim - nearest <= margin), p.neg & more & (farthest - p.sim <= margin))
    sign = -1.0 if kind == "easy" else 1.0
    limit = sign * (0.0 if kind == "hard" else margin)
    sim = sign * p.sim
    best_negative = torch.where(p.neg, sim, -inf).amax(1, keepdim=True)
    worst_positive = torch.where(p.pos, sim, inf).amin(1, keepdim=True)
    compare = torch.lt if kind == "easy" else torch.le
    return _keep_complete(p, p.pos & compare(sim - best_negative, limit), p.neg & compare(worst_positive - sim, limit))


@miner
def angular(p: Pairs, *, angle_degrees: float = 20.0) -> Pairs:
    """Select the pairs of the triplets whose angle at the negative is above a bound, as in the `angular` loss.

    The angle is atan(|a - p| / (2 |n - (a + p) / 2|)), so n must be nearer to the middle of a and p than a radius.
    """
    p.require_square("miner angular")
    sq, _ = p.squared_norms()
    # |n - m|^2 < |a - p|^2 / (4 tan^2) with m = (a + p) / 2, solved for the products with n.
    tan_sq = math.tan(math.radians(angle_degrees)) ** 2

    def select(sim: Tensor, neg: Tensor, columns: Tensor, is_positive: Tensor, own_sq: Tensor, refs: Tensor) -> Tensor:
        """Return the masks of the selected positives and negatives [n, 2, M]."""
        sums, product = own_sq[:, None] + sq[columns], sim.gather(1, columns)
        bound = (sums + 2 * product) / 4 - (sums - 2 * product) / (4 * tan_sq)  # what a.n + p.n - |n|^2 must exceed
        found = (sim - sq)[:, None] + refs[columns] > bound[..., None]  # [a, p, n]
        found &= is_positive[..., None] & neg[:, None]
        none = torch.zeros_like(neg, dtype=torch.uint8)
        pos = none.scatter_reduce(1, columns, found.any(2).to(torch.uint8), "amax").bool()
        return torch.stack([pos, found.any(1)], 1)

    columns, is_positive = p.positive_columns()
    width = max(1, columns.shape[1]) * len(sq)
    masks = by_rows(select, p.sim, p.neg, columns, is_positive, sq, shared=(p.sim,), width=width)
    return _keep_complete(p, *masks.unbind(1))


@miner
def hard_aware(p: Pairs, *, share: float = 0.5) -> Pairs:
    """Select a share of all positive pairs, the least similar, and of all negative pairs, the most similar.

    Yuan et al. 2017 (HDC): deeper parts of a cascade see 100, 50 and 20 % of the pairs.
    """

    def hardest(x: Tensor, mask: Tensor) -> Tensor:
        return _first(x.flatten(), mask.flatten(), (mask.sum() * share).ceil()).view_as(mask)

    return replace(p, pos=hardest(p.sim, p.pos), neg=hardest(-p.sim, p.neg), triplets=None)


@miner
def uniform_histogram(
    p: Pairs, *, bins: int = 100, pos_per_bin: int = 10, neg_per_bin: int = 10, generator: Generator | None = None
) -> Pairs:
    """Select random pairs such that all similarities are about equally frequent: up to a number of each bin.

    The bins divide the range of the positive pairs, and that of the negative pairs, into equal widths.
    """

    def draw(mask: Tensor, count: int) -> Tensor:
        low, high = torch.where(mask, p.sim, 2.0).amin(), torch.where(mask, p.sim, -2.0).amax()
        position = (p.sim - low) / (high - low).clamp(min=1e-12) * bins
        index = torch.where(mask, position.floor().clamp(0, bins - 1), float(bins)).long().flatten()
        device = generator.device if generator else p.sim.device
        noise = torch.rand(index.shape, generator=generator, device=device, dtype=p.sim.dtype).to(index.device)
        order = (index + noise).argsort(stable=True)  # by bin, and at random within each
        sizes = index.new_zeros(bins + 1).scatter_add(0, index, torch.ones_like(index))
        starts = sizes.cumsum(0) - sizes
        return mask & (_rank(order) - starts[index] < count).view_as(mask)

    return replace(p, pos=draw(p.pos, pos_per_bin), neg=draw(p.neg, neg_per_bin), triplets=None)


def _rank(order: Tensor) -> Tensor:
    """Return the place of each entry in its row of an order."""
    places = torch.arange(order.shape[-1], device=order.device)
    return torch.empty_like(order).scatter_(-1, order, places.expand_as(order))


def _first(x: Tensor, mask: Tensor, count: int | Tensor) -> Tensor:
    """Return the mask of the smallest entries in a mask, up to a number of each row; the first of equal ones."""
    return mask & (_rank(torch.where(mask, x, float("inf")).argsort(dim=-1, stable=True)) < count)


def _first_max(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mask of each row's largest entry in a mask, the first of equal ones; an empty row stays empty."""
    index = x.masked_fill(~mask, float("-inf")).argmax(1, keepdim=True)
    return torch.zeros_like(mask).scatter(1, index, True) & mask


def _keep_complete(p: Pairs, pos: Tensor, neg: Tensor) -> Pairs:
    """Return Pairs with these masks, without the anchors that lack a positive or a negative."""
    complete = pos.any(1, keepdim=True) & neg.any(1, keepdim=True)
    return replace(p, pos=pos & complete, neg=neg & complete, triplets=None)


def _draw(weight: Tensor, rows: Tensor, generator: Generator | None) -> Tensor:
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
