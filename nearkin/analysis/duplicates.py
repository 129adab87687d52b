"""Duplicate images, found as identical or nearly identical embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from nearkin.errors import ConfigError, DataError
from nearkin.metrics._problem import Progress, parse_bytes
from nearkin.metrics._vectors import as_labels, as_matrix, encode, identical_rows
from nearkin.ops.geometry import unit

_CHUNK = 8192  # pairs converted to float64 at a time


@dataclass(frozen=True)
class Duplicate:
    """Two identical or nearly identical rows."""

    first: int
    second: int  # row, larger than `first`
    similarity: float  # cosine
    exact: bool  # equal in every dimension
    same_label: bool


def find_duplicates(
    emb: Any,
    labels: Any,
    *,
    threshold: float = 0.96,
    max_pairs: int = 10_000,
    memory: str | int = "1GB",
    progress: Progress | None = None,
) -> list[Duplicate]:
    """Find all pairs of rows at least as similar as the threshold.

    Use features of a network that was not trained on these classes: training pulls the images of a class together
    until they look like duplicates. On ImageNet features of CUB, 0.96 finds the duplicates and no two photos of the
    same bird.

    Args:
        emb: [N, D] features.
        labels: [N] integers or strings.
        threshold: Minimum cosine.
        max_pairs: Raise an error beyond this number of pairs: the threshold then means "same class", not "same image".
        memory: Maximum extra memory, for example "1GB".
        progress: Called with the fraction done.

    Returns:
        The pairs, those with different labels first, then by descending similarity.

    Example:
        >>> find_duplicates([[1.0, 0.0], [1.0, 0.001], [0.0, 1.0], [1.0, 0.0]], ["owl", "gull", "gull", "owl"])[-1]
        Duplicate(first=0, second=3, similarity=1.0, exact=True, same_label=True)
    """
    if not -1 <= threshold <= 1:
        raise ConfigError(f"threshold: expected a cosine from -1 to 1, got {threshold}.")
    x = as_matrix(emb, "embeddings")
    codes, _, _ = encode(as_labels(labels, len(x), "labels", "embeddings"), None, "labels")
    unit_x = unit(x.float())
    (row_id,) = identical_rows([x], [torch.zeros(len(x), dtype=torch.bool)])
    step = max(1, min(2048, parse_bytes(memory) // (8 * len(x))))
    duplicates: list[Duplicate] = []
    for a in range(0, len(x), step):
        sim = unit_x[a : a + step] @ unit_x[a:].T
        # The margin covers the float32 error; candidates are recomputed in float64.
        candidates = torch.nonzero((sim >= threshold - 1e-5).triu_(1)) + a
        for pairs in torch.split(candidates, _CHUNK):
            left, right = (unit(x[pairs[:, side]].double()) for side in (0, 1))
            cosine = (left * right).sum(1).clamp(-1, 1)
            for i, j, s in zip(*pairs.T.tolist(), cosine.tolist(), strict=True):
                exact = bool(row_id[i] == row_id[j]) and s != 0
                if exact or s >= threshold:
                    duplicates.append(Duplicate(i, j, 1.0 if exact else s, exact, bool(codes[i] == codes[j])))
            if len(duplicates) > max_pairs:
                raise DataError(
                    f"threshold: more than {max_pairs:,} pairs are as similar as {threshold}. Raise it, or use "
                    "features of a network that was not trained on these classes."
                )
        if progress:
            progress(min(1.0, (a + step) / len(x)))
    return sorted(duplicates, key=lambda d: (d.same_label, -d.similarity, d.first, d.second))
