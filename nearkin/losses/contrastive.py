"""Contrastive losses: each positive is identified among the other samples of the batch, or of a second tower."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nearkin.losses.ranges import linear, log
from nearkin.losses.registry import BATCH, WHOLE_BATCH, Inputs, LearnedScalar, loss
from nearkin.ops.checks import squared_norms
from nearkin.ops.pairs import Pairs, pair_up
from nearkin.ops.reductions import log_sum_exp, masked_mean, masked_sum, row_mean, softplus
from nearkin.ops.row_blocks import by_rows, per_row


@loss(
    paper="Khosla et al. 2020, eq 2",
    formula="mean over anchors with positives of  "
    "-(1/P) sum_pos [ s_ij / temperature - log sum_{k != i} exp(s_ik / temperature) ]",
    use="A strong default for labelled batches of any composition; two augmented views per sample help further.",
    space={"temperature": log(0.02, 0.5)},
)
def supcon(p: Pairs, *, temperature: float = 0.1) -> tuple[Tensor, Tensor]:
    """Supervised contrastive loss: every positive is classified among all other samples.

    Args:
        p: Cosines [N, M] with masks.
        temperature: Softmax temperature; 0.05 to 0.2.

    Returns:
        One value per anchor [N], 0 without positives, and the number of anchors with positives.

    Example:
        >>> emb = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8]])
        >>> float(supcon(pair_up(emb, torch.tensor([0, 0, 1])), temperature=0.5))
        0.3711...
    """
    total, has_positives = log_sum_exp(p.sim, p.pos | p.neg, 1 / temperature), p.pos.any(1)
    return torch.where(has_positives, total - row_mean(p.sim, p.pos) / temperature, 0.0), has_positives.sum()


@loss(
    paper="Chen et al. 2020 (SimCLR); Sohn 2016",
    formula="mean over positive pairs of  log(1 + sum_neg exp((s_ik - s_ij) / temperature))",
    use="Two views per sample, or labels: unlike supcon, positives do not compete with each other.",
    space={"temperature": log(0.02, 0.5)},
)
def nt_xent(p: Pairs, *, temperature: float = 0.07) -> tuple[Tensor, Tensor]:
    """Normalised temperature-scaled cross entropy: each positive is classified among the negatives of its anchor.

    Args:
        p: Cosines [N, M] with masks.
        temperature: Softmax temperature; 0.05 to 0.2.

    Returns:
        Sums per anchor [N], and the number of positive pairs.

    Example:
        >>> emb = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8]])
        >>> float(nt_xent(pair_up(emb, torch.tensor([0, 0, 1])), temperature=0.5))
        0.3711...
    """
    return positives_among_negatives(p, 1 / temperature), p.pos.sum()


def positives_among_negatives(
    p: Pairs, scale: float, of_positive: Callable[[Tensor], Tensor] = lambda sim: sim
) -> Tensor:
    """Return, per anchor, the sum over its positives of log(1 + sum_neg exp(scale (s_n - of_positive(s_p))))."""
    columns, is_positive = p.positive_columns()
    negatives = log_sum_exp(p.sim, p.neg, scale)[:, None]
    terms = softplus(negatives - scale * of_positive(p.sim.gather(1, columns)))
    return terms.masked_fill(~is_positive, 0.0).sum(1)


@loss(
    paper="van den Oord et al. 2018; symmetric form of Radford et al. 2021 (CLIP)",
    formula="mean over positive pairs of  (1/2) [ log sum_k exp((s_ik - s_ij) / temperature) "
    "+ log sum_k exp((s_kj - s_ij) / temperature) ]",
    use="Two towers (image and text, two views): pair_up(a, labels, b, labels); learn_temperature as CLIP does.",
    space={"temperature": log(0.01, 0.5)},
    inputs=replace(
        WHOLE_BATCH,  # both directions
        builder_kwargs={"learn_temperature": False},
        builder_docs={"learn_temperature": "Learn the temperature as a parameter; it stays above 0.01."},
        learned_scalars=(LearnedScalar("temperature", switch="learn_temperature"),),
    ),
)
def info_nce(p: Pairs, *, temperature: float | Tensor = 0.07) -> tuple[Tensor, Tensor]:
    """Cross entropy of each positive pair among all pairs of its row, and among all pairs of its column.

    Args:
        p: Cosines [N, M] with masks; of a batch with itself both directions are equal.
        temperature: Softmax temperature, not below 0.01; a 0-dim tensor is learned.

    Returns:
        Sums per anchor [N], and the number of positive pairs.

    Example:
        >>> a, b, labels = torch.eye(2), torch.tensor([[0.6, 0.8], [0.0, 1.0]]), torch.tensor([0, 1])
        >>> float(info_nce(pair_up(a, labels, b, labels), temperature=0.5))
        0.4540...
    """
    scale = 1 / torch.as_tensor(temperature, dtype=p.sim.dtype, device=p.sim.device).clamp(min=0.01)

    def log_sums(sim: Tensor, used: Tensor, scale: Tensor) -> Tensor:
        return log_sum_exp(sim * scale[:, None], used)

    def values(q: Pairs, scale: Tensor, of_columns: Tensor) -> Tensor:
        columns, is_positive = q.positive_columns()
        both = log_sums(q.sim, q.pos | q.neg, scale)[:, None] + of_columns[columns]
        return (both / 2 - q.sim.gather(1, columns) * scale[:, None]).masked_fill(~is_positive, 0.0).sum(1)

    of_columns = by_rows(log_sums, p.sim.t(), (p.pos | p.neg).t(), per_row(scale, p.sim.t()))
    return p.per_anchor(values, per_row(scale, p.sim), shared=(of_columns,), width=2 * p.sim.shape[1]), p.pos.sum()


@loss(
    paper="Zhai et al. 2023 (SigLIP)",
    formula="mean_i of  sum_j log(1 + exp(-z_ij (scale s_ij + bias))),  z = 1 (same class), -1 (other class)",
    use="Two towers, large batches: no softmax couples the pairs. learn_scale learns both settings, as in the paper.",
    space={"scale": log(1, 100), "bias": linear(-20.0, 5.0)},
    inputs=replace(
        BATCH,
        builder_kwargs={"learn_scale": False},
        builder_docs={"learn_scale": "Learn scale and bias as parameters, with 100 times the network's learning rate."},
        learned_scalars=tuple(LearnedScalar(name, lr=100.0, switch="learn_scale") for name in ("scale", "bias")),
    ),
)
def siglip(p: Pairs, *, scale: float | Tensor = 10.0, bias: float | Tensor = -10.0) -> Tensor:
    """Classify every pair on its own as same class or not, with a sigmoid.

    Args:
        p: Cosines [N, M] with masks.
        scale: Factor on the cosine; a 0-dim tensor is learned.
        bias: Logit of a pair with cosine 0; it balances the many negatives; a 0-dim tensor is learned.

    Returns:
        One value per anchor [N].

    Example:
        >>> emb = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8]])
        >>> float(siglip(pair_up(emb, torch.tensor([0, 0, 1]))))
        0.4862...
    """

    def values(q: Pairs, scale: Tensor, bias: Tensor) -> Tensor:
        logits = scale[:, None] * q.sim + bias[:, None]
        return masked_sum(softplus(torch.where(q.pos, -logits, logits)), q.pos | q.neg)

    return p.per_anchor(values, per_row(scale, p.sim), per_row(bias, p.sim))


@dataclass(frozen=True, eq=False)
class Views(Pairs):
    """Pairs with what they compare: the embeddings [N, D] and [M, D], or the labels [N] and [M]."""

    anchors: Tensor | None = None
    refs: Tensor | None = None


def views(emb: Tensor, labels: Tensor, refs: Tensor | None = None, ref_labels: Tensor | None = None) -> Views:
    """Pair up a batch with itself or with the second tower, by dot products, and attach the embeddings."""
    p = pair_up(emb, labels, refs, ref_labels, metric="dot")
    anchors = emb.to(p.sim.dtype)
    refs = anchors if refs is None else refs.to(p.sim.dtype)
    for x in (anchors, refs):
        squared_norms(x, degree=4)  # of which the covariances are squares
    return Views(p.sim, p.pos, p.neg, p.anchor_sq, p.ref_sq, dim=p.dim, anchors=anchors, refs=refs)


@loss(
    paper="Bardes et al. 2022",
    formula="invariance * mean_pos |x_i - x_j|^2 / D  +  variance * mean_d max(0, 1 - std_d)  "
    "+  covariance * 2 (1/D) sum_{d != e} cov_de^2",
    use="Two views without negatives; classes act as views. It works on coordinates: do not normalise embeddings.",
    space={"invariance": log(1, 100), "variance": log(1, 100), "covariance": log(0.1, 10)},
    inputs=Inputs(views, pairs=True, call_example="nearkin.losses.contrastive.views(emb, labels)"),
    reductions=("mean",),
)
def vicreg(p: Pairs, *, invariance: float = 25.0, variance: float = 25.0, covariance: float = 1.0) -> Tensor:
    """Pull positives together; keep every dimension's spread above 1 and the dimensions uncorrelated.

    With a second tower, spread and correlation are computed for each and averaged (spread) or added (correlation).

    Args:
        p: Dot products [N, M] with masks, and the embeddings.
        invariance: Weight of the squared distance of positives, per dimension.
        variance: Weight of the spread.
        covariance: Weight of the correlation.

    Returns:
        The 0-dim loss.

    Example:
        >>> emb = torch.tensor([[2.0, 0.0], [-2.0, 0.0], [0.0, 2.0], [0.0, -2.0]])
        >>> float(vicreg(views(emb, torch.tensor([0, 0, 1, 1]))))
        200.0
    """
    pull = invariance * masked_mean(p.sq_distance(), p.pos) / (p.dim or 1)
    if not isinstance(p, Views) or p.anchors is None or p.refs is None:
        return pull
    (spread_a, correlation_a), (spread_b, correlation_b) = map(_spread_and_correlation, (p.anchors, p.refs))
    return pull + variance * (spread_a + spread_b) / 2 + covariance * (correlation_a + correlation_b)


def _spread_and_correlation(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean shortfall of the standard deviations from 1, and the sum of squared covariances over D."""
    centred = x - x.mean(0)
    cov = centred.t() @ centred / max(1, len(x) - 1)
    deviation = (cov.diagonal() + 1e-4).sqrt()
    off_diagonal = cov.square().sum() - cov.diagonal().square().sum()
    return torch.relu(1 - deviation).mean(), off_diagonal / x.shape[1]


@loss(
    paper="Snell et al. 2017, with the learned scale of Oreshkin et al. 2018 (TADAM)",
    formula="mean over anchors with positives of  -log softmax_c(-scale |x_i - mean_c|^2)_y,  "
    "the own mean without x_i itself",
    use="Batches of few classes with many samples each, as in few-shot learning.",
    space={"scale": log(1, 100)},
    inputs=Inputs(
        pair_up,
        builder_kwargs={"learn_scale": False},
        builder_docs={"learn_scale": "Learn the scale as a parameter, with 100 times the network's learning rate."},
        learned_scalars=(LearnedScalar("scale", lr=100.0, switch="learn_scale"),),
        pairs=True,
    ),
)
def prototypical(p: Pairs, *, scale: float | Tensor = 10.0) -> tuple[Tensor, Tensor]:
    """Classify each sample by its distance to the mean of every class in the batch, itself left out of its own.

    Args:
        p: Cosines [N, N] with masks.
        scale: Factor on the squared distance; a 0-dim tensor is learned.

    Returns:
        One value per anchor [N], 0 without positives, and the number of anchors with positives.

    Example:
        >>> emb = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8]])
        >>> float(prototypical(pair_up(emb, torch.tensor([0, 0, 1])), scale=1.0))
        0.3711...
    """
    p.require_square("prototypical")
    length, _ = p.squared_norms()
    same = p.pos | torch.eye(len(p.sim), dtype=torch.bool, device=p.sim.device)
    first = same.to(torch.uint8).argmax(1)  # the first sample of the class, in whose place its mean is computed
    is_class = torch.arange(len(first), device=first.device) == first
    size, own = same.sum(1).to(p.sim.dtype), row_mean(p.sim, same)  # of a sample with the mean of its class
    mean_sq = torch.zeros_like(own).index_add(0, first, own / size)

    def log_sums(q: Pairs, scale: Tensor, mean_sq: Tensor) -> Tensor:
        to_mean = torch.zeros_like(q.sim).index_add(1, first, q.sim / size)  # [i, c]: sample i with the mean of class c
        return log_sum_exp(scale[:, None] * (2 * to_mean - mean_sq), q.neg & is_class)

    others = p.per_anchor(log_sums, per_row(scale, p.sim), shared=(mean_sq,))
    n, own_sq = size.clamp(min=2), mean_sq[first]
    rest, rest_sq = (n * own - length) / (n - 1), (n.square() * own_sq - 2 * n * own + length) / (n - 1).square()
    return torch.where(p.pos.any(1), softplus(others - scale * (2 * rest - rest_sq)), 0.0), p.pos.any(1).sum()
