"""Class-disjoint splits: classes to train on, classes to select the epoch on, and sealed test classes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nearkin.config.recipe import DataConfig
from nearkin.data.benchmarks import CLOSED_SET_REASON
from nearkin.data.table import Table
from nearkin.errors import ConfigError, DataError, did_you_mean

EVAL_PARTS = ("test", "query", "gallery")  # only `evaluate_final` may open these
SPLITS = ("auto", "half", "by_class")
_CLOSED_SET_NAMES = ("closed_set", "train_test_split", "train_test_split.txt", "classification")


@dataclass(frozen=True)
class Split:
    """What training may see.

    Attributes:
        train: The training classes.
        val: Other classes, to select the epoch on; None without validation.
    """

    train: Table
    val: Table | None


class Holdout:
    """The sealed test classes: their size is visible, their images only to `evaluate_final`.

    If the source has separate query and gallery images (In-Shop), the opened table has the parts "query" and "gallery":
    `table.of_part("query")` and `table.of_part("gallery")` share their labels.

    Args:
        table: The test images.

    Attributes:
        num_images: Number of test images.
        num_classes: Number of test classes.
        has_positives: Whether any query has a correct answer.
    """

    def __init__(self, table: Table) -> None:
        self.__table = table
        self.num_images = len(table)
        self.num_classes = table.num_classes
        self.has_positives = has_positives(table)

    def open(self) -> Table:
        """Return the test images: for `evaluate_final` and for showing its results, never to train or to select."""
        return self.__table

    def __repr__(self) -> str:
        return f"Holdout({self.num_images} images of {self.num_classes} classes, sealed)"


def make_split(table: Table, data: DataConfig) -> tuple[Split, Holdout]:
    """Split a table as a recipe's data section says.

    Args:
        table: All images.
        data: The data section of a recipe.

    Returns:
        The training and validation classes, and the sealed test classes.

    Raises:
        ConfigError: If `data.split` is unknown or not class-disjoint.
        DataError: If there are too few classes, or a part cannot be evaluated because no class has two images.
    """
    split, holdout = _split_as_configured(table, data)
    evaluable = {"validation": split.val is None or has_positives(split.val), "test": holdout.has_positives}
    for part, ok in evaluable.items():
        if not ok:
            raise DataError(
                f"{table.source}: no {part} class has two images, so no query has a correct answer.\n"
                "Provide classes with at least two images; a few singleton classes are allowed."
            )
    return split, holdout


def has_positives(table: Table) -> bool:
    """Return whether any query has another image of its class among all images, or in the gallery if there is one."""
    if {"query", "gallery"} <= set(table.parts):
        query, gallery = (table.labels[table.part == part] for part in ("query", "gallery"))
        return bool(np.isin(query, gallery).any())
    return bool(np.bincount(table.labels).max(initial=0) > 1)


def _split_as_configured(table: Table, data: DataConfig) -> tuple[Split, Holdout]:
    _check_split_name(data.split)
    has_test = bool(set(table.parts) & set(EVAL_PARTS))
    if data.split == "by_class" or (data.split == "auto" and not has_test):
        test_fraction, seed = data.test_fraction, data.split_seed
        if not data.folds and data.val_fraction and data.select_on == "validation":
            return split_by_class(table, val_fraction=data.val_fraction, test_fraction=test_fraction, seed=seed)
        training, holdout = hold_out(table, test_fraction=test_fraction, seed=seed)
    else:
        training, holdout = half_half(table) if data.split == "half" else official(table)
    if data.select_on == "test":
        # The papers' protocol, on request: the only case where the epoch is selected on the test classes. The
        # description of the split records it.
        test = holdout.open()
        return Split(training, replace(test, split=f"{test.split}; EPOCH SELECTED ON THE TEST CLASSES")), holdout
    if not data.val_fraction and not data.folds:
        return Split(replace(training, split=f"{training.split}; no validation classes"), None), holdout
    if data.folds:
        return kfold(training, folds=data.folds, seed=data.split_seed)[data.fold], holdout
    return fixed(training, ratio=1 - data.val_fraction, seed=data.split_seed), holdout


def _check_split_name(name: str) -> None:
    if name in _CLOSED_SET_NAMES:
        raise ConfigError(
            f"data.split: the classification split '{name}' is not supported: {CLOSED_SET_REASON}.\n"
            f"Use auto, half or by_class."
        )
    if name not in SPLITS:
        hint = did_you_mean(name, SPLITS) or f" Available splits: {', '.join(SPLITS)}."
        raise ConfigError(f"data.split: no split named '{name}'.{hint}")


def split_by_class(table: Table, *, val_fraction: float, test_fraction: float, seed: int) -> tuple[Split, Holdout]:
    """Assign whole classes at random to training, validation and test.

    Validation and test get at least two classes each, because with one class every neighbour is correct.
    """
    order = np.random.default_rng(seed).permutation(table.num_classes)
    num_test = max(2, round(test_fraction * len(order)))
    num_val = max(2, round(val_fraction * len(order)))
    if len(order) < 6:
        raise DataError(
            f"{table.source}: {table.num_classes} classes are too few to split by class; "
            f"at least 6 are needed (2 to train, 2 to validate, 2 to test)."
        )
    num_train = max(0, len(order) - num_test - num_val)
    if num_train < 2:
        raise DataError(
            f"{table.source}: of {len(order)} classes, {num_test} to test and {num_val} to validate leave {num_train} "
            f"to train; at least 2 are needed.\n"
            f"Add classes, or lower --data.test-fraction or --data.val-fraction."
        )
    test, val, train = np.split(order, [num_test, num_test + num_val])
    return _split(table, train, val, f"by class, seed {seed}"), _holdout(table, test, f"by class, seed {seed}")


def hold_out(table: Table, *, test_fraction: float, seed: int) -> tuple[Table, Holdout]:
    """Seal a random fraction of the classes for testing; the rest is for `kfold` or `fixed`."""
    order = np.random.default_rng(seed).permutation(table.num_classes)
    num_test = max(2, round(test_fraction * len(order)))
    if len(order) < 6:
        raise DataError(f"{table.source}: {table.num_classes} classes are too few; at least 6 are needed.")
    if len(order) - num_test < 4:
        raise DataError(
            f"{table.source}: of {len(order)} classes, {num_test} to test leave {len(order) - num_test} to train and "
            f"validate; at least 4 are needed.\nAdd classes, or lower --data.test-fraction."
        )
    description = f"by class, seed {seed}"
    return _subset(table, order[num_test:], description), _holdout(table, order[:num_test], description)


def half_half(table: Table) -> tuple[Table, Holdout]:
    """The papers' split: the source's test part if it has one, else the second half of the classes."""
    if set(table.parts) & set(EVAL_PARTS):
        return official(table)
    if table.num_classes < 6:
        raise DataError(f"{table.source}: {table.num_classes} classes are too few to halve; at least 6 are needed.")
    classes = np.arange(table.num_classes)
    middle = table.num_classes // 2
    description = "first half of the classes trains"
    return _subset(table, classes[:middle], description), _holdout(table, classes[middle:], description)


def official(table: Table) -> tuple[Table, Holdout]:
    """The parts that the source defines, provided that no class is in both training and test."""
    assert table.part is not None
    is_test = np.isin(table.part, EVAL_PARTS)
    train_classes, test_classes = np.unique(table.labels[~is_test]), np.unique(table.labels[is_test])
    overlap = np.intersect1d(train_classes, test_classes)
    if len(overlap):
        raise DataError(
            f"{table.source}: {len(overlap)} of {table.num_classes} classes are in both training and test, first "
            f"'{table.class_names[overlap[0]]}': {CLOSED_SET_REASON}.\n"
            f"Split by class instead: --data.split by_class."
        )
    if len(train_classes) < 4 or len(test_classes) < 2:
        raise DataError(
            f"{table.source}: {len(train_classes)} classes to train and {len(test_classes)} to test; at least 4 and 2 "
            f"are needed. Split by class instead: --data.split by_class."
        )
    return _subset(table, train_classes, "official"), _holdout(table, test_classes, "official")


def kfold(table: Table, *, folds: int = 10, seed: int) -> list[Split]:
    """Split the training classes into disjoint folds; each fold validates once while the others train."""
    if table.num_classes < 2 * folds:
        raise DataError(
            f"{table.source}: {table.num_classes} classes are too few for {folds} folds; each fold needs two classes. "
            f"Use at most {table.num_classes // 2} folds."
        )
    groups = np.array_split(np.random.default_rng(seed).permutation(table.num_classes), folds)
    return [
        _split(
            table,
            np.concatenate([g for other, g in enumerate(groups) if other != fold]),
            group,
            f"{table.split}; validation fold {fold + 1} of {folds} of the training classes, seed {seed}",
        )
        for fold, group in enumerate(groups)
    ]


def fixed(table: Table, *, ratio: float = 0.9, seed: int) -> Split:
    """Split the training classes once at random, or use the source's validation part if it has one.

    Validation scores of different ratios are not comparable: they search among different numbers of classes.
    """
    if not 0 < ratio < 1:
        raise ConfigError(f"ratio: expected a fraction between 0 and 1, got {ratio}.")
    if "val" in table.parts:
        return _official_validation(table)
    order = np.random.default_rng(seed).permutation(table.num_classes)
    num_val = max(2, round((1 - ratio) * len(order)))
    if len(order) < 4:
        raise DataError(
            f"{table.source}: {len(order)} classes are too few to train and validate; at least 4 are needed."
        )
    if len(order) - num_val < 2:
        raise DataError(
            f"{table.source}: of {len(order)} classes, {num_val} to validate leave {len(order) - num_val} to train; at "
            f"least 2 are needed.\nAdd classes, or lower --data.val-fraction."
        )
    description = f"{table.split}; validation {1 - ratio:.0%} of the training classes, seed {seed}"
    return _split(table, order[num_val:], order[:num_val], description)


def _official_validation(table: Table) -> Split:
    assert table.part is not None
    is_val = table.part == "val"
    train, val = np.unique(table.labels[~is_val]), np.unique(table.labels[is_val])
    overlap = np.intersect1d(train, val)
    if len(overlap):
        raise DataError(
            f"{table.source}: {len(overlap)} classes are in both training and validation, first "
            f"'{table.class_names[overlap[0]]}'.\nAssign each class to one part, or use --data.split by_class."
        )
    if len(val) < 2 or len(train) < 2:
        raise DataError(f"{table.source}: train and val have {len(train)} and {len(val)} classes; 2 each are needed.")
    return _split(table, train, val, f"{table.split}; the source's own validation part")


def _subset(table: Table, classes: NDArray[np.int64], description: str) -> Table:
    return replace(table.of_classes(np.sort(classes)), split=description)


def _holdout(table: Table, classes: NDArray[np.int64], description: str) -> Holdout:
    return Holdout(_subset(table, classes, description))


def _split(table: Table, train: NDArray[np.int64], val: NDArray[np.int64], description: str) -> Split:
    return Split(train=_subset(table, train, description), val=_subset(table, val, description))
