"""Losses with learned parameters, which have the names, shapes and initial values of pytorch-metric-learning."""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from nearkin.compat.pml._loss_base import BaseMetricLossFunction
from nearkin.compat.pml._tuples import Batch
from nearkin.compat.pml.distances import CosineSimilarity, DotProductSimilarity, LpDistance
from nearkin.compat.pml.reducers import DivisorReducer, LossInfo, loss_info
from nearkin.losses.classes import ToClasses, class_similarity
from nearkin.losses.registry import LOSSES
from nearkin.ops.reductions import log1p_sum_exp, log_sum_exp

Init = Callable[[Tensor], Any]


class ClassLoss(BaseMetricLossFunction, needs_labels=True, takes_refs=False):
    """A loss with one or, as the setting `centers` says, several vectors of each class.

    They are the columns of the parameter "W" or "fc", or the rows of "proxies".
    """

    num_classes: int
    embedding_size: int
    _: KW_ONLY
    weight_regularizer: nn.Module | None = None
    weight_reg_weight: float = 1
    weight_init_func: Init | None = None

    parameter: ClassVar[str] = "W"
    centers: ClassVar[str] = ""
    default_weight_init_func: ClassVar[Init] = nn.init.normal_

    def __post_init__(self) -> None:
        super().__post_init__()
        shape = [self.embedding_size, self.num_classes * getattr(self, self.centers, 1)]
        weight = nn.Parameter(torch.empty(shape[::-1] if self.parameter == "proxies" else shape))
        (self.weight_init_func or self.get_default_weight_init_func())(weight)
        setattr(self, self.parameter, weight)

    def get_default_weight_init_func(self) -> Init:
        return type(self).default_weight_init_func

    def vectors(self) -> Tensor:
        """Return the vectors [C, D]."""
        weight: Tensor = getattr(self, self.parameter)
        return weight if self.parameter == "proxies" else weight.t()

    def sub_loss_names(self) -> list[str]:
        return super().sub_loss_names() + ["weight_reg_loss"] * (self.weight_regularizer is not None)

    def similarities(self, embeddings: Tensor) -> Tensor:
        """Return the distances to the vectors [N, C, K]."""
        mat: Tensor = self.distance(embeddings, self.vectors())
        return mat.view(len(mat), self.num_classes, -1)

    def get_logits(self, embeddings: Tensor) -> Tensor:
        sim = self.similarities(embeddings)
        return sim.max(2).values if sim.shape[2] > 1 else sim.squeeze(2)

    def compute_loss(self, embeddings: Tensor, *args: Any, **kwargs: Any) -> dict[str, LossInfo]:
        weight = getattr(self, self.parameter)
        weight.data = weight.data.to(embeddings)  # the dtype follows the embeddings
        loss_dict = super().compute_loss(embeddings, *args, **kwargs)
        if self.weight_regularizer is not None:
            loss = self.weight_regularizer(self.vectors()) * self.weight_reg_weight
            loss_dict["weight_reg_loss"] = loss_info(loss, "already_reduced")
        return loss_dict

    def compute(self, b: Batch) -> Any:
        return self.per_sample(b.emb, b.labels) * b.weights()

    def per_sample(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self.get_logits(embeddings), labels, reduction="none")


class NormalizedSoftmaxLoss(ClassLoss, distance=DotProductSimilarity):
    """Cross entropy on products with unit vectors of the classes."""

    temperature: float = 0.05

    def get_logits(self, embeddings: Tensor) -> Tensor:
        return self.as_similarity(self.distance(embeddings, self.distance.normalize(self.vectors()))) / self.temperature


class LargeMarginSoftmaxLoss(ClassLoss, distance=CosineSimilarity, required={}, stored={"margin": int}):
    """Cross entropy on products with the vectors of the classes, with a multiplied angle to the own class."""

    margin: float = 4
    scale: float = 1

    core: ClassVar[str] = "large_margin_softmax"  # the loss of ours that computes it
    norms: ClassVar[int] = 2  # lengths that multiply the cosines: of the embeddings, and of the vectors

    def lengths(self, embeddings: Tensor) -> Tensor:
        of_emb = self.distance.get_norm(embeddings)[:, None]
        return of_emb if self.norms == 1 else of_emb * self.distance.get_norm(self.vectors())

    def per_sample(self, embeddings: Tensor, labels: Tensor) -> Any:
        c = ToClasses(super().get_logits(embeddings), labels)
        if self.norms:
            lengths = self.lengths(embeddings)
            c = replace(c, sim=c.sim * lengths, own=lengths.expand_as(c.sim).gather(1, labels[:, None])[:, 0])
        margin = {"margin_degrees": math.degrees(self.margin)} if self.core == "arcface" else {"margin": self.margin}
        return LOSSES[self.core].function(c, **margin, scale=self.scale)

    def get_logits(self, embeddings: Tensor) -> Tensor:
        return super().get_logits(embeddings) * (self.lengths(embeddings) if self.norms else 1.0) * self.scale


class SphereFaceLoss(LargeMarginSoftmaxLoss, core="sphereface", norms=1):
    """LargeMarginSoftmaxLoss with unit vectors of the classes."""


class CosFaceLoss(LargeMarginSoftmaxLoss, core="cosface", norms=0, stored={}):
    """Cross entropy on cosines, with a margin subtracted from the cosine to the own class."""

    margin: float = 0.35
    scale: float = 64


class ArcFaceLoss(CosFaceLoss, core="arcface", stored={"margin": math.radians}):
    """Cross entropy on cosines, with a margin in degrees added to the angle to the own class."""

    margin: float = 28.6


class SubCenterArcFaceLoss(ArcFaceLoss, centers="sub_centers"):
    """ArcFaceLoss with the nearest of several vectors of each class."""

    sub_centers: int = 3

    @torch.no_grad()
    def get_outliers(
        self, embeddings: Tensor, labels: Tensor, threshold: float = 75, return_dominant_centers: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return the samples whose angle to the dominant centre of their class exceeds a threshold, and these centres.

        As in the original both are returned whatever `return_dominant_centers` is.
        """
        own = self.similarities(embeddings)[torch.arange(len(labels), device=labels.device), labels]  # [N, K]
        votes = one_hot(own.argmax(1), self.sub_centers)
        dominant = votes.new_zeros(self.num_classes, self.sub_centers).index_add(0, labels, votes).argmax(1)
        is_outlier = own.gather(1, dominant[labels][:, None])[:, 0] < math.cos(math.radians(threshold))
        by_class = labels.argsort(stable=True)
        first = torch.arange(self.num_classes, device=labels.device) * self.sub_centers
        return by_class[is_outlier[by_class]], self.vectors()[first + dominant].t()


class ProxyAnchorLoss(
    ClassLoss, parameter="proxies", weight_init_func=partial(nn.init.kaiming_normal_, mode="fan_out"),
    distance=CosineSimilarity, reducer=DivisorReducer, parts=("pos_loss", "neg_loss"),
):  # fmt: skip
    """Soft maxima over the samples of each proxy's class, and over all others."""

    margin: float = 0.1
    alpha: float = 32

    def compute(self, b: Batch) -> Any:
        shift = b.weights() - 1
        mat, distance = self.get_logits(b.emb).t(), self.distance  # [C, N]
        own = torch.arange(self.num_classes, device=b.emb.device)[:, None] == b.labels
        pull = log1p_sum_exp(self.alpha * distance.margin(mat, self.margin) + shift, own)
        push = log1p_sum_exp(self.alpha * distance.margin(-self.margin, mat) + shift, ~own)
        return loss_info(pull, divisor=int(own.any(1).sum())), loss_info(push, divisor=self.num_classes)


def nca(loss: Any, b: Batch, ref: Tensor, ref_labels: Tensor) -> LossInfo:
    """Compute NCALoss, or ProxyNCALoss with proxies as references."""
    logits = loss.softmax_scale * loss.as_similarity(loss.distance(b.emb, ref))
    same = b.labels[:, None] == ref_labels
    if b.emb is ref:
        same, logits = same.fill_diagonal_(False), logits.fill_diagonal_(float("-inf"))
    kept = same.any(1).nonzero()[:, 0]
    weights = b.weights(anchors_only=b.emb is not ref)[kept]
    return loss_info(-log_sum_exp(torch.log_softmax(logits, 1), same)[kept] * weights, indices=kept)


class ProxyNCALoss(ClassLoss, parameter="proxies", distance=partial(LpDistance, power=2)):
    """NCALoss with a proxy for each class in place of the other samples."""

    softmax_scale: float = 1

    def compute(self, b: Batch) -> Any:
        return nca(self, b, self.vectors(), torch.arange(self.num_classes, device=b.emb.device))


class SoftTripleLoss(
    ClassLoss, parameter="fc", centers="centers_per_class", needs_similarity=True, distance=CosineSimilarity,
    weight_init_func=partial(nn.init.kaiming_uniform_, a=math.sqrt(5)), stored={"gamma": lambda x: 1.0 / x},
):  # fmt: skip
    """Cross entropy on the soft similarity to several centres of each class."""

    centers_per_class: int = 10
    la: float = 20
    gamma: float = 0.1
    margin: float = 0.01

    def per_sample(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        sim = self.get_logits(embeddings)
        margin = self.margin * one_hot(labels, self.num_classes).to(sim)
        return cross_entropy(self.la * (sim - margin), labels, reduction="none")

    def get_logits(self, embeddings: Tensor) -> Tensor:
        return class_similarity(self.similarities(embeddings), 1 / self.gamma)


class P2SGradLoss(BaseMetricLossFunction, needs_labels=True, takes_refs=False, takes_indices=False):
    """The squared difference of the cosines to unit vectors of the classes from 0 and 1."""

    descriptors_dim: int
    num_classes: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.weight = nn.Parameter(torch.empty(self.descriptors_dim, self.num_classes).uniform_(-1, 1))
        self._to_unit_length()

    def _to_unit_length(self) -> None:
        self.weight.data = self.weight.data.renorm(2, 1, 1e-5).mul(1e5)  # of the columns

    def compute(self, b: Batch) -> Any:
        self._to_unit_length()
        self.weight.data = self.weight.data.to(b.emb)
        cosine = b.emb @ self.weight / torch.linalg.vector_norm(b.emb, dim=1, keepdim=True)
        loss: Any = LOSSES["p2sgrad"].function(ToClasses(cosine.clamp(-1, 1), b.labels))
        return loss.mean()


class ManifoldLoss(BaseMetricLossFunction, takes_refs=False, distance=CosineSimilarity):
    """Similarities after a random walk on the graph of samples and proxies; labels are not used."""

    l: int  # noqa: E741
    K: int = 50
    lambdaC: float = 1.0
    alpha: float = 0.8
    margin: float = 5e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lambdaC < 0:
            raise ValueError(f"lambdaC must not be negative, got {self.lambdaC}")
        self.proxies = nn.Parameter(torch.randn(self.K, self.l))

    def compute(self, b: Batch) -> Any:
        if b.labels is not None:
            raise ValueError("ManifoldLoss: labels are not supported for this loss function")
        n, proxy = len(b.emb), b.indices
        if proxy is None:
            proxy = torch.cat([torch.arange(self.K), torch.randint(0, self.K, (n - self.K,))])[torch.randperm(n)]
        nodes = torch.cat([b.emb, self.proxies.to(b.emb)])
        eye = torch.eye(len(nodes), dtype=nodes.dtype, device=nodes.device)
        weight = (self.distance(nodes).clamp(min=0) / 0.5).exp() * (1 - eye)
        scale = weight.sum(1).rsqrt()
        walk = (1 - self.alpha) * torch.linalg.inv(eye - self.alpha * scale[:, None] * weight * scale)
        unit = nn.functional.normalize(walk, eps=1e-8)
        sim, context, factor = walk[:n, n:], unit[:n] @ unit[n:].t(), self.lambdaC
        if math.isinf(self.lambdaC):  # the context alone
            sim, factor = context, 0.0
        c = ToClasses(sim, proxy.to(sim.device), probs=context)
        loss: Any = LOSSES["manifold"].function(c, margin=self.margin, context=factor)
        return loss.mean()
