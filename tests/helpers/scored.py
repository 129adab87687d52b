"""Recipes on synthetic features, and their similarities by brute force, for the tests of pages."""

from dataclasses import replace

import numpy as np

from nearkin._common.progress import Reporter
from nearkin.config.recipe import Recipe
from nearkin.training import recipes

QUIET = Reporter(quiet=True)


def clouds(
    folder, *, classes: int, samples_per_class: int, dim: int, seed: int, duplicates: dict[int, int], **data
) -> Recipe:
    """Write noisy class clusters, some rows duplicated, and return a recipe that tests on the second half."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), samples_per_class)
    features = rng.normal(size=(classes, dim))[labels] + 0.9 * rng.normal(size=(len(labels), dim))
    features[list(duplicates)] = features[list(duplicates.values())]
    width = len(str(classes - 1))
    np.savez(folder / "f.npz", features=features.astype(np.float32), labels=[f"{c:0{width}d}" for c in labels])
    recipe = recipes.features_default()
    return replace(recipe, data=replace(recipe.data, root=folder / "f.npz", split="half", **data))


def vectors(run, first=10) -> tuple[np.ndarray, np.ndarray]:
    """Return the embeddings of the test rows in float64 and their labels; `first` is the first test class."""
    stored = np.load(run.recipe.data.root)
    labels = stored["labels"].astype(int)
    test = labels >= first
    return run.embedder().embed(stored["features"][test]).double().numpy(), labels[test]


def cosines(run, first=10) -> tuple[np.ndarray, np.ndarray]:
    """Return the cosine similarities of the test rows in float64, -inf on the diagonal, and their labels."""
    emb, labels = vectors(run, first)
    emb /= np.linalg.norm(emb, axis=1, keepdims=True)
    sim = emb @ emb.T
    np.fill_diagonal(sim, -np.inf)
    return sim, labels
