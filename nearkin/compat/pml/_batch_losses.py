"""Losses without learned parameters that use a batch in a way of their own."""

import math
import warnings
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from nearkin.compat.pml._loss_base import BaseMetricLossFunction, Batch
from nearkin.compat.pml._pair_losses import log1p_exp
from nearkin.compat.pml._tuples import match_masks, sample_weights
from nearkin.compat.pml.distances import CosineSimilarity, DotProductSimilarity, LpDistance
from nearkin.compat.pml.reducers import LossDict, loss_info
from nearkin.errors import ConfigError, DataError
from nearkin.losses.registry import LOSSES
from nearkin.ops.pairs import Pairs
from nearkin.ops.reductions import log_sum_exp, soft_histogram
from nearkin.ops.row_blocks import by_rows


class ThresholdConsistentMarginLoss(BaseMetricLossFunction):
    """Hinges on cosines, averaged over the pairs beyond the thresholds."""

    lambda_plus: float = 1.0
    lambda_minus: float = 1.0
    margin_plus: float = 0.9
    margin_minus: float = 0.5

    required = CosineSimilarity

    def compute(self, b: Batch) -> LossDict:
        (pos, neg), mat = b.pairs(), self.distance(b.emb, b.ref)

        def mean_beyond(gap: Tensor) -> Tensor:
            return torch.relu(gap).sum() / (gap >= 0).sum().clamp(min=1)

        pull, push = mean_beyond(self.margin_plus - pos.select(mat)), mean_beyond(neg.select(mat) - self.margin_minus)
        return {"loss": loss_info(self.lambda_plus * pull + self.lambda_minus * push, "already_reduced")}


class AngularLoss(BaseMetricLossFunction):
    """Each positive pair against all negatives, by the angle at the negative."""

    alpha: float = 40

    needs_labels = True
    required = partial(LpDistance, p=2, power=1, normalize_embeddings=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.alpha = math.radians(self.alpha)

    def compute(self, b: Batch) -> LossDict:
        pos, neg = b.pairs()
        if not pos.count or not neg.count:
            return self.zero_losses()
        tan_sq = math.tan(self.alpha) ** 2

        def of_block(a: Tensor, p: Tensor, anchors: Tensor, positives: Tensor, refs: Tensor) -> Tensor:
            anchor, positive = anchors.index_select(0, a), positives.index_select(0, p)
            product = (anchor * positive).sum(1, keepdim=True)
            x = 4 * tan_sq * ((anchor + positive) @ refs.t()) - 2 * (1 + tan_sq) * product
            return log1p_exp(log_sum_exp(x, b.labels[a][:, None] != b.ref_labels))

        rows, columns = pos
        shared = self.distance.normalize(b.emb), self.distance.normalize(b.ref), b.ref
        few = pos.count <= 8 * len(b.emb)  # so that [P, M] is a few matrices; blocks are computed again for gradients
        loss = (
            of_block(rows, columns, *shared)
            if few
            else by_rows(of_block, rows, columns, shared=shared, width=len(b.ref))
        )
        return {"loss": loss_info(loss, "pos_pair", pos)}


class NPairsLoss(BaseMetricLossFunction):
    """Cross entropy among one positive pair of each class."""

    needs_labels, takes_refs = True, False
    default_distance = DotProductSimilarity

    def compute(self, b: Batch) -> LossDict:
        a, p = b.pairs()[0]
        first = torch.as_tensor(np.unique(b.labels[a].cpu().numpy(), return_index=True)[1], device=a.device)
        if not len(first):
            return self.zero_losses()
        sim = self.as_similarity(self.distance(b.emb[a[first]], b.emb[p[first]]))
        loss = cross_entropy(sim, torch.arange(len(first), device=sim.device), reduction="none")
        return {"loss": loss_info(loss, indices=a[first])}


class NCALoss(BaseMetricLossFunction):
    """The probability that a neighbour drawn by a softmax over distances has the same class."""

    softmax_scale: float = 1

    needs_labels = True
    default_distance = partial(LpDistance, power=2)

    def compute(self, b: Batch) -> LossDict:
        return nca(self, b, b.ref, b.ref_labels) if len(b.emb) > 1 else self.zero_losses()


def nca(loss: Any, b: Batch, ref: Tensor, ref_labels: Tensor) -> LossDict:
    """Compute NCALoss, or ProxyNCALoss with proxies as references."""
    weights = sample_weights(b.indices, b.labels, b.emb.dtype, anchors_only=b.emb is not ref)
    sign = 1 if loss.distance.is_inverted else -1
    logits = sign * loss.softmax_scale * loss.distance(b.emb, ref)
    same = b.labels[:, None] == ref_labels
    if b.emb is ref:
        same, logits = same.fill_diagonal_(False), logits.fill_diagonal_(float("-inf"))
    kept = same.any(1).nonzero()[:, 0]
    values = -log_sum_exp(torch.log_softmax(logits, 1), same)[kept]
    return {"loss": loss_info(values * weights[kept], indices=kept)}


class InstanceLoss(BaseMetricLossFunction):
    """Cross entropy of each row of cosines, with the class as the column."""

    gamma: float = 64

    needs_labels, takes_refs, takes_indices = True, False, False
    required = CosineSimilarity

    def compute(self, b: Batch) -> LossDict:
        target = b.labels.unique(return_inverse=True)[1]
        return {"loss": loss_info(cross_entropy(self.gamma * self.distance(b.emb), target, reduction="none"))}


class RankedListLoss(BaseMetricLossFunction):
    """Weighted hinges on the positives beyond alpha - margin, and on the negatives within alpha."""

    margin: float
    Tn: float
    imbalance: float = 0.5
    alpha: float = None  # type: ignore[assignment]  # 1 + margin / 2
    Tp: float = 0

    needs_labels, takes_refs, takes_indices = True, False, False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.imbalance <= 1:
            raise ConfigError(f"RankedListLoss: imbalance must be between 0 and 1, got {self.imbalance}.")
        if self.Tp > 5 or self.Tn > 5:
            warnings.warn("RankedListLoss: Tp or Tn above 5 may overflow.", stacklevel=3)
        self.alpha = 1 + self.margin / 2 if self.alpha is None else self.alpha

    def compute(self, b: Batch) -> LossDict:
        mat = self.distance(b.emb)
        pos, neg = match_masks(b.labels, b.labels)

        def weighted(gap: Tensor, mask: Tensor, temperature: float) -> Tensor:
            mask = mask & (gap > 0) & (mat > 0)
            weight = torch.where(mask, (temperature * torch.where(mask, gap, 0.0)).exp(), 0.0)
            return (weight * gap).sum(1) / (weight + 1e-5).sum(1)

        pull, push = weighted(mat - (self.alpha - self.margin), pos, self.Tp), weighted(self.alpha - mat, neg, self.Tn)
        return {"loss": loss_info((1 - self.imbalance) * pull + self.imbalance * push)}


class FastAPLoss(BaseMetricLossFunction):
    """One minus average precision, from soft histograms of distances."""

    num_bins: int = 10

    needs_labels, takes_refs = True, False
    required = partial(LpDistance, normalize_embeddings=True, p=2)

    def get_default_distance(self) -> LpDistance:
        return LpDistance(power=2)

    def compute(self, b: Batch) -> LossDict:
        pos, neg = match_masks(b.labels, b.labels)
        kept = pos.any(1).nonzero()[:, 0]
        bins = self.distance(b.emb)[kept] * (self.num_bins / 2**self.distance.power)
        of_pos, of_neg = (soft_histogram(bins, mask[kept], int(self.num_bins)) for mask in (pos, neg))
        precision = of_pos.cumsum(1) / (of_pos + of_neg).cumsum(1).clamp(min=torch.finfo(bins.dtype).tiny)
        loss = 1 - (of_pos * precision).sum(1) / pos[kept].sum(1)
        return {"loss": loss_info(loss * b.weights()[kept], indices=kept)}


class _RankingLoss(BaseMetricLossFunction):
    needs_labels, takes_refs = True, False
    required = CosineSimilarity

    def per_query(self, name: str, batch: Batch, **settings: Any) -> tuple[Tensor, Tensor]:
        """Compute one of our ranking losses, with the query among its positives. Returns values and their number."""
        pairs = Pairs(self.distance(batch.emb), *match_masks(batch.labels, batch.labels))
        values, number = LOSSES[name].function(pairs, with_query=True, **settings)
        return values, number


class SmoothAPLoss(_RankingLoss):
    """One minus average precision, with sigmoids for the steps of the ranks."""

    temperature: float = 0.01

    def compute(self, b: Batch) -> LossDict:
        sizes = b.labels.unique(return_counts=True)[1]
        if int(sizes.min()) != int(sizes.max()):
            raise DataError(f"SmoothAPLoss: expected classes of equal size, got {sizes.tolist()}.")
        values, _ = self.per_query("smooth_ap", b, temperature=self.temperature)
        return {"ap_loss": loss_info(values * b.weights())}


class PNPLoss(_RankingLoss):
    """A function of the number of negatives before each positive."""

    b: float = 2
    alpha: float = 1
    anneal: float = 0.01
    variant: str = "O"

    takes_indices = False
    VARIANTS: ClassVar[tuple[str, ...]] = ("Ds", "Dq", "Iu", "Ib", "O")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variant not in self.VARIANTS:
            raise ValueError(f"variant={self.variant} but must be one of {self.VARIANTS}")

    def compute(self, b: Batch) -> LossDict:
        settings = {"b": self.b, "alpha": self.alpha, "temperature": self.anneal, "variant": self.variant}
        values, number = self.per_query("pnp", b, **settings)
        return {"loss": loss_info(values.sum() / number, "already_reduced")} if int(number) else self.zero_losses()


class VICRegLoss(BaseMetricLossFunction):
    """Two views of the same samples: equal, with spread, and with uncorrelated dimensions."""

    invariance_lambda: float = 25
    variance_mu: float = 25
    covariance_v: float = 1
    eps: float = 1e-4

    takes_indices = False
    parts = ("invariance_loss", "variance_loss1", "variance_loss2", "covariance_loss")

    def __post_init__(self) -> None:
        given: list[Any] = [self.distance, self.embedding_regularizer]
        if any(x is not None for x in given):
            raise ValueError("VICRegLoss cannot use distance or embedding_regularizer")
        super().__post_init__()

    def compute(self, b: Batch) -> LossDict:
        if b.labels is not None or b.ref_labels is not None:
            raise ValueError("VICRegLoss: labels are not supported for this loss function")

        def spread(x: Tensor) -> Tensor:
            return self.variance_mu * torch.relu(1 - (x.var(0) + self.eps).sqrt()) / 2

        def correlation(x: Tensor) -> Tensor:
            centred = x - x.mean(0)
            cov = centred.t() @ centred / (len(x) - 1)
            return (cov - cov.diagonal().diag()).square().sum() / x.shape[1]

        return {
            "invariance_loss": loss_info(self.invariance_lambda * (b.emb - b.ref).square().mean(1)),
            "variance_loss1": loss_info(spread(b.emb)),
            "variance_loss2": loss_info(spread(b.ref)),
            "covariance_loss": loss_info(
                self.covariance_v * (correlation(b.emb) + correlation(b.ref)), "already_reduced"
            ),
        }
