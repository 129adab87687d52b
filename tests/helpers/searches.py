"""A small search for tests of `nearkin tune`: thirty noisy classes of vectors, trained in a moment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import nearkin as nk
from nearkin._common.progress import Reporter
from nearkin.bench import tune
from nearkin.bench import tune_storage as storage
from nearkin.config.recipe import ComponentConfig, Recipe

optuna = pytest.importorskip("optuna", reason="needs nearkin[bench]")
optuna.logging.set_verbosity(optuna.logging.WARNING)
QUIET = Reporter(quiet=True)


def write_vectors(path: Path) -> Path:
    """Write thirty noisy classes of twelve vectors; three are used for validation."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(30), 12)
    values = rng.normal(size=(30, 16))[labels] + 1.6 * rng.normal(size=(360, 16))
    np.savez(path, features=values.astype(np.float32), labels=labels)
    return path


def small_recipe(features: Path) -> Recipe:
    recipe = nk.recipes.features_default()
    return replace(
        recipe,
        data=replace(recipe.data, root=features),
        model=replace(recipe.model, dim=8, head_init="random"),
        loss=ComponentConfig("proxy_anchor", {"margin": 0.2}),
        train=replace(recipe.train, epochs=2, batch_size=32, class_lr=None),
    )


def trials_of(search: tune.Search, loss: str):
    with storage.open_storage(search.address) as shared:
        return optuna.load_study(study_name=search.study(loss), storage=shared.storage).trials
