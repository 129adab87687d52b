"""Pair losses: pairs of the same class are pulled together, pairs of different classes are pushed apart."""

from typing import Any

import torch
from torch import Tensor

from nearkin.losses.ranges import linear, log
from nearkin.losses.registry import Inputs, LearnedScalar, loss
from nearkin.ops.pairs import Pairs, pair_up
from nearkin.ops.reductions import hinge_sums, log1p_sum_exp, masked_sum, signed_sum
from nearkin.ops.row_blocks import per_row


@loss(
    family="pair",
    paper="Hadsell et al. 2006; cosine form of Psomas 2020, eq 2.15",
    formula="mean over ordered pairs of  -s_ij (same class),  max(0, s_ij - margin) (other class)",
    use="A simple, robust baseline, and the usual choice with a cross-batch memory.",
    space={"margin": linear(0.0, 1.0)},
)
def contrastive(p: Pairs, *, margin: float | Tensor = 0.5) -> tuple[Tensor, Tensor]:
    """Pull all positives; push negatives whose cosine is above a margin.

    The minimum is -1 (all positives coincide, no negative above the margin), so a negative loss is correct.

    Args:
        p: Cosines [N, M] with masks.
        margin: The cosine below which negatives are ignored; 0.3 to 0.7.

    Returns:
        Sums per anchor [N], and the number of pairs.

    Example:
        >>> emb = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8]])
        >>> float(contrastive(pair_up(emb, torch.tensor([0, 0, 1])), margin=0.5))
        -0.2666...
    """
    active = p.neg & (p.sim > margin)
    return signed_sum(p.sim, active, p.pos) - margin * active.sum(1).to(p.sim.dtype), p.pos.sum() + p.neg.sum()


def _l2_pairs(*args: Any, normalize: bool = True, **kwargs: Any) -> Pairs:
    return pair_up(*args, metric="cosine" if normalize else "dot", **kwargs)


@loss(
    family="pair",
    paper="Hadsell et al. 2006; Boudiaf et al. 2020, eq 2",
    formula="(1/N) sum_i [ sum_{same} d_ij^2 + sum_{other} max(0, margin - d_ij)^2 ]",
    use="When distances rather than cosines matter, or to study tightness and contrast. It grows with the batch size.",
    space={"margin": linear(0.2, 1.4)},
    inputs=Inputs(
        _l2_pairs,
        builder_kwargs={"normalize": True},
        builder_docs={"normalize": "Whether embeddings are scaled to length 1 first."},
        pairs=True,
        memory=True,
    ),
)
def contrastive_l2(p: Pairs, *, margin: float | Tensor = 1.0) -> Tensor:
    """Squared distances of positives plus squared margin violations of negatives.

    Args:
        p: Similarities [N, M] with masks; dot products (`metric="dot"`) keep the lengths of the vectors.
        margin: The distance above which negatives are ignored; on unit vectors distances are 0 to 2, and 1.0 works.

    Returns:
        One value per anchor [N].

    Example:
        >>> emb = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8]])
        >>> float(contrastive_l2(pair_up(emb, torch.tensor([0, 0, 1])), margin=1.0))
        0.0148...
    """

    def values(q: Pairs, margin: Tensor) -> Tensor:
        violation = torch.relu(margin[:, None] - q.distance())
        return masked_sum(q.sq_distance(), q.pos) + masked_sum(violation.square(), q.neg)

    return p.per_anchor(values, per_row(margin, p.sim), lengths=True)


@loss(
    family="pair",
    paper="Wu et al. 2017",
    formula="sum of max(0, alpha + d_ij - beta) (same), max(0, alpha - d_ij + beta) (other) / number of non-zero terms",
    use="With the distance_weighted miner; learn_beta learns the boundary from the data.",
    space={"alpha": linear(0.05, 0.5), "beta": linear(0.6, 1.4)},
    inputs=Inputs(
        pair_up,
        builder_kwargs={"learn_beta": False},
        builder_docs={"learn_beta": "Learn beta as a parameter, with 50 times the learning rate of the network."},
        learned_scalars=(LearnedScalar("beta", lr=50.0, switch="learn_beta"),),
        pairs=True,
        memory=True,
    ),
)
def margin(p: Pairs, *, alpha: float | Tensor = 0.2, beta: float | Tensor = 1.2) -> tuple[Tensor, Tensor]:
    """Keep positives nearer than beta - alpha and negatives farther than beta + alpha (Euclidean, unit vectors).

    Args:
        p: Cosines [N, M] with masks.
        alpha: Half the width of the gap; 0.1 to 0.3.
        beta: The boundary, as a distance (1.2 is the cosine 0.28); a 0-dim tensor is learned.

    Returns:
        Sums per anchor [N], and the number of non-zero terms.

    Example:
        >>> emb = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8]])
        >>> float(margin(pair_up(emb, torch.tensor([0, 0, 1]))))
        0.5055...
    """
    return hinge_sums(p.distance(), p.pos, beta - alpha, p.neg, beta + alpha)


@loss(
    family="pair",
    paper="Psomas 2020, eq 2.23, with signs -1 and +1",
    formula="sum of max(0, margin + beta - s) (same), max(0, margin - beta + s) (other) / number of non-zero terms",
    use="Margin loss with settings in cosines; it differs from `margin`, even with matched beta.",
    space={"margin": linear(0.05, 0.5), "beta": linear(0.0, 0.8)},
)
def margin_similarity(p: Pairs, *, margin: float | Tensor = 0.2, beta: float | Tensor = 0.28) -> tuple[Tensor, Tensor]:
    """Keep positives above the cosine beta + margin and negatives below beta - margin.

    Args:
        p: Cosines [N, M] with masks.
        margin: Half the width of the gap.
        beta: The boundary, as a cosine.

    Returns:
        Sums per anchor [N], and the number of non-zero terms.

    Example:
        >>> emb = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8]])
        >>> float(margin_similarity(pair_up(emb, torch.tensor([0, 0, 1]))))
        0.52...
    """
    return hinge_sums(p.sim, p.neg, beta - margin, p.pos, beta + margin)


@loss(
    family="pair",
    paper="Wang et al. 2019",
    formula="mean_i of  (1/alpha) log(1 + sum_pos exp(-alpha (s - base)))"
    "  +  (1/beta) log(1 + sum_neg exp(beta (s - base)))",
    use="The strongest pair loss at small and medium batch sizes; use the multi_similarity miner (epsilon 0.1).",
    space={"alpha": log(0.5, 50), "beta": log(2, 100), "base": linear(0, 1)},
)
def multi_similarity(p: Pairs, *, alpha: float = 2.0, beta: float = 50.0, base: float = 0.5) -> Tensor:
    """Pull weak positives and push near negatives, each weighted relative to the others.

    Args:
        p: Cosines [N, M] with masks.
        alpha: Sharpness among positives; 2 is soft, 18 was found by search.
        beta: Sharpness among negatives; 40 to 80.
        base: The cosine around which both terms turn; 0.5, or 0.8 with sharp settings.

    Returns:
        One value per anchor [N].

    Example:
        >>> emb = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8]])
        >>> float(multi_similarity(pair_up(emb, torch.tensor([0, 0, 1]))))
        0.2091...
    """
    pull = log1p_sum_exp(p.sim, p.pos, -alpha, base) / alpha
    push = log1p_sum_exp(p.sim, p.neg, beta, base) / beta
    return pull + push
