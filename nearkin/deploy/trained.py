"""Which classes of an index a run was trained on: those may not set a threshold or choose a re-ranking."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from pathlib import Path

import numpy as np

from nearkin.data.sources import list_source
from nearkin.data.splits import split_for
from nearkin.data.table import NoImages, Table
from nearkin.deploy.index import Index
from nearkin.deploy.search import Label
from nearkin.errors import ConfigError, UserError
from nearkin.runs import Run


def trained_labels(run: Run, index: Index) -> set[Label]:
    """The labels of which the index holds a training image (the same bytes, under any name), or that bear the name of
    a training class. Too many is the safe side: what is left has not been seen.
    """
    try:
        names, paths = training_part(run)
        by_size = _by_size(paths)
    except (UserError, OSError) as error:
        raise ConfigError(
            f"{run.path}: cannot tell which classes it was trained on ({str(error).splitlines()[0]})\n"
            "Bring its data back, or say --assume-unseen if none of the indexed classes was trained on."
        ) from None
    digests: dict[Path, str] = {}

    def digest(path: Path) -> str:
        if path not in digests:
            with open(path, "rb") as file:
                digests[path] = hashlib.file_digest(file, "sha256").hexdigest()
        return digests[path]

    found: set[Label] = {label for label in set(index.labels) if label in names}
    for label, stamp in zip(index.labels, index.stamps, strict=True):
        if label is None or label in found or stamp is None:
            continue
        if any(digest(path) == stamp.sha256 for path in by_size.get(stamp.size, ())):
            found.add(label)
    return found


def training_part(run: Run) -> tuple[set[str], tuple[Path, ...]]:
    """Names and files of the classes that the run learned from; those that chose its epoch are not among them."""
    data = run.recipe.data
    if data.source == "glyphs":
        return set(), ()  # drawn, not files
    listing = list_source(data)
    present, labels = np.unique(listing.labels, return_inverse=True)
    table = Table(
        source=listing.source,
        labels=labels.astype(np.int64),
        class_names=tuple(listing.class_names[c] for c in present),
        images=NoImages(listing.source, len(listing)),
        fingerprint="",
        paths=listing.paths,
        part=listing.part,
    )
    train = split_for(table, data)[0].train
    return set(train.class_names), train.paths


def _by_size(paths: tuple[Path, ...]) -> dict[int, list[Path]]:
    sizes: dict[int, list[Path]] = defaultdict(list)
    for path in paths:
        sizes[os.stat(path).st_size].append(path)
    return sizes
