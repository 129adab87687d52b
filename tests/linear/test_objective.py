"""Objectives of linear metric learning: reference values, brute force, batches and constraints."""

import numpy as np
import pytest
import torch
from helpers.rows import golden

from nearkin.errors import ConfigError, DataError
from nearkin.linear.constraints import Constraints, draw_constraints, target_neighbours
from nearkin.linear.estimators import Mahalanobis
from nearkin.linear.objective import HingeObjective, NeighbourObjective, hinge, regularise, squared_distances


@pytest.fixture(scope="module")
def reference():
    return golden()["classical_metric_learning"]


def f64(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("form", ["A", "G"])
@pytest.mark.parametrize(("regulariser", "key"), [("frobenius", "frob"), ("scatter", "trace")])
def test_reference_values_and_gradients(reference, regulariser, key, form):
    hyper, x = reference["hyper"], f64(reference["X"])
    constraints = Constraints(reference["S"], reference["D"], reference["triplets"])
    settings = {"upper": hyper["u"], "lower": hyper["l"], "margin": hyper["m"], "lam": hyper["lam"]}
    matrix = f64(reference[form]).requires_grad_(True)
    value = HingeObjective(x, constraints, **settings, regulariser=regulariser, form=form).value(matrix)
    (gradient,) = torch.autograd.grad(value, matrix)
    on_a = f64(reference[f"grad_A_{key}"])
    assert value.item() == pytest.approx(reference[f"objective_{key}"], rel=1e-9)
    assert torch.allclose(gradient, on_a if form == "A" else 2 * f64(reference["G"]) @ on_a, rtol=1e-6, atol=1e-6)


def test_reference_regularisers(reference):
    a, g, c = f64(reference["A"]), f64(reference["G"]), f64(reference["C_matrix"])
    assert regularise(a, "trace").item() == pytest.approx(reference["trace_C_identity_value"], rel=1e-9)
    assert regularise(g, "trace", "G").item() == pytest.approx(reference["trace_C_identity_value"], rel=1e-9)
    x, pairs = f64(reference["X"]), torch.tensor(reference["S"])
    gaps = x[pairs[:, 0]] - x[pairs[:, 1]]
    assert squared_distances(a, gaps).sum().item() == pytest.approx((a @ c).trace().item(), rel=1e-9)


def test_reference_mahalanobis(reference):
    x = np.array(reference["X"])
    distance = Mahalanobis().fit(x).distance(x)
    for pair, expected in reference["mahalanobis_sqrt_pairs"].items():
        i, j = map(int, pair.split(","))
        assert distance[i, j] == pytest.approx(expected, rel=1e-9)


def test_smoothed_hinge_is_smooth_and_close():
    violation = torch.linspace(-2.01, 2, 40, dtype=torch.float64, requires_grad=True)
    for width in (1.0, 0.1):
        smoothed = hinge(violation, width)
        gap = hinge(violation) - smoothed
        assert gap.min() >= -1e-12
        assert gap.max() <= width / 2 + 1e-12
        (slope,) = torch.autograd.grad(smoothed.sum(), violation)
        assert torch.allclose(slope, (violation.detach() / width).clamp(0, 1))


# --- NCA and LMNN -----------------------------------------------------------------------------------------------------


@pytest.fixture
def small():
    rng = np.random.default_rng(1)
    labels = np.arange(24) % 3
    return f64(rng.standard_normal((24, 4)) + labels[:, None]), torch.tensor(labels)


def brute_force(loss: str, x: np.ndarray, y: np.ndarray, a: np.ndarray, targets: np.ndarray, margin: float, lam: float):
    d = np.array([[(p - q) @ a @ (p - q) for q in x] for p in x])
    total = 0.0
    if loss == "nca":
        for i in range(len(x)):
            others = [k for k in range(len(x)) if k != i]
            mass = np.exp(-d[i, others])
            total -= np.log(mass[[y[k] == y[i] for k in others]].sum() / mass.sum())
        return lam * total
    for i, j in targets:
        total += d[i, j] + lam * sum(max(0.0, d[i, j] - d[i, k] + margin) for k in range(len(x)) if y[k] != y[i])
    return total


@pytest.mark.parametrize("loss", ["nca", "lmnn"])
@pytest.mark.parametrize("form", ["A", "G"])
def test_nca_and_lmnn_match_plain_loops(small, loss, form):
    x, labels = small
    g = f64(np.random.default_rng(2).standard_normal((3, 4)) / 2)
    targets = target_neighbours(x, labels, 2)
    regulariser = "scatter" if loss == "lmnn" else "none"
    problem = NeighbourObjective(x, labels, loss, targets, margin=1.3, lam=0.7, regulariser=regulariser, form=form)
    expected = brute_force(loss, x.numpy(), labels.numpy(), (g.T @ g).numpy(), targets.numpy(), 1.3, 0.7)
    start = (g if form == "G" else g.T @ g).clone().requires_grad_(True)
    assert problem.value(start).item() == pytest.approx(expected, rel=1e-9)
    assert torch.autograd.gradcheck(problem.value, start)


def test_target_neighbours_are_the_nearest_of_the_class(small):
    x, labels = small
    found = target_neighbours(x, labels, 3)
    d = torch.cdist(x, x).fill_diagonal_(float("inf")).masked_fill(labels[:, None] != labels, float("inf"))
    expected = d.topk(3, largest=False).indices
    assert torch.equal(found[:, 0], torch.arange(24).repeat_interleave(3))
    assert torch.equal(found[:, 1].reshape(24, 3), expected)


def test_target_neighbours_of_a_class_larger_than_a_block():
    x = f64(np.random.default_rng(0).standard_normal((2100, 2)))
    found = target_neighbours(x, torch.zeros(2100, dtype=torch.int64), 1)
    nearest = torch.cdist(x, x).fill_diagonal_(float("inf")).argmin(1)
    assert torch.equal(found[:, 1], nearest)


def test_singletons_have_no_targets():
    assert len(target_neighbours(torch.eye(3), torch.arange(3), 2)) == 0


# --- batches ----------------------------------------------------------------------------------------------------------


def test_batches_of_constraints_average_to_the_full_objective(small):
    x, labels = small
    constraints = draw_constraints(labels, 50)
    problem = HingeObjective(x, constraints, 0.5, 1.5, margin=1.0, lam=0.3, regulariser="scatter")
    matrix = torch.eye(4, dtype=torch.float64)
    batches = torch.randperm(150, generator=torch.Generator().manual_seed(0)).split(30)
    mean = torch.stack([problem.value(matrix, rows) for rows in batches]).mean()
    assert mean.item() == pytest.approx(problem.value(matrix).item(), rel=1e-12)


def test_batch_of_all_samples_equals_the_full_objective(small):
    x, labels = small
    targets = target_neighbours(x, labels, 2)
    for loss in ("nca", "lmnn"):
        problem = NeighbourObjective(x, labels, loss, targets, regulariser="scatter")
        matrix, rows = torch.eye(4, dtype=torch.float64), torch.randperm(24)
        assert problem.value(matrix, rows).item() == pytest.approx(problem.value(matrix).item(), rel=1e-12)


# --- constraints ------------------------------------------------------------------------------------------------------


def test_drawn_constraints_respect_the_labels():
    labels = torch.tensor([3, 3, 3, 7, 7, 9, 1, 1, 1, 1])
    drawn = draw_constraints(labels, 500)
    (a, b), (c, d), (i, j, k) = drawn.similar.T, drawn.dissimilar.T, drawn.triplets.T
    assert (labels[a] == labels[b]).all()
    assert (a != b).all()
    assert (labels[c] != labels[d]).all()
    assert (labels[i] == labels[j]).all()
    assert (i != j).all()
    assert (labels[i] != labels[k]).all()
    # Every possible pair is drawn: 3*2 + 2*1 + 4*3 ordered pairs of one class, 100 - 9 - 4 - 1 - 16 of two.
    assert len(set(map(tuple, drawn.similar.tolist()))) == 20
    assert len(set(map(tuple, drawn.dissimilar.tolist()))) == 70
    again = draw_constraints(labels, 500)
    assert torch.equal(drawn.triplets, again.triplets)
    assert not torch.equal(drawn.triplets, draw_constraints(labels, 500, seed=1).triplets)


@pytest.mark.parametrize("labels", [[0, 0, 0], [0, 1, 2]])
def test_labels_without_pairs_raise(labels):
    with pytest.raises(DataError, match="Constraints need"):
        draw_constraints(torch.tensor(labels), 5)


def test_malformed_constraints_raise():
    with pytest.raises(DataError, match=r"similar: expected row indices \[n, 2\]"):
        Constraints(similar=[[0, 1, 2]])
    with pytest.raises(DataError, match="triplets"):
        Constraints(triplets=[[0.5, 1.0, 2.0]])
    with pytest.raises(DataError, match="row indices from 0 to 9"):
        Constraints(similar=[[0, 9]]).check(5)
    with pytest.raises(DataError, match="constraints: empty"):
        Constraints().check(5)
    with pytest.raises(ConfigError, match="draw"):
        draw_constraints(torch.tensor([0, 0, 1]), 5, draw="quadruplets")
