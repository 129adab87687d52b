"""Studies: plan, protocols, sealed test classes, outcomes, estimates and commands."""

import dataclasses
import json

import numpy as np
import pytest
from helpers.studies import small_study, write_features

from nearkin._common.progress import Reporter
from nearkin.bench import presets
from nearkin.bench.aggregate import aggregate, paired_difference
from nearkin.bench.estimates import Estimate, count_flops, measure_speed
from nearkin.bench.protocols import Protocol
from nearkin.bench.study import Dataset, Study
from nearkin.bench.trials import StudyFolder, run_trial, work
from nearkin.cli import main
from nearkin.config.recipe import ModelConfig
from nearkin.data.sources import load_features
from nearkin.data.splits import Holdout, make_split
from nearkin.errors import ConfigError, DataError, RunError, UserError
from nearkin.losses.registry import LOSSES
from nearkin.metrics.scores import Scores
from nearkin.training.run import Run

QUIET = Reporter(quiet=True)


@pytest.fixture
def features(tmp_path):
    return write_features(tmp_path / "clouds.npz")


def run_study(tmp_path, study) -> StudyFolder:
    folder = StudyFolder.begin(tmp_path / "study", study)
    work(folder, tmp_path / "runs", device="cpu", reporter=QUIET)
    return folder


# --- the plan --------------------------------------------------------------------------------------------------------


def test_plan_is_the_full_product_with_seeds_outermost(features):
    trials = small_study(features).trials()
    assert len(trials) == 2 * 2 * 2
    assert [t.seed for t in trials] == [0] * 4 + [1] * 4
    assert {(t.size, t.method) for t in trials} == {(s, n) for s in (4, 8) for n in ("norm_softmax", "triplet")}
    assert len({t.id for t in trials}) == len(trials)
    assert all(t.recipe.model.dim == t.size and t.recipe.loss.name == t.method for t in trials)


def test_a_method_may_be_a_sum_of_losses(features):
    parts = [{"name": "norm_softmax"}, {"name": "triplet", "weight": 0.1}]
    study = dataclasses.replace(small_study(features), methods={"both": {"loss": parts}})
    recipe = next(t.recipe for t in study.trials() if t.method == "both")
    assert recipe.loss.name == "norm_softmax+0.1*triplet"
    with pytest.raises(ConfigError, match=r"change.loss: 'both' is a sum of losses"):
        small_study(features, losses=(), methods={"both": {"loss": parts}}, change={"loss": {"reduction": "sum"}})


def test_study_from_a_file(features, tmp_path):
    (tmp_path / "s.toml").write_text("""
        name = "small"
        base = "features_default"
        losses = ["norm_softmax"]
        sizes = [4]
        protocol.name = "fixed"
        change.train.epochs = 2
        [[datasets]]
        name = "clouds"
        source = "features"
        root = "clouds.npz"
        [methods."triplet, semihard"]
        loss.name = "triplet"
        loss.margin = 0.3
        miner.name = "semihard"
    """)
    study = Study.from_toml(tmp_path / "s.toml")
    first, second = study.trials()
    assert first.recipe.data.root == features.resolve()  # relative to the study file
    assert (second.method, second.recipe.loss.name) == ("triplet, semihard", "triplet")
    assert (second.recipe.loss.settings["margin"], second.recipe.miner.name) == (0.3, "semihard")
    assert first.recipe.miner is None
    assert first.recipe.loss.settings == {"temperature": 0.1}  # those of the base, which has the same loss
    (tmp_path / "again.toml").write_text(study.to_toml())
    assert Study.from_toml(tmp_path / "again.toml").trials() == study.trials()


def test_presets(features):
    assert presets.find_study("features", features).method_names == tuple(LOSSES)
    assert len(presets.find_study("features", features).trials()) == len(LOSSES) * 4 * 3
    assert len(presets.find_study("tiny").trials()) == len(LOSSES) * 2 * 2
    matrix = presets.find_study("thesis").trials()
    assert len(matrix) == 3 * 3 * 10 * 4
    sop = next(t for t in matrix if (t.experiment, t.method) == ("sop googlenet 64", "soft_triple"))
    assert (sop.recipe.loss.settings["centers"], sop.recipe.train.step_factor) == (2, 0.25)


def test_base_in_a_folder_with_braces_in_its_name(features, tmp_path):
    study = small_study(features, sizes=(4,), seeds=(0,))
    folder = tmp_path / "{x"
    folder.mkdir()
    (folder / "triplet.toml").write_text(study.trials()[1].recipe.to_toml())
    text = dataclasses.replace(study, base="{loss}.toml", losses=("triplet",)).to_toml()
    (folder / "s.toml").write_text(text)
    read = Study.from_toml(folder / "s.toml")
    (folder / "again.toml").write_text(read.to_toml())
    assert [t.id for t in Study.from_toml(folder / "again.toml").trials()] == [study.trials()[1].id]


def test_methods_with_different_sizes_share_an_experiment(features):
    methods = {f"triplet {dim}": {"loss": {"name": "triplet"}, "model": {"dim": dim}} for dim in (32, 64)}
    trials = small_study(features, losses=(), sizes=(), seeds=(0,), methods=methods).trials()
    assert [(t.experiment, t.method, t.size) for t in trials] == [
        ("clouds", "triplet 32", 32),
        ("clouds", "triplet 64", 64),
    ]


def test_tuned_settings_are_used(features, tmp_path):
    study = small_study(features, losses=("triplet",), sizes=(4,), seeds=(0,))
    recipe = study.trials()[0].recipe
    tuned_recipe = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, lr=0.0123))
    (tmp_path / "triplet.toml").write_text(tuned_recipe.to_toml())
    tuned = dataclasses.replace(study, tuned=tmp_path).trials()[0].recipe
    assert tuned.train.lr == 0.0123


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"losses": ("tripplet",)}, "Did you mean 'triplet'"),
        ({"losses": ("triplet", "triplet")}, "listed twice"),
        ({"seeds": ()}, "seeds: expected at least one"),
        ({"metric": "R@3"}, "metric: R@3 is not computed. Choose one of R@1, R@2"),
        ({"metric": "Recall"}, "No metric named 'Recall'"),
        ({"name": "../elsewhere"}, "expected a valid folder name"),
        ({"base": "thesis_{loss}:{backbone}"}, "uses 'backbone', which the study does not list"),
        ({"change": {"train": {"epoch": 3}}}, "Did you mean 'train.epochs'"),
        (
            {"protocol": Protocol("query_gallery"), "base": "glyphs_small", "datasets": ()},
            "no separate queries and gallery",
        ),
        ({"protocol": Protocol("kfold"), "val_fractions": (0.1, 0.2)}, "the protocol kfold does not use them"),
        (
            {"change": {"data": {"val_fraction": 0.3}}},
            "change.data.val_fraction: set by the study's val_fractions",
        ),
        ({"change": {"data": {"folds": 5}}}, "change.data.folds: set by the study's protocol.folds"),
        ({"change": {"seed": 7}}, "change.seed: set by the study's seeds"),
        ({"methods": {"triplet": {"model": {"dim": 64}}}}, "methods.triplet.model.dim: set by the study's sizes"),
        ({"change": {"model": "resnet50"}}, "change.model: expected settings by name, as in a recipe; got 'resnet50'"),
        ({"methods": {"triplet": 3}}, "methods.triplet: expected settings by name, as in a recipe; got 3"),
        ({"base": "thesis_{loss"}, "base: 'thesis_{loss' is not a valid pattern"),
        ({"base": "thesis_{}"}, "base: 'thesis_{}' is not a valid pattern"),
    ],
)
def test_invalid_study_error_has_a_fix(features, changed, message):
    with pytest.raises(UserError, match=message):
        small_study(features, **changed).trials()


def test_unknown_keys_and_wrong_types_in_a_file(tmp_path):
    (tmp_path / "s.toml").write_text('name = "x"\nlosses = ["triplet"]\nseed = [0]\n')
    with pytest.raises(ConfigError, match=r"seed: no such setting. Did you mean 'seeds'"):
        Study.from_toml(tmp_path / "s.toml")
    (tmp_path / "s.toml").write_text('name = "x"\nlosses = "triplet"\n')
    with pytest.raises(ConfigError, match="losses: expected a list"):
        Study.from_toml(tmp_path / "s.toml")
    (tmp_path / "s.toml").write_text('name = "x"\nlosses = ["triplet"]\n[weights]\nresnet50 = true\n')
    with pytest.raises(ConfigError, match=r"weights.resnet50: expected a string in quotes, got True"):
        Study.from_toml(tmp_path / "s.toml")
    with pytest.raises(ConfigError, match="only with the protocols fixed"):
        Protocol("kfold", refit=True)
    with pytest.raises(ConfigError, match="only with the protocol last_epoch"):
        Protocol("fixed", select_on_test=True)


# --- protocols -------------------------------------------------------------------------------------------------------

SEALED = {
    "last_epoch": Protocol("last_epoch"),
    "kfold": Protocol("kfold", folds=3),
    "fixed": Protocol("fixed"),
    "refit": Protocol("fixed", refit=True),
}


@pytest.mark.parametrize("name", SEALED)
def test_test_classes_are_not_read_before_the_final_evaluation(name, features, tmp_path, monkeypatch):
    """The holdout raises until `evaluate_final` is called, for every protocol that does not choose on test."""
    import nearkin.training.loop

    evaluate_final, unsealed, opened = nearkin.training.loop.evaluate_final, [], []
    open_holdout = Holdout.open

    def guarded_open(self):
        assert unsealed, "the test classes were read before the final evaluation"
        opened.append(self)
        return open_holdout(self)

    def unsealing_evaluate(*args, **kwargs):
        unsealed.append(True)
        try:
            return evaluate_final(*args, **kwargs)
        finally:
            unsealed.pop()

    monkeypatch.setattr(Holdout, "open", guarded_open)
    monkeypatch.setattr(nearkin.training.loop, "evaluate_final", unsealing_evaluate)
    study = small_study(features, protocol=SEALED[name], losses=("triplet",), sizes=(4,), seeds=(0,))
    folder = run_study(tmp_path, study)
    outcomes = list(folder.outcomes().values())
    assert [o.status for o in outcomes] == ["done"] * SEALED[name].models_per_seed
    assert len(opened) == SEALED[name].models_per_seed  # once per model, even if it was trained twice


def test_choosing_on_the_test_classes_is_labelled(features, tmp_path):
    study = small_study(features, protocol=Protocol("last_epoch", select_on_test=True), sizes=(4,), seeds=(0,))
    folder = run_study(tmp_path, study)
    for outcome in folder.outcomes().values():
        run = Run(outcome.run)
        assert outcome.label == "EPOCH SELECTED ON THE TEST CLASSES"
        assert "THE TEST CLASSES" in run.result["protocol"]["epoch_selected_by"]
        # Chosen and evaluated on the same classes: the reported value is the best of all epochs.
        epochs = [event["val"]["R@1"] for event in run.events() if event["event"] == "epoch"]
        assert outcome.test["R@1"] == pytest.approx(max(epochs), abs=1e-12)


def test_queries_are_searched_in_their_gallery(features, tmp_path):
    arrays = dict(np.load(features))
    arrays["part"] = np.where(arrays["labels"] < 12, "train", np.where(np.arange(192) % 2, "query", "gallery"))
    np.savez(features, **arrays)
    change = {"train": {"epochs": 1, "batch_size": 32}}
    study = small_study(
        features, protocol=Protocol("query_gallery"), losses=("triplet",), sizes=(4,), seeds=(0,), change=change
    )
    study.protocol.check_table(load_features(features))
    (outcome,) = run_study(tmp_path, study).outcomes().values()
    assert len(Scores.load(f"{outcome.run}/per_query.npz")) == 48  # half of the 96 test rows are queries
    assert outcome.label.startswith("queries in a gallery of their own")
    with pytest.raises(ConfigError, match="needs the parts query and gallery; it has"):
        study.protocol.check_table(load_features(write_features(tmp_path / "plain.npz")))


def test_folds_partition_the_training_classes(features):
    study = small_study(features, protocol=Protocol("kfold", folds=4), losses=("triplet",), sizes=(4,))
    table = load_features(features)
    trials = [t for t in study.trials() if t.seed == 0]
    groups = []
    for trial in trials:
        split, holdout = make_split(table, trial.recipe.data)
        groups.append(set(split.val.class_names))
        assert not groups[-1] & set(split.train.class_names)
        assert holdout.num_classes == 12
    assert set().union(*groups) == {str(c) for c in range(12)}
    assert sum(map(len, groups)) == 12
    assert [t.replicate for t in study.trials()] == list(range(8))  # seed and fold in one number


def test_refit_trains_on_all_training_classes(features, tmp_path):
    study = small_study(features, protocol=Protocol("fixed", refit=True), losses=("triplet",), sizes=(4,), seeds=(0,))
    (outcome,) = run_study(tmp_path, study).outcomes().values()
    protocol = Run(outcome.run).result["protocol"]
    assert protocol["classes"] == {"train": 12, "val": 0, "test": 12}
    assert "trained again on all" in outcome.label
    assert outcome.val is not None  # of the run that selected the epoch


def test_refit_for_fewer_epochs_than_the_backbone_was_frozen(features):
    recipe = small_study(features).trials()[0].recipe
    frozen = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, epochs=5, frozen_epochs=3))
    refit = Protocol("fixed", refit=True).refit_recipe(frozen, 2)
    assert (refit.train.epochs, refit.train.frozen_epochs) == (2, 2)


def test_several_val_fractions_are_separate_experiments(features):
    study = small_study(features, val_fractions=(0.3, 0.2), losses=("triplet",), sizes=(4,), seeds=(0,))
    assert [t.experiment for t in study.trials()] == ["clouds 4 val 0.3", "clouds 4 val 0.2"]


# --- outcomes --------------------------------------------------------------------------------------------------------


def test_outcomes_match_the_runs_and_are_not_computed_twice(features, tmp_path):
    folder = run_study(tmp_path, small_study(features, sizes=(4,)))
    outcomes = folder.outcomes()
    assert len(outcomes) == 4
    for outcome in outcomes.values():
        stored = Scores.load(f"{outcome.run}/per_query.npz")
        assert outcome.test["R@1"] == pytest.approx(float(np.mean(stored.per_query["R@1"])), abs=1e-12)
        assert not list(Run(outcome.run).path.glob("*.pt"))  # keep_models is False
    written = {p: p.stat().st_mtime_ns for p in (tmp_path / "study" / "trials").glob("*.json")}
    assert work(folder, tmp_path / "runs", device="cpu", reporter=QUIET) == 0
    assert written == {p: p.stat().st_mtime_ns for p in (tmp_path / "study" / "trials").glob("*.json")}


def test_means_standard_deviations_and_paired_differences(features, tmp_path):
    folder = run_study(tmp_path, small_study(features, sizes=(4,)))
    values = {}
    for trial in folder.trials:
        stored = Scores.load(f"{folder.outcome(trial).run}/per_query.npz")
        values.setdefault(trial.method, []).append(stored.per_query["R@1"])
    aggregates = aggregate(folder)
    for method, runs in values.items():
        per_run = [100 * float(np.mean(run)) for run in runs]
        cell = aggregates["clouds 4", method]
        assert cell.mean == pytest.approx(sum(per_run) / 2)
        assert cell.std == pytest.approx(abs(per_run[0] - per_run[1]) / 2**0.5)  # sample standard deviation of two
    expected = np.mean(values["triplet"], axis=0) - np.mean(values["norm_softmax"], axis=0)
    difference = paired_difference(folder, "norm_softmax", "triplet")
    assert difference.difference == pytest.approx(float(expected.mean()), abs=1e-12)
    with pytest.raises(DataError, match=r"no method 'tripet'. Did you mean"):
        paired_difference(folder, "tripet", "triplet")


def test_failed_trial_is_shown_and_never_scored(features, tmp_path):
    study = small_study(features, sizes=(4,), seeds=(0,), methods={"triplet": {"train": {"lr": 1e30}}})
    folder = run_study(tmp_path, study)
    outcomes = {trial.method: folder.outcome(trial) for trial in folder.trials}
    assert (outcomes["norm_softmax"].status, outcomes["triplet"].status) == ("done", "failed")
    assert "became NaN or infinite" in outcomes["triplet"].reason
    assert aggregate(folder)["clouds 4", "triplet"].short() == "1 failed"
    (failed,) = (r for r in folder.results() if r.method == "triplet")
    assert failed.value is None
    assert folder.forget_failures() == 1
    assert [t.method for t in folder.trials if folder.outcome(t) is None] == ["triplet"]


def test_unexpected_error_in_a_trial_does_not_stop_the_others(features, tmp_path, monkeypatch):
    import nearkin.training.loop

    def broken(*args, **kwargs):
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(nearkin.training.loop, "fit", broken)
    folder = StudyFolder.begin(tmp_path / "study", small_study(features))
    outcome = run_trial(folder.trials[0], folder, tmp_path / "runs", "cpu")
    assert outcome.status == "failed"
    assert outcome.reason.startswith("ZeroDivisionError: by nothing (see trials/")
    assert "Traceback" in (tmp_path / "study" / "trials" / f"{folder.trials[0].id}.log").read_text()


def test_missing_data_stops_the_study(features, tmp_path):
    folder = StudyFolder.begin(tmp_path / "study", small_study(features))
    features.unlink()
    with pytest.raises(DataError):
        work(folder, tmp_path / "runs", device="cpu", reporter=QUIET)
    assert folder.outcomes() == {}


def test_seeds_can_be_added_and_the_folder_of_another_study_is_rejected(features, tmp_path):
    study = small_study(features, losses=("triplet",), sizes=(4,), seeds=(0,))
    run_study(tmp_path, study)
    more = StudyFolder.begin(tmp_path / "study", dataclasses.replace(study, seeds=(0, 1)))
    assert [more.outcome(t) is not None for t in more.trials] == [True, False]
    with pytest.raises(ConfigError, match="outcomes of another study"):
        StudyFolder.begin(tmp_path / "study", dataclasses.replace(study, change={"train": {"epochs": 1}}))
    with pytest.raises(RunError, match="not the folder of a study"):
        StudyFolder.open(tmp_path)
    outcome = next((tmp_path / "study" / "trials").glob("*.json"))
    stored = json.loads(outcome.read_text())
    for damaged in (
        *([], {**stored, "test": {}}, {**stored, "test": [1.0]}, {**stored, "test": {"MAP@R": 0.5}}),
        *({**stored, "test": stored["test"] | {"R@1": "0.5"}}, {**stored, "seconds": "x"}, {**stored, "more": 1}),
    ):
        outcome.write_text(json.dumps(damaged))
        with pytest.raises(RunError, match="Remove the file to run the trial again"):
            StudyFolder.open(tmp_path / "study").results()
    outcome.write_text("{")
    with pytest.raises(RunError, match="Remove the file to run the trial again"):
        more.outcomes()


# --- estimates -------------------------------------------------------------------------------------------------------


def test_operation_counts_match_published_ones():
    """ResNet-50 at 224 pixels has 4.1 billion multiply-adds (torchvision's table: 4.09), GoogLeNet 1.5."""
    total = count_flops(ModelConfig(backbone="resnet50", dim=512), (3, 224, 224))[1]
    assert total / 2 == pytest.approx(4.09e9 - 2.05e6 + 1.05e6, rel=0.01)  # less the classifier, plus our head
    assert count_flops(ModelConfig(backbone="googlenet", dim=512), (3, 224, 224))[1] / 2 == pytest.approx(
        1.5e9, rel=0.02
    )
    cached, repeated = count_flops(ModelConfig(backbone="resnet50", dim=512, freeze="backbone"), (3, 224, 224))
    assert cached + repeated == total
    assert repeated == 2 * 2048 * 512


def test_finished_trials_calibrate_the_estimate(features, tmp_path):
    folder = run_study(tmp_path, small_study(features, sizes=(4,)))
    outcomes = folder.outcomes()
    estimate = Estimate(folder.trials, outcomes)
    total = sum(estimate.seconds(t) for t in folder.trials)
    assert total == pytest.approx(sum(o.seconds for o in outcomes.values()))
    assert measure_speed(1) > 1e8
    assert estimate.is_known
    assert not Estimate(folder.trials, {}).is_known
    assert Estimate(folder.trials, {}, tflops=60).is_known


# --- commands --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_commands_from_plan_to_tournament(features, tmp_path, monkeypatch, capfd):
    (tmp_path / "s.toml").write_text(small_study(features, sizes=(4, 8), seeds=(0,)).to_toml())
    monkeypatch.chdir(tmp_path)

    def nearkin(*args, code=None):
        if code is None:
            main(args)
        else:
            with pytest.raises(SystemExit, match=str(code)):
                main(args)
        return "".join(capfd.readouterr())

    output = nearkin("bench", "plan", "s.toml")
    assert "4 trials (0 done), protocol fixed: epoch chosen on 25 % of the training classes" in output
    assert "clouds 8" in output
    assert "time unknown until the first trial has finished" in output
    output = nearkin("bench", "plan", "s.toml", "--tflops", "60")
    assert "about 4 s with 1 at a time, from operation counts" in output.replace("about 5 s", "about 4 s")
    output = nearkin("bench", "run", "s.toml", "--workers", "1", "--device", "cpu")
    assert "4/4" in output
    assert "Ranks over 2 experiments" in output
    assert "no significant difference" in output
    results = (tmp_path / "studies" / "small" / "results.csv").read_text().splitlines()
    assert len(results) == 5
    assert "finished: 4 trials, 0 of them failed" in nearkin("bench", "status", "studies/small")
    assert "with 1 at a time, measured on 4 finished trials" in nearkin("bench", "plan", "s.toml", "--workers", "1")
    assert "Ranks over 2 experiments" in nearkin("tournament", "studies/small")
    assert "4 of 4 trials already complete" in nearkin("bench", "run", "s.toml", "--workers", "1")
    assert "the study has no method 'tripet'. Did you mean 'triplet'?" in nearkin(
        "bench", "plan", "s.toml", "--losses", "tripet", code=2
    )
    assert "--tflops: expected a speed above 0, got 0." in nearkin("bench", "plan", "s.toml", "--tflops", "0", code=2)
    outcomes = [json.loads(p.read_text()) for p in (tmp_path / "studies/small/trials").glob("*.json")]
    assert {o["status"] for o in outcomes} == {"done"}


def test_datasets_need_different_names(features):
    datasets = (Dataset("a", "features", features), Dataset("a", "glyphs"))
    with pytest.raises(ConfigError, match="same name"):
        small_study(features, datasets=datasets)
