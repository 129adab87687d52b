"""Losses that classify: a softmax over the training classes."""

from __future__ import annotations

from torch import Tensor

from nearkin.losses.classes import PROXIES, ToClasses, own_and_others
from nearkin.losses.register import log, loss
from nearkin.pairs import softplus


@loss(
    family="softmax",
    paper="Wang et al. 2017; Zhai and Wu 2019",
    formula="mean_i of  log(1 + sum_{c != y} exp((s_ic - s_iy) / temperature))",
    use="A strong and simple baseline that needs no miner and no sampler.",
    space={"temperature": log(0.01, 0.3)},
    inputs=PROXIES,
    cost="N C D",
)
def norm_softmax(c: ToClasses, *, temperature: float = 0.05) -> Tensor:
    """Cross entropy on cosines to the class proxies.

    c             cosines [N, C]; returns one value per sample [N]
    temperature   0.03 to 0.1

    >>> import torch
    >>> float(norm_softmax(torch.eye(2), torch.tensor([0, 1]), torch.eye(2), temperature=0.5))
    0.1269...
    """
    own, others = own_and_others(c.sim, c.labels, 1 / temperature)
    return softplus(others - own / temperature)
