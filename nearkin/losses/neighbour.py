"""Losses that ask whether a neighbour, drawn with probability softmax(similarity), is of the same class.

snca   scalable neighbourhood components: cosines over a temperature
nca    neighbourhood components: squared distances of raw vectors
ice    instance cross entropy: one softmax per positive, and a gradient weighted by its own rule
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nearkin.losses.registry import PRODUCTS, Inputs, log, loss
from nearkin.ops.pairs import Pairs, pair_up
from nearkin.ops.reductions import PairSet, log_sums, shifted_exp, softplus


@loss(
    family="neighbour",
    paper="Wu et al. 2018; Boudiaf et al. 2020, table 2",
    formula="mean_i of  log sum_{k != i} exp(s_ik / sigma)  -  log sum_pos exp(s_ij / sigma)",
    use="Many samples per class, or a memory: it asks only that some positives are near.",
    space={"sigma": log(0.01, 0.5)},
)
def snca(p: Pairs, *, sigma: float = 0.05) -> Tensor:
    """The probability that a neighbour, drawn by similarity, is of the anchor's class; as a negative logarithm.

    p       cosines [N, M] with masks; returns one value per anchor [N], 0 without positives
    sigma   temperature; 0.03 to 0.1

    >>> emb = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8]])
    >>> float(snca(pair_up(emb, torch.tensor([0, 0, 1])), sigma=0.5))
    0.2474...
    """
    return _neighbour(p.sim, p, 1 / sigma)


@loss(
    family="neighbour",
    paper="Goldberger et al. 2004, in log form",
    formula="mean_i of  log sum_{k != i} exp(-|x_i - x_k|^2)  -  log sum_pos exp(-|x_i - x_j|^2)",
    use="As a reference; the length of the raw vectors is its temperature.",
    inputs=PRODUCTS,
)
def nca(p: Pairs) -> Tensor:
    """Neighbourhood components on squared Euclidean distances of the raw embeddings.

    p   plain products [N, M] with masks (`metric="dot"`); returns one value per anchor [N], 0 without positives

    >>> emb = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8]])
    >>> float(nca(pair_up(emb, torch.tensor([0, 0, 1]), metric="dot")))
    0.2474...
    """
    # Minus the squared distance is 2 x_i.x_j - |x_j|^2 - |x_i|^2, and what all of a row share makes no difference.
    return _neighbour(p.sim - p.squares()[1] / 2, p, 2.0)


def _neighbour(logits: Tensor, p: Pairs, scale: float) -> Tensor:
    near, far = log_sums(logits, p.positives, p.negatives, scale, scale)
    alone = near == float("-inf")
    if alone.any():
        near = near.masked_fill(alone, float("inf"))  # an anchor without positives: softplus(-inf) is 0
    # log(e^near + e^far) - near, which is exactly 0 when there is no negative.
    return softplus(far - near)


def _ice_pairs(
    emb: Tensor, labels: Tensor, refs: Tensor | None = None, ref_labels: Tensor | None = None, **options: Any
) -> Pairs:
    if options.pop("anchor_grad", True):
        return pair_up(emb, labels, refs, ref_labels, **options)
    if refs is None:
        refs, ref_labels = emb, labels
        options["self_columns"] = torch.arange(len(emb), device=emb.device)
    return pair_up(emb.detach(), labels, refs, ref_labels, **options)


@loss(
    family="neighbour",
    paper="Wang et al. 2019, instance cross entropy",
    formula="value: sum_a sum_pos log(1 + sum_neg exp(s_an - s_ap));  gradient on s: "
    "+-1/(2N) times normalised mismatch weights at `scale`",
    use="Where every positive should count, with weights that sharpen with `scale`; 64 for many classes.",
    space={"scale": log(8, 128)},
    inputs=Inputs(_ice_pairs, outer={"anchor_grad": True}, pairs=True, memory=True),
)
def ice(p: Pairs, *, scale: float = 64.0) -> tuple[Tensor, Tensor]:
    """Match every positive against the negatives; the gradient is re-weighted by the mismatch at `scale`.

    p       cosines [N, M] with masks; returns totals per anchor [N] and 1: the value is a plain sum
    scale   sharpness of the weights (not of the value); 16 to 64

    Value and gradient are defined apart, as in the paper: the value is the sum with scale 1, and each anchor spreads
    1/(2N) over its positives and 1/(2N) over its negatives. A learning rate tuned for another loss does not carry over.

    >>> emb = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8]])
    >>> float(ice(pair_up(emb, torch.tensor([0, 0, 1]))))
    1.0260...
    """
    return _InstanceCrossEntropy.apply(p.sim, p.positives, p.negatives, scale), torch.ones((), device=p.sim.device)


class _InstanceCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sim: Tensor, positives: PairSet, negatives: PairSet, scale: float) -> Tensor:
        n = len(sim)
        row, column = positives.listed()
        near = sim[row, column]
        _, total, top = shifted_exp(sim, negatives, 1.0)
        value = sim.new_zeros(n).index_add(0, row, softplus((top + total.log())[row] - near))

        # Negatives: softmax of scale * s. Positives: softmax of -log(e^(scale s) + mass of the negatives), which is
        # the normalised 1 - p without the 0/0 of well separated anchors.
        weight, total, top = shifted_exp(sim, negatives, scale)
        logit = -torch.logaddexp(scale * near, (top + total.log())[row])
        top = sim.new_full((n,), float("-inf")).scatter_reduce(0, row, logit, "amax")
        share = torch.exp(logit - top[row])
        share_total = sim.new_zeros(n).index_add(0, row, share)
        both = (share_total > 0) & (total > 0)
        weight.mul_(torch.where(both, 0.5 / n / total, 0.0)[:, None])
        weight[row, column] = -share * torch.where(both, 0.5 / n / share_total, 0.0)[row]
        ctx.save_for_backward(weight)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        return weight * g[:, None], None, None, None
