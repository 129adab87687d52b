"""Losses: pure functions, registered under their own names. Pair losses take `Pairs`; class losses take (emb, labels,
proxies), or the parameters of their head; both take `reduction="mean" | "sum" | "none"` where their definition allows.
"""

from nearkin.losses.miners import MINERS, miner
from nearkin.losses.neighbour import ice, nca, snca
from nearkin.losses.objective import Objective, WeightedSum
from nearkin.losses.pair import contrastive, contrastive_l2, margin, margin_similarity, multi_similarity
from nearkin.losses.proxy import (
    mpa,
    mpa_ap,
    mpa_dw,
    proxy_anchor,
    proxy_nca,
    proxy_regulariser,
    proxy_repulsion,
    proxy_repulsion_batch,
    soft_triple,
)
from nearkin.losses.ranges import Range, choice, integer, linear, log
from nearkin.losses.registry import LOSSES, Inputs, LearnedScalar, Loss, Param, loss
from nearkin.losses.softmax import arcface, center, norm_softmax, pce, softmax, spce
from nearkin.losses.tuples import lifted_song, lifted_structure, npair, npair_mc, triplet

__all__ = [
    "LOSSES",
    "MINERS",
    "Inputs",
    "LearnedScalar",
    "Loss",
    "Objective",
    "Param",
    "Range",
    "WeightedSum",
    "arcface",
    "center",
    "choice",
    "contrastive",
    "contrastive_l2",
    "ice",
    "integer",
    "lifted_song",
    "lifted_structure",
    "linear",
    "log",
    "loss",
    "margin",
    "margin_similarity",
    "miner",
    "mpa",
    "mpa_ap",
    "mpa_dw",
    "multi_similarity",
    "nca",
    "norm_softmax",
    "npair",
    "npair_mc",
    "pce",
    "proxy_anchor",
    "proxy_nca",
    "proxy_regulariser",
    "proxy_repulsion",
    "proxy_repulsion_batch",
    "snca",
    "soft_triple",
    "softmax",
    "spce",
    "triplet",
]
