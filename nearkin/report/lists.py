"""What a page lists of one run, as rows of its view: found first, because these are the images a page must hold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nearkin.analysis.hardness import Confusion, Hub, confused_pairs, hubs
from nearkin.analysis.label_errors import Duplicate, LabelErrors, find_duplicates, find_label_errors
from nearkin.data.images import Rows
from nearkin.errors import DataError
from nearkin.report import gallery
from nearkin.report.view import View

PAIRS, OF_PAIR, HUBS, SUSPECTS, COPIES = 30, 40, 20, 100, 60  # how many of each a page lists
LIKELY, FEWEST = 0.05, 12  # chance from which a label is listed as suspect, and how many are listed in any case
MANY = 200  # pairs above a threshold that cannot all be copies
THRESHOLDS = (0.96, 0.98, 0.99, 0.995, 0.999)  # cosines above which rows pass for copies


@dataclass(frozen=True)
class Copies:
    """Rows that are the same or nearly; `pairs` is None where too many are so alike to be copies."""

    pairs: list[Duplicate] | None
    threshold: float | None
    by_features: bool
    """Found by the features of a backbone that was not trained, not by the run's own vectors."""


@dataclass(frozen=True)
class Lists:
    """Rows, or what is said of them.

    views      those of the gallery
    pairs      classes taken for others, each with its first queries
    hubs       everybody's neighbours
    suspects   labels that look wrong, or in words why none can be judged
    listed     of those the ones that the page shows
    """

    views: dict[str, Rows]
    pairs: list[tuple[Confusion, Rows]]
    hubs: list[Hub]
    suspects: LabelErrors | str
    listed: Rows
    copies: Copies

    @property
    def rows(self) -> Rows:
        """All of them, what is looked at first in front; some come twice."""
        copies = [[pair.first, pair.second] for pair in (self.copies.pairs or [])[:COPIES]]
        parts = [*self.views.values(), self.listed, *copies, [hub.item for hub in self.hubs]]
        return np.concatenate([np.asarray(rows, np.int64) for rows in [*parts, *(rows for _, rows in self.pairs)]])


def lists_of(view: View) -> Lists:
    labels, asking = view.table.labels, view.asking
    asked = view.near[asking]
    suspects = _suspects(view)
    return Lists(
        views=gallery.views(view, each=gallery.EACH),
        pairs=_pairs(view),
        hubs=hubs(asked, labels[asking], labels, top=HUBS),
        suspects=suspects,
        listed=np.empty(0, np.int64) if isinstance(suspects, str) else _worth_a_look(suspects),
        copies=_copies(view),
    )


def _pairs(view: View) -> list[tuple[Confusion, Rows]]:
    labels, asking = view.table.labels, view.asking
    first = labels[view.near[asking, 0]]
    found = confused_pairs(view.near[asking], labels[asking], labels, top=PAIRS)
    return [(pair, asking[(labels[asking] == pair.label) & (first == pair.taken_for)][:OF_PAIR]) for pair in found]


def _suspects(view: View) -> LabelErrors | str:
    try:
        return find_label_errors(view.emb, view.table.labels)
    except DataError as error:  # each class has one row
        return str(error)


def _worth_a_look(found: LabelErrors) -> Rows:
    first = found.order[np.isfinite(found.score[found.order])][:SUSPECTS]
    likely = int((found.probability[first] >= LIKELY).sum())
    return first[: max(FEWEST, likely)]


def _copies(view: View) -> Copies:
    by_features = view.table.features is not None
    vectors = view.table.features if by_features else view.emb
    for threshold in THRESHOLDS:
        try:
            found = find_duplicates(vectors, view.table.labels, threshold=threshold, max_pairs=MANY)
        except DataError:
            continue
        return Copies(found, threshold, by_features)
    return Copies(None, None, by_features)
