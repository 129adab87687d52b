"""Neighbour losses: the probability that a neighbour, drawn with softmax(similarity), has the same class."""

from typing import Any

import torch
from torch import Tensor

from nearkin.losses.ranges import log
from nearkin.losses.registry import PRODUCTS, Inputs, loss
from nearkin.ops.pairs import Pairs, pair_up
from nearkin.ops.reductions import log_sum, log_sum_exp, softplus


@loss(
    paper="Wu et al. 2018; Boudiaf et al. 2020, table 2",
    formula="mean_i of  log sum_{k != i} exp(s_ik / sigma)  -  log sum_pos exp(s_ij / sigma)",
    use="Many samples per class, or a memory: it only requires that some positives are near.",
    space={"sigma": log(0.01, 0.5)},
)
def snca(p: Pairs, *, sigma: float = 0.05) -> Tensor:
    """Negative log probability that a neighbour, drawn by similarity, has the anchor's class.

    Args:
        p: Cosines [N, M] with masks.
        sigma: Temperature; 0.03 to 0.1.

    Returns:
        One value per anchor [N]; 0 without positives.

    Example:
        >>> emb = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8]])
        >>> float(snca(pair_up(emb, torch.tensor([0, 0, 1])), sigma=0.5))
        0.2474...
    """
    return _neighbour(p.sim, p, 1 / sigma)


@loss(
    paper="Goldberger et al. 2004, in log form",
    formula="mean_i of  log sum_{k != i} exp(-|x_i - x_k|^2)  -  log sum_pos exp(-|x_i - x_j|^2)",
    use="As a reference; the length of the vectors acts as the temperature.",
    inputs=PRODUCTS,
)
def nca(p: Pairs) -> Tensor:
    """Neighbourhood components analysis on squared Euclidean distances of embeddings that are not normalised.

    Args:
        p: Dot products [N, M] with masks (`metric="dot"`).

    Returns:
        One value per anchor [N]; 0 without positives.

    Example:
        >>> emb = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8]])
        >>> float(nca(pair_up(emb, torch.tensor([0, 0, 1]), metric="dot")))
        0.2474...
    """
    # Minus the squared distance is 2 x_i.x_j - |x_j|^2 - |x_i|^2; the last term is constant in a row and cancels.
    return _neighbour(p.sim - p.squared_norms()[1] / 2, p, 2.0)


def _neighbour(logits: Tensor, p: Pairs, scale: float) -> Tensor:
    positive, negative = log_sum_exp(logits, p.pos, scale), log_sum_exp(logits, p.neg, scale)
    positive = positive.masked_fill(positive == float("-inf"), float("inf"))  # without positives: softplus(-inf) is 0
    # log(e^positive + e^negative) - positive, which is exactly 0 without negatives.
    return softplus(negative - positive)


def _ice_pairs(
    emb: Tensor, labels: Tensor, refs: Tensor | None = None, ref_labels: Tensor | None = None, **kwargs: Any
) -> Pairs:
    if kwargs.pop("anchor_grad", True):
        return pair_up(emb, labels, refs, ref_labels, **kwargs)
    if refs is None:
        refs, ref_labels = emb, labels
        kwargs["self_columns"] = torch.arange(len(emb), device=emb.device)
    return pair_up(emb.detach(), labels, refs, ref_labels, **kwargs)


@loss(
    paper="Wang et al. 2019, instance cross entropy",
    formula="value: sum_a sum_pos log(1 + sum_neg exp(s_an - s_ap));  gradient on s: "
    "+-1/(2N) times normalised mismatch weights at `scale`",
    use="When every positive should count, with weights that sharpen with `scale`; 64 for many classes.",
    space={"scale": log(8, 128)},
    inputs=Inputs(
        _ice_pairs,
        builder_kwargs={"anchor_grad": True},
        builder_docs={
            "anchor_grad": "Whether the anchor gets a gradient as well; False is the literal reading of the paper."
        },
        pairs=True,
        memory=True,
        by_anchor=False,  # weights are relative to the size of the batch
    ),
)
def ice(p: Pairs, *, scale: float = 64.0) -> tuple[Tensor, Tensor]:
    """Match every positive against the negatives, with gradients re-weighted by the mismatch at `scale`.

    Value and gradient are defined separately, as in the paper: the value is the sum with scale 1, and each anchor
    distributes 1/(2N) over its positives and 1/(2N) over its negatives. A learning rate tuned for another loss does not
    carry over.

    Args:
        p: Cosines [N, M] with masks.
        scale: Sharpness of the weights (not of the value); 16 to 64.

    Returns:
        Sums per anchor [N], and 1: the value is a plain sum.

    Example:
        >>> emb = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8]])
        >>> float(ice(pair_up(emb, torch.tensor([0, 0, 1]))))
        1.0260...
    """
    columns, is_positive = p.positive_columns()
    negatives = log_sum_exp(p.sim, p.neg)[:, None]
    value = softplus(negatives - p.sim.gather(1, columns)).masked_fill(~is_positive, 0.0).sum(1)
    gradient = (_mismatch_weights(p, columns, is_positive, scale) * p.sim).sum(1)
    return value.detach() + (gradient - gradient.detach()), torch.ones((), device=p.sim.device)


@torch.no_grad()
def _mismatch_weights(p: Pairs, columns: Tensor, is_positive: Tensor, scale: float) -> Tensor:
    """Return the gradient of ice on the similarities [N, M].

    Negatives: softmax of scale * s. Positives: softmax of -log(e^(scale s) + sum over the negatives), which is the
    normalised 1 - p without the 0/0 of well separated anchors.
    """
    negatives = log_sum_exp(p.sim, p.neg, scale)[:, None]
    logits = -torch.logaddexp(scale * p.sim.gather(1, columns), negatives).masked_fill(~is_positive, float("inf"))
    pull = torch.exp(logits - log_sum(logits.clone())[:, None])
    weight = (p.sim * scale).sub_(negatives).exp_().masked_fill_(~p.neg, 0.0)
    weight.scatter_add_(1, columns, pull.masked_fill(~is_positive, 0.0).neg())
    has_both = p.pos.any(1) & p.neg.any(1)
    return weight.masked_fill_(~has_both[:, None], 0.0).mul_(0.5 / len(weight))
