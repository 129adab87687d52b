"""Losses: pure functions, registered under their own names. Pair losses take `Pairs`; class losses take (emb, labels,
proxies), or the parameters of their head; both take a `reduction` ("mean", "sum", "none", or "nonzero": the mean over
values that are not 0) where their definition allows.
"""

from nearkin.losses.classes import Classifier
from nearkin.losses.clustering import facility_location, spectral_clustering
from nearkin.losses.contrastive import info_nce, nt_xent, prototypical, siglip, supcon, vicreg
from nearkin.losses.margin_softmax import (
    adaface,
    cosface,
    curricularface,
    dynamic_arcface,
    instance,
    large_margin_softmax,
    magface,
    p2sgrad,
    sphereface,
    subcenter_arcface,
)
from nearkin.losses.margins import angular, circle, dynamic_soft_margin, hierarchical_triplet, tuplet_margin
from nearkin.losses.miners import MINERS, miner
from nearkin.losses.neighbour import ice, nca, snca
from nearkin.losses.objective import Objective
from nearkin.losses.pair import (
    contrastive,
    contrastive_l2,
    hyperbolic,
    intra_pair_variance,
    margin,
    margin_similarity,
    multi_similarity,
    snr_contrastive,
    threshold_consistent_margin,
)
from nearkin.losses.proxy import (
    manifold,
    mpa,
    mpa_ap,
    mpa_dw,
    proxy_anchor,
    proxy_nca,
    proxy_nca_pp,
    proxy_repulsion,
    proxy_repulsion_batch,
    soft_triple,
)
from nearkin.losses.ranges import Range, choice, integer, linear, log
from nearkin.losses.ranking import fast_ap, histogram, pnp, ranked_list, recall_surrogate, smooth_ap, sup_ap
from nearkin.losses.registry import LOSSES, Buffer, Inputs, LearnedScalar, Loss, Param, loss
from nearkin.losses.regularizers import (
    REGULARIZERS,
    Regularizer,
    center_invariant,
    lp,
    regular_face,
    regularizer,
    sparse_centers,
    zero_mean,
)
from nearkin.losses.softmax import arcface, center, norm_softmax, pce, softmax, spce
from nearkin.losses.tuples import lifted_song, lifted_structure, npair, npair_mc, triplet
from nearkin.losses.weighted_sum import WeightedSum

# fmt: off
__all__ = [
    "LOSSES", "MINERS", "REGULARIZERS", "Buffer", "Classifier", "Inputs", "LearnedScalar", "Loss", "Objective",
    "Param", "Range", "Regularizer", "WeightedSum", "adaface", "angular", "arcface", "center", "center_invariant",
    "choice", "circle", "contrastive", "contrastive_l2", "cosface", "curricularface", "dynamic_arcface",
    "dynamic_soft_margin", "facility_location", "fast_ap", "hierarchical_triplet", "histogram", "hyperbolic", "ice",
    "info_nce", "instance", "integer", "intra_pair_variance", "large_margin_softmax", "lifted_song",
    "lifted_structure", "linear", "log", "loss", "lp", "magface", "manifold", "margin", "margin_similarity", "miner",
    "mpa", "mpa_ap", "mpa_dw", "multi_similarity", "nca", "norm_softmax", "npair", "npair_mc", "nt_xent", "p2sgrad",
    "pce", "pnp", "prototypical", "proxy_anchor", "proxy_nca", "proxy_nca_pp", "proxy_repulsion",
    "proxy_repulsion_batch", "ranked_list", "recall_surrogate", "regular_face", "regularizer", "siglip", "smooth_ap",
    "snca", "snr_contrastive", "soft_triple", "softmax", "sparse_centers", "spce", "spectral_clustering",
    "sphereface", "subcenter_arcface", "sup_ap", "supcon", "threshold_consistent_margin", "triplet", "tuplet_margin",
    "vicreg", "zero_mean",
]
