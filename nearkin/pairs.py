"""Pairs: the one vocabulary that losses and miners share, and the few numeric primitives under it.

    pairs = pair_up(emb, labels)            # cosine similarities [N, N]; self removed by index
    pairs.sim, pairs.pos, pairs.neg         # [N, M] similarities (higher is nearer) and two boolean masks

A miner narrows the masks (`Pairs -> Pairs`), a loss reads them. The primitives (`unit`, `log_sum_exp`,
`log1p_sum_exp`, `hinge_sum`, `Pairs.distance`) have hand-written backward passes: they hold one buffer each and are
exact where autograd would divide zero by zero (a zero vector, an empty row, two coincident points).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nearkin.errors import ConfigError, DataError

Metric = Literal["cosine", "dot"]

# A vector no longer than this has no direction: it is mapped to zero, with zero gradient.
ZERO_LENGTH = 1e-12


@dataclass(frozen=True, eq=False)
class Pairs:
    """Anchors [N] against references [M].

    sim          [N, M] similarities, higher is nearer: cosines, or plain products for `metric="dot"`
    pos, neg     [N, M] bool: the pairs of one class (self excluded) and of two classes
    anchor_sq    [N] squared lengths of the vectors whose products `sim` holds (1, or 0 for a zero vector, if cosine)
    ref_sq       [M] the same for the references; left out, both are 1
    triplets     [T, 3] (anchor, positive, negative) if a miner chose triplets rather than pairs
    dim          D, the dimension of the vectors, for the miner that needs to know it
    """

    sim: Tensor
    pos: Tensor
    neg: Tensor
    anchor_sq: Tensor | None = None
    ref_sq: Tensor | None = None
    triplets: Tensor | None = None
    dim: int | None = None

    def squares(self) -> tuple[Tensor, Tensor]:
        """Squared lengths of the anchors [N] and of the references [M]."""
        n, m = self.sim.shape
        anchor = self.sim.new_ones(n) if self.anchor_sq is None else self.anchor_sq
        return anchor, self.sim.new_ones(m) if self.ref_sq is None else self.ref_sq

    def sq_distance(self) -> Tensor:
        """Squared Euclidean distances [N, M], unclamped: rounding may leave -1e-16 for coincident points."""
        anchor, ref = self.squares()
        return torch.add(anchor[:, None] + ref, self.sim, alpha=-2)

    def distance(self) -> Tensor:
        """Euclidean distances [N, M]; coincident points are at exactly 0, with zero gradient."""
        anchor, ref = self.squares()
        return safe_sqrt(self.sq_distance(), scale=_size(anchor) + _size(ref))


def pair_up(
    emb: Tensor,
    labels: Tensor | Sequence[int],
    refs: Tensor | None = None,
    ref_labels: Tensor | Sequence[int] | None = None,
    *,
    metric: Metric = "cosine",
    self_columns: Tensor | None = None,
) -> Pairs:
    """All similarities of a batch with itself, or with references (a memory, the batches of other processes).

    emb            [N, D] raw embeddings of any float dtype; float16 and bfloat16 are computed in float32
    labels         [N] integers of any width
    refs           [M, D] references; the batch itself when left out
    ref_labels     [M]
    metric         "cosine" normalises both sides; "dot" takes plain products
    self_columns   [N] the column of `refs` that is the anchor itself, removed from both masks

    >>> pairs = pair_up(torch.eye(3), torch.tensor([7, 7, 9]))
    >>> pairs.pos.tolist()
    [[False, True, False], [True, False, False], [False, False, False]]
    """
    if metric not in ("cosine", "dot"):
        raise ConfigError(f"metric: expected 'cosine' or 'dot', got {metric!r}.")
    if (refs is None) != (ref_labels is None):
        raise ConfigError("pair_up: refs and ref_labels go together; got only one of them.")
    emb, labels = as_batch(emb, labels)
    with full_precision(emb):
        anchors, anchor_sq = _vectors(emb, metric)
        if refs is None or ref_labels is None:
            sim, ref_sq, ref_labels = gram(anchors), anchor_sq, labels
            self_columns = torch.arange(len(labels), device=emb.device)
        else:
            refs, ref_labels = as_batch(refs, ref_labels, what="refs")
            if refs.shape[1] != emb.shape[1]:
                raise DataError(f"refs have {refs.shape[1]} dimensions, the embeddings {emb.shape[1]}.")
            others, ref_sq = _vectors(refs.to(emb.dtype), metric)
            sim = anchors @ others.t()
        pos = labels[:, None] == ref_labels
        neg = ~pos
        if self_columns is not None:
            pos[torch.arange(len(labels), device=emb.device), self_columns] = False
    return Pairs(sim, pos, neg, anchor_sq, ref_sq, dim=emb.shape[1])


def one_pair_per_class(
    emb: Tensor,
    labels: Tensor | Sequence[int],
    *,
    metric: Metric = "dot",
) -> Pairs:
    """The first two samples of every class that has two: one as anchor, one as reference. [C', C'] pairs.

    >>> one_pair_per_class(torch.eye(5), torch.tensor([4, 2, 4, 4, 2])).pos.tolist()
    [[True, False], [False, True]]
    """
    emb, labels = as_batch(emb, labels)
    order = torch.argsort(labels, stable=True)
    ranked = labels[order]
    starts = torch.ones_like(ranked, dtype=torch.bool)
    starts[1:] = ranked[1:] != ranked[:-1]
    first = torch.nonzero(starts[:-1] & ~starts[1:]).flatten()
    if len(first) == 0:  # no class has two samples: an empty block that is still attached to the graph
        empty = emb[:0].sum(1)
        none = torch.zeros(0, 0, dtype=torch.bool, device=emb.device)
        return Pairs(emb[:0] @ emb[:0].t(), none, none, empty, empty, dim=emb.shape[1])
    anchors, positives = order[first], order[first + 1]
    return pair_up(emb[anchors], labels[anchors], emb[positives], labels[positives], metric=metric)


def _size(square: Tensor) -> float:
    return float(square.detach().max()) if square.numel() else 0.0


# --- checks -----------------------------------------------------------------------------------------------------------


def as_batch(emb: Tensor, labels: Tensor | Sequence[int], what: str = "emb") -> tuple[Tensor, Tensor]:
    """Embeddings in float32 or float64 and labels in int64 on the same device, or an error that names the cure."""
    if not isinstance(emb, Tensor) or emb.dim() != 2 or not emb.is_floating_point():
        got = f"{emb.dtype} {list(emb.shape)}" if isinstance(emb, Tensor) else type(emb).__name__
        raise DataError(f"{what}: expected a float tensor [N, D], got {got}.")
    labels = as_labels(labels).to(emb.device)
    if len(labels) != len(emb):
        raise DataError(f"{len(emb)} embeddings but {len(labels)} labels; every row needs one label.")
    if len(emb) == 0:
        raise DataError(f"{what}: the batch is empty.")
    # Half precision cannot hold exp(64) or a sum of 512 squares: everything is computed in float32 at least.
    return (emb.float() if emb.dtype in (torch.float16, torch.bfloat16) else emb), labels


def as_labels(labels: Tensor | Sequence[int]) -> Tensor:
    """Labels [N] as int64, exactly. Bool and float labels are refused: equality of rounded ids is no equality."""
    labels = torch.as_tensor(labels)
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise DataError(f"labels: expected integers, got {labels.dtype}. Convert with labels.long() if they are ids.")
    if labels.dim() != 1:
        raise DataError(f"labels: expected one per row, shape [N]; got {list(labels.shape)}.")
    return labels.long()


def full_precision(like: Tensor) -> torch.autocast:
    """A context in which autocast does not touch the products: a cosine in bfloat16 has two digits."""
    return torch.autocast(like.device.type, enabled=False)


def _refuse_non_finite(x: Tensor) -> None:
    bad = torch.nonzero(~torch.isfinite(x.detach()).flatten(1).all(1)).flatten().tolist()
    if bad:
        raise DataError(
            f"{len(bad)} of {len(x)} rows hold NaN or infinity (first: row {bad[0]}). "
            "Look at the learning rate, the mixed precision or the input that made them."
        )


# --- primitives -------------------------------------------------------------------------------------------------------


def unit(x: Tensor) -> Tensor:
    """Rows (last dimension) scaled to length 1; a zero row stays zero and gets zero gradient.

    >>> unit(torch.tensor([[3.0, 4.0], [0.0, 0.0]])).tolist()
    [[0.6..., 0.8...], [0.0, 0.0]]
    """
    return _Unit.apply(x)  # type: ignore[no-any-return]


def _vectors(x: Tensor, metric: Metric) -> tuple[Tensor, Tensor]:
    """The vectors whose products are the similarities, and their squared lengths."""
    if metric == "cosine":
        f = unit(x)
        return f, (f.detach().square().sum(1) > 0.5).to(f.dtype)
    square = x.square().sum(1)
    if not torch.isfinite(square.sum()):
        _refuse_non_finite(x)
    return x, square


class _Unit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        # One number tells of a NaN or infinity anywhere, so the check costs no pass over the batch.
        if not torch.isfinite(length.sum()):
            _refuse_non_finite(x.reshape(-1, x.shape[-1]))
            # Finite, but its square overflows: go by way of the largest entry.
            top = x.abs().amax(-1, keepdim=True).clamp_(min=1.0)
            length = torch.linalg.vector_norm(x / top, dim=-1, keepdim=True) * top
        inverse = torch.where(length > ZERO_LENGTH, length.reciprocal(), 0.0)
        f = x * inverse
        ctx.save_for_backward(f, inverse)
        return f

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        f, inverse = ctx.saved_tensors
        along = (f * g).sum(-1, keepdim=True)
        return torch.addcmul(g, f, along, value=-1).mul_(inverse)


def gram(f: Tensor) -> Tensor:
    """All products of the rows of f [N, D] with each other [N, N]."""
    return _Gram.apply(f)  # type: ignore[no-any-return]


class _Gram(torch.autograd.Function):
    """f f^T. Its backward is (G + G^T) f: one product and one addition where autograd does two products."""

    @staticmethod
    def forward(ctx: Any, f: Tensor) -> Tensor:
        ctx.save_for_backward(f)
        return f @ f.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (f,) = ctx.saved_tensors
        with full_precision(f):
            grad: Tensor = (g + g.t()) @ f
        return grad


def safe_sqrt(square: Tensor, scale: float = 1.0) -> Tensor:
    """Square root of a difference of numbers of size `scale`; what rounding cannot tell from 0 is 0, gradient 0.

    >>> safe_sqrt(torch.tensor([4.0, 1e-9, -1e-9])).tolist()
    [2.0, 0.0, 0.0]
    """
    return _Root.apply(square, 4 * torch.finfo(square.dtype).eps * scale)  # type: ignore[no-any-return]


class _Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, square: Tensor, noise: float) -> Tensor:
        root = torch.nn.functional.threshold(square, noise, 0.0).sqrt_()
        ctx.save_for_backward(root)
        return root

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (root,) = ctx.saved_tensors
        # Where the root is 0, g / inf = 0; a mask would cost one more pass.
        safe = torch.nn.functional.threshold(root, 0.0, float("inf"))
        return (0.5 * g).div_(safe), None


def log_sum_exp(x: Tensor, keep: Tensor, scale: float = 1.0) -> Tensor:
    """log of the sum over kept entries of exp(scale * x), per row [N]; -inf (zero gradient) for an empty row."""
    return _MaskedLSE.apply(x, keep, scale, 0.0, False)  # type: ignore[no-any-return]


def log1p_sum_exp(x: Tensor, keep: Tensor, scale: float = 1.0, offset: float = 0.0) -> Tensor:
    """log of 1 + the sum over kept entries of exp(scale * (x - offset)), per row [N]; 0 for an empty row."""
    return _MaskedLSE.apply(x, keep, scale, offset, True)  # type: ignore[no-any-return]


def shifted_exp(
    x: Tensor, keep: Tensor, scale: float, offset: float = 0.0, one: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """exp(scale * (x - offset) - top) where kept, else 0 [N, M]; its row sums and `top` [N]. No gradient."""
    weight = x * scale if offset == 0 else (x - offset).mul_(scale)
    weight.masked_fill_(~keep, float("-inf"))
    top = weight.amax(1)
    # The "+1" is a zero logit, so the maximum is at least 0; an empty row is shifted by 0 rather than by -inf.
    top = top.clamp_(min=0.0) if one else torch.where(top == float("-inf"), 0.0, top)
    weight.sub_(top[:, None]).exp_()
    total = weight.sum(1)
    return weight, total + torch.exp(-top) if one else total, top


class _MaskedLSE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float, offset: float, one: bool) -> Tensor:
        if x.shape[1] == 0:
            ctx.scale = None
            ctx.save_for_backward(x)
            return x.sum(1) if one else x.sum(1) - float("inf")
        weight, total, top = shifted_exp(x, keep, scale, offset, one)
        ctx.scale = scale
        ctx.save_for_backward(weight, total)
        return top + total.log()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None, None]:
        if ctx.scale is None:
            (x,) = ctx.saved_tensors
            return torch.zeros_like(x), None, None, None, None
        weight, total = ctx.saved_tensors
        row = torch.where(total > 0, ctx.scale * g / total, 0.0)
        return weight * row[:, None], None, None, None, None


def hinge_sum(x: Tensor, keep: Tensor, slope: float, at: float | Tensor) -> tuple[Tensor, Tensor]:
    """Sum over kept entries of max(0, slope * (x - at)) per row [N], and how many of them are above 0 [N].

    `at` may be a learned 0-dim tensor.
    """
    at = torch.as_tensor(at, dtype=x.dtype, device=x.device)
    return _HingeSum.apply(x, keep, slope, at)  # type: ignore[no-any-return]


class _HingeSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, slope: float, at: Tensor) -> tuple[Tensor, Tensor]:
        value = x - at if slope == 1 else (x - at).mul_(slope)
        active = (value > 0).logical_and_(keep)
        count = active.sum(1, dtype=torch.int32)
        ctx.slope = slope
        ctx.save_for_backward(active, count)
        ctx.mark_non_differentiable(count)
        return value.mul_(active).sum(1), count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor, None, None, Tensor | None]:
        active, count = ctx.saved_tensors
        g_at = -(ctx.slope * (g * count).sum()) if ctx.needs_input_grad[3] else None
        return active * (ctx.slope * g)[:, None], None, None, g_at


@dataclass(frozen=True, eq=False)
class RankedPositives:
    """The positives of every anchor, sorted by similarity: what turns sums over triplets into sums over pairs.

    row, column   [T] every positive pair, in row-major order
    slot          [T] its number among the positives of its anchor
    ranked        [N, P] similarities in ascending order, +inf beyond the last
    order         [N, P] the slot that stands at each rank
    """

    row: Tensor
    column: Tensor
    slot: Tensor
    ranked: Tensor
    order: Tensor


def rank_positives(sim: Tensor, pos: Tensor) -> RankedPositives:
    row, column = pos.nonzero(as_tuple=True)
    size = torch.bincount(row, minlength=len(sim))
    slot = torch.arange(len(row), device=row.device) - (size.cumsum(0) - size)[row]
    block = sim.new_full((len(sim), max(int(size.max()), 1)), float("inf"))
    block[row, slot] = sim[row, column]
    ranked, order = block.sort(1)
    return RankedPositives(row, column, slot, ranked, order)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) to the last digit; softplus(-inf) is 0 with zero gradient."""
    # torch switches to x itself at 20 by default, which is wrong in the ninth digit.
    return torch.nn.functional.softplus(x, threshold=40.0)
