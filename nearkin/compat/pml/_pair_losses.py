"""Losses of the matrix of distances with its positive and negative pairs."""

import math

import torch
from torch import Tensor

from nearkin.compat.pml._loss_base import PairLoss
from nearkin.compat.pml._tuples import PairList
from nearkin.compat.pml.distances import CosineSimilarity, SNRDistance
from nearkin.compat.pml.reducers import AvgNonZeroReducer, LossDict, loss_info
from nearkin.losses.registry import LOSSES
from nearkin.ops.pairs import Pairs
from nearkin.ops.reductions import log_sum_exp, row_mean, sine, softplus


def _finite(x: Tensor) -> Tensor:
    """Replace -inf, the log of an empty sum, by 0."""
    return x.masked_fill(x == float("-inf"), 0.0)


def log1p_exp(x: Tensor) -> Tensor:
    """Compute log(1 + exp(x)), exactly 0 where 1 + exp(x) rounds to 1: AvgNonZeroReducer does not count these."""
    return torch.where(x < math.log(torch.finfo(x.dtype).eps / 2), 0.0, softplus(x))


class ContrastiveLoss(PairLoss):
    """Hinges on the distances of positive and of negative pairs."""

    pos_margin: float = 0
    neg_margin: float = 1

    parts = ("pos_loss", "neg_loss")
    default_reducer = AvgNonZeroReducer

    def of_matrix(self, mat: Tensor, pos: PairList, neg: PairList) -> LossDict:
        pull = torch.relu(self.distance.margin(pos.select(mat), self.pos_margin))
        push = torch.relu(self.distance.margin(self.neg_margin, neg.select(mat)))
        return {"pos_loss": loss_info(pull, "pos_pair", pos), "neg_loss": loss_info(push, "neg_pair", neg)}


class SignalToNoiseRatioContrastiveLoss(ContrastiveLoss):
    """ContrastiveLoss with SNRDistance."""

    required = SNRDistance


class CircleLoss(PairLoss):
    """Pairs weighted by their distance from the optimum."""

    m: float = 0.4
    gamma: float = 80

    required = CosineSimilarity
    default_reducer = AvgNonZeroReducer
    by_masks = True

    def of_matrix(self, mat: Tensor, pos: PairList, neg: PairList) -> LossDict:
        pairs = Pairs(mat, pos.mask, neg.mask)
        return {"loss": loss_info(LOSSES["circle"].function(pairs, margin=self.m, scale=self.gamma)[0])}


class MultiSimilarityLoss(PairLoss):
    """Soft maxima over the positive and over the negative pairs of each anchor."""

    alpha: float = 2
    beta: float = 50
    base: float = 0.5

    default_distance = CosineSimilarity
    by_masks = True

    def of_matrix(self, mat: Tensor, pos: PairList, neg: PairList) -> LossDict:
        margin = self.distance.margin
        pull = log1p_exp(log_sum_exp(margin(mat, self.base), pos.mask, self.alpha)) / self.alpha
        push = log1p_exp(log_sum_exp(margin(self.base, mat), neg.mask, self.beta)) / self.beta
        return {"loss": loss_info(pull + push)}


class SupConLoss(PairLoss):
    """The mean over positives of the cross entropy among all pairs of an anchor."""

    temperature: float = 0.1

    default_distance = CosineSimilarity
    default_reducer = AvgNonZeroReducer
    by_masks = needs_both = True

    def of_matrix(self, mat: Tensor, pos: PairList, neg: PairList) -> LossDict:
        logits = self.as_similarity(mat) / self.temperature  # once: with a single pair the loss is exactly 0
        loss = log_sum_exp(logits, pos.mask | neg.mask) - row_mean(logits, pos.mask)
        return {"loss": loss_info(torch.where(pos.mask.any(1), loss, 0.0))}


class GeneralizedLiftedStructureLoss(PairLoss):
    """Soft maxima over all positive and over all negative pairs of each anchor."""

    neg_margin: float = 1
    pos_margin: float = 0

    by_masks = True

    def of_matrix(self, mat: Tensor, pos: PairList, neg: PairList) -> LossDict:
        pull = _finite(log_sum_exp(self.distance.margin(mat, self.pos_margin), pos.mask))
        push = _finite(log_sum_exp(self.distance.margin(self.neg_margin, mat), neg.mask))
        return {"loss": loss_info(torch.relu(pull + push))}


class LiftedStructureLoss(GeneralizedLiftedStructureLoss):
    """Each positive pair against the negatives of both of its samples."""

    by_masks, needs_both = False, True

    def of_matrix(self, mat: Tensor, pos: PairList, neg: PairList) -> LossDict:
        n, m = mat.shape
        lowest = torch.finfo(mat.dtype).min / 4  # finite: -inf would have no gradient in logaddexp
        own = neg.log_sum_exp(self.distance.margin(self.neg_margin, mat)).clamp(min=lowest)
        # As in the original, the negatives of a reference are those of the anchor with the same index.
        other = own[:m] if m <= n else torch.cat([own, own.new_full((m - n,), lowest)])
        same = torch.eye(n, m, dtype=torch.bool, device=mat.device)
        push = torch.where(same, own[:, None], torch.logaddexp(own[:, None], other))
        push = torch.where(push < lowest / 2, 0.0, push)
        loss = torch.relu(push + self.distance.margin(mat, self.pos_margin)).square() / 2
        return {"loss": loss_info(pos.select(loss), "pos_pair", pos)}


class NTXentLoss(PairLoss):
    """Cross entropy of each positive pair against the negatives of its anchor."""

    temperature: float = 0.07

    default_distance = CosineSimilarity
    needs_both = True

    def of_matrix(self, mat: Tensor, pos: PairList, neg: PairList) -> LossDict:
        logits = self.as_similarity(mat) / self.temperature
        loss = log1p_exp(neg.log_sum_exp(logits)[:, None] - logits)
        return {"loss": loss_info(pos.select(loss), "pos_pair", pos)}


class TupletMarginLoss(PairLoss):
    """Cross entropy as in NTXentLoss, with an angular slack for the positive pair."""

    margin: float = 5.73
    scale: float = 64

    required = CosineSimilarity
    needs_both = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.margin = math.radians(self.margin)

    def of_matrix(self, mat: Tensor, pos: PairList, neg: PairList) -> LossDict:
        slack = mat * math.cos(self.margin) + sine(mat) * math.sin(self.margin)
        loss = log1p_exp(neg.log_sum_exp(self.scale * mat)[:, None] - self.scale * slack)
        return {"loss": loss_info(pos.select(loss), "pos_pair", pos)}


class IntraPairVarianceLoss(PairLoss):
    """Pairs that are farther from the mean of all positive, or negative, pairs than a tolerance."""

    pos_eps: float = 0.01
    neg_eps: float = 0.01

    parts = ("pos_loss", "neg_loss")
    default_distance = CosineSimilarity

    def of_matrix(self, mat: Tensor, pos: PairList, neg: PairList) -> LossDict:
        def variance(pairs: PairList, eps: float, increase: bool) -> Tensor:
            x = pairs.select(mat)
            return torch.relu((1 - eps) * x.mean() - x if increase else x - (1 + eps) * x.mean()).square()

        up = self.distance.is_inverted
        pull, push = variance(pos, self.pos_eps, up), variance(neg, self.neg_eps, not up)
        return {"pos_loss": loss_info(pull, "pos_pair", pos), "neg_loss": loss_info(push, "neg_pair", neg)}
