"""Optimisers: accelerated projected gradient on the full objective, and stochastic steps on batches of its terms.

Both are generators that yield every iterate, so that the caller counts, reports and stops.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from nearkin.errors import TrainingFailedError
from nearkin.linear.objective import Objective

Projection = Callable[[Tensor], Tensor]
VALIDATE_EVERY = 10  # stochastic steps between two evaluations of the validation terms


def project_psd(a: Tensor) -> Tensor:
    """Project onto the symmetric positive semi-definite matrices."""
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
    objective: Objective,
    start: Tensor,
    project: Projection,
    batch_size: int,
    steps: int,
    rate: float,
    generator: torch.Generator,
) -> Iterator[tuple[Tensor, float]]:
    """Minimise with Adam on batches; when validation terms get worse, return to the best matrix at half the rate."""
    matrix = project(start).clone().requires_grad_(True)
    scale = float(start.square().mean().sqrt().clamp(min=1e-12))
    validation = torch.randperm(objective.terms, generator=generator)[: 4 * batch_size]
    best = matrix.detach().clone()
    adam = torch.optim.Adam([matrix], betas=(0.9, 0.99))
    queue = torch.empty(0, dtype=torch.int64)
    with torch.no_grad():
        best_value = float(objective.value(matrix, validation))
    for step in range(steps):
        if len(queue) < batch_size:
            queue = torch.cat([queue, torch.randperm(objective.terms, generator=generator)])
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
