"""From pooled features [B, F] to the embedding [B, dim]."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nearkin.config.recipe import ModelConfig
from nearkin.errors import ConfigError
from nearkin.ops.whitening import within_class_whitening


class Head(nn.Module):
    """Normalise, drop out, map: each as the model asks. `dim` is the length of what comes out.

    parts: how many features each tap gives. Each part has a map of its own to an equal share of the embedding, so
    that depths are not mixed (the L/M/H variant of the ICE paper).

    "residual" adds a two-layer correction that starts at zero, so that training begins exactly at the linear map;
    "mlp" is two layers with a ReLU between.
    """

    def __init__(self, model: ModelConfig, parts: tuple[int, ...]) -> None:
        super().__init__()
        self.parts = parts
        features = sum(parts)
        self.dim = model.dim or features
        self.norm = _norm(model.norm, features)
        self.dropout = nn.Dropout(model.dropout)
        self.correction: nn.Sequential | None = None
        if not model.dim:
            self.maps = nn.ModuleList()
        elif model.head == "mlp":
            self.maps = nn.ModuleList(_two_layers(size, model.dim // len(parts)) for size in parts)
        else:
            self.maps = nn.ModuleList(nn.Linear(size, model.dim // len(parts)) for size in parts)
        if model.dim and model.head == "residual":
            self.correction = _two_layers(features, model.dim)
            nn.init.zeros_(self.correction[-1].weight)  # type: ignore[arg-type]
            nn.init.zeros_(self.correction[-1].bias)  # type: ignore[arg-type]

    def forward(self, features: Tensor) -> Tensor:
        features = self.dropout(self.norm(features))
        if not self.maps:
            return features
        pieces = torch.split(features, list(self.parts), dim=1)
        emb = torch.cat([part(piece) for part, piece in zip(self.maps, pieces, strict=True)], dim=1)
        return emb if self.correction is None else emb + self.correction(features)

    @torch.no_grad()
    def init_whitened(self, features: Tensor, labels: Tensor, shrinkage: float) -> None:
        """Set the linear map to within-class whitening followed by PCA, which no first step can beat by chance.

        A head that starts at random throws away what a pretrained backbone knows, and few training classes do not
        bring it back for unseen ones; this start keeps it, and flattens the directions in which a class varies.
        """
        for part in self.maps:
            if not isinstance(part, nn.Linear):
                raise ConfigError(
                    "model.head_init: whitened needs a linear or residual head. Give --model.head linear."
                )
        if isinstance(self.norm, nn.BatchNorm1d):  # judging uses its running statistics, so these must be the features'
            assert self.norm.running_mean is not None
            assert self.norm.running_var is not None
            self.norm.running_mean.copy_(features.mean(0))
            self.norm.running_var.copy_(features.var(0))
        normed = self.norm.eval()(features)
        self.norm.train(self.training)
        pieces = torch.split(normed, list(self.parts), dim=1)
        for part, piece in zip(self.maps, pieces, strict=True):
            assert isinstance(part, nn.Linear)
            weight, bias = within_class_whitening(piece, labels, dim=part.out_features, shrinkage=shrinkage)
            part.weight.copy_(weight)
            part.bias.copy_(bias)


def _two_layers(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU(inplace=True), nn.Linear(outputs, outputs))


def _norm(kind: str, features: int) -> nn.Module:
    if kind == "layer":
        return nn.LayerNorm(features, elementwise_affine=False)
    if kind == "batch":
        return nn.BatchNorm1d(features, affine=False)
    return nn.Identity()


def unit(emb: Tensor) -> Tensor:
    """Rows at length 1; a zero row stays zero."""
    return F.normalize(emb, dim=1)
