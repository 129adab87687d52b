"""The statistical tests against scipy, scikit-posthocs, statsmodels, published tables and brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from nearkin.bench import statistics
from nearkin.bench.statistics import (
    average_ranks,
    critical_difference,
    experiments_needed,
    friedman,
    holm,
    max_std,
    min_experiments,
    nemenyi,
    nemenyi_groups,
    wilcoxon,
)

stats = pytest.importorskip("scipy.stats", reason="the extra bench is not installed")


def scores(seed, experiments=9, methods=5, values=6):
    """Return scores with few distinct values, and hence ties."""
    return np.random.default_rng(seed).integers(0, values, (experiments, methods)).astype(float)


@pytest.mark.parametrize("seed", range(5))
def test_ranks(seed):
    values = scores(seed)
    assert np.array_equal(average_ranks(values), stats.rankdata(-values, axis=1))
    values[2, 1] = values[3, 0] = values[3, 4] = np.nan
    for row, ranks in zip(values, average_ranks(values), strict=True):
        ranked = ~np.isnan(row)
        assert np.array_equal(ranks[ranked], stats.rankdata(-row[ranked]))
        assert np.isnan(ranks[~ranked]).all()


@pytest.mark.parametrize("seed", range(5))
def test_friedman(seed):
    values = scores(seed)
    actual, expected = friedman(average_ranks(values)), stats.friedmanchisquare(*values.T)
    assert actual.chi_squared == pytest.approx(expected.statistic)
    assert actual.chi_squared_p_value == pytest.approx(expected.pvalue)


@pytest.mark.parametrize(
    ("methods", "experiments", "chi_squared", "p"),
    # Friedman, JASA 32 (1937), tables V and VI: probability of a chi-squared at least as large.
    [
        (3, 3, 6.0, 0.028),
        (3, 3, 4.667, 0.194),
        (3, 4, 8.0, 0.0046),
        (3, 4, 6.5, 0.042),
        (3, 4, 6.0, 0.069),
        (4, 2, 6.0, 0.042),
        (4, 2, 5.4, 0.167),
        (4, 3, 8.2, 0.017),
        (4, 3, 7.4, 0.033),
    ],
)
def test_friedman_of_few_experiments_against_the_published_table(methods, experiments, chi_squared, p):
    rng = np.random.default_rng(0)
    for _ in range(10_000):
        ranks = rng.permuted(np.tile(np.arange(1.0, methods + 1), (experiments, 1)), axis=1)
        if stats.friedmanchisquare(*ranks.T).statistic == pytest.approx(chi_squared, abs=1e-3):
            break
    assert friedman(ranks).chi_squared == pytest.approx(chi_squared, abs=1e-3)
    assert friedman(ranks).p_value == pytest.approx(p, abs=6e-4)


def test_sampled_permutations_approximate_enumeration(monkeypatch):
    ranks = average_ranks(
        np.array([[3.0, 2.0, 1.0], [3.0, 1.0, 2.0], [2.0, 2.0, 1.0], [3.0, 2.0, 1.0], [1.0, 2.0, 3.0]])
    )
    exact = friedman(ranks)
    monkeypatch.setattr(statistics, "MAX_PERMUTATIONS", 1000)
    assert friedman(ranks).p_value == pytest.approx(exact.p_value, abs=0.05)  # three standard errors of 1,000 samples
    assert friedman(ranks).p_value != exact.p_value


def test_friedman_of_two_methods_is_a_sign_test():
    """Two methods agree in two experiments with probability 1/2."""
    assert friedman(np.array([[1.0, 2.0], [1.0, 2.0]])).p_value == 0.5
    assert friedman(np.tile([1.0, 2.0], (5, 1))).p_value == pytest.approx(stats.binomtest(5, 5).pvalue)


def test_friedman_at_the_extremes():
    same = friedman(average_ranks(np.ones((4, 3))))
    assert (same.chi_squared, same.p_value, same.chi_squared_p_value) == (0.0, 1.0, 1.0)
    agreed = friedman(average_ranks(np.tile([3.0, 2.0, 1.0], (4, 1))))
    assert (agreed.chi_squared, agreed.p_value) == (pytest.approx(8.0), pytest.approx(1 / 6**3))
    two = friedman(average_ranks(np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])))
    assert two.chi_squared == pytest.approx(1 / 3)  # (2 - 1)^2 / 3: the sign test's chi-squared


def test_critical_difference_against_the_published_table():
    # Demsar, JMLR 7 (2006), table 5: q at 0.05 and 0.10 for 2 to 10 classifiers.
    for alpha, row in {
        0.05: [1.960, 2.343, 2.569, 2.728, 2.850, 2.949, 3.031, 3.102, 3.164],
        0.10: [1.645, 2.052, 2.291, 2.459, 2.589, 2.693, 2.780, 2.855, 2.920],
    }.items():
        for k, q in enumerate(row, 2):
            # One figure of that table (2.949 for seven) is off by half a unit in its last digit.
            assert critical_difference(k, 14, alpha) == pytest.approx(q * math.sqrt(k * (k + 1) / (6 * 14)), abs=1e-3)
    assert round(critical_difference(4, 14), 2) == 1.25  # its worked example


@pytest.mark.parametrize("seed", range(3))
def test_nemenyi(seed):
    posthocs = pytest.importorskip("scikit_posthocs", reason="the extra bench is not installed")
    values = scores(seed, experiments=12, values=40)
    ranks = average_ranks(values)
    expected = posthocs.posthoc_nemenyi_friedman(ranks).to_numpy()
    assert nemenyi(ranks.mean(0), len(ranks)) == pytest.approx(expected, abs=1e-9)
    # The critical difference is where p crosses alpha.
    critical = critical_difference(5, 12)
    for factor, significant in ((0.999, False), (1.001, True)):
        assert (nemenyi(np.array([1.0, 1.0 + factor * critical, 3.0, 3.0, 3.0]), 12)[0, 1] < 0.05) == significant


def test_groups():
    means = np.array([1.0, 2.0, 3.0, 4.5, 8.0])
    assert nemenyi_groups(means, 0.5) == []
    assert nemenyi_groups(means, 1.5) == [
        (0, 1),
        (1, 2),
    ]  # a difference of exactly the critical difference is significant
    assert nemenyi_groups(means, 2.1) == [(0, 2), (2, 3)]
    assert nemenyi_groups(means, 10) == [(0, 4)]


@pytest.mark.parametrize("n", [1, 2, 6, 12, 30])
def test_signed_ranks_exact(n):
    d = np.random.default_rng(n).normal(0.3, 1, n)
    expected = stats.wilcoxon(d, method="exact")
    assert wilcoxon(d).p_value == pytest.approx(expected.pvalue)
    assert wilcoxon(-d).p_value == pytest.approx(expected.pvalue)
    assert wilcoxon(-d).lean == -wilcoxon(d).lean


@pytest.mark.parametrize("seed", range(5))
def test_signed_ranks_with_ties_against_enumeration(seed):
    d = np.random.default_rng(seed).integers(-3, 5, 11).astype(float)
    nonzero = d[d != 0]
    ranks = stats.rankdata(np.abs(nonzero))
    observed = abs((np.sign(nonzero) * ranks).sum())
    patterns = np.array(list(itertools.product((-1, 1), repeat=len(nonzero))))
    assert wilcoxon(d).p_value == pytest.approx((np.abs(patterns @ ranks) >= observed).mean())
    assert wilcoxon(d).pairs == len(nonzero)


def test_signed_ranks_of_many_pairs_and_none():
    d = np.random.default_rng(0).integers(-9, 11, 300).astype(float)
    expected = stats.wilcoxon(d)  # asymptotic for so many pairs
    assert wilcoxon(d).p_value == pytest.approx(expected.pvalue, rel=1e-6)
    exact = np.random.default_rng(1).normal(0.2, 1, statistics.MAX_EXACT_PAIRS)
    normal = stats.wilcoxon(exact).pvalue
    assert wilcoxon(exact).p_value == pytest.approx(normal, rel=0.03)  # the two forms agree at the boundary
    assert wilcoxon(np.zeros(4)) == statistics.SignedRanks(1.0, 0.0, 0)
    assert wilcoxon(np.empty(0)).p_value == 1.0


@pytest.mark.parametrize("seed", range(4))
def test_holm(seed):
    multitest = pytest.importorskip("statsmodels.stats.multitest", reason="comes with scikit-posthocs")
    p = np.random.default_rng(seed).uniform(0, 0.2, 10).round(2)
    adjusted, share = holm(p)
    assert adjusted == pytest.approx(multitest.multipletests(p, method="holm")[1])
    # Stepping down while p is below its share of alpha equals comparing the adjusted p with alpha.
    order = np.argsort(p, kind="stable")
    assert sorted(share) == pytest.approx([1 / m for m in range(10, 0, -1)])
    below = np.cumprod((p <= 0.3 * share + 1e-12)[order]).astype(bool)
    assert np.array_equal(below, (adjusted <= 0.3 + 1e-12)[order])


def test_min_experiments():
    for level in (0.05, 0.01, 0.05 / 45):
        n = min_experiments(level)
        assert stats.wilcoxon(np.arange(1.0, n + 1)).pvalue <= level
        assert stats.wilcoxon(np.arange(1.0, n)).pvalue > level


@pytest.mark.parametrize(("effect", "level"), [(0.4, 0.05), (0.8, 0.05), (0.8, 0.05 / 45), (1.5, 0.05 / 45)])
def test_experiments_needed_reaches_the_power(effect, level):
    n = experiments_needed(effect, 1.0, level)
    d = np.random.default_rng(0).normal(effect, 1.0, (500, n))
    significant = stats.wilcoxon(d, axis=1).pvalue <= level
    assert significant.mean() == pytest.approx(0.8, abs=0.06)
    assert max_std(effect, n, level) >= 1.0 > max_std(effect, n - 1, level)


def test_experiments_needed_at_the_limits():
    assert experiments_needed(0.0, 1.0, 0.05) is None
    assert experiments_needed(0.001, 1.0, 0.05) is None
    assert experiments_needed(0.1, 0.0, 0.05) == 6
    assert experiments_needed(-5.0, 1.0, 0.05) == 6
    assert max_std(1.0, 5, 0.05) == 0.0
