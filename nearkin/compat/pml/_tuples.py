"""Pairs and triplets of a batch, as pytorch-metric-learning enumerates them.

All pairs of the labels are two masks [N, M], and all triplets the combinations of these, computed by blocks of anchors.
What the user passes, or a miner returns, are lists of indices.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from nearkin.errors import DataError
from nearkin.ops.pairs import Pairs
from nearkin.ops.reductions import log_sum_exp
from nearkin.ops.row_blocks import by_rows

TripletFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class PairList:
    """Pairs of anchors [N] and references [M]: a mask, or two lists of indices in which a pair may occur repeatedly.

    It unpacks like the two lists.
    """

    def __init__(self, shape: tuple[int, int], mask: Tensor | None = None, lists: Sequence[Tensor] = ()) -> None:
        self.shape, self.given_mask, self.given_lists = shape, mask, lists
        if len(lists) and len(lists[0]) and any(int(x.max()) >= n for x, n in zip(lists, shape, strict=True)):
            raise DataError(f"indices_tuple: expected indices below {shape}, got larger ones.")

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.given_lists if self.given_mask is None else self.given_mask.nonzero(as_tuple=True))

    @cached_property
    def _flat(self) -> Tensor:
        anchors, others = self
        return (anchors * self.shape[1] + others).long()

    @cached_property
    def repeats(self) -> Tensor:
        """[N, M] how often each pair occurs."""
        if self.given_mask is not None:
            return self.given_mask.long()
        return torch.bincount(self._flat, minlength=self.shape[0] * self.shape[1]).view(self.shape)

    @cached_property
    def mask(self) -> Tensor:
        return self.repeats > 0 if self.given_mask is None else self.given_mask

    @cached_property
    def count(self) -> int:
        return len(self.given_lists[0]) if self.given_mask is None else int(self.given_mask.count_nonzero())

    def select(self, values: Tensor) -> Tensor:
        """Return the entries [P] of a matrix [N, M], in the order of the lists."""
        if self.given_mask is not None:
            return values.masked_select(self.given_mask)
        return values.reshape(-1).index_select(0, self._flat)

    def log_sum_exp(self, x: Tensor) -> Tensor:
        """Compute log sum exp over the pairs of each anchor [N]; -inf without pairs."""
        if self.given_mask is None:
            x = x + self.repeats.to(x.dtype).log().clamp(min=0.0)
        return log_sum_exp(x, self.mask)


Indices = Sequence[Tensor] | tuple[PairList, PairList] | None  # two PairLists come from a memory


def match_masks(labels: Tensor, ref_labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the masks of all positive and all negative pairs; self-pairs are excluded if both are the same tensor."""
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


@dataclass(frozen=True, eq=False)
class TripletSet:
    """Triplets: lists of indices, or all combinations of the positive and the negative pairs of each anchor."""

    pos: PairList
    neg: PairList
    given: tuple[Tensor, ...] | None = None

    @cached_property
    def lists(self) -> tuple[Tensor, ...]:
        if self.given is not None:
            return self.given
        anchors, positives = self.pos
        pair, negatives = self.neg.mask[anchors].nonzero(as_tuple=True)
        return anchors[pair], positives[pair], negatives

    @cached_property
    def count(self) -> int:
        if self.given is not None:
            return len(self.given[0])
        return int((self.pos.mask.sum(1) * self.neg.mask.sum(1)).sum())

    def by_blocks(self, function: Callable[..., Tensor], mat: Tensor, with_pn: bool = False) -> Tensor:
        """Compute a function of the triplets of each anchor, some anchors at a time.

        It takes d(a, p) [n, K, 1], d(a, n) [n, 1, M], which triplets exist [n, K, M] and, `with_pn`, d(p, n) [n, K, M].
        """
        columns, used = Pairs(mat, self.pos.mask, self.neg.mask).positive_columns()

        def block(rows: Tensor, columns: Tensor, used: Tensor, neg: Tensor, *others: Tensor) -> Tensor:
            exists = used[:, :, None] & neg[:, None]
            return function(rows.gather(1, columns)[:, :, None], rows[:, None], exists, *(x[columns] for x in others))

        width = max(1, columns.shape[1]) * mat.shape[1]
        return by_rows(block, mat, columns, used, self.neg.mask, shared=(mat,) if with_pn else (), width=width)


class TripletLosses:
    """The values of triplets that are not listed: `value` takes d(a, p), d(a, n) and, `with_pn`, d(p, n).

    `fast_sums` may return the sum of each anchor's values [N], and how many are above 0, without enumeration.
    """

    def __init__(
        self,
        triplets: TripletSet,
        mat: Tensor,
        value: TripletFunction,
        with_pn: bool = False,
        fast_sums: Callable[[], tuple[Tensor, int]] | None = None,
    ) -> None:
        self.triplets, self.mat, self.value, self.with_pn, self.fast_sums = triplets, mat, value, with_pn, fast_sums

    def listed(self) -> Tensor:
        """Return one value per triplet."""
        a, p, n = self.triplets.lists
        flat, width = self.mat.reshape(-1), self.mat.shape[1]  # faster than mat[a, p] in the backward pass
        pairs = ((a, p), (a, n), (p, n))[: 3 if self.with_pn else 2]
        entries = [flat.index_select(0, row * width + column) for row, column in pairs]
        return self.value(entries[0], entries[1], entries[2] if self.with_pn else None)

    def sums(self, low: float | None = None, high: float | None = None) -> tuple[Tensor, int]:
        """Return the sums [N] of each anchor's values between two bounds, and the number of these values."""
        if self.fast_sums is not None and high is None and low in (None, 0):
            total, above = self.fast_sums()
            return total, self.triplets.count if low is None else above

        def inside(ap: Tensor, an: Tensor, exists: Tensor, pn: Tensor | None = None) -> tuple[Tensor, Tensor]:
            values = self.value(ap, an, pn)
            return values, exists & within(values, low, high)

        def block_sums(*block: Tensor) -> Tensor:
            values, kept = inside(*block)
            return torch.where(kept, values, 0.0).sum((1, 2))

        def block_counts(*block: Tensor) -> Tensor:
            return inside(*block)[1].sum((1, 2))

        total = self.triplets.by_blocks(block_sums, self.mat, self.with_pn)
        if low is None and high is None:
            return total, self.triplets.count
        with torch.no_grad():
            return total, int(self.triplets.by_blocks(block_counts, self.mat, self.with_pn).sum())


def within(values: Tensor, low: float | None, high: float | None) -> Tensor:
    """Return which values are between two bounds."""
    above = torch.ones_like(values, dtype=torch.bool) if low is None else values > low
    return above if high is None else above & (values < high)


def random_triplets(
    labels: Tensor, ref_labels: Tensor, per_anchor: int | None = None, weights: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Draw positives uniformly, and negatives uniformly or by weights [N, M], for the anchors of each class in turn.

    The random calls are those of pytorch-metric-learning, so a seed gives the same triplets.
    """
    found: list[tuple[Tensor, ...]] = [(torch.arange(0, device=labels.device),) * 3]
    with_self = ref_labels is labels
    for label in torch.unique(labels):
        of_class, other = (ref_labels == label).nonzero()[:, 0], (ref_labels != label).nonzero()[:, 0]
        anchors = (labels == label).nonzero()[:, 0]
        if len(of_class) < 1 + with_self or not len(other):
            continue
        draws = len(of_class) if per_anchor is None else per_anchor
        which = torch.randint(0, len(of_class) - with_self, (len(anchors) * draws,)).to(labels.device)
        row = torch.arange(len(anchors), device=labels.device).repeat_interleave(draws)
        if with_self:  # the anchor's own position is skipped
            which = which + (which >= row)
        a, p = anchors[row], of_class[which]
        if weights is None:
            n = torch.randint(0, len(other), (len(a),)).to(labels.device)
        else:
            weight = weights[:, other][a]
            drawable = (weight.sum(1) > 0).nonzero()[:, 0]
            if not len(drawable):
                continue
            a, p, weight = a[drawable], p[drawable], weight[drawable]
            n = torch.multinomial(weight.float() if weight.dtype == torch.float16 else weight, 1, True).flatten()
        found.append((a, p, other[n]))
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def sample_weights(indices: Indices, labels: Tensor, dtype: torch.dtype, *, anchors_only: bool = False) -> Tensor:
    """Return how often each sample occurs in the indices [N], divided by the largest number; 1 without indices."""
    if indices is None:
        return torch.ones(len(labels), dtype=dtype, device=labels.device)
    if isinstance(indices[0], PairList):
        counts = sum(pairs.mask.sum(1) for pairs in indices if isinstance(pairs, PairList))
    else:
        anchors = indices[:1] if len(indices) == 3 else indices[::2]
        counts = torch.bincount(torch.cat([*(anchors if anchors_only else indices)]), minlength=len(labels))
    counts = torch.as_tensor(counts)
    return counts.to(dtype) / counts.max() if int(counts.max()) else torch.ones_like(counts, dtype=dtype)
