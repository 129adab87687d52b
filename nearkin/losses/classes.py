"""ToClasses: the similarities of a batch to its classes, and the primitives of the losses that use them.

No mask [N, C] is ever built, so 100,000 classes cost the similarity block and one more buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nearkin.errors import DataError
from nearkin.losses.registry import Inputs, Param
from nearkin.ops.geometry import check_finite, full_precision, unit
from nearkin.ops.pairs import as_batch
from nearkin.ops.reductions import exp_


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
    emb, labels = _class_batch(emb, labels, proxies, "proxies")
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
    emb, labels = _class_batch(emb, labels, weight, "weight")
    check_finite(emb)
    with full_precision(emb):
        return ToClasses(torch.addmm(bias.to(emb.dtype), emb, weight.to(emb.dtype).t()), labels)


def check_range(labels: Tensor, num_classes: int) -> None:
    """Raise DataError if a label is not in 0..num_classes-1."""
    low, high = (int(v) for v in torch.aminmax(labels))
    if low < 0 or high >= num_classes:
        raise DataError(
            f"labels: expected 0 to {num_classes - 1} for {num_classes} classes, got {low} to {high}. "
            "Number the training classes from 0, or increase num_classes."
        )


def _class_batch(emb: Tensor, labels: Tensor | Sequence[int], params: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Validate a batch against the parameters of its classes, [C, ..., D]."""
    emb, labels = as_batch(emb, labels)
    check_range(labels, len(params))
    if params.shape[-1] != emb.shape[1]:
        raise DataError(f"{name}: expected {emb.shape[1]} dimensions, as the embeddings have, got {params.shape[-1]}.")
    return emb, labels


PROXIES = Inputs(proxy_similarities, params=(Param("proxies", "CD", lr=100.0),))
CENTERS = Inputs(
    proxy_similarities,
    params=(Param("proxies", "CKD", lr=100.0),),
    builder_kwargs={"centers": 10},
    builder_docs={"centers": "Number of centres per class."},
    dims={"K": "centers"},
)
HEAD = Inputs(
    linear_logits,
    params=(Param("weight", "CD", init="zeros"), Param("bias", "C", init="zeros", decay=False)),
    builder_kwargs={"dropout": 0.5},
    builder_docs={"dropout": "Dropout probability on the embeddings before the head, in training only."},
    dropout="dropout",
)


def own_and_others(sim: Tensor, labels: Tensor, scale: float, dim: int = 1) -> tuple[Tensor, Tensor]:
    """Compute each sample's similarity to its class, and the log-sum-exp over other classes (dim 1) or samples (0)."""
    return _OwnAndOthers.apply(sim, labels, scale, dim)  # type: ignore[no-any-return]


class _OwnAndOthers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sim: Tensor, labels: Tensor, scale: float, dim: int) -> tuple[Tensor, Tensor]:
        index = labels[:, None]
        own = sim.gather(1, index).squeeze(1)
        weight = (sim * scale).scatter_(1, index, float("-inf"))
        top = weight.amax(dim, keepdim=True)
        top.masked_fill_(top == float("-inf"), 0.0)
        exp_(weight.sub_(top))
        total = weight.sum(dim, keepdim=True)
        ctx.scale, ctx.dim = scale, dim
        ctx.save_for_backward(weight, total, index)
        return own, (top + total.log()).squeeze(dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_own: Tensor, g_others: Tensor) -> tuple[Tensor, None, None, None]:
        weight, total, index = ctx.saved_tensors
        factor = (ctx.scale * g_others.unsqueeze(ctx.dim) / total).masked_fill_(total == 0, 0.0)
        return (weight * factor).scatter_(1, index, g_own[:, None]), None, None, None


def log1p_sum_exp_per_class(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log(1 + sum of exp(x) over the samples of a class) for every class in the batch."""
    present, index = torch.unique(labels, return_inverse=True)
    top = torch.zeros(len(present), dtype=x.dtype, device=x.device)
    top = top.scatter_reduce(0, index, x.detach(), "amax")  # starts at 0: the zero logit
    total = torch.exp(-top).index_add(0, index, torch.exp(x - top[index]))
    return top + total.log(), present


def class_similarity(sim: Tensor, gamma: float) -> Tensor:
    """Compute similarities to classes of several centres: the mean over centres with weights softmax(sim / gamma)."""
    return _SoftMaximum.apply(sim, gamma)  # type: ignore[no-any-return]


class _SoftMaximum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sim: Tensor, gamma: float) -> Tensor:
        sim = sim.transpose(1, 2).contiguous()  # [N, K, C], as `proxy_similarities` stores it
        ctx.gamma = gamma
        chunks = _row_chunks(sim)
        if len(chunks) == 1:
            weight, mean = _softmax_mean(sim, gamma)
            ctx.save_for_backward(sim, weight, mean)
            return mean
        ctx.save_for_backward(sim)
        return torch.cat([_softmax_mean(chunk, gamma)[1] for chunk in chunks])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        sim, *saved = ctx.saved_tensors
        grad, end = torch.empty_like(sim), 0
        # Weights that were not saved are recomputed by chunks: with many classes the block alone fills the memory.
        for chunk in _row_chunks(sim):
            rows = slice(end, end := end + len(chunk))
            weight, mean = saved or _softmax_mean(chunk, ctx.gamma)
            slope = torch.sub(chunk, mean[:, None], out=grad[rows]).div_(ctx.gamma).add_(1.0)
            slope.mul_(weight).mul_(g[rows, None])
        return grad.transpose(1, 2), None


def _row_chunks(sim: Tensor) -> tuple[Tensor, ...]:
    chunks: tuple[Tensor, ...] = torch.split(sim, max(1, (1 << 22) // sim[0].numel()))
    return chunks


def _softmax_mean(sim: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Return softmax(sim / gamma) over the centres [n, K, C], and the mean of sim with these weights [n, C]."""
    weight = sim / gamma
    exp_(weight.sub_(weight.amax(1, keepdim=True)))
    weight.div_(weight.sum(1, keepdim=True))
    return weight, (weight * sim).sum(1)
