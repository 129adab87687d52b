"""nearkin: deep metric learning, from a loss function to a search page.

    import nearkin as nk

    objective = nk.Objective("proxy_anchor", num_classes=100, dim=512)
    loss = objective(embeddings, labels)
    scores = nk.score(embeddings, labels, ks=(1, 2, 4, 8))

Names are loaded when first used, so that `import nearkin` and `nearkin --help` cost nothing and the losses and
metrics never import torchvision or timm.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from nearkin._common.version import __version__ as __version__

if TYPE_CHECKING:
    from nearkin import losses
    from nearkin.config.recipe import Recipe
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

# Public name -> the module that holds it. A module of the same name is the public name itself.
_HOME = {
    "Embedder": "nearkin.models.embedder",
    "Index": "nearkin.deploy.index.index",
    "Objective": "nearkin.losses.objective",
    "Pairs": "nearkin.ops.pairs",
    "Ranking": "nearkin.metrics.ranking",
    "Recipe": "nearkin.config.recipe",
    "Run": "nearkin.training.run",
    "Scores": "nearkin.metrics.scores",
    "UserError": "nearkin.errors",
    "compare": "nearkin.metrics.scores",
    "evaluate_final": "nearkin.training.evaluation",
    "fit": "nearkin.training.loop",
    "load": "nearkin.models.embedder",
    "losses": "nearkin.losses",
    "miners": "nearkin.losses.miners",
    "neighbours": "nearkin.metrics.ranking",
    "pair_up": "nearkin.ops.pairs",
    "rank": "nearkin.metrics.ranking",
    "recipes": "nearkin.training.recipes",
    "score": "nearkin.metrics.scores",
}

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
    "score",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'nearkin' has no attribute {name!r}")
    home = importlib.import_module(_HOME[name])
    value = home if home.__name__.endswith(f".{name}") else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
