"""Which classes of an index a run was trained on: those may not set a threshold or choose a re-ranking."""

from __future__ import annotations

import numpy as np

from nearkin.data.sources import file_digests, fingerprint, list_source
from nearkin.data.splits import split_for
from nearkin.data.table import NoImages, Table
from nearkin.deploy.index import Index
from nearkin.deploy.search import Label
from nearkin.errors import ConfigError, DataError, UserError
from nearkin.runs import Run


def trained_labels(run: Run, index: Index) -> set[Label]:
    """The labels of which the index holds a training image (the same bytes, under any name), or that bear the name of
    a training class. Too many is the safe side: what is left has not been seen.
    """
    try:
        names, digests = training_part(run)
    except (UserError, OSError) as error:
        raise ConfigError(
            f"{run.path}: cannot tell which classes it was trained on ({str(error).splitlines()[0]})\n"
            "Bring its data back, or say --assume-unseen if none of the indexed classes was trained on."
        ) from None
    seen = zip(index.labels, index.stamps, strict=True)
    found: set[Label] = {label for label, stamp in seen if stamp is not None and stamp.sha256 in digests}
    return (found | {label for label in index.labels if label in names}) - {None}


def training_part(run: Run) -> tuple[set[str], set[str]]:
    """Class names and content hashes of what the run learned from; what chose its epoch is not part of it."""
    data = run.recipe.data
    if data.source == "glyphs":
        return set(), set()  # drawn, not files
    listing = list_source(data)
    present, codes = np.unique(listing.labels, return_inverse=True)
    labels, classes = codes.astype(np.int64), tuple(listing.class_names[c] for c in present)
    digests = file_digests(listing.paths)
    boxes = listing.boxes if data.boxes else None
    mark = fingerprint(digests, labels, classes, listing.part, boxes)
    trained_on = ((run.result or {}).get("protocol") or {}).get("fingerprint", mark)
    if trained_on != mark:  # with other classes the same seed deals them otherwise
        raise DataError(f"{listing.root}: is not what it was when the run was trained.")
    table = Table(listing.source, labels, classes, NoImages(listing.source, len(listing)), mark, part=listing.part)
    names = set(split_for(table, data)[0].train.class_names)
    # Splits are by class, so every image of a training class was one to learn from.
    return names, {digest.hex() for digest, label in zip(digests, labels, strict=True) if classes[label] in names}
