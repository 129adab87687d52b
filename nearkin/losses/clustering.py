"""Clustering losses: the clusters that the embeddings form, compared with the classes as wholes."""

from __future__ import annotations

import torch
from torch import Tensor

from nearkin.losses._masked import require_square
from nearkin.losses.registry import Inputs, loss
from nearkin.ops.geometry import full_precision, unit
from nearkin.ops.pairs import Pairs, as_batch, pair_up

_RIDGE = 1e-6  # relative to embeddings of length 1: keeps directions that the batch does not use out of the projection


def projector_pairs(emb: Tensor, labels: Tensor) -> Pairs:
    """Pair up a batch by the projection onto the span of its embeddings F: the similarities are F F^+ [N, N]."""
    emb, labels = as_batch(emb, labels)
    with full_precision(emb):
        f = unit(emb)
        ridge = _RIDGE**0.5 * torch.eye(f.shape[1], dtype=f.dtype, device=f.device)
        basis = torch.linalg.qr(torch.cat([f, ridge])).Q[: len(f)]
        return pair_up(basis, labels, metric="dot")


@loss(
    family="clustering",
    paper="Law et al. 2017",
    formula="(1/N) |Y Y^+ - F F^+|^2 for one-hot labels Y [N, C] and embeddings F [N, D]",
    use="Batches larger than the embedding, of few classes: one closed form for the relaxed clustering of the batch.",
    inputs=Inputs(projector_pairs, pairs=True, call_example="nearkin.losses.clustering.projector_pairs(emb, labels)"),
    cost="N D^2 + N^2 D",
)
def spectral_clustering(p: Pairs) -> Tensor:
    """Squared difference between the projections onto the classes and onto the span of the embeddings.

    A batch of N <= D independent embeddings spans everything: then the loss is constant.

    Args:
        p: The projection F F^+ [N, N] with masks.

    Returns:
        One value per sample [N].

    Example:
        >>> emb = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> abs(round(float(spectral_clustering(projector_pairs(emb, torch.tensor([0, 0, 1])))), 4))
        0.0
    """
    require_square(p, "spectral_clustering")
    same = p.pos | torch.eye(len(p.sim), dtype=torch.bool, device=p.sim.device)
    return (same / same.sum(1, keepdim=True) - p.sim).square().sum(1)
