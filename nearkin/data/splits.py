"""Splits by class: the classes that train, the classes that choose the epoch, and the sealed classes that judge."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nearkin.config.recipe import DataConfig
from nearkin.data.benchmarks import CLOSED_SET
from nearkin.data.table import Table
from nearkin.errors import ConfigError, DataError, did_you_mean

EVALUATED = ("test", "query", "gallery")  # the parts that only `evaluate_final` may open
SPLITS = ("auto", "half", "by_class")


@dataclass(frozen=True)
class Split:
    """What training may see: `train` to learn from, `val` (other classes) to choose the epoch, or None."""

    train: Table
    val: Table | None


class Holdout:
    """The test classes, sealed: their size is known, their images are not, until `evaluate_final` opens them.

    Where the source asks one set of images of another (In-Shop), the opened table has parts "query" and "gallery":
    `table.of_part("query")` and `table.of_part("gallery")` share their class numbers.
    """

    def __init__(self, table: Table) -> None:
        self.__table = table
        self.num_images = len(table)
        self.num_classes = table.num_classes
        self.has_answers = has_answers(table)

    def open(self) -> Table:
        """The test images. For `evaluate_final` and for showing its results; nothing that trains or chooses."""
        return self.__table

    def __repr__(self) -> str:
        return f"Holdout({self.num_images} images of {self.num_classes} classes, sealed)"


def make_split(table: Table, data: DataConfig) -> tuple[Split, Holdout]:
    """The split that a recipe's data section asks for. Parts on which nothing can be judged are refused."""
    split, holdout = _dealt(table, data)
    for part, judges in (("validation", split.val is None or has_answers(split.val)), ("test", holdout.has_answers)):
        if not judges:
            raise DataError(
                f"{table.source}: no {part} class has two images, so no image has another of its kind to find.\n"
                "Give classes of two images and more; a few with one image may be among them."
            )
    return split, holdout


def has_answers(table: Table) -> bool:
    """Whether any image has another of its class to find: among all, or in the gallery where there is one."""
    if {"query", "gallery"} <= set(table.parts):
        asking, searched = (table.labels[table.part == part] for part in ("query", "gallery"))
        return bool(np.isin(asking, searched).any())
    return bool(np.bincount(table.labels).max(initial=0) > 1)


def _dealt(table: Table, data: DataConfig) -> tuple[Split, Holdout]:
    if data.split in ("closed_set", "train_test_split", "train_test_split.txt", "classification"):
        raise ConfigError(
            f"data.split: the split for classification ('{data.split}') is refused: {CLOSED_SET}.\n"
            f"Use auto, half or by_class."
        )
    if data.split not in SPLITS:
        hint = did_you_mean(data.split, SPLITS) or f" There are: {', '.join(SPLITS)}."
        raise ConfigError(f"data.split: no split named '{data.split}'.{hint}")
    has_test = bool(set(table.parts) & set(EVALUATED))
    if data.split == "by_class" or (data.split == "auto" and not has_test):
        test_fraction, seed = data.test_fraction, data.split_seed
        if not data.folds and data.val_fraction and data.select_on == "validation":
            return split_by_class(table, val_fraction=data.val_fraction, test_fraction=test_fraction, seed=seed)
        training, holdout = set_aside(table, test_fraction=test_fraction, seed=seed)
    else:
        training, holdout = half_half(table) if data.split == "half" else official(table)
    if data.select_on == "test":
        # The papers' way, on request: the only place where what chooses is what judges. The split says so for good.
        test = holdout.open()
        return Split(training, replace(test, split=f"{test.split}; EPOCH CHOSEN ON THE TEST CLASSES")), holdout
    if not data.val_fraction and not data.folds:
        return Split(replace(training, split=f"{training.split}; no validation classes"), None), holdout
    if data.folds:
        return kfold(training, folds=data.folds, seed=data.split_seed)[data.fold], holdout
    return fixed(training, ratio=1 - data.val_fraction, seed=data.split_seed), holdout


def split_by_class(table: Table, *, val_fraction: float, test_fraction: float, seed: int) -> tuple[Split, Holdout]:
    """Deal whole classes to train, validation and test, so that the last two hold only unseen kinds.

    Shares are of the classes, rounded; validation and test get at least two classes each, because with one class
    every neighbour is right.
    """
    order = np.random.default_rng(seed).permutation(table.num_classes)
    num_test = max(2, round(test_fraction * len(order)))
    num_val = max(2, round(val_fraction * len(order)))
    if len(order) < 6:
        raise DataError(
            f"{table.source}: {table.num_classes} classes are too few to split by class; "
            f"at least 6 are needed (2 to train, 2 to validate, 2 to test)."
        )
    left = max(0, len(order) - num_test - num_val)
    if left < 2:
        raise DataError(
            f"{table.source}: of {len(order)} classes {num_test} to test and {num_val} to validate leave {left} to "
            f"train, at least 2 are needed.\nBring more classes, or lower --data.test-fraction or --data.val-fraction."
        )
    test, val, train = np.split(order, [num_test, num_test + num_val])
    return _split(table, train, val, f"by class, seed {seed}"), _holdout(table, test, f"by class, seed {seed}")


def set_aside(table: Table, *, test_fraction: float, seed: int) -> tuple[Table, Holdout]:
    """Seal a share of the classes, drawn by the seed; the rest is for `kfold` or `fixed`."""
    order = np.random.default_rng(seed).permutation(table.num_classes)
    num_test = max(2, round(test_fraction * len(order)))
    if len(order) < 6:
        raise DataError(f"{table.source}: {table.num_classes} classes are too few; at least 6 are needed.")
    if len(order) - num_test < 4:
        raise DataError(
            f"{table.source}: of {len(order)} classes {num_test} to test leave {len(order) - num_test} to train and "
            f"validate, at least 4 are needed.\nBring more classes, or lower --data.test-fraction."
        )
    kind = f"by class, seed {seed}"
    return _some(table, order[num_test:], kind), _holdout(table, order[:num_test], kind)


def half_half(table: Table) -> tuple[Table, Holdout]:
    """The papers' split: the source's own test part where it has one, else the second half of the classes."""
    if set(table.parts) & set(EVALUATED):
        return official(table)
    if table.num_classes < 6:
        raise DataError(f"{table.source}: {table.num_classes} classes are too few to halve; at least 6 are needed.")
    classes = np.arange(table.num_classes)
    middle = table.num_classes // 2
    kind = "first half of the classes trains"
    return _some(table, classes[:middle], kind), _holdout(table, classes[middle:], kind)


def official(table: Table) -> tuple[Table, Holdout]:
    """The source's own parts, provided that no class is both trained and judged."""
    assert table.part is not None
    judged = np.isin(table.part, EVALUATED)
    train_classes, test_classes = np.unique(table.labels[~judged]), np.unique(table.labels[judged])
    both = np.intersect1d(train_classes, test_classes)
    if len(both):
        raise DataError(
            f"{table.source}: {len(both)} of {table.num_classes} classes are in training and in test, first "
            f"'{table.class_names[both[0]]}': {CLOSED_SET}.\n"
            f"Split by class instead: --data.split by_class."
        )
    if len(train_classes) < 4 or len(test_classes) < 2:
        raise DataError(
            f"{table.source}: {len(train_classes)} classes to train and {len(test_classes)} to test; at least 4 and 2 "
            f"are needed. Split by class instead: --data.split by_class."
        )
    return _some(table, train_classes, "official"), _holdout(table, test_classes, "official")


def kfold(table: Table, *, folds: int = 10, seed: int) -> list[Split]:
    """Shuffle the classes once into disjoint groups; each group validates once, the other groups train.

    table: the training classes only (what `half_half` or `official` returned), never the test classes.
    """
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
    """One random split of the training classes: `ratio` of them train (0.7, 0.8, 0.9, 0.95), the rest validate.

    A source's own validation part is used where it has one. Validation numbers of different ratios are not
    comparable: they search among different numbers of classes.
    """
    if not 0 < ratio < 1:
        raise ConfigError(f"ratio: expected a share between 0 and 1, got {ratio}.")
    if "val" in table.parts:
        return _own_validation(table)
    order = np.random.default_rng(seed).permutation(table.num_classes)
    num_val = max(2, round((1 - ratio) * len(order)))
    if len(order) < 4:
        raise DataError(
            f"{table.source}: {len(order)} classes are too few to train and validate; at least 4 are needed."
        )
    if len(order) - num_val < 2:
        raise DataError(
            f"{table.source}: of {len(order)} classes {num_val} to validate leave {len(order) - num_val} to train, at "
            f"least 2 are needed.\nBring more classes, or lower --data.val-fraction."
        )
    kind = f"{table.split}; validation {1 - ratio:.0%} of the training classes, seed {seed}"
    return _split(table, order[num_val:], order[:num_val], kind)


def _own_validation(table: Table) -> Split:
    assert table.part is not None
    is_val = table.part == "val"
    train, val = np.unique(table.labels[~is_val]), np.unique(table.labels[is_val])
    both = np.intersect1d(train, val)
    if len(both):
        raise DataError(
            f"{table.source}: {len(both)} classes are in training and in validation, first "
            f"'{table.class_names[both[0]]}'.\nGive each class to one part, or: --data.split by_class."
        )
    if len(val) < 2 or len(train) < 2:
        raise DataError(f"{table.source}: train and val have {len(train)} and {len(val)} classes; 2 each are needed.")
    return _split(table, train, val, f"{table.split}; the source's own validation part")


def _some(table: Table, classes: NDArray[np.int64], kind: str) -> Table:
    return replace(table.of_classes(np.sort(classes)), split=kind)


def _holdout(table: Table, classes: NDArray[np.int64], kind: str) -> Holdout:
    return Holdout(_some(table, classes, kind))


def _split(table: Table, train: NDArray[np.int64], val: NDArray[np.int64], kind: str) -> Split:
    return Split(train=_some(table, train, kind), val=_some(table, val, kind))
