"""The miners of pytorch-metric-learning: modules that return indices of pairs (a1, p, a2, n) or triplets (a, p, n)."""

import math
from collections.abc import Callable
from dataclasses import field
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from nearkin.compat.pml._loss_base import WithDistance, check_labels
from nearkin.compat.pml._tuples import as_pairs, match_masks, random_triplets
from nearkin.compat.pml.coverage import absent_names
from nearkin.compat.pml.distances import CosineSimilarity, LpDistance
from nearkin.errors import ConfigError
from nearkin.losses.miners import multi_similarity
from nearkin.ops.pairs import Pairs

__all__ = [
    "AngularMiner", "BaseMiner", "BatchEasyHardMiner", "BatchHardMiner", "DistanceWeightedMiner",
    "EmbeddingsAlreadyPackagedAsTriplets", "HDCMiner", "MultiSimilarityMiner", "PairMarginMiner", "TripletMarginMiner",
    "UniformHistogramMiner",
]  # fmt: skip
__getattr__ = absent_names("miners")

Mined = tuple[Tensor, ...]
Range = tuple[float, float]
_BLOCK = 1 << 20  # triplets that are compared at a time


class BaseMiner(WithDistance):
    """The base of all miners: subclasses define `mine`. Sets `num_triplets`, or `num_pos_pairs` and `num_neg_pairs`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_pos_pairs = self.num_neg_pairs = self.num_triplets = 0

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> Mined:
        """Return indices; those of our miners that use nothing else define `select`."""
        return self.select(self.distance(embeddings, ref_emb), *match_masks(labels, ref_labels))

    def select(self, mat: Tensor, pos: Tensor, neg: Tensor) -> Mined:
        """Return indices, from the distances [N, M] and the masks of all pairs."""
        raise NotImplementedError

    @torch.no_grad()
    def forward(
        self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor | None = None, ref_labels: Tensor | None = None
    ) -> Mined:
        own, labels = labels, check_labels(embeddings, labels)
        if ref_emb is None:
            ref_emb, ref_labels = embeddings, labels
        elif ref_labels is None:
            raise ConfigError(f"{type(self).__name__}: pass ref_labels with ref_emb.")
        ref_labels = labels if ref_labels is own or ref_labels is labels else ref_labels.to(ref_emb.device)
        mined = self.mine(embeddings, labels, ref_emb, ref_labels)
        self.output_assertion(mined)
        return mined

    def output_assertion(self, output: Mined) -> None:
        if len(output) == 3:
            self.num_triplets = len(output[0])
        else:
            a1, _, a2, _ = as_pairs(output)
            self.num_pos_pairs, self.num_neg_pairs = len(a1), len(a2)


def _lists(pos: Tensor, neg: Tensor) -> Mined:
    return *pos.nonzero(as_tuple=True), *neg.nonzero(as_tuple=True)


def _select_triplets(pos: Tensor, neg: Tensor, keep: Callable[[Tensor, Tensor], Tensor]) -> Mined:
    """Return the triplets that are kept, in the order of their indices.

    `keep(anchors, positives)` returns bool [P, M], whether each reference is to be a negative of each positive pair.
    """
    anchors, positives = pos.nonzero(as_tuple=True)
    found: list[Mined] = [(anchors[:0],) * 3]
    step = max(1, _BLOCK // pos.shape[1])
    for start in range(0, len(anchors), step):
        a, p = anchors[start : start + step], positives[start : start + step]
        pair, n = (keep(a, p) & neg[a]).nonzero(as_tuple=True)
        found.append((a[pair], p[pair], n))
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


class AngularMiner(BaseMiner):
    """Triplets whose angle at the negative exceeds a bound in degrees."""

    angle: float = 20

    required = partial(LpDistance, p=2, power=1, normalize_embeddings=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.angle = math.radians(self.angle)

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> Mined:
        eps = 1e-6  # that torch adds to every difference in pairwise_distance

        def keep(a: Tensor, p: Tensor) -> Tensor:
            anchor, positive = embeddings[a], ref_emb[p]
            center = (anchor + positive) / 2
            to_negative = torch.cdist(center - eps, ref_emb, compute_mode="donot_use_mm_for_euclid_dist")
            width = nn.functional.pairwise_distance(anchor, positive)
            return torch.atan(width[:, None] / (2 * to_negative)) > self.angle

        return _select_triplets(*match_masks(labels, ref_labels), keep)


class TripletMarginMiner(BaseMiner):
    """Triplets by how much farther the negative is than the positive."""

    margin: float = 0.2
    type_of_triplets: str = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.type_of_triplets not in ("all", "hard", "semihard", "easy"):
            raise ConfigError(f"TripletMarginMiner: unknown type_of_triplets {self.type_of_triplets!r}.")

    def select(self, mat: Tensor, pos: Tensor, neg: Tensor) -> Mined:
        def keep(a: Tensor, p: Tensor) -> Tensor:
            gap: Tensor = self.distance.margin(mat[a], mat[a, p][:, None])
            if self.type_of_triplets == "easy":
                return gap > self.margin
            ranges = {"all": gap <= self.margin, "hard": gap <= min(0, self.margin)}
            return ranges.get(self.type_of_triplets, (gap > 0) & (gap <= self.margin))

        return _select_triplets(pos, neg, keep)


class PairMarginMiner(BaseMiner):
    """Positive pairs that are farther than one distance, and negative pairs that are nearer than another."""

    pos_margin: float = 0.2
    neg_margin: float = 0.8

    def select(self, mat: Tensor, pos: Tensor, neg: Tensor) -> Mined:
        if self.distance.is_inverted:
            return _lists(pos & (mat < self.pos_margin), neg & (mat > self.neg_margin))
        return _lists(pos & (mat > self.pos_margin), neg & (mat < self.neg_margin))


class MultiSimilarityMiner(BaseMiner):
    """Pairs that are within epsilon of the hardest pair of the other sign."""

    epsilon: float = 0.1

    default_distance = CosineSimilarity

    def select(self, mat: Tensor, pos: Tensor, neg: Tensor) -> Mined:
        hard = multi_similarity(Pairs(self.as_similarity(mat), pos, neg), epsilon=self.epsilon)
        found: list[Tensor] = []
        for mask in (hard.pos, hard.neg):  # by anchor, and by distance for each
            anchors, others = mask.nonzero(as_tuple=True)
            order = mat[anchors, others].argsort(stable=True)
            order = order[anchors[order].argsort(stable=True)]
            found += [anchors[order], others[order]]
        return tuple(found)


class BatchEasyHardMiner(BaseMiner):
    """For each anchor one positive and one negative: the hardest, the easiest, or the hardest that is semihard."""

    pos_strategy: str = "easy"
    neg_strategy: str = "semihard"
    allowed_pos_range: Range | None = None
    allowed_neg_range: Range | None = None

    HARD: ClassVar[str] = "hard"
    SEMIHARD: ClassVar[str] = "semihard"
    EASY: ClassVar[str] = "easy"
    ALL: ClassVar[str] = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        both = {self.pos_strategy, self.neg_strategy}
        if not both <= {"hard", "semihard", "easy", "all"} or (both - {"all"} == {"semihard"}):
            raise ValueError(f'strategies: expected "semihard" with "hard" or "easy", or others, got {sorted(both)}')

    def select(self, mat: Tensor, pos: Tensor, neg: Tensor) -> Mined:
        positive = partial(self._one, mat, pos, self.pos_strategy != "easy", self.allowed_pos_range)
        negative = partial(self._one, mat, neg, self.neg_strategy == "easy", self.allowed_neg_range)
        anchors = torch.arange(len(mat), device=mat.device)
        if "all" in (self.pos_strategy, self.neg_strategy):
            lists: list[Tensor] = []
            sides = ((self.pos_strategy, pos, positive), (self.neg_strategy, neg, negative))
            for strategy, mask, one in sides:
                _, index, found = one()
                lists += mask.nonzero(as_tuple=True) if strategy == "all" else (anchors[found], index[found])
            return tuple(lists)
        if self.pos_strategy == "semihard":
            values, n, has_neg = negative()
            _, p, has_pos = positive(values)
        else:
            values, p, has_pos = positive()
            _, n, has_neg = negative(values if self.neg_strategy == "semihard" else None)
        kept = has_pos & has_neg
        return anchors[kept], p[kept], anchors[kept], n[kept]

    def _one(
        self, mat: Tensor, mask: Tensor, farthest: bool, allowed: Range | None, limit: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return each anchor's farthest or nearest pair of a mask: value, index, and whether there is one."""
        largest = farthest != self.distance.is_inverted
        if limit is not None:  # of a semihard pair
            mask = mask & (mat < limit[:, None] if largest else mat > limit[:, None])
        if allowed is not None:
            mask = mask & (mat <= allowed[1]) & (mat >= allowed[0])
        bounds = torch.finfo(mat.dtype)
        filled = mat.masked_fill(~mask, bounds.min if largest else bounds.max)
        values, index = filled.max(1) if largest else filled.min(1)
        return values, index, mask.any(1)


class BatchHardMiner(BatchEasyHardMiner):
    """For each anchor the farthest positive and the nearest negative, as triplets."""

    pos_strategy: str = field(default="hard", init=False)
    neg_strategy: str = field(default="hard", init=False)

    def select(self, mat: Tensor, pos: Tensor, neg: Tensor) -> Mined:
        a, p, _, n = super().select(mat, pos, neg)
        return a, p, n


class DistanceWeightedMiner(BaseMiner):
    """Random negatives such that all distances are about equally likely, and random positives."""

    cutoff: float = 0.5
    nonzero_loss_cutoff: float = 1.4

    required = partial(LpDistance, p=2, power=1, normalize_embeddings=True)

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> Mined:
        d = embeddings.shape[1]
        mat = self.distance(embeddings, ref_emb).clamp(min=self.cutoff)
        log_weight = (2.0 - d) * mat.log() - (d - 3) / 2 * torch.log(1.0 - 0.25 * mat**2)
        is_finite = log_weight.isfinite()
        _, neg = match_masks(labels, ref_labels)
        log_weight = log_weight * neg
        weight = (log_weight - log_weight[is_finite].max()).exp()
        weight = weight.masked_fill(~(neg & is_finite & (mat < self.nonzero_loss_cutoff)), 0.0)
        return random_triplets(labels, ref_labels, weights=weight / weight.sum(1, keepdim=True))


class EmbeddingsAlreadyPackagedAsTriplets(BaseMiner):
    """Triplets of three consecutive rows: anchor, positive, negative."""

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> Mined:
        return tuple(torch.arange(i, len(embeddings), 3) for i in range(3))


class HDCMiner(BaseMiner):
    """A share of all positive pairs, the farthest, and of all negative pairs, the nearest."""

    filter_percentage: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._external: Mined | None = None

    def set_idx_externally(self, external_indices_tuple: Mined, labels: Tensor) -> None:
        """Use these pairs from now on, in place of all pairs of a batch."""
        self._external = as_pairs(external_indices_tuple)

    def reset_idx(self) -> None:
        """Use all pairs of a batch again."""
        self._external = None

    def select(self, mat: Tensor, pos: Tensor, neg: Tensor) -> Mined:
        lists = _lists(pos, neg) if self._external is None else self._external
        found: list[Tensor] = []
        for (a, other), farthest in ((lists[:2], True), (lists[2:], False)):
            k = math.ceil(self.filter_percentage * len(a))
            index = torch.topk(mat[a, other], k, largest=farthest != self.distance.is_inverted).indices
            found += [a[index], other[index]]
        if self._external is not None:
            self._external = tuple(found)  # each further call filters what is left
        return tuple(found)


class UniformHistogramMiner(BaseMiner):
    """Random pairs, equally many of each bin of distances."""

    num_bins: int = 100
    pos_per_bin: int = 10
    neg_per_bin: int = 10

    def select(self, mat: Tensor, pos: Tensor, neg: Tensor) -> Mined:
        found: list[Tensor] = []
        for mask, count in ((pos, self.pos_per_bin), (neg, self.neg_per_bin)):
            index = self._draw(mat.masked_select(mask), count)
            found += [x[index] for x in mask.nonzero(as_tuple=True)]
        return tuple(found)

    def _draw(self, values: Tensor, count: int) -> Tensor:
        if not len(values):
            return torch.arange(0, device=values.device)
        low, high = values.aminmax()
        edges = torch.linspace(low, high, self.num_bins + 1, dtype=values.dtype, device=values.device)
        bins = (torch.bucketize(values, edges, right=True) - 1).clamp(0, self.num_bins - 1)
        order, sizes = bins.argsort(stable=True), torch.bincount(bins, minlength=self.num_bins).tolist()
        # One call for each bin, as in the original: a seed gives the same pairs.
        drawn = [
            part[torch.multinomial(torch.ones(len(part), device=part.device), count, replacement=True)]
            for part in torch.split(order, sizes)
            if len(part)
        ]
        return torch.cat(drawn)
