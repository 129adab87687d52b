"""Every loss is a pure function; its registered name is its own name.

>>> import nearkin as nk, torch
>>> pairs = nk.pair_up(torch.eye(4), torch.tensor([0, 0, 1, 1]))
>>> loss = nk.losses.multi_similarity(pairs, alpha=2.0, beta=50.0, base=0.5)
"""

from nearkin.losses.pair import contrastive, contrastive_l2, margin, margin_similarity, multi_similarity
from nearkin.losses.proxy import proxy_anchor
from nearkin.losses.register import LOSSES, Loss, Range, choice, integer, linear, log, loss
from nearkin.losses.softmax import norm_softmax
from nearkin.losses.tuples import triplet

__all__ = [
    "LOSSES",
    "Loss",
    "Range",
    "choice",
    "contrastive",
    "contrastive_l2",
    "integer",
    "linear",
    "log",
    "loss",
    "margin",
    "margin_similarity",
    "multi_similarity",
    "norm_softmax",
    "proxy_anchor",
    "triplet",
]
