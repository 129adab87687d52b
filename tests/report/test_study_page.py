"""The page of a study, from real trials, also in a browser."""

import json
from dataclasses import replace

import numpy as np
import pytest
from helpers.studies import small_study, write_features

from nearkin._common.progress import Reporter
from nearkin.bench.study import Dataset
from nearkin.bench.trials import StudyFolder, work
from nearkin.cli import main
from nearkin.errors import RunError
from nearkin.metrics.scores import Scores
from nearkin.report.study import build_study_report, headline, render_study, write_study_page

NASTY = "<img src=x onerror=\"document.title='run'\"> & 'quotes'"


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Three methods and one that always fails, two sizes, two seeds."""
    folder = tmp_path_factory.mktemp("study")
    features = write_features(folder / "clouds.npz")
    made = small_study(
        features,
        losses=("norm_softmax", "triplet", "proxy_anchor"),
        datasets=(Dataset("clouds & <b>more</b>", "features", features),),
        methods={NASTY: {"loss": {"name": "triplet"}, "train": {"lr": 1e30}}},
    )
    begun = StudyFolder.begin(folder / "made", made)
    work(begun, folder / "runs", device="cpu", reporter=Reporter(quiet=True))
    return begun


def test_the_page_has_the_results_of_the_trials(study, tmp_path, capsys):
    main(["report", "--study", str(study.path), "-o", str(tmp_path / "p.html"), "--json", str(tmp_path / "p.json")])
    stored = json.loads((tmp_path / "p.json").read_text())
    by_hand = {}
    for trial in study.trials:
        outcome = study.outcome(trial)
        if outcome.test is not None:
            by_hand.setdefault((trial.experiment, trial.method), []).append(100 * outcome.test["R@1"])
    cells = {(c["experiment"], c["method"]): c for c in stored["cells"] if c["mean"] is not None}
    assert cells.keys() == by_hand.keys()
    for key, values in by_hand.items():
        assert cells[key]["mean"] == pytest.approx(np.mean(values))
        assert cells[key]["std"] == pytest.approx(np.std(values, ddof=1))
    assert len(stored["failures"]) == 4
    starts = [
        study.outcome(t).baselines["raw backbone"]["R@1"] for t in study.trials if t.size == 8 and t.method != NASTY
    ]
    assert stored["baselines"]["raw backbone"]["clouds & <b>more</b> 8"] == pytest.approx(100 * np.mean(starts))
    last = stored["leader_comparisons"][-1]
    leader, other = stored["standings"][0]["method"], last["method"]
    values = {
        name: np.mean([per_query(study, t) for t in study.trials if t.method == name], axis=0)
        for name in (leader, other)
    }
    assert last["difference"] == pytest.approx(np.mean(values[leader] - values[other]), abs=1e-12)
    assert {f["method"] for f in stored["failures"]} == {NASTY}
    assert [s["method"] for s in stored["standings"]] == build_study_report(study.path).methods[:3]
    text = (tmp_path / "p.html").read_text()
    assert str(tmp_path) not in text
    assert str(study.path.parent) not in text  # no folder of this machine
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "p.html"), str(tmp_path / "p.json")]


def per_query(study, trial):
    return Scores.load(f"{study.outcome(trial).run}/per_query.npz").per_query["R@1"]


def test_figures_of_a_study(study, tmp_path, capsys):
    main(["report", "--study", str(study.path), "-o", str(tmp_path / "p.html"), "--figures", str(tmp_path / "figures")])
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert names == {f"{n}.{s}" for n in ("losses", "sizes", "critical_difference") for s in ("png", "svg")}
    assert "figures" in capsys.readouterr().out


def test_a_study_without_finished_trials_has_no_page(tmp_path):
    begun = StudyFolder.begin(tmp_path / "s", small_study(write_features(tmp_path / "clouds.npz")))
    with pytest.raises(RunError, match="no trial of this study is finished"):
        build_study_report(begun.path)


def test_the_headline_without_enough_values_to_rank(study):
    report = build_study_report(study.path)
    some = {key: cell for key, cell in report.cells.items() if key[1] == "triplet"}
    early = replace(report, tournament=None, cells=some, remaining=5, trials=[])
    assert "1 of 4 methods have a value so far: nothing to rank." in headline(early)
    assert headline(replace(early, cells={}, remaining=0)) == "0 of 4 methods have a value: nothing to rank."
    assert "Only one method: nothing to rank." in headline(replace(early, methods=["triplet"]))
    assert headline(early) in render_study(early)


def test_the_headline_of_ties_and_of_no_significant_lead(study):
    report = replace(build_study_report(study.path), baselines={}, trials=[])
    first, second, *others = report.tournament.standings
    tied = replace(report.tournament, standings=(first, replace(second, mean=first.mean), *others))
    names = f"{first.method} and {second.method}"
    assert headline(replace(report, tournament=tied)).startswith(f"{names} share the best mean rank.")
    ahead = replace(first, mean=second.mean - 1)
    alone = replace(report.tournament, standings=(ahead, second, *others))
    insignificant = tuple(replace(pair, significant=False) for pair in alone.pairs)
    shown = headline(replace(report, tournament=replace(alone, pairs=insignificant), leader_comparisons=[]))
    assert shown == f"{first.method} has the best mean rank; its lead is significant over none of the 2 other methods."


def test_the_headline_says_where_the_initial_model_was_kept(study):
    report = build_study_report(study.path)
    trials = [{**trial, "epoch": epoch} for trial, epoch in zip(report.trials, [0, 0, 3, 1], strict=False)]
    assert headline(replace(report, trials=trials)).endswith(
        "In 2 of 4 trials no epoch was better than the initial model, which is what is compared there."
    )
    assert "In all trials no epoch" in headline(replace(report, trials=trials[:2]))
    assert "no epoch" not in headline(replace(report, trials=trials[2:]))


@pytest.mark.slow
def test_the_page_in_a_browser(study, tmp_path, visit):
    page = visit(write_study_page(build_study_report(study.path), tmp_path / "page.html"))
    assert page.title() == "nearkin: study small"
    rows = "#results-table tbody tr:not([hidden]) th"
    assert page.locator(rows).count() == 4
    assert NASTY in page.locator(rows).all_inner_texts()
    # Sorted by the second experiment: descending, then ascending; failures are last in both.
    head = page.locator("#results-table thead button").nth(2)
    values = "[...document.querySelectorAll('#results-table tbody tr')].map(r => parseFloat(r.cells[2].dataset.value))"
    head.click()
    found = page.evaluate(values)
    assert found[:3] == sorted(found[:3], reverse=True)
    assert np.isnan(found[3])
    page.locator("#results-table thead button").nth(2).focus()
    page.keyboard.press("Enter")
    found = page.evaluate(values)
    assert found[:3] == sorted(found[:3])
    assert np.isnan(found[3])
    page.get_by_label("Find a method").fill("proxy")
    assert page.locator(rows).all_inner_texts() == ["proxy_anchor"]
    assert page.locator(".diagram img").evaluate("image => image.naturalWidth") > 100
    assert page.locator(".pair-matrix tbody tr").count() == 3
    assert page.locator("#leader-table tbody tr").count() == 2
    assert page.locator("#failures tbody tr").count() == 4
    page.locator("#trials summary").click()
    assert page.locator("#trials-table tbody tr").count() == 16
    assert page.title() == "nearkin: study small"  # no name has run as code


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1200])
def test_the_page_does_not_scroll_horizontally(study, tmp_path, visit, width):
    page = visit(
        write_study_page(build_study_report(study.path), tmp_path / "page.html"),
        viewport={"width": width, "height": 800},
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= width
