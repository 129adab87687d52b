"""`nearkin train --data FOLDER --budget TIME`: what is tried, what fits, and what is reported."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import nearkin as nk
from nearkin import cli
from nearkin.data import sources
from nearkin.data.splits import make_split
from nearkin.report.baselines import headline
from nearkin.training import autopilot, recipes
from nearkin.training.autopilot import Candidate, fit_within
from nearkin.training.run import Run

timm = pytest.importorskip("timm")
if not timm.is_model("test_vit4"):
    pytest.skip("timm is too old to have small networks for tests", allow_module_level=True)


@pytest.fixture
def small(monkeypatch, photo_folder, tmp_path):
    """Photos and networks that take milliseconds instead of minutes."""
    networks = ("test_resnet", "test_efficientnet", "test_convnext")
    monkeypatch.setattr(autopilot, "NETWORKS", networks)
    monkeypatch.setattr(autopilot, "_STEP_SECONDS", 0.5)
    monkeypatch.chdir(tmp_path)
    recipe = recipes.folder_default()
    model = replace(recipe.model, backbone=networks[0], weights="none", dim=16)
    data = replace(recipe.data, root=photo_folder, image_size=64)
    return replace(recipe, data=data, model=model, train=replace(recipe.train, epochs=2, batch_size=16))


@pytest.mark.slow
def test_every_step_is_tried_and_the_best_is_trained_on_all_classes(small, tmp_path, quiet):
    run = fit_within(small, 3600, tmp_path / "runs", reporter=quiet)
    record = json.loads((run.path / autopilot.RECORD).read_text())
    names = [step["name"] for step in record["steps"]]
    assert len(names) == 8
    assert names[0] == "whitened features of test_resnet"
    assert names[-1] == "test_resnet and test_efficientnet and test_convnext joined, as trained"
    assert record["not_tried"] == []
    assert [step["minutes"] for step in record["steps"]] == sorted(step["minutes"] for step in record["steps"])
    values = [(step["val_R@1"] + step["val_MAP@R"]) / 2 for step in record["steps"]]
    assert [step["kept"] for step in record["steps"]] == [v > max(values[:i], default=-1) for i, v in enumerate(values)]
    assert record["chosen"] == names[max(range(8), key=lambda i: (values[i], -i))]
    # The steps left the test classes sealed; only the final run opened them, and it had no validation classes.
    opened = [p for p in (tmp_path / "runs").iterdir() if p.is_dir() and Run(p).result["test"] is not None]
    assert opened == [run.path]
    assert run.result["protocol"]["classes"]["val"] == 0
    if "joined" in record["chosen"]:  # not the published weights
        assert list(run.result["test"]) == ["raw pixels", "tuned backbone", "whitened start", "trained"]
        assert "weights of other runs" in headline(run)
    # Its recipe alone gives the same result.
    again = nk.fit(nk.Run(run.path).recipe, tmp_path / "again", reporter=quiet)
    assert again.result["test"] == run.result["test"]


def test_search_and_final_run_have_the_same_test_classes(small, quiet):
    table = sources.load(small.data, quiet)
    holdouts = [make_split(table, replace(small.data, val_fraction=v))[1].open() for v in (0.0, 0.15)]
    assert holdouts[0].class_names == holdouts[1].class_names


def test_without_time_only_the_first_step_is_tried(small, tmp_path, quiet, monkeypatch):
    monkeypatch.setattr(autopilot, "seconds_per_image", lambda *args: 1.0)  # a very slow machine, by its estimate
    run = fit_within(small, 60, tmp_path / "runs", reporter=quiet)
    record = json.loads((run.path / autopilot.RECORD).read_text())
    assert [step["name"] for step in record["steps"]] == ["whitened features of test_resnet"]
    assert len(record["not_tried"]) >= 4
    assert all("about" in name for name in record["not_tried"])
    assert run.result["test"] is not None


@pytest.mark.slow
def test_an_interrupted_search_resumes_from_its_steps(small, tmp_path, quiet, monkeypatch, capsys):
    real, fitted = autopilot.fit, []

    def interrupted(recipe, *args, **kwargs):
        if len(fitted) == 3:
            raise KeyboardInterrupt
        fitted.append(recipe)
        return real(recipe, *args, **kwargs)

    monkeypatch.setattr(autopilot, "fit", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"stopped after .*; best so far: .*runs/"):
        fit_within(small, 3600, tmp_path / "runs", reporter=quiet)
    [state] = (tmp_path / "runs").glob(".autopilot-*.json")
    assert len(json.loads(state.read_text())["done"]) == 3
    fitted.clear()
    monkeypatch.setattr(autopilot, "fit", real)
    run = fit_within(small, 3600, tmp_path / "runs", reporter=quiet)
    assert not state.exists()
    clean = fit_within(small, 3600, tmp_path / "clean", reporter=quiet)
    assert run.result["test"] == clean.result["test"]


def test_costs_add_up(small, quiet):
    pilot = autopilot.Autopilot(600, Path("runs"), "cpu", quiet, num_train=1000, num_test=500)
    pilot.seconds_per_image = {"a": 0.01, "b": 0.02}
    base = replace(small, model=replace(small.model, backbone="a"))
    assert pilot.forward("a,b", 100, views=2) == pytest.approx(6.0)
    frozen = pilot.cost(base, ())
    assert frozen[0] == pytest.approx(10 + 2e-4 * 1000 * 2 + 0.5)
    assert frozen[1] == pytest.approx(2e-4 * 1000 * 2 + 500 * 0.01 + 1.0)  # the features are cached
    tuned = autopilot.tuned_recipe(base, "a", views=2, epochs=4)
    part = Candidate("a", tuned)
    joined = replace(autopilot.joined_recipe(base, [part, part]), model=replace(base.model, backbone="a,b", views=2))
    assert pilot.cost(tuned, ())[0] > frozen[0]
    # To train a joined model again includes its parts.
    assert pilot.cost(joined, (part, part))[1] > 2 * pilot.train_seconds(tuned.model, 4, 1)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["glyphs_small", "--budget", "5m"], "--budget: chooses the recipe"),
        (["--budget", "5m"], "--data FOLDER"),
        (["--data", "FOLDER", "--budget", "5 minutes"], "expected a time such as"),
        (["--data", "FOLDER", "--budget", "10s"], "at least 60 s, got 10 s"),
        (["--data", "FOLDER", "--budget", "5m", "--train.lr", "1"], "--train.lr: --budget chooses it"),
        (["--data", "FOLDER", "--budget", "5m", "--loss.alpha=2"], "--loss.alpha: --budget chooses it"),
        (["--data", "FOLDER", "--budget", "5m", "--loss", "triplet"], "--loss: --budget chooses it"),
        (["--data", "features.npz", "--budget", "5m"], "these are features"),
    ],
)
def test_what_a_budget_cannot_use_is_refused(argv, message, photo_folder, tmp_path, monkeypatch, capsys):
    from helpers.studies import write_features

    monkeypatch.chdir(tmp_path)
    write_features(tmp_path / "features.npz")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", *[str(photo_folder) if word == "FOLDER" else word for word in argv]])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not Path("runs").exists() or not list(Path("runs").iterdir())
