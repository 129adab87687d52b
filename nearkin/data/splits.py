"""Splits by class: the classes that train, the classes that choose the epoch, and the sealed classes that judge."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nearkin.data.table import Table
from nearkin.errors import DataError


@dataclass(frozen=True)
class Split:
    """What training may see: `train` to learn from, `val` (other classes) to choose the epoch."""

    train: Table
    val: Table


class Holdout:
    """The test classes, sealed: their size is known, their images are not, until `evaluate_final` opens them."""

    def __init__(self, table: Table) -> None:
        self.__table = table
        self.num_images = len(table)
        self.num_classes = table.num_classes

    def open(self) -> Table:
        """The test images. For `evaluate_final` and for showing its results; nothing that trains or chooses."""
        return self.__table

    def __repr__(self) -> str:
        return f"Holdout({self.num_images} images of {self.num_classes} classes, sealed)"


def split_by_class(table: Table, *, val_share: float, test_share: float, seed: int) -> tuple[Split, Holdout]:
    """Deal whole classes to train, validation and test, so that the last two hold only unseen kinds.

    Shares are of the classes, rounded; validation and test get at least two classes each, because with one class
    every neighbour is right.
    """
    order = np.random.default_rng(seed).permutation(table.num_classes)
    num_test = max(2, round(test_share * len(order)))
    num_val = max(2, round(val_share * len(order)))
    if len(order) - num_test - num_val < 2:
        raise DataError(
            f"{table.source}: {table.num_classes} classes are too few to split by class; "
            f"at least 6 are needed (2 to train, 2 to validate, 2 to test)."
        )
    test, val, train = np.split(order, [num_test, num_test + num_val])
    split = Split(train=table.of_classes(np.sort(train)), val=table.of_classes(np.sort(val)))
    return split, Holdout(table.of_classes(np.sort(test)))
