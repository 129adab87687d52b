"""What of a recipe decides the numbers of its run, in one writing: the same training has one key."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from typing import Any

from nearkin.config.recipe import ComponentConfig, Recipe, Scalar, to_plain_dict
from nearkin.losses import LOSSES
from nearkin.losses.miners import MINERS


def run_key(recipe: Recipe, fingerprint: str) -> str:
    """The name of a recipe's run: readable in front, behind it a hash of everything that changes a number.

    Args:
        recipe: What will be trained.
        fingerprint: Of the data and of the weights that training starts from.

    Returns:
        For example `glyphs-proxy_anchor-128-b17a73ad5ad3`.
    """
    counted = json.dumps([fingerprint, key_values(recipe)], sort_keys=True)
    digest = hashlib.sha256(counted.encode()).hexdigest()[:12]
    return f"{recipe.data.source}-{recipe.loss.name}-{recipe.model.dim}-{digest}"


def key_values(recipe: Recipe) -> dict[str, Any]:
    """All of a recipe that changes a number, as plain values; the loss and the miner with their defaults spelt out."""
    values = to_plain_dict(recipe, keyed_only=True)
    # Whoever registers a loss of his own does so before it trains; elsewhere what was given must do.
    values["loss"] = _spelt_out(recipe.loss, LOSSES[recipe.loss.name].settings if recipe.loss.name in LOSSES else {})
    if recipe.miner is not None:
        name = recipe.miner.name
        values["miner"] = _spelt_out(recipe.miner, _defaults(MINERS[name]) if name in MINERS else {})
    return values


def _defaults(function: Any) -> dict[str, Any]:
    return {n: p.default for n, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY}


def _spelt_out(choice: ComponentConfig, defaults: Mapping[str, Any]) -> dict[str, Scalar]:
    """A choice with all its settings.

    >>> _spelt_out(ComponentConfig("proxy_anchor", {"alpha": 16}), {"alpha": 32.0, "margin": 0.1, "dim": None})
    {'name': 'proxy_anchor', 'alpha': 16.0, 'margin': 0.1}
    """
    settings = {name: value for name, value in defaults.items() if isinstance(value, Scalar)} | dict(choice.settings)
    whole = {name: float(value) for name, value in settings.items() if type(value) is int}  # 32 is 32.0
    return {"name": choice.name, **settings, **whole}
