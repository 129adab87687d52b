"""Intervals and comparisons, checked against a plain loop, theory and cases with a known answer."""

import numpy as np
import pytest
from helpers.oracle import clustered

import nearkin as nk
from nearkin.errors import ConfigError, DataError
from nearkin.metrics.bootstrap import bootstrap, class_sums, mean, paired_difference, percentiles
from nearkin.metrics.scores import Scores, compare


def test_bootstrap_equals_a_plain_loop():
    rng = np.random.default_rng(0)
    codes = np.sort(rng.integers(0, 12, 80))
    values = np.stack([rng.random(80), np.where(rng.random(80) < 0.2, np.nan, rng.random(80))])
    got = bootstrap(values, codes, draws=50, seed=3)
    classes = np.unique(codes)
    drawn = np.random.default_rng(3).integers(0, len(classes), (50, len(classes)))
    for b in range(50):
        picked = np.concatenate([np.nonzero(codes == classes[c])[0] for c in drawn[b]])
        np.testing.assert_allclose(got[b], [np.nanmean(v[picked]) for v in values], rtol=1e-12)
    np.testing.assert_array_equal(got, bootstrap(values, codes, draws=50, seed=3))


def test_intervals_cover_the_true_mean_and_are_wider_than_over_single_queries():
    rng = np.random.default_rng(1)
    covered = covered_by_query = 0
    codes = np.repeat(np.arange(40), 10)
    for trial in range(200):
        level = rng.normal(0.5, 0.2, 40)[codes]  # classes differ, true mean 0.5
        values = level + rng.normal(0, 0.1, 400)
        low, high = percentiles(bootstrap(values[None], codes, draws=300, seed=trial)[:, 0], 0.95)
        covered += low <= 0.5 <= high
        low, high = percentiles(bootstrap(values[None], np.arange(400), draws=300, seed=trial)[:, 0], 0.95)
        covered_by_query += low <= 0.5 <= high
    assert 0.88 <= covered / 200 <= 0.99
    assert covered_by_query / 200 < 0.7  # the mistake this guards against


def test_interval_of_scores():
    x, labels = clustered(120, 8, samples_per_class=6, noise=1.5)
    scores = nk.score(x, labels)
    low, high = scores.interval("R@1")
    assert low < scores["R@1"] < high
    narrow = scores.interval("R@1", level=0.5)
    assert low < narrow[0] < narrow[1] < high
    assert scores.interval("R@1") == (low, high)
    with pytest.raises(ConfigError, match="level"):
        scores.interval("R@1", level=95)


def test_mean_is_independent_of_order():
    values = np.random.default_rng(0).random(10_001)
    assert mean(values) == mean(values[::-1]) == mean(np.random.default_rng(1).permutation(values))
    assert mean(np.array([np.nan, 1.0, 3.0])) == 2.0
    assert np.isnan(mean(np.array([np.nan])))


def test_class_sums():
    sums, counts = class_sums(np.array([[1.0, 2.0, np.nan, 4.0]]), np.array([7, 9, 9, 7]))
    assert sums.tolist() == [[5.0, 2.0]]
    assert counts.tolist() == [[2.0, 1.0]]


def test_p_value_is_exact_for_few_classes():
    # Five classes that all gain: of 2^5 sign patterns two are as extreme, so p tends to 2/32.
    codes = np.arange(5)
    result = paired_difference("R@1", np.zeros(5), np.full(5, 0.1), codes, level=0.95, draws=2000, seed=0)
    assert result.p_value == pytest.approx(2 / 32, abs=0.01)
    assert result.difference == pytest.approx(0.1)
    assert (result.queries, result.classes) == (5, 5)


def test_p_values_are_uniform_under_the_null_hypothesis():
    rng = np.random.default_rng(0)
    codes = np.repeat(np.arange(30), 5)
    p = []
    for trial in range(200):
        shift = rng.normal(0, 0.2, 30)[codes]  # whole classes gain or lose at random
        p.append(
            paired_difference(
                "x", rng.random(150), rng.random(150) + shift, codes, level=0.95, draws=100, seed=trial
            ).p_value
        )
    assert 0.02 <= np.mean(np.array(p) < 0.05) <= 0.09
    assert 0.4 <= np.mean(p) <= 0.6


def test_compare():
    x, labels = clustered(200, 16, samples_per_class=5, noise=1.5)
    better = nk.score(x, labels)
    noise = np.random.default_rng(0).standard_normal(x.shape).astype(np.float32)
    worse = nk.score(x + 3 * noise, labels)
    result = compare(worse, better, "MAP@R")
    assert result.difference == pytest.approx(better["MAP@R"] - worse["MAP@R"], abs=1e-12)
    assert 0 < result.low < result.difference < result.high
    assert result.p_value <= 0.001
    assert "MAP@R" in str(result)
    assert "200 queries of 40 classes" in str(result)
    back = compare(better, worse, "MAP@R")
    assert back.difference == -result.difference
    assert compare(better, better, "R@1").p_value == 1.0


def test_compare_requires_the_same_queries():
    x, labels = clustered(20, 4, samples_per_class=5, noise=1.0)
    scores = nk.score(x, labels)
    with pytest.raises(DataError, match="the scores are of different queries"):
        compare(scores, nk.score(x[:15], labels[:15]), "R@1")
    with pytest.raises(DataError, match="the scores are of different queries"):
        compare(scores, nk.score(x, labels[::-1]), "R@1")


def test_queries_excluded_by_either_model_are_excluded_for_both():
    labels = np.array([0, 0, 1, 1])
    a = Scores({"MAP@R": np.array([0.0, 1.0, np.nan, 0.5])}, labels)
    b = Scores({"MAP@R": np.array([1.0, np.nan, 1.0, 0.5])}, labels)
    result = compare(a, b, "MAP@R")
    assert result.queries == 2
    assert result.difference == 0.5
    assert (result.first, result.second) == (0.25, 0.75)
