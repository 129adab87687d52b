"""Tuple losses: an anchor compared with all its positives and negatives together.

None of them enumerates tuples: sums over pairs of sets are computed by sorting, or as sums of logarithms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nearkin.errors import ConfigError
from nearkin.losses.ranges import linear, log
from nearkin.losses.registry import ONE_PER_CLASS, Inputs, loss
from nearkin.ops.pairs import Pairs, pair_up
from nearkin.ops.reductions import PairSet, gather_pairs, log_sum_exp, log_sums, rank_positives, softplus


@loss(
    family="tuple",
    paper="Schroff et al. 2015; Wang et al. 2014",
    formula="mean over triplets of  max(0, s_an - s_ap + margin)",
    use="With miner='semihard' or 'hard'; without a miner all triplets of the batch count, at the cost of pairs.",
    space={"margin": linear(0.02, 0.5)},
    cost="N^2 D + N^2 log P",
)
def triplet(p: Pairs, *, margin: float = 0.1) -> tuple[Tensor, Tensor]:
    """Keep every positive nearer than every negative by a margin.

    Args:
        p: Cosines [N, M] with masks.
        margin: Margin in cosine; 0.05 to 0.2.

    Returns:
        Sums per anchor [N], and the number of triplets.

    Example:
        >>> emb = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8]])
        >>> float(triplet(pair_up(emb, torch.tensor([0, 0, 1])), margin=0.1))
        0.1300...
    """
    if p.triplets is not None:
        a, i, j = p.triplets.unbind(1)
        positive, negative = gather_pairs(p.sim, torch.cat([a, a]), torch.cat([i, j])).tensor_split(2)
        terms = torch.relu(negative - positive + margin)
        return p.sim.new_zeros(len(p.sim)).index_add(0, a, terms), torch.tensor(len(terms))
    count = (p.positives.counts() * p.negatives.counts()).sum()
    return _AllTriplets.apply(p.sim, p.positives, p.negatives, margin), count


class _AllTriplets(torch.autograd.Function):
    """Per anchor, the sum over all (positive, negative) of max(0, s_n - s_p + margin), by sorting the positives.

    A negative n violates the margin against the positives below s_n + margin: the first c of the sorted positives. Its
    term is c (s_n + margin) minus their prefix sum, and its gradient is c. A positive of rank r gets minus the number
    of negatives with c > r. Exact, in time N M log P and memory N M.
    """

    @staticmethod
    def forward(ctx: Any, sim: Tensor, positives: PairSet, negatives: PairSet, margin: float) -> Tensor:
        r = rank_positives(sim, positives)
        prefix = torch.nn.functional.pad(r.ranked.masked_fill(r.ranked == float("inf"), 0.0).cumsum(1), (1, 0))
        reach = negatives.fill_outside_(sim + margin, float("-inf"))
        violations = torch.searchsorted(r.ranked, reach)  # number of positives strictly below
        total = (negatives.fill_outside_(reach, 0.0) * violations).sum(1) - prefix.gather(1, violations).sum(1)

        weight = violations.to(sim.dtype)
        histogram = torch.zeros_like(prefix).scatter_add_(1, violations, torch.ones_like(sim))
        violated = histogram.flip(1).cumsum(1).flip(1)[:, 1:]  # [n, P] by rank r: negatives with c > r
        violated = torch.empty_like(violated).scatter_(1, r.order, violated)  # by slot
        weight[r.row, r.column] = -violated[r.row, r.slot]
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
    """Hinge on the soft maximum of dissimilarity over positives plus the soft maximum of similarity over negatives.

    Args:
        p: Cosines [N, M] with masks.
        margin: Margin in cosine; it only shifts the hinge, which on the unit sphere is open once P N > e^(2 - margin).

    Returns:
        One value per anchor [N]; 0 without positives or without negatives.

    Example:
        >>> emb = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8]])
        >>> float(lifted_structure(pair_up(emb, torch.tensor([0, 0, 1])), margin=0.5))
        0.3200...
    """
    pull, push = log_sums(p.sim, p.positives, p.negatives, -1.0, 1.0)
    return torch.relu(margin + pull + push)


@loss(
    family="tuple",
    paper="Song et al. 2016",
    formula="1/(2 |P|) sum over positive pairs of  "
    "max(0, d_ij + log(sum_neg exp(margin - d_ik) + sum_neg exp(margin - d_jl)))^2",
    use="To compare with the original; lifted_structure is smoother and supports a memory.",
    space={"margin": linear(0.2, 1.5)},
    inputs=Inputs(pair_up, pairs=True),
)
def lifted_song(p: Pairs, *, margin: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """Compare each positive pair with the negatives of both its samples, on squared hinges of Euclidean distances.

    Args:
        p: Cosines [N, N] with masks.
        margin: Margin, as a distance.

    Returns:
        Sums per anchor [N], and the number of unordered positive pairs.

    Example:
        >>> emb = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8]])
        >>> float(lifted_song(pair_up(emb, torch.tensor([0, 0, 1]))))
        1.5895...
    """
    if p.sim.shape[0] != p.sim.shape[1]:
        raise ConfigError(f"lifted_song takes Pairs [N, N], a batch with itself, got {list(p.sim.shape)}.")
    distance = p.distance()
    # Anchors without negatives have -inf, whose sums have no gradient: a finite stand-in closes the hinge as well.
    push = (margin + log_sum_exp(distance, p.negatives, -1.0)).clamp(min=-1e30)
    i, j = p.positives.indices()
    violation = torch.relu(gather_pairs(distance, i, j) + torch.logaddexp(push[i], push[j])).square()
    # Every unordered pair occurs twice, once from each side; one that a miner left on one side only counts half.
    return p.sim.new_zeros(len(p.sim)).index_add(0, i, violation / 4), torch.tensor(len(i) / 2)


@loss(
    family="tuple",
    paper="Sohn 2016; Psomas 2020, eq 2.22",
    formula="mean_a of  log(1 + sum_pos sum_neg exp(s_an - s_ap))",
    use="A smooth triplet loss without a margin; its sharpness is fixed, so it suits early training.",
)
def npair(p: Pairs) -> Tensor:
    """One logarithm per anchor over all (positive, negative) differences.

    The double sum factors into a product of two sums, so the cost is that of pairs.

    Args:
        p: Cosines [N, M] with masks.

    Returns:
        One value per anchor [N]; 0 without positives or without negatives.

    Example:
        >>> emb = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8]])
        >>> float(npair(pair_up(emb, torch.tensor([0, 0, 1]))))
        0.4581...
    """
    pull, push = log_sums(p.sim, p.positives, p.negatives, -1.0, 1.0)
    return softplus(push + pull)


@loss(
    family="tuple",
    paper="Sohn 2016",
    formula="mean over classes of  log(1 + sum_{c' != c} exp(a_c.p_c' - a_c.p_c))  +  l2 * mean |x|^2",
    use="Batches of many classes with two samples each; embeddings are not normalised, l2 keeps them short.",
    space={"l2": log(1e-4, 0.1, legal="[0, inf)")},
    inputs=ONE_PER_CLASS,
    cost="C'^2 D",
)
def npair_mc(p: Pairs, *, l2: float = 0.005) -> Tensor:
    """Classify one anchor per class among the positives of all classes, by dot products.

    With other Pairs, every anchor that has a positive is used, with its first positive.

    Args:
        p: Dot products of anchors and positives [C', C'] (`one_pair_per_class`).
        l2: Weight of the mean squared length (0.02 in the paper, over the half sum).

    Returns:
        One value per anchor [C'].

    Example:
        >>> from nearkin.ops.pairs import one_pair_per_class
        >>> emb = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.0, 2.0]])
        >>> float(npair_mc(one_pair_per_class(emb, torch.tensor([0, 0, 1, 1])), l2=0.0))
        0.2957...
    """
    row, column = p.positives.indices()
    first = torch.ones_like(row, dtype=torch.bool)
    first[1:] = row[1:] != row[:-1]
    row, column = row[first], column[first]
    anchor_sq, ref_sq = p.squared_norms()
    cross_entropy = softplus(log_sum_exp(p.sim, p.negatives)[row] - gather_pairs(p.sim, row, column))
    return cross_entropy + l2 * (anchor_sq[row] + ref_sq[column]) / 2
