"""Tuple losses: an anchor compared with all its positives and negatives together.

None of them enumerates tuples: sums over pairs of sets are computed by sorting, or as sums of logarithms.
"""

import torch
from torch import Tensor

from nearkin.losses.ranges import linear, log
from nearkin.losses.registry import ONE_PER_CLASS, Inputs, loss
from nearkin.ops.pairs import Pairs, pair_up
from nearkin.ops.reductions import log_sum_exp, softplus, sum_of_violations
from nearkin.ops.row_blocks import per_row


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
        selected = p.triplets[..., 0] >= 0
        sim = p.sim.gather(1, p.triplets.clamp(min=0).flatten(1)).view(p.triplets.shape)
        terms = torch.relu(sim[..., 1] - sim[..., 0] + margin).masked_fill(~selected, 0.0)
        return terms.sum(1), selected.sum()
    return sum_of_violations(p, per_row(margin, p.sim)[:, None]), (p.pos.sum(1) * p.neg.sum(1)).sum()


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
    return torch.relu(margin + log_sum_exp(p.sim, p.pos, -1.0) + log_sum_exp(p.sim, p.neg))


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
    p.require_square("lifted_song")

    def soft_nearest(q: Pairs, margin: Tensor) -> Tensor:
        # Anchors without negatives have -inf, whose sums have no gradient: a finite stand-in closes the hinge as well.
        return (margin + log_sum_exp(q.distance(), q.neg, -1.0)).clamp(min=-1e30)

    def values(q: Pairs, push: Tensor, of_refs: Tensor) -> Tensor:
        columns, is_positive = q.positive_columns()
        bound = torch.logaddexp(push[:, None], of_refs[columns])
        return torch.relu(q.distance().gather(1, columns) + bound).square().masked_fill(~is_positive, 0.0).sum(1)

    push = p.per_anchor(soft_nearest, per_row(margin, p.sim), lengths=True)
    # Every unordered pair occurs twice, once from each side; one that a miner left on one side only counts half.
    return p.per_anchor(values, push, shared=(push,), lengths=True) / 4, p.pos.sum() / 2


@loss(
    family="tuple",
    paper="Sohn 2016; Psomas 2020, eq 2.22",
    formula="mean_a of  log(1 + sum_pos sum_neg exp(s_an - s_ap))",
    use="A smooth triplet loss without a margin; its sharpness is fixed, so it suits early training.",
)
def npair(p: Pairs) -> Tensor:
    """One logarithm per anchor over all (positive, negative) differences.

    Args:
        p: Cosines [N, M] with masks.

    Returns:
        One value per anchor [N]; 0 without positives or without negatives.

    Example:
        >>> emb = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8]])
        >>> float(npair(pair_up(emb, torch.tensor([0, 0, 1]))))
        0.4581...
    """
    return softplus(log_sum_exp(p.sim, p.pos, -1.0) + log_sum_exp(p.sim, p.neg))


@loss(
    family="tuple",
    paper="Sohn 2016",
    formula="mean over classes of  log(1 + sum_{c' != c} exp(a_c.p_c' - a_c.p_c))  +  l2 * mean |x|^2",
    use="Batches of many classes with two samples each; embeddings are not normalised, l2 keeps them short.",
    space={"l2": log(1e-4, 0.1, legal="[0, inf)")},
    inputs=ONE_PER_CLASS,
    cost="C'^2 D",
)
def npair_mc(p: Pairs, *, l2: float = 0.005) -> tuple[Tensor, Tensor]:
    """Classify one anchor per class among the positives of all classes, by dot products.

    With other Pairs, every anchor that has a positive is used, with its first positive.

    Args:
        p: Dot products of anchors and positives [C', C'] (`one_pair_per_class`).
        l2: Weight of the mean squared length (0.02 in the paper, over the half sum).

    Returns:
        One value per anchor, 0 without a positive, and the number of anchors that have one.

    Example:
        >>> from nearkin.ops.pairs import one_pair_per_class
        >>> emb = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [0.0, 2.0]])
        >>> float(npair_mc(one_pair_per_class(emb, torch.tensor([0, 0, 1, 1])), l2=0.0))
        0.2957...
    """
    has_positive = p.pos.any(1)
    if p.pos.shape[1] == 0:
        return p.sim.sum(1), has_positive.sum()
    column = p.pos.to(torch.uint8).argmax(1)  # the first one
    anchor_sq, ref_sq = p.squared_norms()
    cross_entropy = softplus(log_sum_exp(p.sim, p.neg) - p.sim.gather(1, column[:, None]).squeeze(1))
    values = cross_entropy + l2 * (anchor_sq + ref_sq[column]) / 2
    return values.masked_fill(~has_positive, 0.0), has_positive.sum()
