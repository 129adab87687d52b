"""Contrastive losses: each positive is identified among the other samples of the batch, or of a second tower."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nearkin.losses._masked import log_sum_exp, masked_mean, masked_sum, require_square, row_mean
from nearkin.losses.ranges import linear, log
from nearkin.losses.registry import Inputs, LearnedScalar, loss
from nearkin.ops import softplus
from nearkin.ops.pairs import Pairs, pair_up


@loss(
    family="contrastive",
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
    logits = p.sim / temperature
    total = log_sum_exp(logits, p.pos | p.neg)
    return row_mean(total[:, None] - logits, p.pos), p.pos.any(1).sum()


@loss(
    family="contrastive",
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
    logits = p.sim / temperature
    negatives = log_sum_exp(logits, p.neg)
    return masked_sum(softplus(negatives[:, None] - logits), p.pos), p.pos.sum()


_TEMPERATURE = Inputs(
    pair_up,
    builder_kwargs={"learn_temperature": False},
    builder_docs={"learn_temperature": "Learn the temperature as a parameter; it stays above 0.01."},
    learned_scalars=(LearnedScalar("temperature", switch="learn_temperature"),),
    pairs=True,
    memory=True,
)


@loss(
    family="contrastive",
    paper="van den Oord et al. 2018; symmetric form of Radford et al. 2021 (CLIP)",
    formula="mean over positive pairs of  (1/2) [ log sum_k exp((s_ik - s_ij) / temperature) "
    "+ log sum_k exp((s_kj - s_ij) / temperature) ]",
    use="Two towers (image and text, two views): pair_up(a, labels, b, labels); learn_temperature as CLIP does.",
    space={"temperature": log(0.01, 0.5)},
    inputs=_TEMPERATURE,
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
    temperature = torch.as_tensor(temperature, dtype=p.sim.dtype, device=p.sim.device).clamp(min=0.01)
    logits, used = p.sim / temperature, p.pos | p.neg
    both = log_sum_exp(logits, used)[:, None] + log_sum_exp(logits, used, dim=0)
    return masked_sum(both / 2 - logits, p.pos), p.pos.sum()


@loss(
    family="contrastive",
    paper="Zhai et al. 2023 (SigLIP)",
    formula="mean_i of  sum_j log(1 + exp(-z_ij (scale s_ij + bias))),  z = 1 (same class), -1 (other class)",
    use="Two towers, large batches: no softmax couples the pairs. learn_scale learns both settings, as in the paper.",
    space={"scale": log(1, 100), "bias": linear(-20.0, 5.0)},
    inputs=Inputs(
        pair_up,
        builder_kwargs={"learn_scale": False},
        builder_docs={"learn_scale": "Learn scale and bias as parameters, with 100 times the network's learning rate."},
        learned_scalars=(
            LearnedScalar("scale", lr=100.0, switch="learn_scale"),
            LearnedScalar("bias", lr=100.0, switch="learn_scale"),
        ),
        pairs=True,
        memory=True,
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
    logits = scale * p.sim + bias
    return masked_sum(softplus(torch.where(p.pos, -logits, logits)), p.pos | p.neg)


@dataclass(frozen=True, eq=False)
class Views(Pairs):
    """Pairs with the embeddings they compare, for losses on the coordinates."""

    anchors: Tensor | None = None  # [N, D]
    refs: Tensor | None = None  # [M, D]


def views(emb: Tensor, labels: Tensor, refs: Tensor | None = None, ref_labels: Tensor | None = None) -> Views:
    """Pair up a batch with itself or with the second tower, by dot products, and attach the embeddings."""
    p = pair_up(emb, labels, refs, ref_labels, metric="dot")
    anchors = emb.to(p.sim.dtype)
    refs = anchors if refs is None else refs.to(p.sim.dtype)
    return Views(p.sim, p.pos, p.neg, p.anchor_sq, p.ref_sq, dim=p.dim, anchors=anchors, refs=refs)


@loss(
    family="contrastive",
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
    (spread, correlation), (ref_spread, ref_correlation) = map(_spread_and_correlation, (p.anchors, p.refs))
    return pull + variance * (spread + ref_spread) / 2 + covariance * (correlation + ref_correlation)


def _spread_and_correlation(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean shortfall of the standard deviations from 1, and the sum of squared covariances over D."""
    centred = x - x.mean(0)
    cov = centred.t() @ centred / max(1, len(x) - 1)
    deviation = (cov.diagonal() + 1e-4).sqrt()
    off_diagonal = cov.square().sum() - cov.diagonal().square().sum()
    return torch.relu(1 - deviation).mean(), off_diagonal / x.shape[1]


@loss(
    family="contrastive",
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
    cost="N^2 D + N^3",
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
    require_square(p, "prototypical")
    length, _ = p.squared_norms()
    same = p.pos | torch.eye(len(p.sim), dtype=torch.bool, device=p.sim.device)
    size = same.sum(1).to(p.sim.dtype)
    share = same / size[:, None]
    to_mean = p.sim @ share.t()  # [i, j]: sample i times the mean of the class of j
    mean_sq = (share * to_mean.t()).sum(1)
    # A class of n samples occurs in n columns: log n turns their sum into one term.
    others = log_sum_exp(scale * (2 * to_mean - mean_sq) - size.log(), p.neg)
    own, n = to_mean.diagonal(), size.clamp(min=2)
    rest, rest_sq = (n * own - length) / (n - 1), (n.square() * mean_sq - 2 * n * own + length) / (n - 1).square()
    return torch.where(p.pos.any(1), softplus(others - scale * (2 * rest - rest_sq)), 0.0), p.pos.any(1).sum()
