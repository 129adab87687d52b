"""What a study does to run folders and to its own: whose weights it deletes, what stops it, what its workers say."""

import os
import subprocess
import sys
import tempfile

import pytest
from studies import small_study, write_features

import nearkin.train
from nearkin.bench.running import Folder, run_trial, work
from nearkin.bench.workers import Worker, _last_words
from nearkin.cli import main
from nearkin.errors import ConfigError, MissingExtra, TrainingStopped
from nearkin.progress import Reporter
from nearkin.train import fit

QUIET = Reporter(quiet=True)
WEIGHTS = {"best.pt", "last.pt", "previous.pt"}


@pytest.fixture
def features(tmp_path):
    return write_features(tmp_path / "clouds.npz")


@pytest.fixture
def folder(features, tmp_path):
    """A study of one trial, which keeps no weights."""
    study = small_study(features, losses=("triplet",), sizes=(4,), seeds=(0,))
    return Folder.begin(tmp_path / "study", study)


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
    with pytest.raises(TrainingStopped) as stopped:
        fit(trial.recipe, tmp_path / "runs", device="cpu", reporter=QUIET, watch=lambda epoch, _: epoch == 1)
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

    monkeypatch.setattr(nearkin.train, "fit", overtaken)
    outcome = run_trial(trial, folder, tmp_path / "runs", "cpu")
    (run,) = (tmp_path / "runs").iterdir()
    assert outcome.status == "done"
    assert weights(run) == WEIGHTS


def test_a_trial_that_was_cut_off_clears_up_when_it_is_done(folder, tmp_path, monkeypatch):
    (trial,) = folder.trials

    def cut(epoch, recall):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(nearkin.train, "fit", lambda *given, **asked: fit(*given, **asked, watch=cut))
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
        raise MissingExtra("timm is not installed.")

    monkeypatch.setattr(nearkin.train, "fit", lacking)
    with pytest.raises(MissingExtra):
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
