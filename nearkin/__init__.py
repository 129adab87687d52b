"""nearkin: deep metric learning, from loss functions to image search.

    import nearkin as nk

    objective = nk.Objective("proxy_anchor", num_classes=100, dim=512)
    loss = objective(embeddings, labels)
    scores = nk.score(embeddings, labels, ks=(1, 2, 4, 8))

Names are imported on first use: `import nearkin` and `nearkin --help` are fast, and the losses and metrics never import
torchvision or timm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearkin._common.lazy import lazy_exports
from nearkin._common.version import __version__ as __version__

if TYPE_CHECKING:
    from nearkin import losses
    from nearkin.config.recipe import Recipe
    from nearkin.data import samplers
    from nearkin.deploy.index.index import Index
    from nearkin.errors import UserError
    from nearkin.losses import miners
    from nearkin.losses.objective import Objective
    from nearkin.metrics.ranking import Ranking, neighbours, rank
    from nearkin.metrics.scores import Scores, compare, score
    from nearkin.models.embedder import Embedder, load
    from nearkin.ops.pairs import Pairs, pair_up
    from nearkin.training import recipes
    from nearkin.training.evaluation import evaluate_final
    from nearkin.training.loop import fit
    from nearkin.training.run import Run

__all__ = [
    "Embedder",
    "Index",
    "Objective",
    "Pairs",
    "Ranking",
    "Recipe",
    "Run",
    "Scores",
    "UserError",
    "compare",
    "evaluate_final",
    "fit",
    "load",
    "losses",
    "miners",
    "neighbours",
    "pair_up",
    "rank",
    "recipes",
    "samplers",
    "score",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "config.recipe": ("Recipe",),
        "data.samplers": ("samplers",),
        "deploy.index.index": ("Index",),
        "errors": ("UserError",),
        "losses": ("losses",),
        "losses.miners": ("miners",),
        "losses.objective": ("Objective",),
        "metrics.ranking": ("Ranking", "neighbours", "rank"),
        "metrics.scores": ("Scores", "compare", "score"),
        "models.embedder": ("Embedder", "load"),
        "ops.pairs": ("Pairs", "pair_up"),
        "training.evaluation": ("evaluate_final",),
        "training.loop": ("fit",),
        "training.recipes": ("recipes",),
        "training.run": ("Run",),
    },
)
