"""Objectives r(A) + lam * sum of c_i of a linear metric d_A(x, y) = (x - y)^T A (x - y), differentiable in A or G.

A is positive semi-definite, or A = G^T G with an unconstrained G [rank, F]. Every term depends on the data only through
X A X^T, so both forms work with every objective: `form` says which one `matrix` is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from nearkin.errors import ConfigError, did_you_mean
from nearkin.linear.constraints import Constraints
from nearkin.losses.neighbour import nca
from nearkin.losses.tuples import triplet
from nearkin.ops.pairs import Pairs

Form = Literal["A", "G"]
Regulariser = Literal["frobenius", "trace", "scatter", "none"]
REGULARISERS = ("frobenius", "trace", "scatter", "none")


def squared_distances(matrix: Tensor, differences: Tensor, form: Form = "A") -> Tensor:
    """Compute d_A of difference vectors.

    Example:
        >>> squared_distances(torch.eye(2), torch.tensor([[3.0, 4.0]])).tolist()
        [25.0]
    """
    if form == "A":
        return ((differences @ matrix) * differences).sum(1)
    return (differences @ matrix.T).square().sum(1)


def learned_pairs(matrix: Tensor, anchors: Tensor, refs: Tensor, pos: Tensor, neg: Tensor, form: Form = "A") -> Pairs:
    """Compute the learned inner products as Pairs, for losses that use distances."""
    if form == "A":
        left, right = anchors @ matrix, refs @ matrix
        return Pairs(left @ refs.T, pos, neg, anchor_sq=(left * anchors).sum(1), ref_sq=(right * refs).sum(1))
    left, right = anchors @ matrix.T, refs @ matrix.T
    return Pairs(left @ right.T, pos, neg, anchor_sq=left.square().sum(1), ref_sq=right.square().sum(1))


def undo_basis(matrix: Tensor, basis: Tensor | None, form: Form) -> Tensor:
    """Convert a matrix learned on x @ basis^T to one for x: basis^T B basis, or H basis."""
    if basis is None:
        return matrix
    return basis.T @ matrix @ basis if form == "A" else matrix @ basis


def regularise(matrix: Tensor, regulariser: Regulariser, form: Form = "A", basis: Tensor | None = None) -> Tensor:
    """Compute 0.5 |A|^2 ("frobenius") or the trace of A ("trace").

    Example:
        >>> float(regularise(torch.eye(3), "frobenius")), float(regularise(torch.eye(3), "trace", "G"))
        (1.5, 3.0)
    """
    if regulariser not in ("frobenius", "trace"):
        return matrix.new_zeros(())
    matrix = undo_basis(matrix, basis, form)
    if regulariser == "frobenius":
        # |G^T G| = |G G^T|, and the latter is small for a low rank.
        return 0.5 * (matrix if form == "A" else matrix @ matrix.T).square().sum()
    return matrix.trace() if form == "A" else matrix.square().sum()


def hinge(violation: Tensor, width: float = 0.0) -> Tensor:
    """Compute max(0, violation), optionally smoothed so that gradient methods converge at the kink.

    Example:
        >>> hinge(torch.tensor([0.5, 2.0])).tolist(), hinge(torch.tensor([0.5, 2.0]), 1.0).tolist()
        ([0.5, 2.0], [0.125, 1.5])
    """
    if width <= 0:
        return violation.relu()
    inside = violation.clamp(0, width)
    return inside * (violation - inside / 2) / width


@dataclass(frozen=True, eq=False)
class HingeObjective:
    """Hinges on pairs and triplets: the general linear model of Kulis 2013.

    r(A) + lam * ( sum_S [d_A - upper]_+  +  sum_D [lower - d_A]_+  +  sum_T [d_A(i,j) - d_A(i,k) + margin]_+ )
    """

    x: Tensor  # [N, F] samples
    constraints: Constraints  # on the rows of x
    upper: float = 1.0  # bound of the squared distances of similar pairs
    lower: float = 4.0  # bound of the squared distances of dissimilar pairs
    margin: float = 1.0  # between the squared distances of a triplet
    lam: float = 1.0  # weight of the hinges
    regulariser: Regulariser = "frobenius"  # "frobenius", "trace", "scatter" (sum of d_A over similar pairs) or "none"
    form: Form = "A"
    basis: Tensor | None = None  # the map already applied to x, if any
    width: float = 0.0  # over which the hinges are smoothed

    @property
    def terms(self) -> int:
        """The number of constraints."""
        return len(self.constraints)

    @property
    def distance_scale(self) -> float:
        """The scale of relevant distances, in which the smoothing width is measured."""
        return min(self.margin, self.lower - self.upper)

    def value(self, matrix: Tensor, rows: Tensor | None = None) -> Tensor:
        """Compute the objective.

        Example:
            >>> constraints = Constraints(similar=[[0, 1]], dissimilar=[[0, 2]])
            >>> objective = HingeObjective(torch.tensor([[0.0], [2.0], [1.0]]), constraints)
            >>> float(objective.value(torch.eye(1)))  # 0.5 + (4 - 1) + (4 - 1)
            6.5
        """
        c, x = self.constraints, self.x
        weight = 1.0
        if rows is not None:
            c, weight = c.take(rows), self.terms / len(rows)
        near = squared_distances(matrix, x[c.similar[:, 0]] - x[c.similar[:, 1]], self.form)
        far = squared_distances(matrix, x[c.dissimilar[:, 0]] - x[c.dissimilar[:, 1]], self.form)
        i, j, k = c.triplets.unbind(1)
        order = squared_distances(matrix, x[i] - x[j], self.form) - squared_distances(matrix, x[i] - x[k], self.form)
        hinges = (
            hinge(near - self.upper, self.width).sum()
            + hinge(self.lower - far, self.width).sum()
            + hinge(order + self.margin, self.width).sum()
        )
        r = regularise(matrix, self.regulariser, self.form, self.basis)
        if self.regulariser == "scatter":
            r = weight * near.sum()
        return r + self.lam * weight * hinges


@dataclass(frozen=True, eq=False)
class NeighbourObjective:
    """NCA, or LMNN with its target neighbours.

    "nca"    sum over samples of -log p(a neighbour drawn by exp(-d_A) is of the class)          (nearkin.losses.nca)
    "lmnn"   sum over (sample, target) of the pull d_A, as regulariser "scatter", and of the push
             [d_A(i, target) - d_A(i, other class) + margin]_+                                 (nearkin.losses.triplet)
    """

    x: Tensor  # [N, F] samples
    labels: Tensor  # [N] integers
    loss: Literal["nca", "lmnn"]
    targets: Tensor  # [P, 2] (sample, one of its nearest of the class)
    margin: float = 1.0  # of LMNN
    lam: float = 1.0
    regulariser: Regulariser = "none"  # "frobenius", "trace", "scatter" (sum of d_A over targets) or "none"
    form: Form = "A"
    basis: Tensor | None = None  # the map already applied to x, if any

    @property
    def terms(self) -> int:
        """The number of samples."""
        return len(self.x)

    def value(self, matrix: Tensor, rows: Tensor | None = None) -> Tensor:
        """Compute the objective."""
        rows = torch.arange(len(self.x)) if rows is None else rows.sort().values
        i, j = self.targets[torch.isin(self.targets[:, 0], rows)].T.contiguous()
        refs = rows if self.loss == "nca" else torch.unique(torch.cat([rows, j]))
        weight = len(self.x) / len(rows)
        same = self.labels[rows, None] == self.labels[refs]
        if self.loss == "nca":
            pos = same & (rows[:, None] != refs)
            pairs = learned_pairs(matrix, self.x[rows], self.x[refs], pos, ~same, self.form)
            loss = nca(pairs, reduction="sum")
        else:
            pos = torch.zeros_like(same)
            pos[torch.searchsorted(rows, i), torch.searchsorted(refs, j)] = True
            pairs = learned_pairs(matrix, self.x[rows], self.x[refs], pos, ~same, self.form)
            # The loss compares similarities: minus the squared distances.
            pairs = replace(pairs, sim=-pairs.sq_distance())
            loss = len(self.x) / len(refs) * triplet(pairs, margin=self.margin, reduction="sum")
        r = regularise(matrix, self.regulariser, self.form, self.basis)
        if self.regulariser == "scatter":
            r = weight * squared_distances(matrix, self.x[i] - self.x[j], self.form).sum()
        return r + self.lam * weight * loss


def check_name(setting: str, value: object, known: tuple[str, ...]) -> None:
    """Raise a ConfigError unless a setting has one of its known values."""
    if value not in known:
        names = ", ".join(f"'{k}'" for k in known)
        raise ConfigError(f"{setting}: expected one of {names}, got {value!r}.{did_you_mean(str(value), known)}")
