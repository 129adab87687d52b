"""`Table`: images (or precomputed features) with labels; the common form of all data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nearkin.errors import DataError

if TYPE_CHECKING:  # without torch, so that a name or path that does not exist is reported at once
    from nearkin.data.images import Images, Rows

PARTS = ("train", "val", "test", "query", "gallery")  # the parts that a source may define, in display order


@dataclass(frozen=True)
class Table:
    """Images with labels. Row i is an image of class `class_names[labels[i]]`.

    Attributes:
        source: Name for people: "glyphs", "cub", the name of a folder.
        labels: int64 [N], indices into class_names.
        class_names: [C].
        images: The pixels; all of one size.
        fingerprint: Hash of the content; part of every run's key.
        paths: The file of each row; empty if rows have no files.
        part: [N] "train", "val", "test", "query" or "gallery" if the source defines parts, else None.
        groups: [N] coarser class of each row (a product's category) if the source has one, else None.
        boxes: int64 [N, 4] x, y, width, height to which the images were cropped; None if they are uncropped.
        features: float32 [N, D] for a table of features, which has no images.
        rows: int64 [N] index of each row in the source's full table; None if this is the full table.
        split: How the rows were selected, in words; set by splits.py.
        notes: What readers of the scores must know, for example that files were skipped.
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
        """Number of classes, including those without rows."""
        return len(self.class_names)

    @property
    def row_numbers(self) -> Rows:
        """Index of each row in the source's full table."""
        return np.arange(len(self)) if self.rows is None else self.rows

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that occur; empty if the source defines none."""
        return () if self.part is None else tuple(name for name in PARTS if (self.part == name).any())

    def take(self, rows: Rows) -> Table:
        """Select rows. Labels and class names stay the same, even for classes without rows left."""
        columns = ((name, getattr(self, name)) for name in ("part", "groups", "boxes", "features"))
        return replace(
            self,
            labels=self.labels[rows],
            images=self.images.take(rows),
            paths=tuple(self.paths[r] for r in rows) if self.paths else (),
            rows=self.row_numbers[rows],
            **{name: column[rows] for name, column in columns if column is not None},
        )

    def sample(self, max_rows: int) -> Table:
        """Select at most this many rows, spread evenly over the table."""
        return self.take(np.unique(np.linspace(0, len(self) - 1, min(max_rows, len(self))).astype(np.int64)))

    def of_classes(self, classes: NDArray[np.int64]) -> Table:
        """Select classes and relabel them 0..C-1 in the given order."""
        new_labels = np.full(self.num_classes, -1, np.int64)
        new_labels[classes] = np.arange(len(classes))
        subset = self.take(np.flatnonzero(new_labels[self.labels] >= 0))
        names = tuple(self.class_names[c] for c in classes)
        return replace(subset, labels=new_labels[subset.labels], class_names=names)

    def of_part(self, *parts: str) -> Table:
        """Select parts, names out of `PARTS`. Labels stay the same, so that query and gallery agree."""
        if self.part is None:
            raise DataError(f"{self.source}: the source defines no parts, so there is no {' or '.join(parts)} part.")
        return self.take(np.flatnonzero(np.isin(self.part, parts)))

    def protocol(self) -> dict[str, Any]:
        """Return what a result must state about its data: the data's share of the protocol label."""
        described = {"source": self.source, "fingerprint": self.fingerprint, "split": self.split}
        notes = {"data_notes": list(self.notes)} if self.notes else {}
        return described | {"boxes": self.boxes is not None} | notes
