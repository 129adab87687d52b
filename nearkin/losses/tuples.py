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

from nearkin.losses.register import linear, loss
from nearkin.pairs import Pairs


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
    >>> from nearkin.pairs import pair_up
    >>> float(triplet(pair_up(emb, torch.tensor([0, 0, 1])), margin=0.1))
    0.1299...
    """
    if p.triplets is not None:
        a, i, j = p.triplets.unbind(1)
        terms = torch.relu(p.sim[a, j] - p.sim[a, i] + margin)
        return p.sim.new_zeros(len(p.sim)).index_add(0, a, terms), torch.tensor(len(terms))
    count = (p.pos.sum(1, dtype=torch.int32).long() * p.neg.sum(1, dtype=torch.int32)).sum()
    return _AllTriplets.apply(p.sim, p.pos, p.neg, margin), count


class _AllTriplets(torch.autograd.Function):
    """Sum over every (positive, negative) of max(0, s_n - s_p + margin) per anchor, by sorting the positives.

    A negative n is in conflict with the positives below s_n + margin: the first c of the sorted positives. Its share
    is c (s_n + margin) minus their prefix sum, and its gradient is c. A positive of rank r gets minus the number of
    negatives with c > r. Time N M log P and memory N M, exactly; the triplets are never written down.
    """

    @staticmethod
    def forward(ctx: Any, sim: Tensor, pos: Tensor, neg: Tensor, margin: float) -> Tensor:
        n = len(sim)
        row, column = pos.nonzero(as_tuple=True)
        if len(row) == 0:
            ctx.save_for_backward(torch.zeros_like(sim))
            return sim.new_zeros(n)
        # The positives of an anchor, sorted, in one row of a block as wide as the longest; the rest is +inf.
        size = torch.bincount(row, minlength=n)
        slot = torch.arange(len(row), device=row.device) - (size.cumsum(0) - size)[row]
        block = sim.new_full((n, int(size.max())), float("inf"))
        block[row, slot] = sim[row, column]
        ranked, order = block.sort(1)
        prefix = torch.nn.functional.pad(ranked.masked_fill(ranked == float("inf"), 0.0).cumsum(1), (1, 0))

        reach = (sim + margin).masked_fill_(~neg, float("-inf"))
        conflicts = torch.searchsorted(ranked, reach)  # how many positives are strictly below
        total = (reach.masked_fill_(~neg, 0.0) * conflicts).sum(1) - prefix.gather(1, conflicts).sum(1)

        weight = conflicts.to(sim.dtype)
        per_count = torch.zeros_like(prefix).scatter_add_(1, conflicts, torch.ones_like(sim))
        beaten = per_count.flip(1).cumsum(1).flip(1)[:, 1:]  # [n, P] by rank: negatives with more than r conflicts
        beaten = torch.empty_like(beaten).scatter_(1, order, beaten)  # back to the order of `column`
        weight[row, column] = -beaten[row, slot]
        ctx.save_for_backward(weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        return weight * g[:, None], None, None, None
