"""What a study does to run folders and to its own: whose weights it deletes, what stops it, what its workers say."""

import dataclasses
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from helpers.studies import small_study, write_features

import nearkin.training.loop
from nearkin._common.progress import Reporter
from nearkin.bench import presets
from nearkin.bench.machine import default_workers, threads_for
from nearkin.bench.trials import Outcome, StudyFolder, run_trial, work
from nearkin.bench.workers import Worker, _last_words
from nearkin.cli import main
from nearkin.cli.bench import _place, status
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
    """A study of one trial, which keeps no weights."""
    study = small_study(features, losses=("triplet",), sizes=(4,), seeds=(0,))
    return StudyFolder.begin(tmp_path / "study", study)


def weights(run) -> set[str]:
    return {path.name for path in run.glob("*.pt")}


# --- whose weights are deleted ---------------------------------------------------------------------------------------


def test_a_run_that_was_found_done_keeps_its_weights(folder, tmp_path):
    (trial,) = folder.trials
    mine = fit(trial.recipe, tmp_path / "runs", device="cpu", reporter=QUIET)
    outcome = run_trial(trial, folder, tmp_path / "runs", "cpu")
    assert outcome.run == str(mine.path)
    assert weights(mine.path) == WEIGHTS


def test_a_run_that_another_began_keeps_its_weights(folder, tmp_path):
    (trial,) = folder.trials
    with pytest.raises(TrainingStoppedError) as stopped:
        fit(trial.recipe, tmp_path / "runs", device="cpu", reporter=QUIET, on_epoch_end=lambda epoch, _: epoch == 1)
    outcome = run_trial(trial, folder, tmp_path / "runs", "cpu")
    assert outcome.run == str(stopped.value.path)
    assert weights(stopped.value.path) == WEIGHTS


def test_a_run_that_another_made_while_the_trial_read_its_data_keeps_its_weights(folder, tmp_path, monkeypatch):
    (trial,) = folder.trials

    def overtaken(*given, **asked):
        with monkeypatch.context() as another:
            another.setattr("sys.argv", ["nearkin", "train"])
            fit(trial.recipe, tmp_path / "runs", device="cpu", reporter=QUIET)
        return fit(*given, **asked)

    monkeypatch.setattr(nearkin.training.loop, "fit", overtaken)
    outcome = run_trial(trial, folder, tmp_path / "runs", "cpu")
    (run,) = (tmp_path / "runs").iterdir()
    assert outcome.status == "done"
    assert weights(run) == WEIGHTS


def test_a_trial_that_was_cut_off_clears_up_when_it_is_done(folder, tmp_path, monkeypatch):
    (trial,) = folder.trials

    def cut(epoch, recall):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(nearkin.training.loop, "fit", lambda *given, **asked: fit(*given, **asked, on_epoch_end=cut))
        with pytest.raises(KeyboardInterrupt):
            run_trial(trial, folder, tmp_path / "runs", "cpu")
    (run,) = (tmp_path / "runs").iterdir()
    assert weights(run)
    folder.write(trial, run_trial(trial, folder, tmp_path / "runs", "cpu"))
    assert not weights(run)
    assert not list((folder.path / "trials").glob("*.begun"))


# --- what stops a study ----------------------------------------------------------------------------------------------

NO_SUCH_DEVICE = "xpu:7"


def test_a_device_that_is_not_there_stops_the_study(folder, tmp_path, capsys):
    with pytest.raises(ConfigError, match="device 'xpu:7' cannot be used here"):
        work(folder, tmp_path / "runs", device=NO_SUCH_DEVICE, reporter=QUIET)
    assert folder.outcomes() == {}
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "run", str(folder.path), "--device", NO_SUCH_DEVICE])
    assert capsys.readouterr().err.startswith("nearkin: device 'xpu:7' cannot be used here")


def test_a_package_that_is_not_there_stops_the_study(folder, tmp_path, monkeypatch):
    def lacking(*given, **asked):
        raise MissingExtraError("timm is not installed.")

    monkeypatch.setattr(nearkin.training.loop, "fit", lacking)
    with pytest.raises(MissingExtraError):
        work(folder, tmp_path / "runs", device="cpu", reporter=QUIET)
    assert folder.outcomes() == {}


# --- workers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "last"),
    [
        ("a warning\nnearkin: cannot write (no space left)\nMake room.\n", "cannot write (no space left)\nMake room."),
        ("Traceback\n  line\nValueError: odd\n", "ValueError: odd"),
        ("", "it said nothing."),
    ],
)
def test_the_last_words_of_a_worker_are_its_whole_error(said, last):
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen([sys.executable, "-c", f"import sys; sys.stderr.write({said!r})"], stderr=errors)
        process.wait()
        assert _last_words(Worker(process, errors)) == last


@pytest.mark.slow
def test_a_worker_that_warns_a_lot_is_not_held_up(folder, tmp_path):
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
def test_a_worker_that_stops_by_itself_says_why(folder, tmp_path):
    """Its parent lives, so its input stays open; the error must not be drowned by an abort of Python."""
    command = [sys.executable, "-m", "nearkin", "bench", "work", str(folder.path), "--runs", str(tmp_path / "runs")]
    process = subprocess.Popen(
        [*command, "--device", "nonsense"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    said = process.stderr.read()
    assert process.wait(60) == 2, said
    assert said.startswith("nearkin: device 'nonsense'")
    process.stdin.close()
    process.stderr.close()


def test_a_folder_named_like_a_preset_is_not_taken_for_a_study(features, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "features").mkdir()
    assert _place("features", presets.find_study("features", features)) == Path("studies/features")
    assert _place(".", presets.find_study("features", features)) == Path()


def test_what_a_narrower_study_leaves_out_is_named(features, tmp_path):
    study = small_study(features, seeds=(0, 1), sizes=(4,))
    folder = StudyFolder.begin(tmp_path / "study", study)
    for trial in folder.trials:
        folder.write(trial, Outcome(trial.id, "failed", "for a test"))
    for changed, said in (
        ({"seeds": (1,)}, "its study also has seeds 0, and outcomes that would be left out"),
        ({"losses": ("triplet",), "seeds": (0,)}, "its study also has losses norm_softmax; seeds 1, and"),
        ({"metric": "R@2", "sizes": (8,)}, "holds outcomes of another study 'small'"),
    ):
        with pytest.raises(ConfigError, match=said) as refused:
            StudyFolder.begin(tmp_path / "study", dataclasses.replace(study, **changed))
        assert "remove" not in str(refused.value)
    assert len(StudyFolder.open(tmp_path / "study").trials) == 4


def test_a_study_made_in_python_finds_its_data_from_its_folder(features, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = StudyFolder.begin(Path("studies/x"), small_study(Path(features.name)))
    assert {trial.recipe.data.root for trial in StudyFolder.open("studies/x").trials} == {features.resolve()}
    assert folder.trials == StudyFolder.open("studies/x").trials


def test_the_status_of_a_study_whose_data_are_gone(folder, features, tmp_path, capsys):
    features.unlink()
    status([str(folder.path)])
    assert "0 of 1 done; the rest cannot be run:" in capsys.readouterr().out
    (trial,) = folder.trials
    folder.write(trial, Outcome(trial.id, "failed", "for a test"))
    status([str(folder.path)])
    said = capsys.readouterr().out
    assert "FAILED triplet in clouds 4, seed 0: for a test" in said
    assert "finished: 1 trials, 1 of them failed" in said


def test_an_entrant_that_failed_everywhere_has_withdrawn_from_the_tournament(features, tmp_path, capsys):
    names = ("norm_softmax", "triplet", "margin")
    folder = StudyFolder.begin(tmp_path / "study", small_study(features, losses=names, sizes=(4, 8), seeds=(0,)))
    for trial in folder.trials:
        value = {"norm_softmax": 0.5, "triplet": 0.6}.get(trial.method)
        outcome = Outcome(trial.id, "done", test={"R@1": value}) if value else Outcome(trial.id, "failed", "for a test")
        folder.write(trial, outcome)
    tournament([str(folder.path)])
    said = capsys.readouterr().out
    assert "margin" not in said
    assert "2 trials failed and are left out of every rank: nearkin bench status" in said
    with pytest.raises(ConfigError, match="--metric: only with 'papers'; a study or a file is ranked by its own"):
        tournament([str(folder.path), "--metric", "R@2"])


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux, where a process can be kept to a core")
def test_workers_share_the_cores_that_this_process_may_use():
    may = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(may)})
        assert (default_workers(0, "cpu"), threads_for(1)) == (1, 1)
    finally:
        os.sched_setaffinity(0, may)


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_help_does_not_wait_for_torch(command):
    """That import alone takes seconds."""
    told = f"import sys, nearkin.cli\ntry: nearkin.cli.main(['{command}', '--help'])\nexcept SystemExit: pass"
    done = subprocess.run(
        [sys.executable, "-c", f"{told}\nprint('torch' in sys.modules)"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("usage: nearkin")
    assert done.stdout.splitlines()[-1] == "False"
