"""Kernels: reference distances, equivalence with the linear metric, Nystrom landmarks, and the XOR example."""

import importlib.util
import sys

import numpy as np
import pytest
from helpers.paths import ROOT
from helpers.rows import golden
from sklearn.datasets import load_iris, make_circles
from sklearn.metrics.pairwise import laplacian_kernel, linear_kernel
from sklearn.neighbors import KNeighborsClassifier

from nearkin.errors import ConfigError, DataError
from nearkin.linear import Constraints, KernelMetricLearner, MetricLearner, WithinClassWhitening, kernel_distance
from nearkin.linear.kernel import gaussian, polynomial


@pytest.mark.parametrize(
    ("key", "kernel"),
    [
        ("kernel_distance_poly_c1_d3", lambda a, b: polynomial(a, b, degree=3, constant=1.0)),
        ("kernel_distance_gaussian_sigma1.5", lambda a, b: gaussian(a, b, sigma=1.5)),
    ],
)
def test_reference_distances(key, kernel):
    reference = golden()["classical_metric_learning"]
    x = np.array(reference["X"])
    distance = kernel_distance(x, x, kernel)
    for pair, expected in reference[key].items():
        i, j = map(int, pair.split(","))
        assert distance[i, j] == pytest.approx(expected, rel=1e-9)
    assert np.abs(np.diagonal(distance)).max() < 1e-6


def test_linear_kernel_gives_euclidean_distances():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((40, 3)), rng.standard_normal((5, 3))
    assert np.allclose(kernel_distance(x, y, linear_kernel), np.linalg.norm(x[:, None] - y, axis=2))


def test_linear_kernel_with_all_landmarks_equals_the_linear_metric():
    x, y = load_iris(return_X_y=True)
    x = x - x.mean(0)
    plain = MetricLearner(form="A", max_iter=200).fit(x, y)
    kernel = KernelMetricLearner(linear_kernel, landmarks=None, metric=MetricLearner(form="A", max_iter=200)).fit(x, y)
    assert np.allclose(kernel.distance(x), plain.distance(x), rtol=1e-3, atol=1e-3)


def test_mapped_inner_products_equal_the_kernel_on_the_landmarks():
    x, y = load_iris(return_X_y=True)
    metric = KernelMetricLearner(sigma=0.8, landmarks=None, metric=MetricLearner(max_iter=1)).fit(x[::3], y[::3])
    values = metric._columns(x[::3])
    root = np.linalg.pinv(metric.metric_.weight_) @ metric.weight_  # undo the metric: columns -> feature space
    assert np.allclose(values @ root.T @ root @ values.T, gaussian(x[::3], x[::3], 0.8), atol=1e-5)
    # The learned distance of kernel columns, with a positive semi-definite matrix.
    gap = values[0] - values[20]
    assert metric.distance(x[:1], x[60:61])[0, 0] ** 2 == pytest.approx(gap @ metric.matrix @ gap, rel=1e-6)
    assert np.linalg.eigvalsh(metric.matrix).min() > -1e-9 * np.linalg.norm(metric.matrix)


def test_few_landmarks_are_nearly_as_good_as_all():
    x, y = make_circles(400, noise=0.08, factor=0.5, random_state=0)
    recalls = []
    for landmarks in (None, 40):
        metric = KernelMetricLearner(sigma=0.5, landmarks=landmarks, metric=WithinClassWhitening(dim=1)).fit(
            x[:200], y[:200]
        )
        assert metric.weight_.shape == (1, landmarks or 200)
        recalls.append(metric.score(x[200:], y[200:]))
    assert min(recalls) > 0.95


@pytest.mark.parametrize("kernel", ["gaussian", "polynomial", laplacian_kernel])
def test_metric_in_the_space_of_any_kernel(kernel):
    x, y = make_circles(60, noise=0.05, factor=0.4, random_state=0)
    metric = KernelMetricLearner(kernel, degree=2, metric=MetricLearner(max_iter=40)).fit(x, y)
    near = KNeighborsClassifier(5, metric="precomputed").fit(metric.distance(x), y)
    assert near.score(metric.distance(x), y) > 0.95


def test_learns_from_constraints():
    x = np.array([[0.0], [1.0], [2.0], [3.0]])
    constraints = Constraints(similar=[[0, 3], [1, 2]], dissimilar=[[0, 1], [2, 3]])
    metric = KernelMetricLearner("gaussian", sigma=0.7, metric=MetricLearner(lam=100.0, max_iter=2000))
    d = metric.fit(x, constraints=constraints).distance(x)
    assert max(d[0, 3], d[1, 2]) < min(d[0, 1], d[2, 3])


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"kernel": "gausian"}, ConfigError, "Did you mean 'gaussian'"),
        ({"kernel": "polynomial", "degree": 1.5}, ConfigError, "positive semi-definite"),
        ({"kernel": "polynomial", "degree": 400}, DataError, "infinite"),
        ({"sigma": 0.0}, ConfigError, "sigma"),
        ({"landmarks": 0}, ConfigError, "landmarks"),
        ({"kernel": lambda a, b: -(a @ b.T)}, DataError, "not positive semi-definite"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow")
def test_invalid_settings_raise(settings, error, message):
    x, y = load_iris(return_X_y=True)
    with pytest.raises(error, match=message):
        KernelMetricLearner(**settings).fit(x, y)


# --- XOR --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def xor():
    spec = importlib.util.spec_from_file_location("draw_xor", ROOT / "docs" / "draw_xor.py")
    module = sys.modules["draw_xor"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_linear_metric_solves_xor():
    corners = np.array([[-1, -1], [1, 1], [-1, 1], [1, -1]])
    rng = np.random.default_rng(0)
    for _ in range(20):
        g = rng.standard_normal((2, 2))
        d = (((corners[:, None] - corners) @ g.T) ** 2).sum(2)
        # The parallelogram law: in any metric the two diagonals (same class) sum to the four sides (other class).
        assert d[0, 1] + d[2, 3] == pytest.approx(d[:2, 2:].sum())


def test_kernel_solves_xor_and_the_figure_is_drawn(xor, tmp_path):
    results = xor.compare()
    assert results["linear"].quality < 0.65
    assert results["kernel"].quality > 0.98
    xor.draw(results, tmp_path / "xor.png")
    assert 5_000 < (tmp_path / "xor.png").stat().st_size < 100_000


def test_gaussian_kernel_far_from_the_origin():
    x = np.random.default_rng(0).normal(size=(50, 4))
    want = np.exp(-((x[:, None] - x[None]) ** 2).sum(-1) / 2)
    far = (x + 5000).astype(np.float32)
    np.testing.assert_allclose(gaussian(far, far), want, atol=2e-3)  # the effect of rounding x to float32


def test_constraints_require_a_metric_learner():
    x = np.random.default_rng(0).normal(size=(8, 2))
    constraints = Constraints(similar=np.array([[0, 1]]), dissimilar=np.array([[0, 2]]))
    with pytest.raises(ConfigError, match="WithinClassWhitening learns from labels"):
        KernelMetricLearner(metric=WithinClassWhitening()).fit(x, constraints=constraints)
