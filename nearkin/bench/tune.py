"""Fair search for settings: every loss gets the same number of trials, judged on validation classes only.

A search is a set of Optuna studies, one for each loss, each made with exactly as many trials as the budget has. A
worker claims a trial, runs it by `fit(final=False)` and writes down how it ended; a claim goes with the process that
holds it, so that the trial of a killed worker is taken up by the next, in its own run folder, from its checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nearkin._common.files import atomic_write
from nearkin._common.progress import Pace, Reporter
from nearkin.bench import grid_search
from nearkin.bench.search_space import Settings, apply, defaults, space, start_of, suggest
from nearkin.bench.storage import Shared, address_of, is_database, open_shared
from nearkin.config.recipe import Recipe
from nearkin.errors import (
    ConfigError,
    DataError,
    MissingExtraError,
    RunError,
    TrainingFailedError,
    TrainingStoppedError,
    import_extra,
)
from nearkin.losses import LOSSES
from nearkin.training.run_key import run_key

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

Mode = Literal["optuna", "thesis_grid"]
LINE_EVERY = 2.0  # seconds at least between lines about short trials
POLL = 1.0  # seconds between looks at trials that other workers hold
TRIALS = 20  # of each loss, where nothing else is asked for


@dataclass(frozen=True)
class Search:
    """All that workers need to know; the same on every machine but for `out` and where the data lies.

    name     made of everything that changes a number, so that two searches in one database never mix
    recipe   what every trial starts from, epochs already shortened
    """

    name: str
    recipe: Recipe
    losses: tuple[str, ...]
    trials: int
    mode: Mode
    prune: bool
    full_epochs: int
    out: Path
    address: str

    def budget(self, loss: str) -> int:
        return len(grid_search.points(loss)) if self.mode == "thesis_grid" else self.trials

    @property
    def total(self) -> int:
        return sum(map(self.budget, self.losses))

    def base(self, loss: str) -> Recipe:
        grid = self.mode == "thesis_grid"
        return grid_search.start_for_grid(self.recipe, loss) if grid else start_of(self.recipe, loss)

    def study(self, loss: str) -> str:
        return f"{self.name}/{loss}"


@dataclass(frozen=True)
class Standing:
    """How far the search of a loss is, and the best it found."""

    loss: str
    done: int
    pruned: int
    failed: int
    left: int
    best: float | None = None  # validation R@1
    interval: tuple[float, float] | None = None  # 95 %, over validation classes
    classes: int = 0  # that chose it
    settings: Settings | None = None
    trial: int | None = None
    reasons: tuple[str, ...] = ()  # of the trials that failed

    @property
    def budget(self) -> int:
        return self.done + self.pruned + self.failed + self.left


# --- planning --------------------------------------------------------------------------------------------------------


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
    begin: bool = True,
    reporter: Reporter | None = None,
) -> Search:
    """Check what is asked for and write the trials down, all still to be run; a search that is there is joined.

    losses   names, or ("all",); by default the recipe's own
    trials   of each loss; by default 20, or as many as the search has; more than before prolongs it,
             fewer end it earlier, down to what was begun
    shorten  the share of the recipe's epochs that a trial trains; by default 1, in the mode thesis_grid 1/4
    begin    False only looks at a search that is there
    """
    from nearkin.data import sources
    from nearkin.data.splits import make_split
    from nearkin.training.factory import make_model, model_fingerprint, validate_recipe

    optuna: Any = import_extra("optuna", "bench")
    out = Path(out)
    grid = mode == "thesis_grid"
    if grid and trials is not None:
        raise ConfigError("--trials: the mode thesis_grid runs the points of its grids, not a number of trials.")
    if trials is not None and trials < 1:
        raise ConfigError(f"--trials: expected at least 1, got {trials}.")
    if recipe.data.select_on == "test":
        raise ConfigError("--data.select-on test: a search may not see the test classes. Leave the flag out.")
    share = shorten if shorten is not None else 0.25 if grid else 1.0
    if not 0 < share <= 1:
        raise ConfigError(f"--shorten: expected a share above 0, up to 1; got {share}.")
    chosen = tuple(dict.fromkeys(losses)) or (recipe.loss.name,)
    if chosen == ("all",):
        chosen = tuple(grid_search.GRIDS) if grid else tuple(LOSSES)
    epochs = max(1, round(share * recipe.train.epochs))
    train = replace(recipe.train, epochs=epochs, frozen_epochs=min(recipe.train.frozen_epochs, epochs))
    search = Search(
        name="",
        recipe=replace(recipe, train=train),
        losses=chosen,
        trials=0,
        mode=mode,
        prune=prune and not grid,
        full_epochs=recipe.train.epochs,
        out=out,
        address=address_of(storage, out),
    )
    for loss in chosen:  # before the time is spent to read the data
        if grid:
            grid_search.points(loss)
        else:
            space(search.recipe, LOSSES[loss].name)
        validate_recipe(search.base(loss))
    reporter = reporter or Reporter()
    table = sources.load(recipe.data, reporter)
    if make_split(table, recipe.data)[0].val is None:
        raise ConfigError(
            "tune: there are no validation classes to choose by. Give --data.val-fraction 0.1, or --data.folds 10."
        )
    weights = model_fingerprint(recipe, make_model(recipe, table, reporter)) if recipe.model.weights != "none" else ""
    counted = [table.fingerprint, weights, search.mode, search.prune, run_key(search.recipe, "")]
    digest = hashlib.sha256(json.dumps(counted).encode()).hexdigest()[:12]
    search = replace(search, name=f"nearkin-tune-{digest}")
    none = ConfigError(f"--workers 0: there is no such search yet in {out}. Begin it with --workers 1.")
    if not begin and not is_database(search.address) and not Path(search.address).exists():
        raise none
    with open_shared(search.address) as shared, shared.claim(f"{search.name}/plan", True):
        if not begin:
            there = {study.study_name for study in shared.storage.get_all_studies()}
            search = replace(search, losses=tuple(loss for loss in chosen if search.study(loss) in there))
            trials = None
        if not search.losses:
            raise none
        _settle_in(search)
        studies = {
            loss: optuna.create_study(
                study_name=search.study(loss), storage=shared.storage, direction="maximize", load_if_exists=True
            )
            for loss in search.losses
        }
        if not grid:
            asked = max(study.user_attrs.get("trials", 0) for study in studies.values())
            waiting = optuna.trial.TrialState.WAITING
            begun = max(sum(t.state != waiting for t in study.get_trials(deepcopy=False)) for study in studies.values())
            if trials is not None and trials < begun:
                raise ConfigError(f"--trials {trials}: {begun} of a loss were begun already. Give as many, or more.")
            search = replace(search, trials=trials or asked or TRIALS)
        if begin:
            for loss, study in studies.items():
                _write_down(search, loss, study)
    return search


def _settle_in(search: Search) -> None:
    """Hold the folder for this search: its recipes and runs would mix with those of another."""
    note = search.out / "search.json"
    try:
        search.out.mkdir(parents=True, exist_ok=True)
        if note.exists():
            there = json.loads(note.read_text(encoding="utf-8"))["name"]
        else:
            there = search.name
            told = {"name": search.name, "mode": search.mode, "recipe": search.recipe.to_dict()}
            atomic_write(note, json.dumps(told, indent=2))
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"{search.out}: cannot keep a search there ({error}). Choose another --out.") from None
    if there != search.name:
        raise ConfigError(
            f"{search.out}: holds a search with another recipe, other data, mode or pruning. Choose another --out."
        )


def _write_down(search: Search, loss: str, study: Study) -> None:
    """Bring the study of a loss to its budget. Whoever is killed in the middle of this, the next one completes it."""
    study.set_user_attr("trials", search.trials)
    for number in range(len(study.get_trials(deepcopy=False)), search.budget(loss)):
        first = search.mode == "optuna" and number == 0
        study.enqueue_trial(defaults(search.recipe, loss) if first else {})


# --- working ---------------------------------------------------------------------------------------------------------


def work(search: Search, *, device: str = "auto", reporter: Reporter | None = None) -> None:
    """Run trials until none is left, and wait for those of other workers, in case one of them dies."""
    from optuna.exceptions import UpdateFinishedTrialError

    from nearkin.training.factory import choose_device

    choose_device(device)  # one that is not there is no trial's fault
    reporter = reporter or Reporter()
    with open_shared(search.address) as shared:
        pace = Pace(done=search.total - len(_unfinished(search, shared)), total=search.total)
        waiting, spoke = False, 0.0
        while ready := _unfinished(search, shared):
            for loss, number in ready:
                with shared.claim(f"{search.study(loss)}/{number}", False) as mine:
                    if not mine or not _may_start(search, loss, number, shared):
                        continue
                    try:
                        said = run_trial(search, loss, number, shared, device)
                    except UpdateFinishedTrialError:  # the claim was lost with the connection, another was faster
                        said = "ended by another worker"
                waiting = False
                pace.update(search.total - len(_unfinished(search, shared)))
                now = time.monotonic()
                if now - spoke >= LINE_EVERY or pace.done == pace.total or said.startswith("FAILED"):
                    spoke = now
                    reporter.info(f"trial {pace.done}/{pace.total}  {loss} {number}: {said}  {pace.eta} left")
                break
            else:
                if not waiting:
                    reporter.info(f"waiting for other workers: trials left in their hands: {len(ready)}")
                waiting = True
                time.sleep(POLL)


def _trials(search: Search, loss: str, shared: Shared) -> list[FrozenTrial]:
    study = shared.storage.get_study_id_from_name(search.study(loss))
    return shared.storage.get_all_trials(study, deepcopy=False)[: search.budget(loss)]


def _unfinished(search: Search, shared: Shared) -> list[tuple[str, int]]:
    """Loss and number of what is left, turn by turn, so that a search cut short has been fair as well."""
    left = [
        (trial.number, loss)
        for loss in search.losses
        for trial in _trials(search, loss, shared)
        if not trial.state.is_finished()
    ]
    return [(loss, number) for number, loss in sorted(left, key=lambda at: at[0])]


def _may_start(search: Search, loss: str, number: int, shared: Shared) -> bool:
    """Whether a trial that we hold is still to be run, and what it builds on is known."""
    trials = _trials(search, loss, shared)
    if trials[number].state.is_finished():
        return False
    before = grid_search.points(loss)[number].first if search.mode == "thesis_grid" else 0
    return all(trial.state.is_finished() for trial in trials[:before])


def run_trial(search: Search, loss: str, number: int, shared: Shared, device: str) -> str:
    """Train one trial to its end, be it a score, a pruning or a failure, and write that down. Returns what to say."""
    import optuna
    from optuna.trial import Trial, TrialState

    from nearkin.training.loop import fit

    storage = shared.storage
    quarter = max(1, round(search.recipe.train.epochs / 4))  # a slow start is no verdict
    pruner = optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=quarter + 1)  # our epochs count from 1
    study = optuna.load_study(study_name=search.study(loss), storage=storage, pruner=pruner)
    at = storage.get_trial_id_from_study_id_trial_number(storage.get_study_id_from_name(search.study(loss)), number)
    storage.set_trial_state_values(at, TrialState.RUNNING)  # says no, without harm, where it is taken up again
    trial = Trial(study, at)
    recipe = apply(search.base(loss), loss, _decide(search, loss, trial, shared))
    reported = set(storage.get_trial(at).intermediate_values)
    cut_off: list[Exception] = []

    def watch(epoch: int, recall: float) -> bool:
        try:
            shared.check()
            if epoch not in reported:
                trial.report(recall, epoch)
                reported.add(epoch)
            return search.prune and epoch < recipe.train.epochs and trial.should_prune()
        except Exception as error:
            cut_off.append(error)
            raise

    score: float | None = None
    try:
        run = fit(
            recipe, search.out / "runs", device=device, final=False, reporter=Reporter(quiet=True), on_epoch_end=watch
        )
    except TrainingStoppedError as stopped:
        state, said = TrialState.PRUNED, f"pruned at epoch {max(reported)} of {recipe.train.epochs}"
        _tidy(stopped.path, keep_best=False)
    except (DataError, RunError, MissingExtraError, OSError):
        raise  # no data, no disk, no package: no trial could do better
    except Exception as error:
        if cut_off:  # from the search, not from the training
            raise
        reason = _reason(error, search.out / f"{loss}-{number}.log")
        state, said = TrialState.FAIL, f"FAILED ({reason})"
        trial.set_user_attr("reason", reason)
    else:
        assert run.result is not None
        state, score = TrialState.COMPLETE, float(run.result["val_R@1"])
        best = max((t.values[0] for t in _trials(search, loss, shared) if t.state == state), default=score)
        said = f"val R@1 {100 * score:.1f} (best {100 * max(best, score):.1f})"
        chosen = run.result["protocol"]["epoch"]
        event = next(e for e in run.events() if e["event"] == "epoch" and e["epoch"] == chosen)
        trial.set_user_attr("map", event["val"]["MAP@R"])
        trial.set_user_attr("interval", event["val_interval"])
        trial.set_user_attr("classes", run.result["protocol"]["classes"]["val"])
        trial.set_user_attr("run", run.path.name)
        _tidy(run.path, keep_best=score >= best)
    shared.check()
    study.tell(trial, score, state, skip_if_finished=True)
    return said


def _reason(error: Exception, log: Path) -> str:
    """Why a trial failed, in a line; what nobody foresaw is written to a log as well."""
    said = " ".join(str(error).splitlines()[:1])
    if isinstance(error, TrainingFailedError | ConfigError):
        return said
    log.write_text(traceback.format_exc(), encoding="utf-8")
    return f"{type(error).__name__}: {said} (see {log.name})"


def _decide(search: Search, loss: str, trial: Trial, shared: Shared) -> Settings:
    """The settings of a trial, the same however often it is taken up."""
    from optuna.samplers import TPESampler
    from optuna.trial import TrialState

    if "settings" in trial.user_attrs:
        return dict(trial.user_attrs["settings"])
    settings: Settings = {}
    if search.mode == "thesis_grid":
        scores = [t.values[0] if t.state == TrialState.COMPLETE else None for t in _trials(search, loss, shared)]
        settings = grid_search.settings_at(search.recipe, loss, trial.number, scores)
    else:
        for name, where in space(search.recipe, loss).items():
            # A seed for each setting of each trial: one worker finds the same, killed in between or not.
            seed = hashlib.sha256(f"{search.study(loss)}/{trial.number}/{name}".encode()).digest()[:4]
            trial.study.sampler = TPESampler(seed=int.from_bytes(seed))
            settings[name] = suggest(trial, name, where)
    trial.set_user_attr("settings", settings)
    return settings


def _tidy(run: Path, *, keep_best: bool) -> None:
    """A trial that ended is not resumed, and only the best is looked at again: hundreds of them would fill a disk."""
    for name in ("last.pt", "previous.pt", *(() if keep_best else ("best.pt",))):
        (run / name).unlink(missing_ok=True)


# --- what was found --------------------------------------------------------------------------------------------------


def standings(search: Search) -> list[Standing]:
    """How each loss stands, the best first."""
    with open_shared(search.address) as shared:
        found = [_standing(loss, _trials(search, loss, shared)) for loss in search.losses]
    return sorted(found, key=lambda standing: -1.0 if standing.best is None else standing.best, reverse=True)


def _standing(loss: str, trials: list[FrozenTrial]) -> Standing:
    from optuna.trial import TrialState

    ended = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    failed = [trial for trial in trials if trial.state == TrialState.FAIL]
    counted = Standing(
        loss,
        done=len(ended),
        pruned=sum(trial.state == TrialState.PRUNED for trial in trials),
        failed=len(failed),
        left=sum(not trial.state.is_finished() for trial in trials),
        reasons=tuple(trial.user_attrs["reason"] for trial in failed),
    )
    if not ended:
        return counted
    # As between epochs: MAP@R decides where R@1 is the same, and then the first, which has the defaults.
    best = max(ended, key=lambda trial: (trial.values[0], trial.user_attrs["map"], -trial.number))
    return replace(
        counted,
        best=best.values[0],
        interval=tuple(best.user_attrs["interval"]),
        classes=best.user_attrs["classes"],
        settings=dict(best.user_attrs["settings"]),
        trial=best.number,
    )


def write_recipes(search: Search, found: Sequence[Standing]) -> dict[str, Path]:
    """The best trial of each loss as LOSS.toml, which `nearkin train` runs."""
    written: dict[str, Path] = {}
    with open_shared(search.address) as shared, shared.claim(f"{search.name}/recipes", True):
        for standing in found:
            if standing.settings is not None:
                path = search.out / f"{standing.loss}.toml"
                atomic_write(path, apply(search.base(standing.loss), standing.loss, standing.settings).to_toml())
                written[standing.loss] = path
    return written
