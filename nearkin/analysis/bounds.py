"""The bounds of Boudiaf et al. 2020 between cross-entropy and pairwise losses: Lemma 1, and the lambda of PCE."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nearkin.analysis.information import decompose
from nearkin.errors import DataError
from nearkin.ops.geometry import unit
from nearkin.ops.pairs import as_batch


class Bound(NamedTuple):
    """A quantity and what Lemma 1 says about it."""

    value: float
    bound: float
    relation: str  # of the value to the bound: "<=", ">=" or "=="


def lemma_1(
    emb: Tensor,
    labels: Tensor | Sequence[int],
    *,
    sigma: float = 0.05,
    alpha: float = 2.0,
    beta: float = 50.0,
    base: float = 0.5,
) -> dict[str, Bound]:
    """Compute the tightness and contrast of losses with their bounds by sums of squared distances (Lemma 1).

    Args:
        emb: [N, D] embeddings, which are normalised.
        labels: [N] integers; all classes must have the same number of samples, at least two.
        sigma: Temperature of snca.
        alpha: Of multi_similarity.
        beta: Of multi_similarity.
        base: Of multi_similarity.

    Returns:
        The bounds by name, such as "tightness of snca".

    Raises:
        DataError: Classes of different sizes, for which the lemma does not hold.

    Example:
        >>> bounds = lemma_1(torch.eye(4), torch.tensor([0, 0, 1, 1]))
        >>> bounds["tightness of contrastive"]
        Bound(value=2.0, bound=2.0, relation='==')
    """
    emb, labels = as_batch(emb, labels)
    z = unit(emb.double())
    classes, counts = torch.unique(labels, return_counts=True)
    m, n, k = int(counts[0]), len(z), len(classes)
    if bool((counts != m).any()) or m < 2 or k < 2:
        raise DataError("lemma_1: expected at least two classes with the same number of samples, two or more each.")
    same = labels[:, None] == labels[None, :]
    squared = (2 - 2 * z @ z.T).clamp(min=0)
    means = torch.stack([z[labels == c].mean(0) for c in classes])
    center = float((z - means[torch.searchsorted(classes, labels)]).square().sum()) / 2
    contrastive = float(squared[same].sum()) / n
    within, between = contrastive, float(squared[~same].sum())
    snca = decompose("snca", z, labels, sigma=sigma)
    ms = decompose("multi_similarity", z, labels, alpha=alpha, beta=beta, base=base)
    # The "+ 1" of multi-similarity's logarithms can only increase both of its parts.
    return {
        "tightness of contrastive": Bound(contrastive, 4 * center / k, "=="),
        "tightness of snca": Bound(
            float(snca.tightness), -math.log(m - 1) - 1 / sigma + within / (2 * sigma * (m - 1)), "<="
        ),
        "tightness of multi_similarity": Bound(
            float(ms.tightness), math.log(m - 1) / alpha + base - 1 + within / (2 * (m - 1)), ">="
        ),
        "contrast of snca": Bound(
            float(snca.contrastive),
            math.log(n - 1) + 1 / sigma - float(squared.sum()) / (2 * sigma * n * (n - 1)),
            ">=",
        ),
        "contrast of multi_similarity": Bound(
            float(ms.contrastive), math.log(n - m) / beta + 1 - base - between / (2 * n * (n - m)), ">="
        ),
    }


def pce_lambda(emb: Tensor, probabilities: Tensor) -> float:
    """Compute the largest lambda of PCE for which every class block of its second part is convex.

    It is the smallest eigenvalue of the matrices (1/n) sum_i (p_ik - p_ik^2) z_i z_i^T over the classes k: a D x D
    eigenvalue problem for each class, and 0 if there are fewer samples than dimensions. No lambda makes the second part
    convex in all classes at once.

    Args:
        emb: [N, D] embeddings, not normalised.
        probabilities: [N, C] class probabilities of the current classifier.

    Returns:
        The eigenvalue, at least 0.

    Example:
        >>> round(pce_lambda(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.full((2, 2), 0.5)), 4)
        0.125
    """
    z, p = emb.detach().double(), probabilities.detach().double()
    blocks = torch.einsum("nk,nd,ne->kde", p - p.square(), z, z) / len(z)
    return max(0.0, float(torch.linalg.eigvalsh(blocks)[:, 0].min()))
