"""Classifier: the classes that an objective has learned, as a plain module."""

import torch
from torch import Tensor, nn

from nearkin.losses.classes import class_similarity
from nearkin.ops.geometry import unit


class Classifier(nn.Module):
    """Embeddings [N, D] to logits [N, C] of the training classes: a linear layer, on cosines if the loss compares them.

    `Objective.classifier()` makes one. It has its own copy of the parameters, is differentiable, and can be exported
    with `torch.export` and `torch.onnx`.

    Attributes:
        linear: The layer, with one row per class, or per centre of each class. The scale of the loss is part of it.
        normalize: Whether embeddings are normalised first.
        centers: Number of centres per class.
        temperature: Of the softmax that weighs the centres of a class; None for the nearest centre.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, *, normalize: bool, centers: int, temperature: float | None
    ) -> None:
        super().__init__()
        # On the device "meta": no random numbers are drawn for weights that are replaced.
        self.linear = nn.Linear(weight.shape[1], len(weight), bias=bias is not None, device="meta")
        self.linear.weight = nn.Parameter(weight.detach().clone())
        if bias is not None:
            self.linear.bias = nn.Parameter(bias.detach().clone())
        self.normalize, self.centers, self.temperature = normalize, centers, temperature

    def forward(self, emb: Tensor) -> Tensor:
        """Compute the logits [N, C] of embeddings [N, D]."""
        logits: Tensor = self.linear(unit(emb) if self.normalize else emb)
        if self.centers == 1:
            return logits
        logits = logits.reshape(-1, len(self.linear.weight) // self.centers, self.centers)
        return torch.amax(logits, 2) if self.temperature is None else class_similarity(logits, self.temperature)
