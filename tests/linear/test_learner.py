"""MetricLearner: its optimum, its iterates, and its behaviour as a scikit-learn estimator."""

import pickle
from itertools import islice

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.datasets import load_iris, load_wine
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_score
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import nearkin as nk
from nearkin.config.recipe import ModelConfig
from nearkin.errors import ConfigError, DataError
from nearkin.linear import (
    Constraints,
    KernelMetricLearner,
    Mahalanobis,
    MetricLearner,
    WithinClassWhitening,
    draw_constraints,
)
from nearkin.linear.objective import HingeObjective, project_psd, projected_gradient, stochastic_descent
from nearkin.models.embedder import Embedder


@pytest.fixture(scope="module")
def iris():
    x, y = load_iris(return_X_y=True)
    return StandardScaler().fit_transform(x), y


@pytest.fixture(scope="module")
def convex(iris):
    """0.5 |A|^2 + lam * hinges has one minimum; its dual is smooth with box constraints, which SciPy solves."""
    x, y = iris
    constraints, lam = draw_constraints(torch.tensor(y), 40), 0.004
    outer, bound = [], []
    for i, j in constraints.similar.tolist():
        outer.append(np.outer(x[i] - x[j], x[i] - x[j]))
        bound.append(-4.0)
    for i, j in constraints.dissimilar.tolist():
        outer.append(-np.outer(x[i] - x[j], x[i] - x[j]))
        bound.append(12.0)
    for i, j, k in constraints.triplets.tolist():
        outer.append(np.outer(x[i] - x[j], x[i] - x[j]) - np.outer(x[i] - x[k], x[i] - x[k]))
        bound.append(8.0)
    terms, bounds = np.array(outer), np.array(bound)

    def primal(weights):
        values, vectors = np.linalg.eigh(-np.tensordot(weights, terms, 1))
        return (vectors * values.clip(0)) @ vectors.T

    def dual(weights):
        a = primal(weights)
        return 0.5 * (a**2).sum() - weights @ bounds, -(np.einsum("nij,ij->n", terms, a) + bounds)

    box = [(0, lam)] * len(bounds)
    options = {"maxiter": 20000, "maxfun": 50000, "ftol": 1e-15, "gtol": 1e-11}
    found = minimize(dual, np.full(len(bounds), lam / 2), jac=True, bounds=box, method="L-BFGS-B", options=options)
    return constraints, {"upper": 4.0, "lower": 12.0, "margin": 8.0, "lam": lam}, primal(found.x), -found.fun


@pytest.mark.slow
@pytest.mark.parametrize("form", ["A", "G"])
def test_both_forms_reach_the_optimum(iris, convex, form):
    constraints, settings, best, value = convex
    metric = MetricLearner(form=form, scale=False, tol=1e-9, max_iter=2000, **settings)
    metric.fit(iris[0], constraints=constraints)
    assert metric.history_[-1] == pytest.approx(value, rel=1e-4)
    assert metric.history_[-1] >= value - 1e-9  # the dual is a lower bound
    assert np.linalg.norm(metric.matrix - best) < 0.02 * np.linalg.norm(best)


@pytest.mark.parametrize("batches", [False, True])
def test_positive_semi_definite_after_every_step(iris, convex, batches):
    constraints, settings, *_ = convex
    problem = HingeObjective(torch.tensor(iris[0]), constraints, **settings)
    start = torch.diag(torch.tensor([1.0, -1.0, 1.0, 0.0], dtype=torch.float64))  # not positive semi-definite
    if batches:
        steps = stochastic_descent(problem, start, project_psd, 16, 40, 0.5, torch.Generator().manual_seed(0))
    else:
        steps = islice(projected_gradient(problem.value, start, project_psd), 40)
    iterates = [matrix.clone() for matrix, _ in steps]
    assert len(iterates) >= 10
    for matrix in iterates:
        assert torch.allclose(matrix, matrix.T, atol=0)
        assert torch.linalg.eigvalsh(matrix).min() >= -1e-12 * matrix.norm()


def test_projection_is_the_nearest_psd_matrix():
    a = torch.tensor(np.random.default_rng(0).standard_normal((5, 5)))
    nearest = project_psd(a)
    values, vectors = np.linalg.eigh((a + a.T).numpy() / 2)
    assert torch.allclose(nearest, torch.tensor((vectors * values.clip(0)) @ vectors.T))
    assert torch.allclose(project_psd(nearest), nearest)


def test_full_batch_steps_never_increase_the_objective(convex, iris):
    constraints, settings, *_ = convex
    problem = HingeObjective(torch.tensor(iris[0]), constraints, **settings, width=1.0)
    values = [v for _, v in islice(projected_gradient(problem.value, torch.eye(4).double(), project_psd), 60)]
    assert (np.diff(values) <= 0).all()


@pytest.fixture(scope="module")
def noisy():
    """Four classes on a square, in two directions of eight; the other six are noise of ten times the spread."""
    rng = np.random.default_rng(0)
    y = np.arange(800) % 4
    square = np.stack([y % 2, y // 2], 1) * 2 + 0.4 * rng.standard_normal((800, 2))
    return np.concatenate([square, 4 * rng.standard_normal((800, 6))], 1), y


@pytest.mark.parametrize("objective", ["hinge", "nca", "lmnn"])
@pytest.mark.parametrize("form", ["A", "G"])
@pytest.mark.parametrize("batch_size", [None, 64])
def test_learns_to_ignore_noise(noisy, objective, form, batch_size):
    x, y = noisy
    metric = MetricLearner(objective, form=form, batch_size=batch_size, max_iter=60 if batch_size else 20)
    metric.fit(x[:400], y[:400])
    raw, ideal = (nk.score(z[400:], y[400:], similarity="euclidean")["R@1"] for z in (x, x[:, :2]))
    assert raw < 0.45
    assert metric.score(x[400:], y[400:]) > ideal - 0.05


@pytest.mark.parametrize("form", ["A", "G"])
def test_batches_reach_the_full_batch_optimum(noisy, form):
    x, y = noisy
    constraints = draw_constraints(torch.tensor(y), 1000)
    every = torch.arange(len(constraints))
    found = []
    for size in (None, 128):
        metric = MetricLearner(form=form, scale=False, batch_size=size, max_iter=200).fit(x, constraints=constraints)
        problem = HingeObjective(torch.tensor(x), constraints, metric.upper, metric.lower, margin=metric.margin)
        found.append(problem.value(torch.tensor(metric.matrix), every).item())
    assert found[1] < 1.02 * found[0]


@pytest.mark.parametrize("rate", [0.01, 100.0])
def test_stochastic_steps_lower_the_objective(iris, convex, rate):
    constraints, settings, *_ = convex
    problem = HingeObjective(torch.tensor(iris[0]), constraints, **settings)
    start = torch.eye(4, dtype=torch.float64)
    *_, (last, _) = stochastic_descent(problem, start, project_psd, 30, 45, rate, torch.Generator().manual_seed(0))
    assert problem.value(last) < problem.value(start)


def test_low_rank(iris):
    for form in ("A", "G"):
        metric = MetricLearner(form=form, dim=2).fit(*iris)
        assert metric.weight.shape == (2, 4)
        assert np.linalg.matrix_rank(metric.matrix) == 2
        assert metric.score(*iris) > 0.9


@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_result_is_independent_of_units(iris, factor):
    x, y = iris
    a, b = MetricLearner(max_iter=40).fit(x, y), MetricLearner(max_iter=40).fit(x * factor, y)
    assert np.allclose(a.transform(x), b.transform(x * factor), atol=1e-6)


def test_effect_of_the_regularisers(iris):
    x, y = iris
    free, trace, frobenius = (MetricLearner(regulariser=r, lam=1e-3).fit(x, y) for r in ("none", "trace", "frobenius"))
    assert np.trace(trace.matrix) < np.trace(free.matrix)
    assert np.linalg.norm(frobenius.matrix) < np.linalg.norm(free.matrix)
    # The trace, the sum of the eigenvalues, favours a low rank.
    assert np.linalg.eigvalsh(trace.matrix)[0] < 0.01 * np.linalg.eigvalsh(trace.matrix)[-1]


# --- scikit-learn conventions -----------------------------------------------------------------------------------------

FAST = MetricLearner(max_iter=8)


# scikit-learn itself skips check_array_api_input unless SCIPY_ARRAY_API is set; no check is excluded here.
@parametrize_with_checks([WithinClassWhitening(), FAST])
def test_scikit_learn_conventions(estimator, check):
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks(
    [
        Mahalanobis(),
        MetricLearner("lmnn", form="A", max_iter=8),
        MetricLearner("nca", batch_size=8, max_iter=8),
        KernelMetricLearner(metric=FAST),
    ]
)
def test_scikit_learn_conventions_of_the_other_estimators(estimator, check):
    check(estimator)


def test_transform_is_weight_and_bias(iris):
    x, y = iris
    for metric in (Mahalanobis(), WithinClassWhitening(dim=3), MetricLearner(dim=2, max_iter=20)):
        mapped = metric.fit(x, y).transform(x)
        head = torch.nn.functional.linear(torch.tensor(x), metric.weight, metric.bias)
        assert np.allclose(mapped, head.numpy())
        assert np.allclose(mapped.mean(0), 0, atol=1e-9)
        gap = x[0] - x[77]
        assert metric.distance(x[:1], x[77:78])[0, 0] ** 2 == pytest.approx(gap @ metric.matrix @ gap)


def test_metric_as_the_head_of_a_model(iris):
    x, y = torch.tensor(iris[0]).float(), torch.tensor(iris[1])
    # A recipe initialises the head by WithinClassWhitening; any other metric can be loaded into it.
    whitened, loaded = (Embedder(ModelConfig(backbone="none", dim=2, normalize=False), (4, 1, 1)) for _ in range(2))
    whitened.head.init_whitened(x, y, 0.5)
    whitening, learned = WithinClassWhitening(2, 0.5).fit(x.numpy(), y), MetricLearner(dim=2, max_iter=5).fit(*iris)
    loaded.head.maps[0].load_state_dict({"weight": learned.weight, "bias": learned.bias})
    for model, metric in ((whitened, whitening), (loaded, learned)):
        assert np.allclose(model.embed(x).numpy(), metric.transform(x.numpy()), atol=1e-4)


def test_score_is_recall_at_one(iris):
    x, y = iris
    metric = WithinClassWhitening().fit(x, y)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    assert metric.score(x, names) == nk.score(metric.transform(x), y, similarity="euclidean")["R@1"]


@pytest.mark.slow
def test_pipelines_grid_search_and_pickle(iris):
    x, y = load_wine(return_X_y=True)
    pipe = make_pipeline(StandardScaler(), MetricLearner("lmnn", max_iter=60), KNeighborsClassifier(3))
    assert cross_val_score(pipe, x, y, cv=3).mean() > 0.93
    settings, folds = {"shrinkage": [0.01, 1.0], "dim": [1, 3]}, StratifiedKFold(3)
    for labels in (iris[1], iris[1].astype(float)):
        search = GridSearchCV(WithinClassWhitening(), settings, cv=folds, error_score="raise").fit(iris[0], labels)
        assert 0.9 < search.best_score_ < 1.0
    metric = MetricLearner(max_iter=5).fit(*iris)
    assert np.array_equal(pickle.loads(pickle.dumps(metric)).transform(iris[0]), metric.transform(iris[0]))
    assert list(metric.get_feature_names_out()) == [f"metriclearner{i}" for i in range(4)]


@pytest.mark.parametrize("steps", [1, 3, 9])
def test_no_more_than_max_iter_steps(iris, steps):
    assert 1 <= MetricLearner(max_iter=steps, tol=1e-12).fit(*iris).n_iter_ <= steps


def test_data_far_from_the_origin(iris):
    x, y = iris
    near, far = MetricLearner(max_iter=20).fit(x, y), MetricLearner(max_iter=20).fit(x + 1e6, y)
    np.testing.assert_allclose(far.distance(x + 1e6), near.distance(x), atol=1e-3)
    assert MetricLearner(max_iter=20).fit(x + 1e9, y).score(x + 1e9, y) > 0.9


def test_same_seed_gives_the_same_metric(iris):
    a, b, c = (MetricLearner(max_iter=20, batch_size=64, random_state=s).fit(*iris) for s in (0, 0, 1))
    assert np.array_equal(a.weight_, b.weight_)
    assert not np.array_equal(a.weight_, c.weight_)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"objective": "nac"}, ConfigError, "Did you mean 'nca'"),
        ({"regulariser": "l1"}, ConfigError, "regulariser"),
        ({"form": "B"}, ConfigError, "form"),
        ({"dim": 9}, ConfigError, "dim: expected 1 to 4"),
        ({"lam": 0}, ConfigError, "lam"),
        ({"upper": 2.0}, ConfigError, "upper < lower"),
        ({"batch_size": 1}, ConfigError, "batch_size"),
        ({"count": 0}, ConfigError, "at least 1"),
    ],
)
def test_invalid_settings_raise(iris, settings, error, message):
    with pytest.raises(error, match=message):
        MetricLearner(**settings).fit(*iris)


@pytest.mark.filterwarnings("ignore:The number of unique classes")
def test_unusable_data_raise(iris):
    x, _ = iris
    with pytest.raises(DataError, match="same vector"):
        MetricLearner().fit(np.ones((6, 2)), [0, 0, 0, 1, 1, 1])
    for objective in ("hinge", "nca", "lmnn"):
        with pytest.raises(DataError, match="1 class"):
            MetricLearner(objective).fit(x, np.zeros(150))
        with pytest.raises(DataError, match="two samples"):
            MetricLearner(objective).fit(x, np.arange(150))
    with pytest.raises(ValueError, match="requires y"):
        MetricLearner().fit(x)
    with pytest.raises(ConfigError, match="learns from labels"):
        MetricLearner("nca").fit(x, constraints=Constraints(similar=[[0, 1]]))
    with pytest.raises(DataError, match="row indices"):
        MetricLearner().fit(x, constraints=Constraints(similar=[[0, 150]]))
