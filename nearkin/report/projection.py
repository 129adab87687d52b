"""Embeddings on a flat map: the two directions of most spread at once, t-SNE where it is asked for."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.data.images import Rows
from nearkin.errors import import_extra
from nearkin.ops.geometry import unit

MOST = 6800  # points of a map: as many as a page has pictures
GRID = 1000  # coordinates are whole numbers up to this


def sample(labels: NDArray[np.int64], rows: Rows, *, most: int = MOST, seed: int = 0) -> Rows:
    """At most so many of the rows; of many classes whole classes are taken, so that what belongs together stays so."""
    if len(rows) <= most:
        return rows
    place = np.random.default_rng(seed).permutation(int(labels.max()) + 1)[labels[rows]]
    return np.sort(rows[np.argsort(place, kind="stable")[:most]])


def pca(emb: Tensor) -> NDArray[np.int64]:
    """[N, 2] on the grid: the two main directions of the unit vectors.

    >>> pca(torch.tensor([[1.0, 0.0], [0.0, 1.0]])).tolist() in ([[0, 500], [1000, 500]], [[1000, 500], [0, 500]])
    True
    """
    f = unit(emb.double())
    x = f - f.mean(0)
    _, vectors = torch.linalg.eigh(x.T @ x)
    main = vectors[:, -2:].flip(1)
    if main.shape[1] < 2:
        main = torch.nn.functional.pad(main, (0, 2 - main.shape[1]))
    # The sign of a direction is arbitrary: its largest weight is made positive, so that maps agree between machines.
    largest = main.gather(0, main.abs().argmax(0, keepdim=True))
    return _on_grid((x @ (main * torch.where(largest < 0, -1.0, 1.0))).numpy())


def tsne(emb: Tensor, *, seed: int = 0) -> NDArray[np.int64]:
    """[N, 2] on the grid by t-SNE with cosine distances (scikit-learn). Distances between groups mean little in it."""
    manifold = import_extra("sklearn.manifold", extra="bench")
    x = unit(emb.float()).numpy()
    perplexity = min(30.0, (len(x) - 1) / 3)
    made = manifold.TSNE(perplexity=perplexity, init="pca", random_state=seed, n_jobs=-1)
    return _on_grid(made.fit_transform(x))  # of unit vectors Euclidean distances rank as cosines do


def _on_grid(x: NDArray[np.floating]) -> NDArray[np.int64]:
    low, high = x.min(0), x.max(0)
    reach = float((high - low).max())
    if not reach > 1e-12:
        return np.full(x.shape, GRID // 2, np.int64)
    middle = (low + high) / 2
    return np.asarray(np.rint(GRID / 2 + (x - middle) / reach * GRID), np.int64)
