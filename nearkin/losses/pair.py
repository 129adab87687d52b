"""Pair losses: pairs of the same class are pulled together, pairs of different classes are pushed apart."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nearkin.losses.contrastive import positives_among_negatives
from nearkin.losses.ranges import linear, log
from nearkin.losses.registry import BATCH, WHOLE_BATCH, Inputs, LearnedScalar, loss
from nearkin.ops.geometry import distances, full_precision, unit
from nearkin.ops.pairs import Pairs, as_batch, pair_up
from nearkin.ops.reductions import hinge_sums, log1p_sum_exp, masked_mean, masked_sum, signed_sum
from nearkin.ops.row_blocks import by_rows, per_row

_WEIGHT = log(0.1, 10, legal="[0, inf)")


@loss(
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
    paper="Hadsell et al. 2006; Boudiaf et al. 2020, eq 2",
    formula="(1/N) sum_i [ sum_{same} d_ij^2 + sum_{other} max(0, margin - d_ij)^2 ]",
    use="When distances rather than cosines matter, or to study tightness and contrast. It grows with the batch size.",
    space={"margin": linear(0.2, 1.4)},
    inputs=replace(
        BATCH,
        build=_l2_pairs,
        builder_kwargs={"normalize": True},
        builder_docs={"normalize": "Whether embeddings are scaled to length 1 first."},
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
    paper="Wu et al. 2017",
    formula="sum of max(0, alpha + d_ij - beta) (same), max(0, alpha - d_ij + beta) (other) / number of non-zero terms",
    use="With the distance_weighted miner; learn_beta learns the boundary from the data.",
    space={"alpha": linear(0.05, 0.5), "beta": linear(0.6, 1.4)},
    inputs=replace(
        BATCH,
        builder_kwargs={"learn_beta": False},
        builder_docs={"learn_beta": "Learn beta as a parameter, with 50 times the learning rate of the network."},
        learned_scalars=(LearnedScalar("beta", lr=50.0, switch="learn_beta"),),
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


@loss(
    paper="Yu and Tao 2019 (intra-pair variance)",
    formula="mean_pos max(0, (1 - pos_epsilon) m_pos - s)^2  +  mean_neg max(0, s - (1 + neg_epsilon) m_neg)^2,  "
    "m the mean cosine of all positive, or negative, pairs",
    use="Added to another loss with WeightedSum, to reduce the spread of its pairs.",
    space={"pos_epsilon": linear(0.0, 0.2), "neg_epsilon": linear(0.0, 0.2)},
    reductions=("mean",),
    inputs=WHOLE_BATCH,
)
def intra_pair_variance(p: Pairs, *, pos_epsilon: float = 0.01, neg_epsilon: float = 0.01) -> Tensor:
    """Penalise positives below their mean similarity, and negatives above theirs.

    Args:
        p: Cosines [N, M] with masks.
        pos_epsilon: Slack of the positives, as a share of their mean.
        neg_epsilon: Slack of the negatives, as a share of their mean.

    Returns:
        The 0-dim loss: its means over all pairs are part of its definition.

    Example:
        >>> emb = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
        >>> float(intra_pair_variance(pair_up(emb, torch.tensor([0, 0, 1, 1]))))
        0.0482...
    """

    def values(q: Pairs, low: Tensor, high: Tensor) -> Tensor:
        pull, push = torch.relu(low - q.sim), torch.relu(q.sim - high)
        return masked_sum(pull.square(), q.pos) / n_pos + masked_sum(push.square(), q.neg) / n_neg

    n_pos, n_neg = (mask.sum().clamp(min=1) for mask in (p.pos, p.neg))
    low, high = (1 - pos_epsilon) * masked_mean(p.sim, p.pos), (1 + neg_epsilon) * masked_mean(p.sim, p.neg)
    return p.per_anchor(values, shared=(low, high)).sum()


@loss(
    paper="Zhang et al. 2024 (TCM)",
    formula="pos_weight mean of (pos_margin - s) over positives below it  +  "
    "neg_weight mean of (s - neg_margin) over negatives above it",
    use="Added to another loss with WeightedSum, so that one threshold suits all classes (verification, open sets).",
    space={"pos_margin": linear(0.5, 1), "neg_margin": linear(0, 0.8), "pos_weight": _WEIGHT, "neg_weight": _WEIGHT},
    reductions=("mean",),
    inputs=WHOLE_BATCH,
)
def threshold_consistent_margin(
    p: Pairs, *, pos_margin: float = 0.9, neg_margin: float = 0.5, pos_weight: float = 1.0, neg_weight: float = 1.0
) -> Tensor:
    """Pull positives above one cosine and push negatives below another, as means over the violations.

    Args:
        p: Cosines [N, M] with masks.
        pos_margin: The cosine that positives should reach.
        neg_margin: The cosine that negatives should not exceed.
        pos_weight: Weight of the positives.
        neg_weight: Weight of the negatives.

    Returns:
        The 0-dim loss: its means over all violations are part of its definition.

    Example:
        >>> emb = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8]])
        >>> round(float(threshold_consistent_margin(pair_up(emb, torch.tensor([0, 0, 1])))), 4)
        0.38
    """
    pull = masked_mean(pos_margin - p.sim, p.pos & (p.sim <= pos_margin))
    push = masked_mean(p.sim - neg_margin, p.neg & (p.sim >= neg_margin))
    return pos_weight * pull + neg_weight * push


def _transformed_pairs(
    transform: Callable[..., Tensor], emb: Any, labels: Any, refs: Any = None, ref_labels: Any = None, **kwargs: Any
) -> Pairs:
    """Pair up transformed embeddings by dot products."""
    emb, labels = as_batch(emb, labels)
    if refs is not None and ref_labels is not None:
        refs, ref_labels = as_batch(refs, ref_labels, what="refs")
        refs = transform(refs)
    with full_precision(emb):
        return pair_up(transform(emb), labels, refs, ref_labels, metric="dot", **kwargs)


def centred_pairs(*args: Any, **kwargs: Any) -> Pairs:
    """Pair up embeddings of length 1 by dot products, after subtracting from each the mean of its coordinates."""

    def centre(x: Tensor) -> Tensor:
        f = unit(x)
        return f - f.mean(1, keepdim=True)

    return _transformed_pairs(centre, *args, **kwargs)


@loss(
    paper="Yuan et al. 2019 (SNR)",
    formula="mean over non-zero terms of max(0, r_ij - pos_margin) (same)  +  of max(0, neg_margin - r_ij) (other),  "
    "r_ij = var(x_i - x_j) / var(x_i)",
    use="When lengths carry information: the distance is relative to the anchor's own variance.",
    space={"pos_margin": linear(0.0, 0.5), "neg_margin": linear(0.2, 2.0)},
    inputs=Inputs(
        centred_pairs,
        pairs=True,
        memory=True,
        by_anchor=False,
        call_example="nearkin.losses.pair.centred_pairs(emb, labels)",
    ),
    reductions=("mean",),
)
def snr_contrastive(p: Pairs, *, pos_margin: float = 0.0, neg_margin: float = 1.0) -> Tensor:
    """Contrastive loss on the variance of a difference over the variance of the anchor.

    Args:
        p: Dot products [N, M] of centred embeddings, with masks.
        pos_margin: Ratio above which positives are pulled.
        neg_margin: Ratio below which negatives are pushed.

    Returns:
        The 0-dim loss: its two means over non-zero terms are part of its definition.

    Example:
        >>> emb = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
        >>> round(float(snr_contrastive(centred_pairs(emb, torch.tensor([0, 0, 1])), neg_margin=4.0)), 4)
        1.0
    """

    def sums_and_counts(q: Pairs) -> Tensor:
        variance = q.squared_norms()[0][:, None]
        usable = variance > 1e-12  # a constant embedding has no signal: it has no pairs
        ratio = q.distance().square() / variance.clamp(min=1e-12)
        far, near = q.pos & usable & (ratio > pos_margin), q.neg & usable & (ratio < neg_margin)
        counts = (far.sum(1).to(ratio.dtype), near.sum(1).to(ratio.dtype))
        return torch.stack([masked_sum(ratio - pos_margin, far), masked_sum(neg_margin - ratio, near), *counts], 1)

    pull, push, n_pull, n_push = p.per_anchor(sums_and_counts, lengths=True).sum(0).unbind()
    return pull / n_pull.clamp(min=1) + push / n_push.clamp(min=1)


def hyperbolic_pairs(*args: Any, curvature: float = 0.1, radius: float = 2.3, **kwargs: Any) -> Pairs:
    """Map embeddings, clipped to a radius, into the Poincare ball; similarities are minus the geodesic distances."""
    root = math.sqrt(curvature)

    def to_ball(x: Tensor) -> Tensor:  # the exponential map at 0, times the root: the ball has radius 1
        length = torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp(max=radius)
        return unit(x) * torch.tanh(root * length)

    def similarities(products: Tensor, anchor_sq: Tensor, ref_sq: Tensor) -> Tensor:
        distance = distances(products, anchor_sq, ref_sq)
        return torch.asinh(distance * (1 - anchor_sq).rsqrt()[:, None] * (1 - ref_sq).rsqrt()) * (-2 / root)

    p = _transformed_pairs(to_ball, *args, **kwargs)
    anchor_sq, ref_sq = p.squared_norms()
    with full_precision(p.sim):
        return replace(p, sim=by_rows(similarities, p.sim, anchor_sq, shared=(ref_sq,), width=4 * len(ref_sq)))


@loss(
    paper="Ermolov et al. 2022 (hyperbolic vision transformers), eq 1 to 6",
    formula="mean over positive pairs of  log(1 + sum_neg exp((D_ij - D_ik) / temperature)),  "
    "D = (2/sqrt(c)) asinh(sqrt(c) |u - v| / sqrt((1 - c |u|^2)(1 - c |v|^2))) on the Poincare ball",
    use="Classes with a hierarchy: distances grow exponentially towards the border of the ball.",
    space={"temperature": log(0.05, 1.0), "curvature": log(0.01, 1.0), "radius": log(1.0, 5.0)},
    inputs=Inputs(
        hyperbolic_pairs,
        builder_kwargs={"curvature": 0.1, "radius": 2.3},
        builder_docs={
            "curvature": "Curvature of the ball; towards 0 it becomes Euclidean.",
            "radius": "Longer embeddings are clipped to this length first.",
        },
        pairs=True,
        memory=True,
        call_example="nearkin.losses.pair.hyperbolic_pairs(emb, labels)",
    ),
)
def hyperbolic(p: Pairs, *, temperature: float = 0.2) -> tuple[Tensor, Tensor]:
    """Classify each positive among the negatives of its anchor, by distances on the Poincare ball.

    Args:
        p: Minus geodesic distances [N, M] with masks.
        temperature: Softmax temperature; 0.2.

    Returns:
        Sums per anchor [N], and the number of positive pairs.

    Example:
        >>> emb = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8]])
        >>> float(hyperbolic(hyperbolic_pairs(emb, torch.tensor([0, 0, 1])), temperature=1.0))
        0.1416...
    """
    return positives_among_negatives(p, 1 / temperature), p.pos.sum()
