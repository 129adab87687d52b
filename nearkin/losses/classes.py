"""ToClasses: how a batch relates to its classes, and the primitives of the losses that compare the two.

No mask [N, C] is ever built. The own class of a sample is one gathered column, and "all other classes" is the same
block with that one entry left out, so 100,000 classes cost the similarity block and one buffer more.
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
    """Samples [N] against classes [C], each class perhaps with several centres [K].

    sim       [N, C] or [N, C, K]: cosines to proxies, or the logits of a linear head
    labels    [N] int64 in 0..C-1
    proxies   the unit proxies [C, D] or [C, K, D], for losses that also compare proxies with each other
    own       [N] what else joins a sample to its own class (center: squared distance; pce: product with its mean)
    probs     [N, C] class probabilities held constant (pce)
    """

    sim: Tensor
    labels: Tensor
    proxies: Tensor | None = None
    own: Tensor | None = None
    probs: Tensor | None = None


def to_proxies(emb: Tensor, labels: Tensor | Sequence[int], proxies: Tensor) -> ToClasses:
    """Cosines between embeddings [N, D] and proxies [C, D] or [C, K, D]."""
    emb, labels = as_batch(emb, labels)
    check_range(labels, len(proxies))
    check_width(emb, proxies, "proxies")
    with full_precision(emb):
        f, w = unit(emb), unit(proxies.to(emb.dtype))
        if w.dim() == 2:
            sim = f @ w.t()
        else:
            # Laid out as [N, K, C]: sums over the few centres then run along whole rows of classes.
            flat = w.transpose(0, 1).flatten(0, 1)
            sim = (f @ flat.t()).view(len(f), w.shape[1], w.shape[0]).transpose(1, 2)
    return ToClasses(sim, labels, w)


def to_logits(emb: Tensor, labels: Tensor | Sequence[int], weight: Tensor, bias: Tensor) -> ToClasses:
    """The logits of a linear head on raw embeddings."""
    emb, labels = as_batch(emb, labels)
    check_range(labels, len(weight))
    check_width(emb, weight, "weight")
    check_finite(emb)
    with full_precision(emb):
        return ToClasses(torch.addmm(bias.to(emb.dtype), emb, weight.to(emb.dtype).t()), labels)


def check_range(labels: Tensor, num_classes: int) -> None:
    low, high = (int(v) for v in torch.aminmax(labels))
    if low < 0 or high >= num_classes:
        raise DataError(
            f"labels: expected 0 to {num_classes - 1} for {num_classes} classes, got {low} to {high}. "
            "Number the training classes from 0, or raise num_classes."
        )


def check_width(emb: Tensor, params: Tensor, name: str) -> None:
    if params.shape[-1] != emb.shape[1]:
        raise DataError(f"the embeddings have {emb.shape[1]} dimensions, {name} {params.shape[-1]}.")


PROXIES = Inputs(to_proxies, (Param("proxies", "CD", lr=100.0),))
CENTERS = Inputs(to_proxies, (Param("proxies", "CKD", lr=100.0),), outer={"centers": 10})
HEAD = Inputs(
    to_logits,
    (Param("weight", "CD", init="zeros"), Param("bias", "C", init="zeros", decay=False)),
    outer={"dropout": 0.5},
)

# --- primitives -------------------------------------------------------------------------------------------------------


def own_and_others(sim: Tensor, labels: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Per sample: the similarity to its own class [N], and log sum exp(scale * sim) over all other classes [N]."""
    return _OwnAndOthers.apply(sim, labels, scale, 1)  # type: ignore[no-any-return]


def own_and_other_samples(sim: Tensor, labels: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Per sample the similarity to its own class [N]; per class log sum exp(scale * sim) over the other samples [C]."""
    return _OwnAndOthers.apply(sim, labels, scale, 0)  # type: ignore[no-any-return]


class _OwnAndOthers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sim: Tensor, labels: Tensor, scale: float, dim: int) -> tuple[Tensor, Tensor]:
        at = labels[:, None]
        own = sim.gather(1, at).squeeze(1)
        weight = (sim * scale).scatter_(1, at, float("-inf"))
        top = weight.amax(dim, keepdim=True)
        top.masked_fill_(top == float("-inf"), 0.0)
        exp_(weight.sub_(top))
        total = weight.sum(dim, keepdim=True)
        ctx.scale, ctx.dim = scale, dim
        ctx.save_for_backward(weight, total, at)
        return own, (top + total.log()).squeeze(dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_own: Tensor, g_others: Tensor) -> tuple[Tensor, None, None, None]:
        weight, total, at = ctx.saved_tensors
        row = (ctx.scale * g_others.unsqueeze(ctx.dim) / total).masked_fill_(total == 0, 0.0)
        return (weight * row).scatter_(1, at, g_own[:, None]), None, None, None


def log1p_sum_exp_per_class(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """log(1 + sum of exp(x) over the samples of a class) for each class in the batch [P], and those classes [P]."""
    present, index = torch.unique(labels, return_inverse=True)
    top = torch.zeros(len(present), dtype=x.dtype, device=x.device)
    top = top.scatter_reduce(0, index, x.detach(), "amax")  # starts at 0: the zero logit
    total = torch.exp(-top).index_add(0, index, torch.exp(x - top[index]))
    return top + total.log(), present


def class_similarity(v: Tensor, gamma: float) -> Tensor:
    """Similarity to classes of several centres [N, C]: the mean of v [N, C, K] with weights softmax(v / gamma)."""
    return _SoftMaximum.apply(v, gamma)  # type: ignore[no-any-return]


class _SoftMaximum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor, gamma: float) -> Tensor:
        v = v.transpose(1, 2).contiguous()  # [N, K, C], as `to_proxies` laid it out
        ctx.gamma = gamma
        parts = _by_rows(v)
        if len(parts) == 1:
            share, mean = _shares(v, gamma)
            ctx.save_for_backward(v, share, mean)
            return mean
        ctx.save_for_backward(v)
        return torch.cat([_shares(part, gamma)[1] for part in parts])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        v, *kept = ctx.saved_tensors
        grad, done = torch.empty_like(v), 0
        # Not kept, the shares are computed again, some rows at a time: with many classes the block alone fills memory.
        for part in _by_rows(v):
            rows = slice(done, done := done + len(part))
            share, mean = kept or _shares(part, ctx.gamma)
            slope = torch.sub(part, mean[:, None], out=grad[rows]).div_(ctx.gamma).add_(1.0)
            slope.mul_(share).mul_(g[rows, None])
        return grad.transpose(1, 2), None


def _by_rows(v: Tensor) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = torch.split(v, max(1, (1 << 22) // v[0].numel()))
    return parts


def _shares(v: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """softmax(v / gamma) over the centres [n, K, C], and the mean of v with it [n, C]."""
    share = v / gamma
    exp_(share.sub_(share.amax(1, keepdim=True)))
    share.div_(share.sum(1, keepdim=True))
    return share, (share * v).sum(1)
