"""Which classes of an index a run was trained on: those may not set a threshold or choose a re-ranking."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from nearkin._common.progress import Reporter
from nearkin.config.recipe import DataConfig
from nearkin.data.loading import map_in_threads
from nearkin.data.sources import file_digests, fingerprint, images_of, list_source
from nearkin.data.splits import make_split
from nearkin.data.table import NoImages, Table
from nearkin.deploy.index.index import Index
from nearkin.deploy.index.search import Label
from nearkin.errors import ConfigError, DataError, UserError
from nearkin.training.run import Run


@dataclass(frozen=True)
class TrainingClasses:
    """Class names and content hashes of what a run learned from; what chose its epoch is not part of it."""

    names: frozenset[str] = frozenset()
    digests: frozenset[str] = frozenset()

    def labels_in(self, index: Index) -> set[Label]:
        """The labels of which the index holds a training image (the same bytes, under any name), or that bear the name
        of a training class. Too many is the safe side: what is left has not been seen.
        """
        seen = zip(index.labels, index.stamps, strict=True)
        found: set[Label] = {label for label, stamp in seen if stamp is not None and stamp.sha256 in self.digests}
        return (found | {label for label in index.labels if label in self.names}) - {None}


def training_classes(run: Run, reporter: Reporter) -> TrainingClasses:
    """What the run learned from, or how to go on where that cannot be told."""
    try:
        return training_part(run, reporter)
    except (UserError, OSError) as error:
        raise ConfigError(
            f"{run.path}: cannot tell which classes it was trained on ({str(error).splitlines()[0]})\n"
            "Bring its data back, or say --assume-unseen if none of the indexed classes was trained on."
        ) from None


def training_part(run: Run, reporter: Reporter) -> TrainingClasses:
    """What the run learned from, by its files as they are now; refused where those have changed."""
    data = run.recipe.data
    if data.source == "glyphs":
        return TrainingClasses()  # drawn, not files
    table = listed_table(data, reporter)
    digests: list[bytes] = []
    with reporter.track("looking at what was trained on", len(table), unit="img") as bar:
        for part in map_in_threads(lambda path: file_digests([path])[0], table.paths):
            digests += part
            bar.advance(len(part))
    mark = fingerprint(digests, table.labels, table.class_names, table.part, table.boxes)
    before = ((run.result or {}).get("protocol") or {}).get("fingerprint", mark)
    if before != mark:  # with other classes the same seed deals them otherwise
        raise DataError(f"{data.root or table.source}: is not what it was when the run was trained.")
    names = frozenset(make_split(table, data)[0].train.class_names)
    # Splits are by class, so every image of a training class was one to learn from.
    learned = [table.class_names[label] in names for label in table.labels]
    return TrainingClasses(names, frozenset(d.hex() for d, known in zip(digests, learned, strict=True) if known))


def listed_table(data: DataConfig, reporter: Reporter) -> Table:
    """What a recipe's source lists, as a table without pixels; files that training leaves out are left out here."""
    listing = list_source(data)
    if data.skip_broken:
        boxes = listing.boxes if data.crop_to_boxes else None
        listing = listing.take(images_of(listing.paths, replace(data, cache=False), reporter, boxes).kept)
    present, codes = np.unique(listing.labels, return_inverse=True)
    return Table(
        source=listing.source,
        labels=codes.astype(np.int64),
        class_names=tuple(listing.class_names[c] for c in present),
        images=NoImages(listing.source, len(listing)),
        fingerprint="",
        paths=listing.paths,
        part=listing.part,
        boxes=listing.boxes if data.crop_to_boxes else None,
    )
