"""Runs on ready features for the tests of pages, and what they must show, by brute force."""

from dataclasses import replace

import numpy as np

from nearkin._common.progress import Reporter
from nearkin.config.recipe import Recipe
from nearkin.training import recipes

QUIET = Reporter(quiet=True)


def clouds(folder, *, classes: int, each: int, dim: int, seed: int, copies: dict[int, int], **data) -> Recipe:
    """A recipe for classes of noisy rows in a file; some rows are copies of others. The second half is judged."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), each)
    features = rng.normal(size=(classes, dim))[labels] + 0.9 * rng.normal(size=(len(labels), dim))
    features[list(copies)] = features[list(copies.values())]
    width = len(str(classes - 1))
    np.savez(folder / "f.npz", features=features.astype(np.float32), labels=[f"{c:0{width}d}" for c in labels])
    recipe = recipes.features_default()
    return replace(recipe, data=replace(recipe.data, root=folder / "f.npz", split="half", **data))


def vectors(run, first=10) -> tuple[np.ndarray, np.ndarray]:
    stored = np.load(run.recipe.data.root)
    labels = stored["labels"].astype(int)
    test = labels >= first
    return run.embedder().embed(stored["features"][test]).double().numpy(), labels[test]


def cosines(run, first=10) -> tuple[np.ndarray, np.ndarray]:
    """By brute force in float64: similarities of the test rows, the row itself at the end of the order; and labels.

    first   of the test classes
    """
    emb, labels = vectors(run, first)
    emb /= np.linalg.norm(emb, axis=1, keepdims=True)
    sim = emb @ emb.T
    np.fill_diagonal(sim, -np.inf)
    return sim, labels
