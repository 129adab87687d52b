"""Fair hyperparameter search: every loss gets the same number of trials, evaluated on validation classes only.

A worker locks a trial, trains it with `fit(final=False)` and records how it ended in Optuna's storage.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from nearkin._common.progress import Reporter
from nearkin.bench import executor
from nearkin.bench.tune_plan import Mode, Search, Standing, load_trials, plan, standings, write_recipes
from nearkin.bench.tune_space import Settings, apply, space, suggest, trial_settings
from nearkin.bench.tune_storage import SharedStorage, open_storage
from nearkin.errors import TrainingStoppedError
from nearkin.training.evaluation import selection_metrics

if TYPE_CHECKING:
    from optuna.trial import Trial

    from nearkin.training.run import Run

__all__ = ["Mode", "Search", "Standing", "plan", "run_trial", "standings", "work", "write_recipes"]


def work(search: Search, *, device: str = "auto", reporter: Reporter | None = None) -> None:
    """Run trials until none is left; wait for those of other workers, in case one of them dies."""
    from optuna.exceptions import UpdateFinishedTrialError

    with open_storage(search.address) as shared:

        def run(trial: tuple[str, int]) -> str:
            try:
                message = run_trial(search, *trial, shared, device)
            except UpdateFinishedTrialError:  # the lock was lost with the connection
                message = "finished by another worker"
            return f"{trial[0]} {trial[1]}: {message}"

        executor.work(
            lambda: _unfinished(search, shared),
            lambda trial: _claim(search, *trial, shared),
            run,
            total=search.total,
            cost=lambda trial: 1.0,
            device=device,
            reporter=reporter or Reporter(),
        )


def _unfinished(search: Search, shared: SharedStorage) -> list[tuple[str, int]]:
    """Return loss and number of unfinished trials, losses in turn: a search stopped early is fair too."""
    trials = [
        (loss, trial.number)
        for loss in search.losses
        for trial in load_trials(search, loss, shared)
        if not trial.state.is_finished()
    ]
    return sorted(trials, key=lambda trial: trial[1])


@contextmanager
def _claim(search: Search, loss: str, number: int, shared: SharedStorage) -> Iterator[bool]:
    """Lock a trial. Yields whether it is unfinished, and the trials that it depends on are finished."""
    with shared.lock(f"{search.study(loss)}/{number}", False) as locked:
        num_required = search.points(loss)[number].first if search.is_grid else 0
        finished = [t.state.is_finished() for t in load_trials(search, loss, shared)] if locked else []
        yield locked and not finished[number] and all(finished[:num_required])


def run_trial(search: Search, loss: str, number: int, shared: SharedStorage, device: str) -> str:
    """Train one trial until it has a score, is pruned or fails, and record that."""
    import optuna
    from optuna.trial import Trial, TrialState

    from nearkin.training.loop import fit

    warmup = max(1, round(search.recipe.train.epochs / 4))  # do not prune slow starters
    pruner = optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=warmup + 1)  # our epochs count from 1
    study = optuna.load_study(study_name=search.study(loss), storage=shared.storage, pruner=pruner)
    study_id = shared.storage.get_study_id_from_name(search.study(loss))
    trial_id = shared.storage.get_trial_id_from_study_id_trial_number(study_id, number)
    shared.storage.set_trial_state_values(trial_id, TrialState.RUNNING)  # no effect on a trial that is resumed
    trial = Trial(study, trial_id)
    recipe = apply(search.base(loss), loss, _suggest_settings(search, loss, trial, shared))
    reported = set(load_trials(search, loss, shared)[number].intermediate_values)
    storage_errors: list[Exception] = []

    def should_stop(epoch: int, score: float) -> bool:
        try:
            shared.check()
            if epoch not in reported:
                trial.report(score, epoch)
                reported.add(epoch)
            return search.prune and epoch < recipe.train.epochs and trial.should_prune()
        except Exception as error:
            storage_errors.append(error)
            raise

    score: float | None = None
    runs = search.out / "runs"
    try:
        run = fit(recipe, runs, device=device, final=False, reporter=Reporter(quiet=True), on_epoch_end=should_stop)
    except TrainingStoppedError as stopped:
        state, message = TrialState.PRUNED, f"pruned at epoch {max(reported)} of {recipe.train.epochs}"
        _delete_checkpoints(stopped.path, keep_best=False)
    except Exception as error:
        if storage_errors:  # the search failed, not the training
            raise
        reason = executor.failure_reason(error, search.out, f"{loss}-{number}.log")
        state, message = TrialState.FAIL, f"FAILED ({reason})"
        trial.set_user_attr("reason", reason)
    else:
        state = TrialState.COMPLETE
        score, message = _record_run(search, loss, trial, run, shared)
    shared.check()
    study.tell(trial, score, state, skip_if_finished=True)
    return message


def _record_run(search: Search, loss: str, trial: Trial, run: Run, shared: SharedStorage) -> tuple[float, str]:
    """Store the result of a finished run with its trial; return the score and a message."""
    from optuna.trial import TrialState

    assert run.result is not None
    protocol = run.result["protocol"]
    metric, tie_break = selection_metrics(protocol["classes"]["val"])
    score = float(run.result[f"val_{metric}"])
    done = [t for t in load_trials(search, loss, shared) if t.state == TrialState.COMPLETE]
    best = max(((t.values[0], t.user_attrs["tie_break"]) for t in done), default=(-1.0, -1.0))
    event = next(e for e in run.events() if e["event"] == "epoch" and e["epoch"] == protocol["epoch"])
    trial.set_user_attr("tie_break", event["val"][tie_break])
    trial.set_user_attr("interval", event["val_interval"])
    trial.set_user_attr("classes", protocol["classes"]["val"])
    trial.set_user_attr("run", run.path.name)
    _delete_checkpoints(run.path, keep_best=(score, event["val"][tie_break]) > best)
    return score, f"val {metric} {100 * score:.1f} (best {100 * max(best[0], score):.1f})"


def _suggest_settings(search: Search, loss: str, trial: Trial, shared: SharedStorage) -> Settings:
    """Return the settings of a trial; a resumed trial keeps those it has."""
    from optuna.samplers import TPESampler
    from optuna.trial import TrialState

    if "settings" in trial.user_attrs:
        return dict(trial.user_attrs["settings"])
    settings: Settings = {}
    if search.is_grid:
        scores = [t.values[0] if t.state == TrialState.COMPLETE else None for t in load_trials(search, loss, shared)]
        coarse = search.mode == "thesis_grid_coarse"
        settings = trial_settings(search.recipe, loss, trial.number, scores, coarse)
    else:
        for name, range_ in space(search.recipe, loss).items():
            # A seed per setting and trial: a single worker gets the same settings even if it is killed in between.
            seed = hashlib.sha256(f"{search.study(loss)}/{trial.number}/{name}".encode()).digest()[:4]
            trial.study.sampler = TPESampler(seed=int.from_bytes(seed))
            settings[name] = suggest(trial, name, range_)
    trial.set_user_attr("settings", settings)
    return settings


def _delete_checkpoints(run: Path, *, keep_best: bool) -> None:
    """Delete the checkpoints of a finished trial: those of hundreds of trials would fill a disk."""
    for name in ("last.pt", "previous.pt", *(() if keep_best else ("best.pt",))):
        (run / name).unlink(missing_ok=True)
