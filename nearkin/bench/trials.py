"""Running a study: any number of workers take trials from one folder, and nothing is lost or done twice.

    STUDY/study.toml          what is to be done
    STUDY/trials/ID.json      one outcome each, written last: its existence means done (or failed, with the reason)
    STUDY/trials/ID.lock      held by the worker that runs the trial; a killed worker lets go by itself
    STUDY/trials/ID.begun     what lay in RUNS before: of those runs nothing is ever deleted
    RUNS/<key>/               the run folders, which studies share

There is no queue and no master: a worker walks the plan, skips what has an outcome, takes what nobody holds, and waits
for the rest in case its holder dies. A trial that was cut off goes on from its checkpoint with the same numbers.
"""

from __future__ import annotations

import fcntl
import json
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from nearkin._common.files import atomic_write, file_lock
from nearkin._common.progress import Reporter
from nearkin.bench.results import Result
from nearkin.bench.study import Study, Trial
from nearkin.config.recipe import Recipe
from nearkin.errors import ConfigError, DataError, MissingExtraError, RunBusyError, RunError, TrainingFailedError
from nearkin.training.run import Run

WAIT = 0.5  # seconds between looks at trials that other workers hold


@dataclass(frozen=True)
class Outcome:
    """What became of a trial."""

    id: str
    status: str
    """done or failed."""
    reason: str | None = None
    """Why it failed."""
    run: str | None = None
    """The run folder that was judged, as an absolute path."""
    test: dict[str, float] | None = None
    """Metrics on the test classes, as shares."""
    intervals: dict[str, list[float]] | None = None
    """Their 95 % intervals over classes."""
    yardstick: dict[str, float] | None = None
    """R@1 on the test classes of what training started from, by name."""
    val: float | None = None
    """R@1 on the validation classes, at the chosen epoch."""
    epoch: int | None = None
    seconds: float = 0.0
    """Of this trial, reading and judging included; only of its last sitting if it was cut off."""
    label: str = ""


@dataclass(frozen=True)
class StartedTrial:
    """What a trial found when it was first begun; tells the runs that it made from those of others."""

    command: list[str]
    runs: list[str]
    """Names of the run folders that were there."""

    @staticmethod
    def note(file: Path, runs: Path) -> StartedTrial:
        """Written down once, so that a trial that was cut off still knows its own run."""
        if not file.exists():
            atomic_write(file, json.dumps({"command": sys.argv, "runs": [path.name for path in runs.glob("*")]}))
        return StartedTrial(**json.loads(file.read_text(encoding="utf-8")))

    def made(self, run: Run) -> bool:
        try:
            environment = json.loads((run.path / "env.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return run.path.name not in self.runs and environment["command"] == self.command


class StudyFolder:
    """The folder of a study."""

    def __init__(self, path: Path, study: Study) -> None:
        self.path, self.study = path, study
        self.trials = study.trials()

    @staticmethod
    def begin(path: Path, study: Study) -> StudyFolder:
        """Make the folder, or go on with it; another study under the same name is refused."""
        study = study.below(Path.cwd())  # workers read it from its own folder
        for trial in (folder := StudyFolder(path, study)).trials:
            _check(trial)
        stored = path / "study.toml"
        text = study.to_toml()
        try:
            (path / "trials").mkdir(parents=True, exist_ok=True)
            if not stored.exists():
                atomic_write(stored, text)
        except OSError as error:
            raise RunError(f"{path}: cannot be written ({error.strerror}). Choose another place with --out.") from None
        before = StudyFolder.open(path)
        gone = {trial.id for trial in before.trials} - {trial.id for trial in folder.trials}
        if gone and any((path / "trials" / f"{id}.json").exists() for id in gone):
            if left_out := study.leaves_out(before.study):
                raise ConfigError(
                    f"{path}: its study also has {left_out}, and outcomes that would be left out. "
                    "Name those as well (or give no flag), or give another folder with --out."
                )
            raise ConfigError(
                f"{path}: holds outcomes of another study '{before.study.name}' that this one has not. "
                "Give another folder with --out."
            )
        atomic_write(stored, text)
        return folder

    @staticmethod
    def open(path: str | Path) -> StudyFolder:
        path = Path(path)
        if not (path / "study.toml").exists():
            raise RunError(f"{path}: not the folder of a study (it holds no study.toml). Begin one: nearkin bench run.")
        return StudyFolder(path, Study.from_toml(path / "study.toml"))

    def outcome(self, trial: Trial) -> Outcome | None:
        file = self.path / "trials" / f"{trial.id}.json"
        try:
            return Outcome(**json.loads(file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise RunError(f"{file}: cannot be read ({error}). Remove the file to run the trial again.") from None

    def outcomes(self) -> dict[str, Outcome]:
        """By the trial's id; what is not done yet is absent."""
        found = {trial.id: self.outcome(trial) for trial in self.trials}
        return {id: outcome for id, outcome in found.items() if outcome is not None}

    def write(self, trial: Trial, outcome: Outcome) -> None:
        atomic_write(self.path / "trials" / f"{trial.id}.json", json.dumps(asdict(outcome), indent=1))
        if outcome.status == "done":
            (self.path / "trials" / f"{trial.id}.begun").unlink(missing_ok=True)

    def forget_failures(self) -> int:
        """Let trials that failed run again; how many there are."""
        failed = [id for id, outcome in self.outcomes().items() if outcome.status == "failed"]
        for id in failed:
            (self.path / "trials" / f"{id}.json").unlink(missing_ok=True)
        return len(failed)

    def running(self) -> set[str]:
        """Ids of trials that some process holds right now."""
        taken = set()
        for lock in (self.path / "trials").glob("*.lock"):
            with open(lock, "rb") as file:  # only looked at: a worker is not disturbed, and a reader may not write here
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    taken.add(lock.stem)
        return taken

    @contextmanager
    def claim(self, trial: Trial) -> Iterator[bool]:
        """Whether the trial is ours to run; while it is, nobody else's."""
        with file_lock(self.path / "trials" / f"{trial.id}.lock") as ours:
            yield ours and self.outcome(trial) is None

    def results(self) -> list[Result]:
        """For a tournament, in percent; trials that are not done are left out, failed ones carry their reason."""
        rows, metric = [], self.study.metric
        outcomes = self.outcomes()
        for trial in self.trials:
            outcome = outcomes.get(trial.id)
            if outcome is None:
                continue
            value = None if outcome.test is None else 100 * outcome.test[metric]
            rows.append(Result(trial.experiment, trial.method, trial.draw, value, outcome.reason))
        return rows


def work(folder: StudyFolder, runs: Path, *, device: str = "auto", reporter: Reporter) -> int:
    """Take trials until every one has an outcome; how many this worker did."""
    from nearkin.training.factory import choose_device

    choose_device(device)  # one that is not there is no trial's fault
    did = 0
    while True:
        left = [trial for trial in folder.trials if folder.outcome(trial) is None]
        if not left:
            return did
        before = did
        for trial in left:
            with folder.claim(trial) as ours:
                if not ours:
                    continue
                try:
                    folder.write(trial, run_trial(trial, folder, runs, device))
                except RunBusyError:
                    continue  # the same run, as part of another study
                did += 1
        if did == before:
            time.sleep(WAIT)


def run_trial(trial: Trial, folder: StudyFolder, runs: Path, device: str) -> Outcome:
    """Train and judge one trial. What is its own fault becomes its outcome; what would stop every trial is raised."""
    began = time.monotonic()
    protocol = folder.study.protocol
    begun = StartedTrial.note(folder.path / "trials" / f"{trial.id}.begun", runs)
    keep = folder.study.keep_models
    try:
        chosen = run = _train(trial.recipe, runs, device, begun, final=not protocol.refit, keep=keep)
        if protocol.refit:
            assert chosen.result is not None
            again = protocol.refitted(trial.recipe, chosen.result["protocol"]["epoch"])
            run = _train(again, runs, device, begun, final=True, keep=keep)
    except (TrainingFailedError, ConfigError) as error:
        said = _one_line(error)
        reason = said.partition(": ")[2] if said.startswith(str(runs)) else said  # the run folder is known anyway
        return Outcome(trial.id, "failed", reason, seconds=time.monotonic() - began, label=trial.label)
    except (DataError, RunError, MissingExtraError, OSError):
        raise  # no data, no disk, no package: no trial could do better
    except Exception as error:
        log = folder.path / "trials" / f"{trial.id}.log"
        log.write_text(traceback.format_exc(), encoding="utf-8")
        reason = f"{type(error).__name__}: {_one_line(error)} (see trials/{log.name})"
        return Outcome(trial.id, "failed", reason, seconds=time.monotonic() - began, label=trial.label)
    assert run.result is not None
    assert chosen.result is not None
    test = run.result["test"]
    return Outcome(
        id=trial.id,
        status="done",
        run=str(run.path.resolve()),
        test={name: value["mean"] for name, value in test["trained"].items()},
        intervals={name: value["interval"] for name, value in test["trained"].items()},
        yardstick={name: values["R@1"]["mean"] for name, values in test.items() if name != "trained"},
        val=chosen.result["val_R@1"],
        epoch=chosen.result["protocol"]["epoch"],
        seconds=time.monotonic() - began,
        label=trial.label,
    )


def _train(recipe: Recipe, runs: Path, device: str, begun: StartedTrial, *, final: bool, keep: bool) -> Run:
    """Train, and clear up after it; a run that was found done, or that somebody else had begun, is left as it is."""
    from nearkin.training.loop import fit

    done = {path.parent.name for path in runs.glob("*/result.json")}
    run = fit(recipe, runs, device=device, final=final, reporter=Reporter(quiet=True))
    if run.path.name not in done and begun.made(run):
        for name in ("last.pt", "previous.pt", *(() if keep else ("best.pt", "vectors.npz"))):
            (run.path / name).unlink(missing_ok=True)
    return run


def _check(trial: Trial) -> None:
    """Refuse a wrong name or setting before anything runs."""
    from nearkin.training.factory import validate_recipe

    try:
        validate_recipe(trial.recipe)
    except ConfigError as error:
        raise ConfigError(f"{trial}: {error}") from None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).splitlines()[:1]) or type(error).__name__
