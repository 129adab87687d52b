"""A study: datasets x backbones x embedding sizes x losses x seeds under one protocol, defined in a short TOML file.

`Study.trials()` is the whole plan. Every trial is a `Recipe`, so each can be run on its own with `nearkin train`.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from nearkin.bench.protocols import Protocol
from nearkin.config._parsing import from_dict, load_toml
from nearkin.config.recipe import Recipe
from nearkin.errors import ConfigError, did_you_mean
from nearkin.losses.registry import LOSSES
from nearkin.metrics.retrieval import check_metric
from nearkin.training import recipes
from nearkin.training._run_key import key_values
from nearkin.training.evaluation import DATASET_KS, reported_metrics

_SECTIONS = ("data", "model", "loss", "miner", "train", "eval")
REHEARSAL = "REHEARSAL (tiny data and network, the values mean nothing): "


@dataclass(frozen=True)
class Dataset:
    """A dataset of a study."""

    name: str  # its name in tables
    source: str  # as in a recipe
    root: Path | None = None  # as in a recipe; relative to the study file
    recipe: str = ""  # what {dataset} in the base stands for; default: the source


Cell = tuple[Dataset | None, str | None, int | None, float]  # dataset, backbone, size, share of validation classes


@dataclass(frozen=True)
class Trial:
    """One training run of a study.

    Attributes:
        dataset: Name of the dataset.
        backbone: The backbone.
        size: The embedding size.
        method: Name of the method.
        seed: The seed.
        part: The fold; 0 for protocols without folds.
        experiment: The setting in which methods are compared: dataset, backbone, size.
        replicate: Seed and fold in one number; a tournament pairs trials of different methods by it.
        recipe: The recipe to train.
        label: The protocol label.
    """

    dataset: str
    backbone: str
    size: int
    method: str
    seed: int
    part: int
    experiment: str
    replicate: int
    recipe: Recipe
    label: str

    @functools.cached_property  # a study compares the ids of all trials after each one
    def id(self) -> str:
        """File name of the trial: a readable prefix and a hash of everything that affects its outcome."""
        values = [self.dataset, self.label, key_values(self.recipe)]
        # In a rehearsal, trials that differ in their network have the same recipe.
        values += [self.experiment] if self.label.startswith(REHEARSAL) else []
        hashed = json.dumps(values, sort_keys=True)
        digest = hashlib.sha256(hashed.encode()).hexdigest()[:10]
        prefix = "".join(c if c.isalnum() or c in "_." else "-" for c in f"{self.dataset}-{self.size}-{self.method}")
        return f"{prefix}-s{self.seed}-f{self.part}-{digest}"

    def __str__(self) -> str:
        fold = f", fold {self.part + 1}" if self.recipe.data.folds else ""
        return f"{self.method} in {self.experiment}, seed {self.seed}{fold}"


@dataclass(frozen=True)
class Study:
    """A comparison of methods. The fields are the keys of a study file.

    Attributes:
        name: Name of the study and of its folder.
        losses: Losses by name, or "all"; each is a method. [methods.NAME] adds further methods.
        base: The recipe that trials start from: a name, a .toml file, or a pattern such as
            thesis_{loss}:{dataset}:{backbone}:{size}.
        datasets: Default: the data of the base.
        backbones: Default: the backbone of the base.
        sizes: Embedding sizes; default: that of the base.
        seeds: Each method is trained once per seed.
        protocol: How the epoch is chosen and models are evaluated.
        val_fractions: Shares of the training classes used for validation; several make the share itself an experiment.
        resplit: Let each seed draw new validation classes (and test classes, where the source has no split).
        metric: The metric that methods are ranked by.
        tuned: Folder written by `nearkin tune`: loss, miner and training settings are read from METHOD.toml there.
        keep_models: Keep the weights of finished trials; results are always kept.
        weights: Initial weights by backbone: a .pth or .safetensors file.
        paper: The table or figure of a paper that this study reruns, if any.
        rehearsal: Run every trial with a tiny network for a few steps, on a few glyphs unless a dataset has a root.
        change: Settings of all trials, as in a recipe.
        methods: Settings of single methods, as in a recipe; a name that is not a loss needs loss.name, or a sum.
    """

    name: str
    losses: tuple[str, ...]
    base: str = "glyphs_small"
    datasets: tuple[Dataset, ...] = ()
    backbones: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    seeds: tuple[int, ...] = (0,)
    protocol: Protocol = field(default_factory=Protocol)
    val_fractions: tuple[float, ...] = (0.1,)
    resplit: bool = False
    metric: str = "R@1"
    tuned: Path | None = None
    keep_models: bool = True
    weights: Mapping[str, str] = field(default_factory=dict)
    rehearsal: bool = False
    paper: str = ""
    change: Mapping[str, Any] = field(default_factory=dict)
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name.strip() or self.name.startswith("."):
            raise ConfigError(f"name: expected a valid folder name, got {self.name!r}.")
        check_metric(self.metric)
        for name, values in (("losses", self.losses or self.methods), ("seeds", self.seeds)):
            if not values:
                raise ConfigError(f"{name}: expected at least one.")
        for name in ("losses", "backbones", "sizes", "seeds", "val_fractions"):
            for value, count in Counter(getattr(self, name)).items():
                if count > 1:
                    raise ConfigError(f"{name}: {value!r} is listed twice.")
        names = [dataset.name for dataset in self.datasets]
        if len(set(names)) != len(names):
            raise ConfigError(f"datasets: two have the same name ({', '.join(names)}).")
        self._check_settings("change", self.change)
        for name, settings in self.methods.items():
            self._check_settings(f"methods.{name}", settings)
            if "loss" in self.change and isinstance(settings.get("loss"), list):
                raise ConfigError(f"change.loss: '{name}' is a sum of losses. Change its parts in methods.{name}.loss.")
        if len(self.val_fractions) > 1 and self.protocol.name in ("last_epoch", "kfold"):
            raise ConfigError(f"val_fractions: the protocol {self.protocol.name} does not use them. Give one value.")

    def _check_settings(self, where: str, values: Any) -> None:
        """Reject values that are not settings of a recipe, and settings that the study would overwrite."""
        sections = {where: values}
        if isinstance(values, Mapping):
            sections |= {f"{where}.{name}": values[name] for name in _SECTIONS if name in values}
        for name, settings in sections.items():
            is_sum = name.endswith(".loss") and where != "change" and isinstance(settings, list)
            if not isinstance(settings, Mapping) and not is_sum:
                raise ConfigError(f"{name}: expected settings by name, as in a recipe; got {settings!r}.")
        set_by = {
            "data.val_fraction": "val_fractions",
            "data.select_on": "protocol",
            "data.folds": "protocol.folds",
            "data.fold": "protocol",
            "seed": "seeds",
            "model.dim": "sizes" if self.sizes else "",
            "model.backbone": "backbones" if self.backbones else "",
            "data.source": "datasets" if self.datasets else "",
            "data.root": "datasets" if any(dataset.root for dataset in self.datasets) else "",
            "data.split_seed": "resplit" if self.resplit else "",
        }
        for name, key in set_by.items():
            section, _, setting = name.rpartition(".")
            if key and setting in (values.get(section, {}) if section else values):
                raise ConfigError(f"{where}.{name}: set by the study's {key}. Change it there.")

    def dropped_from(self, previous: Self) -> str:
        """List what a wider version of this study also has ("losses triplet; seeds 0, 1"); empty if others differ."""
        same = ("losses", "methods", "sizes", "seeds", "datasets", "backbones", "weights")
        narrowed = dataclasses.replace(previous, **{name: getattr(self, name) for name in same})
        if narrowed.to_toml() != self.to_toml():
            return ""
        lists = {"losses": (previous.method_names, self.method_names)}
        lists |= {name: (getattr(previous, name), getattr(self, name)) for name in ("sizes", "seeds", "backbones")}
        lists["datasets"] = tuple(d.name for d in previous.datasets), tuple(d.name for d in self.datasets)
        dropped = {name: [str(value) for value in old if value not in new] for name, (old, new) in lists.items()}
        return "; ".join(f"{name} {', '.join(values)}" for name, values in dropped.items() if values)

    @classmethod
    def from_toml(cls, path: str | Path) -> Self:
        """Read a study file; paths in it are relative to its folder."""
        path = Path(path)
        return load_toml(path, "study", lambda values: from_dict(cls, values, "").resolve_paths(path.resolve().parent))

    def to_toml(self) -> str:
        """Return the content of a study file."""
        import tomli_w

        return tomli_w.dumps(_to_plain(dataclasses.asdict(self)))

    def resolve_paths(self, folder: Path) -> Self:
        """Return a copy whose relative paths start from a folder."""
        datasets = tuple(
            dataclasses.replace(d, root=folder / d.root) if d.root is not None else d for d in self.datasets
        )
        escaped = str(folder).replace("{", "{{").replace("}", "}}")  # the base may be a pattern, its folder is not
        base = str(Path(escaped) / self.base) if self.base.endswith(".toml") else self.base
        tuned = folder / self.tuned if self.tuned is not None else None
        weights = {name: str(folder / file) for name, file in self.weights.items()}
        return dataclasses.replace(self, datasets=datasets, base=base, tuned=tuned, weights=weights)

    @property
    def method_names(self) -> tuple[str, ...]:
        """The methods: losses in the given order, then those that are only in [methods]."""
        losses = tuple(LOSSES) if self.losses == ("all",) else self.losses
        return tuple(dict.fromkeys([*losses, *self.methods]))

    def trials(self) -> list[Trial]:
        """Return every trial, seeds outermost: a study stopped half-way has few seeds of all methods."""
        datasets: tuple[Dataset | None, ...] = self.datasets or (None,)
        cells = itertools.product(datasets, self.backbones or (None,), self.sizes or (None,), self.val_fractions)
        replicates = itertools.product(self.seeds, range(self.protocol.models_per_seed))
        return [
            self._trial(cell, method, seed, fold)
            for (seed, fold), cell, method in itertools.product(replicates, list(cells), self.method_names)
        ]

    def _trial(self, cell: Cell, method: str, seed: int, fold: int) -> Trial:
        dataset, backbone, size, val_fraction = cell
        values = self._base_values(method, cell)
        for change in (self.change, self.methods.get(method, {})):
            values = merge(values, change)
            if "epochs" in change.get("train", {}) and "steps" not in change["train"]:
                values["train"].pop("steps", None)
        data = {"source": dataset.source, "root": dataset.root} if dataset is not None else {}
        values = merge(values, _to_plain({"data": data, "model": {"backbone": backbone, "dim": size}}))
        if (name := values["model"]["backbone"]) in self.weights:
            values["model"]["weights"] = self.weights[name]
        if self.rehearsal:
            values = rehearse(values)
        values["data"] = self.protocol.apply(values["data"], fold, val_fraction)
        if self.resplit:
            values["data"]["split_seed"] = seed
        values["seed"] = seed
        try:
            recipe = Recipe.from_dict(values)
            self.protocol.check(recipe)
            if self.metric not in (known := reported_metrics(recipe.eval, recipe.data.source)):
                fix = f'Choose one of {", ".join(known)}, or add it with change.eval.metrics = ["{self.metric}"].'
                raise ConfigError(f"metric: {self.metric} is not computed. {fix}")
        except ConfigError as error:
            raise ConfigError(f"{method}: {error}") from None
        name, network = dataset.name if dataset else recipe.data.source, backbone or recipe.model.backbone
        experiment = [name, *([network] if len(self.backbones) > 1 else [])]
        if self.sizes:  # without this list, methods with sizes of their own are compared in one experiment
            experiment.append(str(recipe.model.dim))
        if len(self.val_fractions) > 1:
            experiment.append(f"val {val_fraction:g}")
        return Trial(
            *(name, network, recipe.model.dim, method, seed, fold),
            experiment=" ".join(experiment),
            replicate=seed * self.protocol.models_per_seed + fold,
            recipe=recipe,
            label=(REHEARSAL if self.rehearsal else "") + self.protocol.label(val_fraction),
        )

    def _base_values(self, method: str, cell: Cell) -> dict[str, Any]:
        """Return the base recipe as plain values, with the method's loss."""
        dataset, backbone, size, _ = cell
        recipe = dataset and (dataset.recipe or dataset.source)
        fields = {"loss": method, "dataset": recipe, "backbone": backbone, "size": size}
        try:
            base = self.base.format(**{key: value for key, value in fields.items() if value is not None})
        except KeyError as error:
            raise ConfigError(f"base: '{self.base}' uses {error}, which the study does not list.") from None
        except (ValueError, IndexError, AttributeError) as error:
            raise ConfigError(
                f"base: '{self.base}' is not a valid pattern ({error}). Write {{{{ and }}}} for literal braces."
            ) from None
        own = self.methods.get(method, {}).get("loss", {})
        is_sum = isinstance(own, list)  # which replaces the loss of the recipe
        name = method if is_sum else own.get("name", method)
        _ = is_sum or LOSSES[name]  # raises, with a suggestion
        start = recipes.find(base)
        values = start.to_dict()
        if start.loss.name != name:
            values["loss"] = {"name": name}
            values.pop("miner", None)  # chosen for another loss
        if self.tuned is not None:
            tuned = Recipe.from_toml(self.tuned / f"{method}.toml").to_dict()
            values |= {key: tuned[key] for key in ("loss", "miner", "train") if key in tuned}
        return values


def rehearse(values: dict[str, Any]) -> dict[str, Any]:
    """Change a recipe, as plain values, so that it trains and is evaluated in a fraction of a second."""
    data, model, train = dict(values["data"]), dict(values["model"]), dict(values["train"])
    if data.get("root") is None:
        data["source"] = "glyphs"
    data |= {"max_classes": 48, "max_per_class": 8, "image_size": 40, "augment": "none"}
    backbone = "none" if data["source"] == "features" else "small_conv"
    model |= {"backbone": backbone, "weights": "none", "width": 4, "freeze": "none", "head_init": "random"}
    group = train["samples_per_class"] or 1
    batch_size = max(group, min(train["batch_size"], 60) // group * group)
    train |= {"epochs": 1, "steps": 3, "batch_size": batch_size, "lr": 1e-3, "lr_schedule": "constant"}
    train |= {"frozen_epochs": 0, "step_epochs": 1, "step_factor": 0.5}
    # The usual k of the dataset that the recipe is for.
    evaluation = dict(values.get("eval", {}))
    if not {"ks", "metrics"} & evaluation.keys() and values["data"]["source"] in DATASET_KS:
        evaluation["ks"] = list(DATASET_KS[values["data"]["source"]])
    return values | {"data": data, "model": model, "train": train} | ({"eval": evaluation} if evaluation else {})


def check_known(flag: str, what: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        hint = did_you_mean(name, known) or f" Available: {', '.join(known)}."
        raise ConfigError(f"--{flag}: the study has no {what} '{name}'.{hint}")


def merge(values: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(values)
    for key, value in change.items():
        old = result.get(key)
        result[key] = merge(old, value) if isinstance(value, Mapping) and isinstance(old, Mapping) else value
    return result


def _to_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _to_plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
