"""`nearkin tune`: search spaces, grids, the search itself, and the command."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.searches import QUIET, small_recipe, trials_of, write_vectors

import nearkin as nk
import nearkin.training.loop
from nearkin.bench import tune, tune_space
from nearkin.bench import tune_storage as storage
from nearkin.bench.tune_space import apply, defaults, space, suggest
from nearkin.cli import main
from nearkin.cli.tune import footer, parse_tune, results_table
from nearkin.config.recipe import ComponentConfig, Recipe
from nearkin.data.splits import Holdout
from nearkin.errors import ConfigError, RunError, TrainingStoppedError
from nearkin.losses import LOSSES
from nearkin.training.factory import make_objective
from nearkin.training.run import Run

optuna = pytest.importorskip("optuna", reason="needs nearkin[bench]")


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vectors(tmp_path_factory.mktemp("features") / "features.npz")


@pytest.fixture
def recipe(features: Path) -> Recipe:
    return small_recipe(features)


def run_search(recipe: Recipe, out: Path, **kwargs) -> tuple[tune.Search, list[tune.Standing]]:
    search = tune.plan(recipe, out, reporter=QUIET, **kwargs)
    tune.work(search, device="cpu", reporter=QUIET)
    return search, tune.standings(search)


# --- search spaces ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
def test_suggested_settings_lie_in_their_ranges_and_the_loss_accepts_them(recipe, loss):
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    ranges = space(recipe, loss)
    assert set(ranges) - {"train.lr", "train.class_lr"} == {f"loss.{name}" for name in LOSSES[loss].space}
    assert ("train.class_lr" in ranges) == bool(LOSSES[loss].inputs.params)
    for fixed in (defaults(recipe, loss), {}, {}):
        study.enqueue_trial(fixed)
        trial = study.ask()
        settings = {name: suggest(trial, name, range_) for name, range_ in ranges.items()}
        assert all(settings[name] in range_ for name, range_ in ranges.items())
        assert settings.items() >= fixed.items()
        trial_recipe = apply(recipe, loss, settings)
        make_objective(trial_recipe, dim=8, num_classes=3)
        assert Recipe.from_dict(tomllib.loads(trial_recipe.to_toml())) == trial_recipe


def test_defaults_and_learning_rate_ranges(recipe):
    first = defaults(recipe, "proxy_anchor")
    assert first == {"loss.alpha": 32.0, "loss.margin": 0.2, "train.lr": 1e-3, "train.class_lr": 0.1}
    lr = space(recipe, "proxy_anchor")["train.lr"]
    assert (lr.kind, lr.low, lr.high) == ("log", pytest.approx(1e-4), pytest.approx(1e-2))
    assert defaults(recipe, "multi_similarity") == {  # another loss: its defaults, without class parameters
        "loss.alpha": 2.0,
        "loss.beta": 50.0,
        "loss.base": 0.5,
        "train.lr": 1e-3,
    }
    faster = apply(replace(recipe, train=replace(recipe.train, head_lr=1e-2)), "proxy_anchor", {"train.lr": 2e-3})
    assert faster.train.head_lr == pytest.approx(2e-2)


def test_recipe_outside_a_declared_range_widens_it(recipe):
    odd = replace(recipe, loss=ComponentConfig("soft_triple", {"gamma": 10.0}))
    assert space(odd, "soft_triple")["loss.gamma"].high == 10.0
    with pytest.raises(ConfigError, match=r"soft_triple\.gamma: the recipe has -1"):
        space(replace(recipe, loss=ComponentConfig("soft_triple", {"gamma": -1.0})), "soft_triple")


def test_another_loss_drops_miner_and_memory(recipe):
    mined = replace(recipe, loss=ComponentConfig("triplet"), miner=ComponentConfig("semihard"), memory=16)
    assert apply(mined, "triplet", {}).miner == ComponentConfig("semihard")
    other = apply(mined, "proxy_anchor", {})
    assert (other.miner, other.memory) == (None, 0)


# --- the thesis's grids ----------------------------------------------------------------------------------------------

UNIT = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
EVEN = list(range(2, 101, 2))
TABLE_15 = {
    "multi_similarity": [("loss.base", UNIT), ("loss.alpha", EVEN), ("loss.beta", EVEN), ("miner.epsilon", UNIT)],
    "soft_triple": [
        ("loss.margin", UNIT),
        ("loss.scale", EVEN),
        ("train.class_lr", [1e-5, 2e-5, 3e-5, 4e-5, 5e-5, 6e-5, 7e-5, 8e-5, 9e-5, 1e-4]),
        # Printed as 10 to 100, as in table 4, which has 10 where the paper of the loss has a temperature of 0.1.
        ("loss.gamma", [1 / 10, 1 / 20, 1 / 30, 1 / 40, 1 / 50, 1 / 60, 1 / 70, 1 / 80, 1 / 90, 1 / 100]),
        ("loss.tau", UNIT),
    ],
    "proxy_anchor": [("loss.margin", UNIT), ("loss.alpha", EVEN)],
}


@pytest.mark.parametrize("loss", TABLE_15)
def test_grids_match_table_15(loss, recipe):
    listed = [(setting, float(value)) for setting, grid in TABLE_15[loss] for value in grid]
    assert [(point.setting, point.value) for point in tune_space.grid_points(loss)] == listed
    assert set(tune_space.GRIDS) == set(TABLE_15)
    base = tune_space.grid_recipe(recipe, loss)
    for number in (0, len(listed) - 1):
        settings = tune_space.trial_settings(recipe, loss, number, [None] * len(listed))
        make_objective(apply(base, loss, settings), dim=8, num_classes=3)


def test_grid_of_gamma_starts_at_the_recipes_value():
    """Table 4 prints 10 and the grid starts there: the temperature 0.1 of the recipe."""
    assert (
        nk.recipes.find("thesis_soft_triple").loss.settings["gamma"] == tune_space.GRIDS["soft_triple"]["loss.gamma"][0]
    )


def test_best_value_of_earlier_settings_is_used(recipe):
    scores: list[float | None] = [0.5] * 61
    scores[4] = 0.8
    last = tune_space.trial_settings(recipe, "proxy_anchor", 60, scores)
    assert last == {"loss.margin": 0.4, "loss.alpha": 100.0}
    assert tune_space.trial_settings(recipe, "proxy_anchor", 4, scores) == {"loss.margin": 0.4, "loss.alpha": 32.0}
    # The recipe's value (0.2) wins ties, and stays if all trials failed.
    assert tune_space.trial_settings(recipe, "proxy_anchor", 11, [0.5] * 61)["loss.margin"] == 0.2
    assert tune_space.trial_settings(recipe, "proxy_anchor", 11, [None] * 61)["loss.margin"] == 0.2
    assert tune_space.trial_settings(recipe, "proxy_anchor", 11, [None, 0.1, None] + [None] * 58)["loss.margin"] == 0.1


def test_grid_runs_in_order_with_shortened_training(recipe, tmp_path, monkeypatch):
    monkeypatch.setitem(tune_space.GRIDS, "proxy_anchor", {"loss.margin": (0.0, 0.5), "loss.alpha": (2.0, 64.0)})
    longer = replace(recipe, train=replace(recipe.train, epochs=4))
    search, (standing,) = run_search(longer, tmp_path, mode="thesis_grid")
    assert (standing.done, standing.left, search.recipe.train.epochs) == (4, 0, 1)
    trials = trials_of(search, "proxy_anchor")
    better = 0.5 if trials[1].value > trials[0].value else 0.0
    assert [t.user_attrs["settings"]["loss.margin"] for t in trials] == [0.0, 0.5, better, better]
    assert [t.user_attrs["settings"]["loss.alpha"] for t in trials] == [32.0, 32.0, 2.0, 64.0]
    text = "\n".join(footer(search, [standing], tune.write_recipes(search, [standing])))
    assert "--train.epochs 4 for the full length" in text


# --- stopping a run early --------------------------------------------------------------------------------------------


def test_stopped_run_resumes_to_the_same_results(recipe, tmp_path):
    seen = []

    def stop_after_two(epoch, score):
        seen.append((epoch, score))
        return epoch == 2

    longer = replace(recipe, train=replace(recipe.train, epochs=3))
    expected = nk.fit(longer, tmp_path / "expected", final=False, reporter=QUIET, device="cpu")
    with pytest.raises(TrainingStoppedError, match="stopped after epoch 2 of 3") as stopped:
        nk.fit(longer, tmp_path / "stopped", final=False, reporter=QUIET, device="cpu", on_epoch_end=stop_after_two)
    run = Run(stopped.value.path)
    assert (run.events()[-1], run.result) == ({"event": "stopped", "epoch": 2}, None)
    # MAP@R, because there are three validation classes; the first event is the start.
    by_epoch = [e["val"]["MAP@R"] for e in expected.events() if e["event"] == "epoch"]
    assert seen == [(1, by_epoch[1]), (2, by_epoch[2])]
    resumed = nk.fit(longer, tmp_path / "stopped", final=False, reporter=QUIET, device="cpu")
    assert resumed.events() == expected.events()
    assert resumed.result["val_MAP@R"] == expected.result["val_MAP@R"] == max(by_epoch)


# --- the search itself -----------------------------------------------------------------------------------------------


def test_equal_budgets_sealed_test_classes_and_exact_replay(recipe, tmp_path, monkeypatch):
    def raise_on_open(self):
        raise AssertionError("the test classes were opened")

    monkeypatch.setattr(Holdout, "open", raise_on_open)
    losses = ("proxy_anchor", "npair")
    search, standings = run_search(recipe, tmp_path / "out", losses=losses, trials=3)
    assert {s.loss: (s.done + s.pruned + s.failed, s.left, s.budget) for s in standings} == dict.fromkeys(
        losses, (3, 0, 3)
    )
    folders = list((tmp_path / "out" / "runs").iterdir())
    assert len(folders) == 6
    for folder in folders:
        assert not [e for e in Run(folder).events() if e["event"] == "holdout_opened"]
        assert (Run(folder).result or {"test": None})["test"] is None
        assert not (folder / "last.pt").exists()
    assert sum((folder / "best.pt").exists() for folder in folders) < 6

    best = standings[0]
    written = tune.write_recipes(search, standings)
    assert list(written) == [s.loss for s in standings]
    again = nk.fit(Recipe.from_toml(written[best.loss]), tmp_path / "again", final=False, reporter=QUIET, device="cpu")
    assert again.result["val_MAP@R"] == best.best
    assert best.classes == 3
    assert best.interval[0] <= best.best <= best.interval[1]

    def raise_on_fit(*args, **kwargs):
        raise AssertionError("a trial was run a second time")

    monkeypatch.setattr("nearkin.training.loop.fit", raise_on_fit)
    tune.work(search, reporter=QUIET)
    assert tune.standings(search) == standings
    extended = tune.plan(recipe, tmp_path / "out", losses=losses, trials=4, reporter=QUIET)
    assert [s.left for s in tune.standings(extended)] == [1, 1]
    assert tune.plan(recipe, tmp_path / "out", losses=["snca", "npair"], reporter=QUIET).trials == 4
    with pytest.raises(ConfigError, match="3 trials of a loss have already started"):
        tune.plan(recipe, tmp_path / "out", losses=losses, trials=2, reporter=QUIET)
    with pytest.raises(ConfigError, match="contains a search with another recipe"):
        tune.plan(replace(recipe, seed=1), tmp_path / "out", losses=losses, reporter=QUIET)


@pytest.mark.slow
def test_unpromising_trials_are_pruned_and_counted(recipe, tmp_path):
    longer = replace(recipe, train=replace(recipe.train, epochs=4))
    search, (standing,) = run_search(longer, tmp_path, trials=14)
    assert (standing.done + standing.pruned, standing.failed, standing.left) == (14, 0, 0)
    assert standing.pruned > 0
    for trial in trials_of(search, "proxy_anchor"):
        epochs = list(trial.intermediate_values)
        if trial.state == optuna.trial.TrialState.PRUNED:
            # Below the median of the trials that were complete by then, at that epoch.
            before = [t.intermediate_values[epochs[-1]] for t in trials_of(search, "proxy_anchor")[: trial.number]
                      if t.state == optuna.trial.TrialState.COMPLETE]  # fmt: skip
            assert max(trial.intermediate_values.values()) < np.median(before)
            assert 1 < len(epochs) < 4
        else:
            assert epochs == [1, 2, 3, 4]
    _, (unpruned,) = run_search(longer, tmp_path / "unpruned", trials=7, prune=False)
    assert (unpruned.done, unpruned.pruned) == (7, 0)


def test_budget_can_be_lowered_to_the_started_trials(recipe, tmp_path):
    tune.plan(recipe, tmp_path, trials=5, reporter=QUIET)
    _, (standing,) = run_search(recipe, tmp_path, trials=2)
    assert (standing.done, standing.left) == (2, 0)
    assert results_table([replace(standing, classes=0)]).caption is None  # there is no interval to explain
    for classes, metric in ((3, "MAP@R"), (7, "MAP@R"), (8, "R@1")):
        assert results_table([replace(standing, classes=classes)]).columns[1].header == f"val {metric}"
    with pytest.raises(ConfigError, match=r"triplet\+nca: a sum of losses has no search ranges"):
        tune.plan(replace(recipe, loss=ComponentConfig.parse_sum("triplet+nca")), out=tmp_path / "sum")
    with pytest.raises(ConfigError, match=r"--train\.epochs 0: a search compares trained models"):
        tune.plan(replace(recipe, train=replace(recipe.train, epochs=0)), tmp_path / "none", reporter=QUIET)
    with pytest.raises(ConfigError, match="--trials 1: 2 trials of a loss have already started"):
        tune.plan(recipe, tmp_path, trials=1, reporter=QUIET)


def test_failed_trial_is_shown_with_its_reason_and_never_scored(recipe, tmp_path):
    diverging = replace(
        recipe, train=replace(recipe.train, lr=1e36, class_lr=1e-3, clip_norm=0.0, lr_schedule="constant")
    )
    search, (standing,) = run_search(diverging, tmp_path, trials=2)
    assert standing.failed == 2
    assert standing.best is None
    assert "finite" in standing.reasons[0]
    assert tune.write_recipes(search, [standing]) == {}
    text = "\n".join(footer(search, [standing], {}))
    assert "proxy_anchor: 2 of 2 trials failed (first: " in text
    assert all(trial.value is None for trial in trials_of(search, "proxy_anchor"))
    assert results_table([standing]).row_count == 1


def test_unexpected_error_in_a_trial_does_not_stop_the_others(recipe, tmp_path, monkeypatch):
    fit = nearkin.training.loop.fit
    calls = []

    def fail_second_call(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("not enough memory: you tried to allocate 8 GB\nmore")
        return fit(*args, **kwargs)

    monkeypatch.setattr(nearkin.training.loop, "fit", fail_second_call)
    _, (standing,) = run_search(recipe, tmp_path, trials=3)
    assert (standing.done, standing.failed, standing.left) == (2, 1, 0)
    (reason,) = standing.reasons
    assert reason == "RuntimeError: not enough memory: you tried to allocate 8 GB (see proxy_anchor-1.log)"
    assert "Traceback" in (tmp_path / "proxy_anchor-1.log").read_text()


def test_partial_line_of_a_killed_writer_is_dropped(recipe, tmp_path):
    search = tune.plan(recipe, tmp_path, trials=2, reporter=QUIET)
    with open(search.address, "a") as journal:
        journal.write('{"op_code": 5, "worker_id"')
    tune.work(search, device="cpu", reporter=QUIET)
    assert [s.done for s in tune.standings(search)] == [2]


def test_file_that_is_not_a_journal_is_left_unchanged(recipe, tmp_path):
    for text in ("a line without an end", '{"compact": "json"}', "x\n"):
        (tmp_path / "notes").write_text(text)
        with pytest.raises(RunError, match="not the journal of a search"):
            tune.plan(recipe, tmp_path / "out", storage=str(tmp_path / "notes"), reporter=QUIET)
        assert (tmp_path / "notes").read_text() == text


def test_lock_is_exclusive(tmp_path):
    journal = str(tmp_path / "journal")
    with storage.open_storage(journal) as first, storage.open_storage(journal) as second:
        with first.lock("a/1", False) as a, second.lock("a/1", False) as b, second.lock("a/2", False) as c:
            assert (a, b, c) == (True, False, True)
        with second.lock("a/1", False) as released:
            assert released


def test_stored_search_and_first_trial(recipe, tmp_path):
    search, (standing,) = run_search(recipe, tmp_path, trials=1)
    assert json.loads((tmp_path / "search.json").read_text())["name"] == search.name
    assert standing.settings == {"loss.alpha": 32.0, "loss.margin": 0.2, "train.lr": 1e-3, "train.class_lr": 0.1}
    assert standing.trial == 0


# --- the command -----------------------------------------------------------------------------------------------------


def test_command_prints_results_progress_and_completion(features, tmp_path, capsys):
    argv = ["tune", "features_default", "--data", str(features), "--losses", "norm_softmax", "triplet", "--trials=2"]
    argv += ["--model.dim", "8", "--train.epochs", "1", "--device", "cpu", "--out", str(tmp_path / "a b")]
    with pytest.raises(SystemExit, match="2"):
        main([*argv, "--workers", "0"])
    assert "no such search in" in capsys.readouterr().err
    assert not (tmp_path / "a b").exists()
    main(argv)
    out, err = capsys.readouterr()
    assert "Best trials on 3 validation classes" in out
    assert "unreliable with only 3 of them" in out
    assert f"nearkin train '{tmp_path}/a b/triplet.toml'" in out
    assert re.search(r"trial 4/4 .* left", err)
    main([*argv, "--quiet", "--workers", "0", "--trials", "7"])  # prints, and extends nothing
    status, err = capsys.readouterr()
    assert (status, err) == (out, "")
    main([*argv, "--quiet"])
    again, err = capsys.readouterr()
    assert (again, err) == (out, "")
    main(argv)
    assert "search already complete: all 4 trials" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--losses", "proxyanchor"], "Did you mean 'proxy_anchor'?"),
        (["--data.val-fraction", "0"], "no validation classes. Use --data.val-fraction 0.1"),
        (["--data.select-on", "test"], "--data.select-on test: a search must not use the test classes"),
        (["--device", "xpu:7"], "device 'xpu:7' cannot be used here"),
        (["--storage", "mysql://host/db"], "'mysql://' is not supported"),
        (["--storage", "postgresql://host"], "names no database"),
        (["--storage", "postgresql+psycopg://u@127.0.0.1:1/db"], "cannot be reached"),
        (["--storage", "{tmp}"], "cannot store the search there"),
        (["--storage", "{features}"], "not the journal of a search"),
        (["--trials", "0"], "--trials: expected at least 1"),
        (["--shorten", "2"], "--shorten: expected a fraction"),
        (["--mode", "thesis_grid", "--losses", "triplet"], "the thesis has no grid for 'triplet'"),
        (["--mode", "thesis_grid", "--trials", "3"], "--trials: not with --mode thesis_grid"),
        (["--trails", "3"], "Did you mean '--trials'?"),
        (["--train.epoch", "3"], "Did you mean '--train.epochs'?"),
        (["--runs", "here"], "its runs are stored in --out"),
        (["--workers", "-1"], "--workers: expected 0 or more"),
        (["--launch", "slurm"], "SLURM not found on this machine"),
    ],
)
def test_invalid_input_exits_with_code_2(flags, message, features, tmp_path, capsys):
    flags = [word.format(tmp=tmp_path, features=features) for word in flags]
    with pytest.raises(SystemExit) as exited:
        main(["tune", "features_default", "--data", str(features), "--out", str(tmp_path / "out"), *flags])
    assert exited.value.code == 2
    assert message in capsys.readouterr().err


def test_recipe_flags_are_those_of_train(features):
    words = "features_default --losses triplet snca --loss.temperature 0.2 --model.dim=4 --trials 3 --slurm.hours 2"
    recipe, args = parse_tune([*words.split(), "--data", str(features)])
    assert (recipe.model.dim, recipe.loss.settings["temperature"], recipe.data.root) == (4, 0.2, features)
    assert (args.losses, args.trials, args.slurm.hours) == (("triplet", "snca"), 3, 2.0)
