"""Objectives r(A) + lam * sum of c_i of a linear metric d_A(x, y) = (x - y)^T A (x - y), differentiable in A or G.

A is positive semi-definite, or A = G^T G with an unconstrained G [rank, F]: `form` says which one `matrix` is.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal

import torch
from torch import Generator, Tensor

from nearkin.errors import TrainingFailedError
from nearkin.linear.constraints import Constraints
from nearkin.losses.neighbour import nca
from nearkin.losses.tuples import triplet
from nearkin.ops.pairs import Pairs

Form = Literal["A", "G"]
Regulariser = Literal["frobenius", "trace", "scatter", "none"]
Projection = Callable[[Tensor], Tensor]


def factors(matrix: Tensor, x: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Return left and right with learned inner products left_i . right_j, where A is never larger than needed."""
    if form == "A":
        return x @ matrix, x
    mapped = x @ matrix.T
    return mapped, mapped


def squared_distances(matrix: Tensor, differences: Tensor, form: Form = "A") -> Tensor:
    left, right = factors(matrix, differences, form)
    return (left * right).sum(1)


def undo_basis(matrix: Tensor, basis: Tensor, form: Form) -> Tensor:
    """Convert a matrix learned on x @ basis^T to one for x: basis^T B basis, or H basis."""
    return basis.T @ matrix @ basis if form == "A" else matrix @ basis


def regularise(matrix: Tensor, regulariser: Regulariser, form: Form = "A", basis: Tensor | None = None) -> Tensor:
    """Compute 0.5 |A|^2 ("frobenius") or the trace of A ("trace"); 0 for the others."""
    if regulariser not in ("frobenius", "trace"):
        return matrix.new_zeros(())
    matrix = matrix if basis is None else undo_basis(matrix, basis, form)
    if regulariser == "trace":
        return matrix.trace() if form == "A" else matrix.square().sum()
    # |G^T G| = |G G^T|, and the latter is small for a low rank.
    return 0.5 * (matrix if form == "A" else matrix @ matrix.T).square().sum()


def hinge(violation: Tensor, width: float = 0.0) -> Tensor:
    """Compute max(0, violation), optionally smoothed so that gradient methods converge at the kink."""
    if width <= 0:
        return violation.relu()
    inside = violation.clamp(0, width)
    return inside * (violation - inside / 2) / width


@dataclass(frozen=True, eq=False)
class Objective(ABC):
    """A regulariser plus a weighted sum of terms, whose value can be estimated from some of the terms."""

    x: Tensor  # [N, F] samples
    _: KW_ONLY
    margin: float = 1.0  # between the squared distances of a triplet
    lam: float = 1.0  # weight of the terms
    regulariser: Regulariser = "frobenius"  # "scatter": the sum of d_A over similar pairs
    form: Form = "A"
    basis: Tensor | None = None  # the map already applied to x, if any

    @property
    @abstractmethod
    def terms(self) -> int:
        """The number of terms."""

    @abstractmethod
    def loss(self, matrix: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the sum of the terms `rows`, all if None, and the similar pairs [P, 2] among them."""

    def value(self, matrix: Tensor, rows: Tensor | None = None) -> Tensor:
        weight = 1.0 if rows is None else self.terms / len(rows)
        loss, similar = self.loss(matrix, rows)
        if self.regulariser == "scatter":
            r = weight * self.distances(matrix, similar[:, 0], similar[:, 1]).sum()
        else:
            r = regularise(matrix, self.regulariser, self.form, self.basis)
        return r + self.lam * weight * loss

    def distances(self, matrix: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return squared_distances(matrix, self.x[i] - self.x[j], self.form)


@dataclass(frozen=True, eq=False)
class HingeObjective(Objective):
    """Hinges on pairs and triplets: the general linear model of Kulis 2013.

    r(A) + lam * ( sum_S [d_A - upper]_+  +  sum_D [lower - d_A]_+  +  sum_T [d_A(i,j) - d_A(i,k) + margin]_+ )
    """

    constraints: Constraints  # on the rows of x
    upper: float = 1.0  # bound of the squared distances of similar pairs
    lower: float = 4.0  # bound of the squared distances of dissimilar pairs
    width: float = 0.0  # over which the hinges are smoothed

    @property
    def terms(self) -> int:
        return len(self.constraints)

    @property
    def distance_scale(self) -> float:
        return min(self.margin, self.lower - self.upper)

    def loss(self, matrix: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        c = self.constraints if rows is None else self.constraints.take(rows)
        near = self.distances(matrix, *c.similar.T)
        far = self.distances(matrix, *c.dissimilar.T)
        i, j, k = c.triplets.T
        order = self.distances(matrix, i, j) - self.distances(matrix, i, k)
        violations = (near - self.upper, self.lower - far, order + self.margin)
        pull, push, compare = (hinge(violation, self.width).sum() for violation in violations)
        return pull + push + compare, c.similar


@dataclass(frozen=True, eq=False)
class NeighbourObjective(Objective):
    """NCA, or LMNN with its target neighbours.

    "nca"    sum over samples of -log p(a neighbour drawn by exp(-d_A) is of the class)          (nearkin.losses.nca)
    "lmnn"   sum over (sample, target) of the pull d_A, as regulariser "scatter", and of the push
             [d_A(i, target) - d_A(i, other class) + margin]_+                                 (nearkin.losses.triplet)
    """

    labels: Tensor  # [N] integers
    name: Literal["nca", "lmnn"]
    targets: Tensor  # [P, 2] (sample, one of its nearest of the class)

    @property
    def terms(self) -> int:
        return len(self.x)

    def loss(self, matrix: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        rows = torch.arange(len(self.x)) if rows is None else rows.sort().values
        targets = self.targets[torch.isin(self.targets[:, 0], rows)]
        i, j = targets.T
        if self.name == "nca":
            pairs = self._pairs(matrix, rows, rows)
            # A batch may hold a sample twice, which is not its own neighbour.
            return nca(replace(pairs, pos=pairs.pos & (rows[:, None] != rows)), reduction="sum"), targets
        refs = torch.unique(torch.cat([rows, j]))
        pairs = self._pairs(matrix, rows, refs)
        pos = torch.zeros_like(pairs.pos)
        pos[torch.searchsorted(rows, i.contiguous()), torch.searchsorted(refs, j.contiguous())] = True
        # The loss compares similarities: minus the squared distances.
        pairs = replace(pairs, sim=-pairs.sq_distance(), pos=pos)
        return len(self.x) / len(refs) * triplet(pairs, margin=self.margin, reduction="sum"), targets

    def _pairs(self, matrix: Tensor, anchors: Tensor, refs: Tensor) -> Pairs:
        """The learned inner products of rows; positive are all rows of the class."""
        left, right = factors(matrix, self.x[anchors], self.form)
        ref_left, ref_right = factors(matrix, self.x[refs], self.form)
        same = self.labels[anchors, None] == self.labels[refs]
        anchor_sq, ref_sq = (left * right).sum(1), (ref_left * ref_right).sum(1)
        return Pairs(left @ ref_right.T, same, ~same, anchor_sq=anchor_sq, ref_sq=ref_sq)


VALIDATE_EVERY = 10  # stochastic steps between two evaluations of the validation terms


def project_psd(a: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh((a + a.T) / 2)
    half: Tensor = vectors * values.clamp(min=0).sqrt()
    return half @ half.T


def projected_gradient(
    objective: Callable[[Tensor], Tensor], start: Tensor, project: Projection, *, tol: float = 1e-6
) -> Iterator[tuple[Tensor, float]]:
    """Minimise by Nesterov's method with backtracking and adaptive restart (O'Donoghue and Candes 2015)."""

    def gradient_at(point: Tensor) -> tuple[float, Tensor]:
        leaf = point.detach().requires_grad_(True)
        value = objective(leaf)
        (gradient,) = torch.autograd.grad(value, leaf)
        return float(value.detach()), gradient

    def backtrack(step: float) -> tuple[Tensor, float, float] | None:
        """Halve the step until its quadratic upper bound holds."""
        for _ in range(60):
            new = project(point - step * gradient)
            with torch.no_grad():
                new_value = float(objective(new))
            move = new - point
            bound = point_value + float((gradient * move).sum()) + float(move.square().sum()) / (2 * step)
            if new_value <= bound + 1e-12 * abs(point_value):
                return new, new_value, step
            step /= 2
        return None

    best = point = project(start)
    point_value, gradient = gradient_at(point)
    value, momentum, stalled = point_value, 1.0, 0
    if not math.isfinite(value):
        raise TrainingFailedError(f"The objective is {value} at the start. Scale the features (scale=True).")
    # A first step that would change the matrix by a tenth of its norm.
    step = 0.1 * float(best.norm() + 1e-12) / max(float(gradient.norm()), 1e-300)
    while stalled < 3:
        result = backtrack(step)
        if result is None or result[1] > value:
            if momentum == 1.0:
                return  # no descent along the gradient: a minimum or a kink
            point, momentum = best, 1.0
            point_value, gradient = gradient_at(point)
            continue
        new, new_value, step = result
        stalled = stalled + 1 if value - new_value <= tol * max(abs(value), 1e-12) else 0
        new_momentum = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
        point = new + (momentum - 1) / new_momentum * (new - best)
        best, value, momentum = new, new_value, new_momentum
        yield best, value
        step *= 1.25
        point_value, gradient = gradient_at(point)


def stochastic_descent(
    objective: Objective, start: Tensor, project: Projection, batch_size: int, steps: int, rate: float, rng: Generator
) -> Iterator[tuple[Tensor, float]]:
    """Minimise with Adam on batches; when validation terms get worse, return to the best matrix at half the rate."""
    matrix = project(start).clone().requires_grad_(True)
    scale = float(start.square().mean().sqrt().clamp(min=1e-12))
    validation = torch.randperm(objective.terms, generator=rng)[: 4 * batch_size]
    best = matrix.detach().clone()
    adam = torch.optim.Adam([matrix], betas=(0.9, 0.99))
    queue = torch.empty(0, dtype=torch.int64)
    with torch.no_grad():
        best_value = float(objective.value(matrix, validation))
    for step in range(steps):
        if len(queue) < batch_size:
            queue = torch.cat([queue, torch.randperm(objective.terms, generator=rng)])
        rows, queue = queue[:batch_size], queue[batch_size:]
        adam.param_groups[0]["lr"] = rate * scale * 0.5 * (1 + math.cos(math.pi * step / steps))
        adam.zero_grad()
        estimate = objective.value(matrix, rows)
        torch.autograd.backward(estimate)
        adam.step()
        with torch.no_grad():
            matrix.copy_(project(matrix))
            if (step + 1) % VALIDATE_EVERY == 0 or step + 1 == steps:
                value = float(objective.value(matrix, validation))
                if value < best_value:
                    best, best_value = matrix.detach().clone(), value
                else:
                    rate /= 2
                    matrix.copy_(best)
        yield matrix.detach(), float(estimate.detach())
