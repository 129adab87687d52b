"""Ranking losses: smooth or binned forms of average precision, recall and the order of positives and negatives."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from nearkin.losses.ranges import choice, integer, linear, log
from nearkin.losses.registry import WHOLE_BATCH, loss
from nearkin.ops.checks import on_host
from nearkin.ops.pairs import Pairs
from nearkin.ops.reductions import masked_sum, row_mean, soft_histogram
from nearkin.ops.row_blocks import by_rows

_RANK_COST, _WIDTH = "N^2 D + N^2 P", log(0.001, 0.1)


def _per_query(p: Pairs, value: Callable[[Pairs], Tensor]) -> tuple[Tensor, Tensor]:
    """Return a value for each query, 0 without positives, and the number of queries with positives."""
    # The largest buffers are [n, P, M]: every positive of a query is compared with all references.
    most = int(p.pos.sum(1).max()) if on_host(p.sim) else p.sim.shape[1]

    def values(q: Pairs) -> Tensor:
        return value(q).masked_fill(~q.pos.any(1), 0.0)

    return p.per_anchor(values, width=max(1, most) * p.sim.shape[1]), p.pos.any(1).sum()


def _positives(p: Pairs, with_query: bool = False) -> tuple[Tensor, Tensor]:
    """Return the positives' similarities [N, P] and which exist; the query itself, with cosine 1, as one more."""
    columns, valid = p.positive_columns()
    values = p.sim.gather(1, columns).masked_fill(~valid, 0.0)
    if with_query:
        values = torch.nn.functional.pad(values, (1, 0), value=1.0)
        valid = torch.cat([p.pos.any(1, keepdim=True), valid], 1)
    return values, valid


def _count(step: Callable[[Tensor], Tensor], values: Tensor, sim: Tensor, mask: Tensor) -> Tensor:
    """Compute sum_k step(sim[i, k] - values[i, a]) over a mask of references k. Returns [N, P]."""
    steps = step(sim[:, None] - values[:, :, None])
    return (steps @ mask.to(steps.dtype)[:, :, None]).squeeze(2)


def _sigmoid(temperature: float) -> Callable[[Tensor], Tensor]:
    return lambda difference: difference.div_(temperature).sigmoid_()


def _ranks(p: Pairs, values: Tensor, valid: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the smooth number of positives, and of negatives, that are ranked before each positive [N, P]."""
    step = _sigmoid(temperature)
    before = _count(step, values, values, valid) - 0.5  # itself: a sigmoid of 0
    return before, _count(step, values, p.sim, p.neg)


@loss(
    paper="Brown et al. 2020, eq 7",
    formula="mean over queries of  1 - (1/P) sum_pos (1 + before_pos) / (1 + before_pos + before_neg),  "
    "before = sum_k sigmoid((s_ik - s_ij) / temperature)",
    use="To optimise average precision directly; with large batches that have several samples of each class.",
    space={"temperature": _WIDTH, "with_query": choice(False, True)},
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

    def value(q: Pairs) -> Tensor:
        similarities, valid = _positives(q, with_query)
        positives, negatives = _ranks(q, similarities, valid, temperature)
        return 1 - row_mean((1 + positives) / (1 + positives + negatives), valid)

    return _per_query(p, value)


@loss(
    paper="Patel et al. 2022, eq 6 and 7",
    formula="mean over queries and k = 1, 2, 4 .. k_max of  "
    "1 - (1/P) sum_pos sigmoid((k - 1 - before_j) / rank_width),  before = sum_k sigmoid((s_ik - s_ij) / temperature)",
    use="To optimise recall@k directly; needs very large batches (the paper uses 4000).",
    space={"temperature": _WIDTH, "rank_width": log(0.1, 10), "k_max": integer(1, 32)},
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
    powers = [2**i for i in range(k_max.bit_length())]

    def value(q: Pairs) -> Tensor:
        similarities, valid = _positives(q)
        positives, negatives = _ranks(q, similarities, valid, temperature)
        before = positives + negatives
        recall = [row_mean(torch.sigmoid((k - 1 - before) / rank_width), valid) for k in powers]
        return 1 - torch.stack(recall).mean(0)

    return _per_query(p, value)


@loss(
    paper="Ramzi et al. 2021 (ROADMAP), eq 4 to 8",
    formula="(1 - weight) (1 - mean_pos rank_pos / (rank_pos + before_neg)) "
    "+ weight (mean_pos max(0, 0.9 - s) + mean_neg max(0, s - 0.6)),  before_neg an upper bound, linear above 0",
    use="As smooth_ap, but the gradient of a badly ranked positive does not vanish.",
    space={"temperature": _WIDTH, "slope": log(10, 1000), "weight": linear(0.0, 1.0, legal="[0, 1]")},
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

    def value(q: Pairs) -> Tensor:
        similarities, valid = _positives(q)
        rank = 1 + _count(lambda t: (t > 0).to(t.dtype), similarities, similarities, valid)
        bound = 1 - row_mean(rank / (rank + _count(upper_step, similarities, q.sim, q.neg)), valid)
        calibration = row_mean(torch.relu(0.9 - q.sim), q.pos) + row_mean(torch.relu(q.sim - 0.6), q.neg)
        return (1 - weight) * bound + weight * calibration

    return _per_query(p, value)


@loss(
    paper="Li et al. 2022 (PNP)",
    formula="mean over queries of  mean_pos f(r_j),  r = sum_neg sigmoid((s_ik - s_ij) / temperature);  "
    "f(r) = r (O), log(1 + r) (Ds), 1 - (1 + r)^-alpha (Dq), (1 + r) log(1 + r) (Iu), (b r - log(1 + b r)) / b^2 (Ib)",
    use="When smooth_ap stalls: it penalises only negatives before positives; Dq weights well ranked ones most.",
    space={
        "temperature": _WIDTH,
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
    penalty: dict[str, Callable[[Tensor], Tensor]] = {
        "O": lambda r: r,
        "Ds": torch.log1p,
        "Dq": lambda r: 1 - (1 + r) ** -alpha,
        "Iu": lambda r: (1 + r) * torch.log1p(r),
        "Ib": lambda r: (b * r - torch.log1p(b * r)) / b**2,
    }

    def value(q: Pairs) -> Tensor:
        similarities, valid = _positives(q, with_query)
        return row_mean(penalty[variant](_count(_sigmoid(temperature), similarities, q.sim, q.neg)), valid)

    return _per_query(p, value)


@loss(
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

    def value(q: Pairs) -> Tensor:
        position = q.sq_distance().clamp(0.0, 4.0) * (bins / 4)
        positives, negatives = (soft_histogram(position, mask, bins) for mask in (q.pos, q.neg))
        hits = positives.cumsum(1)
        total = hits + negatives.cumsum(1)
        precision = torch.where(hits > 0, hits, 0.0) / torch.where(hits > 0, total, 1.0)
        found = q.pos.any(1)
        return torch.where(found, 1 - (positives * precision).sum(1) / q.pos.sum(1).clamp(min=1), 0.0)

    return p.per_anchor(value, lengths=True, width=2 * p.sim.shape[1]), p.pos.any(1).sum()  # int64 takes two


@loss(
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

    def counts(sim: Tensor, mask: Tensor) -> Tensor:
        return soft_histogram((sim.clamp(-1.0, 1.0) + 1) * (bins / 2), mask, bins)

    width = 3 * p.sim.shape[1]
    masks = (p.pos, p.neg)
    positives, negatives = (by_rows(counts, p.sim, m, width=width).sum(0) / m.sum().clamp(min=1) for m in masks)
    return (negatives * positives.cumsum(0)).sum()


@loss(
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

    def values(q: Pairs) -> Tensor:
        distance = q.distance()
        pull, push = distance - (alpha - margin), alpha - distance
        near = q.neg & (push > 0)
        weight = torch.softmax(torch.where(near, temperature * push, -1e30), dim=1)
        return (1 - balance) * row_mean(pull, q.pos & (pull > 0)) + balance * masked_sum(weight * push, near)

    return p.per_anchor(values, lengths=True)
