"""Fair hyperparameter search: every loss gets the same number of trials, evaluated on validation classes only.

A search is a set of Optuna studies, one per loss, each created with exactly the trials of its budget. A worker locks a
trial, trains it with `fit(final=False)` and records how it ended in Optuna's storage.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nearkin._common.files import atomic_write, read_json, remove_leftovers
from nearkin._common.progress import Reporter
from nearkin.bench import executor, tune_space
from nearkin.bench.tune_space import GridPoint, Settings, apply
from nearkin.bench.tune_storage import SharedStorage, is_database, open_storage, storage_address
from nearkin.config.recipe import Recipe
from nearkin.errors import ConfigError, RunError, TrainingStoppedError, import_extra
from nearkin.losses import LOSSES
from nearkin.training._run_key import run_key
from nearkin.training.evaluation import selection_metrics

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

    from nearkin.training.run import Run

Mode = Literal["optuna", "thesis_grid", "thesis_grid_coarse"]
DEFAULT_TRIALS = 20  # per loss


@dataclass(frozen=True)
class Search:
    """Everything that workers need; identical on every machine except for `out` and the location of the data."""

    name: str  # contains a hash of everything that affects a result, so that searches in one database never mix
    recipe: Recipe  # what every trial starts from, with the shortened number of epochs
    losses: tuple[str, ...]
    trials: int  # trials per loss; 0 in the mode thesis_grid
    mode: Mode
    prune: bool  # whether to stop unpromising trials early
    full_epochs: int  # number of epochs of the original recipe
    out: Path
    address: str  # address of the shared storage

    def budget(self, loss: str) -> int:
        return len(self.points(loss)) if self.is_grid else self.trials

    @property
    def total(self) -> int:
        return sum(map(self.budget, self.losses))

    def base(self, loss: str) -> Recipe:
        """Return the recipe that the trials of a loss start from."""
        return (
            tune_space.grid_recipe(self.recipe, loss) if self.is_grid else tune_space.recipe_for_loss(self.recipe, loss)
        )

    @property
    def is_grid(self) -> bool:
        """Whether the search walks the grids of the thesis."""
        return self.mode != "optuna"

    def points(self, loss: str) -> list[GridPoint]:
        return tune_space.grid_points(loss, coarse=self.mode == "thesis_grid_coarse")

    def study(self, loss: str) -> str:
        return f"{self.name}/{loss}"


@dataclass(frozen=True)
class Standing:
    """Progress and best trial of one loss."""

    loss: str
    done: int  # trials with a score
    pruned: int  # trials that were stopped early
    failed: int
    left: int  # trials that are not finished
    best: float | None = None  # validation score of the best trial: R@1, or MAP@R with few classes
    interval: tuple[float, float] | None = None  # its 95 % interval over validation classes
    classes: int = 0  # number of validation classes
    settings: Settings | None = None  # settings of the best trial
    trial: int | None = None  # number of the best trial
    reasons: tuple[str, ...] = ()  # why trials failed

    @property
    def budget(self) -> int:
        return self.done + self.pruned + self.failed + self.left


def plan(
    recipe: Recipe,
    out: str | Path,
    *,
    losses: Sequence[str] = (),
    trials: int | None = None,
    mode: Mode = "optuna",
    storage: str | None = None,
    prune: bool = True,
    shorten: float | None = None,
    begin: bool = True,  # False opens an existing search and changes nothing
    reporter: Reporter | None = None,
) -> Search:
    """Validate a search and enqueue its trials, or join an existing one; the arguments are flags of `nearkin tune`."""
    from nearkin.training.factory import validate_recipe

    optuna: Any = import_extra("optuna", extra="bench")
    grid = mode != "optuna"
    if grid and trials is not None:
        raise ConfigError("--trials: not with --mode thesis_grid, whose grids determine the number of trials.")
    if trials is not None and trials < 1:
        raise ConfigError(f"--trials: expected at least 1, got {trials}.")
    if not recipe.train.epochs:
        raise ConfigError("--train.epochs 0: a search compares trained models. Remove the flag.")
    if recipe.data.select_on == "test":
        raise ConfigError("--data.select-on test: a search must not use the test classes. Remove the flag.")
    share = shorten if shorten is not None else 0.25 if grid else 1.0
    if not 0 < share <= 1:
        raise ConfigError(f"--shorten: expected a fraction above 0 and up to 1; got {share}.")
    if recipe.loss.parts and not losses:
        raise ConfigError(f"{recipe.loss.name}: a sum of losses has no search ranges. Search one with --losses NAME.")
    names = tuple(dict.fromkeys(losses)) or (recipe.loss.name,)
    if names == ("all",):
        names = tuple(tune_space.GRIDS) if grid else tuple(LOSSES)
    epochs = max(1, round(share * recipe.train.epochs))
    steps = None if recipe.train.steps is None else max(1, round(share * recipe.train.steps))
    train = replace(recipe.train, epochs=epochs, steps=steps, frozen_epochs=min(recipe.train.frozen_epochs, epochs))
    search = Search(
        name="",
        recipe=replace(recipe, train=train),
        losses=names,
        trials=0,
        mode=mode,
        prune=prune and not grid,
        full_epochs=recipe.train.epochs,
        out=Path(out),
        address=storage_address(storage, Path(out)),
    )
    for loss in names:
        if grid:
            tune_space.grid_points(loss)
        else:
            tune_space.space(search.recipe, LOSSES[loss].name)
        validate_recipe(search.base(loss))
    search = replace(search, name=_search_name(search, recipe, reporter or Reporter()))
    missing = ConfigError(f"--workers 0: no such search in {out} yet. Start it with --workers 1.")
    if not begin and not is_database(search.address) and not Path(search.address).exists():
        raise missing
    with open_storage(search.address) as shared, shared.lock(f"{search.name}/plan", True):
        if not begin:
            existing = {study.study_name for study in shared.storage.get_all_studies()}
            search = replace(search, losses=tuple(loss for loss in search.losses if search.study(loss) in existing))
            trials = None
        if not search.losses:
            raise missing
        _claim_folder(search)
        create = partial(optuna.create_study, storage=shared.storage, direction="maximize", load_if_exists=True)
        studies = {loss: create(study_name=search.study(loss)) for loss in search.losses}
        if mode == "optuna":
            search = replace(search, trials=_num_trials(studies, trials))
        for loss, study in studies.items() if begin else ():
            # Idempotent: after a kill, the next worker completes it.
            study.set_user_attr("trials", search.trials)
            for number in range(len(study.get_trials(deepcopy=False)), search.budget(loss)):
                first = mode == "optuna" and number == 0
                study.enqueue_trial(tune_space.defaults(search.recipe, loss) if first else {})
    return search


def _search_name(search: Search, recipe: Recipe, reporter: Reporter) -> str:
    """Hash everything that affects a result: the data, the pretrained weights, the recipe and the kind of search."""
    from nearkin.data import sources
    from nearkin.data.splits import make_split
    from nearkin.training.factory import make_model, model_fingerprint, warn_about_few_classes

    table = sources.load(recipe.data, reporter)
    split, _ = make_split(table, recipe.data)
    if split.val is None:
        raise ConfigError("tune: no validation classes. Use --data.val-fraction 0.1 or --data.folds 10.")
    if warning := warn_about_few_classes(recipe.data, table, split):
        reporter.info(warning)
    weights = model_fingerprint(recipe, make_model(recipe, table, reporter)) if recipe.model.weights != "none" else ""
    hashed = [table.fingerprint, weights, search.mode, search.prune, run_key(search.recipe, "")]
    digest = hashlib.sha256(json.dumps(hashed).encode()).hexdigest()[:12]
    return f"nearkin-tune-{digest}"


def _claim_folder(search: Search) -> None:
    """Reserve the folder for this search: recipes and runs of two searches would mix."""
    file = search.out / "search.json"
    try:
        search.out.mkdir(parents=True, exist_ok=True)
        remove_leftovers(search.out)
        if not file.exists():
            content = {"name": search.name, "mode": search.mode, "recipe": search.recipe.to_dict()}
            atomic_write(file, json.dumps(content, indent=2))
        name = read_json(file)["name"]
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"{search.out}: cannot store a search there ({error}). Choose another --out.") from None
    if name != search.name:
        what = "a search with another recipe, data, mode or pruning"
        raise ConfigError(f"{search.out}: contains {what}. Choose another --out.")


def _num_trials(studies: Mapping[str, Study], trials: int | None) -> int:
    """Return the trials per loss: as requested, else those of the existing search, else the default."""
    from optuna.trial import TrialState

    existing: int = max(study.user_attrs.get("trials", 0) for study in studies.values())
    states = [[trial.state for trial in study.get_trials(deepcopy=False)] for study in studies.values()]
    started = max(len(all_states) - all_states.count(TrialState.WAITING) for all_states in states)
    if trials is not None and trials < started:
        raise ConfigError(f"--trials {trials}: {started} trials of a loss have already started. Give at least as many.")
    return trials or existing or DEFAULT_TRIALS


def load_trials(search: Search, loss: str, shared: SharedStorage) -> list[FrozenTrial]:
    study = shared.storage.get_study_id_from_name(search.study(loss))
    return shared.storage.get_all_trials(study, deepcopy=False)[: search.budget(loss)]


def standings(search: Search) -> list[Standing]:
    with open_storage(search.address) as shared:
        unsorted = [_standing(loss, load_trials(search, loss, shared)) for loss in search.losses]
    return sorted(unsorted, key=lambda standing: -1.0 if standing.best is None else standing.best, reverse=True)


def _standing(loss: str, trials: list[FrozenTrial]) -> Standing:
    from optuna.trial import TrialState

    done, failed, pruned = (
        [trial for trial in trials if trial.state == state]
        for state in (TrialState.COMPLETE, TrialState.FAIL, TrialState.PRUNED)
    )
    reasons = tuple(trial.user_attrs["reason"] for trial in failed)
    left = len(trials) - len(done) - len(failed) - len(pruned)
    standing = Standing(loss, len(done), len(pruned), len(failed), left, reasons=reasons)
    if not done:
        return standing
    # As between epochs: the other metric breaks ties, then the first trial wins, which has the defaults.
    best = max(done, key=lambda trial: (trial.values[0], trial.user_attrs["tie_break"], -trial.number))
    stored = {name: best.user_attrs[name] for name in ("classes", "settings")}
    interval = tuple(best.user_attrs["interval"])
    return replace(standing, best=best.values[0], interval=interval, trial=best.number, **stored)


def write_recipes(search: Search, results: Sequence[Standing]) -> dict[str, Path]:
    """Write the best trial of each loss as LOSS.toml, a recipe for `nearkin train`."""
    written: dict[str, Path] = {}
    with open_storage(search.address) as shared, shared.lock(f"{search.name}/recipes", True):
        for standing in results:
            if standing.settings is not None:
                path = search.out / f"{standing.loss}.toml"
                atomic_write(path, apply(search.base(standing.loss), standing.loss, standing.settings).to_toml())
                written[standing.loss] = path
    return written


def work(search: Search, *, device: str = "auto", reporter: Reporter | None = None) -> None:
    """Run trials until none is left; wait for those of other workers, in case one of them dies."""
    from optuna.exceptions import UpdateFinishedTrialError

    with open_storage(search.address) as shared:

        def unfinished() -> list[tuple[str, int]]:
            trials = [(loss, t) for loss in search.losses for t in load_trials(search, loss, shared)]
            left = [(loss, t.number) for loss, t in trials if not t.state.is_finished()]
            return sorted(left, key=lambda trial: trial[1])  # losses in turn: a search stopped early is fair too

        def run(trial: tuple[str, int]) -> str:
            try:
                message = run_trial(search, *trial, shared, device)
            except UpdateFinishedTrialError:  # the lock was lost with the connection
                message = "finished by another worker"
            return f"{trial[0]} {trial[1]}: {message}"

        executor.work(
            unfinished,
            lambda trial: _claim(search, *trial, shared),
            run,
            total=search.total,
            cost=lambda trial: 1.0,
            device=device,
            reporter=reporter or Reporter(),
        )


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
        executor.delete_checkpoints(stopped.path, keep_best=False)
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
    executor.delete_checkpoints(run.path, keep_best=(score, event["val"][tie_break]) > best)
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
        settings = tune_space.trial_settings(search.recipe, loss, trial.number, scores, coarse)
    else:
        for name, range_ in tune_space.space(search.recipe, loss).items():
            # A seed per setting and trial: a single worker gets the same settings even if it is killed in between.
            seed = hashlib.sha256(f"{search.study(loss)}/{trial.number}/{name}".encode()).digest()[:4]
            trial.study.sampler = TPESampler(seed=int.from_bytes(seed))
            settings[name] = tune_space.suggest(trial, name, range_)
    trial.set_user_attr("settings", settings)
    return settings
