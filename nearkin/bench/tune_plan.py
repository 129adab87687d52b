"""A hyperparameter search: its plan, its state and its results. `nearkin.bench.tune` runs it.

A search is a set of Optuna studies, one per loss, each created with exactly the trials of its budget.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nearkin._common.files import atomic_write, read_json, remove_leftovers
from nearkin._common.progress import Reporter
from nearkin.bench.tune_space import (
    GRIDS,
    GridPoint,
    Settings,
    apply,
    defaults,
    grid_points,
    grid_recipe,
    recipe_for_loss,
    space,
)
from nearkin.bench.tune_storage import SharedStorage, is_database, open_storage, storage_address
from nearkin.config.recipe import Recipe
from nearkin.errors import ConfigError, RunError, import_extra
from nearkin.losses import LOSSES
from nearkin.training._run_key import run_key

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

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
        return grid_recipe(self.recipe, loss) if self.is_grid else recipe_for_loss(self.recipe, loss)

    @property
    def is_grid(self) -> bool:
        """Whether the search walks the grids of the thesis."""
        return self.mode != "optuna"

    def points(self, loss: str) -> list[GridPoint]:
        return grid_points(loss, coarse=self.mode == "thesis_grid_coarse")

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
        names = tuple(GRIDS) if grid else tuple(LOSSES)
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
            grid_points(loss)
        else:
            space(search.recipe, LOSSES[loss].name)
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
        studies = {
            loss: optuna.create_study(
                study_name=search.study(loss), storage=shared.storage, direction="maximize", load_if_exists=True
            )
            for loss in search.losses
        }
        if mode == "optuna":
            search = replace(search, trials=_num_trials(studies, trials))
        for loss, study in studies.items() if begin else ():
            # Idempotent: after a kill, the next worker completes it.
            study.set_user_attr("trials", search.trials)
            for number in range(len(study.get_trials(deepcopy=False)), search.budget(loss)):
                first = mode == "optuna" and number == 0
                study.enqueue_trial(defaults(search.recipe, loss) if first else {})
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
        raise ConfigError(
            f"{search.out}: contains a search with another recipe, data, mode or pruning. Choose another --out."
        )


def _num_trials(studies: Mapping[str, Study], trials: int | None) -> int:
    """Return the trials per loss: as requested, else those of the existing search, else the default."""
    from optuna.trial import TrialState

    existing: int = max(study.user_attrs.get("trials", 0) for study in studies.values())
    started = max(
        sum(trial.state != TrialState.WAITING for trial in study.get_trials(deepcopy=False))
        for study in studies.values()
    )
    if trials is not None and trials < started:
        raise ConfigError(f"--trials {trials}: {started} trials of a loss have already started. Give at least as many.")
    return trials or existing or DEFAULT_TRIALS


# --- results ---------------------------------------------------------------------------------------------------------


def load_trials(search: Search, loss: str, shared: SharedStorage) -> list[FrozenTrial]:
    study = shared.storage.get_study_id_from_name(search.study(loss))
    return shared.storage.get_all_trials(study, deepcopy=False)[: search.budget(loss)]


def standings(search: Search) -> list[Standing]:
    with open_storage(search.address) as shared:
        unsorted = [_standing(loss, load_trials(search, loss, shared)) for loss in search.losses]
    return sorted(unsorted, key=lambda standing: -1.0 if standing.best is None else standing.best, reverse=True)


def _standing(loss: str, trials: list[FrozenTrial]) -> Standing:
    from optuna.trial import TrialState

    done = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    failed = [trial for trial in trials if trial.state == TrialState.FAIL]
    standing = Standing(
        loss,
        done=len(done),
        pruned=sum(trial.state == TrialState.PRUNED for trial in trials),
        failed=len(failed),
        left=sum(not trial.state.is_finished() for trial in trials),
        reasons=tuple(trial.user_attrs["reason"] for trial in failed),
    )
    if not done:
        return standing
    # As between epochs: the other metric breaks ties, then the first trial wins, which has the defaults.
    best = max(done, key=lambda trial: (trial.values[0], trial.user_attrs["tie_break"], -trial.number))
    return replace(
        standing,
        best=best.values[0],
        interval=tuple(best.user_attrs["interval"]),
        classes=best.user_attrs["classes"],
        settings=dict(best.user_attrs["settings"]),
        trial=best.number,
    )


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
