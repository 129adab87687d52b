"""The miners of pytorch-metric-learning: modules that return indices of pairs (a1, p, a2, n) or triplets (a, p, n)."""

import math
from collections.abc import Callable
from dataclasses import field
from functools import partial

import torch
from torch import Tensor, nn

from nearkin.compat.pml._loss_base import WithDistance, check_labels
from nearkin.compat.pml._tuples import as_pairs, match_masks, random_triplets
from nearkin.compat.pml.distances import EUCLIDEAN, CosineSimilarity
from nearkin.errors import ConfigError
from nearkin.losses.miners import distance_weights, multi_similarity
from nearkin.ops.pairs import Pairs, pair_up

Mined = tuple[Tensor, ...]
Range = tuple[float, float]
_BLOCK = 1 << 20  # triplets that are compared at a time


class BaseMiner(WithDistance):
    """The base of all miners: subclasses define `mine`. Sets `num_triplets`, or `num_pos_pairs` and `num_neg_pairs`."""

    num_pos_pairs = num_neg_pairs = num_triplets = 0

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
        own = check_labels(embeddings, labels)
        if ref_emb is None:
            ref_emb, ref_labels = embeddings, labels
        elif ref_labels is None:
            raise ConfigError(f"{type(self).__name__}: pass ref_labels with ref_emb.")
        mined = self.mine(embeddings, own, ref_emb, own if ref_labels is labels else ref_labels.to(ref_emb.device))
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
    for a, p in zip(torch.split(anchors, step), torch.split(positives, step), strict=True):
        pair, n = (keep(a, p) & neg[a]).nonzero(as_tuple=True)
        found.append((a[pair], p[pair], n))
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


class AngularMiner(BaseMiner, required=EUCLIDEAN, stored={"angle": math.radians}):
    """Triplets whose angle at the negative exceeds a bound in degrees."""

    angle: float = 20

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> Mined:
        def keep(a: Tensor, p: Tensor) -> Tensor:
            anchor, positive = embeddings[a], ref_emb[p]
            center = (anchor + positive) / 2 - 1e-6  # what torch adds to every difference in pairwise_distance
            to_negative = torch.cdist(center, ref_emb, compute_mode="donot_use_mm_for_euclid_dist")
            width = nn.functional.pairwise_distance(anchor, positive)
            return torch.atan(width[:, None] / (2 * to_negative)) > self.angle

        return _select_triplets(*match_masks(labels, ref_labels), keep)


class TripletMarginMiner(BaseMiner):
    """Triplets by how much farther the negative is than the positive."""

    margin: float = 0.2
    type_of_triplets: str = "all"

    def select(self, mat: Tensor, pos: Tensor, neg: Tensor) -> Mined:
        inf, margin = float("inf"), self.margin
        ranges = {"all": (-inf, margin), "hard": (-inf, min(0, margin)), "semihard": (0, margin), "easy": (margin, inf)}
        if self.type_of_triplets not in ranges:
            raise ConfigError(f"TripletMarginMiner: unknown type_of_triplets {self.type_of_triplets!r}.")
        low, high = ranges[self.type_of_triplets]

        def keep(a: Tensor, p: Tensor) -> Tensor:
            gap: Tensor = self.distance.margin(mat[a], mat[a, p][:, None])
            return (gap > low) & (gap <= high)

        return _select_triplets(pos, neg, keep)


class PairMarginMiner(BaseMiner):
    """Positive pairs that are farther than one distance, and negative pairs that are nearer than another."""

    pos_margin: float = 0.2
    neg_margin: float = 0.8

    def select(self, mat: Tensor, pos: Tensor, neg: Tensor) -> Mined:
        farther, nearer = (torch.lt, torch.gt) if self.distance.is_inverted else (torch.gt, torch.lt)
        return _lists(pos & farther(mat, self.pos_margin), neg & nearer(mat, self.neg_margin))


class MultiSimilarityMiner(BaseMiner, distance=CosineSimilarity):
    """Pairs that are within epsilon of the hardest pair of the other sign."""

    epsilon: float = 0.1

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

    HARD, SEMIHARD, EASY, ALL = "hard", "semihard", "easy", "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        both = {self.pos_strategy, self.neg_strategy}
        if not both <= {"hard", "semihard", "easy", "all"} or (both - {"all"} == {"semihard"}):
            raise ValueError(f'strategies: expected "semihard" with "hard" or "easy", or others, got {sorted(both)}')

    def select(self, mat: Tensor, pos: Tensor, neg: Tensor) -> Mined:
        def extreme(
            mask: Tensor, farthest: bool, allowed: Range | None, limit: Tensor | None = None
        ) -> tuple[Tensor, Tensor, Tensor]:
            """Return each anchor's farthest or nearest pair of a mask: value, index, and whether there is one."""
            largest, bounds = farthest != self.distance.is_inverted, torch.finfo(mat.dtype)
            if limit is not None:  # of a semihard pair
                mask = mask & (mat < limit[:, None] if largest else mat > limit[:, None])
            if allowed is not None:
                mask = mask & (mat <= allowed[1]) & (mat >= allowed[0])
            filled = torch.where(mask, mat, bounds.min if largest else bounds.max)
            return *(filled.max(1) if largest else filled.min(1)), mask.any(1)

        positive = partial(extreme, pos, self.pos_strategy != "easy", self.allowed_pos_range)
        negative = partial(extreme, neg, self.neg_strategy == "easy", self.allowed_neg_range)
        # A semihard pair is compared with that of the other sign.
        n_values, n, has_neg = negative(positive()[0] if self.neg_strategy == "semihard" else None)
        _, p, has_pos = positive(n_values if self.pos_strategy == "semihard" else None)
        anchors = torch.arange(len(mat), device=mat.device)
        if "all" not in (self.pos_strategy, self.neg_strategy):
            has_pos = has_neg = has_pos & has_neg
        of_pos = pos.nonzero(as_tuple=True) if self.pos_strategy == "all" else (anchors[has_pos], p[has_pos])
        of_neg = neg.nonzero(as_tuple=True) if self.neg_strategy == "all" else (anchors[has_neg], n[has_neg])
        return *of_pos, *of_neg


class BatchHardMiner(BatchEasyHardMiner):
    """For each anchor the farthest positive and the nearest negative, as triplets."""

    pos_strategy: str = field(default="hard", init=False)
    neg_strategy: str = field(default="hard", init=False)

    def select(self, mat: Tensor, pos: Tensor, neg: Tensor) -> Mined:
        a, p, _, n = super().select(mat, pos, neg)
        return a, p, n


class DistanceWeightedMiner(BaseMiner, required=EUCLIDEAN):
    """Random negatives such that all distances are about equally likely, and random positives."""

    cutoff: float = 0.5
    nonzero_loss_cutoff: float = 1.4

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> Mined:
        p = pair_up(embeddings, labels, ref_emb, ref_labels)
        weights = distance_weights(p, cutoff=self.cutoff, limit=self.nonzero_loss_cutoff)
        return random_triplets(labels, ref_labels, weights=weights)


class EmbeddingsAlreadyPackagedAsTriplets(BaseMiner):
    """Triplets of three consecutive rows: anchor, positive, negative."""

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> Mined:
        return tuple(torch.arange(i, len(embeddings), 3) for i in range(3))


class HDCMiner(BaseMiner):
    """A share of all positive pairs, the farthest, and of all negative pairs, the nearest."""

    filter_percentage: float = 0.5

    _external: Mined | None = field(default=None, init=False)

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
            anchors, others = mask.nonzero(as_tuple=True)
            values, index = mat[anchors, others], anchors[:0]
            if len(values):
                edges = torch.linspace(*values.aminmax(), self.num_bins + 1, dtype=mat.dtype, device=mat.device)
                bins = (torch.bucketize(values, edges, right=True) - 1).clamp(0, self.num_bins - 1)
                sizes = torch.bincount(bins)
                parts = torch.split(bins.argsort(stable=True), sizes[sizes > 0].tolist())
                # One call for each bin, as in the original: a seed gives the same pairs.
                index = torch.cat(
                    [x[torch.multinomial(torch.ones(len(x), device=x.device), count, True)] for x in parts]
                )
            found += [anchors[index], others[index]]
        return tuple(found)
