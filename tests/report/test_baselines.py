"""Results in words: the trained model, and the methods of a study, against every baseline."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.studies import small_study, write_features

import nearkin as nk
from nearkin._common.progress import Reporter
from nearkin.bench.trials import StudyFolder, work
from nearkin.cli import main
from nearkin.report.baselines import compare_study, comparison_lines, headline, no_run_helped
from nearkin.report.page import build_report, render
from nearkin.report.study import build_study_report
from nearkin.report.study import headline as study_headline
from nearkin.report.study_overview import terminal_report
from nearkin.training.recipes import features_default


@pytest.fixture
def recipe(tmp_path):
    recipe = features_default()
    return replace(
        recipe,
        data=replace(recipe.data, root=write_features(tmp_path / "clouds.npz"), val_fraction=0.35),
        model=replace(recipe.model, dim=8),
        train=replace(recipe.train, epochs=2, batch_size=32),
    )


def result(raw, start, *, epoch=3, recalls=(60.0, 62.0, 63.0)):
    """A result whose trained model differs from the raw backbone and the start by these (R@1, MAP@R) intervals."""
    names = ("raw backbone", "whitened start", "trained")

    def found(low, high):
        return {"mean": (low + high) / 200, "interval": [low / 100, high / 100], "p": 0.5}

    return {
        "protocol": {"epoch": epoch, "epochs": 5, "classes": {"val": 9, "test": 50}},
        "val_R@1": 0.5,
        "test": {"raw pixels": {"R@1": {"mean": 0.1}}}
        | {n: {"R@1": {"mean": r / 100}, "MAP@R": {"mean": 0.4}} for n, r in zip(names, recalls, strict=True)},
        "differences": {
            name: {"R@1": found(*recall), "MAP@R": found(*precision)}
            for name, (recall, precision) in (
                ("raw pixels", ((40, 50), (20, 30))),
                ("raw backbone", raw),
                ("whitened start", start),
            )
        },
    }


BETTER, SAME, WORSE = (1.0, 3.0), (-1.0, 2.0), (-3.0, -1.0)


@pytest.mark.parametrize(
    ("raw", "start", "expected"),
    [
        ((BETTER, BETTER), (BETTER, BETTER), "Training helped: R@1 and MAP@R are significantly better than those of"),
        (
            (BETTER, BETTER),
            (SAME, BETTER),
            "but compared with whitened start only in MAP@R, not in R@1.",
        ),
        (
            (BETTER, BETTER),
            (SAME, SAME),
            "As good without it: whitened start, R@1 62.0, MAP@R 40.0 (to use it,",
        ),
        (
            (WORSE, SAME),
            (BETTER, BETTER),
            "Better on the test classes: raw backbone (to use it, repeat the command with",
        ),
        ((SAME, WORSE), (SAME, SAME), "Training did not help. Better on the test classes: raw backbone ("),
        (
            (BETTER, BETTER),
            (WORSE, BETTER),
            "Better on the test classes: whitened start (to use it, repeat the command with",
        ),
    ],
)
def test_the_headline_claims_no_more_than_the_intervals(raw, start, expected):
    words = headline(result(raw, start))
    assert expected in words
    assert words.startswith(
        "R@1 63.0: the nearest neighbour of 63.0 % of the test images has the same class (whitened "
    )
    assert ("Training helped" in words) == ("elped" in expected or "but" in expected)


def test_every_baseline_is_compared_in_both_metrics():
    assert comparison_lines(result((WORSE, SAME), (SAME, BETTER))) == [
        "vs. raw pixels: R@1 better by 40.0 to 50.0 points, MAP@R better by 20.0 to 30.0 points",
        "vs. raw backbone: R@1 worse by 1.0 to 3.0 points, MAP@R not significantly different (-1.0 to +2.0 points)",
        "vs. whitened start: R@1 not significantly different (-1.0 to +2.0 points), MAP@R better by 1.0 to 3.0 points",
    ]
    few = result((WORSE, SAME), ((0.0, 0.0), BETTER))
    few["protocol"]["classes"]["test"] = 4
    *_, start, last = comparison_lines(few)
    assert start == "vs. whitened start: R@1 the same for every class, MAP@R better by 1.0 to 3.0 points"
    assert last == "only 4 test classes: these intervals say little about other classes"
    zero = (0.0, 0.0)
    kept = result((WORSE, WORSE), (zero, zero), epoch=0)
    assert comparison_lines(kept)[-1] == "vs. whitened start: these are its weights"
    assert "No epoch improved on the initial weights (whitened start)" in headline(kept)
    assert "Better on the test classes: raw backbone" in headline(kept)


def test_several_runs_that_beat_no_baseline_are_said_to():
    helped, useless = result((BETTER, BETTER), (BETTER, BETTER)), result((BETTER, BETTER), (SAME, SAME))
    assert no_run_helped([useless, useless]).startswith("No run is measurably better than the best baseline")
    assert no_run_helped([useless, helped]) == no_run_helped([useless]) == ""


def test_training_that_helps_nothing_keeps_the_start(recipe, tmp_path, quiet, capsys):
    frozen = replace(recipe, train=replace(recipe.train, lr=1e-30, class_lr=1e-30))
    run = nk.fit(frozen, tmp_path / "runs", reporter=quiet)
    assert run.result["protocol"]["epoch"] == 0
    assert run.result["test"]["trained"] == run.result["test"]["whitened start"]
    untrained = nk.fit(replace(recipe, train=replace(recipe.train, epochs=0)), tmp_path / "runs", reporter=quiet)
    for name, value in untrained.embedder().state_dict().items():
        assert torch.equal(value, run.embedder().state_dict()[name]), name
    assert "without training" in headline(untrained)
    page = render(build_report([run], reporter=quiet))
    assert "No epoch improved on the initial weights" in page
    assert "vs. raw backbone: R@1 " in page
    for name, metrics in run.result["differences"].items():
        for metric, found in metrics.items():
            means = run.result["test"]
            assert found["mean"] == pytest.approx(means["trained"][metric]["mean"] - means[name][metric]["mean"])
    (tmp_path / "recipe.toml").write_text(frozen.to_toml())
    main(["train", str(tmp_path / "recipe.toml"), "--runs", str(tmp_path / "runs"), "--quiet"])
    printed = capsys.readouterr().out
    assert "vs. raw backbone: R@1 " in printed
    assert "vs. whitened start: these are its weights" in printed


def test_no_epochs_and_no_head_give_the_raw_features(recipe, tmp_path, quiet):
    trained = nk.fit(recipe, tmp_path / "runs", reporter=quiet)
    raw = replace(
        recipe,
        model=replace(recipe.model, dim=0, head_init="random"),
        loss=replace(recipe.loss, name="triplet", settings={}),  # nothing at all to optimize
        train=replace(recipe.train, epochs=0),
    )
    run = nk.fit(raw, tmp_path / "runs", reporter=quiet)
    assert run.result["test"]["trained"] == trained.result["test"]["raw backbone"]


def test_a_study_praises_no_method_that_loses_to_the_raw_backbone(tmp_path):
    """Random heads of two dimensions on features that are good as they are."""
    features = write_features(tmp_path / "clouds.npz")
    study = small_study(
        features,
        sizes=(2,),
        change={
            "data": {"split": "half"},
            "model": {"head_init": "random"},
            "train": {"epochs": 1, "batch_size": 32, "lr": 1e-9},
        },
    )
    folder = StudyFolder.begin(tmp_path / "study", study)
    work(folder, tmp_path / "runs", device="cpu", reporter=Reporter(quiet=True))
    report = build_study_report(folder.path)
    recalls = {
        m: np.mean([v for (_, name), c in report.cells.items() if name == m for v in c.values]) for m in report.methods
    }
    backbone = report.baselines["raw backbone"]["clouds 2"]
    assert max(recalls.values()) < backbone
    words = study_headline(report)
    assert words.startswith(f"No method beats the best baseline, raw backbone (R@1 {backbone:.1f}): use it without")
    assert report.baseline_lines[0].startswith(f"{report.methods[0]} vs. raw backbone: R@1 worse by ")
    printed = [str(part) for part in terminal_report(folder)]
    assert any(line.startswith("No method beats the best baseline") for line in printed)
    assert report.baseline_lines[0] in printed


def test_methods_above_and_below_the_best_baseline():
    scores = {"a": {"x": 60.0, "y": 50.0}, "b": {"x": 70.0, "y": 54.0}, "c": {"x": 10.0}}
    baselines = {"raw": {"x": 62.0, "y": 52.0}, "pixels": {"x": 3.0, "y": 1.0}}
    assert compare_study("R@1", scores, baselines) == (
        "1 of 3 methods is above the best baseline, raw (R@1 57.0), b by 5.0 points. a is not.",
        True,
    )
    assert compare_study("R@1", scores, {}) == ("", True)
    assert compare_study("R@1", {"c": scores["c"]}, baselines)[0].startswith("No method beats the best baseline, raw ")
