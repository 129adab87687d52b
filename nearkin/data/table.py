"""`Table`: images (or ready features), labels and where they come from: the one form in which data travels."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nearkin.data.images import Images, Rows
from nearkin.errors import DataError

PARTS = ("train", "val", "test", "query", "gallery")  # what a source may say of a row, in this order everywhere


class NoImages:
    """Stands where a table of ready features has no images; asking it for pixels says so."""

    def __init__(self, source: str, count: int) -> None:
        self.source, self.count = source, count
        self.shape = (0, 0, 0)

    def __len__(self) -> int:
        return self.count

    def read(self, rows: Rows) -> Tensor:
        raise DataError(
            f"{self.source}: holds features, not images; there are no pixels to read. Use `table.features`."
        )

    def take(self, rows: Rows) -> NoImages:
        return NoImages(self.source, len(rows))


@dataclass(frozen=True)
class Table:
    """Images with labels. Row i is image i of class `class_names[labels[i]]`.

    source: what the rows are, for people: "glyphs", "cub", a folder's name.
    labels: int64 [N], numbers into class_names.
    images: where the pixels come from; all of one size.
    fingerprint: a hash of the content; part of every run's key.
    paths: the file of each row, or empty where rows have no files.
    part: [N] "train", "val", "test", "query" or "gallery" where the source itself says so, else None.
    groups: [N] a coarser kind of each row (a product's category) where the source gives one, else None.
    boxes: int64 [N, 4] x, y, width, height to which the images were cut, or None where they are whole.
    features: float32 [N, D] for a table of ready vectors; it has no images.
    rows: int64 [N] the row of each in the source's whole table, or None where this is the whole.
    split: how the rows were chosen, in words; splits.py fills it in.
    notes: what a reader of the numbers must know, for example files that were left out.
    """

    source: str
    labels: NDArray[np.int64]
    class_names: tuple[str, ...]
    images: Images
    fingerprint: str
    paths: tuple[Path, ...] = field(default=(), repr=False)
    part: NDArray[np.str_] | None = field(default=None, repr=False)
    groups: NDArray[np.str_] | None = field(default=None, repr=False)
    boxes: NDArray[np.int64] | None = field(default=None, repr=False)
    features: NDArray[np.float32] | None = field(default=None, repr=False)
    rows: Rows | None = field(default=None, repr=False)
    split: str = "whole"
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def row_numbers(self) -> Rows:
        """The row of each in the source's whole table."""
        return np.arange(len(self)) if self.rows is None else self.rows

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that occur; empty where the source names none."""
        return () if self.part is None else tuple(name for name in PARTS if (self.part == name).any())

    def take(self, rows: Rows) -> Table:
        """These rows; classes keep their numbers and names, also those of which no row is left."""
        return replace(
            self,
            labels=self.labels[rows],
            images=self.images.take(rows),
            paths=tuple(self.paths[r] for r in rows) if self.paths else (),
            part=None if self.part is None else self.part[rows],
            groups=None if self.groups is None else self.groups[rows],
            boxes=None if self.boxes is None else self.boxes[rows],
            features=None if self.features is None else self.features[rows],
            rows=self.row_numbers[rows],
        )

    def sample(self, most: int) -> Table:
        """At most this many rows, spread evenly over the table."""
        return self.take(np.unique(np.linspace(0, len(self) - 1, min(most, len(self))).astype(np.int64)))

    def of_classes(self, classes: NDArray[np.int64]) -> Table:
        """The rows of these classes, with labels renumbered 0..C-1 in the given order."""
        renumber = np.full(self.num_classes, -1, np.int64)
        renumber[classes] = np.arange(len(classes))
        kept = self.take(np.flatnonzero(renumber[self.labels] >= 0))
        return replace(kept, labels=renumber[kept.labels], class_names=tuple(self.class_names[c] for c in classes))

    def of_part(self, *parts: str) -> Table:
        """The rows that the source puts in these parts. Classes keep their numbers, so query and gallery agree."""
        if self.part is None:
            raise DataError(f"{self.source}: the source names no parts, so there is no {' or '.join(parts)} part.")
        return self.take(np.flatnonzero(np.isin(self.part, parts)))

    def protocol(self) -> dict[str, Any]:
        """What a result must say about its data: the part of the protocol badge that the data decides."""
        description: dict[str, Any] = {
            "source": self.source,
            "fingerprint": self.fingerprint,
            "split": self.split,
            "boxes": self.boxes is not None,
        }
        return description | ({"data_notes": list(self.notes)} if self.notes else {})
