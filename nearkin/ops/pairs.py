"""Pairs: similarities with positive and negative masks, which a miner narrows (`Pairs -> Pairs`) and a loss reads.

A class has few samples, so positives are a short list of indices, and negatives are everything but a short list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from nearkin.errors import ConfigError, DataError
from nearkin.ops.geometry import check_finite, cosine_gram, distances, full_precision, gram, unit
from nearkin.ops.reductions import PairSet, mask_indices

Metric = Literal["cosine", "dot"]


@dataclass(frozen=True, eq=False)
class ClassPairs:
    """The pairs of the same class as a list of indices, self-pairs included, and the masks they describe."""

    row: Tensor  # [T] row of every pair
    column: Tensor  # [T] its column
    is_self: Tensor | None  # [T] whether it is a self-pair; None if there are none
    pos: Tensor  # the positive mask that the list describes
    neg: Tensor  # the negative mask that the list describes
    versions: tuple[int, int]  # version counters of the two masks

    def describes(self, pos: Tensor, neg: Tensor) -> bool:
        """Return whether the list is still valid for a pair of masks."""
        return pos is self.pos and neg is self.neg and self.versions == (_version(pos), _version(neg))


def _version(mask: Tensor) -> int:
    """Return the number of in-place writes; inference tensors do not count them."""
    return 0 if mask.is_inference() else mask._version


@dataclass(frozen=True, eq=False)
class Pairs:
    """Anchors [N] against references [M].

    Attributes:
        sim: [N, M] similarities, higher is nearer: cosines, or dot products for `metric="dot"`.
        pos: [N, M] bool: pairs of the same class, self-pairs excluded.
        neg: [N, M] bool: pairs of different classes.
        anchor_sq: [N] squared lengths of the vectors whose products `sim` holds (1, or 0 for a zero vector, if cosine);
            1 if None.
        ref_sq: [M] the same for the references.
        triplets: [T, 3] (anchor, positive, negative) if a miner selected triplets rather than pairs.
        dim: Embedding dimensions, for the miner that needs them.
        same_class: The pairs of the same class as a list of indices; an optimisation only.
    """

    sim: Tensor
    pos: Tensor
    neg: Tensor
    anchor_sq: Tensor | None = None
    ref_sq: Tensor | None = None
    triplets: Tensor | None = None
    dim: int | None = None
    same_class: ClassPairs | None = None

    @cached_property
    def positives(self) -> PairSet:
        """The positive pairs, with an index if they are few."""
        if self.same_class is not None and self.same_class.describes(self.pos, self.neg):
            row, column = self.same_class.row, self.same_class.column
            if self.same_class.is_self is not None:
                others = ~self.same_class.is_self
                row, column = row[others], column[others]
            return PairSet(self.pos, inside=(row, column))
        return PairSet(self.pos, inside=_indices_if_few(self.pos))

    @cached_property
    def negatives(self) -> PairSet:
        """The negative pairs, with an index of all other pairs, or of themselves if a miner left few."""
        if self.same_class is not None and self.same_class.describes(self.pos, self.neg):
            return PairSet(self.neg, outside=(self.same_class.row, self.same_class.column))
        return PairSet(self.neg, inside=_indices_if_few(self.neg))

    def squared_norms(self) -> tuple[Tensor, Tensor]:
        """Return the squared lengths of the anchors [N] and of the references [M]."""
        n, m = self.sim.shape
        anchor = self.sim.new_ones(n) if self.anchor_sq is None else self.anchor_sq
        return anchor, self.sim.new_ones(m) if self.ref_sq is None else self.ref_sq

    def sq_distance(self) -> Tensor:
        """Return squared Euclidean distances [N, M], unclamped: coincident points may have -1e-16."""
        anchor, ref = self.squared_norms()
        return torch.sub(ref, self.sim, alpha=2).add_(anchor[:, None])

    def distance(self) -> Tensor:
        """Return Euclidean distances [N, M]; exactly 0 with zero gradient for coincident points."""
        return distances(self.sim, *self.squared_norms())


def _indices_if_few(mask: Tensor) -> tuple[Tensor, Tensor] | None:
    return mask_indices(mask) if int(mask.count_nonzero()) * 16 <= mask.numel() else None


def pair_up(
    emb: Tensor,
    labels: Tensor | Sequence[int],
    refs: Tensor | None = None,
    ref_labels: Tensor | Sequence[int] | None = None,
    *,
    metric: Metric = "cosine",
    self_columns: Tensor | None = None,
) -> Pairs:
    """Compute all similarities of a batch with itself, or with references (a memory, batches of other processes).

    Args:
        emb: [N, D] embeddings of any float dtype; float16 and bfloat16 are computed in float32.
        labels: [N] integers of any width.
        refs: [M, D] references; the batch itself by default.
        ref_labels: [M] labels of the references.
        metric: "cosine" normalises both sides; "dot" computes dot products.
        self_columns: [N] the column of `refs` that is the anchor itself, removed from both masks.

    Returns:
        The similarities with their masks.

    Raises:
        DataError: The embeddings or labels cannot be used.

    Example:
        >>> pairs = pair_up(torch.eye(3), torch.tensor([7, 7, 9]))
        >>> pairs.pos.tolist()
        [[False, True, False], [True, False, False], [False, False, False]]
    """
    if metric not in ("cosine", "dot"):
        raise ConfigError(f"metric: expected 'cosine' or 'dot', got {metric!r}.")
    if (refs is None) != (ref_labels is None):
        raise ConfigError("pair_up: pass refs and ref_labels together, got only one of them.")
    emb, labels = as_batch(emb, labels)
    with full_precision(emb):
        if refs is None or ref_labels is None:
            ref_labels, self_columns = labels, torch.arange(len(labels), device=emb.device)
            if metric == "cosine":
                sim, anchor_sq = cosine_gram(emb)
            else:
                sim, anchor_sq = gram(emb), _checked_squared_norms(emb)
            ref_sq = anchor_sq
        else:
            refs, ref_labels = as_batch(refs, ref_labels, what="refs")
            if refs.shape[1] != emb.shape[1]:
                raise DataError(
                    f"refs: expected {emb.shape[1]} dimensions, as the embeddings have, got {refs.shape[1]}."
                )
            refs = refs.to(emb.dtype)
            if metric == "cosine":
                emb, refs = unit(emb), unit(refs)
                anchor_sq, ref_sq = ((f.detach().square().sum(1) > 0.5).to(f.dtype) for f in (emb, refs))
            else:
                anchor_sq, ref_sq = _checked_squared_norms(emb), _checked_squared_norms(refs)
            sim = emb @ refs.t()
    pos, neg, same_class = _masks(labels, ref_labels, self_columns)
    return Pairs(sim, pos, neg, anchor_sq, ref_sq, dim=emb.shape[1], same_class=same_class)


def _checked_squared_norms(x: Tensor) -> Tensor:
    check_finite(x)
    return x.square().sum(1)


def _masks(labels: Tensor, ref_labels: Tensor, self_columns: Tensor | None) -> tuple[Tensor, Tensor, ClassPairs | None]:
    """Return the positive and negative masks, and the pairs of the same class if they are few."""
    pos, index = _same_class(labels, ref_labels)
    neg = ~pos
    if self_columns is not None:
        pos.scatter_(1, self_columns[:, None], False)
    if index is None:
        return pos, neg, None
    row, column = index
    is_self = None if self_columns is None else column == self_columns[row]
    return pos, neg, ClassPairs(row, column, is_self, pos, neg, (_version(pos), _version(neg)))


def _same_class(labels: Tensor, ref_labels: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Return the mask of the same class, and its indices if they are few."""
    n, m = len(labels), len(ref_labels)
    if n * m <= 1 << 16:  # for a small block comparing is faster than sorting
        same = labels[:, None] == ref_labels
        row, column = mask_indices(same)
        return same, (row, column) if len(row) * 8 <= n * m else None
    order = torch.argsort(ref_labels, stable=True)
    ranked = ref_labels[order]
    start = torch.searchsorted(ranked, labels)
    size = torch.searchsorted(ranked, labels, right=True) - start
    total = int(size.sum())
    if total * 8 > n * m:
        return labels[:, None] == ref_labels, None
    row = torch.repeat_interleave(size, output_size=total)
    column = order[(start - size.cumsum(0) + size)[row] + torch.arange(total, device=row.device)]
    same = torch.zeros(n, m, dtype=torch.bool, device=row.device)
    same[row, column] = True
    return same, (row, column)


def one_pair_per_class(emb: Tensor, labels: Tensor | Sequence[int]) -> Pairs:
    """Pair the first two samples of every class: one as the anchor, one as the reference.

    Args:
        emb: [N, D] embeddings.
        labels: [N] integers; classes with a single sample are left out.

    Returns:
        Dot products [C', C'] for the C' classes with two samples or more.

    Example:
        >>> one_pair_per_class(torch.eye(5), torch.tensor([4, 2, 4, 4, 2])).pos.tolist()
        [[True, False], [False, True]]
    """
    emb, labels = as_batch(emb, labels)
    check_finite(emb)
    order = torch.argsort(labels, stable=True)
    ranked = labels[order]
    starts = torch.ones_like(ranked, dtype=torch.bool)
    starts[1:] = ranked[1:] != ranked[:-1]
    first = torch.nonzero(starts[:-1] & ~starts[1:]).flatten()
    selected = emb.index_select(0, torch.cat([order[first], order[first + 1]]))
    with full_precision(emb):
        anchor_sq, ref_sq = selected.square().sum(1).tensor_split(2)
        anchors, refs = selected.tensor_split(2)
        sim = anchors @ refs.t()
    pos, neg, same_class = _masks(ranked[first], ranked[first], None)
    return Pairs(sim, pos, neg, anchor_sq, ref_sq, dim=emb.shape[1], same_class=same_class)


def as_batch(emb: Tensor, labels: Tensor | Sequence[int], what: str = "emb") -> tuple[Tensor, Tensor]:
    """Validate a batch. Returns embeddings in float32 or float64, and labels in int64 on the same device."""
    if not isinstance(emb, Tensor) or emb.dim() != 2 or not emb.is_floating_point():
        got = f"{emb.dtype} {list(emb.shape)}" if isinstance(emb, Tensor) else type(emb).__name__
        raise DataError(f"{what}: expected a float tensor [N, D], got {got}.")
    labels = as_labels(labels).to(emb.device)
    if len(labels) != len(emb):
        raise DataError(f"{len(emb)} embeddings but {len(labels)} labels. Pass one label per embedding.")
    if len(emb) == 0:
        raise DataError(f"{what}: the batch is empty.")
    # Half precision cannot represent exp(64) or a sum of 512 squares: compute in float32 at least.
    return (emb.float() if emb.dtype in (torch.float16, torch.bfloat16) else emb), labels


def as_labels(labels: Tensor | Sequence[int]) -> Tensor:
    """Validate labels. Bool and float labels are rejected: rounded ids may be equal by accident."""
    try:
        labels = torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # strings, None, ragged rows, beyond 64 bits
        got = " ".join(repr(labels).split())
        raise DataError(
            f"labels: expected integers, got {got if len(got) < 60 else got[:57] + '...'}. "
            "Number the classes: np.unique(labels, return_inverse=True)[1]."
        ) from None
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise DataError(f"labels: expected integers, got {labels.dtype}. Convert with labels.long() if they are ids.")
    if labels.dim() != 1:
        raise DataError(f"labels: expected one per row, shape [N]; got {list(labels.shape)}.")
    return labels.long()
