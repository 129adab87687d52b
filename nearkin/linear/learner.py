"""MetricLearner: learn A (or G, with A = G^T G) by gradient, from constraints or from labels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin._common.progress import Reporter
from nearkin.errors import ConfigError, DataError, TrainingFailedError
from nearkin.linear.constraints import Constraints, Draw, draw_constraints, target_neighbours
from nearkin.linear.estimators import FLOATS, LinearMetric, as_codes, as_tensor
from nearkin.linear.objective import REGULARISERS, Form, Hinges, Neighbourhoods, Regulariser, check_name, in_basis
from nearkin.linear.solver import Project, descend, descend_parts, project_psd
from nearkin.ops.whitening import covariance_whitening, within_class_whitening

from sklearn.utils import check_random_state  # isort: skip
from sklearn.utils.validation import validate_data  # isort: skip

Objective = Literal["hinge", "nca", "lmnn"]
WHOLE = 1 << 22  # numbers that a step on the whole objective may hold at once: 32 MB
WIDTHS = (1.0, 0.1, 0.01, 0.001)  # of the rounded corner, one after the other, in units of the bounds


class MetricLearner(LinearMetric):
    """A linear metric that minimises  r(A) + lam * (sum of broken constraints).

    objective     "hinge": pairs and triplets, given to `fit` or drawn from labels
                  "nca": neighbourhood components     "lmnn": large margin nearest neighbours
    regulariser   "frobenius": 0.5 |A|^2     "trace": tr A     "scatter": tr AC = sum of d_A over similar pairs (over
                  target neighbours for nca and lmnn)     "none"     None: what the objective is known with
                  (frobenius, none and scatter)
    lam           weight of the sum: larger trusts the constraints more
    form          "G" learns the map itself and may be of low rank; "A" learns the matrix, projected to the positive
                  semi-definite ones after every step (the hinge and lmnn problems are convex in it; F^3 per step)
    dim           output dimensions; all when left out. "A" is cut to it at the end, "G" never has more.
    upper, lower  of the squared distances of similar and dissimilar pairs
    margin        between the squared distances of a triplet
    draw, count   which constraints are drawn from labels, and how many of each kind; 10 per sample when left out
    neighbours    target neighbours per sample (lmnn)
    shrinkage     of the whitening within classes (or of similar pairs) that the search begins with; features per
                  sample when left out, 1 is better for the features of networks
    scale         divide the features by their root mean squared distance first, so that distances are about 1 and
                  bounds, margin and lam mean the same for all data. The fitted map includes it.
    batch_size    constraints (hinge) or samples (nca, lmnn) per step; None takes all in every step; "auto" takes all
                  while that is cheap
    max_iter      most steps
    tol           stop when a step on the whole lowers the objective by less than this share
    rate          size of the first steps on batches, relative to the entries of the start
    random_state  for drawing constraints and batches
    verbose       show progress; None shows it for long work only

    After fit also: history_ (the objective after every step, an estimate with batches) and n_iter_.

    >>> x = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 1.0], [4.0, 1.0]])  # classes differ in the narrow direction
    >>> metric = MetricLearner(form="A").fit(x, [0, 0, 1, 1])
    >>> metric.score(x, [0, 0, 1, 1])
    1.0
    """

    def __init__(
        self,
        objective: Objective = "hinge",
        regulariser: Regulariser | None = None,
        lam: float = 1.0,
        form: Form = "G",
        dim: int | None = None,
        upper: float = 0.5,
        lower: float = 1.5,
        margin: float = 1.0,
        draw: Draw = "both",
        count: int | None = None,
        neighbours: int = 3,
        shrinkage: float | None = None,
        scale: bool = True,
        batch_size: int | str | None = "auto",
        max_iter: int = 400,
        tol: float = 1e-5,
        rate: float = 0.2,
        random_state: Any = 0,
        verbose: bool | None = None,
    ) -> None:
        self.objective = objective
        self.regulariser = regulariser
        self.lam = lam
        self.form = form
        self.dim = dim
        self.upper = upper
        self.lower = lower
        self.margin = margin
        self.draw = draw
        self.count = count
        self.neighbours = neighbours
        self.shrinkage = shrinkage
        self.scale = scale
        self.batch_size = batch_size
        self.max_iter = max_iter
        self.tol = tol
        self.rate = rate
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any = None, constraints: Constraints | None = None) -> MetricLearner:
        """Learn from labels y [N], or from constraints on the rows of X (hinge only; y is then not looked at)."""
        self._check()
        if constraints is None:
            X, y = validate_data(self, X, y, dtype=FLOATS, ensure_min_samples=2)
            codes = as_codes(y)
        else:
            X, codes = validate_data(self, X, dtype=FLOATS, ensure_min_samples=2), None
        seed = int(check_random_state(self.random_state).randint(1 << 31))
        x, mean, unit = self._centred(X)
        asked = self._asked(x, codes, constraints, seed)
        basis = self._basis(x, codes, asked)
        problem = self._problem(x @ basis.T, codes, asked, basis)
        matrix = self._solve(problem, self._start(problem, seed), seed)
        self._finish(in_basis(matrix, basis, self.form) / (unit**2 if self.form == "A" else unit), mean)
        return self

    # --- what fit does, in order --------------------------------------------------------------------------------------

    def _check(self) -> None:
        check_name("objective", self.objective, ("hinge", "nca", "lmnn"))
        check_name("regulariser", self.regulariser or "none", REGULARISERS)
        check_name("form", self.form, ("A", "G"))
        for name in ("lam", "margin", "tol", "rate"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}: expected a number above 0, got {getattr(self, name)!r}.")
        for name in ("max_iter", "neighbours"):
            if not isinstance(getattr(self, name), int | np.integer) or getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected a whole number from 1, got {getattr(self, name)!r}.")
        if not 0 <= self.upper < self.lower:
            raise ConfigError(f"upper, lower: expected 0 <= upper < lower, got {self.upper} and {self.lower}.")
        size = self.batch_size
        if not (size is None or size == "auto" or (not isinstance(size, str) and size >= 2)):
            raise ConfigError(f"batch_size: expected 'auto', None or a whole number from 2, got {size!r}.")

    def _centred(self, X: NDArray[Any]) -> tuple[Tensor, Tensor, float]:
        """The data around their mean in units of their spread, the mean, and the unit."""
        if self.dim is not None and not 1 <= self.dim <= X.shape[1]:
            raise ConfigError(f"dim: expected 1 to {X.shape[1]}, the number of features, got {self.dim}.")
        # Around the mean first, which may be far off, then by the largest entry: squares neither overflow nor vanish.
        big = float(np.abs(X).max()) or 1.0
        mean = (as_tensor(X) / big).mean(0) * big
        x = as_tensor(X) - mean
        top = float(x.abs().max()) or 1.0
        x = x / top
        # The mean squared distance over all pairs is twice the variance.
        spread = float(2 * x.square().sum(1).mean()) ** 0.5
        if spread <= 1e-7:
            raise DataError(f"All {len(X):,} samples are the same vector, so there are no distances to learn.")
        unit = spread if self.scale else 1.0 / top
        return x / unit, mean, unit * top

    def _asked(self, x: Tensor, codes: Tensor | None, given: Constraints | None, seed: int) -> Constraints:
        """The constraints given or drawn; for NCA and LMNN the target neighbours, as similar pairs."""
        if self.objective == "hinge":
            if given is None:
                assert codes is not None
                count = 10 * len(x) if self.count is None else self.count
                given = draw_constraints(codes, count, draw=self.draw, seed=seed)
            given.check(len(x))
            return given
        if codes is None:
            raise ConfigError(f"constraints: objective '{self.objective}' learns from labels. Use objective='hinge'.")
        if len(torch.unique(codes)) < 2:
            raise DataError(f"y: 1 class only; objective '{self.objective}' needs at least two.")
        targets = target_neighbours(x, codes, self.neighbours)
        if len(targets) == 0:
            raise DataError(f"y: no class has two samples; objective '{self.objective}' needs neighbours of a class.")
        return Constraints(similar=targets)

    def _basis(self, x: Tensor, codes: Tensor | None, asked: Constraints) -> Tensor:
        """Coordinates in which the spread of kin is round, so that steps reach as far in narrow directions.

        They are where the search begins and what its steps are measured in, not what is found: regularisers are those
        of A itself. Without them steps on batches hardly move in directions that noise elsewhere drowns.
        """
        # The fewer samples there are per feature, the less is their spread to be believed.
        shrinkage = x.shape[1] / len(x) if self.shrinkage is None else self.shrinkage
        rows, kin = x, codes
        if kin is None and len(asked.similar):
            rows, kin = x[asked.similar.T.flatten()], torch.arange(len(asked.similar)).repeat(2)
        if kin is not None:
            with suppress(DataError):  # where kin are all the same point
                return within_class_whitening(rows, kin, shrinkage=shrinkage)[0]
        return covariance_whitening(x, shrinkage=shrinkage)[0]

    def _problem(self, x: Tensor, codes: Tensor | None, asked: Constraints, basis: Tensor) -> Hinges | Neighbourhoods:
        usual: dict[str, Regulariser] = {"hinge": "frobenius", "nca": "none", "lmnn": "scatter"}
        regulariser: Regulariser = self.regulariser or usual[self.objective]
        shared = (self.margin, self.lam, regulariser, self.form, basis)
        if self.objective == "hinge":
            return Hinges(x, asked, self.upper, self.lower, *shared)
        assert codes is not None
        return Neighbourhoods(x, codes, self.objective, asked.similar, *shared)

    def _start(self, problem: Hinges | Neighbourhoods, seed: int) -> Tensor:
        """The identity, or for a low rank the principal directions, at the scale where the objective is least."""
        x, size = problem.x, problem.x.shape[1]
        matrix = torch.eye(size, dtype=x.dtype)
        if self.form == "G" and self.dim is not None:
            matrix = torch.linalg.eigh(x.T @ x).eigenvectors.flip(1)[:, : self.dim].T.contiguous()
        some = torch.randperm(problem.terms, generator=torch.Generator().manual_seed(seed))[:512]
        scales = [2.0 ** (k if self.form == "A" else k / 2) for k in range(-16, 9)]
        with torch.no_grad():
            levels = [float(problem.value(scale * matrix, some)) for scale in scales]
        return scales[int(np.nanargmin(levels))] * matrix

    def _solve(self, problem: Hinges | Neighbourhoods, start: Tensor, seed: int) -> Tensor:
        pairwise = isinstance(problem, Neighbourhoods)
        held = problem.terms * (8 * problem.terms if pairwise else 3 * start.shape[1])
        batch = self.batch_size
        if batch == "auto":
            batch = None if held <= WHOLE else (256 if pairwise else 1024)
        project = project_psd if self.form == "A" else _as_it_is
        if batch is None or int(batch) >= problem.terms:
            steps = _whole(problem, start, project, self.max_iter, self.tol)
        else:
            generator = torch.Generator().manual_seed(seed)
            steps = descend_parts(problem, start, project, int(batch), self.max_iter, self.rate, generator)
        long = len(problem.x) * start.shape[1] * self.max_iter > 1e9 if self.verbose is None else self.verbose
        matrix, self.history_ = start, []
        with Reporter(quiet=not long).track(f"metric ({self.objective})", self.max_iter, "step") as bar:
            for reached, value in steps:
                matrix = reached
                self.history_.append(value)
                bar.advance(note=f"objective {value:.4g}")
        self.n_iter_ = max(1, len(self.history_))
        if not torch.isfinite(matrix).all():
            raise TrainingFailedError(
                f"The {self.objective} objective went out of bounds; lower rate or lam, or set scale=True."
            )
        return matrix

    def _finish(self, matrix: Tensor, mean: Tensor) -> None:
        """Keep the map with its components in the order of their weight; distances do not depend on the order."""
        wide = matrix.double()
        if self.form == "A":
            values, vectors = torch.linalg.eigh(wide)
            root = (vectors * values.clamp(min=0).sqrt()).T.flip(0)[: self.dim]
        else:
            _, values, right = torch.linalg.svd(wide, full_matrices=False)
            root = values[:, None] * right
        self._keep(root.to(matrix.dtype), (-root @ mean.double()).to(matrix.dtype))


def _whole(
    problem: Hinges | Neighbourhoods, start: Tensor, project: Project, most: int, tol: float
) -> Iterator[tuple[Tensor, float]]:
    """All terms in every step. Corners are rounded, less and less, and the value yielded is that of the sharp ones."""
    stages = [replace(problem, width=w * problem.unit) for w in WIDTHS] if isinstance(problem, Hinges) else [problem]
    stages = stages[-most:]
    matrix = start
    for stage in stages:
        for reached, _ in islice(descend(stage.value, matrix, project, tol=tol), most // len(stages)):
            matrix = reached
            with torch.no_grad():
                yield matrix, float(problem.value(matrix))


def _as_it_is(matrix: Tensor) -> Tensor:
    return matrix
