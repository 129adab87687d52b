"""Losses of triplets. All triplets of a batch are never listed: see `TripletLosses`."""

from typing import Any

import torch
from torch import Tensor, nn

from nearkin.compat.pml._loss_base import BaseMetricLossFunction
from nearkin.compat.pml._tuples import Batch, TripletLosses
from nearkin.compat.pml.distances import BaseDistance, CosineSimilarity
from nearkin.compat.pml.reducers import AvgNonZeroReducer, DivisorReducer, loss_info
from nearkin.errors import ConfigError
from nearkin.ops.reductions import soft_histogram, softplus


class TripletMarginLoss(BaseMetricLossFunction, reducer=AvgNonZeroReducer):
    """Negatives should be farther than positives by a margin."""

    margin: float = 0.05
    swap: bool = False
    smooth_loss: bool = False
    triplets_per_anchor: int | str = "all"

    def compute(self, b: Batch) -> Any:
        if self.swap and len(b.emb) != len(b.ref):
            raise ConfigError("TripletMarginLoss: swap=True needs ref_emb of the size of the batch.")
        triplets, distance = b.triplets(self.triplets_per_anchor), self.distance
        if not triplets.count:
            return None

        def value(ap: Tensor, an: Tensor, *pn: Tensor) -> Tensor:
            violation = distance.margin(ap, distance.smallest_dist(an, *pn) if pn else an) + self.margin
            return softplus(violation) if self.smooth_loss else torch.relu(violation)

        mat = distance(b.emb, b.ref)
        is_hinge = not self.swap and not self.smooth_loss and type(distance).margin is BaseDistance.margin
        hinge = (self.as_similarity(mat), self.margin) if is_hinge else None
        return loss_info(TripletLosses(triplets, mat, value, self.swap, hinge), "triplet")


class MarginLoss(BaseMetricLossFunction, reducer=DivisorReducer, parts=("margin_loss", "beta_reg_loss")):
    """Positives nearer, and negatives farther, than a boundary beta, which can be learned, for each class."""

    margin: float = 0.2
    nu: float = 0
    beta: Any = 1.2
    triplets_per_anchor: int | str = "all"
    learn_beta: bool = False
    num_classes: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        initial = torch.full((self.num_classes or 1,), float(self.beta))
        self.beta = nn.Parameter(initial) if self.learn_beta else initial

    def compute(self, b: Batch) -> Any:
        triplets, margin = b.triplets(self.triplets_per_anchor), self.margin
        if not triplets.count:
            return None
        mat = self.distance(b.emb, b.ref)
        beta = self.beta.to(mat)
        rows = (beta[b.labels] if len(beta) > 1 else beta.expand(len(mat)))[:, None]  # of the anchors
        beyond = self.distance.margin(mat, rows)
        fixed = beyond.detach()
        counts = TripletLosses(triplets, fixed, lambda ap, an: (ap + margin > 0).to(fixed) + (margin - an > 0))
        divisor = (counts.listed() if triplets.is_listed else counts.sums())[0].sum()
        regularization = self.zero_loss()
        if self.learn_beta and len(beta) == 1:
            regularization = loss_info(beta * self.nu, "already_reduced")
        elif self.learn_beta:
            losses = TripletLosses(triplets, (rows * self.nu).expand_as(mat), lambda ap, an: ap + torch.zeros_like(an))
            regularization = loss_info(losses, divisor=divisor)
        losses = TripletLosses(triplets, beyond, lambda ap, an: torch.relu(ap + margin) + torch.relu(margin - an))
        return loss_info(losses, "triplet", divisor=divisor), regularization


class DynamicSoftMarginLoss(
    BaseMetricLossFunction, required={"normalize_embeddings": True, "p": 2}, stored={"num_bins": int}
):
    """The difference of distances, weighted by its share of smaller ones in a moving histogram."""

    min_val: float = -2.0
    num_bins: int = 10
    momentum: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        self.delta = 2 * abs(self.min_val) / self.num_bins
        self.hist_ = torch.zeros(self.num_bins)

    def compute(self, b: Batch) -> Any:
        if b.labels is None and b.indices is not None:
            raise ValueError("DynamicSoftMarginLoss: indices_tuple without labels is not supported")
        mat, triplets = self.distance(b.emb, b.ref), None if b.labels is None else b.triplets()
        if triplets is not None and not triplets.is_listed:
            bins, number = triplets.by_blocks(lambda exists, ap, an: self._bins(exists, ap - an), mat), triplets.count
        else:
            gaps = _hardest_gap(mat) if triplets is None else TripletLosses(triplets, mat, torch.sub).listed()[0]
            bins, number = self._bins(torch.ones_like(gaps[None]), gaps[None]), len(gaps)
        if not number:
            return None
        histogram, sums = bins.sum(0)
        old = self.hist_.to(mat)
        momentum = self.momentum if bool(old.sum() != 0) else 1.0
        new = (1 - momentum) * old + momentum * histogram
        new = new / new.sum()
        self.hist_ = new.detach()
        return (new.cumsum(0) * sums).sum() / number

    def _bins(self, exists: Tensor, data: Tensor) -> Tensor:
        """Return the soft histogram and the sums of the data [n, ...] by bins: [n, 2, bins]."""
        weight, data = exists.to(data.dtype).flatten(1), data.flatten(1)
        x = (data - self.min_val) / self.delta
        index = x.detach().floor().long().clamp(0, self.num_bins - 1)
        share = x - x.detach().trunc()
        zeros = data.new_zeros(len(data), self.num_bins)
        histogram = zeros.scatter_add(1, index, weight * (1 - share))
        histogram = histogram.scatter_add(1, (index + 1).clamp(max=self.num_bins - 1), weight * share)
        return torch.stack([histogram, zeros.scatter_add(1, index, weight * data)], 1)


def _hardest_gap(mat: Tensor) -> Tensor:
    """Return the distance of each pair less that of the nearest other one of its row or column."""
    rows, columns = mat.shape
    size, pad = max(rows, columns), nn.functional.pad
    own = pad(mat.diagonal(), (0, size - min(rows, columns)))
    others = mat.masked_fill(torch.eye(rows, columns, dtype=torch.bool, device=mat.device), float("inf"))
    nearest = torch.minimum(pad(others.amin(0), (0, size - columns)), pad(others.amin(1), (0, size - rows)))
    return own - nearest


class HistogramLoss(BaseMetricLossFunction, takes_refs=False, distance=CosineSimilarity):
    """The probability that a random negative pair is more similar than a random positive one."""

    n_bins: int | None = None
    delta: float = None  # type: ignore[assignment]  # 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_bins is not None and self.delta not in (None, 2 / self.n_bins):
            raise ConfigError(f"HistogramLoss: expected delta = 2 / n_bins, got {self.delta} and {self.n_bins}.")
        self.delta = 2 / (self.n_bins or 100) if self.delta is None else self.delta

    def compute(self, b: Batch) -> Any:
        triplets = b.triplets()
        if not triplets.count:
            return None
        pos, neg = triplets.pos.mask, triplets.neg.mask
        mat: Tensor = self.distance(b.emb)
        used = (pos.any(1) & neg.any(1))[:, None]

        def density(mask: Tensor) -> Tensor:
            x = mat.masked_select((mask | mask.t()).triu())[None]  # each pair once
            counts = soft_histogram((x + 1) / self.delta, torch.ones_like(x, dtype=torch.bool), round(2 / self.delta))
            return counts[0] / x.shape[1]

        return (density(neg & used) * density(pos & used).cumsum(0)).sum()
