"""Whitening: against plain NumPy, by the properties of the mapped data, and on edge cases."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers.paths import SHARED

import nearkin as nk
from nearkin.errors import ConfigError, DataError
from nearkin.ops.whitening import covariance_whitening, within_class_whitening


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.arange(90) % 6)
    spread = rng.standard_normal((7, 7)) * [3, 1, 1, 1, 0.3, 0.1, 2]
    x = rng.standard_normal((6, 7))[labels] * 2 + rng.standard_normal((90, 7)) @ spread + 50
    return torch.tensor(x), torch.tensor(labels)


def plain(x: torch.Tensor, labels: torch.Tensor, shrinkage: float) -> tuple[np.ndarray, np.ndarray]:
    """Within-class covariance and whitened, centred data, straight from the definition."""
    x, labels = x.numpy().astype(np.float64), labels.numpy()
    rest = np.concatenate([x[labels == c] - x[labels == c].mean(0) for c in np.unique(labels)])
    within = rest.T @ rest / (len(x) - len(np.unique(labels)))
    shrunk = within + shrinkage * np.trace(within) / len(within) * np.eye(len(within))
    values, vectors = np.linalg.eigh(shrunk)
    return within, (x - x.mean(0)) @ (vectors / np.sqrt(values)) @ vectors.T


@pytest.mark.parametrize("shrinkage", [0.0, 0.3, 5.0])
def test_distances_match_the_definition(data, shrinkage):
    x, labels = data
    weight, bias = within_class_whitening(x, labels, shrinkage=shrinkage)
    _, expected = plain(x, labels, shrinkage)
    mapped = (x @ weight.T + bias).numpy()
    assert np.allclose(mapped @ mapped.T, expected @ expected.T, atol=1e-9)  # up to a rotation


def test_within_class_covariance_is_the_identity_without_shrinkage(data):
    x, labels = data
    weight, _ = within_class_whitening(x, labels, shrinkage=0.0)
    within, _ = plain(x, labels, 0.0)
    assert torch.allclose(weight @ torch.tensor(within) @ weight.T, torch.eye(7, dtype=torch.float64), atol=1e-9)


def test_components_are_centred_uncorrelated_and_ordered(data):
    x, labels = data
    weight, bias = within_class_whitening(x, labels)
    mapped = x @ weight.T + bias
    covariance = torch.cov(mapped.T)
    assert mapped.mean(0).abs().max() < 1e-9
    assert (covariance - covariance.diagonal().diag()).abs().max() < 1e-9
    assert (covariance.diagonal().diff() <= 0).all()


def test_fewer_dimensions_are_the_first_components(data):
    weight, bias = within_class_whitening(*data)
    short, short_bias = within_class_whitening(*data, dim=3)
    assert torch.equal(short, weight[:3])
    assert torch.allclose(short_bias, bias[:3], atol=1e-12)


def test_result_is_independent_of_row_order_and_label_values(data):
    x, labels = data
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    a, b = within_class_whitening(x, labels), within_class_whitening(x[order], 1000 - 7 * labels[order])
    assert torch.allclose(a[0], b[0], atol=1e-9)
    assert torch.allclose(a[1], b[1], atol=1e-8)


def test_result_is_independent_of_the_block_size(monkeypatch, data):
    whole = within_class_whitening(*data)
    monkeypatch.setattr("nearkin.ops.whitening._BLOCK", 11)
    assert torch.allclose(within_class_whitening(*data)[0], whole[0], atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_dtype(data, dtype):
    x, labels = data
    weight, bias = within_class_whitening((x / 50).to(dtype), labels)
    assert weight.dtype == bias.dtype == (torch.float32 if dtype == torch.float16 else dtype)


def test_covariance_whitening_gives_the_mahalanobis_distance(data):
    x, _ = data
    weight, bias = covariance_whitening(x)
    inverse = np.linalg.inv(np.cov(x.numpy().T))
    gap = (x[3] - x[40]).numpy()
    assert float((weight @ (x[3] - x[40])).norm()) == pytest.approx(np.sqrt(gap @ inverse @ gap), rel=1e-9)
    assert torch.allclose(torch.cov((x @ weight.T + bias).T), torch.eye(7, dtype=torch.float64), atol=1e-9)


# --- edge cases -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shrinkage", [0.0, 0.3])
@pytest.mark.parametrize(
    "case", ["fewer samples than features", "constant column", "one class", "a singleton class", "copied column"]
)
def test_finite_for_any_rank(data, case, shrinkage):
    x, labels = data
    if case == "fewer samples than features":
        x, labels = torch.randn(9, 40, generator=torch.Generator().manual_seed(0)), torch.arange(9) // 3
    elif case == "constant column":
        x = torch.cat([x, torch.full((90, 1), 1e6)], 1)
    elif case == "one class":
        labels = torch.zeros_like(labels)
    elif case == "a singleton class":
        labels[0] = 99
    else:
        x = torch.cat([x, x[:, :1]], 1)
    weight, bias = within_class_whitening(x, labels, shrinkage=shrinkage)
    mapped = x @ weight.T + bias
    assert torch.isfinite(weight).all()
    assert torch.isfinite(bias).all()
    assert mapped.abs().max() < 1e4  # no direction is amplified by rounding


def test_one_class_is_the_whitening_of_that_class(data):
    x, labels = data
    weight, _ = within_class_whitening(x, torch.zeros_like(labels), shrinkage=0.0)
    other, _ = covariance_whitening(x)
    assert torch.allclose(weight.T @ weight, other.T @ other, atol=1e-9)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dim": 8}, ConfigError, "dim: expected 1 to 7"),
        ({"dim": 0}, ConfigError, "dim"),
        ({"shrinkage": -0.1}, ConfigError, "shrinkage"),
        ({"shrinkage": float("nan")}, ConfigError, "shrinkage"),
        ({"labels": torch.arange(90)}, DataError, "no class has two samples"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, DataError, "90 embeddings but 3 labels"),
        ({"features": torch.full((90, 7), 0.1, dtype=torch.float64)}, DataError, "variance"),
        ({"features": torch.full((90, 7), float("nan"))}, DataError, "NaN"),
        ({"features": torch.arange(630.0).reshape(90, 7).double() * 1e200}, DataError, "1e150"),
        ({"features": torch.arange(630).reshape(90, 7)}, DataError, "float tensor"),
    ],
)
def test_invalid_input_raises(data, change, error, message):
    arguments = {"features": data[0], "labels": data[1], **change}
    with pytest.raises(error, match=message):
        within_class_whitening(arguments.pop("features"), arguments.pop("labels"), **arguments)


@pytest.mark.slow
def test_works_without_scikit_learn():
    code = """if True:
        import sys
        sys.modules["sklearn"] = None  # as if it were not installed
        import nearkin.ops.whitening
        from nearkin.errors import MissingExtraError
        try:
            import nearkin.linear
        except MissingExtraError as error:
            print(error)
    """
    lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.splitlines()
    assert len(lines) == 1
    assert "nearkin[bench]" in lines[0]


def recall_of_unseen_classes(x: torch.Tensor, labels: torch.Tensor, dim: int) -> tuple[float, float]:
    """R@1 on the second half of the classes, raw and whitened on the first half."""
    train = labels < (int(labels.max()) + 1) // 2
    weight, bias = within_class_whitening(x[train], labels[train], dim=dim)
    raw = nk.score(x[~train], labels[~train], ks=(1,))["R@1"]
    return raw, nk.score(x[~train] @ weight.T + bias, labels[~train], ks=(1,))["R@1"]


def test_raises_recall_of_unseen_classes():
    rng = np.random.default_rng(0)
    labels = torch.arange(40).repeat_interleave(15)
    spread = np.where(np.arange(24) < 6, 4.0, 0.7)  # most variance within classes lies in six shared directions
    x = torch.from_numpy(rng.standard_normal((40, 24))[labels] + spread * rng.standard_normal((600, 24)))
    raw, whitened = recall_of_unseen_classes(x, labels, dim=16)
    assert raw < 0.5
    assert whitened > raw + 0.1


@pytest.mark.slow
def test_raises_recall_on_cub():
    path = SHARED / "data" / "cub_efficientnet_lite0_224.npz"
    if not path.exists():
        pytest.skip(f"{path} is missing: features of the CUB photos")
    with np.load(path) as file:
        x, labels = torch.tensor(file["features"]).float(), torch.tensor(file["labels"]).long()
    raw, whitened = recall_of_unseen_classes(x, labels, dim=512)
    assert raw == pytest.approx(0.5788, abs=5e-4)
    assert whitened >= 0.595


def test_directions_beyond_the_rank_do_not_depend_on_rounding():
    """Few samples, many dimensions: the map of new samples must not depend on the last bits of the training data."""
    rng = np.random.default_rng(0)
    labels = torch.arange(6).repeat_interleave(5)
    x = torch.from_numpy(rng.standard_normal((30, 64)) + rng.standard_normal((6, 64))[labels])
    fresh = torch.from_numpy(rng.standard_normal((20, 64)))
    maps = []
    for noise in (0.0, 1e-12):
        weight, bias = within_class_whitening(
            x + noise * torch.from_numpy(rng.standard_normal((30, 64))), labels, dim=48
        )
        mapped = fresh @ weight.T + bias
        maps.append(mapped @ mapped.T)
        np.testing.assert_allclose((x @ weight.T + bias)[:, 29:], 0, atol=1e-6)  # constant 0 on the data itself
    np.testing.assert_allclose(maps[0], maps[1], rtol=1e-6, atol=1e-6)
