"""MetricLearner: learn A (or G, with A = G^T G) by gradient descent, from constraints or from labels."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal, Self, get_args

import numpy as np
import torch
from torch import Tensor

from nearkin._common.progress import Reporter
from nearkin.errors import ConfigError, DataError, TrainingFailedError, did_you_mean
from nearkin.linear.constraints import Constraints, Draw, draw_constraints, target_neighbours
from nearkin.linear.estimators import Array, LinearMetric, as_codes, as_tensor
from nearkin.linear.objective import (
    Form,
    HingeObjective,
    NeighbourObjective,
    Objective,
    Projection,
    Regulariser,
    project_psd,
    projected_gradient,
    stochastic_descent,
    undo_basis,
)
from nearkin.ops.whitening import covariance_whitening, within_class_whitening

from sklearn.utils import check_random_state  # isort: skip

Loss = Literal["hinge", "nca", "lmnn"]
DEFAULT_REGULARISERS: dict[Loss, Regulariser] = {"hinge": "frobenius", "nca": "none", "lmnn": "scatter"}
MAX_FULL_BATCH = 1 << 22  # values that a step on the full objective may hold in memory: 32 MB
SMOOTHING_WIDTHS = (1.0, 0.1, 0.01, 0.001)  # of the hinges, in sequence, in units of the bounds


@dataclass(eq=False, repr=False)
class MetricLearner(LinearMetric):
    """A linear metric that minimises  r(A) + lam * (sum of violated constraints).

    Args:
        objective: "hinge" (pairs and triplets, given or drawn from labels), "nca" or "lmnn".
        regulariser: "frobenius" (0.5 |A|^2), "trace" (tr A), "scatter" (sum of d_A over similar pairs or target
            neighbours), "none", or None for the usual one (frobenius for hinge, none for nca, scatter for lmnn).
        lam: Weight of the sum; larger values trust the constraints more.
        form: "G" learns the map itself and may be of low rank. "A" learns the matrix, projected to positive
            semi-definite after every step (hinge and lmnn are convex in it; F^3 per step).
        dim: Output dimensions; all when omitted. "A" is truncated to it at the end, "G" never has more.
        upper: Bound of the squared distances of similar pairs.
        lower: Bound of the squared distances of dissimilar pairs.
        margin: Between the squared distances of a triplet.
        draw: Constraints to draw from labels: "pairs", "triplets" or "both".
        count: Number of constraints of each type to draw; 10 per sample when omitted.
        neighbours: Target neighbours per sample (lmnn).
        shrinkage: Of the within-class whitening that initialises the search; the number of features per sample when
            omitted, 1 is better for features of networks.
        scale: Divide the features by their root mean squared distance, so that bounds, margin and lam mean the same
            for all data. The fitted map includes the factor.
        batch_size: Constraints (hinge) or samples (nca, lmnn) per step; None for all, "auto" for all while cheap.
        max_iter: Maximum number of steps.
        tol: Stop when a full-batch step lowers the objective by less than this fraction.
        rate: Learning rate of the first batches, relative to the entries of the initial matrix.
        random_state: For drawing constraints and batches.
        verbose: Show progress; None shows it for long fits only.

    Attributes:
        history_: The objective after every step (an estimate with batches).
        n_iter_: Number of steps.
    """

    objective: Loss = "hinge"
    regulariser: Regulariser | None = None
    lam: float = 1.0
    form: Form = "G"
    dim: int | None = None
    upper: float = 0.5
    lower: float = 1.5
    margin: float = 1.0
    draw: Draw = "both"
    count: int | None = None
    neighbours: int = 3
    shrinkage: float | None = None
    scale: bool = True
    batch_size: int | str | None = "auto"
    max_iter: int = 400
    tol: float = 1e-5
    rate: float = 0.2
    random_state: Any = 0
    verbose: bool | None = None

    def fit(self, X: Any, y: Any = None, constraints: Constraints | None = None) -> Self:
        """Learn from samples X [N, F] with labels y [N], or with constraints (for "hinge") instead of labels."""
        self._check_settings()
        X, y = self._validate(X, y, labels=constraints is None)
        codes = as_codes(y) if constraints is None else None
        seed = int(check_random_state(self.random_state).randint(1 << 31))
        x, mean, unit = self._normalise(X)
        constraints = self._make_constraints(x, codes, constraints, seed)
        basis = self._make_basis(x, codes, constraints)
        objective = self._make_objective(x @ basis.T, codes, constraints, basis)
        matrix = self._solve(objective, self._initial_matrix(objective, seed), seed)
        self._finish(undo_basis(matrix, basis, self.form) / (unit**2 if self.form == "A" else unit), mean)
        return self

    def _check_settings(self) -> None:
        check_name("objective", self.objective, get_args(Loss))
        check_name("regulariser", self.regulariser or "none", get_args(Regulariser))
        check_name("form", self.form, get_args(Form))
        for name in ("lam", "margin", "tol", "rate"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}: expected a number above 0, got {getattr(self, name)!r}.")
        for name in ("max_iter", "neighbours"):
            if not isinstance(getattr(self, name), int | np.integer) or getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected an integer >= 1, got {getattr(self, name)!r}.")
        if not 0 <= self.upper < self.lower:
            raise ConfigError(f"upper, lower: expected 0 <= upper < lower, got {self.upper} and {self.lower}.")
        size = self.batch_size
        if not (size is None or size == "auto" or (not isinstance(size, str) and size >= 2)):
            raise ConfigError(f"batch_size: expected 'auto', None or an integer >= 2, got {size!r}.")

    def _normalise(self, X: Array) -> tuple[Tensor, Tensor, float]:
        """The centred data in units of their spread, the mean, and the unit."""
        if self.dim is not None and not 1 <= self.dim <= X.shape[1]:
            raise ConfigError(f"dim: expected 1 to {X.shape[1]}, the number of features, got {self.dim}.")
        # Centre first, as the mean may be far off, then divide by the largest entry: squares stay in range.
        largest = float(np.abs(X).max()) or 1.0
        mean = (as_tensor(X) / largest).mean(0) * largest
        x = as_tensor(X) - mean
        scale = float(x.abs().max()) or 1.0
        x = x / scale
        # The mean squared distance over all pairs is twice the variance.
        spread = float(2 * x.square().sum(1).mean()) ** 0.5
        if spread <= 1e-7:
            raise DataError(f"X: all {len(X):,} samples are the same vector, so there are no distances to learn.")
        unit = spread if self.scale else 1.0 / scale
        return x / unit, mean, unit * scale

    def _make_constraints(
        self, x: Tensor, codes: Tensor | None, constraints: Constraints | None, seed: int
    ) -> Constraints:
        """The constraints given or drawn; for NCA and LMNN the target neighbours, as similar pairs."""
        if self.objective == "hinge":
            if constraints is None:
                assert codes is not None
                count = 10 * len(x) if self.count is None else self.count
                constraints = draw_constraints(codes, count, draw=self.draw, seed=seed)
            constraints.check(len(x))
            return constraints
        if codes is None:
            raise ConfigError(f"constraints: objective '{self.objective}' learns from labels. Use objective='hinge'.")
        if len(torch.unique(codes)) < 2:
            raise DataError(f"y: 1 class only; objective '{self.objective}' needs at least two.")
        targets = target_neighbours(x, codes, self.neighbours)
        if len(targets) == 0:
            raise DataError(f"y: no class has two samples; objective '{self.objective}' needs neighbours of a class.")
        return Constraints(similar=targets)

    def _make_basis(self, x: Tensor, codes: Tensor | None, constraints: Constraints) -> Tensor:
        """Coordinates with isotropic within-class covariance: they precondition the search, not change its solution."""
        # The fewer samples per feature, the less reliable their covariance.
        shrinkage = x.shape[1] / len(x) if self.shrinkage is None else self.shrinkage
        rows, classes = x, codes
        if classes is None and len(constraints.similar):
            rows = x[constraints.similar.T.flatten()]
            classes = torch.arange(len(constraints.similar)).repeat(2)
        if classes is not None:
            with suppress(DataError):  # no variance within classes
                return within_class_whitening(rows, classes, shrinkage=shrinkage)[0]
        return covariance_whitening(x, shrinkage=shrinkage)[0]

    def _make_objective(self, x: Tensor, codes: Tensor | None, constraints: Constraints, basis: Tensor) -> Objective:
        shared: dict[str, Any] = {"margin": self.margin, "lam": self.lam, "form": self.form, "basis": basis}
        shared["regulariser"] = self.regulariser or DEFAULT_REGULARISERS[self.objective]
        if self.objective == "hinge":
            return HingeObjective(x, constraints, self.upper, self.lower, **shared)
        assert codes is not None
        return NeighbourObjective(x, codes, self.objective, constraints.similar, **shared)

    def _initial_matrix(self, objective: Objective, seed: int) -> Tensor:
        """The identity, or the principal directions for a low rank, at the scale that minimises the objective."""
        x, size = objective.x, objective.x.shape[1]
        matrix = torch.eye(size, dtype=x.dtype)
        if self.form == "G" and self.dim is not None:
            matrix = torch.linalg.eigh(x.T @ x).eigenvectors.flip(1)[:, : self.dim].T.contiguous()
        sample = torch.randperm(objective.terms, generator=torch.Generator().manual_seed(seed))[:512]
        scales = [2.0 ** (k if self.form == "A" else k / 2) for k in range(-16, 9)]
        with torch.no_grad():
            values = [float(objective.value(scale * matrix, sample)) for scale in scales]
        return scales[int(np.nanargmin(values))] * matrix

    def _solve(self, objective: Objective, start: Tensor, seed: int) -> Tensor:
        pairwise = isinstance(objective, NeighbourObjective)
        memory = objective.terms * (8 * objective.terms if pairwise else 3 * start.shape[1])
        size = self.batch_size
        if size == "auto":
            size = None if memory <= MAX_FULL_BATCH else (256 if pairwise else 1024)
        project: Projection = project_psd if self.form == "A" else lambda matrix: matrix
        generator = torch.Generator().manual_seed(seed)
        if size is None or int(size) >= objective.terms:
            steps = _full_batch_descent(objective, start, project, self.max_iter, self.tol)
        else:
            steps = stochastic_descent(objective, start, project, int(size), self.max_iter, self.rate, generator)
        is_long = len(objective.x) * start.shape[1] * self.max_iter > 1e9
        quiet = not (is_long if self.verbose is None else self.verbose)
        matrix, self.history_ = start, []
        with Reporter(quiet=quiet).track(f"metric ({self.objective})", self.max_iter, "step") as bar:
            for new_matrix, value in steps:
                matrix = new_matrix
                self.history_.append(value)
                bar.advance(note=f"objective {value:.4g}")
        self.n_iter_ = max(1, len(self.history_))
        if not torch.isfinite(matrix).all():
            raise TrainingFailedError(f"The {self.objective} objective diverged; lower rate or lam, or set scale=True.")
        return matrix

    def _finish(self, matrix: Tensor, mean: Tensor) -> None:
        """Set the map, with its components by descending weight; distances do not depend on their order."""
        matrix64 = matrix.double()
        if self.form == "A":
            values, vectors = torch.linalg.eigh(matrix64)
            root = (vectors * values.clamp(min=0).sqrt()).T.flip(0)[: self.dim]
        else:
            _, values, right = torch.linalg.svd(matrix64, full_matrices=False)
            root = values[:, None] * right
        self._set_map(root.to(matrix.dtype), (-root @ mean.double()).to(matrix.dtype))


def _full_batch_descent(
    objective: Objective, start: Tensor, project: Projection, max_iter: int, tol: float
) -> Iterator[tuple[Tensor, float]]:
    """All terms in every step. Hinges are smoothed, less and less; the values yielded are those of plain hinges."""
    stages: Sequence[Objective] = [objective]
    if isinstance(objective, HingeObjective):
        stages = [replace(objective, width=w * objective.distance_scale) for w in SMOOTHING_WIDTHS][-max_iter:]
    matrix = start
    for stage in stages:
        iterates = projected_gradient(stage.value, matrix, project, tol=tol)
        for matrix, _ in islice(iterates, max_iter // len(stages)):
            with torch.no_grad():
                yield matrix, float(objective.value(matrix))


def check_name(setting: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        names = ", ".join(f"'{k}'" for k in known)
        raise ConfigError(f"{setting}: expected one of {names}, got {value!r}.{did_you_mean(str(value), known)}")
