"""Planted label errors and planted duplicates are found; edge cases are handled."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.paths import SHARED

from nearkin.analysis.hardness import find_duplicates
from nearkin.analysis.label_errors import LabelErrors, find_label_errors
from nearkin.errors import ConfigError, DataError

FEATURES = SHARED / "data" / "cub_efficientnet_lite0_224.npz"


def blobs(classes: int = 12, per: int = 25, dim: int = 24, noise: float = 1.0, seed: int = 0):
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), per)
    centres = rng.standard_normal((classes, dim))
    # Most of the variance within classes lies in a few directions that carry no class information.
    spread = noise * np.where(np.arange(dim) < 4, 4.0, 0.7)
    return centres[labels] + spread * rng.standard_normal((len(labels), dim)), labels


def plant_errors(labels: np.ndarray, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    classes = int(labels.max()) + 1
    rows = rng.choice(len(labels), round(share * len(labels)), replace=False)
    changed = labels.copy()
    changed[rows] = (labels[rows] + rng.integers(1, classes, len(rows))) % classes
    return changed, rows


def hits(errors: LabelErrors, rows: np.ndarray) -> float:
    return float(np.isin(errors.order[: len(rows)], rows).mean())


# --- planted errors ---------------------------------------------------------------------------------------------------


def test_planted_errors_rank_first_with_their_true_class():
    x, labels = blobs(noise=0.5)
    changed, rows = plant_errors(labels, 0.05, seed=1)
    errors = find_label_errors(x, changed)
    assert hits(errors, rows) == 1.0
    assert (errors.suggested[rows] == labels[rows]).all()
    assert (errors.probability[rows] > 0.9).all()
    assert errors.expected(len(rows)) == pytest.approx(len(rows), rel=0.1)
    assert errors.error_rate == pytest.approx(0.05, abs=0.01)
    assert errors.rank[errors.order].tolist() == list(range(1, len(x) + 1))


def test_clean_labels_are_not_flagged():
    x, labels = blobs(noise=0.5)
    errors = find_label_errors(x, labels)
    assert errors.error_rate < 0.005
    assert errors.probability.max() < 0.5


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3])
def test_expected_number_is_calibrated_for_random_errors(share):
    x, labels = blobs(per=60, noise=1.0)
    changed, rows = plant_errors(labels, share, seed=2)
    errors = find_label_errors(x, changed)
    assert errors.error_rate == pytest.approx(share, rel=0.25)
    top = len(rows)
    assert errors.expected(top) / top == pytest.approx(hits(errors, rows), abs=0.12)


def test_random_features_give_a_high_error_rate():
    labels = np.repeat(np.arange(10), 30)
    errors = find_label_errors(np.random.default_rng(0).standard_normal((300, 16)), labels)
    assert errors.error_rate > 0.3  # the embeddings do not separate the classes


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_planted_errors_in_cub(seed):
    if not FEATURES.exists():
        pytest.skip(f"{FEATURES} is missing: features of the CUB photos")
    with np.load(FEATURES) as stored:
        x, labels = stored["features"], stored["labels"].astype(np.int64)
    changed, rows = plant_errors(labels, 0.03, seed)
    errors = find_label_errors(x, changed)
    assert hits(errors, rows) >= 0.83
    assert 0.02 < errors.error_rate < 0.05


# --- scores against the definition ------------------------------------------------------------------------------------


def test_scores_match_plain_loops(monkeypatch):
    """Log odds by the definition, with the chosen whitening: the row is left out of its own class mean only."""
    from nearkin.analysis import label_errors

    x, labels = blobs(classes=4, per=8, dim=5, noise=0.6)
    recorded = {}
    choose = label_errors._choose_hyperparameters

    def record(data, *rest):
        recorded["chosen"], recorded["data"] = choose(data, *rest), data
        return recorded["chosen"]

    monkeypatch.setattr(label_errors, "_choose_hyperparameters", record)
    errors = find_label_errors(x, labels, folds=3)
    (shrinkage, temperature), fold = recorded["chosen"], recorded["data"].fold.numpy()
    f = x / np.linalg.norm(x, axis=1, keepdims=True)
    f = f - f.mean(0)
    odds = []
    for i in range(len(x)):
        others = fold != fold[i]
        own_means = np.stack([f[others & (labels == c)].mean(0) for c in range(4)])
        gap = f[others] - own_means[labels[others]]
        within = gap.T @ gap
        within = (1 - shrinkage) * within / np.trace(within) * 5 + shrinkage * np.eye(5)
        w = np.linalg.inv(np.linalg.cholesky(within))
        means = [f[(labels == c) & (np.arange(len(x)) != i)].mean(0) @ w.T for c in range(4)]
        z = f[i] @ w.T
        logits = temperature * np.array([z @ m / np.linalg.norm(z) / np.linalg.norm(m) for m in means])
        p = np.exp(logits) / np.exp(logits).sum()
        odds.append(math.log((1 - p[labels[i]]) / p[labels[i]]))
        logits[labels[i]] = -np.inf
        assert errors.suggested[i] == logits.argmax()
    # The score adds one constant to these odds, that of the error rate.
    constant = errors.score - np.array(odds)
    assert np.ptp(constant) < 1e-3


def test_result_is_independent_of_memory_and_types():
    x, labels = blobs(classes=250, per=4, dim=16)
    changed, _ = plant_errors(labels, 0.05, seed=3)
    errors = find_label_errors(x, changed)
    small = find_label_errors(
        torch.tensor(x, dtype=torch.float32), changed.tolist(), memory="1MB"
    )  # 125 rows at a time
    np.testing.assert_allclose(small.score, errors.score, rtol=1e-4, atol=1e-3)
    named = find_label_errors(x, np.array([f"class {c:03d}" for c in changed]))
    np.testing.assert_array_equal(named.score, errors.score)
    assert named.suggested.tolist() == [f"class {c:03d}" for c in errors.suggested]


# --- edge cases -------------------------------------------------------------------------------------------------------


def test_classes_of_one_and_two_rows():
    x, labels = blobs(classes=6, noise=0.3)
    labels[0], labels[1], labels[2] = 90, 91, 91  # a class of one row and one of two rows, all three really of class 0
    with np.errstate(all="raise"):
        errors = find_label_errors(x, labels)
    assert math.isnan(errors.score[0])
    assert errors.order[-1] == 0
    assert np.isfinite(np.delete(errors.score, 0)).all()
    assert errors.suggested[0] in (0, 91)
    assert math.isfinite(errors.expected(len(x)))


def test_two_classes_and_three_rows():
    errors = find_label_errors([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]], ["a", "a", "b"])
    assert errors.suggested.tolist() == ["b", "b", "a"]
    assert math.isnan(errors.score[2])


def test_identical_and_zero_rows():
    labels = np.repeat([0, 1], 6)
    for x in (np.ones((12, 4)), np.zeros((12, 4)), np.repeat(np.eye(2), 6, axis=0)):
        errors = find_label_errors(x, labels)
        assert np.isfinite(errors.score).all()
        assert np.isfinite(errors.probability).all()


@pytest.mark.parametrize(
    ("x", "labels", "message"),
    [
        (np.eye(3), [1, 1, 1], "all rows are of one class"),
        (np.eye(3), [1, 2, 3], "every class has one row"),
        (np.eye(3), [1, 2], "2 labels for 3 rows"),
        (np.eye(3) * np.nan, [1, 1, 2], "NaN in 3 of 3 rows"),
        (np.eye(3), [0.5, 1.5, 2.5], "expected integers or strings"),
        (np.zeros((0, 3)), [], "nothing to rank"),
    ],
)
def test_invalid_data_raises(x, labels, message):
    with pytest.raises(DataError, match=message):
        find_label_errors(x, labels)


def test_invalid_settings_raise():
    with pytest.raises(ConfigError, match="folds"):
        find_label_errors(np.eye(4), [0, 0, 1, 1], folds=1)
    with pytest.raises(ConfigError, match="threshold"):
        find_duplicates(np.eye(4), [0, 0, 1, 1], threshold=96)


def test_progress_reaches_one():
    x, labels = blobs()
    fractions: list[float] = []
    find_label_errors(x, labels, progress=fractions.append)
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


# --- CSV --------------------------------------------------------------------------------------------------------------


def read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_csv_has_the_order_and_no_formulas(tmp_path):
    x, labels = blobs(classes=6, noise=0.3)
    changed, rows = plant_errors(labels, 0.05, seed=4)
    errors = find_label_errors(x, changed)
    names = ["=HYPERLINK(1)", "+1", "-2+3", "@SUM(A1)", " =1", 'a, "quoted"\nname']
    paths = [f"=photos/{i}.jpg" if i % 2 else f"photos/ü {i}.jpg" for i in range(len(x))]
    target = tmp_path / "label_errors.csv"
    errors.to_csv(target, paths=paths, class_names=names, top=20)
    got = read(target)
    assert [int(r["rank"]) for r in got] == list(range(1, 21))
    assert [int(r["row"]) for r in got] == errors.order[:20].tolist()
    for r in got:
        row = int(r["row"])
        assert r["path"].removeprefix("'") == paths[row]
        assert r["label"].removeprefix("'") == names[changed[row]]
        assert float(r["score"]) == pytest.approx(errors.score[row], abs=1e-4)
        for cell in (r["path"], r["label"], r["suggested"]):
            assert cell.strip()[0] not in "=+-@"
    assert {int(r["row"]) for r in got[: len(rows)]} == set(rows.tolist())


def test_csv_without_names_and_with_invalid_names(tmp_path):
    x, labels = blobs(classes=3)
    errors = find_label_errors(x, labels)
    errors.to_csv(tmp_path / "all.csv")
    got = read(tmp_path / "all.csv")
    assert len(got) == len(x)
    assert "path" not in got[0]
    assert {r["label"] for r in got} == {"0", "1", "2"}
    errors.to_csv(tmp_path / "all.csv", class_names={0: "a", 1: "b", 2: "c"}, top=1)
    assert read(tmp_path / "all.csv")[0]["label"] in "abc"
    with pytest.raises(DataError, match="no name for label"):
        errors.to_csv(tmp_path / "no.csv", class_names=["only one"])
    with pytest.raises(DataError, match="paths: 1 for 75 rows"):
        errors.to_csv(tmp_path / "no.csv", paths=["x"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["all.csv"]


# --- duplicates -------------------------------------------------------------------------------------------------------


def test_planted_duplicates_are_found():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((500, 64)).astype(np.float32)
    labels = np.arange(500) % 7
    x[10] = x[400]  # labels 3 and 1
    x[20] = 2 * x[27]  # the same direction and label, another norm
    x[30] = x[44] + 0.05 * rng.standard_normal(64)
    duplicates = find_duplicates(x, labels, memory="1MB")  # two blocks
    assert [(d.first, d.second, d.exact, d.same_label) for d in duplicates] == [
        (10, 400, True, False),
        (20, 27, False, True),
        (30, 44, False, True),
    ]
    assert duplicates[0].similarity == 1.0
    want = float(np.corrcoef(x[30], x[44])[0, 1])
    assert duplicates[2].similarity == pytest.approx(want, abs=2e-3)
    everything = find_duplicates(x[:60], labels[:60], threshold=-1.0)
    assert len(everything) == 60 * 59 // 2


def test_too_many_pairs_raise():
    x = np.ones((300, 4)) + 1e-4 * np.random.default_rng(0).standard_normal((300, 4))
    with pytest.raises(DataError, match=r"more than 10,000 pairs are as similar as 0\.96"):
        find_duplicates(x, np.zeros(300, dtype=int))


def test_zero_rows_are_not_duplicates():
    assert find_duplicates(np.zeros((4, 3)), [0, 0, 1, 1]) == []


def test_known_duplicates_in_cub():
    if not FEATURES.exists():
        pytest.skip(f"{FEATURES} is missing: features of the CUB photos")
    with np.load(FEATURES) as stored:
        # One duplicate within a class, and one photo with two different labels.
        inside = np.isin(stored["labels"], [1, 21, 104])
        x, labels, paths = (stored[key][inside] for key in ("features", "labels", "paths"))
    duplicates = find_duplicates(x, labels)
    assert [(d.same_label, {Path(str(paths[i])).stem for i in (d.first, d.second)}) for d in duplicates] == [
        (False, {"Chuck_Will_Widow_0042_796983", "Whip_Poor_Will_0002_796427"}),
        (True, {"Laysan_Albatross_0065_809", "Laysan_Albatross_0096_673"}),
    ]
