"""Pairs and triplets of a batch, as pytorch-metric-learning enumerates them.

All pairs of the labels are two masks [N, M], and all triplets the combinations of these, computed by blocks of anchors.
What the user passes, or a miner returns, are lists of indices.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from nearkin.compat.pml.distances import as_single
from nearkin.errors import DataError
from nearkin.ops.pairs import Pairs
from nearkin.ops.reductions import log_sum_exp, sum_of_violations
from nearkin.ops.row_blocks import by_rows, per_row


class PairList:
    """Pairs of anchors [N] and references [M]: a mask, or two lists of indices in which a pair may occur repeatedly.

    It unpacks like the two lists.
    """

    def __init__(self, shape: Sequence[int], mask: Tensor | None = None, lists: Sequence[Tensor] = ()) -> None:
        self.shape, self.is_listed = shape, mask is None
        if mask is not None:
            self.mask = mask
        elif len(lists[0]) and any(int(x.max()) >= n for x, n in zip(lists, shape, strict=True)):
            raise DataError(f"indices_tuple: expected indices below {shape}, got larger ones.")
        else:
            self.lists = tuple(lists)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.lists)

    @cached_property
    def lists(self) -> tuple[Tensor, ...]:
        return self.mask.nonzero(as_tuple=True)

    @cached_property
    def _flat(self) -> Tensor:
        return (self.lists[0] * self.shape[1] + self.lists[1]).long()

    @cached_property
    def _repeats(self) -> Tensor:
        return torch.bincount(self._flat, minlength=self.shape[0] * self.shape[1]).view(self.shape)

    @cached_property
    def mask(self) -> Tensor:
        return self._repeats > 0

    @cached_property
    def count(self) -> int:
        return len(self.lists[0]) if self.is_listed else int(self.mask.count_nonzero())

    def select(self, values: Tensor) -> Tensor:
        """Return the entries [P] of a matrix [N, M], in the order of the lists."""
        if self.is_listed:  # the backward pass is faster than that of values[a, p]
            return values.reshape(-1).index_select(0, self._flat)
        return values.masked_select(self.mask)

    def log_sum_exp(self, x: Tensor) -> Tensor:
        """Compute log sum exp over the pairs of each anchor [N]; -inf without pairs."""
        if self.is_listed:
            x = x + self._repeats.to(x.dtype).log().clamp(min=0.0)
        return log_sum_exp(x, self.mask)


Indices = Sequence[Tensor] | tuple[PairList, PairList] | None  # two PairLists come from a memory


@dataclass(frozen=True, eq=False)
class Triplets:
    """Triplets: two lists of pairs side by side, or all combinations of an anchor's positive and negative pairs."""

    pos: PairList
    neg: PairList
    is_listed: bool = False

    def listed(self) -> "Triplets":
        """Return them as two lists side by side."""
        if self.is_listed:
            return self
        anchors, positives = self.pos
        pair, negatives = self.neg.mask[anchors].nonzero(as_tuple=True)
        shape, a = self.pos.shape, anchors[pair]
        return Triplets(PairList(shape, lists=(a, positives[pair])), PairList(shape, lists=(a, negatives)), True)

    @cached_property
    def count(self) -> int:
        return self.pos.count if self.is_listed else int((self.pos.mask.sum(1) * self.neg.mask.sum(1)).sum())

    def by_blocks(self, function: Callable[..., Tensor], mat: Tensor, with_pn: bool = False) -> Tensor:
        """Compute a function of the triplets of each anchor, some anchors at a time.

        It takes which triplets exist [n, K, M], d(a, p) [n, K, 1], d(a, n) [n, 1, M] and, `with_pn`, d(p, n) [n, K, M].
        """
        columns, used = Pairs(mat, self.pos.mask, self.neg.mask).positive_columns()

        def block(rows: Tensor, columns: Tensor, used: Tensor, neg: Tensor, *others: Tensor) -> Tensor:
            exists = used[:, :, None] & neg[:, None]
            return function(exists, rows.gather(1, columns)[:, :, None], rows[:, None], *(x[columns] for x in others))

        width = max(1, columns.shape[1]) * mat.shape[1]
        return by_rows(block, mat, columns, used, self.neg.mask, shared=(mat,) if with_pn else (), width=width)


@dataclass(frozen=True, eq=False)
class TripletLosses:
    """The values of triplets that need not be listed: `value` takes d(a, p), d(a, n) and, `with_pn`, d(p, n).

    `hinge` has similarities and a margin if the values are max(0, s_n - s_p + margin): their sums come from sorting.
    """

    triplets: Triplets
    mat: Tensor
    value: Callable[..., Tensor]
    with_pn: bool = False
    hinge: tuple[Tensor, float] | None = None

    def listed(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return one value per triplet, and the lists of anchors, positives and negatives."""
        triplets = self.triplets.listed()
        (a, p), (_, n) = triplets.pos, triplets.neg
        pairs = [triplets.pos, triplets.neg]
        if self.with_pn:
            pairs.append(PairList(self.mat.shape, lists=(p, n)))
        return self.value(*(x.select(self.mat) for x in pairs)), (a, p, n)

    def sums(self, low: float | None = None, high: float | None = None) -> tuple[Tensor, int]:
        """Return the sums [N] of each anchor's values between two bounds, and the number of these values."""
        if self.hinge is not None and high is None and low in (None, 0):
            p = Pairs(self.hinge[0], self.triplets.pos.mask, self.triplets.neg.mask)
            total = sum_of_violations(p, per_row(self.hinge[1], p.sim)[:, None])
            if low is None:
                return total, self.triplets.count
            columns, is_positive = p.positive_columns()
            ranked = p.sim.detach().gather(1, columns).masked_fill(~is_positive, float("inf")).sort(1).values
            below = torch.searchsorted(ranked, p.sim.detach() + self.hinge[1])  # [N, M] number of positives
            return total, int(below.masked_fill_(~p.neg, 0).sum())

        def block_sums(exists: Tensor, *distances: Tensor) -> Tensor:
            values = self.value(*distances)
            used = exists & within(values, low, high)
            return torch.stack([torch.where(used, values, 0.0).sum((1, 2)), used.sum((1, 2)).to(values.dtype)], 1)

        total, number = self.triplets.by_blocks(block_sums, self.mat, self.with_pn).unbind(1)
        return total, int(number.long().sum())


def within(values: Tensor, low: float | None, high: float | None) -> Tensor:
    """Return which values are between two bounds."""
    above = torch.ones_like(values, dtype=torch.bool) if low is None else values > low
    return above if high is None else above & (values < high)


@dataclass(frozen=True, eq=False)
class Batch:
    """What a loss is called with; the references are the batch itself if none are given."""

    emb: Tensor
    labels: Any
    indices: Any
    ref: Tensor
    ref_labels: Any

    def pairs(self) -> tuple[PairList, PairList]:
        """Return the positive and the negative pairs: of the indices, or of the labels."""
        shape = len(self.emb), len(self.ref)
        if self.indices is None:
            pos, neg = match_masks(self.labels, self.ref_labels)
            return PairList(shape, pos), PairList(shape, neg)
        if isinstance(self.indices[0], PairList):
            return self.indices[0], self.indices[1]
        lists = as_pairs(self.indices)
        return PairList(shape, lists=lists[:2]), PairList(shape, lists=lists[2:])

    def triplets(self, per_anchor: int | str = "all") -> Triplets:
        """Return the triplets of the indices or of the labels: all, or some at random for each anchor."""
        given = self.indices
        if given is None and per_anchor != "all":
            given = random_triplets(self.labels, self.ref_labels, int(per_anchor))
        elif given is not None and len(given) == 4:
            given = as_triplets(given)
        return Triplets(*replace(self, indices=given).pairs(), is_listed=given is not None and len(given) == 3)

    def weights(self, *, anchors_only: bool = False) -> Tensor:
        return sample_weights(self.indices, self.labels, self.emb.dtype, anchors_only=anchors_only)


def match_masks(labels: Any, ref_labels: Any) -> tuple[Tensor, Tensor]:
    """Return the masks of all positive and all negative pairs; self-pairs are excluded if both are the same tensor."""
    if labels is None or ref_labels is None:
        raise ValueError("labels and indices_tuple cannot both be None")
    same = labels[:, None] == ref_labels
    return (same.clone().fill_diagonal_(False) if ref_labels is labels else same), ~same


def as_pairs(indices: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return anchors, positives, anchors and negatives of 3 or 4 lists of indices."""
    if len(indices) not in (3, 4):
        raise DataError(f"indices_tuple: expected 3 (triplets) or 4 (pairs) tensors of indices, got {len(indices)}.")
    return indices[0], indices[1], indices[-2] if len(indices) == 4 else indices[0], indices[-1]


def as_triplets(indices: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return anchors, positives and negatives of 3 or 4 lists of indices."""
    if len(indices) == 3:
        return tuple(indices)
    a1, p, a2, n = as_pairs(indices)
    pos, neg = (a1[:, None] == a2).nonzero(as_tuple=True)
    return a1[pos], p[pos], n[neg]


def random_triplets(
    labels: Tensor, ref_labels: Tensor, per_anchor: int | None = None, weights: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Draw positives uniformly, and negatives uniformly or by weights [N, M], for the anchors of each class in turn.

    The random calls are those of pytorch-metric-learning, so a seed gives the same triplets.
    """
    found: list[tuple[Tensor, ...]] = [(torch.arange(0, device=labels.device),) * 3]
    with_self = ref_labels is labels
    for label in torch.unique(labels):
        masks = labels == label, ref_labels == label, ref_labels != label
        anchors, of_class, other = (mask.nonzero()[:, 0] for mask in masks)
        if len(of_class) <= with_self or not len(other):
            continue
        draws = per_anchor or len(of_class)
        which = torch.randint(0, len(of_class) - with_self, (len(anchors) * draws,)).to(labels.device)
        row = torch.arange(len(anchors), device=labels.device).repeat_interleave(draws)
        skipped = (which >= row) * with_self  # the anchor's own position
        a, p = anchors[row], of_class[which + skipped]
        if weights is None:
            n = torch.randint(0, len(other), (len(a),)).to(labels.device)
        else:
            weight = weights[:, other][a]
            drawable = weight.sum(1) > 0
            if not drawable.any():
                continue
            a, p = a[drawable], p[drawable]
            n = torch.multinomial(as_single(weight[drawable]), 1, True).flatten()
        found.append((a, p, other[n]))
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def sample_weights(indices: Indices, labels: Tensor, dtype: torch.dtype, *, anchors_only: bool = False) -> Tensor:
    """Return how often each sample occurs in the indices [N], divided by the largest number; 1 without indices."""
    if indices is None:
        return torch.ones(len(labels), dtype=dtype, device=labels.device)
    lists: tuple[Any, ...] = (*indices[0], *indices[1]) if isinstance(indices[0], PairList) else tuple(indices)
    if anchors_only:
        lists = lists[:1] if len(lists) == 3 else lists[::2]
    counts = torch.bincount(torch.cat(lists), minlength=len(labels))
    return counts.to(dtype) / counts.max() if int(counts.max()) else torch.ones_like(counts, dtype=dtype)
