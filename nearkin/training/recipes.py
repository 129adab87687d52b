"""Named recipes: `nearkin train NAME`, or `nk.recipes.NAME()`; change one with `dataclasses.replace`.

The papers' recipes follow their texts and published code (docs/recipes.md), but select the epoch on validation classes.
"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from nearkin._common.registry import Registry
from nearkin.config.recipe import ComponentConfig, DataConfig, EvalConfig, ModelConfig, Recipe, TrainConfig
from nearkin.errors import ConfigError, did_you_mean

T = TypeVar("T")
RECIPES: Registry[Callable[..., Recipe]] = Registry("recipe")


def _recipe(make: Callable[..., Recipe]) -> Callable[..., Recipe]:
    return RECIPES.add(make.__name__, make)


def _family(make: Callable[..., Recipe], *choices: str) -> list[Callable[..., Recipe]]:
    """Register the recipes `NAME_CHOICE` of a function, one for each choice of its first argument."""
    return [RECIPES.add(f"{make.__name__}_{choice}", partial(make, choice)) for choice in choices]


def _pick(what: str, name: str, table: Mapping[str, T]) -> T:
    if name not in table:
        raise ConfigError(f"No {what} named '{name}' in these recipes. Available: {', '.join(table)}.")
    return table[name]


# --- our own ---------------------------------------------------------------------------------------------------------

_PROXY_ANCHOR = ComponentConfig("proxy_anchor", {"alpha": 32.0, "margin": 0.1})
_NORM_SOFTMAX = ComponentConfig("norm_softmax", {"temperature": 0.1})
# Batch-norm statistics stay ImageNet's, which are better than those of small batches.
_LITE0 = ModelConfig(
    backbone="efficientnet_lite0",
    weights="default",
    pool="average",
    dim=512,
    head_init="whitened",
    freeze_norm="statistics",
)
# Trains a head on frozen features: few epochs, because the whitened initialisation is already good.
_HEAD_ONLY = TrainConfig(epochs=10, batch_size=128, samples_per_class=0, lr=1e-3, class_lr=1e-3, lr_schedule="cosine")
_FINE_TUNE = TrainConfig(batch_size=96, samples_per_class=0, lr=4e-4, class_lr=0.03)
_SCRATCH = TrainConfig(batch_size=128, samples_per_class=4, lr=2e-3, class_lr=0.03)


@_recipe
def glyphs_small() -> Recipe:
    """The built-in glyphs with proxy_anchor, about a minute on two cores; `nearkin demo` runs it."""
    return Recipe(
        data=DataConfig(source="glyphs"),
        model=ModelConfig(backbone="small_conv", width=24, dim=128),
        loss=_PROXY_ANCHOR,
        train=replace(_SCRATCH, epochs=6),
    )


@_recipe
def folder_default() -> Recipe:
    """Your own images (--data FOLDER): a head on frozen EfficientNet-Lite0 features, minutes on a CPU."""
    return Recipe(
        data=DataConfig(source="folder", image_size=224, augment="thesis"),
        model=replace(_LITE0, freeze="backbone"),
        loss=_NORM_SOFTMAX,
        train=_HEAD_ONLY,
    )


@_recipe
def folder_finetune() -> Recipe:
    """Your own images (--data FOLDER): EfficientNet-Lite0 fine-tuned with proxy_anchor; slow without a GPU."""
    return Recipe(
        data=DataConfig(source="folder", image_size=224, augment="thesis"),
        model=_LITE0,
        loss=_PROXY_ANCHOR,
        train=replace(_FINE_TUNE, epochs=20, patience=6),
    )


@_recipe
def features_default() -> Recipe:
    """Precomputed features (--data FILE.npz): a whitened linear head, trained with norm_softmax in seconds."""
    return Recipe(
        data=DataConfig(source="features"),
        model=ModelConfig(backbone="none", dim=512, head_init="whitened", freeze="backbone"),
        loss=_NORM_SOFTMAX,
        train=_HEAD_ONLY,
    )


@_recipe
def from_scratch() -> Recipe:
    """Your own small images (--data FOLDER), thousands of them: a small network from scratch at 64 pixels."""
    return Recipe(
        data=DataConfig(source="folder", image_size=64, augment="light"),
        model=ModelConfig(backbone="small_conv", width=32, dim=128),
        loss=_PROXY_ANCHOR,
        train=replace(_SCRATCH, epochs=30),
    )


@_recipe
def cub_lite() -> Recipe:
    """CUB-200-2011 at 128 pixels, EfficientNet-Lite0 fine-tuned with proxy_anchor: minutes on two cores."""
    return Recipe(
        data=DataConfig(source="cub", image_size=128, augment="thesis"),
        model=_LITE0,
        loss=_PROXY_ANCHOR,
        train=replace(_FINE_TUNE, epochs=5),
    )


# Networks for a GPU: name of timm, image size, images per micro-batch on 12 GB. Vision transformers train best with
# a lower learning rate in their first layers; the head learns alone at first.
_FOR_GPU = {
    "dinov2_small": ("vit_small_patch14_dinov2.lvd142m", 224, 64),
    "dinov2_base": ("vit_base_patch14_dinov2.lvd142m", 224, 32),
    "dinov3_small": ("vit_small_patch16_dinov3.lvd1689m", 256, 64),
    "dinov3_base": ("vit_base_patch16_dinov3.lvd1689m", 256, 32),
    "clip_base": ("vit_base_patch16_clip_224.openai", 224, 32),
    "siglip_base": ("vit_base_patch16_siglip_224", 224, 32),
    "convnext_tiny": ("convnext_tiny.in12k_ft_in1k", 224, 48),
    "convnext_base": ("convnext_base.clip_laion2b_augreg_ft_in12k_in1k", 256, 16),
}


def for_gpu(network: str, *, lora: bool = False) -> Recipe:
    """Return the recipe that fine-tunes a strong network on your images (--data FOLDER), on a GPU of 12 GB or more.

    Larger memory (24 or 80 GB) takes a larger --train.micro-batch-size, which changes the speed but not the result.
    """
    name, size, micro_batch_size = _pick("network", network, _FOR_GPU)
    is_vit = name.startswith("vit")
    model = ModelConfig(
        backbone=name,
        weights="default",
        pool="average",
        dim=512,
        head_init="whitened",
        lora_rank=16 if lora else 0,
    )
    lr, layer_decay = (1e-3, 1.0) if lora else (1e-4, 0.75)
    train = replace(
        _FINE_TUNE,
        epochs=20,
        batch_size=192 if is_vit else 96,
        micro_batch_size=micro_batch_size,
        lr=lr,
        layer_decay=layer_decay,
        head_lr=1e-3,
        frozen_epochs=1,
        patience=6,
        precision="fp16",
    )
    data = DataConfig(source="folder", image_size=size, augment="thesis")
    return Recipe(data=data, model=model, loss=_PROXY_ANCHOR, train=train)


for _network, (_timm_name, _, _) in _FOR_GPU.items():
    RECIPES.add(_network, partial(for_gpu, _network))
    if _timm_name.startswith("vit"):
        RECIPES.add(f"{_network}_lora", partial(for_gpu, _network, lora=True))


# --- of papers: a function of the loss or dataset, and a table of what differs ---------------------------------------

# dataset: batch size, samples per class, steps
_ICE = {"cub": (60, 10, 4_000), "cars": (60, 10, 4_000), "sop": (180, 2, 20_000)}


def ice(dataset: str) -> Recipe:
    """Return a recipe of instance cross entropy (Wang et al. 2019): BN-Inception, 512 dimensions."""
    batch_size, samples_per_class, steps = _pick("dataset", dataset, _ICE)
    return Recipe(
        data=DataConfig(source=dataset, image_size=227, augment="ice"),
        model=ModelConfig(backbone="bn_inception", weights="default", pool="average", dim=512),
        loss=ComponentConfig("ice", {"scale": 64.0}),
        train=TrainConfig(
            steps=steps,
            batch_size=batch_size,
            samples_per_class=samples_per_class,
            optimizer="sgd",
            momentum=0.8,
            nesterov=False,
            lr=1e-3,
            head_lr=1e-2,
            weight_decay=1e-5,
            lr_schedule="constant",
            clip_norm=0.0,
        ),
    )


# dataset: learning rate, momentum, epochs, normalisation of the features
_CE: dict[str, tuple[float, float, int, Any]] = {
    "cub": (0.02, 0.0, 30, "none"),
    "cars": (0.05, 0.0, 100, "batch"),
    "sop": (0.003, 0.99, 100, "batch"),
    "inshop": (0.003, 0.99, 100, "batch"),
}


def ce(dataset: str) -> Recipe:
    """Return a recipe of plain cross-entropy (Boudiaf et al. 2020): the pooled 2048 features of ResNet-50, no head."""
    lr, momentum, epochs, norm = _pick("dataset", dataset, _CE)
    return Recipe(
        data=DataConfig(source=dataset, image_size=224, augment=f"ce_{dataset}"),
        model=ModelConfig(
            backbone="resnet50", weights="default", pool="average", dim=0, norm=norm, freeze_norm="statistics"
        ),
        loss=ComponentConfig("softmax", {"smoothing": 0.1, "dropout": 0.5}),
        train=TrainConfig(
            epochs=epochs,
            batch_size=128,
            samples_per_class=0,
            optimizer="sgd",
            momentum=momentum,
            nesterov=momentum > 0,
            lr=lr,
            class_lr=lr,
            weight_decay=5e-4,
            class_decay=True,
            lr_schedule="cosine",
            warmup_steps=100,
            clip_norm=0.0,
        ),
        eval=EvalConfig(ks=(1, 2, 4, 8, 16, 32) if dataset in ("cub", "cars") else (), similarity="both"),
    )


# Tables 4 and 5: settings of the loss, miner, learning rate of the class parameters, samples per class (0: random).
# Where a table contradicts the published code and the loss's own paper, docs/recipes.md says which one is used.
THESIS: dict[str, tuple[dict[str, Any], ComponentConfig | None, float | None, int]] = {
    "contrastive": ({"margin": 0.5}, None, None, 5),
    "triplet": ({"margin": 0.1}, ComponentConfig("semihard"), None, 5),
    # Table 5 says "hard"; its code mines lifted structure as it mines multi-similarity. One positive and one negative
    # per anchor, as the miner `hard` selects, would turn it into a triplet loss.
    "lifted_structure": ({"margin": 0.5}, ComponentConfig("multi_similarity", {"epsilon": 0.1}), None, 5),
    "npair": ({}, None, None, 5),
    "margin": ({"alpha": 0.2, "beta": 1.2, "learn_beta": True}, ComponentConfig("distance_weighted"), 5e-5, 5),
    "multi_similarity": (
        {"alpha": 2.0, "beta": 50.0, "base": 0.5},
        ComponentConfig("multi_similarity", {"epsilon": 0.1}),
        None,
        5,
    ),
    "proxy_nca": ({}, None, 1e-5, 0),
    "arcface": ({"margin_degrees": 28.6, "scale": 64.0}, None, 1e-4, 0),
    "soft_triple": ({"scale": 20.0, "gamma": 0.1, "margin": 0.01, "tau": 0.2}, None, 1e-4, 0),
    "proxy_anchor": ({"alpha": 32.0, "margin": 0.1}, None, 1e-2, 0),
}
# Its own two losses, which extend Proxy-Anchor; it gives no settings for them.
THESIS_NEW = dict.fromkeys(("proxy_repulsion", "proxy_repulsion_batch"), THESIS["proxy_anchor"])
# Table 15: the settings found on the fixed validation classes. Its "weights lr" of SoftTriple is the learning rate of
# the class weights, and its gamma the inverse of ours.
THESIS_TUNED: dict[str, tuple[dict[str, Any], ComponentConfig | None, float | None, int]] = {
    "multi_similarity": (
        {"alpha": 18.0, "beta": 76.0, "base": 0.8},
        ComponentConfig("multi_similarity", {"epsilon": 0.4}),
        None,
        5,
    ),
    "soft_triple": ({"scale": 78.0, "gamma": 1 / 58, "margin": 0.4, "tau": 0.4}, None, 5e-5, 0),
    "proxy_anchor": ({"alpha": 32.0, "margin": 0.1}, None, 1e-2, 0),
}
# Table 3, dataset: learning rate, epochs between decays, factor of a decay
_THESIS_DATA = {"cub": (1e-4, 5, 0.1), "cars": (1e-4, 10, 0.1), "sop": (6e-4, 10, 0.25)}
# network: batch size; the two smaller ones decay half as often
_THESIS_NETWORKS = {"googlenet": 180, "bn_inception": 180, "resnet50": 100}


def thesis(loss: str, dataset: str = "cub", network: str = "resnet50", dim: int | str = 512) -> Recipe:
    """Return the recipe of one experiment of the thesis "Metric Learning: A Deep Dive".

    Example:
        >>> thesis("proxy_anchor", "cars", "googlenet", 128).train.step_epochs
        20
    """
    return _thesis(loss, dataset, network, dim, THESIS | THESIS_NEW)


def thesis_tuned(loss: str, dataset: str = "cub", network: str = "bn_inception", dim: int | str = 512) -> Recipe:
    """Return `thesis` at the settings of its table 15."""
    return _thesis(loss, dataset, network, dim, THESIS_TUNED)


def _thesis(loss: str, dataset: str, network: str, dim: int | str, settings_of: Mapping[str, Any]) -> Recipe:
    settings, miner, class_lr, samples_per_class = _pick("loss", loss, settings_of)
    lr, step_epochs, step_factor = _pick("dataset", dataset, _THESIS_DATA)
    batch_size = _pick("network", network, _THESIS_NETWORKS)
    if loss == "soft_triple":
        settings = {**settings, "centers": 2 if dataset == "sop" else 10}
    if not str(dim).isdecimal():
        raise ConfigError(f"Embedding dimension: expected an integer, got '{dim}'.")
    return Recipe(
        data=DataConfig(source=dataset, image_size=224, augment="thesis"),
        model=ModelConfig(
            backbone=network, weights="default", pool="average_maximum", dim=int(dim), freeze_norm="statistics"
        ),
        loss=ComponentConfig(loss, settings),
        miner=miner,
        train=TrainConfig(
            epochs=100,
            batch_size=batch_size,
            samples_per_class=samples_per_class,
            optimizer="adamw",
            lr=lr,
            class_lr=class_lr,
            weight_decay=1e-4,
            class_decay=True,
            lr_schedule="step",
            step_epochs=step_epochs if network == "resnet50" else 2 * step_epochs,
            step_factor=step_factor,
            frozen_epochs=1,
            clip_norm=10.0,
        ),
    )


# dataset: epochs, batch size, proxies per class
_MPA = {"cub": (60, 180, 10), "cars": (60, 64, 10), "sop": (100, 32, 2)}
_MPA_METRICS = ("R@1", "R@2", "R@4", "R@8", "nDCG@2", "nDCG@4", "nDCG@8", "MAP@R")
_MPA_SOP_METRICS = ("R@1", "R@10", "R@100", "nDCG@10", "nDCG@100", "MAP@R")


def mpa(dataset: str = "cub", loss: str = "mpa") -> Recipe:
    """Return a recipe of multi-proxy anchor (Saeki et al. 2023); `loss` may also be one that it is compared with."""
    epochs, batch_size, centers = _pick("dataset", dataset, _MPA)
    multi_proxy = {"gamma": 0.1, "tau": 0.2, "centers": centers}
    anchor = {"alpha": 32.0, "margin": 0.1}
    settings: dict[str, dict[str, Any]] = {
        **{name: {**anchor, **multi_proxy} for name in ("mpa", "mpa_dw", "mpa_ap")},
        "soft_triple": {"scale": 20.0, "margin": 0.01, **multi_proxy},
        "proxy_anchor": anchor,
    }
    return Recipe(
        data=DataConfig(source=dataset, image_size=224, augment="mpa"),
        model=ModelConfig(backbone="bn_inception", weights="default", pool="gem", gem_p=3.0, dim=512),
        loss=ComponentConfig(loss, _pick("loss", loss, settings)),
        train=TrainConfig(
            epochs=epochs,
            batch_size=batch_size,
            samples_per_class=0,
            optimizer="adamw",
            lr=1e-4,
            class_lr=1e-2,
            class_decay=True,
            lr_schedule="step",
            step_epochs=20,
            step_factor=0.5,
            clip_norm=0.0,
        ),
        eval=EvalConfig(metrics=_MPA_SOP_METRICS if dataset == "sop" else _MPA_METRICS),
    )


# Baselines of the papers' tables, each in the set-up of its own paper as far as that states one: network, embedding
# size, loss, miner, batch size, images per class, learning rate, length. docs/recipes.md says what is ours.
_BASELINES: dict[str, tuple[str, int, ComponentConfig, str | None, int, int, float, dict[str, Any]]] = {
    "cce": ("bn_inception", 512, ComponentConfig("softmax"), None, 60, 0, 1e-4, {"epochs": 40}),
    "norm_softmax": (
        *("resnet50", 2048, ComponentConfig("norm_softmax", {"temperature": 0.05}), None),
        *(75, 25, 1e-4, {"epochs": 30}),
    ),
    "triplet_semihard": (
        *("googlenet", 64, ComponentConfig("triplet", {"margin": 0.2}), "semihard"),
        *(120, 5, 1e-4, {"steps": 20_000}),
    ),
    "lifted_struct": ("googlenet", 64, ComponentConfig("lifted_song"), None, 120, 5, 1e-4, {"steps": 20_000}),
    "n_pair_mc": ("googlenet", 512, ComponentConfig("npair_mc"), None, 120, 2, 1e-4, {"steps": 20_000}),
    "proxy_nca": ("bn_inception", 64, ComponentConfig("proxy_nca"), None, 32, 0, 1e-4, {"epochs": 40}),
    "margin": (
        *("resnet50", 128, ComponentConfig("margin", {"alpha": 0.2, "beta": 1.2, "learn_beta": True})),
        *("distance_weighted", 80, 5, 1e-4, {"epochs": 60}),
    ),
    "multi_similarity": (
        *("bn_inception", 512, ComponentConfig("multi_similarity", {"alpha": 2.0, "beta": 50.0, "base": 0.5})),
        *("multi_similarity", 80, 5, 1e-5, {"steps": 6_000}),
    ),
}
_BASELINE_DATA = ("cub", "cars", "sop", "inshop")


def baseline(name: str, dataset: str = "cub") -> Recipe:
    """Return the recipe of a baseline that the papers quote, in the set-up of its own paper."""
    network, dim, loss, miner, batch_size, samples_per_class, lr, length = _pick("baseline", name, _BASELINES)
    _pick("dataset", dataset, dict.fromkeys(_BASELINE_DATA))
    return Recipe(
        data=DataConfig(source=dataset, image_size=224, augment="thesis"),
        model=ModelConfig(
            backbone=network, weights="default", pool="average", dim=dim, norm="layer" if dim == 2048 else "none"
        ),
        loss=loss,
        miner=ComponentConfig(miner) if miner else None,
        train=TrainConfig(
            batch_size=batch_size,
            samples_per_class=samples_per_class,
            lr=lr,
            head_lr=10 * lr,
            lr_schedule="constant",
            **length,
        ),
    )


for _name in _BASELINES:
    RECIPES.add(_name, partial(baseline, _name))
ice_cub, ice_cars, ice_sop = _family(ice, *_ICE)
ce_cub, ce_cars, ce_sop, ce_inshop = _family(ce, *_CE)
_family(thesis, *THESIS, *THESIS_NEW)
_family(thesis_tuned, *THESIS_TUNED)
mpa_cub, mpa_cars, mpa_sop = _family(mpa, *_MPA)


def find(name: str) -> Recipe:
    """Find a recipe by name (further arguments after colons), by .toml file or by run folder."""
    function, *arguments = name.split(":")
    if function in RECIPES:
        try:
            return RECIPES[function](*arguments)
        except TypeError:
            raise ConfigError(f"The recipe '{function}' does not take {len(arguments)} arguments: '{name}'.") from None
    path = Path(name)
    problem = ""
    if path.is_dir():
        problem = "" if (path / "recipe.toml").exists() else "not a run folder (no recipe.toml)"
        path = path / "recipe.toml"
    elif path.is_file() and path.suffix != ".toml":
        from nearkin.data.sources import detect_source

        problem = "" if detect_source(path) == "folder" else "data, not a recipe"
    if problem:
        raise ConfigError(f"{name}: {problem}. To train on it: nearkin train --data {shlex.quote(name)}")
    if path.suffix == ".toml" or path.exists():
        return Recipe.from_toml(path)
    hint = did_you_mean(name, RECIPES) or f" Available: {', '.join(RECIPES)}; or give a .toml file."
    raise ConfigError(f"No recipe or recipe file named '{name}'.{hint}")
