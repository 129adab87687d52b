"""`Recipe`: everything that decides the outcome of a training run, as frozen, typed data.

TOML files, named recipes and command-line flags all go through `Recipe.from_dict`, which rejects unknown keys.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from nearkin._common.registry import is_number
from nearkin.config._parsing import from_dict, load_toml, to_plain_dict
from nearkin.errors import ConfigError, did_you_mean

Scalar = bool | int | float | str

MAX_DIM = 65_536  # of an embedding; a larger one is a typing error and would exhaust the memory
# Metadata of a field that cannot change a result, such as a path or the number of workers: not part of the run key.
_NOT_IN_KEY = {"in_key": False}
_IN_KEY_IF_CHANGED = {"in_key": "changed"}


@dataclass(frozen=True)
class DataConfig:
    """The images and how their classes are split."""

    source: str = "glyphs"
    """Data source: glyphs (built in), cub, cars, sop, inshop, folder, table or features (precomputed vectors)."""
    root: Path | None = field(default=None, metadata=_NOT_IN_KEY)
    """Folder of the benchmark or of the class folders, a .csv or .parquet table, or an .npz file of features."""
    image_size: int = 64
    """Height and width of the input images in pixels; glyphs have a fixed size."""
    skip_broken: bool = False
    """Skip images that cannot be read, with a warning, instead of stopping."""
    allow_missing: bool = field(default=False, metadata=_NOT_IN_KEY)
    """Continue when files listed by the source are missing; the result records it."""
    crop_to_boxes: bool = False
    """Crop images to the source's bounding boxes. The papers do not."""
    path_column: str | None = field(default=None, metadata=_NOT_IN_KEY)
    """Table column with the image paths; by default path, file_name or similar."""
    label_column: str | None = field(default=None, metadata=_NOT_IN_KEY)
    """Table column with the classes; by default label, class or similar."""
    split: str = "auto"
    """Test classes: auto (the source's own, else by_class), half (its own, else the second half) or by_class."""
    augment: str = "none"
    """Training augmentation: none, light (small images), ice, ce_cub, ce_cars, ce_sop, ce_inshop, thesis or mpa."""
    cache: bool = field(default=True, metadata=_NOT_IN_KEY)
    """Cache decoded and resized images on disk, so that only the first epoch decodes them."""
    max_cache_gb: float = field(default=64.0, metadata=_NOT_IN_KEY)
    """Maximum size of that cache in gigabytes."""
    num_workers: int = field(default=0, metadata=_NOT_IN_KEY)
    """Threads that load and augment images; 0 uses one per core."""
    max_classes: int | None = None
    """Use only this many classes, evenly spaced over the source; to try something out."""
    max_per_class: int | None = None
    """Use only this many images of each class (and part)."""
    test_fraction: float = 0.4
    """Fraction of the classes held out for the final test, if the source has no test set of its own."""
    val_fraction: float = 0.1
    """Fraction of the classes (of the training classes, given a test set) for validation; 0 uses the last epoch."""
    folds: int = 0
    """Cross-validation: number of folds of the training classes, instead of val_fraction; 0 turns it off."""
    fold: int = 0
    """Index of the validation fold, from 0."""
    select_on: Literal["validation", "test"] = "validation"
    """Classes that select the epoch. test (as in most papers) inflates the scores; the result is labelled as such."""
    split_seed: int = 0
    """Seed of the class split; use the same one for all runs you compare."""

    def __post_init__(self) -> None:
        _check_at_least(self, "data", image_size=8, num_workers=0, folds=0)
        _check_above_zero(self, "data", "max_cache_gb", "max_classes", "max_per_class")
        _check(0 <= self.val_fraction < 1, "data.val_fraction", "from 0 to below 1", self.val_fraction)
        _check(0 < self.test_fraction < 1, "data.test_fraction", "between 0 and 1", self.test_fraction)
        _check(self.folds != 1, "data.folds", "0 or at least 2", self.folds)
        _check(0 <= self.fold < max(1, self.folds), "data.fold", f"from 0 to {max(1, self.folds) - 1}", self.fold)
        _check(0 <= self.split_seed < 2**63, "data.split_seed", "0 to 2**63 - 1", self.split_seed)
        test_folds = "0 with data.select_on test, which needs no validation classes"
        _check(not self.folds or self.select_on == "validation", "data.folds", test_folds, self.folds)
        held_out, names = self.val_fraction + self.test_fraction, "data.val_fraction + data.test_fraction"
        _check(held_out < 1, names, "below 1, so that classes remain to train on", held_out)


@dataclass(frozen=True)
class ModelConfig:
    """The network that maps an image to a vector: backbone, pooling, head."""

    backbone: str = "small_conv"
    """small_conv, efficientnet_lite0 (or 1, 2), googlenet, resnet50, bn_inception, any timm model, none (features).
    Several, separated by commas, are joined."""
    weights: str = field(default="none", metadata=_NOT_IN_KEY)  # the run key contains a hash of their content
    """Initial weights of the backbone: none (random), default (published), a .pth or .safetensors file, or a run
    folder. Of several backbones: default, or one for each, separated by commas."""
    width: int = 24
    """Channels of small_conv's first layer; later layers have two and four times as many."""
    feature_levels: Literal["high", "low_mid_high"] = "high"
    """Feature maps to pool: the last ones, or three depths, each with its own third of the embedding."""
    pool: str = "average_maximum"
    """Pooling of the feature maps: average, maximum, average_maximum (their sum), gem, or grid (flattened). Of a
    vision transformer: token (the class token), patches (their mean) or token_patches (both), else its own pooling."""
    gem_p: float = 3.0
    """Exponent of gem pooling: 1 is the average, large values approach the maximum."""
    learn_gem_p: bool = False
    """Learn the exponent of gem pooling."""
    norm: Literal["none", "layer", "batch"] = "none"
    """Normalisation of the pooled features, without learned scale and shift."""
    dropout: float = 0.0
    """Dropout rate of the pooled features."""
    head: Literal["linear", "residual", "mlp"] = "linear"
    """linear, residual (linear plus a two-layer correction that starts at zero) or mlp (two layers)."""
    dim: int = 128
    """Embedding dimension; 0 uses the pooled features directly, without a head."""
    head_init: Literal["random", "whitened"] = "random"
    """Initial weights of the head: random, or whitened (within-class whitening of the features, then PCA)."""
    shrinkage: float = 1.0
    """Shrinkage of within-class variances in whitening; larger values change the features less."""
    lora_rank: int = field(default=0, metadata=_IN_KEY_IF_CHANGED)
    """LoRA: rank of the updates of a transformer's attention layers, which alone are trained; 0: off."""
    views: Literal[1, 2] = field(default=1, metadata=_IN_KEY_IF_CHANGED)
    """Views of an image outside of training: 1, or 2 for the mean features of the image and its mirror image. With
    model.freeze stages training draws from the same views."""
    normalize: bool = True
    """L2-normalise the vectors returned by `embed`."""
    freeze: Literal["none", "backbone", "stages"] = "none"
    """backbone: compute its features once, cache them on disk and train only the head, in seconds per epoch. stages:
    the same with all but the last stages of a timm network, whose inputs are cached."""
    tuned_stages: int = field(default=2, metadata=_IN_KEY_IF_CHANGED)
    """With model.freeze stages: how many of the last stages (blocks of a transformer) are trained."""
    freeze_norm: Literal["none", "statistics", "all"] = "none"
    """What to freeze in the backbone's batch norms: nothing, running statistics, or scale and shift as well."""

    def __post_init__(self) -> None:
        _check_at_least(self, "model", width=1, dim=0, tuned_stages=1, lora_rank=0)
        _check(self.dim <= MAX_DIM, "model.dim", f"at most {MAX_DIM:,}", self.dim)
        _check_above_zero(self, "model", "gem_p", "shrinkage")
        _check(0 <= self.dropout < 1, "model.dropout", "from 0 to below 1", self.dropout)
        thirds = "a multiple of 3 (or 0) with model.feature_levels low_mid_high"
        _check(self.feature_levels == "high" or self.dim % 3 == 0, "model.dim", thirds, self.dim)
        no_backbone = self.backbone == "none"
        _check(not no_backbone or self.weights == "none", "model.weights", "none without a backbone", self.weights)
        tuned = "2 without model.freeze stages"
        _check(self.freeze == "stages" or self.tuned_stages == 2, "model.tuned_stages", tuned, self.tuned_stages)
        _check(not self.lora_rank or self.freeze == "none", "model.lora_rank", "0 with model.freeze", self.lora_rank)
        for name, unused in (("gem_p", 3.0), ("learn_gem_p", False)):
            value = getattr(self, name)
            _check(self.pool == "gem" or value == unused, f"model.{name}", f"{unused} without model.pool gem", value)
        is_linear = self.dim > 0 and self.head != "mlp"
        linear = "random without a linear or residual head (see model.dim, model.head)"
        _check(is_linear or self.head_init == "random", "model.head_init", linear, self.head_init)


@dataclass(frozen=True)
class ComponentConfig:
    """A registered loss or miner by name, with its settings: `name = "proxy_anchor"`, `alpha = 32.0`.

    Attributes:
        name: The registered name; of a sum of losses, as `parse_sum` reads it.
        settings: Keyword arguments; those left out keep their defaults. A loss also takes its `reduction`.
        regularizers: Weights of the regularisers of a loss: `regularizers = { lp = 0.1 }`.
        parts: (weight, loss) of each term of a sum of losses, which has no settings of its own; in a recipe file
            `[[loss]]` with name, weight and settings of each.
    """

    name: str
    settings: Mapping[str, Scalar] = field(default_factory=dict)
    regularizers: Mapping[str, float] = field(default_factory=dict)
    parts: tuple[tuple[float, ComponentConfig], ...] = ()

    @property
    def terms(self) -> tuple[tuple[float, ComponentConfig], ...]:
        """The parts of a sum, or the loss itself with weight 1."""
        return self.parts or ((1.0, self),)

    def to_dict(self) -> dict[str, Any] | list[dict[str, Any]]:
        """Return the name and the settings in one dict; of a sum, one for each part."""
        if self.parts:
            return [{"weight": weight, **cast(dict[str, Any], part.to_dict())} for weight, part in self.parts]
        regularizers = {"regularizers": dict(self.regularizers)} if self.regularizers else {}
        return {"name": self.name, **self.settings, **regularizers}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], section: str) -> ComponentConfig:
        """Build a component from the values of its section, "loss" or "miner": `name` and the settings."""
        settings = dict(values)
        name = settings.pop("name", None)
        if not isinstance(name, str):
            raise ConfigError(f"{section}.name: expected a name in quotes, got {name!r}.")
        regularizers = settings.pop("regularizers", {}) if section.startswith("loss") else {}
        if not isinstance(regularizers, Mapping) or not all(is_number(w, float) for w in regularizers.values()):
            raise ConfigError(f"{section}.regularizers: expected names with weights, as {{lp = 0.1}}.")
        for key, value in settings.items():
            if not isinstance(value, bool | int | float | str):
                raise ConfigError(f"{section}.{key}: expected a number, true, false or a string, got {value!r}.")
        return cls(name, settings, {key: float(weight) for key, weight in regularizers.items()})

    @classmethod
    def from_list(cls, values: Sequence[Any], section: str) -> ComponentConfig:
        """Build a sum of losses from the values of its parts, each with a `weight` (by default 1)."""
        parts = []
        for i, value in enumerate(values):
            if section != "loss" or not isinstance(value, Mapping):
                raise ConfigError(f"{section}: expected a section [{section}], got {list(values)!r}.")
            weight = value.get("weight", 1.0)
            if not is_number(weight, float):
                raise ConfigError(f"loss[{i}].weight: expected a number, got {weight!r}.")
            settings = {key: setting for key, setting in value.items() if key != "weight"}
            parts.append((float(weight), cls.from_dict(settings, f"loss[{i}]")))
        return cls.sum(parts)

    @classmethod
    def sum(cls, parts: Sequence[tuple[float, ComponentConfig]]) -> ComponentConfig:
        """Return the weighted sum of losses."""
        _check(len(parts) > 0, "loss", "at least one loss", "none")
        terms = [part.name if weight == 1 else f"{weight:g}*{part.name}" for weight, part in parts]
        return cls("+".join(terms), parts=tuple(parts))

    @classmethod
    def parse_sum(cls, text: str) -> ComponentConfig:
        """Read a loss, or a sum such as "proxy_anchor+0.1*contrastive", with default settings.

        Example:
            >>> ComponentConfig.parse_sum("proxy_anchor+0.1*contrastive").to_dict()
            [{'weight': 1.0, 'name': 'proxy_anchor'}, {'weight': 0.1, 'name': 'contrastive'}]
        """
        if not set("+*") & set(text):
            return cls(text)
        terms = [re.fullmatch(r"\s*(?:(\d*\.?\d+(?:e-?\d+)?)\s*\*)?\s*(\w+)\s*", term) for term in text.split("+")]
        if not all(terms):
            raise ConfigError(f"--loss {text}: expected a name, or a sum such as proxy_anchor+0.1*contrastive.")
        return cls.sum([(float(term[1] or 1), cls(term[2])) for term in terms if term])


@dataclass(frozen=True)
class TrainConfig:
    """The training loop: batches, optimizer and learning-rate schedule."""

    epochs: int = 6
    """Passes over the training images; 0 evaluates and saves the initial model, for example a whitened head."""
    steps: int | None = None
    """Optimizer steps in total, instead of epochs; the last epoch may end early."""
    batch_size: int = 128
    """Images per step."""
    samples_per_class: int = 4
    """Images per class in a batch; 0 samples images at random instead."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """adamw or sgd."""
    momentum: float = 0.9
    """Momentum of sgd."""
    nesterov: bool = True
    """Nesterov momentum, for sgd."""
    lr: float = 2e-3
    """Peak learning rate of the network."""
    head_lr: float | None = None
    """Peak learning rate of the head; by default lr. New layers on a pretrained backbone often use ten times lr."""
    class_lr: float | None = None
    """Peak learning rate of proxies and other class parameters; None uses the one the loss recommends."""
    layer_decay: float = field(default=1.0, metadata=_IN_KEY_IF_CHANGED)
    """Factor of the learning rate from each layer of a timm backbone to the one before it; 1: all the same."""
    weight_decay: float = 1e-4
    """Weight decay; not applied to biases, norms and other 1-D parameters."""
    class_decay: bool = False
    """Apply weight decay to proxies and classifiers too."""
    lr_schedule: Literal["one_cycle", "cosine", "step", "constant"] = "one_cycle"
    """Learning-rate schedule: one_cycle (warmup, then cosine decay), cosine (decay only), step or constant."""
    warmup_steps: int = 0
    """Steps of linear warmup; one_cycle has its own warmup."""
    step_epochs: int = 10
    """Epochs between decays of the step schedule."""
    step_factor: float = 0.1
    """Factor by which each decay of the step schedule multiplies the learning rate."""
    frozen_epochs: int = 0
    """Epochs at the start in which the backbone is frozen: only the head and the class parameters train."""
    clip_norm: float = 10.0
    """Maximum gradient norm (clipping); 0 turns clipping off."""
    micro_batch_size: int = 0
    """Images per forward pass, to save memory (the gradient stays that of the whole batch); 0: the whole batch."""
    sync_batchnorm: bool = field(default=True, metadata=_NOT_IN_KEY)  # if off, the key has the number of processes
    """With several processes: batch norms use the statistics of the whole batch, as in one process."""
    ema: float = 0.0
    """Decay of an exponential moving average of the weights, e.g. 0.999, which is evaluated and saved; 0: off."""
    patience: int = 0
    """Early stopping: stop after this many epochs without improvement on the validation classes; 0 turns it off."""
    precision: Literal["fp32", "fp16", "bf16", "fp64"] = "fp32"
    """Precision of the network; fp16 and bf16 need a CUDA device. Losses use fp32, or fp64 (slow, for comparisons)."""
    compile: bool = field(default=False, metadata=_NOT_IN_KEY)
    """Compile the network and the loss with torch.compile; the first steps are slow."""
    checkpoint_minutes: float = field(default=15.0, metadata=_NOT_IN_KEY)
    """Minutes between checkpoints within an epoch; each epoch also ends with one."""
    rank_timeout_minutes: float = field(default=30.0, metadata=_NOT_IN_KEY)
    """With several processes: minutes without a response after which a process counts as lost and the others end."""
    teacher: str = field(default="", metadata=_NOT_IN_KEY)  # the key has the hash of its weights
    """Distillation: run folder of a model whose similarities are to be reproduced, beside the loss."""
    teacher_weight: float = field(default=20.0, metadata=_IN_KEY_IF_CHANGED)
    """With a teacher: weight of the mean squared difference of the similarities."""
    feature_noise: float = 0.0
    """With a frozen backbone: noise added to training features, relative to each feature's standard deviation."""
    feature_mix: float = 0.0
    """With a frozen backbone: maximum weight of another image of the same class mixed into a training feature."""

    def __post_init__(self) -> None:
        _check_at_least(self, "train", epochs=0, batch_size=2, step_epochs=1, weight_decay=0, clip_norm=0)
        _check(self.steps is None or self.steps >= 1, "train.steps", "at least 1", self.steps)
        _check_at_least(self, "train", warmup_steps=0, micro_batch_size=0, patience=0, feature_noise=0)
        _check_above_zero(self, "train", "lr", "class_lr", "head_lr", "checkpoint_minutes", "rank_timeout_minutes")
        per_class = self.samples_per_class
        _check(0 <= per_class <= self.batch_size, "train.samples_per_class", "from 0 to batch_size", per_class)
        whole_groups = f"a multiple of train.samples_per_class ({per_class})"
        _check(not per_class or self.batch_size % per_class == 0, "train.batch_size", whole_groups, self.batch_size)
        _check(self.teacher_weight > 0, "train.teacher_weight", "above 0", self.teacher_weight)
        _check(0 < self.layer_decay <= 1, "train.layer_decay", "above 0, up to 1", self.layer_decay)
        _check(0 <= self.momentum < 1, "train.momentum", "from 0 to below 1", self.momentum)
        _check(0 < self.step_factor <= 1, "train.step_factor", "above 0, up to 1", self.step_factor)
        frozen_fit = self.frozen_epochs >= 0 and (self.steps is not None or self.frozen_epochs <= self.epochs)
        _check(frozen_fit, "train.frozen_epochs", "from 0 to epochs", self.frozen_epochs)
        _check(0 <= self.ema < 1, "train.ema", "from 0 to below 1", self.ema)
        _check(0 <= self.feature_mix <= 1, "train.feature_mix", "from 0 to 1", self.feature_mix)


@dataclass(frozen=True)
class EvalConfig:
    """How the test classes are evaluated."""

    ks: tuple[int, ...] = ()
    """The k of R@k; by default 1 2 4 8, for sop 1 10 100 1000, for inshop 1 10 20 30 40 50."""
    metrics: tuple[str, ...] = ()
    """Metrics to report besides R@1, such as nDCG@4; by default R@k, MAP@R and nDCG at the largest k."""
    similarity: Literal["cosine", "euclidean", "both"] = "cosine"
    """cosine, euclidean (distances of the raw embeddings), or both (cosine selects the epoch)."""
    select_by: Literal["auto", "R@1", "MAP@R"] = "auto"
    """Metric on the validation classes that selects the epoch; auto: R@1, or MAP@R with fewer than 8 classes."""

    def __post_init__(self) -> None:
        _check(all(k >= 1 for k in self.ks), "eval.ks", "integers of at least 1", list(self.ks))

    def to_dict(self) -> dict[str, Any]:
        """Return what differs from the defaults, so that run keys do not depend on what is left open."""
        values = {"ks": list(self.ks), "metrics": list(self.metrics), "similarity": self.similarity}
        values["select_by"] = self.select_by
        return {name: value for name, value in values.items() if value and value not in ("cosine", "auto")}


@dataclass(frozen=True)
class Recipe:
    """One training run. Change it with `dataclasses.replace`, write it with `to_toml`.

    Attributes:
        data: The images and their split.
        model: The network.
        loss: The loss and its settings, or a weighted sum of losses.
        miner: The miner and its settings, if any.
        train: The training loop.
        memory: Size of the cross-batch memory, in embeddings (pair losses only); 0 turns it off.
        seed: Seed of the initial weights and the sampling order.
        eval: The metrics.
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: ComponentConfig = field(default_factory=lambda: ComponentConfig("proxy_anchor"))
    miner: ComponentConfig | None = None
    train: TrainConfig = field(default_factory=TrainConfig)
    memory: int = 0
    seed: int = 0
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        _check(self.memory >= 0, "memory", "0 or above", self.memory)
        _check(0 <= self.seed < 2**63, "seed", "0 to 2**63 - 1", self.seed)
        for name, path in (("data.root", str(self.data.root)), ("model.weights", self.model.weights)):
            # Checked here because writing recipe.toml would fail on it only after all images are read.
            is_unicode = path == path.encode(errors="replace").decode()
            _check(is_unicode, name, "a path in valid Unicode (rename the file or folder)", ascii(path))

    def to_dict(self) -> dict[str, Any]:
        """Return nested plain values without None: the form that TOML and the flags share."""
        values = to_plain_dict(self)
        return values if values["eval"] else {name: value for name, value in values.items() if name != "eval"}

    def to_toml(self) -> str:
        """Return the recipe as TOML."""
        import tomli_w

        return tomli_w.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """Build a recipe from nested plain values; settings left out keep their defaults."""
        return from_dict(cls, values, "", suggest=_suggest)

    @classmethod
    def from_toml(cls, path: str | Path) -> Recipe:
        """Read a recipe from a TOML file, which errors name."""
        return load_toml(Path(path), "recipe", cls.from_dict)


def _check(valid: bool, name: str, expected: str, got: object) -> None:
    if not valid:
        raise ConfigError(f"{name}: expected {expected}, got {got}.")


def _check_at_least(config: Any, section: str, **lowest: int) -> None:
    for name, bound in lowest.items():
        value = getattr(config, name)
        _check(value >= bound, f"{section}.{name}", f"at least {bound}" if bound else "0 or above", value)


def _check_above_zero(config: Any, section: str, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _check(value is None or value > 0, f"{section}.{name}", "above 0", value)


def _suggest(prefix: str, key: str) -> str:
    """Return the hint for an unknown key of a recipe."""
    names = [*(field.name for field in dataclasses.fields(Recipe)), "loss.name", "miner.name"]
    sections = (("data", DataConfig), ("model", ModelConfig), ("train", TrainConfig), ("eval", EvalConfig))
    for section, config in sections:
        names += [f"{section}.{field.name}" for field in dataclasses.fields(config)]
    elsewhere = [name for name in names if name.endswith(f".{key}")]  # `lr` at the top level means `train.lr`
    if elsewhere:
        return f" Did you mean '{elsewhere[0]}'?"
    siblings = [name for name in names if name.startswith(prefix)]
    return did_you_mean(f"{prefix}{key}", siblings) or f" Available: {', '.join(siblings)}."
