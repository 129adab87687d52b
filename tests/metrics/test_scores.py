"""Metrics against golden values, enumerated tie orders, other libraries and scikit-learn."""

import json

import numpy as np
import pytest
import torch
from helpers.oracle import clustered, metric, orders, tie_groups
from helpers.paths import GOLDEN
from hypothesis import given, settings
from hypothesis import strategies as st

import nearkin as nk
from nearkin.errors import ConfigError, DataError, UnknownNameError
from nearkin.metrics import retrieval, scores
from nearkin.metrics.ranking import Ranking, rank

NAMES = [
    "R@1",
    "R@3",
    "P@2",
    "P@5",
    "RP",
    "MAP@R",
    "MAP",
    "MAP@3",
    "MAP@3/k",
    "MAP@3/R",
    "MAP@3/hits",
    "nDCG@1",
    "nDCG@4",
]
NAMES += ["MRR", "MAP@6/hits", "R@50", "P@50", "nDCG@50", "MAP@50", "MAP@50/hits"]


def golden(part):
    return json.loads(GOLDEN.read_text())[part]


def golden_name(key):
    """Translate a metric name of the golden file."""
    kind, _, k = key.partition("@")
    plain = {"R-precision": "RP", "MAP@R": "MAP@R", "MAP_full(div R)": "MAP"}
    at = {"R": "R@", "P": "P@", "ndcg": "nDCG@", "map_div_k": "MAP@", "map_div_min": "MAP@", "map_div_R": "MAP@"}
    after = {"map_div_k": "/k", "map_div_R": "/R"}
    return plain.get(key) or at[kind] + k + after.get(kind, "")


@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize(
    ("singletons", "part"), [("zero", "all_queries_lone_score_0"), ("exclude", "excluding_lone_queries")]
)
def test_golden_retrieval(backend, singletons, part):
    g = golden("metrics")
    scores = nk.score(np.array(g["embeddings"]), g["labels"], singletons=singletons, backend=backend)
    want = g["retrieval"][part]
    assert int((~np.isnan(scores.per_query["R@1"])).sum()) == want.pop("n_queries")
    for key, value in want.items():
        assert scores[golden_name(key)] == pytest.approx(value, abs=1e-12), key


def test_singletons_are_misses_or_excluded_by_default():
    g = golden("metrics")
    scores = nk.score(np.array(g["embeddings"]), g["labels"])
    zero, exclude = g["retrieval"]["all_queries_lone_score_0"], g["retrieval"]["excluding_lone_queries"]
    assert scores["R@1"] == pytest.approx(zero["R@1"], abs=1e-12)
    assert scores["P@5"] == pytest.approx(zero["P@5"], abs=1e-12)
    for key in ("MAP@R", "R-precision", "ndcg@8", "map_div_min@4"):
        assert scores[golden_name(key)] == pytest.approx(exclude[key], abs=1e-12)
    assert any("63.33 with them, 64.41 without" in note for note in scores.notes)
    assert "1 of 60 queries have no relevant item" in scores.table()


def test_golden_table_3():
    names = {
        "recall": "R@10",
        "precision": "P@10",
        "r_precision": "RP",
        "map_at_r": "MAP@R",
        "map_at_k_div_k": "MAP@10/k",
    }
    names |= {"map_at_k_div_min": "MAP@10", "map_at_k_div_R": "MAP@10/R", "map_at_k_div_hits": "MAP@10/hits"}
    names |= {"ndcg": "nDCG@10", "map_at_k_div_k": "MAP@10/k"}
    for row in golden("S3_table3"):
        flags = row["rel"] + [0] * 90
        for index in range(len(flags) - 1, len(flags) - 1 - (row["R"] - sum(row["rel"])), -1):
            flags[index] = 1  # relevant items that were not found rank last
        r = ranking_without_ties(flags)
        for key, value in row["exact"].items():
            assert 100 * retrieval.evaluate_metric(r, names[key])[0] == pytest.approx(value, abs=1e-9), key


def ranking_without_ties(flags):
    above = np.nonzero(flags)[0]
    ones = np.ones(len(above), dtype=np.int64)
    start = np.array([0, len(above)])
    return Ranking(start, above, ones, ones, np.array([len(flags)]), np.array([0]), np.array(["a"]))


@settings(derandomize=True, deadline=None, max_examples=80)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=7))
def test_expectation_and_bounds_over_all_orders_of_ties(pairs):
    items = sorted(pairs, key=lambda item: -item[0])
    if not any(flag for _, flag in items):
        return
    above, relevant, size = (np.array(v) for v in zip(*tie_groups(items), strict=True))
    r = Ranking(
        np.array([0, len(above)]), above, relevant, size, np.array([len(items)]), np.array([0]), np.array(["a"])
    )
    allowed = list(orders(items))
    for name in NAMES:
        values = [metric(name, flags) for flags in allowed]
        assert retrieval.evaluate_metric(r, name)[0] == pytest.approx(np.mean(values), abs=1e-12), name
        low, high = retrieval.metric_bounds(r, name)
        assert low[0] == pytest.approx(min(values), abs=1e-12), name
        assert high[0] == pytest.approx(max(values), abs=1e-12), name


def test_large_tie_groups_stay_accurate():
    # One relevant item among n equals: the expectations are known in closed form.
    n = 50_000
    r = Ranking(*(np.array(v) for v in ([0, 1], [0], [1], [n], [n], [0], ["a"])))
    assert retrieval.recall(r, 1000)[0] == pytest.approx(1000 / n, rel=1e-12)
    assert retrieval.reciprocal_rank(r)[0] == pytest.approx(np.sum(1 / np.arange(1, n + 1)) / n, rel=1e-12)
    half = Ranking(*(np.array(v) for v in ([0, 1], [0], [n // 2], [n], [n], [0], ["a"])))
    assert retrieval.recall(half, 2)[0] == pytest.approx(1 - (n / 2) * (n / 2 - 1) / (n * (n - 1)), rel=1e-12)
    assert retrieval.r_precision(half)[0] == pytest.approx(0.5, rel=1e-12)


def test_perfect_retrieval_scores_exactly_one():
    x = np.repeat(np.eye(6), 5, axis=0)
    scores = nk.score(x, np.arange(30) // 5, ks=(1, 3, 4, 10))
    for name in ("R@1", "P@4", "RP", "MAP@R", "MAP", "MAP@3", "MAP@10", "nDCG@4", "nDCG@10", "MRR"):
        assert scores[name] == 1.0, name


@pytest.mark.parametrize("name", NAMES)
def test_each_metric_is_available_by_name(name):
    x, labels = clustered(30, 4, samples_per_class=3, noise=1.0)
    assert 0 <= nk.score(x, labels, ks=())[name] <= 1


def test_agrees_with_pytorch_metric_learning():
    from pytorch_metric_learning.distances import CosineSimilarity
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
    from pytorch_metric_learning.utils.inference import CustomKNN

    x, labels = clustered(200, 16, samples_per_class=8, noise=1.5)
    expected = AccuracyCalculator(
        include=("precision_at_1", "r_precision", "mean_average_precision_at_r", "mean_reciprocal_rank"),
        k="max_bin_count",
        knn_func=CustomKNN(CosineSimilarity()),
        device=torch.device("cpu"),
    ).get_accuracy(torch.tensor(x), torch.tensor(labels))
    scores = nk.score(x, labels)
    assert scores["P@1"] == pytest.approx(expected["precision_at_1"], abs=1e-7)
    assert scores["RP"] == pytest.approx(expected["r_precision"], abs=1e-6)
    assert scores["MAP@R"] == pytest.approx(expected["mean_average_precision_at_r"], abs=1e-6)


def test_agrees_with_scikit_learn():
    from sklearn.metrics import average_precision_score, ndcg_score

    x, labels = clustered(60, 8, samples_per_class=6, noise=1.5)
    x = x.astype(np.float64)
    scores = nk.score(x, labels)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    for i in range(0, 60, 7):
        others = np.arange(60) != i
        sim, same = (unit @ unit[i])[others], (labels == labels[i])[others]
        assert scores.per_query["MAP"][i] == pytest.approx(average_precision_score(same, sim), abs=1e-12)
        for k in (1, 8, 40):
            want = ndcg_score(same[None].astype(int), sim[None], k=k)
            assert scores.per_query[f"nDCG@{k}"][i] == pytest.approx(want, abs=1e-12)


# ------------------------------------------------------------------------------------------------------------ Scores


def test_unknown_metric_raises_with_a_suggestion():
    x, labels = clustered(30, 4, samples_per_class=3, noise=1.0)
    scores = nk.score(x, labels)
    for name, message in {
        "r@1": "Did you mean 'R@1'",
        "ndcg8": "Did you mean 'nDCG@8'",
        "accuracy": "Available: R@k",
    }.items():
        with pytest.raises(UnknownNameError, match=message):
            scores[name]
    for name in ("R@0", "R@1/k", "R@-1", "MAP@"):
        with pytest.raises(UnknownNameError):
            scores[name]


def test_invalid_settings_raise():
    x, labels = clustered(30, 4, samples_per_class=3, noise=1.0)
    with pytest.raises(ConfigError, match="singletons: expected 'auto', 'exclude' or 'zero', got 'ignore'"):
        nk.score(x, labels, singletons="ignore")
    with pytest.raises(ConfigError, match="singletons: expected 'auto'"):
        scores.Scores.of(rank(x, labels), singletons="ignore")
    with pytest.raises(ConfigError, match="ks: expected integers of at least 1"):
        nk.score(x, labels, ks=(0, 1))


@pytest.mark.parametrize("labels", ["int", "str", "big"])
def test_save_and_load(tmp_path, labels):
    x, ids = clustered(31, 4, samples_per_class=3, noise=1.0)
    given_labels = {"int": ids, "str": [f"c{i}" for i in ids], "big": [2**70 + int(i) for i in ids]}[labels]
    scores = nk.score(x, given_labels, ks=(1, 5))
    scores.save(tmp_path / "per_query.npz")
    assert [p.name for p in tmp_path.iterdir()] == ["per_query.npz"]
    back = nk.Scores.load(tmp_path / "per_query.npz")
    assert list(back.per_query) == list(scores.per_query)
    for name in scores.per_query:
        np.testing.assert_array_equal(back.per_query[name], scores.per_query[name])
    assert back.table() == scores.table()
    assert back.notes == scores.notes
    assert back.singletons == scores.singletons
    assert nk.compare(scores, back, "R@1").difference == 0.0
    with pytest.raises(UnknownNameError, match="in these scores"):
        back["R@3"]
    with pytest.raises(ConfigError, match="bounds"):
        back.bounds("R@1")


@pytest.mark.parametrize(("old", "new"), [("auto", "auto"), ("drop", "exclude"), ("keep", "zero")])
def test_load_reads_files_with_the_former_name_of_singletons(tmp_path, old, new):
    about = f'{{"ks": [1], "lone": "{old}", "similarity": "cosine", "notes": []}}'
    np.savez(tmp_path / "old.npz", **{"labels": np.arange(3), "about": about, "R@1": np.ones(3)})
    scores = nk.Scores.load(tmp_path / "old.npz")
    assert (scores.singletons, scores["R@1"]) == (new, 1.0)


def test_load_never_unpickles(tmp_path):
    np.savez(tmp_path / "bad.npz", labels=np.array([{}], dtype=object), about="{}")
    with pytest.raises(DataError, match="without pickling"):
        nk.Scores.load(tmp_path / "bad.npz")
    (tmp_path / "noise.npz").write_bytes(b"nothing")
    np.savez(tmp_path / "odd.npz", labels=np.arange(3), about='{"colour": 1}')
    np.savez(tmp_path / "torn.npz", labels=np.arange(3), about="{")
    np.savez(tmp_path / "other.npz", values=np.arange(3))
    for name in ("noise.npz", "absent.npz", "odd.npz", "torn.npz", "other.npz"):
        with pytest.raises(DataError):
            nk.Scores.load(tmp_path / name)


def test_score_file(tmp_path):
    x, labels = clustered(30, 4, samples_per_class=3, noise=1.0)
    for key in ("features", "embeddings"):
        np.savez(tmp_path / "f.npz", **{key: x.astype(np.float16), "labels": labels})
        assert scores.score_file(tmp_path / "f.npz")["R@1"] == nk.score(x.astype(np.float16), labels)["R@1"]
    np.savez(tmp_path / "f.npz", vectors=x, labels=labels)
    with pytest.raises(DataError, match="no array named 'embeddings' or 'features'; it contains vectors, labels"):
        scores.score_file(tmp_path / "f.npz")
    np.savez(tmp_path / "f.npz", features=x)
    with pytest.raises(DataError, match="no array named 'labels'"):
        scores.score_file(tmp_path / "f.npz")
    np.save(tmp_path / "f.npy", x)
    with pytest.raises(DataError, match="a single array"):
        scores.score_file(tmp_path / "f.npy")


def test_truncated_or_damaged_file_raises_with_its_name(tmp_path):
    x, labels = clustered(300, 4, samples_per_class=3, noise=1.0)
    np.savez_compressed(tmp_path / "f.npz", features=x, labels=labels)
    whole = (tmp_path / "f.npz").read_bytes()
    for n, damaged in enumerate([whole[:-30], whole[:200], whole[:300] + bytes(50) + whole[350:], b""]):
        path = tmp_path / f"{n}.npz"
        path.write_bytes(damaged)
        for read in (scores.score_file, nk.Scores.load):
            with pytest.raises(DataError, match=f"{n}.npz: cannot be read"):
                read(path)


def test_iteration_yields_the_listed_metrics(tmp_path):
    x, labels = clustered(30, 4, samples_per_class=3, noise=1.0)
    scores = nk.score(x, labels, ks=np.array([1, 5]))
    assert "R@5" in scores
    assert "R@7" not in scores
    assert {"R@1", "R@5", "MAP@R"} <= set(scores)
    scores.save(tmp_path / "s.npz")
    assert nk.Scores.load(tmp_path / "s.npz").ks == (1, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["s.npz"]


@pytest.mark.parametrize("singletons", ["auto", "exclude", "zero"])
def test_few_huge_classes_are_evaluated_in_parts(singletons):
    x, labels = clustered(300, 4, samples_per_class=100, noise=2.0)
    labels[7] = 9  # a singleton
    x[50:60] = x[250:260]
    whole = nk.score(x, labels, singletons=singletons)
    parts = nk.score(x, labels, singletons=singletons, memory="1MB")
    with pytest.raises(ConfigError, match="larger memory="):
        parts.bounds("R@1")  # as the ranking was discarded
    with pytest.raises(UnknownNameError, match="other k need ks="):
        parts["R@16"]
    assert parts.notes == whole.notes
    for name in whole.per_query:
        np.testing.assert_array_equal(parts.per_query[name], whole.per_query[name], err_msg=name)


def test_scores_of_an_existing_ranking():
    x, labels = clustered(31, 4, samples_per_class=3, noise=1.0)
    first, second = nk.score(x, labels, ks=(1, 3)), nk.Scores.of(rank(x, labels), ks=(1, 3))
    assert first.table() == second.table()


def test_table_shows_percent():
    x, labels = clustered(60, 8, samples_per_class=6, noise=1.5)
    scores = nk.score(x, labels, ks=(1, 8))
    table = scores.table()
    assert f"R@1       {100 * scores['R@1']:>8.2f}" in table
    assert "60 queries of 10 classes, cosine" in table
    assert "R@1" in repr(scores)
    assert nk.score(x[:6], labels[:6]).table().count("-\n") >= 4  # one class: no interval
