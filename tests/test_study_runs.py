"""What a study does to run folders and to its own: whose weights it deletes, what stops it, what its workers say."""

import pytest
from studies import small_study, write_features

import nearkin.train
from nearkin.bench.running import Folder, run_trial
from nearkin.errors import TrainingStopped
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
