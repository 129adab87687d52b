"""r(A) + lam * sum of c_i: what a linear metric d_A(x, y) = (x - y)^T A (x - y) minimises, differentiable in A or G.

A is positive semi-definite, or A = G^T G with a free G [rank, F]. Every term sees the data only through X A X^T, so
either form serves every objective: `form` says which one `matrix` is.
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
    """d_A of difference vectors [E, F]: squared, not clamped.

    >>> squared_distances(torch.eye(2), torch.tensor([[3.0, 4.0]])).tolist()
    [25.0]
    """
    if form == "A":
        return ((differences @ matrix) * differences).sum(1)
    return (differences @ matrix.T).square().sum(1)


def product_pairs(matrix: Tensor, anchors: Tensor, refs: Tensor, pos: Tensor, neg: Tensor, form: Form = "A") -> Pairs:
    """The learned inner products of anchors [N, F] and references [M, F] as Pairs, for losses that read distances."""
    if form == "A":
        left, right = anchors @ matrix, refs @ matrix
        return Pairs(left @ refs.T, pos, neg, anchor_sq=(left * anchors).sum(1), ref_sq=(right * refs).sum(1))
    left, right = anchors @ matrix.T, refs @ matrix.T
    return Pairs(left @ right.T, pos, neg, anchor_sq=left.square().sum(1), ref_sq=right.square().sum(1))


def in_basis(matrix: Tensor, basis: Tensor | None, form: Form) -> Tensor:
    """A matrix that was learned on x @ basis^T, as one for x: basis^T B basis, or H basis."""
    if basis is None:
        return matrix
    return basis.T @ matrix @ basis if form == "A" else matrix @ basis


def regularise(matrix: Tensor, kind: Regulariser, form: Form = "A", basis: Tensor | None = None) -> Tensor:
    """0.5 |A|^2 ("frobenius") or the trace of A ("trace"); "scatter" needs data and is a sum of distances instead.

    With a `basis` the matrix is in its coordinates and A is not: the value is that of A all the same.

    >>> float(regularise(torch.eye(3), "frobenius")), float(regularise(torch.eye(3), "trace", "G"))
    (1.5, 3.0)
    """
    if kind not in ("frobenius", "trace"):
        return matrix.new_zeros(())
    matrix = in_basis(matrix, basis, form)
    if kind == "frobenius":
        # |G^T G| = |G G^T|, and the second is small for a low rank.
        return 0.5 * (matrix if form == "A" else matrix @ matrix.T).square().sum()
    return matrix.trace() if form == "A" else matrix.square().sum()


def hinge(slack: Tensor, width: float = 0.0) -> Tensor:
    """max(0, slack), its corner rounded over `width` by a parabola so that a gradient method can settle in it.

    >>> hinge(torch.tensor([0.5, 2.0])).tolist(), hinge(torch.tensor([0.5, 2.0]), 1.0).tolist()
    ([0.5, 2.0], [0.125, 1.5])
    """
    if width <= 0:
        return slack.relu()
    inside = slack.clamp(0, width)
    return inside * (slack - inside / 2) / width


@dataclass(frozen=True, eq=False)
class Hinges:
    """Pairs under `upper`, pairs over `lower`, triplets with `margin`: the general linear model of Kulis 2013.

    r(A) + lam * ( sum_S [d_A - upper]_+  +  sum_D [lower - d_A]_+  +  sum_T [d_A(i,j) - d_A(i,k) + margin]_+ )

    `terms` is the number of constraints; `value(matrix, rows)` takes only those, scaled up to stand for all.
    """

    x: Tensor
    constraints: Constraints
    upper: float = 1.0
    lower: float = 4.0
    margin: float = 1.0
    lam: float = 1.0
    regulariser: Regulariser = "frobenius"
    form: Form = "A"
    basis: Tensor | None = None  # the map that x went through before, if any
    width: float = 0.0  # over which the corners of the hinges are rounded

    @property
    def terms(self) -> int:
        return len(self.constraints)

    @property
    def unit(self) -> float:
        """The size of distances that matter, to judge the width of a rounded corner by."""
        return min(self.margin, self.lower - self.upper)

    def value(self, matrix: Tensor, rows: Tensor | None = None) -> Tensor:
        """The objective as a 0-dim tensor: all of it, or an estimate from the constraints numbered `rows`.

        >>> asked = Constraints(similar=[[0, 1]], dissimilar=[[0, 2]])
        >>> float(Hinges(torch.tensor([[0.0], [2.0], [1.0]]), asked).value(torch.eye(1)))  # 0.5 + (4 - 1) + (4 - 1)
        6.5
        """
        c, x = self.constraints, self.x
        share = 1.0
        if rows is not None:
            c, share = c.take(rows), self.terms / len(rows)
        near = squared_distances(matrix, x[c.similar[:, 0]] - x[c.similar[:, 1]], self.form)
        far = squared_distances(matrix, x[c.dissimilar[:, 0]] - x[c.dissimilar[:, 1]], self.form)
        i, j, k = c.triplets.unbind(1)
        order = squared_distances(matrix, x[i] - x[j], self.form) - squared_distances(matrix, x[i] - x[k], self.form)
        broken = (
            hinge(near - self.upper, self.width).sum()
            + hinge(self.lower - far, self.width).sum()
            + hinge(order + self.margin, self.width).sum()
        )
        r = regularise(matrix, self.regulariser, self.form, self.basis)
        if self.regulariser == "scatter":
            r = share * near.sum()
        return r + self.lam * share * broken


@dataclass(frozen=True, eq=False)
class Neighbourhoods:
    """NCA, or LMNN with its target neighbours, over all samples or over some of them.

    "nca"    sum over samples of -log p(a neighbour drawn by exp(-d_A) is of the class)          (nearkin.losses.nca)
    "lmnn"   sum over (sample, target) of the pull d_A, as regulariser "scatter", and of the push
             [d_A(i, target) - d_A(i, other class) + margin]_+                                 (nearkin.losses.triplet)

    `terms` is the number of samples. `value(matrix, rows)` takes only those as anchors, and as the crowd around them
    (with their targets for LMNN); sums are scaled up to stand for all. For NCA, whose sums are inside a logarithm,
    that is the usual biased estimate.
    """

    x: Tensor
    labels: Tensor
    kind: Literal["nca", "lmnn"]
    targets: Tensor  # [P, 2] (sample, one of its nearest of the class)
    margin: float = 1.0
    lam: float = 1.0
    regulariser: Regulariser = "none"
    form: Form = "A"
    basis: Tensor | None = None  # the map that x went through before, if any

    @property
    def terms(self) -> int:
        return len(self.x)

    def value(self, matrix: Tensor, rows: Tensor | None = None) -> Tensor:
        """The objective as a 0-dim tensor: all of it, or an estimate from the samples numbered `rows`."""
        rows = torch.arange(len(self.x)) if rows is None else rows.sort().values
        i, j = self.targets[torch.isin(self.targets[:, 0], rows)].T.contiguous()
        crowd = rows if self.kind == "nca" else torch.unique(torch.cat([rows, j]))
        share = len(self.x) / len(rows)
        same = self.labels[rows, None] == self.labels[crowd]
        if self.kind == "nca":
            pos = same & (rows[:, None] != crowd)
            pairs = product_pairs(matrix, self.x[rows], self.x[crowd], pos, ~same, self.form)
            broken = nca(pairs, reduction="sum")
        else:
            pos = torch.zeros_like(same)
            pos[torch.searchsorted(rows, i), torch.searchsorted(crowd, j)] = True
            pairs = product_pairs(matrix, self.x[rows], self.x[crowd], pos, ~same, self.form)
            # The loss compares similarities: minus the squared distances.
            pairs = replace(pairs, sim=-pairs.sq_distance())
            broken = len(self.x) / len(crowd) * triplet(pairs, margin=self.margin, reduction="sum")
        r = regularise(matrix, self.regulariser, self.form, self.basis)
        if self.regulariser == "scatter":
            r = share * squared_distances(matrix, self.x[i] - self.x[j], self.form).sum()
        return r + self.lam * share * broken


def check_name(setting: str, given: object, known: tuple[str, ...]) -> None:
    """Raise if a setting is not one of the names it may have."""
    if given not in known:
        names = ", ".join(f"'{k}'" for k in known)
        raise ConfigError(f"{setting}: expected one of {names}, got {given!r}.{did_you_mean(str(given), known)}")
