"""Recipes, the training loop, checkpoints, run folders, several processes and the final evaluation."""

from typing import TYPE_CHECKING

from nearkin._common.lazy import lazy_exports

if TYPE_CHECKING:
    from nearkin.training import distributed, recipes
    from nearkin.training._run_key import run_key
    from nearkin.training.auto_recipe import choose_recipe
    from nearkin.training.batch_norm import sync_batch_norm
    from nearkin.training.device import choose_device
    from nearkin.training.evaluation import evaluate, evaluate_final
    from nearkin.training.factory import make_model, make_objective
    from nearkin.training.loop import fit
    from nearkin.training.run import Run

__all__ = [
    "Run",
    "choose_device",
    "choose_recipe",
    "distributed",
    "evaluate",
    "evaluate_final",
    "fit",
    "make_model",
    "make_objective",
    "recipes",
    "run_key",
    "sync_batch_norm",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "auto_recipe": ("choose_recipe",),
        "batch_norm": ("sync_batch_norm",),
        "distributed": ("distributed",),
        "evaluation": ("evaluate", "evaluate_final"),
        "device": ("choose_device",),
        "factory": ("make_model", "make_objective"),
        "loop": ("fit",),
        "recipes": ("recipes",),
        "run": ("Run",),
        "_run_key": ("run_key",),
    },
)
