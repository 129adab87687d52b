"""Named recipes: `nearkin train NAME`, or `nk.recipes.NAME()`.

Each is a function that returns a frozen `Recipe`; change it with `dataclasses.replace`. The papers' recipes follow
their texts and published code; docs/recipes.md gives the origin of each setting and says where the two disagree. All
recipes select the epoch on validation classes, which none of the papers had.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from nearkin._common.registry import Registry
from nearkin.config.recipe import ComponentConfig, DataConfig, ModelConfig, Recipe, TrainConfig
from nearkin.errors import ConfigError, did_you_mean

RECIPES: Registry[Callable[..., Recipe]] = Registry("recipe")


def _recipe(make: Callable[[], Recipe]) -> Callable[[], Recipe]:
    return RECIPES.add(make.__name__, make)


# Trains a head on frozen features: few epochs, because the whitened initialisation is already good.
HEAD_ONLY = TrainConfig(epochs=10, batch_size=128, samples_per_class=0, lr=1e-3, class_lr=1e-3, lr_schedule="cosine")
# Batch-norm statistics stay ImageNet's, which are better than those of small batches.
_LITE0 = ModelConfig(
    backbone="efficientnet_lite0",
    weights="default",
    pool="average",
    dim=512,
    head_init="whitened",
    freeze_norm="statistics",
)
_FINE_TUNE = TrainConfig(batch_size=96, samples_per_class=0, lr=4e-4, class_lr=0.03)


# --- our own ---------------------------------------------------------------------------------------------------------


@_recipe
def glyphs_small() -> Recipe:
    """The built-in glyphs with proxy_anchor, about a minute on two cores; `nearkin demo` runs it."""
    return Recipe(
        data=DataConfig(source="glyphs", test_fraction=0.4, val_fraction=0.1),
        model=ModelConfig(backbone="small_conv", width=24, dim=128),
        loss=ComponentConfig("proxy_anchor", {"alpha": 32.0, "margin": 0.1}),
        train=TrainConfig(epochs=6, batch_size=128, samples_per_class=4, lr=2e-3, class_lr=0.03),
    )


@_recipe
def folder_default() -> Recipe:
    """Your own images (--data FOLDER): a head on frozen EfficientNet-Lite0 features, minutes on a CPU."""
    return Recipe(
        data=DataConfig(source="folder", image_size=224, augment="thesis", test_fraction=0.4, val_fraction=0.1),
        model=replace(_LITE0, freeze="backbone"),
        loss=ComponentConfig("norm_softmax", {"temperature": 0.1}),
        train=HEAD_ONLY,
    )


@_recipe
def folder_finetune() -> Recipe:
    """Your own images (--data FOLDER): EfficientNet-Lite0 fine-tuned with proxy_anchor; slow without a GPU."""
    return Recipe(
        data=DataConfig(source="folder", image_size=224, augment="thesis", test_fraction=0.4, val_fraction=0.1),
        model=_LITE0,
        loss=ComponentConfig("proxy_anchor", {"alpha": 32.0, "margin": 0.1}),
        train=replace(_FINE_TUNE, epochs=20, patience=6),
    )


@_recipe
def features_default() -> Recipe:
    """Precomputed features (--data FILE.npz): a whitened linear head, trained with norm_softmax in seconds."""
    return Recipe(
        data=DataConfig(source="features", split="auto", test_fraction=0.4, val_fraction=0.1),
        model=ModelConfig(backbone="none", dim=512, head_init="whitened", freeze="backbone"),
        loss=ComponentConfig("norm_softmax", {"temperature": 0.1}),
        train=HEAD_ONLY,
    )


@_recipe
def from_scratch() -> Recipe:
    """Your own small images (--data FOLDER), thousands of them: a small network from scratch at 64 pixels."""
    return Recipe(
        data=DataConfig(source="folder", image_size=64, augment="light", test_fraction=0.4, val_fraction=0.1),
        model=ModelConfig(backbone="small_conv", width=32, dim=128),
        loss=ComponentConfig("proxy_anchor", {"alpha": 32.0, "margin": 0.1}),
        train=TrainConfig(epochs=30, batch_size=128, samples_per_class=4, lr=2e-3, class_lr=0.03),
    )


@_recipe
def cub_lite() -> Recipe:
    """CUB-200-2011 at 128 pixels, EfficientNet-Lite0 fine-tuned with proxy_anchor: minutes on two cores."""
    return Recipe(
        data=DataConfig(source="cub", image_size=128, augment="thesis"),
        model=_LITE0,
        loss=ComponentConfig("proxy_anchor", {"alpha": 32.0, "margin": 0.1}),
        train=replace(_FINE_TUNE, epochs=5),
    )


# --- instance cross entropy (Wang et al. 2019) -----------------------------------------------------------------------


def _ice(source: str, *, batch_size: int, samples_per_class: int, epochs: int) -> Recipe:
    return Recipe(
        data=DataConfig(source=source, image_size=227, augment="ice"),
        model=ModelConfig(backbone="bn_inception", weights="default", pool="average", dim=512),
        loss=ComponentConfig("ice", {"scale": 64.0}),
        train=TrainConfig(
            epochs=epochs,
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


@_recipe
def ice_cub() -> Recipe:
    """Instance cross entropy on CUB: BN-Inception, 512 dimensions, batches of 6 x 10 images, about 4,000 steps."""
    return _ice("cub", batch_size=60, samples_per_class=10, epochs=41)


@_recipe
def ice_cars() -> Recipe:
    """Instance cross entropy on Cars196: as on CUB; the paper's 4,000 steps are 30 epochs."""
    return _ice("cars", batch_size=60, samples_per_class=10, epochs=30)


@_recipe
def ice_sop() -> Recipe:
    """Instance cross entropy on Stanford Online Products: batches of 90 x 2 images, about 20,000 steps."""
    return _ice("sop", batch_size=180, samples_per_class=2, epochs=61)


# --- cross-entropy (Boudiaf et al. 2020) -----------------------------------------------------------------------------


def _ce(source: str, *, lr: float, momentum: float, epochs: int, norm: Literal["none", "batch"]) -> Recipe:
    return Recipe(
        data=DataConfig(source=source, image_size=224, augment=f"ce_{source}"),
        # The paper's embedding is the pooled 2048 features of ResNet-50, without a head.
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
    )


@_recipe
def ce_cub() -> Recipe:
    """Plain cross-entropy on CUB: ResNet-50, 2048 dimensions."""
    return _ce("cub", lr=0.02, momentum=0.0, epochs=30, norm="none")


@_recipe
def ce_cars() -> Recipe:
    """Plain cross-entropy on Cars196."""
    return _ce("cars", lr=0.05, momentum=0.0, epochs=100, norm="batch")


@_recipe
def ce_sop() -> Recipe:
    """Plain cross-entropy on Stanford Online Products."""
    return _ce("sop", lr=0.003, momentum=0.99, epochs=100, norm="batch")


@_recipe
def ce_inshop() -> Recipe:
    """Plain cross-entropy on In-Shop Clothes."""
    return _ce("inshop", lr=0.003, momentum=0.99, epochs=100, norm="batch")


# --- the thesis "Metric Learning: A Deep Dive" -----------------------------------------------------------------------

Dataset = Literal["cub", "cars", "sop"]
Network = Literal["googlenet", "bn_inception", "resnet50"]

# Tables 4 and 5: settings of the loss, miner, learning rate of the class parameters, samples per class (0: random).
# Where a table contradicts the published code and the loss's own paper, docs/recipes.md says which one is used.
THESIS: dict[str, tuple[dict[str, Any], ComponentConfig | None, float | None, int]] = {
    "contrastive": ({"margin": 0.5}, None, None, 5),
    "triplet": ({"margin": 0.1}, ComponentConfig("semihard"), None, 5),
    "lifted_structure": ({"margin": 0.5}, ComponentConfig("hard"), None, 5),
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


def thesis(loss: str, dataset: Dataset = "cub", network: Network = "resnet50", dim: int = 512) -> Recipe:
    """Return the recipe of one experiment of the thesis.

    Example:
        >>> thesis("proxy_anchor", "cars", "googlenet", 128).train.step_epochs
        20
    """
    if loss not in THESIS:
        raise ConfigError(f"The thesis has no loss named '{loss}'.{did_you_mean(loss, THESIS)}")
    _check_choice("dataset", dataset, ("cub", "cars", "sop"))
    _check_choice("network", network, ("googlenet", "bn_inception", "resnet50"))
    settings, miner, class_lr, samples_per_class = THESIS[loss]
    if loss == "soft_triple":
        settings = {**settings, "centers": 2 if dataset == "sop" else 10}
    # Table 3: the two smaller networks decay half as often.
    step_epochs = {"cub": 5, "cars": 10, "sop": 10}[dataset] * (1 if network == "resnet50" else 2)
    return Recipe(
        data=DataConfig(source=dataset, image_size=224, augment="thesis"),
        model=ModelConfig(
            backbone=network, weights="default", pool="average_maximum", dim=dim, freeze_norm="statistics"
        ),
        loss=ComponentConfig(loss, settings),
        miner=miner,
        train=TrainConfig(
            epochs=100,
            batch_size=100 if network == "resnet50" else 180,
            samples_per_class=samples_per_class,
            optimizer="adamw",
            lr=6e-4 if dataset == "sop" else 1e-4,
            class_lr=class_lr,
            weight_decay=1e-4,
            class_decay=True,
            lr_schedule="step",
            step_epochs=step_epochs,
            step_factor=0.25 if dataset == "sop" else 0.1,
            frozen_epochs=1,
            clip_norm=10.0,
        ),
    )


def _add_thesis(loss: str) -> None:
    def make(dataset: Any = "cub", network: Any = "resnet50", dim: int | str = 512) -> Recipe:
        return thesis(loss, dataset, network, _parse_dim(dim))

    make.__doc__ = (
        f"The thesis's {loss} on CUB; thesis_{loss}:DATA:NETWORK:SIZE for another dataset, network or dimension."
    )
    RECIPES.add(f"thesis_{loss}", make)


for _loss in THESIS:
    _add_thesis(_loss)


# --- multi-proxy anchor (Saeki et al. 2021) --------------------------------------------------------------------------


def mpa(
    dataset: Dataset = "cub", *, loss: Literal["mpa", "mpa_dw", "mpa_ap", "soft_triple", "proxy_anchor"] = "mpa"
) -> Recipe:
    """Return a recipe of the multi-proxy anchor paper."""
    _check_choice("dataset", dataset, ("cub", "cars", "sop"))
    multi_proxy = {"gamma": 0.1, "tau": 0.2, "centers": 2 if dataset == "sop" else 10}
    settings: dict[str, dict[str, Any]] = {
        "soft_triple": {"scale": 20.0, "margin": 0.01, **multi_proxy},
        "proxy_anchor": {"alpha": 32.0, "margin": 0.1},
    }
    return Recipe(
        data=DataConfig(source=dataset, image_size=224, augment="mpa"),
        model=ModelConfig(backbone="bn_inception", weights="default", pool="gem", gem_p=3.0, dim=512),
        loss=ComponentConfig(loss, settings.get(loss, {"alpha": 32.0, "margin": 0.1, **multi_proxy})),
        train=TrainConfig(
            epochs=100 if dataset == "sop" else 60,
            batch_size={"cub": 180, "cars": 64, "sop": 32}[dataset],
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
    )


def _add_mpa(dataset: Dataset) -> None:
    def make(loss: Any = "mpa") -> Recipe:
        _check_choice("loss", loss, ("mpa", "mpa_dw", "mpa_ap", "soft_triple", "proxy_anchor"))
        return mpa(dataset, loss=loss)

    make.__doc__ = (
        f"Multi-proxy anchor on {dataset}; mpa_{dataset}:LOSS for mpa_dw, mpa_ap, soft_triple or proxy_anchor."
    )
    RECIPES.add(f"mpa_{dataset}", make)


for _dataset in ("cub", "cars", "sop"):
    _add_mpa(_dataset)


# --- lookup ----------------------------------------------------------------------------------------------------------


def _check_choice(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"No {what} named '{value}' in these recipes. Available: {', '.join(allowed)}.")


def _parse_dim(text: int | str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"Embedding dimension: expected an integer, got '{text}'.") from None


def find(name: str) -> Recipe:
    """Find a recipe by name or path."""
    from nearkin.data.sources import detect_source

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
        problem = "" if detect_source(path) == "folder" else "data, not a recipe"
    if problem:
        raise ConfigError(f"{name}: {problem}. To train on it: nearkin train --data {shlex.quote(name)}")
    if path.suffix == ".toml" or path.exists():
        return Recipe.from_toml(path)
    hint = did_you_mean(name, RECIPES) or f" Available: {', '.join(RECIPES)}; or give a .toml file."
    raise ConfigError(f"No recipe or recipe file named '{name}'.{hint}")
