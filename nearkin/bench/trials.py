"""The folder of a study and how its trials run. Any number of workers share it; no trial is lost or run twice.

STUDY/trials/ID.json is written last: its existence means done or failed. ID.lock is locked while a worker runs the
trial. ID.begun lists the run folders that existed before; the study never deletes anything of theirs.
"""

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Self

from nearkin._common.files import atomic_write, file_lock, is_locked, read_json, remove_leftovers
from nearkin._common.progress import Reporter
from nearkin.bench import executor
from nearkin.bench.results import Result
from nearkin.bench.study import Study, Trial, check_known
from nearkin.config.recipe import Recipe
from nearkin.errors import ConfigError, RunBusyError, RunError
from nearkin.training.run import Run


@dataclass(frozen=True)
class Outcome:
    """The outcome of a trial."""

    id: str  # id of the trial
    status: str  # "done" or "failed"
    reason: str | None = None  # why it failed
    run: str | None = None  # absolute path of the evaluated run folder
    test: dict[str, float] | None = None  # metric -> mean on the test classes, as a fraction
    intervals: dict[str, list[float]] | None = None  # metric -> 95 % interval over test classes
    baselines: dict[str, dict[str, float]] | None = None  # baseline -> metric -> mean on the test classes
    # baseline -> metric -> paired difference of the trained model, lower and upper end of its interval
    differences: dict[str, dict[str, list[float]]] | None = None
    euclidean: dict[str, float] | None = None  # as `test`, by Euclidean distance of the raw embeddings
    val: float | None = None  # R@1 on the validation classes at the chosen epoch
    epoch: int | None = None  # the chosen epoch
    seconds: float = 0.0  # run time including loading and evaluation; for a resumed trial only since it was resumed
    label: str = ""  # the protocol label

    def percent(self, metric: str) -> float | None:
        """The mean of a metric on the test classes, in percent; None if the trial failed."""
        return None if self.test is None else 100 * self.test[metric]


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

    @classmethod
    def begin(cls, path: Path, study: Study) -> Self:
        """Create the folder of a study, or continue with an existing one, which the study may extend."""
        from nearkin.training.factory import validate_recipe

        study = study.resolve_paths(Path.cwd())  # workers read it from another folder
        folder = cls(path, study)
        for trial in folder.trials:
            try:
                validate_recipe(trial.recipe)
            except ConfigError as error:
                raise ConfigError(f"{trial}: {error}") from None
        study_file = path / "study.toml"
        text = study.to_toml()
        try:
            (path / "trials").mkdir(parents=True, exist_ok=True)
            remove_leftovers(path / "trials")
            if not study_file.exists():
                atomic_write(study_file, text)
        except OSError as error:
            raise RunError(f"{path}: cannot be written ({error.strerror}). Choose another folder with --out.") from None
        previous = cls.open(path)
        removed = {trial.id for trial in previous.trials} - {trial.id for trial in folder.trials}
        if any(folder._file(id, "json").exists() for id in removed):
            reason = f"contains outcomes of another study '{previous.study.name}' that are not part of this one. Choose"
            if dropped := study.dropped_from(previous.study):
                reason = f"its study also has {dropped}, with outcomes that would be dropped. "
                reason += "Include them (or omit the flag), or choose"
            raise ConfigError(f"{path}: {reason} another folder with --out.")
        atomic_write(study_file, text)
        return folder

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open the folder of an existing study."""
        path = Path(path)
        if not (path / "study.toml").exists():
            raise RunError(f"{path}: not the folder of a study (no study.toml). Start one with: nearkin bench run.")
        return cls(path, Study.from_toml(path / "study.toml"))

    def _file(self, id: str, suffix: str) -> Path:
        return self.path / "trials" / f"{id}.{suffix}"

    def outcome(self, trial: Trial) -> Outcome | None:
        """Read the outcome of a trial; None if it is not finished."""
        file = self._file(trial.id, "json")
        try:
            outcome = Outcome(**read_json(file))
            tables = [outcome.test or {}, *(outcome.baselines or {}).values()]
            values = [outcome.percent(self.study.metric) or 0, outcome.val or 0, outcome.seconds]
            if not all(isinstance(value, int | float) for value in chain(values, *(t.values() for t in tables))):
                raise TypeError("expected numbers")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise RunError(f"{file}: cannot be read ({reason}). Remove the file to run the trial again.") from None
        return outcome

    def outcomes(self) -> dict[str, Outcome]:
        """Return all outcomes by trial id; unfinished trials are absent."""
        return {trial.id: outcome for trial, outcome in self.finished()}

    def finished(self) -> list[tuple[Trial, Outcome]]:
        """Return the trials that have an outcome, with it."""
        return [(trial, outcome) for trial in self.trials if (outcome := self.outcome(trial)) is not None]

    @property
    def labels(self) -> list[str]:
        """The protocol labels of the trials."""
        return list(dict.fromkeys(trial.label for trial in self.trials))

    @property
    def experiments(self) -> list[str]:
        """The experiments in the order of the plan."""
        return list(dict.fromkeys(trial.experiment for trial in self.trials))

    def unfinished(self) -> list[Trial]:
        """Return the trials without an outcome."""
        return [trial for trial in self.trials if self.outcome(trial) is None]

    def write(self, trial: Trial, outcome: Outcome) -> None:
        """Store the outcome of a trial."""
        atomic_write(self._file(trial.id, "json"), json.dumps(asdict(outcome), indent=1))
        if outcome.status == "done":
            self._file(trial.id, "begun").unlink(missing_ok=True)

    def forget_failures(self) -> int:
        """Delete the outcomes of failed trials, so that they run again; return how many."""
        failed = [id for id, outcome in self.outcomes().items() if outcome.status == "failed"]
        for id in failed:
            self._file(id, "json").unlink(missing_ok=True)
        return len(failed)

    def running(self) -> set[str]:
        """Return the ids of the trials that some process is running."""
        return {lock.stem for lock in (self.path / "trials").glob("*.lock") if is_locked(lock)}

    @contextmanager
    def claim(self, trial: Trial) -> Iterator[bool]:
        """Try to lock a trial. Yields whether to run it: it is locked, and there is no outcome yet."""
        with file_lock(self._file(trial.id, "lock")) as locked:
            yield locked and self.outcome(trial) is None

    def results(
        self, *, dataset: str | None = None, backbone: str | None = None, metric: str | None = None
    ) -> list[Result]:
        """Return the results for a tournament, in percent; a failed trial has a reason, an unfinished one is absent."""
        metric = metric or self.study.metric
        for flag, wanted in (("dataset", dataset), ("backbone", backbone)):
            if wanted is not None:
                check_known(flag, flag, wanted, list(dict.fromkeys(getattr(trial, flag) for trial in self.trials)))
        rows = []
        for trial, outcome in self.finished():
            if dataset in (None, trial.dataset) and backbone in (None, trial.backbone):
                if outcome.test is not None and metric not in outcome.test:
                    raise ConfigError(f"--metric: no {metric} in this study. Available: {', '.join(outcome.test)}.")
                value = outcome.percent(metric)
                rows.append(Result(trial.experiment, trial.method, trial.replicate, value, outcome.reason))
        return rows


def work(
    folder: StudyFolder, runs: Path, *, device: str = "auto", reporter: Reporter, seconds: Mapping[str, float] = {}
) -> int:
    """Run trials until every one has an outcome; `seconds` is their estimated time. Returns how many it ran."""
    metric = folder.study.metric

    def run(trial: Trial) -> str | None:
        try:
            outcome = run_trial(trial, folder, runs, device)
        except RunBusyError:
            return None  # another study is training the same run
        folder.write(trial, outcome)
        value = outcome.percent(metric)
        result = f"FAILED: {outcome.reason}" if value is None else f"{metric} {value:.1f}"
        return f"{trial}  {result}  {outcome.seconds:.0f} s"

    return executor.work(
        folder.unfinished,
        folder.claim,
        run,
        total=len(folder.trials),
        cost=lambda trial: seconds.get(trial.id, 1.0),
        device=device,
        reporter=reporter,
    )


def run_trial(trial: Trial, folder: StudyFolder, runs: Path, device: str) -> Outcome:
    """Train and evaluate one trial. Returns the outcome. Errors of this trial make it "failed"."""
    start = time.monotonic()
    protocol = folder.study.protocol
    begun = folder._file(trial.id, "begun")
    if not begun.exists():  # otherwise the trial is resumed
        atomic_write(begun, json.dumps({"command": sys.argv, "runs": [path.name for path in runs.glob("*")]}))
    train = partial(_train, runs, device, read_json(begun), folder.study.keep_models)
    try:
        selected = run = train(trial.recipe, final=not protocol.refit)
        if protocol.refit:
            assert selected.result is not None
            run = train(protocol.refit_recipe(trial.recipe, selected.result["protocol"]["epoch"]), final=True)
    except Exception as error:
        reason = executor.failure_reason(error, folder.path, f"trials/{trial.id}.log")
        if reason.startswith(str(runs)):
            reason = reason.partition(": ")[2]  # without the run folder
        return Outcome(trial.id, "failed", reason, seconds=time.monotonic() - start, label=trial.label)
    assert run.result is not None
    assert selected.result is not None
    test = run.result["test"]
    return Outcome(
        id=trial.id,
        status="done",
        run=str(run.path.resolve()),
        test=_means(test["trained"]),
        intervals={name: value["interval"] for name, value in test["trained"].items()},
        baselines={name: _means(metrics) for name, metrics in test.items() if name != "trained"},
        differences={
            name: {metric: [found["mean"], *found["interval"]] for metric, found in metrics.items()}
            for name, metrics in run.result["differences"].items()
        },
        euclidean=_means(run.result["euclidean"]) if "euclidean" in run.result else None,
        val=selected.result["val_R@1"],
        epoch=selected.result["protocol"]["epoch"],
        seconds=time.monotonic() - start,
        label=trial.label,
    )


def _means(summary: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {name: value["mean"] for name, value in summary.items()}


def _train(
    runs: Path, device: str, begun: dict[str, list[str]], keep_models: bool, recipe: Recipe, *, final: bool
) -> Run:
    """Train, then delete the checkpoints; a run that was already complete or created elsewhere is left unchanged."""
    from nearkin.training.loop import fit

    complete = {path.parent.name for path in runs.glob("*/result.json")}
    run = fit(recipe, runs, device=device, final=final, reporter=Reporter(quiet=True))
    try:
        command = run.stored_environment.get("command")
    except RunError:
        command = None
    created = run.path.name not in begun["runs"] and command == begun["command"]  # rather than found
    if run.path.name not in complete and created:
        executor.delete_checkpoints(run.path, keep_best=keep_models)
    return run
