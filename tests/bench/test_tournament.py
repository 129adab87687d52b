"""The tournament: the thesis's table 11, ranks, failures, seeds and the summary."""

from __future__ import annotations

import dataclasses
import json
import math
from itertools import combinations, product

import numpy as np
import pytest
from helpers.paths import GOLDEN

from nearkin.bench import papers
from nearkin.bench.results import DIGITS, Result, tabulate
from nearkin.bench.summary import notes, sentence, summarize
from nearkin.bench.tournament import run_tournament
from nearkin.errors import ConfigError, DataError

pytest.importorskip("scipy", reason="the extra bench is not installed")


@pytest.fixture(scope="module")
def thesis():
    return run_tournament(papers.thesis_results())


def make_results(values, methods="abcdefgh"):
    """Return results for values [E, K] or [E, K, S]; None is a failed run."""
    results = []
    for e, row in enumerate(values):
        for name, cell in zip(methods, row, strict=False):
            for seed, value in enumerate(cell if isinstance(cell, list | tuple | np.ndarray) else [cell]):
                reason = "the loss is not finite" if value is None else None
                results.append(Result(f"x{e}", name, seed, None if value is None else float(value), reason))
    return results


# --- table 11 --------------------------------------------------------------------------------------------------------


def test_the_thesis_tournament(thesis):
    golden = json.loads(GOLDEN.read_text())["S2_table11"]["rows"]
    printed = {row.loss: row for row in papers.table_11()}
    assert [s.method for s in thesis.standings] == [row.loss for row in papers.table_11()]
    for s in thesis.standings:
        expected = golden[printed[s.method].method]
        assert s.total == expected["total"] == expected["printed"][0]
        assert s.mean == pytest.approx(expected["mean"], abs=1e-12)
        assert s.std == pytest.approx(expected["std_sample"], abs=1e-12)
        column = thesis.table.methods.index(s.method)
        assert thesis.ranks[:, column].tolist() == expected["ranks"]
        assert s.medals == tuple(expected["ranks"].count(rank) for rank in (1, 2, 3))
        assert (s.ranked, s.experiments, s.failed) == (12, 12, 0)
    shown = {s.method: (f"{s.mean:.2f}", f"{s.std:.2f}") for s in thesis.standings}
    assert shown["triplet"] == ("8.58", "0.51")
    assert shown["soft_triple"] == ("3.17", "1.19")
    assert shown["lifted_structure"] == ("4.50", "1.88")


def test_the_statistics_of_the_thesis_tournament(thesis):
    import scikit_posthocs
    from scipy import stats
    from statsmodels.stats.multitest import multipletests

    values = thesis.table.means
    chi, p = stats.friedmanchisquare(*values.T)
    assert (thesis.friedman.chi_squared, thesis.friedman.chi_squared_p_value) == (pytest.approx(chi), pytest.approx(p))
    assert thesis.critical == pytest.approx(3.164 * math.sqrt(10 * 11 / 72), abs=1e-3)
    p_nemenyi = scikit_posthocs.posthoc_nemenyi_friedman(thesis.ranks).to_numpy()
    # Rounded, since 64.16 - 63.96 and 63.44 - 63.24 are equal; by enumeration, since there are such ties.
    patterns = np.array(list(product((-1, 1), repeat=12)))
    pairwise = []
    for a, b in combinations(values.T, 2):
        ranks = np.sign(a - b) * stats.rankdata(np.abs(np.round(a - b, 6)))
        pairwise.append((np.abs(patterns @ np.abs(ranks)) >= abs(ranks.sum())).mean())
    adjusted = dict(zip(combinations(range(10), 2), multipletests(pairwise, method="holm")[1], strict=True))
    for pair in thesis.pairs:
        i, j = (thesis.table.methods.index(name) for name in (pair.first, pair.second))
        assert pair.p_nemenyi == pytest.approx(p_nemenyi[i, j], abs=1e-9)
        assert pair.p_holm == pytest.approx(adjusted[min(i, j), max(i, j)], abs=1e-9)
        assert pair.wins == (values[:, i] > values[:, j]).sum()
        assert pair.difference == pytest.approx((values[:, i] - values[:, j]).mean())
    # Two methods share a group exactly if their mean ranks differ by less than the critical difference.
    means = dict(thesis.complete_ranks)
    joined = {pair for group in thesis.groups for pair in combinations(group, 2)}
    for first, second in combinations(means, 2):
        assert ((first, second) in joined) == (means[second] - means[first] < thesis.critical)


# --- ranks, ties, medals ---------------------------------------------------------------------------------------------


def test_ties_share_ranks_and_medals():
    first, second, third, fourth = run_tournament(make_results([[70, 70, 60, 50], [70, 60, 60, 60]])).standings
    assert (first.method, first.total, first.medals) == ("a", 2.5, (2, 0, 0))
    assert (second.method, second.total, second.medals) == ("b", 4.5, (1, 1, 0))
    assert (third.method, third.total, third.medals) == ("c", 6.0, (0, 1, 1))
    assert (fourth.method, fourth.total, fourth.medals) == ("d", 7.0, (0, 1, 0))


def test_rounding_errors_do_not_affect_ranks():
    # 0.1 + 0.2 != 0.3 in floating point, but the means over seeds are equal.
    tournament = run_tournament(make_results([[[0.1, 0.2], [0.3, 0.0]]] * 6))
    assert [s.mean for s in tournament.standings] == [1.5, 1.5]
    assert tournament.pairs[0].ties == 6
    assert tournament.pairs[0].p_value == 1.0


def test_bootstrap_of_mean_ranks_against_enumeration():
    # Two experiments: both sampled (1/2), the first twice (1/4), the second twice (1/4).
    tournament = run_tournament(make_results([[70, 60], [60, 65]]), draws=20_000)
    assert tournament.standings[0].low == 1.0
    assert tournament.standings[0].high == 2.0
    assert tournament.pairs[0].ahead == pytest.approx(
        1 / 4 + 1 / 4, abs=0.01
    )  # ahead in one sample of four, tied in two
    # Three experiments, two wins: ahead unless the loss is sampled at least twice (7 of 27).
    tournament = run_tournament(make_results([[70, 60], [70, 60], [60, 70]]), draws=20_000)
    assert tournament.pairs[0].ahead == pytest.approx(20 / 27, abs=0.01)
    assert tournament.pairs[0].next_win == (2 + 1) / (3 + 2)
    again = run_tournament(make_results([[70, 60], [70, 60], [60, 70]]), draws=20_000)
    assert again.pairs == tournament.pairs
    assert run_tournament(make_results([[70, 60], [70, 60], [60, 70]]), draws=20_000, seed=1).pairs != tournament.pairs


# --- failures --------------------------------------------------------------------------------------------------------


def test_failed_runs_are_excluded_and_counted():
    values = [[70, 60, None], [71, 61, 50], [72, 62, 80], [None, 63, 53]]
    tournament = run_tournament(make_results(values))
    by_name = {s.method: s for s in tournament.standings}
    assert (by_name["a"].ranked, by_name["a"].failed, by_name["a"].total) == (3, 1, 1 + 1 + 2)
    assert (by_name["b"].ranked, by_name["b"].failed, by_name["b"].total) == (4, 0, 2 + 2 + 3 + 1)
    assert (by_name["c"].ranked, by_name["c"].failed, by_name["c"].total) == (3, 1, 3 + 1 + 2)
    assert by_name["c"].mean == 2.0
    # Friedman's test uses only the two complete experiments.
    assert tournament.friedman == run_tournament(make_results(values[1:3])).friedman
    assert tournament.friedman.experiments == 2
    # A pair is compared in all experiments in which both have a value.
    records = {(p.first, p.second): (p.wins, p.losses) for p in tournament.pairs}
    assert records["a", "b"] == (3, 0)
    assert sum(records["b", "c"] if ("b", "c") in records else records["c", "b"]) == 3
    text = summarize(tournament)
    assert "c: 1 of 4 runs failed (first: x0, seed 0: the loss is not finite)." in text
    assert "a is not ranked in 1 of 4 experiments." in text
    assert "Friedman over 2 experiments: chi-squared" in text
    assert "2 of 4 experiments have a value for every method; without a it would be 3." in text


def test_method_that_always_fails_does_not_affect_the_others():
    rng = np.random.default_rng(0)
    values = rng.normal(60, 3, (8, 3)).round(2).tolist()
    with_failures = [[*row, None] for row in values]
    expected, tournament = run_tournament(make_results(values)), run_tournament(make_results(with_failures))
    assert [s for s in tournament.standings if s.method != "d"] == list(expected.standings)
    last = tournament.standings[-1]
    assert (last.method, last.ranked, last.failed) == ("d", 0, 8)
    assert math.isnan(last.mean)
    assert tournament.friedman is None
    assert math.isnan(tournament.critical)
    text = summarize(tournament)
    assert "0 of 8 experiments have a value for every method; without d it would be 8." in text
    assert "not compared, no experiment has a value for both" in text


def test_failed_run_does_not_affect_the_other_seeds():
    tournament = run_tournament(make_results([[[60, None, 62], [50, 51, 52]]] * 2))
    assert tournament.table.means[0].tolist() == [61.0, 51.0]
    assert tournament.standings[0].failed == 2
    assert "a: 2 of 6 runs failed" in summarize(tournament)


def test_never_run_differs_from_failed():
    results = [r for r in make_results([[70, 60], [71, 61], [72, 62]]) if (r.experiment, r.method) != ("x1", "b")]
    lines = notes(tabulate(results))
    assert lines[0] == "b: never run in 1 of 3 experiments (first: x1)."
    assert not any("failed" in line for line in lines)


# --- seeds -----------------------------------------------------------------------------------------------------------


def test_means_over_seeds_are_ranked():
    rng = np.random.default_rng(0)
    values = rng.normal(60, 3, (7, 4, 3))
    tournament = run_tournament(make_results(values.tolist()))
    expected = run_tournament(make_results(values.mean(2).round(DIGITS).tolist()))
    assert np.array_equal(tournament.ranks, expected.ranks)
    assert tournament.unit == "experiment"
    for pair, expected_pair in zip(tournament.pairs, expected.pairs, strict=True):
        assert pair.p_value == expected_pair.p_value
        assert pair.difference == pytest.approx(expected_pair.difference)


def test_runs_are_paired_by_seed():
    # Seed 1, an easy one, is missing for b: it must not count in favour of a.
    a = [Result(f"x{e}", "a", seed, 60.0 + 20 * seed) for e in range(6) for seed in (0, 1)]
    b = [Result(f"x{e}", "b", 0, 61.0) for e in range(6)]
    tournament = run_tournament(a + b)
    (pair,) = tournament.pairs
    assert tournament.standings[0].method == "a"  # by its mean
    assert (pair.difference, pair.leader, pair.significant) == (-1.0, "b", True)


def test_few_experiments_with_seeds_are_compared_run_by_run():
    rng = np.random.default_rng(1)
    shared = rng.normal(0, 5, 8)  # effect of a seed, the same for all methods
    values = [[(60 + shared + rng.normal(gain, 0.2, 8)).tolist() for gain in (1.0, 0.0)] for _ in range(2)]
    tournament = run_tournament(make_results(values))
    assert tournament.unit == "run"
    (pair,) = tournament.pairs
    assert (pair.wins, pair.losses, pair.significant) == (16, 0, True)
    assert pair.p_value == pytest.approx(2 / 2**16)
    assert "significance holds for these experiments, not for others" in summarize(tournament)
    assert run_tournament(make_results(values), unit="experiment").pairs[0].p_value == 0.5
    # Without several seeds, experiments stay the unit.
    assert run_tournament(make_results([[70, 60], [70, 60]])).unit == "experiment"


def test_more_seeds_help_only_against_variance_between_seeds():
    rng = np.random.default_rng(2)

    def results_with_variance(between, within):
        base = 0.5 + rng.normal(0, between, 10)
        other = 60 + np.zeros((10, 4))
        return make_results(np.stack([other + base[:, None] + rng.normal(0, within, (10, 4)), other], 1).tolist())

    (noisy,) = run_tournament(results_with_variance(0.1, 3.0)).pairs
    assert not noisy.significant
    assert noisy.more_seeds > 0
    (varied,) = run_tournament(results_with_variance(2.0, 0.1)).pairs
    assert not varied.significant
    assert varied.more_seeds is None
    assert varied.more_experiments > 0


def test_estimated_number_of_seeds_suffices():
    # Gain 0.5, standard deviation 1.5 between seeds: estimate from 2 seeds, then simulate with that many.
    rng = np.random.default_rng(0)
    needed = []
    for _ in range(60):
        d = 0.5 + rng.normal(0, 1.5, (8, 2))
        (pair,) = run_tournament(make_results(np.stack([60 + d, np.full_like(d, 60)], 1).tolist()), draws=100).pairs
        if not pair.significant and pair.more_seeds is not None:
            needed.append(2 + pair.more_seeds)
    seeds = int(np.median(needed))
    from scipy import stats

    d = 0.5 + rng.normal(0, 1.5, (400, 8, seeds))
    power = (stats.wilcoxon(d.mean(2), axis=1).pvalue <= 0.05).mean()
    assert 0.6 < power <= 1.0


# --- the summary -----------------------------------------------------------------------------------------------------


def test_summary_of_significant_differences(thesis):
    text = summarize(thesis)
    assert "10 methods in 12 experiments, one run each." in text
    assert "proxy_anchor is better than all others." in text
    assert "26 of 45 pairs differ significantly at 0.05" in text
    assert "The methods differ significantly (Friedman: chi-squared 81.5, p < 0.001" in text
    pair = next(p for p in thesis.pairs if (p.first, p.second) == ("soft_triple", "arcface"))
    line = sentence(pair, thesis)
    assert line.startswith("soft_triple vs arcface: no significant difference, Holm p = 0.088; about ")
    assert line.endswith(" more experiments needed.")
    assert text.count("no significant difference, Holm") == 12
    assert "... and 7 more pairs." in text
    assert summarize(thesis, most=99).count("no significant difference, Holm") == 19


def test_summary_without_any_difference():
    tournament = run_tournament(make_results([[60, 60, 60]] * 7))
    text = summarize(tournament)
    assert "0 of 3 pairs differ significantly" in text
    assert "Overall, the methods do not differ significantly" in text
    assert "no feasible number of experiments would make it significant" in text
    single = run_tournament(make_results([[60, 50]]))
    assert single.friedman is None
    assert "Friedman's test is skipped" in summarize(single)
    assert "only one experiment in common" in summarize(single)
    assert math.isnan(single.standings[0].std)


@pytest.mark.slow
def test_false_positive_rate():
    # Five equal methods, 60 tournaments of 12 experiments: any significant pair in about 5 % of them at most.
    rng = np.random.default_rng(3)
    tournaments = (run_tournament(make_results(rng.normal(60, 2, (12, 5)).tolist()), draws=100) for _ in range(60))
    false_positives = sum(any(pair.significant for pair in tournament.pairs) for tournament in tournaments)
    assert false_positives <= 8  # 5 % is 3; more than 8 has a probability below 1 %


# --- invalid input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([], "needs results"),
        ([("x", "a", 0, 1.0)], "at least two methods; got only a"),
        ([("x", "a", 0, 1.0), ("x", "a", 0, 2.0)], "x, a, seed 0: given more than once"),
        ([("x", "a", 0, math.nan)], "the value is nan. Give a failed run a reason and no value"),
        ([("x", "a", 0, math.inf)], "the value is inf"),
        ([("x", "a", 0, 1.0, "why")], "both a value"),
        ([("", "a", 0, 1.0)], "needs an experiment and a method"),
    ],
)
def test_invalid_results(results, message):
    with pytest.raises(DataError, match=message):
        run_tournament([Result(*row) for row in results])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 0}, "alpha"),
        ({"alpha": 5}, "alpha"),
        ({"draws": 3}, "draws"),
        ({"unit": "seed"}, "unit: expected"),
    ],
)
def test_invalid_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        run_tournament(make_results([[70, 60], [71, 61]]), **settings)


def test_results_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Result("x", "a", 0, 1.0).value = 2.0
    assert Result("x", "a").reason == "no reason given"


def test_many_pairs_with_one_experiment_are_one_line():
    text = summarize(run_tournament(make_results([[1, 2, 3]])))
    assert text.splitlines()[-1] == "  3 pairs have only one experiment in common, so the variance is unknown."
