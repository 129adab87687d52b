"""Run keys: a recipe that gives the same numbers has the same key."""

import hashlib
import inspect
import json
from collections.abc import Mapping
from typing import Any, cast

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
    loss = "+".join(part.name for _, part in recipe.loss.terms)
    return f"{recipe.data.source}-{loss}-{recipe.model.dim}-{digest}"


def key_values(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of a recipe that change a number, with the defaults of its loss and miner filled in."""
    values = to_plain_dict(recipe, keyed_only=True)
    if not values["eval"]:
        del values["eval"]  # the defaults; runs written before there were settings keep their keys
    values["loss"] = _loss_values(recipe.loss)
    if recipe.miner is not None:
        miner = MINERS.get(recipe.miner.name)
        parameters = inspect.signature(miner).parameters if miner else {}
        defaults = {name: p.default for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
        values["miner"] = _with_defaults(recipe.miner, defaults) | (_source_of(miner) if miner else {})
    return values


def _loss_values(loss: ComponentConfig) -> dict[str, Any] | list[dict[str, Any]]:
    if loss.parts:
        return [{"weight": weight, **cast(dict[str, Any], _loss_values(part))} for weight, part in loss.parts]
    entry = LOSSES.get(loss.name)
    values: dict[str, Any] = _with_defaults(loss, entry.settings if entry else {})
    if entry:
        values |= _source_of(entry.function)
    if values.get("reduction") == "mean":  # the default, which is in no key
        del values["reduction"]
    return values | ({"regularizers": dict(loss.regularizers)} if loss.regularizers else {})


def _source_of(function: Any) -> dict[str, str]:
    """Return the hash of a user's own function: after a change of its code the run is another one."""
    if function.__module__.startswith("nearkin."):
        return {}
    try:
        source = inspect.getsource(function)
    except OSError:  # typed into an interpreter
        return {}
    return {"source": hashlib.sha256(source.encode()).hexdigest()[:12]}


def _with_defaults(component: ComponentConfig, defaults: Mapping[str, Any]) -> dict[str, Scalar]:
    """Fill in default settings, and write whole numbers as floats: 32 and 32.0 are the same setting.

    Example:
        >>> _with_defaults(ComponentConfig("proxy_anchor", {"alpha": 16}), {"alpha": 32.0, "margin": 0.1, "dim": None})
        {'name': 'proxy_anchor', 'alpha': 16.0, 'margin': 0.1}
    """
    settings = {name: value for name, value in defaults.items() if isinstance(value, Scalar)} | dict(component.settings)
    floats = {name: float(value) for name, value in settings.items() if type(value) is int}
    return {"name": component.name, **settings, **floats}
