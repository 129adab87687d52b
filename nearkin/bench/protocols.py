"""Evaluation protocols: how the epoch is chosen and on which classes a model is evaluated.

A score means little without its protocol, so every result carries a protocol label: `Protocol.label`.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from nearkin.config.recipe import Recipe
from nearkin.data.benchmarks import BENCHMARKS
from nearkin.data.table import Table
from nearkin.errors import ConfigError


@dataclass(frozen=True)
class Protocol:
    """An evaluation protocol with its settings.

    Attributes:
        name: last_epoch: train on the first half of the classes and evaluate the last epoch; no validation classes.
            kfold: one model per fold of the training classes, each evaluated on the test classes. fixed: a random share
            of the training classes selects the epoch. query_gallery: like fixed, for sources with separate query and
            gallery images (In-Shop).
        folds: kfold: disjoint groups of the training classes; each is the validation set once.
        refit: fixed, query_gallery: train again on all training classes for the selected number of epochs, and
            evaluate that model.
        select_on_test: last_epoch: select the best epoch on the test classes, as most papers do. Optimistic; only for
            comparison with published values.
    """

    name: Literal["last_epoch", "kfold", "fixed", "query_gallery"] = "fixed"
    folds: int = 10
    refit: bool = False
    select_on_test: bool = False

    def __post_init__(self) -> None:
        if self.refit and self.name not in ("fixed", "query_gallery"):
            raise ConfigError(f"refit: only with the protocols fixed and query_gallery, not with {self.name}.")
        if self.select_on_test and self.name != "last_epoch":
            raise ConfigError(f"select_on_test: only with the protocol last_epoch, not with {self.name}.")
        if self.folds < 2:
            raise ConfigError(f"folds: expected at least 2, got {self.folds}.")

    @property
    def models_per_seed(self) -> int:
        """Number of models trained for each method and seed."""
        return self.folds if self.name == "kfold" else 1

    def apply(self, data: dict[str, Any], fold: int, val_fraction: float) -> dict[str, Any]:
        """Return the data section of a recipe, as plain values, set up for this protocol."""
        changed = {**data, "folds": 0, "fold": 0, "val_fraction": val_fraction, "select_on": "validation"}
        if self.name == "last_epoch":
            changed |= {"val_fraction": 0.0, "select_on": "test" if self.select_on_test else "validation"}
            if data.get("split", "auto") == "auto":
                changed["split"] = "half"  # a source with its own split keeps that one
        if self.name == "kfold":
            changed |= {"folds": self.folds, "fold": fold}
        return changed

    def check(self, recipe: Recipe) -> None:
        """Reject a source that does not support this protocol, before reading its data."""
        source = recipe.data.source
        may_have_parts = source in ("features", "table") or (
            source in BENCHMARKS and "query" in BENCHMARKS[source].parts
        )
        if self.name == "query_gallery" and not may_have_parts:
            raise ConfigError(f"query_gallery: {source} has no separate queries and gallery. Use the protocol fixed.")

    def check_table(self, table: Table) -> None:
        """Reject loaded data that does not support this protocol."""
        if self.name == "query_gallery" and not {"query", "gallery"} <= set(table.parts):
            parts = ", ".join(table.parts) or "none"
            raise ConfigError(
                f"query_gallery: {table.source} needs the parts query and gallery; it has {parts}. "
                "Use the protocol fixed."
            )

    def refit_recipe(self, recipe: Recipe, epochs: int) -> Recipe:
        """Return the recipe of the second training run: all training classes, the selected number of epochs."""
        data = replace(recipe.data, val_fraction=0.0, folds=0, fold=0)
        train = replace(recipe.train, epochs=epochs, steps=None, frozen_epochs=min(recipe.train.frozen_epochs, epochs))
        return replace(recipe, data=data, train=train)

    def label(self, val_fraction: float) -> str:
        """Describe the protocol in a few words: what a reader must know to interpret a score."""
        # Part of Trial.id: another wording would orphan the outcomes of existing studies.
        share = f"epoch chosen on {100 * val_fraction:g} % of the training classes"
        if self.name == "last_epoch":
            return "EPOCH SELECTED ON THE TEST CLASSES" if self.select_on_test else "last epoch, no validation classes"
        if self.name == "kfold":
            return f"{self.folds} folds of the training classes, a model each, epoch chosen on the fold left out"
        if self.refit:
            share += ", then trained again on all of them"
        return f"queries in a gallery of their own; {share}" if self.name == "query_gallery" else share
