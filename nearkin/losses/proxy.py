"""Losses that compare the batch with learned proxies of the classes."""

from __future__ import annotations

from torch import Tensor

from nearkin.losses.classes import PROXIES, ToClasses, log1p_sum_exp_per_class, own_and_strangers
from nearkin.losses.register import linear, log, loss
from nearkin.pairs import softplus

_ANCHOR_SPACE = {"alpha": log(8, 64), "margin": linear(0.0, 0.5)}


def _anchor(sim: Tensor, labels: Tensor, alpha: float, margin: float) -> Tensor:
    own, strangers = own_and_strangers(sim, labels, alpha)
    pull, present = log1p_sum_exp_per_class(-alpha * (own - margin), labels)
    push = softplus(strangers + alpha * margin)
    return pull.sum() / len(present) + push.sum() / sim.shape[1]


@loss(
    family="proxy",
    paper="Kim et al. 2020",
    formula="mean over present classes of log(1 + sum_own exp(-alpha (s - margin)))  +  "
    "mean over all classes of log(1 + sum_others exp(alpha (s + margin)))",
    use="The default: fast, robust, no miner. Give its proxies 100 times the learning rate.",
    space=_ANCHOR_SPACE,
    inputs=PROXIES,
    cost="N C D",
    reductions=("mean",),
)
def proxy_anchor(c: ToClasses, *, alpha: float = 32.0, margin: float = 0.1) -> Tensor:
    """Each proxy is an anchor: it pulls its own samples, hardest first, and pushes all others.

    c        cosines [N, C] to the proxies; returns the loss (its two averages are part of its definition)
    alpha    sharpness; 32
    margin   in cosine, on both sides; 0.1

    >>> import torch
    >>> emb, proxies = torch.eye(2), torch.eye(2)
    >>> float(proxy_anchor(emb, torch.tensor([0, 1]), proxies))
    3.2399...
    """
    return _anchor(c.sim, c.labels, alpha, margin)
