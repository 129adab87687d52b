"""Pairs: the one vocabulary that losses and miners share, and the few numeric primitives under it.

    pairs = pair_up(emb, labels)            # cosine similarities [N, N]; self removed by index
    pairs.sim, pairs.pos, pairs.neg         # [N, M] similarities (higher is nearer) and two boolean masks

A miner narrows the masks (`Pairs -> Pairs`), a loss reads them, through `pairs.positives` and `pairs.negatives` when it
sums over many pairs: those know that a class has few members, so that positives are a short list and negatives are
everything but a short list. The sums themselves are in `nearkin.ops.reductions`.
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
class Kin:
    """The pairs of one class as a list, self included, and the masks that the list is true of."""

    row: Tensor
    column: Tensor
    is_self: Tensor | None
    pos: Tensor
    neg: Tensor
    writes: tuple[int, int]

    def describes(self, pos: Tensor, neg: Tensor) -> bool:
        # A miner makes new masks, or (a careless one) writes into these: either way the list no longer holds.
        return pos is self.pos and neg is self.neg and self.writes == (_writes(pos), _writes(neg))


def _writes(mask: Tensor) -> int:
    """How often a tensor was written to in place; tensors of inference mode do not count."""
    return 0 if mask.is_inference() else mask._version


@dataclass(frozen=True, eq=False)
class Pairs:
    """Anchors [N] against references [M].

    sim          [N, M] similarities, higher is nearer: cosines, or plain products for `metric="dot"`
    pos, neg     [N, M] bool: the pairs of one class (self excluded) and of two classes
    anchor_sq    [N] squared lengths of the vectors whose products `sim` holds (1, or 0 for a zero vector, if cosine)
    ref_sq       [M] the same for the references; left out, both are 1
    triplets     [T, 3] (anchor, positive, negative) if a miner chose triplets rather than pairs
    dim          D, the dimension of the vectors, for the miner that needs to know it
    kin          the pairs of one class as a list; it only saves time
    """

    sim: Tensor
    pos: Tensor
    neg: Tensor
    anchor_sq: Tensor | None = None
    ref_sq: Tensor | None = None
    triplets: Tensor | None = None
    dim: int | None = None
    kin: Kin | None = None

    @cached_property
    def positives(self) -> PairSet:
        """The positive pairs, as a list if they are few."""
        if self.kin is not None and self.kin.describes(self.pos, self.neg):
            row, column = self.kin.row, self.kin.column
            if self.kin.is_self is not None:
                others = ~self.kin.is_self
                row, column = row[others], column[others]
            return PairSet(self.pos, inside=(row, column))
        return PairSet(self.pos, inside=_list_if_few(self.pos))

    @cached_property
    def negatives(self) -> PairSet:
        """The negative pairs, as everything but a list if that is short, or as a list if a miner left few."""
        if self.kin is not None and self.kin.describes(self.pos, self.neg):
            return PairSet(self.neg, outside=(self.kin.row, self.kin.column))
        return PairSet(self.neg, inside=_list_if_few(self.neg))

    def squares(self) -> tuple[Tensor, Tensor]:
        """Squared lengths of the anchors [N] and of the references [M]."""
        n, m = self.sim.shape
        anchor = self.sim.new_ones(n) if self.anchor_sq is None else self.anchor_sq
        return anchor, self.sim.new_ones(m) if self.ref_sq is None else self.ref_sq

    def sq_distance(self) -> Tensor:
        """Squared Euclidean distances [N, M], unclamped: rounding may leave -1e-16 for coincident points."""
        anchor, ref = self.squares()
        return torch.sub(ref, self.sim, alpha=2).add_(anchor[:, None])

    def distance(self) -> Tensor:
        """Euclidean distances [N, M]; coincident points are at exactly 0, with zero gradient."""
        return distances(self.sim, *self.squares())


def _list_if_few(mask: Tensor) -> tuple[Tensor, Tensor] | None:
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
    """All similarities of a batch with itself, or with references (a memory, the batches of other processes).

    emb            [N, D] raw embeddings of any float dtype; float16 and bfloat16 are computed in float32
    labels         [N] integers of any width
    refs           [M, D] references; the batch itself when left out
    ref_labels     [M]
    metric         "cosine" normalises both sides; "dot" takes plain products
    self_columns   [N] the column of `refs` that is the anchor itself, removed from both masks

    >>> pairs = pair_up(torch.eye(3), torch.tensor([7, 7, 9]))
    >>> pairs.pos.tolist()
    [[False, True, False], [True, False, False], [False, False, False]]
    """
    if metric not in ("cosine", "dot"):
        raise ConfigError(f"metric: expected 'cosine' or 'dot', got {metric!r}.")
    if (refs is None) != (ref_labels is None):
        raise ConfigError("pair_up: refs and ref_labels go together; got only one of them.")
    emb, labels = as_batch(emb, labels)
    with full_precision(emb):
        if refs is None or ref_labels is None:
            ref_labels, self_columns = labels, torch.arange(len(labels), device=emb.device)
            if metric == "cosine":
                sim, anchor_sq = cosine_gram(emb)
            else:
                sim, anchor_sq = gram(emb), _squares(emb)
            ref_sq = anchor_sq
        else:
            refs, ref_labels = as_batch(refs, ref_labels, what="refs")
            if refs.shape[1] != emb.shape[1]:
                raise DataError(f"refs have {refs.shape[1]} dimensions, the embeddings {emb.shape[1]}.")
            refs = refs.to(emb.dtype)
            if metric == "cosine":
                emb, refs = unit(emb), unit(refs)
                anchor_sq, ref_sq = ((f.detach().square().sum(1) > 0.5).to(f.dtype) for f in (emb, refs))
            else:
                anchor_sq, ref_sq = _squares(emb), _squares(refs)
            sim = emb @ refs.t()
    pos, neg, kin = _masks(labels, ref_labels, self_columns)
    return Pairs(sim, pos, neg, anchor_sq, ref_sq, dim=emb.shape[1], kin=kin)


def _squares(x: Tensor) -> Tensor:
    check_finite(x)
    return x.square().sum(1)


def _masks(labels: Tensor, ref_labels: Tensor, self_columns: Tensor | None) -> tuple[Tensor, Tensor, Kin | None]:
    """Positive and negative masks, and the pairs of one class as a list if it is short."""
    n, m = len(labels), len(ref_labels)
    if n * m <= 1 << 16:  # a small block is compared faster than it is sorted
        pos = labels[:, None] == ref_labels
        row, column = mask_indices(pos)
        return _with_kin(pos, row, column, self_columns)
    order = torch.argsort(ref_labels, stable=True)
    ranked = ref_labels[order]
    start = torch.searchsorted(ranked, labels)
    size = torch.searchsorted(ranked, labels, right=True) - start
    total = int(size.sum())
    if total * 8 > n * m:
        pos = labels[:, None] == ref_labels
        neg = ~pos
        if self_columns is not None:
            pos.scatter_(1, self_columns[:, None], False)
        return pos, neg, None
    row = torch.repeat_interleave(size, output_size=total)
    column = order[(start - size.cumsum(0) + size)[row] + torch.arange(total, device=row.device)]
    pos = torch.zeros(n, m, dtype=torch.bool, device=row.device)
    pos[row, column] = True
    return _with_kin(pos, row, column, self_columns)


def _with_kin(
    same: Tensor, row: Tensor, column: Tensor, self_columns: Tensor | None
) -> tuple[Tensor, Tensor, Kin | None]:
    """Masks from the mask of one class, which becomes the positive one, and its list if that is short."""
    neg = ~same
    if self_columns is not None:
        same.scatter_(1, self_columns[:, None], False)
    if len(row) * 8 > same.numel():
        return same, neg, None
    is_self = None if self_columns is None else column == self_columns[row]
    return same, neg, Kin(row, column, is_self, same, neg, (_writes(same), _writes(neg)))


def one_pair_per_class(emb: Tensor, labels: Tensor | Sequence[int]) -> Pairs:
    """The first two samples of every class that has two: one as anchor, one as reference. [C', C'] plain products.

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
    used = emb.index_select(0, torch.cat([order[first], order[first + 1]]))
    with full_precision(emb):
        anchor_sq, ref_sq = used.square().sum(1).tensor_split(2)
        anchors, refs = used.tensor_split(2)
        sim = anchors @ refs.t()
    pos, diagonal = torch.eye(len(first), dtype=torch.bool, device=emb.device), torch.arange(len(first))
    pos, neg, kin = _with_kin(pos, diagonal.to(emb.device), diagonal.to(emb.device), None)
    return Pairs(sim, pos, neg, anchor_sq, ref_sq, dim=emb.shape[1], kin=kin)


# --- checks -----------------------------------------------------------------------------------------------------------


def as_batch(emb: Tensor, labels: Tensor | Sequence[int], what: str = "emb") -> tuple[Tensor, Tensor]:
    """Embeddings in float32 or float64 and labels in int64 on the same device, or an error that names the cure."""
    if not isinstance(emb, Tensor) or emb.dim() != 2 or not emb.is_floating_point():
        got = f"{emb.dtype} {list(emb.shape)}" if isinstance(emb, Tensor) else type(emb).__name__
        raise DataError(f"{what}: expected a float tensor [N, D], got {got}.")
    labels = as_labels(labels).to(emb.device)
    if len(labels) != len(emb):
        raise DataError(f"{len(emb)} embeddings but {len(labels)} labels; every row needs one label.")
    if len(emb) == 0:
        raise DataError(f"{what}: the batch is empty.")
    # Half precision cannot hold exp(64) or a sum of 512 squares: everything is computed in float32 at least.
    return (emb.float() if emb.dtype in (torch.float16, torch.bfloat16) else emb), labels


def as_labels(labels: Tensor | Sequence[int]) -> Tensor:
    """Labels [N] as int64, exactly. Bool and float labels are refused: equality of rounded ids is no equality."""
    try:
        labels = torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # names, None, rows of several lengths, beyond 64 bits
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
