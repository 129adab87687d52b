"""Tuple losses whose margin or weight depends on the similarities themselves, on angles, or on the classes."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nearkin.losses.contrastive import Views, positives_among_negatives
from nearkin.losses.ranges import integer, linear, log
from nearkin.losses.registry import WHOLE_BATCH, Buffer, Inputs, loss
from nearkin.ops.checks import on_host
from nearkin.ops.geometry import gram, unit, where_float64_exists
from nearkin.ops.pairs import Pairs, as_labels, pair_up
from nearkin.ops.reductions import log_sum_exp, sine, soft_histogram, softplus, sum_of_violations
from nearkin.ops.row_blocks import per_row


@loss(
    family="tuple",
    paper="Sun et al. 2020, eq 4 to 8",
    formula="mean over anchors of  log(1 + sum_pos exp(-scale w_p (s_p - 1 + margin)) "
    "sum_neg exp(scale w_n (s_n - margin))),  "
    "w_p = max(0, 1 + margin - s_p), w_n = max(0, s_n + margin) without gradient",
    use="A strong pair loss whose weights slow down similarities that are already good; robust settings.",
    space={"margin": linear(0.1, 0.5), "scale": log(16, 512)},
)
def circle(p: Pairs, *, margin: float = 0.4, scale: float = 80.0) -> tuple[Tensor, Tensor]:
    """Compare all positives with all negatives, each weighted by its distance from its optimum.

    Args:
        p: Cosines [N, M] with masks.
        margin: Radius of the decision boundary; 0.25 for faces, 0.4 for retrieval.
        scale: Inverse temperature; 256 for faces, 80 for retrieval.

    Returns:
        One value per anchor [N], and the number of anchors with positives and negatives.

    Example:
        >>> emb = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8]])
        >>> float(circle(pair_up(emb, torch.tensor([0, 0, 1])), scale=10.0))
        0.9130...
    """

    def values(q: Pairs) -> Tensor:
        fixed = q.sim.detach()
        pull = torch.relu(1 + margin - fixed) * (q.sim - (1 - margin))
        push = torch.relu(fixed + margin) * (q.sim - margin)
        return softplus(log_sum_exp(pull, q.pos, -scale) + log_sum_exp(push, q.neg, scale))

    return p.per_anchor(values), (p.pos.any(1) & p.neg.any(1)).sum()


@loss(
    family="tuple",
    paper="Wang et al. 2017 (angular), eq 8",
    formula="mean over positive pairs of  log(1 + sum_neg exp(4 t (a + p).n - 2 (1 + t) a.p)),  t = tan^2(angle)",
    use="When the scale of distances varies between classes: angles do not change with it.",
    space={"angle_degrees": linear(30.0, 55.0, legal="(0, 70]")},
    inputs=Inputs(pair_up, pairs=True),
    cost="N^2 D + N^3",
)
def angular(p: Pairs, *, angle_degrees: float = 40.0) -> tuple[Tensor, Tensor]:
    """Bound the angle at the negative in the triangle of anchor, positive and negative.

    Args:
        p: Cosines [N, N] with masks.
        angle_degrees: The bound on the angle; 36 to 55 degrees.

    Returns:
        Sums per anchor [N], and the number of positive pairs.

    Example:
        >>> emb = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8]])
        >>> float(angular(pair_up(emb, torch.tensor([0, 0, 1])), angle_degrees=45.0))
        1.1711...
    """
    p.require_square("angular")
    # The sum over negatives of exp(s_an + s_pn) is a product of two matrices, so memory stays N^2.
    t = math.tan(math.radians(angle_degrees)) ** 2
    columns, is_positive = p.positive_columns()
    positive, has_negatives = p.sim.gather(1, columns), p.neg.any(1, keepdim=True)
    top = (4 * t * p.sim.detach()).masked_fill_(~p.neg, -1e30).amax(1, keepdim=True).masked_fill_(~has_negatives, 0.0)
    logits = (4 * t * p.sim).sub_(top)
    if on_host(p.sim) and int(p.pos.sum() + p.neg.sum()) == p.sim.numel() - len(p.sim):
        # All pairs are used, so a and p have the same negatives: half a product, and a sparse gradient.
        total = gram(logits.masked_fill_(~p.neg, float("-inf")).exp_())
    else:
        weight = logits.exp_()
        total = weight.masked_fill(~p.neg, 0.0) @ weight.t()
    rows = torch.arange(len(columns), device=columns.device)[:, None]
    negatives = total[rows, columns].clamp(min=torch.finfo(total.dtype).tiny).log() + top + top.squeeze(1)[columns]
    values = softplus(negatives - 2 * (1 + t) * positive)
    return values.masked_fill(~(is_positive & has_negatives), 0.0).sum(1), p.pos.sum()


@loss(
    family="tuple",
    paper="Yu and Tao 2019 (tuplet margin)",
    formula="mean over positive pairs of  log(1 + sum_neg exp(scale (cos t_n - cos(t_p - margin))))",
    use="As nt_xent, with a slack for positives: pairs within the margin are not pulled further.",
    space={"margin_degrees": linear(0.0, 20.0), "scale": log(8, 128)},
)
def tuplet_margin(p: Pairs, *, margin_degrees: float = 5.73, scale: float = 64.0) -> tuple[Tensor, Tensor]:
    """Classify each positive among the negatives of its anchor, with a slack angle.

    Args:
        p: Cosines [N, M] with masks.
        margin_degrees: Slack subtracted from the angle of the positive; 5.73 is a tenth of a radian.
        scale: Inverse temperature; 16 to 64.

    Returns:
        Sums per anchor [N], and the number of positive pairs.

    Example:
        >>> emb = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8]])
        >>> float(tuplet_margin(pair_up(emb, torch.tensor([0, 0, 1])), scale=2.0))
        0.6361...
    """
    m = math.radians(margin_degrees)
    values = positives_among_negatives(p, scale, lambda sim: sim * math.cos(m) + sine(sim) * math.sin(m))
    return values, p.pos.sum()


def _hardest_gap(p: Pairs) -> tuple[Tensor, Tensor]:
    """Return d_ij less the distance to the nearest negative of i or j, for positive pairs [N, K]; and which exist."""

    def nearest(q: Pairs) -> Tensor:
        return q.distance().masked_fill(~q.neg, 1e30).amin(1)

    columns, is_positive = p.positive_columns()
    distance = p.per_anchor(lambda q, columns: q.distance().gather(1, columns), columns, lengths=True)
    anchor_sq, ref_sq = p.squared_norms()
    of_refs = Pairs(p.sim.t(), p.pos.t(), p.neg.t(), ref_sq, anchor_sq).per_anchor(nearest, lengths=True)
    near = torch.minimum(p.per_anchor(nearest, lengths=True)[:, None], of_refs[columns])
    used = is_positive & (near < 1e3)
    return (distance - near).masked_fill(~used, 0.0), used


def _gap_histogram(gap: Tensor, used: Tensor, edges: int) -> Tensor:
    """Return the distribution of the gaps over the edges from -2 to 2, each gap shared by its two neighbours."""
    position = (gap + 2) * ((edges - 1) / 4)
    counts = soft_histogram(position.reshape(1, -1), used.reshape(1, -1), edges - 1)[0]
    return counts / counts.sum().clamp(min=1e-9)


def _update_histogram(p: Pairs, state: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
    old, (gap, used) = state["gap_histogram"], _hardest_gap(p)
    new = _gap_histogram(gap, used, len(old))
    weight = torch.where(old.sum() > 0, settings["momentum"], 1.0) * used.any()
    return {"gap_histogram": (1 - weight) * old + weight * new}


@loss(
    family="tuple",
    paper="Zhang and Rusinkiewicz 2019",
    formula="mean over positive pairs of  CDF(g_ij) g_ij,  g_ij = d_ij - min(nearest negative of i, of j),  "
    "CDF the running distribution of g",
    use="Triplet loss without a margin to tune: hard triplets are those that are hard compared with recent ones.",
    space={"momentum": log(0.001, 1.0, legal="[0, 1]"), "edges": integer(5, 50)},
    inputs=replace(
        WHOLE_BATCH,
        builder_kwargs={"edges": 11},
        builder_docs={"edges": "Number of edges of the running histogram, from -2 to 2."},
        dims={"E": "edges"},
        buffers=(Buffer("gap_histogram", "E"),),
        update=_update_histogram,
    ),
)
def dynamic_soft_margin(
    p: Pairs, *, momentum: float = 0.1, gap_histogram: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Weight each positive pair's gap to the hardest negative by the share of recent gaps that were easier.

    Args:
        p: Cosines [N, M] with masks.
        momentum: Weight of the batch in the running histogram.
        gap_histogram: Running distribution of the gaps; that of the batch by default.

    Returns:
        Sums per anchor [N], and the number of positive pairs with negatives.

    Example:
        >>> emb = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8]])
        >>> float(dynamic_soft_margin(pair_up(emb, torch.tensor([0, 0, 1]))))
        0.0440...
    """
    gap, used = _hardest_gap(p)
    fixed = gap.detach()
    edges = 11 if gap_histogram is None else len(gap_histogram)
    density = _gap_histogram(fixed, used, edges)
    if gap_histogram is not None:  # all zero before the first step of training
        density = torch.where(gap_histogram.sum() > 0, gap_histogram.to(density.dtype), density)
    index = ((fixed + 2) * ((edges - 1) / 4)).floor().clamp(0, edges - 1).long()
    weight = density.cumsum(0)[index]
    return (weight * gap).sum(1), used.sum()


def labelled_pairs(emb: Tensor, labels: Any, refs: Tensor | None = None, ref_labels: Any = None) -> Views:
    """Pair up a batch as `pair_up` does, and attach the labels."""
    p = pair_up(emb, labels, refs, ref_labels)
    own, others = (as_labels(x).to(p.sim.device) for x in (labels, labels if ref_labels is None else ref_labels))
    return Views(p.sim, p.pos, p.neg, p.anchor_sq, p.ref_sq, dim=p.dim, anchors=own, refs=others)


def class_gaps(emb: Tensor, labels: Tensor, num_classes: int, levels: int = 16) -> Tensor:
    """Compute how far apart classes are in a tree of classes, less the spread of the first of the two.

    Classes are merged by single linkage of their mean squared distances, at the thresholds d_l = d_0 + l (4 - d_0) /
    levels, with d_0 the mean squared distance within classes. The result [C, C] is the threshold at which the two
    classes merge, minus the mean squared distance within the first.
    """
    f = unit(where_float64_exists(emb).double())
    labels = labels.to(f.device)
    size = torch.zeros(num_classes, dtype=f.dtype, device=f.device).index_add(0, labels, torch.ones_like(f[:, 0]))
    means = f.new_zeros(num_classes, f.shape[1]).index_add(0, labels, f) / size.clamp(min=1)[:, None]
    within = 2 * (1 - means.square().sum(1)) * size / (size - 1).clamp(min=1) * (size > 1)
    base = within.sum() / (size > 1).sum().clamp(min=1)
    merged = 2 - 2 * means @ means.t()
    for middle in range(num_classes):  # single linkage: the largest step of the smallest path between two classes
        torch.minimum(merged, torch.maximum(merged[:, middle, None], merged[None, middle]), out=merged)
    level = ((merged - base) / (4 - base) * levels).floor().add(1).clamp(1, levels)
    return base + level * (4 - base) / levels - within[:, None]


@loss(
    family="tuple",
    paper="Ge et al. 2018 (HTL), eq 4 to 6",
    formula="mean over triplets of  (1/2) max(0, |a - p|^2 - |a - n|^2 + margin + d(y_a, y_n) - within(y_a)),  "
    "d the level at which the classes merge",
    use="As triplet with margins from a tree of the classes: Objective.refresh(labels, emb) builds it, once per epoch.",
    space={"margin": linear(0.02, 0.5)},
    inputs=Inputs(
        labelled_pairs,
        pairs=True,
        buffers=(Buffer("class_gaps", "CC"),),
        refresh=lambda emb, labels, num_classes: {"class_gaps": class_gaps(emb, labels, num_classes)},
        call_example="nearkin.losses.margins.labelled_pairs(emb, labels)",
    ),
    cost="N^2 D + N^2 log N",
)
def hierarchical_triplet(p: Pairs, *, margin: float = 0.1, class_gaps: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Triplet loss over all triplets, with a margin that grows with the distance of the two classes in a tree.

    Without class gaps it is the triplet loss with half the margin, in cosines.

    Args:
        p: Cosines [N, M] with masks and labels.
        margin: The constant part of the margin, as a squared distance.
        class_gaps: [C, C] from `class_gaps`; 0 by default.

    Returns:
        Sums per anchor [N], and the number of triplets.

    Example:
        >>> emb = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8]])
        >>> float(hierarchical_triplet(pair_up(emb, torch.tensor([0, 0, 1])), margin=0.2))
        0.1300...
    """
    count = (p.pos.sum(1) * p.neg.sum(1)).sum()
    if class_gaps is None or not isinstance(p, Views) or p.anchors is None:
        return sum_of_violations(p, per_row(margin / 2, p.sim)[:, None]), count
    return sum_of_violations(p, (class_gaps.to(p.sim.dtype)[p.anchors] + margin) / 2, p.refs), count
