"""Pooling of feature maps [B, F, h, w] to features [B, F], and heads from these to the embedding [B, dim]."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nearkin._common.registry import Registry
from nearkin.config.recipe import ModelConfig
from nearkin.models.backbones import TOKEN_POOLINGS
from nearkin.ops.whitening import within_class_whitening


def gem(maps: Tensor, p: Tensor | float = 3.0) -> Tensor:
    """Generalised-mean pooling: (mean max(x, 1e-6)^p)^(1/p) over positions. Returns pooled features [B, F]."""
    # Divided by the maximum first: x^p under- and overflows float32 for large p or large x.
    positive = maps.clamp(min=1e-6)
    largest = positive.amax(dim=(2, 3), keepdim=True).detach()
    return (positive / largest).pow(p).mean(dim=(2, 3)).pow(1.0 / p) * largest[:, :, 0, 0]


POOLINGS: Registry[Callable[[Tensor], Tensor]] = Registry("pooling")
POOLINGS.add("average", lambda maps: maps.mean(dim=(2, 3)))
POOLINGS.add("maximum", lambda maps: maps.amax(dim=(2, 3)))
POOLINGS.add("average_maximum", lambda maps: maps.mean(dim=(2, 3)) + maps.amax(dim=(2, 3)))
POOLINGS.add("gem", gem)
# All positions, [B, F * h * w]: for very small images, where layout matters as much as texture.
POOLINGS.add("grid", lambda maps: maps.flatten(1))
for _name in TOKEN_POOLINGS:  # the backbone has pooled them: 1 x 1 maps
    POOLINGS.add(_name, lambda maps: maps.flatten(1))


class Pool(nn.Module):
    """The pooling that a model configuration names."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.name = model.pool
        POOLINGS[model.pool]  # raises on an unknown name
        self.p: nn.Parameter | float = nn.Parameter(torch.tensor(model.gem_p)) if model.learn_gem_p else model.gem_p

    def forward(self, maps: Tensor) -> Tensor:
        return gem(maps, self.p) if self.name == "gem" else POOLINGS[self.name](maps)

    def extra_repr(self) -> str:
        return self.name


class Head(nn.Module):
    """Normalisation, dropout and a map of each feature level to its own part of the embedding (as in the ICE paper)."""

    def __init__(self, model: ModelConfig, parts: tuple[int, ...]) -> None:
        super().__init__()
        self.parts = parts
        num_features = sum(parts)
        self.dim = model.dim or num_features
        self.norm: nn.Module = nn.Identity()
        if model.norm == "layer":
            self.norm = nn.LayerNorm(num_features, elementwise_affine=False)
        elif model.norm == "batch":
            self.norm = nn.BatchNorm1d(num_features, affine=False)
        self.dropout = nn.Dropout(model.dropout)
        self.correction: nn.Sequential | None = None
        layer = _mlp if model.head == "mlp" else nn.Linear
        self.maps = nn.ModuleList(layer(size, model.dim // len(parts)) for size in parts if model.dim)
        if model.dim and model.head == "residual":
            self.correction = _mlp(num_features, model.dim)
            nn.init.zeros_(self.correction[-1].weight)  # type: ignore[arg-type]
            nn.init.zeros_(self.correction[-1].bias)  # type: ignore[arg-type]

    def forward(self, features: Tensor) -> Tensor:
        features = self.dropout(self.norm(features))
        if not self.maps:
            return features
        parts = torch.split(features, list(self.parts), dim=1)
        emb = torch.cat([layer(part) for layer, part in zip(self.maps, parts, strict=True)], dim=1)
        return emb if self.correction is None else emb + self.correction(features)

    @torch.no_grad()
    def init_whitened(self, features: Tensor, labels: Tensor, shrinkage: float) -> None:
        """Set the linear map to within-class whitening, then PCA, which keeps what a backbone has learned."""
        if isinstance(self.norm, nn.BatchNorm1d):
            # Evaluation uses the running statistics, so they must be those of the features.
            self.norm.get_buffer("running_mean").copy_(features.mean(0))
            self.norm.get_buffer("running_var").copy_(features.var(0))
        normalized = self.norm.eval()(features)
        self.norm.train(self.training)
        parts = torch.split(normalized, list(self.parts), dim=1)
        for layer, part in zip(self.maps, parts, strict=True):
            assert isinstance(layer, nn.Linear)
            weight, bias = within_class_whitening(part, labels, dim=layer.out_features, shrinkage=shrinkage)
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)


def _mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU(inplace=True), nn.Linear(outputs, outputs))


def unit(emb: Tensor) -> Tensor:
    """L2-normalise the rows of a matrix. Returns rows of length 1 [N, D]; zero rows stay zero."""
    return F.normalize(emb, dim=1)
