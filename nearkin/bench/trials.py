"""Run a study: any number of workers take trials from one folder; no trial is lost or run twice.

    STUDY/study.toml          the study
    STUDY/trials/ID.json      the outcome of a trial, written last: its existence means done or failed
    STUDY/trials/ID.lock      locked by the worker that runs the trial; released when the worker dies
    STUDY/trials/ID.begun     the run folders that existed before; the study never deletes anything of theirs
    RUNS/<key>/               the run folders, shared by studies

There is no queue and no coordinator: a worker walks the plan, skips trials with an outcome, runs those it can lock, and
waits for the rest in case their worker dies. An interrupted trial resumes from its checkpoint with the same results.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from nearkin._common.files import atomic_write, file_lock, is_locked, remove_leftovers
from nearkin._common.progress import Reporter
from nearkin.bench.results import Result
from nearkin.bench.study import Study, Trial
from nearkin.config.recipe import Recipe
from nearkin.errors import ConfigError, DataError, MissingExtraError, RunBusyError, RunError, TrainingFailedError
from nearkin.training.run import Run

POLL_INTERVAL = 0.5  # seconds between checks of trials that other workers run


@dataclass(frozen=True)
class Outcome:
    """The outcome of a trial."""

    id: str  # id of the trial
    status: str  # "done" or "failed"
    reason: str | None = None  # why it failed
    run: str | None = None  # absolute path of the evaluated run folder
    test: dict[str, float] | None = None  # metric -> mean on the test classes, as a fraction
    intervals: dict[str, list[float]] | None = None  # metric -> 95 % interval over test classes
    baselines: dict[str, float] | None = None  # baseline -> R@1 on the test classes before training
    val: float | None = None  # R@1 on the validation classes at the chosen epoch
    epoch: int | None = None  # the chosen epoch
    seconds: float = 0.0  # run time including loading and evaluation; for a resumed trial only since it was resumed
    label: str = ""  # the protocol label


@dataclass(frozen=True)
class StartedTrial:
    """A record made when a trial first starts, to distinguish the run that it creates from existing ones."""

    command: list[str]  # the command line of the worker
    runs: list[str]  # names of the run folders that existed

    @staticmethod
    def record(file: Path, runs: Path) -> StartedTrial:
        """Write the record, or read it if the trial is resumed."""
        if not file.exists():
            atomic_write(file, json.dumps({"command": sys.argv, "runs": [path.name for path in runs.glob("*")]}))
        return StartedTrial(**json.loads(file.read_text(encoding="utf-8")))

    def created(self, run: Run) -> bool:
        """Return whether this trial created a run."""
        try:
            environment = json.loads((run.path / "env.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return run.path.name not in self.runs and environment["command"] == self.command


class StudyFolder:
    """The folder of a study: its plan and its outcomes.

    Args:
        path: The folder.
        study: The study.

    Attributes:
        trials: Every trial of the study.
    """

    def __init__(self, path: Path, study: Study) -> None:
        self.path, self.study = path, study
        self.trials = study.trials()

    @staticmethod
    def begin(path: Path, study: Study) -> StudyFolder:
        """Create the folder of a study, or continue with an existing one.

        Args:
            path: The folder.
            study: The study; it may extend the one in the folder.

        Returns:
            The folder.

        Raises:
            ConfigError: A setting is invalid, or the folder has outcomes that are not part of this study.
            RunError: The folder cannot be written.
        """
        study = study.resolve_paths(Path.cwd())  # workers read it from another folder
        folder = StudyFolder(path, study)
        for trial in folder.trials:
            _check(trial)
        study_file = path / "study.toml"
        text = study.to_toml()
        try:
            (path / "trials").mkdir(parents=True, exist_ok=True)
            remove_leftovers(path)
            remove_leftovers(path / "trials")
            if not study_file.exists():
                atomic_write(study_file, text)
        except OSError as error:
            raise RunError(f"{path}: cannot be written ({error.strerror}). Choose another folder with --out.") from None
        previous = StudyFolder.open(path)
        removed = {trial.id for trial in previous.trials} - {trial.id for trial in folder.trials}
        if any((path / "trials" / f"{id}.json").exists() for id in removed):
            if dropped := study.dropped_from(previous.study):
                raise ConfigError(
                    f"{path}: its study also has {dropped}, with outcomes that would be dropped. "
                    "Include them (or omit the flag), or choose another folder with --out."
                )
            raise ConfigError(
                f"{path}: contains outcomes of another study '{previous.study.name}' that are not part of this one. "
                "Choose another folder with --out."
            )
        atomic_write(study_file, text)
        return folder

    @staticmethod
    def open(path: str | Path) -> StudyFolder:
        """Open the folder of an existing study.

        Args:
            path: The folder.

        Returns:
            The folder.

        Raises:
            RunError: There is no study in it.
        """
        path = Path(path)
        if not (path / "study.toml").exists():
            raise RunError(f"{path}: not the folder of a study (no study.toml). Start one with: nearkin bench run.")
        return StudyFolder(path, Study.from_toml(path / "study.toml"))

    def outcome(self, trial: Trial) -> Outcome | None:
        """Read the outcome of a trial.

        Args:
            trial: A trial of the study.

        Returns:
            The outcome; None if the trial is not finished.

        Raises:
            RunError: The file cannot be read.
        """
        file = self.path / "trials" / f"{trial.id}.json"
        try:
            return Outcome(**json.loads(file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise RunError(f"{file}: cannot be read ({error}). Remove the file to run the trial again.") from None

    def outcomes(self) -> dict[str, Outcome]:
        """Return all outcomes by trial id; unfinished trials are absent."""
        outcomes = {trial.id: self.outcome(trial) for trial in self.trials}
        return {id: outcome for id, outcome in outcomes.items() if outcome is not None}

    def write(self, trial: Trial, outcome: Outcome) -> None:
        """Store the outcome of a trial.

        Args:
            trial: The trial.
            outcome: Its outcome.
        """
        atomic_write(self.path / "trials" / f"{trial.id}.json", json.dumps(asdict(outcome), indent=1))
        if outcome.status == "done":
            (self.path / "trials" / f"{trial.id}.begun").unlink(missing_ok=True)

    def forget_failures(self) -> int:
        """Delete the outcomes of failed trials, so that they run again; return how many."""
        failed = [id for id, outcome in self.outcomes().items() if outcome.status == "failed"]
        for id in failed:
            (self.path / "trials" / f"{id}.json").unlink(missing_ok=True)
        return len(failed)

    def running(self) -> set[str]:
        """Return the ids of the trials that some process is running."""
        return {lock.stem for lock in (self.path / "trials").glob("*.lock") if is_locked(lock)}

    @contextmanager
    def claim(self, trial: Trial) -> Iterator[bool]:
        """Try to lock a trial.

        Args:
            trial: A trial of the study.

        Yields:
            Whether the caller should run it: it has the lock, and there is no outcome yet.
        """
        with file_lock(self.path / "trials" / f"{trial.id}.lock") as locked:
            yield locked and self.outcome(trial) is None

    def results(self) -> list[Result]:
        """Return the results for a tournament, in percent; a failed trial has a reason, an unfinished one is absent."""
        rows, metric = [], self.study.metric
        outcomes = self.outcomes()
        for trial in self.trials:
            outcome = outcomes.get(trial.id)
            if outcome is None:
                continue
            value = None if outcome.test is None else 100 * outcome.test[metric]
            rows.append(Result(trial.experiment, trial.method, trial.replicate, value, outcome.reason))
        return rows


def work(folder: StudyFolder, runs: Path, *, device: str = "auto", reporter: Reporter) -> int:
    """Run trials until every one has an outcome. Returns the number of trials that this worker ran."""
    from nearkin.training.device import choose_device

    choose_device(device)  # fail here rather than in every trial
    finished = 0
    while True:
        remaining = [trial for trial in folder.trials if folder.outcome(trial) is None]
        if not remaining:
            return finished
        before = finished
        for trial in remaining:
            with folder.claim(trial) as claimed:
                if not claimed:
                    continue
                try:
                    folder.write(trial, run_trial(trial, folder, runs, device))
                except RunBusyError:
                    continue  # another study is training the same run
                finished += 1
        if finished == before:
            time.sleep(POLL_INTERVAL)


def run_trial(trial: Trial, folder: StudyFolder, runs: Path, device: str) -> Outcome:
    """Train and evaluate one trial. Returns the outcome. Errors of this trial make it "failed"."""
    start = time.monotonic()
    protocol = folder.study.protocol
    started = StartedTrial.record(folder.path / "trials" / f"{trial.id}.begun", runs)
    keep_models = folder.study.keep_models
    try:
        selected = run = _train(trial.recipe, runs, device, started, final=not protocol.refit, keep_models=keep_models)
        if protocol.refit:
            assert selected.result is not None
            refit = protocol.refit_recipe(trial.recipe, selected.result["protocol"]["epoch"])
            run = _train(refit, runs, device, started, final=True, keep_models=keep_models)
    except (TrainingFailedError, ConfigError) as error:
        message = _first_line(error)
        reason = message.partition(": ")[2] if message.startswith(str(runs)) else message  # without the run folder
        return Outcome(trial.id, "failed", reason, seconds=time.monotonic() - start, label=trial.label)
    except (DataError, RunError, MissingExtraError, OSError):
        raise  # no data, no disk space, no package: every trial would fail
    except Exception as error:
        log = folder.path / "trials" / f"{trial.id}.log"
        log.write_text(traceback.format_exc(), encoding="utf-8")
        reason = f"{type(error).__name__}: {_first_line(error)} (see trials/{log.name})"
        return Outcome(trial.id, "failed", reason, seconds=time.monotonic() - start, label=trial.label)
    assert run.result is not None
    assert selected.result is not None
    test = run.result["test"]
    return Outcome(
        id=trial.id,
        status="done",
        run=str(run.path.resolve()),
        test={name: value["mean"] for name, value in test["trained"].items()},
        intervals={name: value["interval"] for name, value in test["trained"].items()},
        baselines={name: values["R@1"]["mean"] for name, values in test.items() if name != "trained"},
        val=selected.result["val_R@1"],
        epoch=selected.result["protocol"]["epoch"],
        seconds=time.monotonic() - start,
        label=trial.label,
    )


def _train(recipe: Recipe, runs: Path, device: str, started: StartedTrial, *, final: bool, keep_models: bool) -> Run:
    """Train, then delete the checkpoints; a run that was already complete or created elsewhere is left unchanged."""
    from nearkin.training.loop import fit

    complete = {path.parent.name for path in runs.glob("*/result.json")}
    run = fit(recipe, runs, device=device, final=final, reporter=Reporter(quiet=True))
    if run.path.name not in complete and started.created(run):
        for name in ("last.pt", "previous.pt", *(() if keep_models else ("best.pt", "vectors.npz"))):
            (run.path / name).unlink(missing_ok=True)
    return run


def _check(trial: Trial) -> None:
    """Reject an invalid name or setting before anything runs."""
    from nearkin.training.factory import validate_recipe

    try:
        validate_recipe(trial.recipe)
    except ConfigError as error:
        raise ConfigError(f"{trial}: {error}") from None


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).splitlines()[:1]) or type(error).__name__
