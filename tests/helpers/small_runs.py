"""A run folder with a model of random weights: fast, and enough to embed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch


def make_result(fingerprint: str = "", **changed):
    """Return the result of a run whose test classes are still sealed."""
    protocol = {"epoch": 1, "fingerprint": fingerprint, "classes": {"train": 4, "val": 1, "test": 5}}
    return {"protocol": protocol, "test": None, "val_R@1": 0.5, "val_MAP@R": 0.4, **changed}


def make_run(runs: Path, root: Path, *, dim: int = 16, seed: int = 0, side: int = 24, name: str = "run"):
    """Create an unfinished run with a small convolutional embedder."""
    from nearkin.models.embedder import Embedder
    from nearkin.training import recipes
    from nearkin.training.run import Run

    recipe = recipes.from_scratch()
    data = replace(recipe.data, root=root, image_size=side, val_fraction=0.2)
    recipe = replace(recipe, data=data, model=replace(recipe.model, width=4, dim=dim))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Embedder(recipe.model, (3, side, side))
    run = Run.create(runs, name, recipe)
    run.save("best.pt", {"model": model.state_dict(), "image_shape": list(model.image_shape)})
    return run
