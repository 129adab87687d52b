"""Two ways down: accelerated projected gradient on a whole objective, stochastic steps on parts of it.

Both are generators that yield every iterate, so that the caller counts, watches and stops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from nearkin.errors import TrainingFailedError

Project = Callable[[Tensor], Tensor]
LOOK = 10  # steps on batches from one look at the watched terms to the next


def project_psd(a: Tensor) -> Tensor:
    """The nearest symmetric positive semi-definite matrix: symmetrise, clip the eigenvalues at 0.

    >>> project_psd(torch.tensor([[1.0, 0.0], [0.0, -2.0]])).tolist()
    [[1.0, 0.0], [0.0, 0.0]]
    """
    values, vectors = torch.linalg.eigh((a + a.T) / 2)
    half: Tensor = vectors * values.clamp(min=0).sqrt()
    return half @ half.T


def descend(
    value: Callable[[Tensor], Tensor], start: Tensor, project: Project, *, tol: float = 1e-6
) -> Iterator[tuple[Tensor, float]]:
    """Yield (matrix, value), each no worse than the last, until `value` stops falling by more than `tol` of itself.

    Nesterov's method with a step found by backtracking and the momentum thrown away whenever it leads uphill
    (O'Donoghue and Candes 2015). `project` is project_psd for A and the identity for G.
    """
    best = project(start)
    level, gradient = _slope(value, best)
    if not math.isfinite(level):
        raise TrainingFailedError(f"The objective is {level} at the start. Scale the features (scale=True).")
    ahead, momentum, still = best, 1.0, 0
    # A first step that would change the matrix by a tenth of its length.
    step = 0.1 * float(best.norm() + 1e-12) / max(float(gradient.norm()), 1e-300)
    at_ahead = level
    while still < 3:
        found = _backtrack(value, project, ahead, at_ahead, gradient, step)
        if found is None or found[1] > level:
            if momentum == 1.0:
                return  # no step along the gradient goes down: a minimum, or a corner
            ahead, momentum = best, 1.0
            at_ahead, gradient = _slope(value, ahead)
            continue
        new, new_level, step = found
        still = still + 1 if level - new_level <= tol * max(abs(level), 1e-12) else 0
        grown = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
        ahead = new + (momentum - 1) / grown * (new - best)
        best, level, momentum = new, new_level, grown
        yield best, level
        step *= 1.25
        at_ahead, gradient = _slope(value, ahead)


def _backtrack(
    value: Callable[[Tensor], Tensor], project: Project, at: Tensor, level: float, gradient: Tensor, step: float
) -> tuple[Tensor, float, float] | None:
    """Halve the step until the parabola that it stands for lies above the value."""
    for _ in range(60):
        new = project(at - step * gradient)
        with torch.no_grad():
            new_level = float(value(new))
        move = new - at
        bound = level + float((gradient * move).sum()) + float(move.square().sum()) / (2 * step)
        if new_level <= bound + 1e-12 * abs(level):
            return new, new_level, step
        step /= 2
    return None


class Parts(Protocol):
    """An objective whose value can be estimated from some of its terms, by number."""

    @property
    def terms(self) -> int: ...

    def value(self, matrix: Tensor, rows: Tensor | None = None) -> Tensor: ...


def descend_parts(
    problem: Parts, start: Tensor, project: Project, batch: int, steps: int, rate: float, generator: torch.Generator
) -> Iterator[tuple[Tensor, float]]:
    """Yield (matrix, estimate) for `steps` batches of terms, drawn without repetition until all were seen.

    Adam, whose step does not depend on the scale of the objective, with a rate that falls to zero along a half
    cosine; `rate` is relative to the root mean square of the start. Where few terms are broken a gradient is mostly
    chance, and Adam takes it for as much as any other; so a fixed sample of the terms is looked at now and then, and
    when it got worse the search goes back to its best with half the rate. The last matrix yielded is the best.
    """
    matrix = project(start).clone().requires_grad_(True)
    unit = float(start.square().mean().sqrt().clamp(min=1e-12))
    watched = torch.randperm(problem.terms, generator=generator)[: 4 * batch]
    best, least = matrix.detach().clone(), _level(problem, matrix, watched)
    adam = torch.optim.Adam([matrix], betas=(0.9, 0.99))
    queue = torch.empty(0, dtype=torch.int64)
    for number in range(steps):
        if len(queue) < batch:
            queue = torch.cat([queue, torch.randperm(problem.terms, generator=generator)])
        rows, queue = queue[:batch], queue[batch:]
        adam.param_groups[0]["lr"] = rate * unit * 0.5 * (1 + math.cos(math.pi * number / steps))
        adam.zero_grad()
        estimate = problem.value(matrix, rows)
        torch.autograd.backward(estimate)
        adam.step()
        with torch.no_grad():
            matrix.copy_(project(matrix))
        if (number + 1) % LOOK == 0 or number + 1 == steps:
            level = _level(problem, matrix, watched)
            if level < least:
                best, least = matrix.detach().clone(), level
            else:
                rate /= 2
                with torch.no_grad():
                    matrix.copy_(best)
        yield matrix.detach(), float(estimate.detach())


def _level(problem: Parts, matrix: Tensor, rows: Tensor) -> float:
    with torch.no_grad():
        return float(problem.value(matrix, rows))


def _slope(value: Callable[[Tensor], Tensor], at: Tensor) -> tuple[float, Tensor]:
    point = at.detach().requires_grad_(True)
    level = value(point)
    (gradient,) = torch.autograd.grad(level, point)
    return float(level.detach()), gradient
