"""The page of a study, from real trials, in a real browser."""

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


def test_the_page_holds_what_the_trials_gave(study, tmp_path, capsys):
    main(["report", "--study", str(study.path), "-o", str(tmp_path / "p.html"), "--json", str(tmp_path / "p.json")])
    told = json.loads((tmp_path / "p.json").read_text())
    by_hand = {}
    for trial in study.trials:
        outcome = study.outcome(trial)
        if outcome.test is not None:
            by_hand.setdefault((trial.experiment, trial.method), []).append(100 * outcome.test["R@1"])
    cells = {(c["experiment"], c["method"]): c for c in told["cells"] if c["mean"] is not None}
    assert cells.keys() == by_hand.keys()
    for place, values in by_hand.items():
        assert cells[place]["mean"] == pytest.approx(np.mean(values))
        assert cells[place]["std"] == pytest.approx(np.std(values, ddof=1))
    assert len(told["failures"]) == 4
    starts = [study.outcome(t).yardstick["raw backbone"] for t in study.trials if t.size == 8 and t.method != NASTY]
    assert told["baselines"]["raw backbone"]["clouds & <b>more</b> 8"] == pytest.approx(100 * np.mean(starts))
    leader, rival = told["standings"][0]["method"], told["leader_less"][-1]["method"]
    values = {
        name: np.mean([per_query(study, t) for t in study.trials if t.method == name], axis=0)
        for name in (leader, rival)
    }
    assert told["leader_less"][-1]["difference"] == pytest.approx(np.mean(values[leader] - values[rival]), abs=1e-12)
    assert {f["method"] for f in told["failures"]} == {NASTY}
    assert [s["method"] for s in told["standings"]] == build_study_report(study.path).methods[:3]
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


def test_nothing_done_yet_is_said(tmp_path):
    begun = StudyFolder.begin(tmp_path / "s", small_study(write_features(tmp_path / "clouds.npz")))
    with pytest.raises(RunError, match="nothing of this study is done yet"):
        build_study_report(begun.path)


def test_too_few_values_to_rank_are_not_taken_for_too_few_entrants(study):
    report = build_study_report(study.path)
    some = {place: cell for place, cell in report.cells.items() if place[1] == "triplet"}
    early = replace(report, tournament=None, cells=some, left=5)
    assert headline(early) == "1 of the 4 methods has a value so far: there is nothing to rank."
    assert headline(replace(early, cells={}, left=0)) == "None of the 4 methods has a value: there is nothing to rank."
    assert headline(replace(early, methods=["triplet"])) == "One method alone: there is nothing to rank."
    assert headline(early) in render_study(early)


@pytest.mark.slow
def test_the_page_in_a_browser(study, tmp_path, visit):
    page = visit(write_study_page(build_study_report(study.path), tmp_path / "page.html"))
    assert page.title() == "nearkin: study small"
    rows = "#matrix tbody tr:not([hidden]) th"
    assert page.locator(rows).count() == 4
    assert NASTY in page.locator(rows).all_inner_texts()
    # Sorted by the second experiment: highest first, then lowest first; what failed is last in both.
    head = page.locator("#matrix thead button").nth(2)
    values = "[...document.querySelectorAll('#matrix tbody tr')].map(r => parseFloat(r.cells[2].dataset.value))"
    head.click()
    found = page.evaluate(values)
    assert found[:3] == sorted(found[:3], reverse=True)
    assert np.isnan(found[3])
    page.locator("#matrix thead button").nth(2).focus()
    page.keyboard.press("Enter")
    found = page.evaluate(values)
    assert found[:3] == sorted(found[:3])
    assert np.isnan(found[3])
    page.get_by_label("Find an method").fill("proxy")
    assert page.locator(rows).all_inner_texts() == ["proxy_anchor"]
    assert page.locator(".diagram img").evaluate("image => image.naturalWidth") > 100
    assert page.locator(".duels tbody tr").count() == 3
    assert page.locator("#leader tbody tr").count() == 2
    assert page.locator("#failures tbody tr").count() == 4
    page.locator("#trials summary").click()
    assert page.locator("#every tbody tr").count() == 16
    assert page.title() == "nearkin: study small"  # no name has run as code


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1200])
def test_no_sideways_scrolling(study, tmp_path, visit, width):
    page = visit(
        write_study_page(build_study_report(study.path), tmp_path / "page.html"),
        viewport={"width": width, "height": 800},
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= width
