"""Losses of triplets. All triplets of a batch are never listed: see `TripletLosses`."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nearkin.compat.pml._loss_base import BaseMetricLossFunction, Batch
from nearkin.compat.pml._tuples import TripletLosses
from nearkin.compat.pml.distances import BaseDistance, CosineSimilarity, LpDistance
from nearkin.compat.pml.reducers import AvgNonZeroReducer, DivisorReducer, LossDict, LossInfo, loss_info
from nearkin.errors import ConfigError
from nearkin.ops.pairs import Pairs
from nearkin.ops.reductions import softplus, sum_of_violations
from nearkin.ops.row_blocks import per_row


def _info(losses: TripletLosses, kind: str = "triplet", **extra: Any) -> LossInfo:
    """Return a list of values if the triplets are one, or else values by anchors."""
    if losses.triplets.given is None:
        return loss_info(losses, kind, **extra)
    lists = losses.triplets.given
    return loss_info(losses.listed(), kind, lists if kind == "triplet" else lists[0], **extra)


class TripletMarginLoss(BaseMetricLossFunction):
    """Negatives should be farther than positives by a margin."""

    margin: float = 0.05
    swap: bool = False
    smooth_loss: bool = False
    triplets_per_anchor: int | str = "all"

    default_reducer = AvgNonZeroReducer

    def compute(self, b: Batch) -> LossDict:
        if self.swap and len(b.emb) != len(b.ref):
            raise ConfigError("TripletMarginLoss: swap=True needs ref_emb of the size of the batch.")
        triplets = b.triplets(self.triplets_per_anchor)
        if not triplets.count:
            return self.zero_losses()
        mat, distance = self.distance(b.emb, b.ref), self.distance

        def value(ap: Tensor, an: Tensor, pn: Tensor | None) -> Tensor:
            an = an if pn is None else distance.smallest_dist(an, pn)
            violation = distance.margin(ap, an) + self.margin
            return softplus(violation) if self.smooth_loss else torch.relu(violation)

        def fast_sums() -> tuple[Tensor, int]:
            p = Pairs(self.as_similarity(mat), triplets.pos.mask, triplets.neg.mask)
            return sum_of_violations(p, per_row(self.margin, mat)[:, None]), count_violations(p, self.margin)

        is_plain = not self.swap and not self.smooth_loss and type(distance).margin is BaseDistance.margin
        return {"loss": _info(TripletLosses(triplets, mat, value, self.swap, fast_sums if is_plain else None))}


@torch.no_grad()
def count_violations(p: Pairs, margin: float) -> int:
    """Count the triplets with s_n - s_p + margin > 0, by sorting the positives of each anchor."""
    columns, is_positive = p.positive_columns()
    ranked = p.sim.gather(1, columns).masked_fill(~is_positive, float("inf")).sort(1).values
    return int(torch.searchsorted(ranked, p.sim + margin).masked_fill_(~p.neg, 0).sum())


class MarginLoss(BaseMetricLossFunction):
    """Positives nearer, and negatives farther, than a boundary beta, which can be learned, for each class."""

    margin: float = 0.2
    nu: float = 0
    beta: Any = 1.2
    triplets_per_anchor: int | str = "all"
    learn_beta: bool = False
    num_classes: int | None = None

    default_reducer = DivisorReducer
    parts = ("margin_loss", "beta_reg_loss")

    def __post_init__(self) -> None:
        super().__post_init__()
        initial = torch.full((self.num_classes or 1,), float(self.beta))
        self.beta = nn.Parameter(initial) if self.learn_beta else initial

    def compute(self, b: Batch) -> LossDict:
        triplets, margin = b.triplets(self.triplets_per_anchor), self.margin
        if not triplets.count:
            return self.zero_losses()
        mat = self.distance(b.emb, b.ref)
        beta = self.beta.to(mat)
        rows = (beta[b.labels] if len(beta) > 1 else beta.expand(len(mat)))[:, None]  # of the anchors
        beyond = self.distance.margin(mat, rows)

        def value(ap: Tensor, an: Tensor, _: Tensor | None) -> Tensor:
            return torch.relu(ap + margin) + torch.relu(margin - an)

        def number(ap: Tensor, an: Tensor, _: Tensor | None) -> Tensor:
            return (ap + margin > 0).to(ap.dtype) + (margin - an > 0)

        counts = TripletLosses(triplets, beyond.detach(), number)
        divisor = counts.listed().sum() if triplets.given else counts.sums()[0].sum()
        if not self.learn_beta:
            regularization = self.zero_loss()
        elif len(beta) == 1:
            regularization = loss_info(beta * self.nu, "already_reduced")
        else:
            of_anchors = (rows * self.nu).expand_as(mat)
            losses = TripletLosses(triplets, of_anchors, lambda ap, an, _: ap + torch.zeros_like(an))
            regularization = _info(losses, "element", divisor=divisor)
        losses = TripletLosses(triplets, beyond, value)
        return {"margin_loss": _info(losses, divisor=divisor), "beta_reg_loss": regularization}


class DynamicSoftMarginLoss(BaseMetricLossFunction):
    """The difference of distances, weighted by its share of smaller ones in a moving histogram."""

    min_val: float = -2.0
    num_bins: int = 10
    momentum: float = 0.01

    required = partial(LpDistance, normalize_embeddings=True, p=2)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_bins = int(self.num_bins)
        self.delta = 2 * abs(self.min_val) / self.num_bins
        self.hist_ = torch.zeros(self.num_bins)

    def compute(self, b: Batch) -> LossDict:
        mat = self.distance(b.emb, b.ref)
        if b.labels is None:
            if b.indices is not None:
                raise ValueError("DynamicSoftMarginLoss: indices_tuple without labels is not supported")
            data = _hardest_gap(mat)
            bins, number = self._bins(data[None]), len(data)
        else:
            triplets = b.triplets()
            number = triplets.count
            if not number:
                return self.zero_losses()
            if triplets.given is None:
                bins = triplets.by_blocks(lambda ap, an, exists: self._bins(ap - an, exists), mat)
            else:
                bins = self._bins(TripletLosses(triplets, mat, lambda ap, an, _: ap - an).listed()[None])
        histogram, sums = bins.sum(0)
        old = self.hist_.to(mat)
        momentum = self.momentum if bool(old.sum() != 0) else 1.0
        new = (1 - momentum) * old + momentum * histogram
        new = new / new.sum()
        self.hist_ = new.detach()
        return {"loss": loss_info((new.cumsum(0) * sums).sum() / number, "already_reduced")}

    def _bins(self, data: Tensor, exists: Tensor | None = None) -> Tensor:
        """Return the soft histogram and the sums of the data [n, ...] by bins: [n, 2, bins]."""
        weight = torch.ones_like(data) if exists is None else exists.to(data.dtype)
        data, weight = data.flatten(1), weight.flatten(1)
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


class HistogramLoss(BaseMetricLossFunction):
    """The probability that a random negative pair is more similar than a random positive one."""

    n_bins: int | None = None
    delta: float = None  # type: ignore[assignment]  # 0.02

    takes_refs = False
    default_distance = CosineSimilarity

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_bins is not None and self.delta not in (None, 2 / self.n_bins):
            raise ConfigError(f"HistogramLoss: expected delta = 2 / n_bins, got {self.delta} and {self.n_bins}.")
        self.delta = 2 / (self.n_bins or 100) if self.delta is None else self.delta

    def compute(self, b: Batch) -> LossDict:
        triplets = b.triplets()
        if not triplets.count:
            return self.zero_losses()
        mat, (pos, neg) = self.distance(b.emb), (triplets.pos.mask, triplets.neg.mask)
        used = (pos.any(1) & neg.any(1))[:, None]
        of_pos, of_neg = self._density(mat, pos & used), self._density(mat, neg & used)
        return {"loss": loss_info((of_neg * of_pos.cumsum(0)).sum(), "already_reduced")}

    def _density(self, mat: Tensor, mask: Tensor) -> Tensor:
        x = mat.masked_select((mask | mask.t()).triu())  # each pair once
        edges = round(1 + 2 / self.delta)
        index = ((x.detach().float() + 1) / self.delta).floor().long().clamp(0, edges - 2)
        upper = (x + 1) / self.delta - index
        density = x.new_zeros(edges).scatter_add(0, index + 1, upper).scatter_add(0, index, 1 - upper)
        return density / len(x)
