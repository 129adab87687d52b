"""The rows that a page lists: example queries, confused classes, hubs, suspected label errors, near-duplicates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nearkin.analysis.hardness import Confusion, Hub, confused_pairs, hubs
from nearkin.analysis.label_errors import Duplicate, LabelErrors, find_duplicates, find_label_errors
from nearkin.data.images import Rows
from nearkin.errors import DataError
from nearkin.report import gallery
from nearkin.report.eval_data import EvalData

MAX_CONFUSED_PAIRS, MAX_QUERIES_PER_PAIR = 30, 40
MAX_HUBS, MAX_LABEL_ERRORS, MAX_DUPLICATES = 20, 100, 60
# A label is listed from this error probability on; at least this many are listed in any case.
MIN_ERROR_PROBABILITY, MIN_LABEL_ERRORS = 0.05, 12
DUPLICATE_THRESHOLDS = (0.96, 0.98, 0.99, 0.995, 0.999)  # cosine similarities, tried in this order
MAX_PLAUSIBLE_DUPLICATES = 200  # more pairs above a threshold cannot all be duplicates


@dataclass(frozen=True)
class NearDuplicates:
    """Pairs of identical or nearly identical rows."""

    pairs: list[Duplicate] | None  # the pairs, or None if too many rows are that similar to be duplicates
    threshold: float | None  # the cosine similarity above which pairs are listed, or None
    by_features: bool  # whether similarity is that of untrained backbone features, not of the run's embeddings


@dataclass(frozen=True)
class Highlights:
    """The rows that a page lists."""

    example_queries: dict[str, Rows]  # query rows of the retrieval examples, by selection
    confused_pairs: list[tuple[Confusion, Rows]]  # confused classes, each with its first queries
    hubs: list[Hub]  # rows that are neighbours of very many others
    label_errors: LabelErrors | str  # suspected label errors, or the reason why they cannot be estimated
    suspect_rows: Rows  # the suspected label errors that the page lists
    duplicates: NearDuplicates

    @property
    def rows(self) -> Rows:
        """All listed rows, most important first, with repeats."""
        duplicates = [[pair.first, pair.second] for pair in (self.duplicates.pairs or [])[:MAX_DUPLICATES]]
        parts = [*self.example_queries.values(), self.suspect_rows, *duplicates, [hub.item for hub in self.hubs]]
        parts += [rows for _, rows in self.confused_pairs]
        return np.concatenate([np.asarray(rows, np.int64) for rows in parts])


def find_highlights(data: EvalData) -> Highlights:
    """Find the rows that the page of a run lists."""
    labels, queries = data.table.labels, data.queries
    label_errors = _label_errors(data)
    return Highlights(
        example_queries=gallery.example_queries(data, max_queries=gallery.MAX_QUERIES),
        confused_pairs=_confused_pairs(data),
        hubs=hubs(data.neighbours[queries], labels[queries], labels, top=MAX_HUBS),
        label_errors=label_errors,
        suspect_rows=np.empty(0, np.int64) if isinstance(label_errors, str) else _suspect_rows(label_errors),
        duplicates=_duplicates(data),
    )


def _confused_pairs(data: EvalData) -> list[tuple[Confusion, Rows]]:
    labels, queries = data.table.labels, data.queries
    nearest = labels[data.neighbours[queries, 0]]
    pairs = confused_pairs(data.neighbours[queries], labels[queries], labels, top=MAX_CONFUSED_PAIRS)
    return [
        (pair, queries[(labels[queries] == pair.label) & (nearest == pair.taken_for)][:MAX_QUERIES_PER_PAIR])
        for pair in pairs
    ]


def _label_errors(data: EvalData) -> LabelErrors | str:
    try:
        return find_label_errors(data.emb, data.table.labels)
    except DataError as error:  # every class is a singleton
        return str(error)


def _suspect_rows(errors: LabelErrors) -> Rows:
    first = errors.order[np.isfinite(errors.score[errors.order])][:MAX_LABEL_ERRORS]
    likely = int((errors.probability[first] >= MIN_ERROR_PROBABILITY).sum())
    return first[: max(MIN_LABEL_ERRORS, likely)]


def _duplicates(data: EvalData) -> NearDuplicates:
    by_features = data.table.features is not None
    vectors = data.table.features if by_features else data.emb
    for threshold in DUPLICATE_THRESHOLDS:
        try:
            pairs = find_duplicates(vectors, data.table.labels, threshold=threshold, max_pairs=MAX_PLAUSIBLE_DUPLICATES)
        except DataError:
            continue
        return NearDuplicates(pairs, threshold, by_features)
    return NearDuplicates(None, None, by_features)
