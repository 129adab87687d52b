"""Class-disjoint splits: classes to train on, classes to select the epoch on, and sealed test classes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nearkin._common.words import agreeing, counted
from nearkin.config.recipe import DataConfig
from nearkin.data.benchmarks import CLOSED_SET_REASON
from nearkin.data.listing import Listing
from nearkin.data.table import Table
from nearkin.errors import ConfigError, DataError, did_you_mean

Ints = NDArray[np.int64]
Parts = NDArray[np.str_]
EVAL_PARTS = ("test", "query", "gallery")  # only `evaluate_final` may open these
SPLITS = ("auto", "half", "by_class")
_PURPOSES = {"test": ("test", "test"), "val": ("validation", "validate")}
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
    if data.split in _CLOSED_SET_NAMES:
        raise ConfigError(
            f"data.split: the classification split '{data.split}' is not supported: {CLOSED_SET_REASON}.\n"
            f"Use auto, half or by_class."
        )
    if data.split not in SPLITS:
        hint = did_you_mean(data.split, SPLITS) or f" Available splits: {', '.join(SPLITS)}."
        raise ConfigError(f"data.split: no split named '{data.split}'.{hint}")
    has_test = bool(set(table.parts) & set(EVAL_PARTS))
    if data.split == "by_class" or (data.split == "auto" and not has_test):
        test_fraction, seed = data.test_fraction, data.split_seed
        if not data.folds and data.val_fraction and data.select_on == "validation":
            return split_by_class(table, val_fraction=data.val_fraction, test_fraction=test_fraction, seed=seed)
        test, rest = _draw(table, seed, "train and validate", 4, test=test_fraction)  # the rest: `kfold` or `fixed`
        description = f"by class, seed {seed}"
        training, holdout = _subset(table, rest, description), Holdout(_subset(table, test, description))
    else:
        training, holdout = half_half(table) if data.split == "half" else official(table)
    if data.select_on == "test":
        # The papers' protocol, on request: the only case where the epoch is selected on the test classes. The
        # description of the split records it.
        opened = holdout.open()
        return Split(training, replace(opened, split=f"{opened.split}; EPOCH SELECTED ON THE TEST CLASSES")), holdout
    if not data.val_fraction and not data.folds:
        return Split(replace(training, split=f"{training.split}; no validation classes"), None), holdout
    if data.folds:
        return kfold(training, folds=data.folds, seed=data.split_seed)[data.fold], holdout
    return fixed(training, ratio=1 - data.val_fraction, seed=data.split_seed), holdout


def split_by_class(table: Table, *, val_fraction: float, test_fraction: float, seed: int) -> tuple[Split, Holdout]:
    """Assign whole classes at random to training, validation and test."""
    test, val, train = _draw(table, seed, "train", 2, test=test_fraction, val=val_fraction)
    return _split(table, train, val, f"by class, seed {seed}"), Holdout(_subset(table, test, f"by class, seed {seed}"))


def _draw(table: Table, seed: int, rest: str, min_rest: int, **fractions: float) -> list[NDArray[np.int64]]:
    """Draw classes at random for each purpose, at least two, because with one class every neighbour is correct."""
    order = np.random.default_rng(seed).permutation(table.num_classes)
    counts = {purpose: max(2, round(fraction * len(order))) for purpose, fraction in fractions.items()}
    left = len(order) - sum(counts.values())
    if left < min_rest:
        needed = min_rest + 2 * len(counts)
        if len(order) < needed:
            raise DataError(
                f"{table.source}: {agreeing(len(order), 'classes are')} too few to split by class; "
                f"at least {needed} are needed."
            )
        drawn = " and ".join(f"{count} to {_PURPOSES[purpose][1]}" for purpose, count in counts.items())
        flags = " or ".join(f"--data.{purpose}-fraction" for purpose in counts)
        raise DataError(
            f"{table.source}: of {len(order)} classes, {drawn} leave {max(0, left)} to {rest}; at least {min_rest} are "
            f"needed.\nAdd classes, or lower {flags}."
        )
    return np.split(order, np.cumsum(list(counts.values())))


def half_half(table: Table) -> tuple[Table, Holdout]:
    """The papers' split: the source's test part if it has one, else the second half of the classes."""
    if set(table.parts) & set(EVAL_PARTS):
        return official(table)
    if table.num_classes < 6:
        counts = agreeing(table.num_classes, "classes are")
        raise DataError(f"{table.source}: {counts} too few to halve; at least 6 are needed.")
    classes = np.arange(table.num_classes)
    middle = table.num_classes // 2
    description = "first half of the classes trains"
    return _subset(table, classes[:middle], description), Holdout(_subset(table, classes[middle:], description))


def official(table: Table) -> tuple[Table, Holdout]:
    """The parts that the source defines, provided that no class is in both training and test."""
    train, test = _classes_of_parts(table, EVAL_PARTS, "test", min_train=4)
    return _subset(table, train, "official"), Holdout(_subset(table, test, "official"))


def _classes_of_parts(table: Table, parts: Sequence[str], purpose: str, *, min_train: int) -> tuple[Ints, Ints]:
    """The classes of all other parts and those of these parts, which must differ."""
    assert table.part is not None
    selected = np.isin(table.part, parts)
    train, others = np.unique(table.labels[~selected]), np.unique(table.labels[selected])
    _refuse_overlap(table, train, others, purpose)
    if len(train) < min_train or len(others) < 2:
        raise DataError(
            f"{table.source}: {counted(len(train), 'class')} to train and {len(others)} to {_PURPOSES[purpose][1]}; "
            f"at least {min_train} and 2 are needed. Split by class instead: --data.split by_class."
        )
    return train, others


def _refuse_overlap(table: Table | Listing, train: NDArray[np.int64], others: NDArray[np.int64], purpose: str) -> None:
    overlap = np.intersect1d(train, others)
    if len(overlap):
        raise DataError(
            f"{table.source}: {len(overlap)} of {len(table.class_names)} classes are in both training and "
            f"{_PURPOSES[purpose][0]}, first '{table.class_names[overlap[0]]}': {CLOSED_SET_REASON}.\n"
            f"Assign each class to one part, or split by class: --data.split by_class."
        )


def held_out_parts(part: NDArray[np.str_]) -> list[tuple[str, NDArray[np.bool_], NDArray[np.bool_]]]:
    """Return, for test and validation, the purpose, the rows held out for it and the rows to train on before."""
    test, val = np.isin(part, EVAL_PARTS), part == "val"
    return [("test", test, ~test), ("val", val, ~test & ~val)]


def check_parts(listing: Table | Listing, data: DataConfig) -> None:
    """Refuse parts that share classes, before any image is decoded."""
    if listing.part is not None and data.split != "by_class":
        for purpose, held_out, rest in held_out_parts(listing.part):
            _refuse_overlap(listing, listing.labels[rest], listing.labels[held_out], purpose)


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
    """Split the training classes once at random, or use the source's validation part if it has one."""
    if not 0 < ratio < 1:
        raise ConfigError(f"ratio: expected a fraction between 0 and 1, got {ratio}.")
    if "val" in table.parts:
        train, val = _classes_of_parts(table, ["val"], "val", min_train=2)
        return _split(table, train, val, f"{table.split}; the source's own validation part")
    val, train = _draw(table, seed, "train", 2, val=1 - ratio)
    description = f"{table.split}; validation {1 - ratio:.0%} of the training classes, seed {seed}"
    return _split(table, train, val, description)


def merge_shared_parts(labels: Ints, part: Parts | None) -> tuple[Parts | None, Ints]:
    """Merge parts that share most of their classes; return the parts that are left and the shared classes."""
    if part is None:
        return None, np.empty(0, np.int64)
    for purpose, held_out, rest in held_out_parts(part):
        classes = np.unique(labels[held_out])
        shared = np.intersect1d(classes, labels[rest])
        if len(shared) and 2 * len(shared) >= len(classes):
            return None if purpose == "test" else np.where(held_out, "train", part), shared
    return part, np.empty(0, np.int64)


def _subset(table: Table, classes: NDArray[np.int64], description: str) -> Table:
    return replace(table.of_classes(np.sort(classes)), split=description)


def _split(table: Table, train: NDArray[np.int64], val: NDArray[np.int64], description: str) -> Split:
    return Split(train=_subset(table, train, description), val=_subset(table, val, description))
