"""Pairs: similarities with positive and negative masks, which a miner narrows (`Pairs -> Pairs`) and a loss reads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from nearkin.errors import ConfigError, DataError
from nearkin.ops.checks import on_host, squared_norms
from nearkin.ops.geometry import distances, full_precision, gram, unit_and_squares
from nearkin.ops.row_blocks import by_rows

Metric = Literal["cosine", "dot"]


@dataclass(frozen=True, eq=False)
class Pairs:
    """Anchors [N] against references [M].

    Attributes:
        sim: [N, M] similarities, higher is nearer: cosines, or dot products for `metric="dot"`.
        pos: [N, M] bool: pairs of the same class, self-pairs excluded.
        neg: [N, M] bool: pairs of different classes.
        anchor_sq: [N] squared lengths of the vectors whose products `sim` holds (1, or 0 for a zero vector, if cosine);
            1 if None.
        ref_sq: [M] the same for the references.
        triplets: [N, K, 2] if a miner selected triplets rather than pairs: the columns of the positive and of the
            negative of each, -1 where an anchor has fewer than K.
        dim: Embedding dimensions, for the miner that needs them.
    """

    sim: Tensor
    pos: Tensor
    neg: Tensor
    anchor_sq: Tensor | None = None
    ref_sq: Tensor | None = None
    triplets: Tensor | None = None
    dim: int | None = None

    def squared_norms(self) -> tuple[Tensor, Tensor]:
        """Return the squared lengths of the anchors [N] and of the references [M]."""
        n, m = self.sim.shape
        anchor = self.sim.new_ones(n) if self.anchor_sq is None else self.anchor_sq
        return anchor, self.sim.new_ones(m) if self.ref_sq is None else self.ref_sq

    def sq_distance(self) -> Tensor:
        """Return squared Euclidean distances [N, M], unclamped: coincident points may have -1e-16."""
        anchor, ref = self.squared_norms()
        return torch.sub(ref, self.sim, alpha=2).add_(anchor[:, None])

    def distance(self) -> Tensor:
        """Return Euclidean distances [N, M]; exactly 0 with zero gradient for coincident points."""
        return distances(self.sim, *self.squared_norms())

    def positive_columns(self) -> tuple[Tensor, Tensor]:
        """Return columns [N, K] that include all positives of each anchor in ascending order, and which of them are.

        On the host K is the largest number of positives of an anchor, elsewhere M: sums over [N, K] have a static shape
        on a device, and cost no more than the positives on the CPU.
        """
        n, m = self.pos.shape
        if not on_host(self.sim):
            return torch.arange(m, device=self.pos.device).expand(n, m), self.pos
        row, column = self.pos.nonzero(as_tuple=True)
        columns = _by_anchor(row, column, n)
        return columns.clamp(min=0), columns >= 0

    def per_anchor(
        self,
        function: Callable[..., Tensor],
        *rows: Tensor,
        shared: Sequence[Tensor] = (),
        lengths: bool = False,
        width: int | None = None,
    ) -> Tensor:
        """Compute `function(pairs, *rows, *shared)`, which treats every anchor alone, by blocks of anchors: `by_rows`.

        With `lengths` the blocks have the squared lengths, which Euclidean distances need.
        """
        anchor_sq, ref_sq = self.squared_norms() if lengths else (None, None)
        extra = () if anchor_sq is None else (anchor_sq,)

        def of_block(sim: Tensor, pos: Tensor, neg: Tensor, *others: Tensor) -> Tensor:
            if not lengths:
                return function(Pairs(sim, pos, neg, dim=self.dim), *others)
            return function(Pairs(sim, pos, neg, others[0], others[-1], dim=self.dim), *others[1:-1])

        last = () if ref_sq is None else (ref_sq,)
        return by_rows(of_block, self.sim, self.pos, self.neg, *extra, *rows, shared=(*shared, *last), width=width)

    def require_square(self, name: str) -> None:
        """Raise a ConfigError unless the pairs compare a batch with itself."""
        if self.sim.shape[0] != self.sim.shape[1]:
            raise ConfigError(f"{name} takes Pairs [N, N], a batch with itself, got {list(self.sim.shape)}.")


def pair_up(
    emb: Tensor,
    labels: Tensor | Sequence[int],
    refs: Tensor | None = None,
    ref_labels: Tensor | Sequence[int] | None = None,
    *,
    metric: Metric = "cosine",
    self_columns: Tensor | None = None,
) -> Pairs:
    """Compute all similarities of a batch with itself, or with references (a memory, batches of other processes).

    Args:
        emb: [N, D] embeddings of any float dtype; float16 and bfloat16 are computed in float32.
        labels: [N] integers of any width.
        refs: [M, D] references; the batch itself by default.
        ref_labels: [M] labels of the references.
        metric: "cosine" normalises both sides; "dot" computes dot products.
        self_columns: [N] the column of `refs` that is the anchor itself, removed from both masks.

    Returns:
        The similarities with their masks.

    Raises:
        DataError: The embeddings or labels cannot be used.

    Example:
        >>> pairs = pair_up(torch.eye(3), torch.tensor([7, 7, 9]))
        >>> pairs.pos.tolist()
        [[False, True, False], [True, False, False], [False, False, False]]
    """
    if metric not in ("cosine", "dot"):
        raise ConfigError(f"metric: expected 'cosine' or 'dot', got {metric!r}.")
    if (refs is None) != (ref_labels is None):
        raise ConfigError("pair_up: pass refs and ref_labels together, got only one of them.")
    emb, labels = as_batch(emb, labels)
    with full_precision(emb):
        f, anchor_sq = _prepare(emb, metric)
        if refs is None or ref_labels is None:
            ref_labels, self_columns = labels, torch.arange(len(labels), device=emb.device)
            sim, ref_sq = gram(f), anchor_sq
        else:
            refs, ref_labels = as_batch(refs, ref_labels, what="refs")
            if refs.shape[1] != emb.shape[1]:
                raise DataError(
                    f"refs: expected {emb.shape[1]} dimensions, as the embeddings have, got {refs.shape[1]}."
                )
            g, ref_sq = _prepare(refs.to(emb.dtype), metric)
            if metric == "dot" and torch.is_grad_enabled() and not refs.requires_grad:
                g = g.clone()  # a memory may be overwritten before the backward pass needs it
            sim = f @ g.t()
    same = labels[:, None] == ref_labels
    pos = same if self_columns is None else same.scatter(1, self_columns[:, None], False)
    return Pairs(sim, pos, ~same, anchor_sq, ref_sq, dim=emb.shape[1])


def _prepare(x: Tensor, metric: Metric) -> tuple[Tensor, Tensor]:
    """Return the rows whose products are the similarities, and their squared lengths."""
    return unit_and_squares(x) if metric == "cosine" else (x, squared_norms(x))


def join(pairs: Pairs, earlier: Pairs, used: Tensor) -> Pairs:
    """Append the columns of further references of the same anchors, of which some [M] are used."""
    sim, pos, neg = (
        torch.cat([a, b], 1)
        for a, b in ((pairs.sim, earlier.sim), (pairs.pos, earlier.pos & used), (pairs.neg, earlier.neg & used))
    )
    anchor_sq, batch_sq = pairs.squared_norms()
    return Pairs(sim, pos, neg, anchor_sq, torch.cat([batch_sq, earlier.squared_norms()[1]]), dim=pairs.dim)


def one_pair_per_class(emb: Tensor, labels: Tensor | Sequence[int]) -> Pairs:
    """Pair the first two samples of every class: one as the anchor, one as the reference.

    Args:
        emb: [N, D] embeddings.
        labels: [N] integers; classes with a single sample are left out.

    Returns:
        Dot products [C', C'] for the C' classes with two samples or more. Off the CPU, where the shape must not depend
        on the labels, [N/2, N/2], and what is beyond C' is in neither mask.

    Example:
        >>> one_pair_per_class(torch.eye(5), torch.tensor([4, 2, 4, 4, 2])).pos.tolist()
        [[True, False], [False, True]]
    """
    emb, labels = as_batch(emb, labels)
    n = len(labels)
    order = torch.argsort(labels, stable=True)
    ranked = labels[order]
    repeats = torch.nn.functional.pad(ranked[1:] == ranked[:-1], (1, 1))  # [N + 1] as the one before; 0 at both ends
    is_first = (repeats[1:] & ~repeats[:-1])[: n - 1]  # the first of a class that has a second
    first = torch.argsort(~is_first, stable=True)[: int(is_first.sum()) if on_host(emb) else n // 2]
    used = is_first[first]
    with full_precision(emb):
        square = squared_norms(emb)
        anchors, refs = order[first], order[first + 1]
        sim = emb[anchors] @ emb[refs].t()
    pos = torch.eye(len(first), dtype=torch.bool, device=emb.device) & used
    neg = (used[:, None] & used) ^ pos
    return Pairs(sim, pos, neg, square[anchors], square[refs], dim=emb.shape[1])


def as_batch(emb: Tensor, labels: Tensor | Sequence[int], what: str = "emb") -> tuple[Tensor, Tensor]:
    """Validate a batch. Returns embeddings in float32 or float64, and labels in int64 on the same device."""
    if not isinstance(emb, Tensor) or emb.dim() != 2 or not emb.is_floating_point():
        got = f"{emb.dtype} {list(emb.shape)}" if isinstance(emb, Tensor) else type(emb).__name__
        raise DataError(f"{what}: expected a float tensor [N, D], got {got}.")
    labels = as_labels(labels).to(emb.device)
    if len(labels) != len(emb):
        raise DataError(f"{len(emb)} embeddings but {len(labels)} labels. Pass one label per embedding.")
    if len(emb) == 0:
        raise DataError(f"{what}: the batch is empty.")
    # Half precision cannot represent exp(64) or a sum of 512 squares: compute in float32 at least.
    return (emb.float() if emb.dtype in (torch.float16, torch.bfloat16) else emb), labels


def as_labels(labels: Tensor | Sequence[int]) -> Tensor:
    """Validate labels. Bool and float labels are rejected: rounded ids may be equal by accident."""
    try:
        labels = torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # strings, None, ragged rows, beyond 64 bits
        got = " ".join(repr(labels).split())
        raise DataError(
            f"labels: expected integers, got {got if len(got) < 60 else got[:57] + '...'}. "
            "Number the classes: np.unique(labels, return_inverse=True)[1]."
        ) from None
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise DataError(f"labels: expected integers, got {labels.dtype}. Convert with labels.long() if they are ids.")
    if labels.dim() != 1:
        raise DataError(f"labels: expected one per row, shape [N]; got {list(labels.shape)}.")
    return labels.long()


def select_pairs(p: Pairs, chosen: Sequence[Tensor]) -> Pairs:
    """Replace the positives and negatives by chosen ones.

    Args:
        p: All similarities.
        chosen: Masks (positives, negatives), each bool [N, M]; or indices of rows and columns: (anchor, positive,
            anchor, negative) for pairs, (anchor, positive, negative) for triplets.

    Returns:
        The same similarities with other masks, and with triplets if they were given.

    Raises:
        DataError: The masks or indices do not fit the similarities.

    Example:
        >>> pairs = select_pairs(pair_up(torch.eye(3), torch.arange(3)), ([0, 1], [1, 0], [2], [0]))
        >>> pairs.pos.nonzero().tolist(), pairs.neg.nonzero().tolist()
        ([[0, 1], [1, 0]], [[2, 0]])
    """
    tensors = [torch.as_tensor(x, device=p.sim.device) for x in chosen]
    if len(tensors) == 2 and all(x.dtype == torch.bool and x.shape == p.sim.shape for x in tensors):
        return replace(p, pos=tensors[0], neg=tensors[1], triplets=None)
    sizes = [len(x) if x.dim() == 1 else -1 for x in tensors]
    groups = {3: [sizes], 4: [sizes[:2], sizes[2:]]}.get(len(sizes), [[]])
    limits = {3: (0, 1, 1), 4: (0, 1, 0, 1)}.get(len(sizes), ())
    whole = all(x.dtype in (torch.int64, torch.int32) or not x.numel() for x in tensors)
    if not whole or any(len(set(group)) != 1 or group[0] < 0 for group in groups):
        got = ", ".join(f"{x.dtype} {list(x.shape)}" for x in tensors)
        shape = list(p.sim.shape)
        raise DataError(
            f"pairs: expected two bool masks {shape}, or integer indices (anchor, positive, anchor, negative) or "
            f"(anchor, positive, negative); got {got or 'nothing'}."
        )
    tensors = [x.long() for x in tensors]
    for x, axis in zip(tensors, limits, strict=True):
        if on_host(p.sim) and x.numel() and not 0 <= int(x.min()) <= int(x.max()) < p.sim.shape[axis]:
            raise DataError(f"pairs: expected indices from 0 to {p.sim.shape[axis] - 1}, got up to {int(x.max())}.")
    anchor, positive, other, negative = tensors if len(tensors) == 4 else (*tensors[:2], tensors[0], tensors[2])
    pos, neg = torch.zeros_like(p.pos), torch.zeros_like(p.neg)
    pos[anchor, positive] = neg[other, negative] = True
    if len(tensors) == 4:
        return replace(p, pos=pos, neg=neg, triplets=None)
    order = anchor.argsort(stable=True)
    triplets = _by_anchor(anchor[order], torch.stack([positive, negative], 1)[order], len(pos))
    return replace(p, pos=pos, neg=neg, triplets=triplets)


def _by_anchor(row: Tensor, values: Tensor, n: int) -> Tensor:
    """Arrange the values of anchors [len(row), ...], which are in their order, as [n, K, ...], filled up with -1."""
    size = torch.bincount(row, minlength=n)
    slot = torch.arange(len(row), device=row.device) - (size.cumsum(0) - size)[row]
    out = values.new_full((n, int(size.max()), *values.shape[1:]), -1)
    out[row, slot] = values
    return out
