"""Runs of a study: whose weights it deletes, which errors stop it, worker errors, study folders and status."""

import dataclasses
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.studies import small_study, write_features

import nearkin.training.loop
from nearkin._common.progress import Reporter
from nearkin.bench import presets
from nearkin.bench.executor import default_workers, threads_for
from nearkin.bench.trials import Outcome, StudyFolder, run_trial, work
from nearkin.cli import main
from nearkin.cli.bench import _study_path, status
from nearkin.cli.tournament import run as tournament
from nearkin.errors import ConfigError, MissingExtraError, TrainingStoppedError
from nearkin.training.loop import fit

QUIET = Reporter(quiet=True)
WEIGHTS = {"best.pt", "last.pt", "previous.pt"}


@pytest.fixture
def features(tmp_path):
    return write_features(tmp_path / "clouds.npz")


@pytest.fixture
def folder(features, tmp_path):
    """A study of one trial with keep_models=False."""
    study = small_study(features, losses=("triplet",), sizes=(4,), seeds=(0,))
    return StudyFolder.begin(tmp_path / "study", study)


def weights(run) -> set[str]:
    return {path.name for path in run.glob("*.pt")}


# --- whose weights are deleted ---------------------------------------------------------------------------------------


def test_complete_run_keeps_its_weights(folder, tmp_path):
    (trial,) = folder.trials
    run = fit(trial.recipe, tmp_path / "runs", device="cpu", reporter=QUIET)
    outcome = run_trial(trial, folder, tmp_path / "runs", "cpu")
    assert outcome.run == str(run.path)
    assert weights(run.path) == WEIGHTS


def test_run_started_elsewhere_keeps_its_weights(folder, tmp_path):
    (trial,) = folder.trials
    with pytest.raises(TrainingStoppedError) as stopped:
        fit(trial.recipe, tmp_path / "runs", device="cpu", reporter=QUIET, on_epoch_end=lambda epoch, _: epoch == 1)
    outcome = run_trial(trial, folder, tmp_path / "runs", "cpu")
    assert outcome.run == str(stopped.value.path)
    assert weights(stopped.value.path) == WEIGHTS


def test_run_created_elsewhere_during_the_trial_keeps_its_weights(folder, tmp_path, monkeypatch):
    (trial,) = folder.trials

    def overtaken_fit(*args, **kwargs):
        with monkeypatch.context() as other_process:
            other_process.setattr("sys.argv", ["nearkin", "train"])
            fit(trial.recipe, tmp_path / "runs", device="cpu", reporter=QUIET)
        return fit(*args, **kwargs)

    monkeypatch.setattr(nearkin.training.loop, "fit", overtaken_fit)
    outcome = run_trial(trial, folder, tmp_path / "runs", "cpu")
    (run,) = (tmp_path / "runs").iterdir()
    assert outcome.status == "done"
    assert weights(run) == WEIGHTS


def test_resumed_trial_deletes_its_checkpoints(folder, tmp_path, monkeypatch):
    (trial,) = folder.trials

    def interrupt(epoch, recall):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        stopping = functools.partial(fit, on_epoch_end=interrupt)
        patched.setattr(nearkin.training.loop, "fit", stopping)
        with pytest.raises(KeyboardInterrupt):
            run_trial(trial, folder, tmp_path / "runs", "cpu")
    (run,) = (tmp_path / "runs").iterdir()
    assert weights(run)
    folder.write(trial, run_trial(trial, folder, tmp_path / "runs", "cpu"))
    assert not weights(run)
    assert not list((folder.path / "trials").glob("*.begun"))


# --- errors that stop a study ----------------------------------------------------------------------------------------

UNAVAILABLE_DEVICE = "xpu:7"


def test_unavailable_device_stops_the_study(folder, tmp_path, capsys):
    with pytest.raises(ConfigError, match="device 'xpu:7' cannot be used here"):
        work(folder, tmp_path / "runs", device=UNAVAILABLE_DEVICE, reporter=QUIET)
    assert folder.outcomes() == {}
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "run", str(folder.path), "--device", UNAVAILABLE_DEVICE])
    assert capsys.readouterr().err.startswith("nearkin: device 'xpu:7' cannot be used here")


def test_missing_package_stops_the_study(folder, tmp_path, monkeypatch):
    def fit_without_package(*args, **kwargs):
        raise MissingExtraError("timm is not installed.")

    monkeypatch.setattr(nearkin.training.loop, "fit", fit_without_package)
    with pytest.raises(MissingExtraError):
        work(folder, tmp_path / "runs", device="cpu", reporter=QUIET)
    assert folder.outcomes() == {}


# --- workers ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_error_of_a_worker_stops_the_study(folder, tmp_path, capsys):
    (tmp_path / "runs").write_text("a file where the folder of runs should be")
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "run", str(folder.path), "--workers", "1", "--device", "cpu", "--runs", str(tmp_path / "runs")])
    assert re.search(rf"nearkin: A worker stopped: .*{tmp_path}/runs", capsys.readouterr().err)
    assert folder.outcomes() == {}


@pytest.mark.slow
def test_worker_with_many_warnings_is_not_blocked(folder, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.stderr.write('a warning\\n' * 20_000)\n")
    command = [sys.executable, "-m", "nearkin", "bench", "run", str(folder.path), "--workers", "1", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])}
    done = subprocess.run(
        [*command, "--runs", str(tmp_path / "runs")], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(folder.outcomes()) == 1


# --- folders ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_failing_worker_reports_its_error(folder, tmp_path):
    """Its parent is alive, so its stdin stays open; an abort of Python must not hide the error."""
    command = [sys.executable, "-m", "nearkin", "bench", "work", str(folder.path), "--runs", str(tmp_path / "runs")]
    process = subprocess.Popen(
        [*command, "--device", "nonsense"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    stderr = process.stderr.read()
    assert process.wait(60) == 2, stderr
    assert stderr.startswith("nearkin: device 'nonsense'")
    process.stdin.close()
    process.stderr.close()


def test_folder_named_like_a_preset_is_not_a_study(features, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "features").mkdir()
    assert _study_path("features", presets.find_study("features", features)) == Path("studies/features")
    assert _study_path(".", presets.find_study("features", features)) == Path()


def test_error_names_what_a_narrower_study_drops(features, tmp_path):
    study = small_study(features, seeds=(0, 1), sizes=(4,))
    folder = StudyFolder.begin(tmp_path / "study", study)
    for trial in folder.trials:
        folder.write(trial, Outcome(trial.id, "failed", "for a test"))
    for changed, message in (
        ({"seeds": (1,)}, "its study also has seeds 0, with outcomes that would be dropped"),
        ({"losses": ("triplet",), "seeds": (0,)}, "its study also has losses norm_softmax; seeds 1, with"),
        ({"metric": "R@2", "sizes": (8,)}, "contains outcomes of another study 'small'"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            StudyFolder.begin(tmp_path / "study", dataclasses.replace(study, **changed))
        assert "remove" not in str(error.value)
    assert len(StudyFolder.open(tmp_path / "study").trials) == 4


def test_relative_paths_of_a_study_built_in_python(features, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = StudyFolder.begin(Path("studies/x"), small_study(Path(features.name)))
    assert {trial.recipe.data.root for trial in StudyFolder.open("studies/x").trials} == {features.resolve()}
    assert folder.trials == StudyFolder.open("studies/x").trials


def test_status_without_the_data(folder, features, tmp_path, capsys):
    features.unlink()
    status([str(folder.path)])
    assert "0 of 1 done; the rest cannot run:" in capsys.readouterr().out
    (trial,) = folder.trials
    folder.write(trial, Outcome(trial.id, "failed", "for a test"))
    status([str(folder.path)])
    output = capsys.readouterr().out
    assert "FAILED triplet in clouds 4, seed 0: for a test" in output
    assert "finished: 1 trial, 1 of them failed" in output


def test_method_that_failed_everywhere_is_excluded_from_the_tournament(features, tmp_path, capsys):
    names = ("norm_softmax", "triplet", "margin")
    folder = StudyFolder.begin(tmp_path / "study", small_study(features, losses=names, sizes=(4, 8), seeds=(0,)))
    for trial in folder.trials:
        value = {"norm_softmax": 0.5, "triplet": 0.6}.get(trial.method)
        outcome = Outcome(trial.id, "done", test={"R@1": value}) if value else Outcome(trial.id, "failed", "for a test")
        folder.write(trial, outcome)
    tournament([str(folder.path)])
    output = capsys.readouterr().out
    assert "margin" not in output
    assert "2 trials failed and are not ranked; for the reasons: nearkin bench status" in output
    with pytest.raises(ConfigError, match=r"--metric: no R@2 in this study\. Available: R@1"):
        tournament([str(folder.path), "--metric", "R@2"])


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity (Linux)")
def test_workers_share_the_cores_of_this_process():
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cores)})
        assert (default_workers(0, "cpu"), threads_for(1)) == (1, 1)
    finally:
        os.sched_setaffinity(0, cores)


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_help_does_not_import_torch(command):
    """The import takes seconds."""
    code = f"import sys, nearkin.cli\ntry: nearkin.cli.main(['{command}', '--help'])\nexcept SystemExit: pass"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nprint('torch' in sys.modules)"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("usage: nearkin")
    assert done.stdout.splitlines()[-1] == "False"
