"""Ranking losses: smooth or binned forms of average precision, recall and the order of positives and negatives."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nearkin.losses._masked import EMPTY, masked_sum, positive_values, row_mean, sum_over_references
from nearkin.losses.ranges import choice, integer, linear, log
from nearkin.losses.registry import WHOLE_BATCH, loss
from nearkin.ops.pairs import Pairs

_RANK_COST = "N^2 D + N^2 P"


def _positives(p: Pairs, with_query: bool) -> tuple[Tensor, Tensor]:
    """Return the positives' similarities [N, P] and which exist; the query itself, with cosine 1, as one more."""
    values, valid = positive_values(p)
    if with_query:
        values = torch.nn.functional.pad(values, (1, 0), value=1.0)
        valid = torch.cat([valid[:, :1], valid], 1)  # the first exists if any does
    return values, valid


def _ranks(p: Pairs, values: Tensor, valid: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the smooth number of positives, and of negatives, that are ranked before each positive [N, P]."""

    def step(difference: Tensor) -> Tensor:
        return torch.sigmoid(difference / temperature)

    before = sum_over_references(step, values, values, valid) - 0.5  # itself: a sigmoid of 0
    return before, sum_over_references(step, values, p.sim, p.neg)


@loss(
    family="ranking",
    paper="Brown et al. 2020, eq 7",
    formula="mean over queries of  1 - (1/P) sum_pos (1 + before_pos) / (1 + before_pos + before_neg),  "
    "before = sum_k sigmoid((s_ik - s_ij) / temperature)",
    use="To optimise average precision directly; with large batches that have several samples of each class.",
    space={"temperature": log(0.001, 0.1), "with_query": choice(False, True)},
    cost=_RANK_COST,
)
def smooth_ap(p: Pairs, *, temperature: float = 0.01, with_query: bool = False) -> tuple[Tensor, Tensor]:
    """One minus the average precision of every query, with sigmoids for the steps of the ranks.

    Args:
        p: Cosines [N, M] with masks.
        temperature: Width of the sigmoid, as a cosine.
        with_query: Count the query itself as a positive, as the published code does.

    Returns:
        One value per query [N], 0 without positives, and the number of queries with positives.

    Example:
        >>> emb = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8]])
        >>> round(float(smooth_ap(pair_up(emb, torch.tensor([0, 0, 1])))), 4)
        0.25
    """
    values, valid = _positives(p, with_query)
    positives, negatives = _ranks(p, values, valid, temperature)
    precision = (1 + positives) / (1 + positives + negatives)
    found = p.pos.any(1)
    return torch.where(found, 1 - row_mean(precision, valid), 0.0), found.sum()


@loss(
    family="ranking",
    paper="Patel et al. 2022, eq 6 and 7",
    formula="mean over queries and k = 1, 2, 4 .. k_max of  "
    "1 - (1/P) sum_pos sigmoid((k - 1 - before_j) / rank_width),  before = sum_k sigmoid((s_ik - s_ij) / temperature)",
    use="To optimise recall@k directly; needs very large batches (the paper uses 4000).",
    space={"temperature": log(0.001, 0.1), "rank_width": log(0.1, 10), "k_max": integer(1, 32)},
    cost=_RANK_COST,
)
def recall_surrogate(
    p: Pairs, *, temperature: float = 0.01, rank_width: float = 1.0, k_max: int = 16
) -> tuple[Tensor, Tensor]:
    """One minus the share of positives among the first k, with sigmoids for the ranks and for the cut at k.

    Args:
        p: Cosines [N, M] with masks.
        temperature: Width of the sigmoid of the ranks, as a cosine.
        rank_width: Width of the sigmoid at k, in ranks.
        k_max: The largest k; the values 1, 2, 4, ... up to it are averaged.

    Returns:
        One value per query [N], 0 without positives, and the number of queries with positives.

    Example:
        >>> emb = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8]])
        >>> float(recall_surrogate(pair_up(emb, torch.tensor([0, 0, 1])), k_max=1))
        0.6155...
    """
    values, valid = positive_values(p)
    before = sum(_ranks(p, values, valid, temperature))
    powers = [2**i for i in range(k_max.bit_length())]
    recall = sum(row_mean(torch.sigmoid((k - 1 - before) / rank_width), valid) for k in powers) / len(powers)
    found = p.pos.any(1)
    return torch.where(found, 1 - recall, 0.0), found.sum()


@loss(
    family="ranking",
    paper="Ramzi et al. 2021 (ROADMAP), eq 4 to 8",
    formula="(1 - weight) (1 - mean_pos rank_pos / (rank_pos + before_neg)) "
    "+ weight (mean_pos max(0, 0.9 - s) + mean_neg max(0, s - 0.6)),  before_neg an upper bound, linear above 0",
    use="As smooth_ap, but the gradient of a badly ranked positive does not vanish.",
    space={
        "temperature": log(0.001, 0.1),
        "slope": log(10, 1000),
        "weight": linear(0.0, 1.0, legal="[0, 1]"),
    },
    cost=_RANK_COST,
)
def sup_ap(p: Pairs, *, temperature: float = 0.01, slope: float = 100.0, weight: float = 0.5) -> tuple[Tensor, Tensor]:
    """An upper bound of one minus average precision, and a calibration of the similarities.

    The step that counts a negative that is more similar by t is bounded from above: sigmoid(t / temperature) below 0,
    half more up to delta, and linear beyond; the sigmoid of delta is 0.99.

    Args:
        p: Cosines [N, M] with masks.
        temperature: Width of the sigmoid, as a cosine.
        slope: Slope of the linear part.
        weight: Weight of the calibration; 0.5.

    Returns:
        One value per query [N], 0 without positives, and the number of queries with positives.

    Example:
        >>> emb = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8]])
        >>> float(sup_ap(pair_up(emb, torch.tensor([0, 0, 1])), weight=0.0))
        0.4640...
    """
    delta = temperature * math.log(99.0)  # where the sigmoid is 0.99

    def upper_step(t: Tensor) -> Tensor:
        near = torch.sigmoid(t.clamp(max=delta) / temperature) + 0.5 * (t >= 0)
        return near + slope * torch.relu(t - delta)

    values, valid = positive_values(p)
    rank = 1 + sum_over_references(lambda t: (t > 0).to(t.dtype), values, values, valid)
    bound = 1 - row_mean(rank / (rank + sum_over_references(upper_step, values, p.sim, p.neg)), valid)
    calibration = row_mean(torch.relu(0.9 - p.sim), p.pos) + row_mean(torch.relu(p.sim - 0.6), p.neg)
    found = p.pos.any(1)
    return torch.where(found, (1 - weight) * bound + weight * calibration, 0.0), found.sum()


@loss(
    family="ranking",
    paper="Li et al. 2022 (PNP)",
    formula="mean over queries of  mean_pos f(r_j),  r = sum_neg sigmoid((s_ik - s_ij) / temperature);  "
    "f(r) = r (O), log(1 + r) (Ds), 1 - (1 + r)^-alpha (Dq), (1 + r) log(1 + r) (Iu), (b r - log(1 + b r)) / b^2 (Ib)",
    use="When smooth_ap stalls: it penalises only negatives before positives; Dq weights well ranked ones most.",
    space={
        "temperature": log(0.001, 0.1),
        "alpha": log(0.5, 8),
        "b": log(0.5, 8),
        "variant": choice("O", "Ds", "Dq", "Iu", "Ib"),
        "with_query": choice(False, True),
    },
    cost=_RANK_COST,
)
def pnp(
    p: Pairs,
    *,
    temperature: float = 0.01,
    alpha: float = 1.0,
    b: float = 2.0,
    variant: str = "Dq",
    with_query: bool = False,
) -> tuple[Tensor, Tensor]:
    """Penalise the negatives that are ranked before each positive.

    Args:
        p: Cosines [N, M] with masks.
        temperature: Width of the sigmoid, as a cosine.
        alpha: Exponent of variant Dq.
        b: Sharpness of variant Ib.
        variant: The function of the rank: O, Ds, Dq, Iu or Ib.
        with_query: As in `smooth_ap`.

    Returns:
        One value per query [N], 0 without positives, and the number of queries with positives.

    Example:
        >>> emb = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8]])
        >>> round(float(pnp(pair_up(emb, torch.tensor([0, 0, 1])), variant="O")), 4)
        0.5
    """
    values, valid = _positives(p, with_query)
    r = sum_over_references(lambda t: torch.sigmoid(t / temperature), values, p.sim, p.neg)
    penalty = {
        "O": lambda: r,
        "Ds": lambda: torch.log1p(r),
        "Dq": lambda: 1 - (1 + r) ** -alpha,
        "Iu": lambda: (1 + r) * torch.log1p(r),
        "Ib": lambda: (b * r - torch.log1p(b * r)) / b**2,
    }[variant]()
    return row_mean(penalty, valid), valid.any(1).sum()


def _soft_histogram(x: Tensor, mask: Tensor, bins: int) -> Tensor:
    """Spread each entry of x, in [0, bins], over its two nearest bin edges. Returns counts per row [N, bins + 1]."""
    lower = x.detach().nan_to_num().floor().clamp(0, bins - 1)
    share = torch.where(mask, x - lower, 0.0)
    index, rest = lower.long(), mask.to(x.dtype) - share
    return x.new_zeros(len(x), bins + 1).scatter_add(1, index, rest).scatter_add(1, index + 1, share)


@loss(
    family="ranking",
    paper="Cakir et al. 2019, eq 6",
    formula="mean over queries of  1 - (1/P) sum_z h_pos(z) H_pos(z) / H(z),  "
    "soft histograms h of squared distances and their cumulative sums H",
    use="Average precision at the cost of pairs; coarser than smooth_ap, and for very large batches.",
    space={"bins": integer(5, 50)},
)
def fast_ap(p: Pairs, *, bins: int = 10) -> tuple[Tensor, Tensor]:
    """One minus the average precision of every query, from soft histograms of squared distances.

    Args:
        p: Cosines [N, M] with masks.
        bins: Number of bins between the squared distances 0 and 4.

    Returns:
        One value per query [N], 0 without positives, and the number of queries with positives.

    Example:
        >>> emb = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8]])
        >>> round(float(fast_ap(pair_up(emb, torch.tensor([0, 0, 1])))), 4)
        0.25
    """
    position = p.sq_distance().clamp(0.0, 4.0) * (bins / 4)
    positives, negatives = (_soft_histogram(position, mask, bins) for mask in (p.pos, p.neg))
    hits = positives.cumsum(1)
    total = hits + negatives.cumsum(1)
    precision = torch.where(hits > 0, hits, 0.0) / torch.where(hits > 0, total, 1.0)
    found = p.pos.any(1)
    value = 1 - (positives * precision).sum(1) / p.pos.sum(1).clamp(min=1)
    return torch.where(found, value, 0.0), found.sum()


@loss(
    family="ranking",
    paper="Ustinova and Lempitsky 2016, eq 5",
    formula="sum_r h_neg(r) sum_{q <= r} h_pos(q),  soft histograms h of all cosines, each with sum 1",
    use="A loss without a margin: the probability that a random negative is more similar than a random positive.",
    space={"bins": integer(20, 200)},
    reductions=("mean",),
    inputs=WHOLE_BATCH,
)
def histogram(p: Pairs, *, bins: int = 100) -> Tensor:
    """The probability that a random negative pair is more similar than a random positive pair.

    Args:
        p: Cosines [N, M] with masks.
        bins: Number of bins between the cosines -1 and 1.

    Returns:
        The 0-dim loss; 0 without positives or without negatives.

    Example:
        >>> emb = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8]])
        >>> round(float(histogram(pair_up(emb, torch.tensor([0, 0, 1])), bins=20)), 4)
        0.5
    """
    position = (p.sim.clamp(-1.0, 1.0) + 1) * (bins / 2)
    positives, negatives = (
        _soft_histogram(position, mask, bins).sum(0) / mask.sum().clamp(min=1) for mask in (p.pos, p.neg)
    )
    return (negatives * positives.cumsum(0)).sum()


@loss(
    family="ranking",
    paper="Wang et al. 2019 (ranked list)",
    formula="mean_i of  (1 - balance) mean_P [d_ij - (alpha - margin)]_+  +  "
    "balance sum_N w_ik [alpha - d_ik]_+ / sum_N w_ik,  w = exp(temperature (alpha - d)) over the violations",
    use="A robust set loss: positives need only be inside a ball, so the structure within a class survives.",
    space={
        "alpha": linear(0.8, 1.6),
        "margin": linear(0.1, 0.8),
        "temperature": linear(0.0, 20.0, legal="[0, inf)"),
        "balance": linear(0.0, 1.0, legal="[0, 1]"),
    },
)
def ranked_list(
    p: Pairs, *, alpha: float = 1.2, margin: float = 0.4, temperature: float = 10.0, balance: float = 0.5
) -> Tensor:
    """Pull the positives of each query into a ball, and push the negatives out of a larger one, nearest first.

    Args:
        p: Cosines [N, M] with masks.
        alpha: Radius of the ball without negatives, as a distance of unit vectors.
        margin: Difference of the radii of the two balls.
        temperature: How much the nearest negatives dominate; 0 weights all violations alike.
        balance: Weight of the negatives; the positives have the rest.

    Returns:
        One value per query [N].

    Example:
        >>> emb = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8]])
        >>> float(ranked_list(pair_up(emb, torch.tensor([0, 0, 1]))))
        0.3564...
    """
    distance = p.distance()
    pull, push = distance - (alpha - margin), alpha - distance
    near = p.neg & (push > 0)
    weight = torch.softmax(torch.where(near, temperature * push, EMPTY), dim=1)
    return (1 - balance) * row_mean(pull, p.pos & (pull > 0)) + balance * masked_sum(weight * push, near)
