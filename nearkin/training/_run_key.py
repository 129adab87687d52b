"""Run keys: a recipe that gives the same numbers has the same key."""

import hashlib
import inspect
import json
from collections.abc import Mapping
from typing import Any

from nearkin.config._parsing import to_plain_dict
from nearkin.config.recipe import ComponentConfig, Recipe, Scalar
from nearkin.losses import LOSSES
from nearkin.losses.miners import MINERS


def run_key(recipe: Recipe, fingerprint: str) -> str:
    """Name a recipe's run: a readable prefix and a hash of everything that changes a number.

    Args:
        recipe: What will be trained.
        fingerprint: Of the data and of the initial weights.

    Returns:
        For example "glyphs-proxy_anchor-128-b17a73ad5ad3".
    """
    values = json.dumps([fingerprint, key_values(recipe)], sort_keys=True)
    digest = hashlib.sha256(values.encode()).hexdigest()[:12]
    return f"{recipe.data.source}-{recipe.loss.name}-{recipe.model.dim}-{digest}"


def key_values(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of a recipe that change a number, with the defaults of its loss and miner filled in."""
    values = to_plain_dict(recipe, keyed_only=True)
    if not values["eval"]:
        del values["eval"]  # the defaults; runs written before there were settings keep their keys
    loss = LOSSES[recipe.loss.name].settings if recipe.loss.name in LOSSES else {}
    values["loss"] = _with_defaults(recipe.loss, loss)
    if recipe.miner is not None:
        miner = MINERS.get(recipe.miner.name)
        parameters = inspect.signature(miner).parameters if miner else {}
        defaults = {name: p.default for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
        values["miner"] = _with_defaults(recipe.miner, defaults)
    return values


def _with_defaults(component: ComponentConfig, defaults: Mapping[str, Any]) -> dict[str, Scalar]:
    """Fill in default settings, and write whole numbers as floats: 32 and 32.0 are the same setting.

    Example:
        >>> _with_defaults(ComponentConfig("proxy_anchor", {"alpha": 16}), {"alpha": 32.0, "margin": 0.1, "dim": None})
        {'name': 'proxy_anchor', 'alpha': 16.0, 'margin': 0.1}
    """
    settings = {name: value for name, value in defaults.items() if isinstance(value, Scalar)} | dict(component.settings)
    floats = {name: float(value) for name, value in settings.items() if type(value) is int}
    return {"name": component.name, **settings, **floats}
