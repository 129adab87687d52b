"""The losses of pytorch-metric-learning, with its arguments, defaults and values, on our core."""

import math
import warnings
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from nearkin.compat.pml._class_losses import (
    ArcFaceLoss,
    CosFaceLoss,
    LargeMarginSoftmaxLoss,
    ManifoldLoss,
    NormalizedSoftmaxLoss,
    P2SGradLoss,
    ProxyAnchorLoss,
    ProxyNCALoss,
    SoftTripleLoss,
    SphereFaceLoss,
    SubCenterArcFaceLoss,
    nca,
)
from nearkin.compat.pml._loss_base import BaseMetricLossFunction, GenericPairLoss, PairLoss
from nearkin.compat.pml._triplet_losses import DynamicSoftMarginLoss, HistogramLoss, MarginLoss, TripletMarginLoss
from nearkin.compat.pml._tuples import Batch, PairList, match_masks
from nearkin.compat.pml._wrappers import BaseLossWrapper, CrossBatchMemory, MultipleLosses, SelfSupervisedLoss
from nearkin.compat.pml.distances import EUCLIDEAN, CosineSimilarity, DotProductSimilarity, LpDistance, SNRDistance
from nearkin.compat.pml.reducers import AvgNonZeroReducer, loss_info
from nearkin.errors import ConfigError, DataError
from nearkin.losses.registry import LOSSES
from nearkin.ops.pairs import Pairs
from nearkin.ops.reductions import log_sum_exp, row_mean, sine, soft_histogram, softplus
from nearkin.ops.row_blocks import by_rows

__all__ = [
    "AngularLoss", "ArcFaceLoss", "BaseLossWrapper", "BaseMetricLossFunction", "CircleLoss", "ContrastiveLoss",
    "CosFaceLoss", "CrossBatchMemory", "DynamicSoftMarginLoss", "FastAPLoss", "GeneralizedLiftedStructureLoss",
    "GenericPairLoss", "HistogramLoss", "InstanceLoss", "IntraPairVarianceLoss", "LargeMarginSoftmaxLoss",
    "LiftedStructureLoss", "ManifoldLoss", "MarginLoss", "MultiSimilarityLoss", "MultipleLosses", "NCALoss",
    "NPairsLoss", "NTXentLoss", "NormalizedSoftmaxLoss", "P2SGradLoss", "PNPLoss", "ProxyAnchorLoss",
    "ProxyNCALoss", "RankedListLoss", "SelfSupervisedLoss", "SignalToNoiseRatioContrastiveLoss", "SmoothAPLoss",
    "SoftTripleLoss", "SphereFaceLoss", "SubCenterArcFaceLoss", "SupConLoss", "ThresholdConsistentMarginLoss",
    "TripletMarginLoss", "TupletMarginLoss", "VICRegLoss",
]  # fmt: skip


def _log1p_exp(x: Tensor) -> Tensor:
    """Compute log(1 + exp(x)), exactly 0 where 1 + exp(x) rounds to 1: AvgNonZeroReducer does not count these."""
    return torch.where(x < math.log(torch.finfo(x.dtype).eps / 2), 0.0, softplus(x))


class ContrastiveLoss(PairLoss, reducer=AvgNonZeroReducer, parts=("pos_loss", "neg_loss")):
    """Hinges on the distances of positive and of negative pairs."""

    pos_margin: float = 0
    neg_margin: float = 1

    def of_matrix(self, mat: Tensor, pos: PairList, neg: PairList) -> Any:
        pull = torch.relu(self.distance.margin(pos.select(mat), self.pos_margin))
        push = torch.relu(self.distance.margin(self.neg_margin, neg.select(mat)))
        return loss_info(pull, "pos_pair", pos), loss_info(push, "neg_pair", neg)


class SignalToNoiseRatioContrastiveLoss(ContrastiveLoss, distance=SNRDistance, required={}):
    """ContrastiveLoss with SNRDistance."""


class CircleLoss(PairLoss, distance=CosineSimilarity, required={}, reducer=AvgNonZeroReducer, mat_based_loss=True):
    """Pairs weighted by their distance from the optimum."""

    m: float = 0.4
    gamma: float = 80

    def of_matrix(self, mat: Tensor, pos: PairList, neg: PairList) -> Any:
        return LOSSES["circle"].function(Pairs(mat, pos.mask, neg.mask), margin=self.m, scale=self.gamma)[0]


class MultiSimilarityLoss(PairLoss, distance=CosineSimilarity, mat_based_loss=True):
    """Soft maxima over the positive and over the negative pairs of each anchor."""

    alpha: float = 2
    beta: float = 50
    base: float = 0.5

    def of_matrix(self, mat: Tensor, pos: PairList, neg: PairList) -> Any:
        margin = self.distance.margin
        pull = _log1p_exp(log_sum_exp(margin(mat, self.base), pos.mask, self.alpha)) / self.alpha
        push = _log1p_exp(log_sum_exp(margin(self.base, mat), neg.mask, self.beta)) / self.beta
        return pull + push


class SupConLoss(PairLoss, distance=CosineSimilarity, reducer=AvgNonZeroReducer, mat_based_loss=True, needs_both=True):
    """The mean over positives of the cross entropy among all pairs of an anchor."""

    temperature: float = 0.1

    def of_matrix(self, mat: Tensor, pos: PairList, neg: PairList) -> Any:
        logits = self.as_similarity(mat) / self.temperature  # once: with a single pair the loss is exactly 0
        loss = log_sum_exp(logits, pos.mask | neg.mask) - row_mean(logits, pos.mask)
        return torch.where(pos.mask.any(1), loss, 0.0)


class GeneralizedLiftedStructureLoss(PairLoss, mat_based_loss=True):
    """Soft maxima over all positive and over all negative pairs of each anchor."""

    neg_margin: float = 1
    pos_margin: float = 0

    def of_matrix(self, mat: Tensor, pos: PairList, neg: PairList) -> Any:
        pull = log_sum_exp(self.distance.margin(mat, self.pos_margin), pos.mask)
        push = log_sum_exp(self.distance.margin(self.neg_margin, mat), neg.mask)
        pull, push = (x.masked_fill(x == float("-inf"), 0.0) for x in (pull, push))  # 0 for an empty sum
        return torch.relu(pull + push)


class LiftedStructureLoss(GeneralizedLiftedStructureLoss, mat_based_loss=False, needs_both=True):
    """Each positive pair against the negatives of both of its samples."""

    def of_matrix(self, mat: Tensor, pos: PairList, neg: PairList) -> Any:
        n, m = mat.shape
        lowest = torch.finfo(mat.dtype).min / 4  # finite: -inf would have no gradient in logaddexp
        own = neg.log_sum_exp(self.distance.margin(self.neg_margin, mat)).clamp(min=lowest)
        # As in the original, the negatives of a reference are those of the anchor with the same index.
        other = own[:m] if m <= n else torch.cat([own, own.new_full((m - n,), lowest)])
        same = torch.eye(n, m, dtype=torch.bool, device=mat.device)
        push = torch.where(same, own[:, None], torch.logaddexp(own[:, None], other))
        push = torch.where(push < lowest / 2, 0.0, push)
        loss = torch.relu(push + self.distance.margin(mat, self.pos_margin)).square() / 2
        return loss_info(pos.select(loss), "pos_pair", pos)


class NTXentLoss(PairLoss, distance=CosineSimilarity, needs_both=True):
    """Cross entropy of each positive pair against the negatives of its anchor."""

    temperature: float = 0.07

    def of_matrix(self, mat: Tensor, pos: PairList, neg: PairList) -> Any:
        logits = self.as_similarity(mat) / self.temperature
        return loss_info(_log1p_exp(neg.log_sum_exp(logits)[pos.lists[0]] - pos.select(logits)), "pos_pair", pos)


class TupletMarginLoss(
    PairLoss, distance=CosineSimilarity, required={}, needs_both=True, stored={"margin": math.radians}
):
    """Cross entropy as in NTXentLoss, with an angular slack for the positive pair."""

    margin: float = 5.73
    scale: float = 64

    def of_matrix(self, mat: Tensor, pos: PairList, neg: PairList) -> Any:
        positive = pos.select(mat)
        slack = positive * math.cos(self.margin) + sine(positive) * math.sin(self.margin)
        loss = _log1p_exp(neg.log_sum_exp(self.scale * mat)[pos.lists[0]] - self.scale * slack)
        return loss_info(loss, "pos_pair", pos)


class IntraPairVarianceLoss(PairLoss, distance=CosineSimilarity, parts=("pos_loss", "neg_loss")):
    """Pairs that are farther from the mean of all positive, or negative, pairs than a tolerance."""

    pos_eps: float = 0.01
    neg_eps: float = 0.01

    def of_matrix(self, mat: Tensor, pos: PairList, neg: PairList) -> Any:
        def variance(x: Tensor, eps: float, increase: bool) -> Tensor:
            return torch.relu((1 - eps) * x.mean() - x if increase else x - (1 + eps) * x.mean()).square()

        up = self.distance.is_inverted
        pull, push = variance(pos.select(mat), self.pos_eps, up), variance(neg.select(mat), self.neg_eps, not up)
        return loss_info(pull, "pos_pair", pos), loss_info(push, "neg_pair", neg)


class ThresholdConsistentMarginLoss(BaseMetricLossFunction, distance=CosineSimilarity, required={}):
    """Hinges on cosines, averaged over the pairs beyond the thresholds."""

    lambda_plus: float = 1.0
    lambda_minus: float = 1.0
    margin_plus: float = 0.9
    margin_minus: float = 0.5

    def compute(self, b: Batch) -> Tensor:
        (pos, neg), mat = b.pairs(), self.distance(b.emb, b.ref)

        def mean_beyond(gap: Tensor) -> Tensor:
            return torch.relu(gap).sum() / (gap >= 0).sum().clamp(min=1)

        pull, push = mean_beyond(self.margin_plus - pos.select(mat)), mean_beyond(neg.select(mat) - self.margin_minus)
        return self.lambda_plus * pull + self.lambda_minus * push


class AngularLoss(BaseMetricLossFunction, needs_labels=True, required=EUCLIDEAN, stored={"alpha": math.radians}):
    """Each positive pair against all negatives, by the angle at the negative."""

    alpha: float = 40

    def compute(self, b: Batch) -> Any:
        pos, neg = b.pairs()
        if not pos.count or not neg.count:
            return None
        tan_sq = math.tan(self.alpha) ** 2

        def of_pairs(a: Tensor, p: Tensor, anchors: Tensor, positives: Tensor, refs: Tensor) -> Tensor:
            anchor, positive = anchors.index_select(0, a), positives.index_select(0, p)
            product = (anchor * positive).sum(1, keepdim=True)
            x = 4 * tan_sq * ((anchor + positive) @ refs.t()) - 2 * (1 + tan_sq) * product
            return _log1p_exp(log_sum_exp(x, b.labels[a][:, None] != b.ref_labels))

        shared = self.distance.normalize(b.emb), self.distance.normalize(b.ref), b.ref
        return loss_info(by_rows(of_pairs, *pos, shared=shared, width=len(b.ref)), "pos_pair", pos)


class NPairsLoss(BaseMetricLossFunction, needs_labels=True, takes_refs=False, distance=DotProductSimilarity):
    """Cross entropy among one positive pair of each class."""

    def compute(self, b: Batch) -> Any:
        a, p = b.pairs()[0]
        first = torch.as_tensor(np.unique(b.labels[a].cpu().numpy(), return_index=True)[1], device=a.device)
        if not len(first):
            return None
        sim = self.as_similarity(self.distance(b.emb[a[first]], b.emb[p[first]]))
        loss = cross_entropy(sim, torch.arange(len(first), device=sim.device), reduction="none")
        return loss_info(loss, indices=a[first])


class NCALoss(BaseMetricLossFunction, needs_labels=True, distance=partial(LpDistance, power=2)):
    """The probability that a neighbour drawn by a softmax over distances has the same class."""

    softmax_scale: float = 1

    def compute(self, b: Batch) -> Any:
        return nca(self, b, b.ref, b.ref_labels) if len(b.emb) > 1 else None


class _CosineLoss(BaseMetricLossFunction, needs_labels=True, takes_refs=False, distance=CosineSimilarity, required={}):
    def per_query(self, name: str, batch: Batch, **settings: Any) -> tuple[Tensor, Tensor]:
        """Compute one of our ranking losses, with the query among its positives. Returns values and their number."""
        pairs = Pairs(self.distance(batch.emb), *match_masks(batch.labels, batch.labels))
        values, number = LOSSES[name].function(pairs, with_query=True, **settings)
        return values, number


class InstanceLoss(_CosineLoss, takes_indices=False):
    """Cross entropy of each row of cosines, with the class as the column."""

    gamma: float = 64

    def compute(self, b: Batch) -> Tensor:
        target = b.labels.unique(return_inverse=True)[1]
        return cross_entropy(self.gamma * self.distance(b.emb), target, reduction="none")


class RankedListLoss(BaseMetricLossFunction, needs_labels=True, takes_refs=False, takes_indices=False):
    """Weighted hinges on the positives beyond alpha - margin, and on the negatives within alpha."""

    margin: float
    Tn: float
    imbalance: float = 0.5
    alpha: float = None  # type: ignore[assignment]  # 1 + margin / 2
    Tp: float = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.imbalance <= 1:
            raise ConfigError(f"RankedListLoss: imbalance must be between 0 and 1, got {self.imbalance}.")
        if max(self.Tp, self.Tn) > 5:
            warnings.warn("RankedListLoss: Tp or Tn above 5 may overflow.", stacklevel=3)
        self.alpha = 1 + self.margin / 2 if self.alpha is None else self.alpha

    def compute(self, b: Batch) -> Tensor:
        mat = self.distance(b.emb)

        def weighted(gap: Tensor, mask: Tensor, temperature: float) -> Tensor:
            mask = mask & (gap > 0) & (mat > 0)
            weight = torch.where(mask, (temperature * torch.where(mask, gap, 0.0)).exp(), 0.0)
            return (weight * gap).sum(1) / (weight + 1e-5).sum(1)

        pos, neg = match_masks(b.labels, b.labels)
        pull, push = weighted(mat - (self.alpha - self.margin), pos, self.Tp), weighted(self.alpha - mat, neg, self.Tn)
        return (1 - self.imbalance) * pull + self.imbalance * push


class FastAPLoss(
    BaseMetricLossFunction, needs_labels=True, takes_refs=False,
    distance=partial(LpDistance, power=2), required={"normalize_embeddings": True, "p": 2},
):  # fmt: skip
    """One minus average precision, from soft histograms of distances."""

    num_bins: int = 10

    def compute(self, b: Batch) -> Any:
        pos, neg = match_masks(b.labels, b.labels)
        kept = pos.any(1).nonzero()[:, 0]
        bins = self.distance(b.emb)[kept] * (self.num_bins / 2**self.distance.power)
        of_pos, of_neg = (soft_histogram(bins, mask[kept], int(self.num_bins)) for mask in (pos, neg))
        precision = of_pos.cumsum(1) / (of_pos + of_neg).cumsum(1).clamp(min=torch.finfo(bins.dtype).tiny)
        loss = 1 - (of_pos * precision).sum(1) / pos[kept].sum(1)
        return loss_info(loss * b.weights()[kept], indices=kept)


class SmoothAPLoss(_CosineLoss, parts=("ap_loss",)):
    """One minus average precision, with sigmoids for the steps of the ranks."""

    temperature: float = 0.01

    def compute(self, b: Batch) -> Tensor:
        sizes = b.labels.unique(return_counts=True)[1]
        if int(sizes.min()) != int(sizes.max()):
            raise DataError(f"SmoothAPLoss: expected classes of equal size, got {sizes.tolist()}.")
        return self.per_query("smooth_ap", b, temperature=self.temperature)[0] * b.weights()


class PNPLoss(_CosineLoss, takes_indices=False):
    """A function of the number of negatives before each positive."""

    b: float = 2
    alpha: float = 1
    anneal: float = 0.01
    variant: str = "O"

    def __post_init__(self) -> None:
        super().__post_init__()
        LOSSES["pnp"].check({"variant": self.variant})

    def compute(self, b: Batch) -> Any:
        settings = {"b": self.b, "alpha": self.alpha, "temperature": self.anneal, "variant": self.variant}
        values, number = self.per_query("pnp", b, **settings)
        return values.sum() / number if int(number) else None


class VICRegLoss(
    BaseMetricLossFunction,
    takes_indices=False,
    parts=("invariance_loss", "variance_loss1", "variance_loss2", "covariance_loss"),
):
    """Two views of the same samples: equal, with spread, and with uncorrelated dimensions."""

    invariance_lambda: float = 25
    variance_mu: float = 25
    covariance_v: float = 1
    eps: float = 1e-4

    def __post_init__(self) -> None:
        given: list[Any] = [self.distance, self.embedding_regularizer]
        if any(x is not None for x in given):
            raise ValueError("VICRegLoss cannot use distance or embedding_regularizer")
        super().__post_init__()

    def compute(self, b: Batch) -> Any:
        if b.labels is not None or b.ref_labels is not None:
            raise ValueError("VICRegLoss: labels are not supported for this loss function")
        covs = [x.t().cov() for x in (b.emb, b.ref)]
        spread = (self.variance_mu * torch.relu(1 - (x.diagonal() + self.eps).sqrt()) / 2 for x in covs)
        correlation = sum((x - x.diagonal().diag()).square().sum() for x in covs) / b.emb.shape[1]
        return self.invariance_lambda * (b.emb - b.ref).square().mean(1), *spread, self.covariance_v * correlation
