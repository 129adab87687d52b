"""A study: data sets x networks x sizes x losses x seeds under one protocol, written as a short TOML file.

    name = "losses on my photos"
    base = "folder_default"                    # the recipe that every trial starts from
    losses = ["proxy_anchor", "triplet"]       # or ["all"]
    sizes = [128, 512]
    seeds = [0, 1, 2]
    protocol.name = "fixed"

    [[datasets]]
    name = "photos"
    source = "folder"
    root = "photos"

    [change]                                   # settings of every trial
    train.epochs = 5

    [methods.triplet]                         # settings of one method
    miner.name = "semihard"

`Study.trials()` is the whole plan: every trial is a `Recipe`, so anyone can run one alone with `nearkin train`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nearkin.bench.protocols import Protocol
from nearkin.config.recipe import Recipe, from_dict, load_toml
from nearkin.errors import ConfigError
from nearkin.losses.registry import LOSSES
from nearkin.training import recipes
from nearkin.training.evaluation import HEADLINE_METRICS
from nearkin.training.run_key import key_values

_SECTIONS = ("data", "model", "loss", "miner", "train")


@dataclass(frozen=True)
class Dataset:
    """A data set of a study; `source` and `root` as in a recipe."""

    name: str
    source: str
    root: Path | None = None


@dataclass(frozen=True)
class Trial:
    """One training with all that names it: the experiment in which methods meet, who enters, and the draw."""

    dataset: str
    backbone: str
    size: int
    method: str
    seed: int
    part: int
    """The fold; 0 where there are none."""
    experiment: str
    draw: int
    """The number under which a tournament pairs this trial with those of other methods: seed and fold in one."""
    recipe: Recipe
    label: str

    @property
    def id(self) -> str:
        """Names the trial's files: readable in front, behind it a hash of all that decides its outcome."""
        counted = json.dumps([self.dataset, self.label, key_values(self.recipe)], sort_keys=True)
        digest = hashlib.sha256(counted.encode()).hexdigest()[:10]
        plain = "".join(c if c.isalnum() or c in "_." else "-" for c in f"{self.dataset}-{self.size}-{self.method}")
        return f"{plain}-s{self.seed}-f{self.part}-{digest}"

    def __str__(self) -> str:
        fold = f", fold {self.part + 1}" if self.recipe.data.folds else ""
        return f"{self.method} in {self.experiment}, seed {self.seed}{fold}"


@dataclass(frozen=True)
class Study:
    """What is compared, on what, how often and how."""

    name: str
    losses: tuple[str, ...]
    """Losses by name, or all; each is an method. Further methods may be given under [methods.NAME]."""
    base: str = "glyphs_small"
    """The recipe that trials start from: a name, a .toml file, or a pattern such as
    thesis_{loss}:{dataset}:{backbone}:{size}."""
    datasets: tuple[Dataset, ...] = ()
    """By default the data of the base."""
    backbones: tuple[str, ...] = ()
    """By default the network of the base."""
    sizes: tuple[int, ...] = ()
    """Embedding sizes; by default that of the base."""
    seeds: tuple[int, ...] = (0,)
    protocol: Protocol = field(default_factory=Protocol)
    val_fractions: tuple[float, ...] = (0.1,)
    """Shares of the training classes that choose the epoch; several make a study of the ratio itself."""
    resplit: bool = False
    """Let each seed draw the validation classes anew too (and the test classes, where the source has none)."""
    metric: str = "R@1"
    """What methods are ranked by."""
    tuned: Path | None = None
    """Folder that `nearkin tune` wrote: loss, miner and training settings are taken from ENTRANT.toml there."""
    keep_models: bool = True
    """Keep the weights of finished trials; the numbers are kept in any case."""
    change: Mapping[str, Any] = field(default_factory=dict)
    """Settings of all trials, as in a recipe."""
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings of single methods, as in a recipe; a name that is no loss needs loss.name."""

    def __post_init__(self) -> None:
        if not self.name.strip() or self.name.startswith("."):
            raise ConfigError(f"name: expected a name that a folder can have, got {self.name!r}.")
        if self.metric not in HEADLINE_METRICS:
            raise ConfigError(f"metric: expected one of {', '.join(HEADLINE_METRICS)}, got {self.metric!r}.")
        for name, values in (("losses", self.losses or self.methods), ("seeds", self.seeds)):
            if not values:
                raise ConfigError(f"{name}: at least one is needed.")
        for name in ("losses", "backbones", "sizes", "seeds", "val_fractions"):
            given = getattr(self, name)
            twice = next((value for value in given if given.count(value) > 1), None)
            if twice is not None:
                raise ConfigError(f"{name}: {twice!r} is given twice.")
        names = [dataset.name for dataset in self.datasets]
        if len(set(names)) != len(names):
            raise ConfigError(f"datasets: two have the same name ({', '.join(names)}).")
        for where, values in (("change", self.change), *((f"methods.{n}", v) for n, v in self.methods.items())):
            self._check_settings(where, values)
        if len(self.val_fractions) > 1 and self.protocol.name in ("default", "kfold"):
            raise ConfigError(f"val_fractions: the protocol {self.protocol.name} has none to vary.")

    def _check_settings(self, where: str, values: Any) -> None:
        """Refuse what is not settings of a recipe, and what the study would overwrite without a word."""
        given = {where: values}
        if isinstance(values, Mapping):
            given |= {f"{where}.{name}": values[name] for name in _SECTIONS if name in values}
        for name, settings in given.items():
            if not isinstance(settings, Mapping):
                raise ConfigError(f"{name}: expected settings by name, as in a recipe; got {settings!r}.")
        decided = {
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
        for name, by in decided.items():
            section, _, setting = name.rpartition(".")
            if by and setting in (values.get(section, {}) if section else values):
                raise ConfigError(f"{where}.{name}: the study decides this, by {by}. Change it there.")

    def leaves_out(self, before: Study) -> str:
        """Entrants, sizes and seeds that an otherwise same study had beside ours; empty where it was another study."""
        narrowed = dataclasses.replace(
            before, losses=self.losses, methods=self.methods, sizes=self.sizes, seeds=self.seeds
        )
        if narrowed.to_toml() != self.to_toml():
            return ""
        lists = {"losses": (before.names, self.names)}
        lists |= {name: (getattr(before, name), getattr(self, name)) for name in ("sizes", "seeds")}
        missing = {name: [str(value) for value in old if value not in new] for name, (old, new) in lists.items()}
        return "; ".join(f"{name} {', '.join(values)}" for name, values in missing.items() if values)

    # --- files --------------------------------------------------------------------------------------------------------

    @classmethod
    def from_toml(cls, path: str | Path) -> Study:
        path = Path(path)
        return load_toml(path, "study", lambda values: from_dict(cls, values, "").below(path.resolve().parent))

    def to_toml(self) -> str:
        import tomli_w

        return tomli_w.dumps(_plain(dataclasses.asdict(self)))

    def below(self, folder: Path) -> Study:
        """Paths are relative to the file that names them."""
        datasets = tuple(
            dataclasses.replace(d, root=folder / d.root) if d.root is not None else d for d in self.datasets
        )
        escaped = str(folder).replace("{", "{{").replace("}", "}}")  # the base may be a pattern, its folder is none
        base = str(Path(escaped) / self.base) if self.base.endswith(".toml") else self.base
        tuned = folder / self.tuned if self.tuned is not None else None
        return dataclasses.replace(self, datasets=datasets, base=base, tuned=tuned)

    # --- the plan -----------------------------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """The methods: losses in the order given, then those that are only in [methods]."""
        losses = tuple(LOSSES) if self.losses == ("all",) else self.losses
        return tuple(dict.fromkeys([*losses, *self.methods]))

    def trials(self) -> list[Trial]:
        """Every trial, seeds outermost: stopped half-way, a study has few seeds of all rather than all of few."""
        datasets: tuple[Dataset | None, ...] = self.datasets or (None,)
        cells = itertools.product(datasets, self.backbones or (None,), self.sizes or (None,), self.val_fractions)
        draws = itertools.product(self.seeds, range(self.protocol.parts))
        return [
            self._trial(*cell, method, seed, part)
            for (seed, part), cell, method in itertools.product(draws, list(cells), self.names)
        ]

    def _trial(
        self,
        dataset: Dataset | None,
        backbone: str | None,
        size: int | None,
        val_fraction: float,
        method: str,
        seed: int,
        part: int,
    ) -> Trial:
        values = self._start(method, dataset, backbone, size)
        values = merged(values, self.change)
        values = merged(values, self.methods.get(method, {}))
        if dataset is not None:
            values["data"] |= {"source": dataset.source}
            if dataset.root is not None:
                values["data"]["root"] = str(dataset.root)
        if backbone is not None:
            values["model"]["backbone"] = backbone
        if size is not None:
            values["model"]["dim"] = size
        values["data"] = self.protocol.apply(values["data"], part, val_fraction)
        if self.resplit:
            values["data"]["split_seed"] = seed
        values["seed"] = seed
        try:
            recipe = Recipe.from_dict(values)
            self.protocol.check(recipe)
        except ConfigError as error:
            raise ConfigError(f"{method}: {error}") from None
        name = dataset.name if dataset is not None else recipe.data.source
        cell = [name]
        if len(self.backbones) > 1:
            cell.append(recipe.model.backbone)
        if self.sizes:  # without a list methods may bring sizes of their own, and meet all the same
            cell.append(str(recipe.model.dim))
        if len(self.val_fractions) > 1:
            cell.append(f"val {val_fraction:g}")
        return Trial(
            dataset=name,
            backbone=recipe.model.backbone,
            size=recipe.model.dim,
            method=method,
            seed=seed,
            part=part,
            experiment=" ".join(cell),
            draw=seed * self.protocol.parts + part,
            recipe=recipe,
            label=self.protocol.label(val_fraction),
        )

    def _start(self, method: str, dataset: Dataset | None, backbone: str | None, size: int | None) -> dict[str, Any]:
        """The base recipe as plain values, with the method's loss in it."""
        given = {"loss": method, "dataset": dataset and dataset.source, "backbone": backbone, "size": size}
        try:
            base = self.base.format(**{key: value for key, value in given.items() if value is not None})
        except KeyError as error:
            raise ConfigError(f"base: '{self.base}' asks for {error}, which the study does not list.") from None
        except (ValueError, IndexError, AttributeError) as error:
            raise ConfigError(f"base: '{self.base}' is no pattern ({error}). Write {{{{ and }}}} for braces.") from None
        own = self.methods.get(method, {}).get("loss", {})
        name = own.get("name", method) if isinstance(own, Mapping) else method
        _ = LOSSES[name]
        values = recipes.find(base).to_dict()
        if values["loss"]["name"] != name:
            values["loss"] = {"name": name}
            values.pop("miner", None)  # it was for another loss
        if self.tuned is not None:
            found = Recipe.from_toml(self.tuned / f"{method}.toml").to_dict()
            values |= {key: found[key] for key in ("loss", "miner", "train") if key in found}
        return values


def merged(values: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values with some of them changed.

    >>> merged({"train": {"lr": 1.0, "epochs": 2}}, {"train": {"epochs": 5}})
    {'train': {'lr': 1.0, 'epochs': 5}}
    """
    result = dict(values)
    for key, value in change.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(value, Mapping) and isinstance(below, Mapping) else value
    return result


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
