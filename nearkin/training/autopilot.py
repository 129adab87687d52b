"""The best model in a given time, for images without a recipe: `nearkin train --data FOLDER --budget 30m`.

Each step is an ordinary run, evaluated on validation classes: it is kept if it improves on the best so far, and tried
only if it fits into the time. The best is trained again on all training classes and evaluated once on the test classes.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from nearkin._common.files import atomic_write, read_json
from nearkin._common.progress import Reporter, format_duration
from nearkin._common.words import counted
from nearkin.config.recipe import ModelConfig, Recipe
from nearkin.data import sources
from nearkin.data.splits import make_split
from nearkin.errors import ConfigError
from nearkin.models.embedder import Embedder
from nearkin.training.checkpoint import TrainingInterrupted
from nearkin.training.device import choose_device
from nearkin.training.loop import fit
from nearkin.training.run import Run

RECORD = "autopilot.json"  # in the folder of the final run
NETWORKS = ("efficientnet_lite0", "efficientnet_lite2", "efficientnet_lite1")  # in the order in which they are tried
MIN_SECONDS = 60
_VAL_SHARE = 0.25  # of the training classes
_STEP_SECONDS = 8.0  # of a step besides its forward and backward passes: reading the list of images, checkpoints
_STEM_SHARE, _TAIL_SHARE = 0.85, 1.1  # cost of feature maps, and of a training step on them, in forward passes


@dataclass(frozen=True)
class Candidate:
    """A model that was tried: what made it, and its metrics on the validation classes."""

    name: str
    recipe: Recipe
    run: str = ""
    recall: float = 0.0
    map_at_r: float = 0.0
    epoch: int = 0
    parts: tuple["Candidate", ...] = ()  # the tuned networks that it joins

    @property
    def value(self) -> float:
        """What candidates are compared by: R@1 alone changes with single images."""
        return (self.recall + self.map_at_r) / 2


@dataclass
class Autopilot:
    """The state of a search; `fit_within` makes one."""

    budget: float
    runs: Path
    device: str
    reporter: Reporter
    tune_all: bool = False  # train whole networks, as a GPU can
    start: float = field(default_factory=time.monotonic)
    spent_before: float = 0.0  # by earlier calls that were interrupted
    done: list[str] = field(default_factory=list)  # steps that these completed
    best: Candidate | None = None
    tuned: list[Candidate] = field(default_factory=list)  # one for each network
    seconds_per_image: dict[str, float] = field(default_factory=dict)  # of a forward pass, by network
    pace: float = 1.0  # time that steps took, relative to the estimate
    record: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    num_train: int = 0  # images, with those of the validation classes
    num_test: int = 0
    state: Path = Path()

    @property
    def spent(self) -> float:
        return self.spent_before + time.monotonic() - self.start

    # --- what a step costs, in seconds ---------------------------------------------------------------------------

    def forward(self, backbone: str, images: int, views: int = 1) -> float:
        return images * views * sum(self.seconds_per_image[name] for name in backbone.split(","))

    def train_seconds(self, model: ModelConfig, epochs: int, share: float) -> float:
        """The cost of training on a share of the training images, and of validation on the rest."""
        if model.freeze == "none":
            return self.forward(model.backbone, self.num_train) * (1 + 3.3 * share * epochs)
        if model.freeze == "backbone":
            return self.forward(model.backbone, self.num_train, model.views) + 2e-4 * self.num_train * epochs
        tail = (share + (1 - share) * model.views / 3) * epochs * _TAIL_SHARE
        once = 1 + model.views * _STEM_SHARE  # features for the initial head, and feature maps
        return self.forward(model.backbone, self.num_train) * (tail + once)

    def test_seconds(self, model: ModelConfig) -> float:
        baselines = self.forward(model.backbone, self.num_test, model.views)
        trained = 0.0 if model.freeze == "backbone" else baselines
        return baselines + trained + 2 * _STEP_SECONDS

    def cost(self, recipe: Recipe, parts: tuple[Candidate, ...]) -> tuple[float, float]:
        """Seconds to try a recipe now, and to train it again on all training classes and evaluate it."""
        search = self.train_seconds(recipe.model, recipe.train.epochs, 1 - _VAL_SHARE) + _STEP_SECONDS
        final = self.train_seconds(recipe.model, recipe.train.epochs, 1) + self.test_seconds(recipe.model)
        if recipe.model.freeze == "stages":
            final -= 0.75 * self.forward(recipe.model.backbone, self.num_train)  # features and maps that are cached
        elif not parts:
            final -= self.forward(recipe.model.backbone, self.num_train, recipe.model.views)
        for part in parts:
            final += self.train_seconds(part.recipe.model, part.recipe.train.epochs, 1) + _STEP_SECONDS
        return search, final

    # --- trying ---------------------------------------------------------------------------------------------------

    def attempt(self, name: str, recipe: Recipe, parts: tuple[Candidate, ...] = ()) -> Candidate | None:
        """Try a recipe if it fits into the time; None if it does not."""
        search, final = self.cost(recipe, parts)
        search = 0.0 if name in self.done else search
        if self.best is not None and self.spent + self.pace * (search + final) > self.budget:
            self.skipped.append(f"{name} (about {format_duration(self.pace * (search + final))})")
            return None
        self.reporter.info(f"{_minutes(self.spent)}  trying: {name}, about {format_duration(self.pace * search)}")
        before = self.spent
        run = fit(recipe, self.runs, device=self.device, final=False, reporter=_Quieter(self.reporter))
        assert run.result is not None
        result = run.result
        candidate = Candidate(
            name, recipe, str(run.path), result["val_R@1"], result["val_MAP@R"], result["protocol"]["epoch"], parts
        )
        took = self.spent - before
        if name not in self.done:
            self.done.append(name)
            self.pace = 0.5 * self.pace + 0.5 * min(max(took / search, 0.2), 5.0)
        better = self.best is None or candidate.value > self.best.value
        if better:
            self.best = candidate
        self.save()
        speed = 1000 * self.forward(recipe.model.backbone, 1, recipe.model.views)
        row = {"minutes": self.spent / 60, "name": name, "run": run.path.name, "kept": better, "ms_per_image": speed}
        self.record.append(row | {"val_R@1": candidate.recall, "val_MAP@R": candidate.map_at_r})
        verdict = "best so far" if better else "not better"
        metrics = f"R@1 {100 * candidate.recall:.1f}  MAP@R {100 * candidate.map_at_r:.1f}"
        self.reporter.info(f"{_minutes(self.spent)}  {name}: validation {metrics}  {verdict}")
        return candidate

    def search(self, base: Recipe) -> None:
        """Go through the steps, cheap ones first; each builds on what the earlier ones have shown."""
        whitened = replace(base, train=replace(base.train, epochs=0))
        first, *others = self.seconds_per_image
        self.attempt(f"whitened features of {first}", whitened)
        self.attempt(f"a head trained with {base.loss.name}", base)
        mirrored = self.attempt("the mean with the mirror image", replace(base, model=replace(base.model, views=2)))
        views: Literal[1, 2] = 2 if mirrored is None or mirrored is self.best else 1
        for name in (first, *others):
            recipe = tuned_recipe(base, name, views=views, epochs=self.epochs)
            if self.tune_all:
                recipe = replace(recipe, model=replace(recipe.model, freeze="none"))
            part = "all" if self.tune_all else "the last"
            candidate = self.attempt(f"{part} stages of {name} trained", recipe)
            if candidate is None:
                continue
            self.tuned.append(candidate)
            parts = tuple(self.tuned)
            if len(parts) > 1:
                names = " and ".join(part.recipe.model.backbone for part in parts)
                self.attempt(f"{names} joined, as trained", joined_recipe(base, parts), parts)

    @property
    def epochs(self) -> int:
        return next((epochs for minutes, epochs in ((7, 3), (20, 4), (60, 6)) if self.budget < 60 * minutes), 10)

    def finish(self) -> Run:
        """Train the winner again on all training classes, if there is time, and evaluate it on the test classes."""
        assert self.best is not None
        best = self.best
        options: dict[str, Any] = {"device": self.device, "reporter": _Quieter(self.reporter)}
        _, final = self.cost(best.recipe, best.parts)
        if self.spent + self.pace * final > 1.1 * self.budget:
            self.reporter.info(f"{_minutes(self.spent)}  no time is left to train on the validation classes as well")
            return fit(best.recipe, self.runs, **options)
        self.reporter.info(f"{_minutes(self.spent)}  training the best on all training classes: {best.name}")
        recipe = on_all_classes(best)
        if best.parts:
            paths = [fit(on_all_classes(part), self.runs, final=False, **options).path for part in best.parts]
            recipe = replace(recipe, model=replace(recipe.model, weights=",".join(map(str, paths))))
        return fit(recipe, self.runs, **options)

    # --- what an interruption must not lose ---------------------------------------------------------------------------

    def resume(self, fingerprint: str) -> None:
        """Continue an interrupted search on the same data with the same budget; its runs are found by their keys."""
        name = hashlib.sha256(f"{fingerprint} {self.budget} {self.device}".encode()).hexdigest()[:12]
        self.state = self.runs / f".autopilot-{name}.json"
        with suppress(OSError, ValueError, KeyError, TypeError):
            stored = read_json(self.state)
            self.spent_before, self.done = float(stored["seconds"]), [str(name) for name in stored["done"]]
            self.reporter.info(
                f"resuming after {format_duration(self.spent_before)}: {counted(len(self.done), 'step')}"
            )

    def save(self) -> None:
        self.runs.mkdir(parents=True, exist_ok=True)
        atomic_write(self.state, json.dumps({"seconds": self.spent, "done": self.done}))


class _Quieter(Reporter):
    """Shows the progress bars of a run but not its messages, which are about one of many runs."""

    def __init__(self, reporter: Reporter) -> None:
        super().__init__(quiet=reporter.quiet, out=reporter._out)

    def info(self, line: str) -> None:
        if line.startswith(("warning", "ALARM", "resuming")):
            super().info(line)


def fit_within(
    recipe: Recipe, budget: float, runs: str | Path = "runs", *, device: str = "auto", reporter: Reporter | None = None
) -> Run:
    """Find the best model for images in a given time, and evaluate it once on sealed test classes.

    Args:
        recipe: The data and the first thing to try: `folder_default`, or another head on a frozen EfficientNet-Lite0.
        budget: Seconds for everything, at least a minute.
        runs: Folder of the runs; an interrupted call resumes from those that are complete.
        device: As for `fit`.
        reporter: Where progress is printed; by default standard error.

    Returns:
        The final run. Its autopilot.json lists what was tried, in the order of time.

    Raises:
        ConfigError: The budget is too short, or the recipe has no frozen EfficientNet-Lite0.
    """
    reporter = reporter or Reporter()
    if budget < MIN_SECONDS:
        raise ConfigError(f"--budget: expected at least {MIN_SECONDS} s, got {budget:g} s.")
    if recipe.model.backbone != NETWORKS[0] or recipe.model.freeze != "backbone":
        reason = "features, which train in seconds" if recipe.data.source == "features" else "very small images"
        raise ConfigError(f"--budget: needs photos; these are {reason}. Train without --budget.")
    torch_device, base, data = choose_device(device), recipe, recipe.data
    pilot = Autopilot(budget, Path(runs), device, reporter, tune_all=torch_device.type == "cuda")
    table = sources.load(data, reporter)
    full, holdout = make_split(table, replace(data, val_fraction=0.0))
    pilot.num_train, pilot.num_test = len(full.train), holdout.num_images
    # val_fraction counts all classes, unless the source has test classes of its own.
    share = _VAL_SHARE * (full.train.num_classes / table.num_classes if full.train.split.startswith("by class") else 1)
    # MAP@R selects the epochs: it changes less with single images than R@1.
    base = replace(base, data=replace(data, val_fraction=share), eval=replace(base.eval, select_by="MAP@R"))
    pilot.seconds_per_image = {name: seconds_per_image(base, name, torch_device) for name in NETWORKS}
    speeds = ", ".join(f"{name} {1000 * s:.1f} ms" for name, s in pilot.seconds_per_image.items())
    classes = f"{full.train.num_classes} classes to train and select on, {holdout.num_classes} sealed for the test"
    reporter.info(f"budget: {format_duration(budget)} on {torch_device}; {counted(len(table), 'image')}, {classes}")
    reporter.info(f"forward pass per image at {base.data.image_size} pixels: {speeds}")
    pilot.resume(table.fingerprint)
    try:
        pilot.search(base)
        final = pilot.finish()
    except KeyboardInterrupt as interrupt:
        pilot.save()
        best = f"best so far: {pilot.best.run} ({pilot.best.name})" if pilot.best else "nothing was tried yet"
        raise TrainingInterrupted(f"stopped after {format_duration(pilot.spent)}; {best}") from interrupt
    assert pilot.best is not None
    record = {"budget": budget, "seconds": pilot.spent, "chosen": pilot.best.name, "steps": pilot.record}
    atomic_write(final.path / RECORD, json.dumps({**record, "not_tried": pilot.skipped}, indent=1))
    pilot.state.unlink(missing_ok=True)
    reporter.info(f"{_minutes(pilot.spent)}  done; chosen: {pilot.best.name}")
    if pilot.skipped:
        reporter.info(f"not tried for lack of time: {'; '.join(pilot.skipped)}")
    return final


def tuned_recipe(base: Recipe, backbone: str, *, views: Literal[1, 2], epochs: int) -> Recipe:
    """Return the recipe that trains the last stages of a network."""
    model = replace(base.model, backbone=backbone, freeze="stages", views=views)
    train = replace(base.train, epochs=epochs, batch_size=96, lr=3e-4, head_lr=6e-4, class_lr=0.01)
    return replace(base, model=model, train=train)


def joined_recipe(base: Recipe, parts: Sequence[Candidate]) -> Recipe:
    """Return the recipe of a whitened head on the features of several tuned networks."""
    names, weights = (",".join(values) for values in ((p.recipe.model.backbone for p in parts), (p.run for p in parts)))
    # More shrinkage than for published weights: the tuned ones have seen these classes, so that they vary too little.
    views = parts[0].recipe.model.views
    model = replace(base.model, backbone=names, weights=weights, views=views, shrinkage=3.0)
    return replace(base, model=model, train=replace(base.train, epochs=0))


def on_all_classes(candidate: Candidate) -> Recipe:
    """Return a candidate's recipe without validation classes, with the number of epochs that was best on these."""
    recipe = candidate.recipe
    return replace(
        recipe,
        data=replace(recipe.data, val_fraction=0.0),
        train=replace(recipe.train, epochs=candidate.epoch),
    )


def seconds_per_image(base: Recipe, backbone: str, device: torch.device) -> float:
    """Measure a forward pass on random images: the faster of two, after one to warm up."""
    size, count = base.data.image_size, 32
    config = replace(base.model, backbone=backbone, weights="none", head_init="random")
    model = Embedder(config, (3, size, size)).to(device).eval()
    images = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        model.embed(images, batch_size=count)
        times.append(time.perf_counter() - start)
    return min(times[1:]) / count


def read_record(run: Run) -> dict[str, Any] | None:
    """Return what was tried before this run, if a search ended with it."""
    try:
        record: dict[str, Any] = read_json(run.path / RECORD)
        steps = [
            {"name": str(step["name"]), "kept": bool(step["kept"])}
            | {name: float(step[name]) for name in ("minutes", "val_R@1", "val_MAP@R", "ms_per_image")}
            for step in record["steps"]
        ]
        return {
            "budget": float(record["budget"]),
            "chosen": str(record["chosen"]),
            "steps": steps,
            "not_tried": [str(name) for name in record["not_tried"]],
        }
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:5.1f} min"
