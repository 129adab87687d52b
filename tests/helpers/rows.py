"""One or more rows per registered loss: the key of its reference values, and the settings they were computed with.

The reference values were computed in NumPy from the formulas, never with this package. A new loss needs a row here;
with `golden=None` only the contract tests run on it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from helpers.paths import GOLDEN


@dataclass(frozen=True)
class Row:
    name: str
    golden: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    miner: str | None = None
    miner_settings: dict[str, Any] = field(default_factory=dict)
    reduction: str = "mean"
    unit: bool = True  # the loss does not depend on the length of an embedding
    gradient: bool = True  # the gradient is that of the value, so that finite differences agree
    sim_only: bool = True  # embeddings and proxies matter through the similarities only

    @property
    def id(self) -> str:
        return self.golden or self.name


ROWS = [
    Row("contrastive", "contrastive_cosine", {"margin": 0.5}),
    Row("contrastive_l2", "contrastive_euclid_sq_normalised", {"margin": 1.0}),
    Row("contrastive_l2", "contrastive_euclid_sq_raw", {"margin": 3.0, "normalize": False}, unit=False),
    Row("triplet", "triplet_all_mean", {"margin": 0.1}),
    Row("triplet", "triplet_batch_hard", {"margin": 0.1}, miner="hard"),
    Row("triplet", "triplet_semihard", {"margin": 0.1}, miner="semihard"),
    Row("lifted_structure", "lifted_eq2.21_sum", {"margin": 0.5}, reduction="sum"),
    Row("lifted_song", "lifted_song_original", {"margin": 1.0}),
    Row("npair", "npair_eq2.22"),
    Row("npair_mc", "npair_mc_dot_l2", {"l2": 0.02}, unit=False),
    Row("margin", "margin_distance", {"alpha": 0.2, "beta": 1.2}),
    Row("margin_similarity", "margin_similarity", {"margin": 0.2, "beta": 0.28}),
    Row("multi_similarity", "multi_similarity_all_pairs", {"alpha": 2.0, "beta": 50.0, "base": 0.5}),
    Row("multi_similarity", "multi_similarity_mined", miner="multi_similarity", miner_settings={"epsilon": 0.1}),
    Row(
        "multi_similarity",
        "multi_similarity_mined_thesis_search",
        {"alpha": 18.0, "beta": 76.0, "base": 0.8},
        miner="multi_similarity",
        miner_settings={"epsilon": 0.4},
    ),
    Row("snca", "snca", {"sigma": 0.1}),
    Row("nca", "nca_raw", unit=False),
    Row("ice", "ice_sum_eq5", gradient=False),
    Row("softmax", "softmax_ce", {"smoothing": 0.0, "dropout": 0.0}, unit=False),
    Row("softmax", "softmax_ce_label_smoothing", {"smoothing": 0.1, "dropout": 0.0}, unit=False),
    Row("norm_softmax", "norm_softmax", {"temperature": 0.05}),
    Row("proxy_nca", "proxynca_eq2.27_mean", {"scale": 1.0}),
    Row("proxy_nca", "proxynca_include_positive_scale", {"scale": 6.0, "include_positive": True}),
    Row("arcface", "arcface", {"margin_degrees": 28.6, "scale": 64.0}),
    Row("soft_triple", "softtriple", {"centers": 3}),
    Row("soft_triple", "softtriple_similarity_only", {"centers": 3, "tau": 0.0}),
    Row("proxy_anchor", "proxy_anchor", {"alpha": 32.0, "margin": 0.1}),
    Row("mpa", "mpa", {"centers": 3}),
    Row("mpa_dw", "mpa_dw", {"centers": 3}),
    Row("mpa_ap", "mpa_ap", {"centers": 3}),
    Row("proxy_repulsion", "ourloss1"),
    Row("proxy_repulsion_batch", "ourloss2_sum", {"average": False}),
    Row("proxy_repulsion_batch", "ourloss2_mean", {"average": True}),
    Row("center", "center_loss_learned", {"strength": 0.003}, unit=False),
    Row("pce", "pce", {"lam": 1.0}, unit=False),
    Row("spce", "spce", unit=False),
    Row("supcon"),
    Row("nt_xent"),
    Row("info_nce"),
    Row("siglip"),
    Row("vicreg", unit=False, sim_only=False),
    Row("prototypical"),
    Row("cosface"),
    Row("sphereface", unit=False, sim_only=False),
    Row("large_margin_softmax", unit=False, sim_only=False),
    Row("subcenter_arcface"),
    Row("dynamic_arcface"),
    Row("adaface", unit=False, gradient=False, sim_only=False),
    Row("curricularface"),
    Row("magface", unit=False, sim_only=False),
    Row("p2sgrad"),
    Row("instance"),
    Row("proxy_nca_pp"),
    Row("manifold", sim_only=False),
    Row("smooth_ap"),
    Row("smooth_ap", settings={"with_query": True}),
    Row("recall_surrogate"),
    Row("sup_ap"),
    Row("pnp"),
    Row("fast_ap"),
    Row("histogram"),
    Row("ranked_list"),
    Row("circle", gradient=False),
    Row("angular"),
    Row("tuplet_margin"),
    Row("dynamic_soft_margin", gradient=False),
    Row("hierarchical_triplet"),
    Row("intra_pair_variance"),
    Row("threshold_consistent_margin"),
    Row("snr_contrastive", sim_only=False),
    Row("hyperbolic", unit=False),
    Row("spectral_clustering"),
    Row("facility_location"),
]


def golden() -> dict[str, Any]:
    """Return the reference values."""
    data: dict[str, Any] = json.loads(GOLDEN.read_text())
    return data
