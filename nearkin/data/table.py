"""`Table`: images, labels and where they come from, the one form in which data travels through nearkin."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearkin.data.images import Images


@dataclass(frozen=True)
class Table:
    """Images with labels. Row i is image i of class `class_names[labels[i]]`.

    source: what the rows are, for people: "glyphs", a folder's name.
    labels: int64 [N], numbers into class_names.
    images: where the pixels come from; all of one size.
    paths: the file of each row, or empty where rows have no files.
    fingerprint: a hash of the content; part of every run's key.
    """

    source: str
    labels: NDArray[np.int64]
    class_names: tuple[str, ...]
    images: Images
    fingerprint: str
    paths: tuple[Path, ...] = field(default=(), repr=False)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def of_classes(self, classes: NDArray[np.int64]) -> Table:
        """The rows of these classes, with labels renumbered 0..C-1 in the given order."""
        renumber = np.full(self.num_classes, -1, np.int64)
        renumber[classes] = np.arange(len(classes))
        rows = np.flatnonzero(renumber[self.labels] >= 0)
        return Table(
            source=self.source,
            labels=renumber[self.labels[rows]],
            class_names=tuple(self.class_names[c] for c in classes),
            images=self.images.take(rows),
            fingerprint=self.fingerprint,
            paths=tuple(self.paths[r] for r in rows) if self.paths else (),
        )
