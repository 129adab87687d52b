"""How an epoch is chosen and on what a model is judged: four protocols behind one interface.

default        the first half of the classes trains, the last epoch counts; no validation classes
kfold          one model per fold of the training classes, each judged on the test classes; mean and sample deviation
fixed          one random share of the training classes chooses the epoch; `refit` trains again on all of them
query_gallery  as fixed, where the source asks one set of images of another (In-Shop)

A number without its protocol says little, so a badge goes with each: `Protocol.label`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from nearkin.config.recipe import Recipe
from nearkin.data.benchmarks import BENCHMARKS
from nearkin.data.table import Table
from nearkin.errors import ConfigError

Name = Literal["default", "kfold", "fixed", "query_gallery"]


@dataclass(frozen=True)
class Protocol:
    """One protocol with its settings."""

    name: Name = "fixed"
    folds: int = 10
    """Of kfold: disjoint groups of the training classes, each of which validates once."""
    refit: bool = False
    """Of fixed: train once more on all training classes for the chosen number of epochs, and judge that."""
    choose_on_test: bool = False
    """Of default: the best epoch on the test classes, as most papers report it. Too high; only to set beside them."""

    def __post_init__(self) -> None:
        if self.refit and self.name not in ("fixed", "query_gallery"):
            raise ConfigError(f"refit: only with the protocols fixed and query_gallery, not with {self.name}.")
        if self.choose_on_test and self.name != "default":
            raise ConfigError(f"choose_on_test: only with the protocol default, not with {self.name}.")
        if self.folds < 2:
            raise ConfigError(f"folds: expected at least 2, got {self.folds}.")

    @property
    def parts(self) -> int:
        """Models per trial of one seed."""
        return self.folds if self.name == "kfold" else 1

    def apply(self, data: dict[str, Any], part: int, val_fraction: float) -> dict[str, Any]:
        """The data section of a recipe, changed to this protocol."""
        changed = {**data, "folds": 0, "fold": 0, "val_fraction": val_fraction, "select_on": "validation"}
        if self.name == "default":
            changed |= {"val_fraction": 0.0, "select_on": "test" if self.choose_on_test else "validation"}
            if data.get("split", "auto") == "auto":
                changed["split"] = "half"  # the source's own parts where it has some
        if self.name == "kfold":
            changed |= {"folds": self.folds, "fold": part}
        return changed

    def check(self, recipe: Recipe) -> None:
        """Refuse a source that is known not to be judged this way, before its data are read."""
        source = recipe.data.source
        parted = source in ("features", "table") or (source in BENCHMARKS and "query" in BENCHMARKS[source].parts)
        if self.name == "query_gallery" and not parted:
            raise ConfigError(f"query_gallery: {source} has no queries and gallery of its own. Use the protocol fixed.")

    def check_table(self, table: Table) -> None:
        """The same once the data are read: a table or a file of features may have the two parts, or not."""
        if self.name == "query_gallery" and not {"query", "gallery"} <= set(table.parts):
            parts = ", ".join(table.parts) or "none"
            raise ConfigError(
                f"query_gallery: {table.source} needs the parts query and gallery; it has {parts}. Use fixed."
            )

    def refitted(self, recipe: Recipe, epochs: int) -> Recipe:
        """The recipe of the second training: all training classes, the number of epochs that was chosen."""
        data = replace(recipe.data, val_fraction=0.0, folds=0, fold=0)
        epochs = max(1, epochs)
        train = replace(recipe.train, epochs=epochs, frozen_epochs=min(recipe.train.frozen_epochs, epochs))
        return replace(recipe, data=data, train=train)

    def label(self, val_fraction: float) -> str:
        """What must be known to read a number, in a few words."""
        share = f"epoch chosen on {100 * val_fraction:g} % of the training classes"
        if self.name == "default":
            return "EPOCH CHOSEN ON THE TEST CLASSES" if self.choose_on_test else "last epoch, no validation classes"
        if self.name == "kfold":
            return f"{self.folds} folds of the training classes, a model each, epoch chosen on the fold left out"
        if self.refit:
            share += ", then trained again on all of them"
        return f"queries in a gallery of their own; {share}" if self.name == "query_gallery" else share
