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

__version__ = "0.1.0"

if TYPE_CHECKING:
    from nearkin import losses, miners, recipes
    from nearkin.deploy.index import Index
    from nearkin.errors import UserError
    from nearkin.evaluate import evaluate_final
    from nearkin.metrics import Scores, compare, score
    from nearkin.models.embedder import Embedder, load
    from nearkin.objective import Objective
    from nearkin.pairs import Pairs, pair_up
    from nearkin.ranking import Ranking, neighbours, rank
    from nearkin.recipe import Recipe
    from nearkin.runs import Run
    from nearkin.train import fit

# Public name -> the module that holds it. A module of the same name is the public name itself.
_HOME = {
    "Embedder": "nearkin.models.embedder",
    "Index": "nearkin.deploy.index",
    "Objective": "nearkin.objective",
    "Pairs": "nearkin.pairs",
    "Ranking": "nearkin.ranking",
    "Recipe": "nearkin.recipe",
    "Run": "nearkin.runs",
    "Scores": "nearkin.metrics",
    "UserError": "nearkin.errors",
    "compare": "nearkin.metrics",
    "evaluate_final": "nearkin.evaluate",
    "fit": "nearkin.train",
    "load": "nearkin.models.embedder",
    "losses": "nearkin.losses",
    "miners": "nearkin.miners",
    "neighbours": "nearkin.ranking",
    "pair_up": "nearkin.pairs",
    "rank": "nearkin.ranking",
    "recipes": "nearkin.recipes",
    "score": "nearkin.metrics",
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
    value = home if home.__name__ == f"nearkin.{name}" else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
