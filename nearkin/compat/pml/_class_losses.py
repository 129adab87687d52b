"""Losses with learned parameters, which have the names, shapes and initial values of pytorch-metric-learning."""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from nearkin.compat.pml._batch_losses import nca
from nearkin.compat.pml._loss_base import BaseMetricLossFunction, Batch
from nearkin.compat.pml.distances import CosineSimilarity, DotProductSimilarity, LpDistance
from nearkin.compat.pml.reducers import DivisorReducer, LossDict, loss_info
from nearkin.losses.classes import ToClasses, class_similarity
from nearkin.losses.registry import LOSSES
from nearkin.ops.reductions import log1p_sum_exp

Init = Callable[[Tensor], Any]


class ClassLoss(BaseMetricLossFunction):
    """A loss with vectors of classes."""

    num_classes: int
    embedding_size: int
    _: KW_ONLY
    weight_regularizer: nn.Module | None = None
    weight_reg_weight: float = 1
    weight_init_func: Init | None = None

    needs_labels, takes_refs = True, False
    parameter: ClassVar[str] = "W"  # the vectors as columns, "proxies" as rows

    def __post_init__(self) -> None:
        super().__post_init__()
        rows = self.num_classes * self.vectors_per_class()
        shape = (rows, self.embedding_size) if self.parameter == "proxies" else (self.embedding_size, rows)
        weight = nn.Parameter(torch.empty(shape))
        (self.weight_init_func or self.get_default_weight_init_func())(weight)
        setattr(self, self.parameter, weight)

    def get_default_weight_init_func(self) -> Init:
        return nn.init.normal_

    def vectors_per_class(self) -> int:
        return 1

    def vectors(self) -> Tensor:
        """Return the vectors [C, D]."""
        weight: Tensor = getattr(self, self.parameter)
        return weight if self.parameter == "proxies" else weight.t()

    def sub_loss_names(self) -> list[str]:
        return super().sub_loss_names() + ["weight_reg_loss"] * (self.weight_regularizer is not None)

    def get_logits(self, embeddings: Tensor) -> Tensor:
        logits: Tensor = self.distance(embeddings, self.vectors())
        return logits

    def compute(self, b: Batch) -> LossDict:
        weight = getattr(self, self.parameter)
        weight.data = weight.data.to(b.emb)  # the dtype follows the embeddings
        loss_dict = self.values(b)
        if self.weight_regularizer is not None:
            loss = self.weight_regularizer(self.vectors()) * self.weight_reg_weight
            loss_dict["weight_reg_loss"] = loss_info(loss, "already_reduced")
        return loss_dict

    def values(self, b: Batch) -> LossDict:
        return {"loss": loss_info(self.per_sample(b.emb, b.labels) * b.weights())}

    def per_sample(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self.get_logits(embeddings), labels, reduction="none")


class NormalizedSoftmaxLoss(ClassLoss):
    """Cross entropy on products with unit vectors of the classes."""

    temperature: float = 0.05

    default_distance = DotProductSimilarity

    def get_logits(self, embeddings: Tensor) -> Tensor:
        return self.as_similarity(self.distance(embeddings, self.distance.normalize(self.vectors()))) / self.temperature


class LargeMarginSoftmaxLoss(ClassLoss):
    """Cross entropy on products with the vectors of the classes, with a multiplied angle to the own class."""

    margin: float = 4
    scale: float = 1

    required = CosineSimilarity
    core: ClassVar[str] = "large_margin_softmax"  # the function of ours that computes it

    def __post_init__(self) -> None:
        super().__post_init__()
        self.margin = self.stored_margin()

    def stored_margin(self) -> float:
        return int(self.margin)

    def core_margin(self) -> dict[str, float]:
        return {"margin": self.margin}

    def get_cosine(self, embeddings: Tensor) -> Tensor:
        cosine: Tensor = self.distance(embeddings, self.vectors())
        return cosine

    def lengths(self, embeddings: Tensor) -> Tensor | None:
        """Return factors on the cosines, [N, C] or [N, 1]; None if there are none."""
        return self.distance.get_norm(embeddings)[:, None] * self.distance.get_norm(self.vectors())

    def per_sample(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        cosine, lengths = self.get_cosine(embeddings), self.lengths(embeddings)
        c = ToClasses(cosine, labels)
        if lengths is not None:
            c = replace(c, sim=cosine * lengths, own=lengths.expand_as(cosine).gather(1, labels[:, None])[:, 0])
        loss = LOSSES[self.core].function(c, **self.core_margin(), scale=self.scale)
        assert isinstance(loss, Tensor)
        return loss

    def get_logits(self, embeddings: Tensor) -> Tensor:
        lengths = self.lengths(embeddings)
        return self.get_cosine(embeddings) * (1.0 if lengths is None else lengths) * self.scale


class SphereFaceLoss(LargeMarginSoftmaxLoss):
    """LargeMarginSoftmaxLoss with unit vectors of the classes."""

    core = "sphereface"

    def lengths(self, embeddings: Tensor) -> Tensor | None:
        return self.distance.get_norm(embeddings)[:, None]


class CosFaceLoss(LargeMarginSoftmaxLoss):
    """Cross entropy on cosines, with a margin subtracted from the cosine to the own class."""

    margin: float = 0.35
    scale: float = 64

    core = "cosface"

    def stored_margin(self) -> float:
        return self.margin

    def lengths(self, embeddings: Tensor) -> Tensor | None:
        return None


class ArcFaceLoss(CosFaceLoss):
    """Cross entropy on cosines, with a margin in degrees added to the angle to the own class."""

    margin: float = 28.6

    core = "arcface"

    def stored_margin(self) -> float:
        return math.radians(self.margin)

    def core_margin(self) -> dict[str, float]:
        return {"margin_degrees": math.degrees(self.margin)}


class SubCenterArcFaceLoss(ArcFaceLoss):
    """ArcFaceLoss with the nearest of several vectors of each class."""

    sub_centers: int = 3

    def vectors_per_class(self) -> int:
        return self.sub_centers

    def get_cosine(self, embeddings: Tensor) -> Tensor:
        return self._to_centers(embeddings).max(2).values

    def _to_centers(self, embeddings: Tensor) -> Tensor:
        return super().get_cosine(embeddings).view(-1, self.num_classes, self.sub_centers)

    @torch.no_grad()
    def get_outliers(
        self, embeddings: Tensor, labels: Tensor, threshold: float = 75, return_dominant_centers: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return the samples whose angle to the dominant centre of their class exceeds a threshold, and these centres.

        As in the original both are returned whatever `return_dominant_centers` is.
        """
        own = self._to_centers(embeddings)[torch.arange(len(labels), device=labels.device), labels]  # [N, K]
        votes = one_hot(own.argmax(1), self.sub_centers)
        per_class = votes.new_zeros(self.num_classes, self.sub_centers).index_add(0, labels, votes)
        dominant = per_class.argmax(1)
        is_outlier = own.gather(1, dominant[labels][:, None])[:, 0] < math.cos(math.radians(threshold))
        by_class = labels.argsort(stable=True)
        first = torch.arange(self.num_classes, device=labels.device) * self.sub_centers
        return by_class[is_outlier[by_class]], self.vectors()[first + dominant].t()


class ProxyAnchorLoss(ClassLoss):
    """Soft maxima over the samples of each proxy's class, and over all others."""

    margin: float = 0.1
    alpha: float = 32

    default_distance = CosineSimilarity
    default_reducer = DivisorReducer
    parts = ("pos_loss", "neg_loss")
    parameter = "proxies"

    def values(self, b: Batch) -> LossDict:
        shift = b.weights() - 1
        mat, distance = self.get_logits(b.emb).t(), self.distance  # [C, N]
        own = torch.arange(self.num_classes, device=b.emb.device)[:, None] == b.labels
        pull = log1p_sum_exp(self.alpha * distance.margin(mat, self.margin) + shift, own)
        push = log1p_sum_exp(self.alpha * distance.margin(-self.margin, mat) + shift, ~own)
        present = int(own.any(1).sum())
        return {
            "pos_loss": loss_info(pull, divisor=present),
            "neg_loss": loss_info(push, divisor=self.num_classes),
        }

    def get_default_weight_init_func(self) -> Init:
        return partial(nn.init.kaiming_normal_, mode="fan_out")


class ProxyNCALoss(ClassLoss):
    """NCALoss with a proxy for each class in place of the other samples."""

    softmax_scale: float = 1

    default_distance = partial(LpDistance, power=2)
    parameter = "proxies"

    def values(self, b: Batch) -> LossDict:
        return nca(self, b, self.vectors(), torch.arange(self.num_classes, device=b.emb.device))


class SoftTripleLoss(ClassLoss):
    """Cross entropy on the soft similarity to several centres of each class."""

    centers_per_class: int = 10
    la: float = 20
    gamma: float = 0.1
    margin: float = 0.01

    default_distance = CosineSimilarity
    parameter = "fc"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_similarity()
        self.gamma = 1.0 / self.gamma

    def vectors_per_class(self) -> int:
        return self.centers_per_class

    def per_sample(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        sim = self.get_logits(embeddings)
        margin = self.margin * one_hot(labels, self.num_classes).to(sim.dtype)
        return cross_entropy(self.la * (sim - margin), labels, reduction="none")

    def get_default_weight_init_func(self) -> Init:
        return partial(nn.init.kaiming_uniform_, a=math.sqrt(5))

    def get_logits(self, embeddings: Tensor) -> Tensor:
        sim = super().get_logits(embeddings).view(-1, self.num_classes, self.centers_per_class)
        return class_similarity(sim, 1 / self.gamma)


class P2SGradLoss(BaseMetricLossFunction):
    """The squared difference of the cosines to unit vectors of the classes from 0 and 1."""

    descriptors_dim: int
    num_classes: int

    needs_labels, takes_refs, takes_indices = True, False, False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.weight = nn.Parameter(torch.empty(self.descriptors_dim, self.num_classes).uniform_(-1, 1))
        self._to_unit_length()

    def _to_unit_length(self) -> None:
        self.weight.data = self.weight.data.renorm(2, 1, 1e-5).mul(1e5)  # of the columns

    def compute(self, b: Batch) -> LossDict:
        self._to_unit_length()
        self.weight.data = self.weight.data.to(b.emb)
        cosine = b.emb @ self.weight / torch.linalg.vector_norm(b.emb, dim=1, keepdim=True)
        loss = LOSSES["p2sgrad"].function(ToClasses(cosine.clamp(-1, 1), b.labels))
        assert isinstance(loss, Tensor)
        return {"loss": loss_info(loss.mean(), "already_reduced")}


class ManifoldLoss(BaseMetricLossFunction):
    """Similarities after a random walk on the graph of samples and proxies; labels are not used."""

    l: int  # noqa: E741
    K: int = 50
    lambdaC: float = 1.0
    alpha: float = 0.8
    margin: float = 5e-4

    takes_refs = False
    default_distance = CosineSimilarity

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lambdaC < 0:
            raise ValueError(f"lambdaC must not be negative, got {self.lambdaC}")
        self.proxies = nn.Parameter(torch.randn(self.K, self.l))

    def compute(self, b: Batch) -> LossDict:
        if b.labels is not None:
            raise ValueError("ManifoldLoss: labels are not supported for this loss function")
        n, proxy = len(b.emb), b.indices
        if proxy is None:
            proxy = torch.cat([torch.arange(self.K), torch.randint(0, self.K, (n - self.K,))])[torch.randperm(n)]
        own = proxy.to(b.emb.device)[:, None]
        nodes = torch.cat([b.emb, self.proxies.to(b.emb)])
        eye = torch.eye(len(nodes), dtype=nodes.dtype, device=nodes.device)
        weight = (self.distance(nodes).clamp(min=0) / 0.5).exp() * (1 - eye)
        scale = weight.sum(1).rsqrt()
        walk = (1 - self.alpha) * torch.linalg.inv(eye - self.alpha * scale[:, None] * weight * scale)

        def hinge(sim: Tensor) -> Tensor:
            gap = sim - sim.gather(1, own) + self.margin
            used = (gap >= 0).scatter(1, own, False)
            return torch.log1p(torch.where(used, gap, 0.0).exp().mul(used).sum(1)).mean()

        unit = nn.functional.normalize(walk, eps=1e-8)
        context = hinge(unit[:n] @ unit[n:].t())
        loss = context if math.isinf(self.lambdaC) else hinge(walk[:n, n:]) + self.lambdaC * context
        return {"loss": loss_info(loss, "already_reduced")}
