"""The evaluated images of a run with their embeddings, scores and nearest neighbours."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nearkin._common.progress import Reporter
from nearkin.data import sources
from nearkin.data.images import Rows
from nearkin.data.splits import make_split
from nearkin.data.table import Table
from nearkin.errors import DataError
from nearkin.metrics.ranking import neighbours
from nearkin.metrics.scores import Scores
from nearkin.models.frozen import FrozenFeatures
from nearkin.models.heads import unit
from nearkin.training.device import choose_device
from nearkin.training.evaluation import (
    embed_table,
    load_embeddings,
    query_and_gallery_rows,
    save_embeddings,
    score_embeddings,
)
from nearkin.training.run import Run

NEIGHBOURS = 8

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class EvalData:
    """Rows of the test or validation classes, as the best epoch of a run embeds them. Rows are indices into `table`."""

    split: str  # "test", or "validation" for a run whose test classes are still sealed
    table: Table = field(repr=False)  # the rows, with the features of the untrained backbone where the run uses them
    emb: Tensor = field(repr=False)  # embeddings [N, dim] of the best epoch
    queries: Rows = field(repr=False)  # rows used as queries: all, or those the dataset defines (In-Shop)
    scores: Scores = field(repr=False)  # per-query metrics, in the order of `queries`
    neighbours: Rows = field(repr=False)  # the nearest gallery rows [N, k] of each row, without the row itself
    similarities: Floats = field(repr=False)  # their cosine similarities [N, k]
    root: Path | None = field(default=None, repr=False)  # the data folder

    def __len__(self) -> int:
        return len(self.table)

    def per_row(self, metric: str) -> Floats:
        """Return the values [N] of a metric, NaN for rows that are only in the gallery."""
        values = np.full(len(self), np.nan)
        values[self.queries] = self.scores.per_query[metric]
        return values

    def row_name(self, row: int) -> str:
        """Name a row by its number, or its path without the folders above the data: pages are shared."""
        if not self.table.paths:
            return f"row {self.table.row_numbers[row]}"
        path = self.table.paths[row]
        base = self.root if self.root is not None and path.is_relative_to(self.root) else path.parent.parent
        return path.relative_to(base).as_posix()


def load_eval_data(run: Run, *, reporter: Reporter) -> EvalData:
    """Load what a finished run was evaluated on. Sealed test classes stay sealed."""
    recipe, result = run.recipe, run.result
    assert result is not None
    table = sources.load(recipe.data, reporter)
    if table.fingerprint != result["protocol"]["fingerprint"]:
        raise DataError(f"{table.source}: the data have changed since this run.")
    split, holdout = make_split(table, recipe.data)
    tested = result["test"] is not None
    part = holdout.open() if tested else split.val
    if part is None:
        raise DataError("the test classes are sealed, and there are no validation classes to show instead.")
    name = "test" if tested else "validation"
    frozen = part.features is not None or recipe.model.freeze == "backbone"
    emb = None if frozen else load_embeddings(run, name, part)
    if emb is None:
        model = run.embedder().to(choose_device("auto"))
        if part.features is None and frozen:
            part = FrozenFeatures(model, table, on_disk=recipe.data.cache, reporter=reporter).add_to(part)
        emb = embed_table(model, part, raw=True, reporter=reporter)
        save_embeddings(run, name, part, emb)
    if recipe.model.normalize:
        emb = unit(emb)
    stored = run.path / "per_query.npz"
    scores = Scores.load(stored) if tested and stored.exists() else score_embeddings(part, emb)
    queries, _ = query_and_gallery_rows(part)
    queries = np.arange(len(part)) if queries is None else queries
    if not np.array_equal(scores.labels, part.labels[queries]):
        raise DataError(f"{stored}: the stored values belong to other images.")
    nearest, similarities = _nearest(part, emb)
    root = recipe.data.root
    folder = root.parent if root is not None and root.is_file() else root
    return EvalData(name, part, emb, queries, scores, nearest, similarities, folder)


def _nearest(part: Table, emb: Tensor) -> tuple[Rows, Floats]:
    queries, gallery = query_and_gallery_rows(part)
    if queries is None or gallery is None:
        return neighbours(emb, k=min(NEIGHBOURS, len(emb) - 1))
    k = min(NEIGHBOURS, len(gallery) - 1)
    nearest, similarities = np.empty((len(emb), k), np.int64), np.empty((len(emb), k))
    nearest[queries], similarities[queries] = neighbours(emb[queries], emb[gallery], k=k)
    # Gallery rows too: on the page, any neighbour can become the query.
    nearest[gallery], similarities[gallery] = neighbours(emb[gallery], k=k)
    return gallery[nearest], similarities
