"""Two-dimensional maps of embeddings: PCA, and t-SNE on request."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.data.images import Rows
from nearkin.errors import import_extra
from nearkin.ops.geometry import unit

MAX_POINTS = 6800  # as many as a page has images
GRID = 1000  # coordinates are integers from 0 to this


def sample(labels: NDArray[np.int64], rows: Rows, *, max_rows: int = MAX_POINTS, seed: int = 0) -> Rows:
    """Sample rows class by class, so that classes stay complete."""
    if len(rows) <= max_rows:
        return rows
    class_order = np.random.default_rng(seed).permutation(int(labels.max()) + 1)[labels[rows]]
    return np.sort(rows[np.argsort(class_order, kind="stable")[:max_rows]])


def pca(emb: Tensor) -> NDArray[np.int64]:
    """Project unit vectors onto their first two principal components."""
    f = unit(emb.double())
    x = f - f.mean(0)
    _, vectors = torch.linalg.eigh(x.T @ x)
    components = vectors[:, -2:].flip(1)
    if components.shape[1] < 2:
        components = torch.nn.functional.pad(components, (0, 2 - components.shape[1]))
    # The sign of a component is arbitrary. Make its largest weight positive, so that maps agree between machines.
    largest = components.gather(0, components.abs().argmax(0, keepdim=True))
    return _to_grid((x @ (components * torch.where(largest < 0, -1.0, 1.0))).numpy())


def tsne(emb: Tensor, *, seed: int = 0) -> NDArray[np.int64]:
    """Project unit vectors with t-SNE (scikit-learn). Distances between clusters mean little."""
    manifold = import_extra("sklearn.manifold", extra="bench")
    x = unit(emb.float()).numpy()
    perplexity = min(30.0, (len(x) - 1) / 3)
    # Euclidean distances of unit vectors rank as cosines do.
    return _to_grid(manifold.TSNE(perplexity=perplexity, init="pca", random_state=seed, n_jobs=-1).fit_transform(x))


def _to_grid(x: NDArray[np.floating]) -> NDArray[np.int64]:
    low, high = x.min(0), x.max(0)
    extent = float((high - low).max())
    if not extent > 1e-12:
        return np.full(x.shape, GRID // 2, np.int64)
    centre = (low + high) / 2
    return np.asarray(np.rint(GRID / 2 + (x - centre) / extent * GRID), np.int64)
