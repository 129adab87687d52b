"""`Recipe`: everything that decides the outcome of a training run, as frozen, typed data.

A recipe is read from TOML, from a named function in `recipes.py`, or changed by flags; all three go through
`Recipe.from_dict`, which refuses what it does not know and names the nearest key. `key()` names the run: it hashes
everything that changes a number and nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from nearkin.errors import ConfigError, did_you_mean

Scalar = bool | int | float | str
T = TypeVar("T")

# Metadata of a field that cannot change a result: where the data lies, how loud to be.
_NOT_IN_KEY = {"in_key": False}


@dataclass(frozen=True)
class DataConfig:
    """Which images, and how their classes are split."""

    source: str = "glyphs"
    """Where the images come from: glyphs (built in), cub, cars, sop, inshop (official layouts), folder, table,
    features (ready vectors)."""
    root: Path | None = field(default=None, metadata=_NOT_IN_KEY)
    """The folder of the benchmark or of the class folders; a table's .csv or .parquet file; the .npz of features."""
    image_size: int = 64
    """Side in pixels to which a folder's images are cut and scaled (glyphs have their own)."""
    skip_broken: bool = False
    """Leave out images that cannot be read, and say so, instead of stopping."""
    allow_missing: bool = field(default=False, metadata=_NOT_IN_KEY)
    """Go on when files that a source lists are not there; the result then says so."""
    crop_to_boxes: bool = False
    """Cut images to the boxes that the source gives. The papers do not."""
    path_column: str | None = field(default=None, metadata=_NOT_IN_KEY)
    """Column of a table that holds the path of the image; by default path, file_name or the like."""
    label_column: str | None = field(default=None, metadata=_NOT_IN_KEY)
    """Column of a table that holds the class; by default label, class or the like."""
    split: str = "auto"
    """auto: the source's own test part, else by_class; half: the first half of the classes trains; by_class."""
    augment: str = "none"
    """How training images are varied: none, light (small images), or a paper's way: ice, ce_cub, ce_cars, ce_sop,
    ce_inshop, thesis, mpa."""
    cache: bool = field(default=True, metadata=_NOT_IN_KEY)
    """Keep a folder's images decoded and scaled in the cache folder, so that only the first epoch decodes them."""
    max_cache_gb: float = field(default=64.0, metadata=_NOT_IN_KEY)
    """Largest cache to write, in gigabytes."""
    num_workers: int = field(default=0, metadata=_NOT_IN_KEY)
    """Threads that read and vary images while the network is busy; 0 takes one per core."""
    test_fraction: float = 0.4
    """Share of the classes kept sealed for the final numbers, where the source has no test part of its own."""
    val_fraction: float = 0.1
    """Share of the classes (of the training classes, where the source has a test part) that choose the epoch; 0 trains
    on all of them and keeps the last epoch, for settings that were chosen before."""
    folds: int = 0
    """With 10, validation is one of ten equal groups of the training classes instead of val_fraction of them."""
    fold: int = 0
    """Which of the folds validates, from 0."""
    select_on: Literal["validation", "test"] = "validation"
    """test: choose the epoch on the test classes, as most papers do. Such a number is too high, and marked as such."""
    split_seed: int = 0
    """Draws which classes go where; the same for every run that is to be compared."""

    def __post_init__(self) -> None:
        _check(self.image_size >= 8, "data.image_size", "at least 8", self.image_size)
        _check(self.max_cache_gb > 0, "data.max_cache_gb", "above 0", self.max_cache_gb)
        _check(self.num_workers >= 0, "data.num_workers", "0 or above", self.num_workers)
        _check(0 <= self.val_fraction < 1, "data.val_fraction", "from 0 to below 1", self.val_fraction)
        _check(0 < self.test_fraction < 1, "data.test_fraction", "between 0 and 1", self.test_fraction)
        _check(self.folds == 0 or self.folds >= 2, "data.folds", "0 or at least 2", self.folds)
        _check(0 <= self.fold < max(1, self.folds), "data.fold", f"from 0 to {max(1, self.folds) - 1}", self.fold)
        _check(0 <= self.split_seed < 2**63, "data.split_seed", "0 to 2**63 - 1", self.split_seed)
        _check(
            self.val_fraction + self.test_fraction < 1,
            "data.val_fraction + data.test_fraction",
            "below 1, so that classes remain to train on",
            self.val_fraction + self.test_fraction,
        )


@dataclass(frozen=True)
class ModelConfig:
    """The network that maps an image to a vector: backbone, pooling, head."""

    backbone: str = "small_conv"
    """small_conv (tiny images), efficientnet_lite0, googlenet, resnet50, bn_inception, any timm name, or none (the data
    are features already)."""
    weights: str = field(default="none", metadata=_NOT_IN_KEY)  # their content is in the key, by its hash
    """What the backbone starts from: none (random), default (its published weights), or a .pth or .safetensors file."""
    width: int = 24
    """Channels of small_conv's first layer; the later ones have two and four times as many."""
    feature_levels: Literal["high", "low_mid_high"] = "high"
    """Where features are taken: the last maps, or three depths, each with its own part of the embedding."""
    pool: str = "average_maximum"
    """How feature maps become one vector: average, maximum, average_maximum, gem or grid (every place kept)."""
    gem_p: float = 3.0
    """The power of gem: 1 is the average, large values near the maximum."""
    learn_gem_p: bool = False
    """Whether gem's power is learned."""
    norm: Literal["none", "layer", "batch"] = "none"
    """Normalisation of the pooled features, without learned scale and shift."""
    dropout: float = 0.0
    """Share of the pooled features set to zero in each training step."""
    head: Literal["linear", "residual", "mlp"] = "linear"
    """From features to the embedding: linear; linear plus a small correction learned from zero; or two layers."""
    dim: int = 128
    """Length of the embedding vector; 0 takes the pooled features themselves, without a head."""
    head_init: Literal["random", "whitened"] = "random"
    """First weights of the head: random, or the features whitened within classes and reduced by PCA (closed form)."""
    shrinkage: float = 1.0
    """Of the whitened start: how far within-class variances are pulled to their mean; larger changes features less."""
    normalize: bool = True
    """Whether `embed` gives unit vectors."""
    freeze: Literal["nothing", "backbone"] = "nothing"
    """backbone: compute features once, keep them on disk, and train the head on them in seconds per epoch."""
    freeze_norm: Literal["nothing", "statistics", "all"] = "nothing"
    """What stands still in the backbone's batch norms: nothing, running statistics, or scale and shift as well."""

    def __post_init__(self) -> None:
        _check(self.width >= 1, "model.width", "at least 1", self.width)
        _check(self.dim >= 0, "model.dim", "at least 1, or 0 for no head", self.dim)
        _check(self.gem_p > 0, "model.gem_p", "above 0", self.gem_p)
        _check(0 <= self.dropout < 1, "model.dropout", "from 0 to below 1", self.dropout)
        _check(self.shrinkage > 0, "model.shrinkage", "above 0", self.shrinkage)
        _check(
            self.feature_levels == "high" or self.dim % 3 == 0,
            "model.dim",
            "a multiple of 3 with three taps (or 0)",
            self.dim,
        )
        _check(
            self.dim > 0 or self.head_init == "random",
            "model.head_init",
            "random where there is no head",
            self.head_init,
        )


@dataclass(frozen=True)
class ComponentConfig:
    """Something registered, by name, with its settings beside it: `name = "proxy_anchor"`, `alpha = 32.0`."""

    name: str
    settings: Mapping[str, Scalar] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Scalar]:
        return {"name": self.name, **self.settings}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str) -> ComponentConfig:
        settings = dict(values)
        name = settings.pop("name", None)
        if not isinstance(name, str):
            raise ConfigError(f"{where}.name: expected a name in quotes, got {name!r}.")
        for key, value in settings.items():
            if not isinstance(value, bool | int | float | str):
                raise ConfigError(f"{where}.{key}: expected a number, true, false or a text, got {value!r}.")
        return cls(name, settings)


@dataclass(frozen=True)
class TrainConfig:
    """The loop: batches, optimiser and schedule."""

    epochs: int = 6
    """Passes over the training classes."""
    batch_size: int = 128
    """Images per step."""
    samples_per_class: int = 4
    """Images of each class in a batch; 0 draws at random instead of class by class."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """adamw, or sgd."""
    momentum: float = 0.9
    """Of sgd."""
    nesterov: bool = True
    """Of sgd with momentum."""
    lr: float = 2e-3
    """Highest learning rate of the network."""
    head_lr: float | None = None
    """Highest learning rate of the head; by default lr. New layers on a pretrained network often take ten times lr."""
    class_lr: float | None = None
    """Highest learning rate of proxies and other class parameters; by default what the loss advises."""
    weight_decay: float = 1e-4
    """Weight decay; never applied to biases, norms and other 1-D parameters."""
    class_decay: bool = False
    """Whether weight decay also applies to proxies and classifiers."""
    lr_schedule: Literal["one_cycle", "cosine", "step", "constant"] = "one_cycle"
    """How the learning rate moves: up and down, down only, down in steps, or not at all."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises to where the schedule has it (one_cycle has a rise of its own)."""
    step_epochs: int = 10
    """Of step: epochs between two falls."""
    step_factor: float = 0.1
    """Of step: what the learning rate is multiplied by at each fall."""
    frozen_epochs: int = 0
    """First epochs in which the backbone stands still and only the head and the class parameters learn."""
    clip_norm: float = 10.0
    """Largest norm of the gradient; 0 leaves it alone."""
    micro_batch_size: int = 0
    """Images per forward pass, for batches that do not fit the memory; the gradient is still that of the whole batch.
    0 takes the batch at once."""
    ema: float = 0.0
    """Keep a running mean of the weights with this memory (0.999, say), and judge and keep that; 0 keeps none."""
    patience: int = 0
    """Stop when this many epochs have brought nothing better on the validation classes; 0 never does."""
    precision: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Of the network on a CUDA device; losses are always in fp32."""
    compile: bool = field(default=False, metadata=_NOT_IN_KEY)
    """Let torch.compile make the network faster; the first steps are slow."""
    checkpoint_minutes: float = field(default=15.0, metadata=_NOT_IN_KEY)
    """Write a checkpoint this often within long epochs; one is written after each epoch anyway."""
    feature_noise: float = 0.0
    """With a frozen backbone: noise added to training features, as a share of each feature's spread."""
    feature_mix: float = 0.0
    """With a frozen backbone: largest share of another image of the class mixed into a training feature."""

    def __post_init__(self) -> None:
        _check(self.epochs >= 1, "train.epochs", "at least 1", self.epochs)
        _check(self.batch_size >= 2, "train.batch_size", "at least 2", self.batch_size)
        _check(
            0 <= self.samples_per_class <= self.batch_size,
            "train.samples_per_class",
            "from 0 to batch_size",
            self.samples_per_class,
        )
        _check(
            self.samples_per_class == 0 or self.batch_size % self.samples_per_class == 0,
            "train.batch_size",
            f"a multiple of train.samples_per_class ({self.samples_per_class})",
            self.batch_size,
        )
        _check(self.lr > 0, "train.lr", "above 0", self.lr)
        _check(self.class_lr is None or self.class_lr > 0, "train.class_lr", "above 0", self.class_lr)
        _check(self.weight_decay >= 0, "train.weight_decay", "0 or above", self.weight_decay)
        _check(self.clip_norm >= 0, "train.clip_norm", "0 or above", self.clip_norm)
        _check(self.head_lr is None or self.head_lr > 0, "train.head_lr", "above 0", self.head_lr)
        _check(0 <= self.momentum < 1, "train.momentum", "from 0 to below 1", self.momentum)
        _check(self.warmup_steps >= 0, "train.warmup_steps", "0 or above", self.warmup_steps)
        _check(self.step_epochs >= 1, "train.step_epochs", "at least 1", self.step_epochs)
        _check(0 < self.step_factor <= 1, "train.step_factor", "above 0, up to 1", self.step_factor)
        _check(0 <= self.frozen_epochs <= self.epochs, "train.frozen_epochs", "from 0 to epochs", self.frozen_epochs)
        _check(self.micro_batch_size >= 0, "train.micro_batch_size", "0 or above", self.micro_batch_size)
        _check(0 <= self.ema < 1, "train.ema", "from 0 to below 1", self.ema)
        _check(self.patience >= 0, "train.patience", "0 or above", self.patience)
        _check(self.checkpoint_minutes > 0, "train.checkpoint_minutes", "above 0", self.checkpoint_minutes)
        _check(self.feature_noise >= 0, "train.feature_noise", "0 or above", self.feature_noise)
        _check(0 <= self.feature_mix <= 1, "train.feature_mix", "from 0 to 1", self.feature_mix)


@dataclass(frozen=True)
class Recipe:
    """One training run, whole. Vary one with `dataclasses.replace`, write it with `to_toml`."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: ComponentConfig = field(default_factory=lambda: ComponentConfig("proxy_anchor"))
    miner: ComponentConfig | None = None
    train: TrainConfig = field(default_factory=TrainConfig)
    memory: int = 0
    """Embeddings of earlier batches kept as further references (pair losses only); 0 keeps none."""
    seed: int = 0
    """Draws the first weights and the order of the images."""

    def __post_init__(self) -> None:
        _check(self.memory >= 0, "memory", "0 or above", self.memory)
        _check(0 <= self.seed < 2**63, "seed", "0 to 2**63 - 1", self.seed)
        for where, path in (("data.root", str(self.data.root)), ("model.weights", self.model.weights)):
            # recipe.toml could not hold it, as would be found out after all images are read.
            _check(_is_unicode(path), where, "a path in valid Unicode (rename the file or folder)", ascii(path))

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, without what is None: the form that TOML and the flags share."""
        return to_plain_dict(self)

    def to_toml(self) -> str:
        import tomli_w

        return tomli_w.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        return from_dict(cls, values, "")

    @classmethod
    def from_toml(cls, path: str | Path) -> Recipe:
        return load_toml(Path(path), "recipe", cls.from_dict)


_SECTIONS = (Recipe, DataConfig, ModelConfig, TrainConfig)


def _check(holds: bool, where: str, wanted: str, got: object) -> None:
    if not holds:
        raise ConfigError(f"{where}: expected {wanted}, got {got}.")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def to_plain_dict(node: Any, *, keyed_only: bool = False) -> dict[str, Any]:
    """A dataclass of settings as nested plain values, without what is None."""
    values: dict[str, Any] = {}
    for entry in dataclasses.fields(node):
        value = getattr(node, entry.name)
        if value is None or (keyed_only and not entry.metadata.get("in_key", True)):
            continue
        if isinstance(value, ComponentConfig):
            value = value.to_dict()
        elif dataclasses.is_dataclass(value):
            value = to_plain_dict(value, keyed_only=keyed_only)
        elif isinstance(value, Path):
            value = str(value)
        elif isinstance(value, int) and entry.name in _float_fields(node.__class__):
            value = float(value)
        values[entry.name] = value
    return values


@functools.cache
def _float_fields(kind: type) -> frozenset[str]:
    hints = typing.get_type_hints(kind)
    return frozenset(name for name, hint in hints.items() if float in (hint, *typing.get_args(hint)))


def load_toml(path: Path, what: str, make: Callable[[dict[str, Any]], T]) -> T:
    """What `make` gives for the values of a TOML file; every error names the file."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such {what} file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a {what} ({error}).") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}.") from None
    try:
        return make(values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def from_dict(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """A frozen dataclass from plain values; unknown keys and wrong types are errors that name the key after `where`."""
    assert dataclasses.is_dataclass(kind)
    hints = typing.get_type_hints(kind)
    known = [entry.name for entry in dataclasses.fields(kind)]
    for key in values:
        if key not in known:
            near = _suggest(where, key) if kind in _SECTIONS else did_you_mean(key, known)
            there = f" There are: {', '.join(known)}."
            raise ConfigError(f"{where}{key}: no such setting.{near or there}")
    return kind(**{key: _convert(hints[key], value, f"{where}{key}") for key, value in values.items()})


def _suggest(where: str, key: str) -> str:
    every = setting_names()
    elsewhere = [name for name in every if name.endswith(f".{key}")]  # `lr` at the top level means `train.lr`
    if elsewhere:
        return f" Did you mean '{elsewhere[0]}'?"
    here = [name for name in every if name.startswith(where)]
    return did_you_mean(f"{where}{key}", here) or f" There are: {', '.join(here)}."


def setting_names() -> list[str]:
    """The dotted names of all settings of a recipe, as they stand in TOML and in flags."""
    names: list[str] = []
    for entry, hint in typing.get_type_hints(Recipe).items():
        section = next((t for t in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(t)), None)
        if section is None:
            names.append(entry)
        elif section is ComponentConfig:
            names += [entry, f"{entry}.name"]
        else:
            names += [entry, *(f"{entry}.{f.name}" for f in dataclasses.fields(section))]
    return names


def _convert(hint: Any, value: Any, where: str) -> Any:
    """A plain value as the type a field declares, or an error that names the field."""
    if isinstance(hint, types.UnionType):  # X | None
        hint = next(t for t in typing.get_args(hint) if t is not type(None))
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: expected a section [{where}], got {value!r}.")
        return (
            ComponentConfig.from_dict(value, where) if hint is ComponentConfig else from_dict(hint, value, f"{where}.")
        )
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where}: expected a list, got {value!r}.")
        inner = typing.get_args(hint)[0]
        return tuple(_convert(inner, item, f"{where}[{at}]") for at, item in enumerate(value))
    if typing.get_origin(hint) is Mapping:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: expected a section [{where}], got {value!r}.")
        return value
    if typing.get_origin(hint) is Literal:
        allowed = typing.get_args(hint)
        if value not in allowed:
            raise ConfigError(f"{where}: expected one of {', '.join(map(repr, allowed))}, got {value!r}.")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "a text in quotes"}
        raise ConfigError(f"{where}: expected {wanted.get(hint, hint)}, got {value!r}.")
    return value
