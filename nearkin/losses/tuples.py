"""Losses over an anchor, its positives and its negatives taken together.

    triplet            every (anchor, positive, negative), or those a miner chose
    lifted_structure   soft maxima over positives and negatives, then a hinge
    lifted_song        the original lifted structure, squared, over positive pairs
    npair              one logarithm over all (positive, negative) differences
    npair_mc           one pair per class, classified against the other classes' positives

None of them enumerates tuples: sums over products of sets are taken by sorting or as sums of logarithms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nearkin.errors import ConfigError
from nearkin.losses.registry import ONE_PER_CLASS, Inputs, linear, log, loss
from nearkin.ops.pairs import Pairs, pair_up
from nearkin.ops.reductions import PairSet, log_sum_exp, log_sums, pick, rank_positives, softplus


@loss(
    family="tuple",
    paper="Schroff et al. 2015; Wang et al. 2014",
    formula="mean over triplets of  max(0, s_an - s_ap + margin)",
    use="With miner='semihard' or 'hard'; without a miner every triplet of the batch counts, at the cost of pairs.",
    space={"margin": linear(0.02, 0.5)},
    cost="N^2 D + N^2 log P",
)
def triplet(p: Pairs, *, margin: float = 0.1) -> tuple[Tensor, Tensor]:
    """Every positive should be nearer than every negative by a margin.

    p        cosines [N, M] with masks; returns totals per anchor [N] and the number of triplets
    margin   in cosine; 0.05 to 0.2

    >>> emb = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8]])
    >>> float(triplet(pair_up(emb, torch.tensor([0, 0, 1])), margin=0.1))
    0.1300...
    """
    if p.triplets is not None:
        a, i, j = p.triplets.unbind(1)
        far, near = pick(p.sim, torch.cat([a, a]), torch.cat([i, j])).tensor_split(2)
        terms = torch.relu(near - far + margin)
        return p.sim.new_zeros(len(p.sim)).index_add(0, a, terms), torch.tensor(len(terms))
    count = (p.positives.counts() * p.negatives.counts()).sum()
    return _AllTriplets.apply(p.sim, p.positives, p.negatives, margin), count


class _AllTriplets(torch.autograd.Function):
    """Sum over every (positive, negative) of max(0, s_n - s_p + margin) per anchor, by sorting the positives.

    A negative n is in conflict with the positives below s_n + margin: the first c of the sorted positives. Its share
    is c (s_n + margin) minus their prefix sum, and its gradient is c. A positive of rank r gets minus the number of
    negatives with c > r. Time N M log P and memory N M, exactly; the triplets are never written down.
    """

    @staticmethod
    def forward(ctx: Any, sim: Tensor, positives: PairSet, negatives: PairSet, margin: float) -> Tensor:
        r = rank_positives(sim, positives)
        prefix = torch.nn.functional.pad(r.ranked.masked_fill(r.ranked == float("inf"), 0.0).cumsum(1), (1, 0))
        reach = negatives.fill_outside_(sim + margin, float("-inf"))
        conflicts = torch.searchsorted(r.ranked, reach)  # how many positives are strictly below
        total = (negatives.fill_outside_(reach, 0.0) * conflicts).sum(1) - prefix.gather(1, conflicts).sum(1)

        weight = conflicts.to(sim.dtype)
        per_count = torch.zeros_like(prefix).scatter_add_(1, conflicts, torch.ones_like(sim))
        beaten = per_count.flip(1).cumsum(1).flip(1)[:, 1:]  # [n, P] by rank: negatives with more than r conflicts
        beaten = torch.empty_like(beaten).scatter_(1, r.order, beaten)  # by slot
        weight[r.row, r.column] = -beaten[r.row, r.slot]
        ctx.save_for_backward(weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        return weight * g[:, None], None, None, None


@loss(
    family="tuple",
    paper="Song et al. 2016, smooth form; Psomas 2020, eq 2.21",
    formula="mean_a of  max(0, log sum_pos exp(margin - s) + log sum_neg exp(s))",
    use="A smooth all-pairs loss; with more than four (positive, negative) pairs per anchor its hinge never closes.",
    space={"margin": linear(0.0, 1.0)},
)
def lifted_structure(p: Pairs, *, margin: float | Tensor = 0.5) -> Tensor:
    """The soft maximum over positives of their dissimilarity plus the soft maximum over negatives of their similarity.

    p        cosines [N, M] with masks; returns one value per anchor [N], 0 without positives or without negatives
    margin   in cosine; it only moves the hinge, which on the unit sphere is open as soon as P N > e^(2 - margin)

    >>> emb = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8]])
    >>> float(lifted_structure(pair_up(emb, torch.tensor([0, 0, 1])), margin=0.5))
    0.3200...
    """
    far, near = log_sums(p.sim, p.positives, p.negatives, -1.0, 1.0)
    return torch.relu(margin + far + near)


@loss(
    family="tuple",
    paper="Song et al. 2016",
    formula="1/(2 |P|) sum over positive pairs of  "
    "max(0, d_ij + log(sum_neg exp(margin - d_ik) + sum_neg exp(margin - d_jl)))^2",
    use="To compare with the original; lifted_structure is smoother and takes a memory.",
    space={"margin": linear(0.2, 1.5)},
    inputs=Inputs(pair_up, pairs=True),
)
def lifted_song(p: Pairs, *, margin: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """Each positive pair against all negatives of both its ends, on Euclidean distances, squared.

    p        cosines [N, N] with masks; returns totals per anchor [N] and the number of unordered positive pairs
    margin   a distance; 1.0

    >>> emb = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8]])
    >>> float(lifted_song(pair_up(emb, torch.tensor([0, 0, 1]))))
    1.5895...
    """
    if p.sim.shape[0] != p.sim.shape[1]:
        raise ConfigError(
            f"lifted_song looks from both ends of a pair: it takes Pairs [N, N], got {list(p.sim.shape)}."
        )
    distance = p.distance()
    # Anchors without negatives have mass -inf, whose sums have no gradient: a finite stand-in closes the hinge as well.
    mass = (margin + log_sum_exp(distance, p.negatives, -1.0)).clamp(min=-1e30)
    i, j = p.positives.listed()
    violation = torch.relu(pick(distance, i, j) + torch.logaddexp(mass[i], mass[j])).square()
    # Every unordered pair is met twice, from either end; of one that a miner left from one end only, a half counts.
    return p.sim.new_zeros(len(p.sim)).index_add(0, i, violation / 4), torch.tensor(len(i) / 2)


@loss(
    family="tuple",
    paper="Sohn 2016; Psomas 2020, eq 2.22",
    formula="mean_a of  log(1 + sum_pos sum_neg exp(s_an - s_ap))",
    use="A smooth triplet loss without a margin; sharpness is fixed, so it suits early training.",
)
def npair(p: Pairs) -> Tensor:
    """One logarithm per anchor over all (positive, negative) differences.

    p   cosines [N, M] with masks; returns one value per anchor [N], 0 without positives or without negatives

    The double sum factors into a product of two sums, so the cost is that of pairs.

    >>> emb = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8]])
    >>> float(npair(pair_up(emb, torch.tensor([0, 0, 1]))))
    0.4581...
    """
    far, near = log_sums(p.sim, p.positives, p.negatives, -1.0, 1.0)
    return softplus(near + far)


@loss(
    family="tuple",
    paper="Sohn 2016",
    formula="mean over classes of  log(1 + sum_{c' != c} exp(a_c.p_c' - a_c.p_c))  +  l2 * mean |x|^2",
    use="Two samples of many classes per batch; embeddings are not normalised, l2 keeps them short.",
    space={"l2": log(1e-4, 0.1, legal="[0, inf)")},
    inputs=ONE_PER_CLASS,
    cost="C'^2 D",
)
def npair_mc(p: Pairs, *, l2: float = 0.005) -> Tensor:
    """One (anchor, positive) per class, classified among the positives of all classes by plain products.

    p    plain products of anchors and positives [C', C'] (`one_pair_per_class`); returns one value per anchor [C']
    l2   weight of the mean squared length; 0.005 (0.02 in the paper, over the half sum)

    Of other Pairs every anchor with a positive is used, with its first positive.

    >>> from nearkin.ops.pairs import one_pair_per_class
    >>> emb = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.0, 2.0]])
    >>> float(npair_mc(one_pair_per_class(emb, torch.tensor([0, 0, 1, 1])), l2=0.0))
    0.2957...
    """
    row, column = p.positives.listed()
    first = torch.ones_like(row, dtype=torch.bool)
    first[1:] = row[1:] != row[:-1]
    row, column = row[first], column[first]
    anchor_sq, ref_sq = p.squares()
    wrong = softplus(log_sum_exp(p.sim, p.negatives)[row] - pick(p.sim, row, column))
    return wrong + l2 * (anchor_sq[row] + ref_sq[column]) / 2
