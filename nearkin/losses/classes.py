"""ToClasses: the similarities of a batch to its classes. No mask [N, C] is ever built, even for 100,000 classes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nearkin.errors import DataError
from nearkin.losses.registry import Inputs, Param
from nearkin.ops.checks import check_range, squared_norms
from nearkin.ops.geometry import full_precision, gram, unit, zero_or_root
from nearkin.ops.pairs import as_batch


@dataclass(frozen=True, eq=False)
class ToClasses:
    """Samples [N] against classes [C], each with one or several centres [K]."""

    sim: Tensor  # [N, C] or [N, C, K] cosines to proxies, or the logits of a linear head
    labels: Tensor  # [N] int64 in 0..C-1
    # [C, D] or [C, K, D] unit proxies, for losses that also compare proxies with each other
    proxies: Tensor | None = None
    # [N] a further term of each sample and its own class (center: squared distance; pce: product with the class sum)
    own: Tensor | None = None
    probs: Tensor | None = None  # [N, C] class probabilities without gradient (pce)


def proxy_similarities(emb: Tensor, labels: Tensor | Sequence[int], proxies: Tensor) -> ToClasses:
    """Compute the cosines between embeddings and proxies."""
    emb, labels = class_batch(emb, labels, proxies, "proxies")
    with full_precision(emb):
        f, w = unit(emb), unit(proxies.to(emb.dtype))
        if w.dim() == 2:
            sim = f @ w.t()
        else:
            # Stored as [N, K, C]: sums over the few centres then run along contiguous rows of classes.
            flat = w.transpose(0, 1).flatten(0, 1)
            sim = (f @ flat.t()).view(len(f), w.shape[1], w.shape[0]).transpose(1, 2)
    return ToClasses(sim, labels, w)


def linear_logits(emb: Tensor, labels: Tensor | Sequence[int], weight: Tensor, bias: Tensor) -> ToClasses:
    """Compute the logits of a linear head on embeddings that are not normalised. Returns logits [N, C]."""
    emb, labels = class_batch(emb, labels, weight, "weight")
    squared_norms(emb)
    with full_precision(emb):
        return ToClasses(torch.addmm(bias.to(emb.dtype), emb, weight.to(emb.dtype).t()), labels)


def class_batch(emb: Tensor, labels: Tensor | Sequence[int], params: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Validate a batch against the parameters of its classes, [C, ..., D]."""
    emb, labels = as_batch(emb, labels)
    if params.shape[-1] != emb.shape[1]:
        raise DataError(f"{name}: expected {emb.shape[1]} dimensions, as the embeddings have, got {params.shape[-1]}.")
    return check_range(emb, labels, len(params)), labels


PROXIES = Inputs(proxy_similarities, params=(Param("proxies", "CD", lr=100.0),), logits="cosine")
CENTERS = Inputs(
    proxy_similarities,
    params=(Param("proxies", "CKD", lr=100.0),),
    builder_kwargs={"centers": 10},
    builder_docs={"centers": "Number of centres per class."},
    dims={"K": "centers"},
    logits="cosine",
)
HEAD = Inputs(
    linear_logits,
    params=(Param("weight", "CD", init="zeros"), Param("bias", "C", init="zeros", decay=False)),
    builder_kwargs={"dropout": 0.5},
    builder_docs={"dropout": "Dropout probability on the embeddings before the head, in training only."},
    dropout="dropout",
    logits="linear",
)


def class_similarity(sim: Tensor, gamma: float | Tensor) -> Tensor:
    """Compute similarities to classes of several centres: the mean over centres with weights softmax(sim / gamma)."""
    return (torch.softmax(sim / gamma, 2) * sim).sum(2)


def center_spread(w: Tensor) -> Tensor:
    """Compute half the mean distance between the unit centres [C, K, D] of a class."""
    classes, centers, _ = w.shape
    if centers == 1:
        return w.sum() * 0.0
    products = gram(w)
    length = products.detach().diagonal(dim1=1, dim2=2)  # 1, or 0 for a zero proxy
    root = zero_or_root(length[:, :, None] + length[:, None, :] - 2 * products, 8 * torch.finfo(w.dtype).eps)
    # The distance matrix holds every pair twice.
    return root.sum() / (2 * classes * centers * (centers - 1))


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
