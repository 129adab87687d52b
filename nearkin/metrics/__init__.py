"""Exact, tie-aware retrieval and clustering metrics: rank once, compute many, keep the value of every query."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearkin._common.lazy import lazy_exports

if TYPE_CHECKING:
    from nearkin.metrics.clustering import Clustering, ami, cluster_scores, nmi, pair_f1
    from nearkin.metrics.ranking import Ranking, neighbours, rank
    from nearkin.metrics.scores import Scores, compare, score, score_file

__all__ = [
    "Clustering",
    "Ranking",
    "Scores",
    "ami",
    "cluster_scores",
    "compare",
    "neighbours",
    "nmi",
    "pair_f1",
    "rank",
    "score",
    "score_file",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "clustering": ("Clustering", "ami", "cluster_scores", "nmi", "pair_f1"),
        "ranking": ("Ranking", "neighbours", "rank"),
        "scores": ("Scores", "compare", "score", "score_file"),
    },
)
