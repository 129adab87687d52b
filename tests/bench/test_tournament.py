"""The tournament as a whole: the thesis's table 11, failures, seeds, the verdict."""

from __future__ import annotations

import dataclasses
import json
import math
from itertools import combinations, product

import numpy as np
import pytest
from helpers.paths import SHARED

from nearkin.bench import papers
from nearkin.bench.results import DIGITS
from nearkin.bench.summary import notes, sentence, summarize
from nearkin.bench.tournament import Result, run_tournament, tabulate
from nearkin.errors import ConfigError, DataError

pytest.importorskip("scipy", reason="the extra bench is not installed")


@pytest.fixture(scope="module")
def thesis():
    return run_tournament(papers.thesis_results())


def made(values, methods="abcdefgh", seeds=1):
    """Results of values [E, K] or [E, K, S]; None has failed."""
    out = []
    for e, row in enumerate(values):
        for name, cell in zip(methods, row, strict=False):
            for seed, value in enumerate(cell if isinstance(cell, list | tuple | np.ndarray) else [cell]):
                reason = "the loss is not finite" if value is None else None
                out.append(Result(f"x{e}", name, seed, None if value is None else float(value), reason))
    return out


# --- table 11 --------------------------------------------------------------------------------------------------------


def test_the_thesis_tournament(thesis):
    path = SHARED / "golden" / "golden.json"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    golden = json.loads(path.read_text())["S2_table11"]["rows"]
    named = {row.loss: row for row in papers.table_11()}
    assert [s.method for s in thesis.standings] == [row.loss for row in papers.table_11()]
    for s in thesis.standings:
        expected = golden[named[s.method].method]
        assert s.total == expected["total"] == expected["printed"][0]
        assert s.mean == pytest.approx(expected["mean"], abs=1e-12)
        assert s.std == pytest.approx(expected["std_sample"], abs=1e-12)
        column = thesis.table.methods.index(s.method)
        assert thesis.ranks[:, column].tolist() == expected["ranks"]
        assert s.medals == tuple(expected["ranks"].count(place) for place in (1, 2, 3))
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
    assert (thesis.friedman.chi_squared, thesis.friedman.curve_p_value) == (pytest.approx(chi), pytest.approx(p))
    assert thesis.critical == pytest.approx(3.164 * math.sqrt(10 * 11 / 72), abs=1e-3)
    apart = scikit_posthocs.posthoc_nemenyi_friedman(thesis.ranks).to_numpy()
    # Rounded, since 64.16 - 63.96 and 63.44 - 63.24 are one difference; counted out, since there are such ties.
    patterns = np.array(list(product((-1, 1), repeat=12)))
    pairwise = []
    for a, b in combinations(values.T, 2):
        ranks = np.sign(a - b) * stats.rankdata(np.abs(np.round(a - b, 6)))
        pairwise.append((np.abs(patterns @ np.abs(ranks)) >= abs(ranks.sum())).mean())
    adjusted = dict(zip(combinations(range(10), 2), multipletests(pairwise, method="holm")[1], strict=True))
    for pair in thesis.pairs:
        i, j = (thesis.table.methods.index(name) for name in (pair.first, pair.second))
        assert pair.p_nemenyi == pytest.approx(apart[i, j], abs=1e-9)
        assert pair.p_holm == pytest.approx(adjusted[min(i, j), max(i, j)], abs=1e-9)
        assert pair.wins == (values[:, i] > values[:, j]).sum()
        assert pair.difference == pytest.approx((values[:, i] - values[:, j]).mean())
    # Groups: whatever a bar joins lies nearer than the critical difference, and no bar could be longer.
    means = dict(thesis.complete_ranks)
    joined = {pair for group in thesis.groups for pair in combinations(group, 2)}
    for first, second in combinations(means, 2):
        assert ((first, second) in joined) == (means[second] - means[first] < thesis.critical)


# --- ranks, ties, medals ---------------------------------------------------------------------------------------------


def test_equals_share_ranks_and_medals():
    first, second, third, fourth = run_tournament(made([[70, 70, 60, 50], [70, 60, 60, 60]])).standings
    assert (first.method, first.total, first.medals) == ("a", 2.5, (2, 0, 0))
    assert (second.method, second.total, second.medals) == ("b", 4.5, (1, 1, 0))
    assert (third.method, third.total, third.medals) == ("c", 6.0, (0, 1, 1))
    assert (fourth.method, fourth.total, fourth.medals) == ("d", 7.0, (0, 1, 0))


def test_rounding_makes_no_rank():
    # 0.1 + 0.2 is not 0.3, but the two means over seeds are the same.
    judged = run_tournament(made([[[0.1, 0.2], [0.3, 0.0]]] * 6))
    assert [s.mean for s in judged.standings] == [1.5, 1.5]
    assert judged.pairs[0].ties == 6
    assert judged.pairs[0].p_value == 1.0


def test_bootstrap_of_mean_ranks_by_counting():
    # Two experiments: both drawn (1/2), the first twice (1/4), the second twice (1/4).
    judged = run_tournament(made([[70, 60], [60, 65]]), draws=20_000)
    assert judged.standings[0].low == 1.0
    assert judged.standings[0].high == 2.0
    assert judged.pairs[0].ahead == pytest.approx(1 / 4 + 1 / 4, abs=0.01)  # one draw of four ahead, two level
    # Three experiments, two of them won: ahead unless the lost one is drawn twice or more (7 of 27).
    judged = run_tournament(made([[70, 60], [70, 60], [60, 70]]), draws=20_000)
    assert judged.pairs[0].ahead == pytest.approx(20 / 27, abs=0.01)
    assert judged.pairs[0].next_win == (2 + 1) / (3 + 2)
    again = run_tournament(made([[70, 60], [70, 60], [60, 70]]), draws=20_000)
    assert again.pairs == judged.pairs
    assert run_tournament(made([[70, 60], [70, 60], [60, 70]]), draws=20_000, seed=1).pairs != judged.pairs


# --- failures --------------------------------------------------------------------------------------------------------


def test_failed_experiments_are_left_out_and_counted():
    values = [[70, 60, None], [71, 61, 50], [72, 62, 80], [None, 63, 53]]
    judged = run_tournament(made(values))
    by_name = {s.method: s for s in judged.standings}
    assert (by_name["a"].ranked, by_name["a"].failed, by_name["a"].total) == (3, 1, 1 + 1 + 2)
    assert (by_name["b"].ranked, by_name["b"].failed, by_name["b"].total) == (4, 0, 2 + 2 + 3 + 1)
    assert (by_name["c"].ranked, by_name["c"].failed, by_name["c"].total) == (3, 1, 3 + 1 + 2)
    assert by_name["c"].mean == 2.0
    # Friedman sees the two complete experiments alone.
    assert judged.friedman == run_tournament(made(values[1:3])).friedman
    assert judged.friedman.experiments == 2
    # A pair is compared wherever both have a value.
    records = {(p.first, p.second): (p.wins, p.losses) for p in judged.pairs}
    assert records["a", "b"] == (3, 0)
    assert sum(records["b", "c"] if ("b", "c") in records else records["c", "b"]) == 3
    text = summarize(judged)
    assert "c: 1 of 4 runs failed (first: x0, seed 0: the loss is not finite)." in text
    assert "a is not ranked in 1 of 4 experiments." in text
    assert "Friedman over these 2 chi-squared" in text
    assert "2 of 4 experiments have a value of every method; without a it would be 3." in text


def test_a_failure_changes_nothing_for_the_others_but_that_it_is_gone():
    rng = np.random.default_rng(0)
    values = rng.normal(60, 3, (8, 3)).round(2).tolist()
    broken = [[*row, None] for row in values]
    whole, part = run_tournament(made(values)), run_tournament(made(broken))
    assert [s for s in part.standings if s.method != "d"] == list(whole.standings)
    last = part.standings[-1]
    assert (last.method, last.ranked, last.failed) == ("d", 0, 8)
    assert math.isnan(last.mean)
    assert part.friedman is None
    assert math.isnan(part.critical)
    text = summarize(part)
    assert "0 of 8 experiments have a value of every method; without d it would be 8." in text
    assert "never met" in text


def test_a_run_that_failed_leaves_the_other_seeds():
    judged = run_tournament(made([[[60, None, 62], [50, 51, 52]]] * 2))
    assert judged.table.means[0].tolist() == [61.0, 51.0]
    assert judged.standings[0].failed == 2
    assert "a: 2 of 6 runs failed" in summarize(judged)


def test_never_run_is_told_from_failed():
    results = [r for r in made([[70, 60], [71, 61], [72, 62]]) if (r.experiment, r.method) != ("x1", "b")]
    said = notes(tabulate(results))
    assert said[0] == "b: never run in 1 of 3 experiments (first: x1)."
    assert not any("failed" in line for line in said)


# --- seeds -----------------------------------------------------------------------------------------------------------


def test_the_mean_over_seeds_is_ranked():
    rng = np.random.default_rng(0)
    values = rng.normal(60, 3, (7, 4, 3))
    judged = run_tournament(made(values.tolist()))
    expected = run_tournament(made(values.mean(2).round(DIGITS).tolist()))
    assert np.array_equal(judged.ranks, expected.ranks)
    assert judged.unit == "experiment"
    for ours, theirs in zip(judged.pairs, expected.pairs, strict=True):
        assert ours.p_value == theirs.p_value
        assert ours.difference == pytest.approx(theirs.difference)


def test_runs_are_paired_by_seed():
    # Seed 1 is missing for b: a's easy seed must not count for a.
    a = [Result(f"x{e}", "a", seed, 60.0 + 20 * seed) for e in range(6) for seed in (0, 1)]
    b = [Result(f"x{e}", "b", 0, 61.0) for e in range(6)]
    judged = run_tournament(a + b)
    (pair,) = judged.pairs
    assert judged.standings[0].method == "a"  # by its mean
    assert (pair.difference, pair.leader, pair.significant) == (-1.0, "b", True)


def test_few_experiments_with_seeds_are_compared_run_by_run():
    rng = np.random.default_rng(1)
    shared = rng.normal(0, 5, 8)  # what a seed does to all methods alike
    values = [[(60 + shared + rng.normal(gain, 0.2, 8)).tolist() for gain in (1.0, 0.0)] for _ in range(2)]
    judged = run_tournament(made(values))
    assert judged.unit == "run"
    (pair,) = judged.pairs
    assert (pair.wins, pair.losses, pair.significant) == (16, 0, True)
    assert pair.p_value == pytest.approx(2 / 2**16)
    assert "holds for these experiments, not for others" in summarize(judged)
    assert run_tournament(made(values), unit="experiment").pairs[0].p_value == 0.5
    # Without seeds to go by, experiments stay the unit.
    assert run_tournament(made([[70, 60], [70, 60]])).unit == "experiment"


def test_more_seeds_help_only_against_the_scatter_of_seeds():
    rng = np.random.default_rng(2)

    def differences(between, within):
        base = 0.5 + rng.normal(0, between, 10)
        other = 60 + np.zeros((10, 4))
        return made(np.stack([other + base[:, None] + rng.normal(0, within, (10, 4)), other], 1).tolist())

    (noisy,) = run_tournament(differences(0.1, 3.0)).pairs
    assert not noisy.significant
    assert noisy.more_seeds > 0
    (varied,) = run_tournament(differences(2.0, 0.1)).pairs
    assert not varied.significant
    assert varied.more_seeds is None
    assert varied.more_experiments > 0


def test_the_seeds_asked_for_settle_it():
    # True gain 0.5, seeds scatter by 1.5: from 2 seeds, how many more? Then hold that tournament many times.
    rng = np.random.default_rng(0)
    asked = []
    for _ in range(60):
        d = 0.5 + rng.normal(0, 1.5, (8, 2))
        (pair,) = run_tournament(made(np.stack([60 + d, np.full_like(d, 60)], 1).tolist()), draws=100).pairs
        if not pair.significant and pair.more_seeds is not None:
            asked.append(2 + pair.more_seeds)
    seeds = int(np.median(asked))
    from scipy import stats

    d = 0.5 + rng.normal(0, 1.5, (400, 8, seeds))
    found = (stats.wilcoxon(d.mean(2), axis=1).pvalue <= 0.05).mean()
    assert 0.6 < found <= 1.0


# --- the verdict -----------------------------------------------------------------------------------------------------


def test_the_verdict_says_what_is_settled(thesis):
    text = summarize(thesis)
    assert "10 methods in 12 experiments, one run each." in text
    assert "proxy_anchor is better than all others." in text
    assert "26 of 45 pairs are settled at 0.05" in text
    assert "The methods differ (Friedman chi-squared 81.5, p < 0.001" in text
    pair = next(p for p in thesis.pairs if (p.first, p.second) == ("soft_triple", "arcface"))
    said = sentence(pair, thesis)
    assert said.startswith("soft_triple and arcface cannot be told apart: Holm p = 0.088; about ")
    assert said.endswith(" more experiments would settle it.")
    assert text.count("cannot be told apart: Holm") == 12
    assert "... and 7 more pairs that are not settled." in text
    assert summarize(thesis, most=99).count("cannot be told apart: Holm") == 19


def test_the_verdict_when_there_is_nothing_to_tell():
    judged = run_tournament(made([[60, 60, 60]] * 7))
    text = summarize(judged)
    assert "0 of 3 pairs are settled" in text
    assert "as a whole cannot be told apart" in text
    assert "no number of experiments within reach would settle it" in text
    one = run_tournament(made([[60, 50]]))
    assert one.friedman is None
    assert "Friedman's test is not held" in summarize(one)
    assert "they met once" in summarize(one)
    assert math.isnan(one.standings[0].std)


def test_chance_alone_is_seldom_called_a_difference():
    # Five equal methods, 60 tournaments of 12 experiments: any pair settled in about 5 % of them at most.
    rng = np.random.default_rng(3)
    held = (run_tournament(made(rng.normal(60, 2, (12, 5)).tolist()), draws=100) for _ in range(60))
    false = sum(any(pair.significant for pair in judged.pairs) for judged in held)
    assert false <= 8  # 5 % is 3; above 8 has a chance below 1 %


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([], "needs results"),
        ([("x", "a", 0, 1.0)], "at least two methods; got a alone"),
        ([("x", "a", 0, 1.0), ("x", "a", 0, 2.0)], "x, a, seed 0: given more than once"),
        ([("x", "a", 0, math.nan)], "the value is nan. A run that failed has no value but a reason"),
        ([("x", "a", 0, math.inf)], "the value is inf"),
        ([("x", "a", 0, 1.0, "why")], "both a value"),
        ([("", "a", 0, 1.0)], "needs an experiment and an method"),
    ],
)
def test_bad_results(results, message):
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
def test_bad_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        run_tournament(made([[70, 60], [71, 61]]), **settings)


def test_results_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Result("x", "a", 0, 1.0).value = 2.0
    assert Result("x", "a").reason == "no reason given"
