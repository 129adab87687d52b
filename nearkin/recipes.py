"""Named recipes: `nearkin train NAME`, or `nk.recipes.NAME()`.

Each is a function that returns a frozen `Recipe`; vary one with `dataclasses.replace`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from nearkin.errors import ConfigError, did_you_mean
from nearkin.recipe import Choice, Data, Model, Recipe, Train
from nearkin.registry import Registry

RECIPES: Registry[Callable[[], Recipe]] = Registry("recipe")


def _recipe(make: Callable[[], Recipe]) -> Callable[[], Recipe]:
    return RECIPES.add(make.__name__, make)


@_recipe
def glyphs_small() -> Recipe:
    """The built-in glyphs with proxy_anchor: what `nearkin demo` runs, about a minute on two cores."""
    return Recipe(
        data=Data(source="glyphs", test_share=0.4, val_share=0.1),
        model=Model(backbone="small_conv", width=24, dim=128),
        loss=Choice("proxy_anchor", {"alpha": 32.0, "margin": 0.1}),
        train=Train(epochs=6, batch_size=128, per_class=4, lr=2e-3, class_lr=0.03),
    )


@_recipe
def folder_default() -> Recipe:
    """Your own images, one folder per class (--data FOLDER): a small network from scratch with proxy_anchor."""
    return Recipe(
        data=Data(source="folder", image_size=64, augment="light", test_share=0.4, val_share=0.1),
        model=Model(backbone="small_conv", width=32, dim=128),
        loss=Choice("proxy_anchor", {"alpha": 32.0, "margin": 0.1}),
        train=Train(epochs=30, batch_size=128, per_class=4, lr=2e-3, class_lr=0.03),
    )


def find(name: str) -> Recipe:
    """A recipe by its name here, or from a TOML file or the run folder that holds one."""
    if name in RECIPES:
        return RECIPES[name]()
    path = Path(name)
    if path.is_dir():
        path = path / "recipe.toml"
    if path.suffix == ".toml" or path.exists():
        return Recipe.from_toml(path)
    hint = did_you_mean(name, RECIPES) or f" There are: {', '.join(RECIPES)}; or give a .toml file."
    raise ConfigError(f"No recipe or recipe file named '{name}'.{hint}")
