"""The regularizers of pytorch-metric-learning: modules that take embeddings, or vectors of classes, [N, D]."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from nearkin.compat.pml._loss_base import WithReducer
from nearkin.compat.pml.distances import CosineSimilarity, LpDistance
from nearkin.compat.pml.reducers import DivisorReducer, loss_info


class BaseRegularizer(WithReducer):
    """The base of all regularizers: subclasses define `compute_loss`, as losses do; ours `values`, one per vector."""

    def values(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def compute_loss(self, x: Tensor) -> dict[str, Any]:
        return {"loss": loss_info(self.values(x))}

    def forward(self, x: Tensor) -> Any:
        return self.reducer(self.compute_loss(x), x, torch.arange(len(x), device=x.device))


class LpRegularizer(BaseRegularizer):
    """The p-norm of each vector, to a power."""

    p: float = 2
    power: float = 1

    def values(self, x: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(x, self.p, 1)
        return norm if self.power == 1 else norm**self.power


class ZeroMeanRegularizer(BaseRegularizer):
    """The absolute sum of each vector's entries."""

    def values(self, x: Tensor) -> Tensor:
        return x.sum(1).abs()


class CenterInvariantRegularizer(
    BaseRegularizer, distance=partial(LpDistance, normalize_embeddings=False),
    required={"power": 1, "normalize_embeddings": False},
):  # fmt: skip
    """The squared deviation of each squared length from their mean."""

    def values(self, x: Tensor) -> Tensor:
        squares = self.distance.get_norm(x) ** 2
        return (squares - squares.mean()) ** 2 / 4


class RegularFaceRegularizer(BaseRegularizer, distance=CosineSimilarity, needs_similarity=True):
    """The similarity of each vector to the nearest other one."""

    def values(self, x: Tensor) -> Tensor:
        sim: Tensor = self.distance(x)
        others = sim.detach().clone().fill_diagonal_(torch.finfo(sim.dtype).min)
        return sim.gather(1, others.max(1, keepdim=True).indices)[:, 0]


class SparseCentersRegularizer(BaseRegularizer, distance=CosineSimilarity, required={}, reducer=DivisorReducer):
    """The distances between the centres of each class."""

    num_classes: int
    centers_per_class: int

    def compute_loss(self, x: Tensor) -> dict[str, Any]:
        k = self.centers_per_class
        unit = self.distance.normalize(x).view(self.num_classes, k, -1)
        row, column = torch.triu_indices(k, k, 1, device=x.device)
        sim = (unit @ unit.transpose(1, 2))[:, row, column].flatten()  # pairs within a class only
        losses = (2.0 + torch.finfo(x.dtype).tiny - (2.0 * sim).clamp(max=2)).sqrt()
        return {"loss": loss_info(losses, divisor=2 * len(losses))}
