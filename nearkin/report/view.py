"""`View`: the images that a page is about, as the best epoch of a run sees them."""

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
from nearkin.errors import DataError, RunError
from nearkin.metrics.ranking import neighbours
from nearkin.metrics.scores import Scores
from nearkin.models.frozen import FrozenFeatures
from nearkin.training.embedding_cache import load_embeddings, save_embeddings
from nearkin.training.evaluation import embed_table, query_and_gallery_rows, score_embeddings
from nearkin.training.factory import choose_device
from nearkin.training.run import Run

NEIGHBOURS = 8

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class View:
    """Rows of one part of the data with their vectors and neighbours. Rows are numbered as in `table`.

    part      "test", or "validation" for a run whose test classes are still sealed
    table     the rows, with the features of an untrained backbone beside them where the run has those
    emb       [N, dim] as the best epoch gives them
    asking    the rows that ask: all, or those that the source says (In-Shop)
    scores    of the asking rows, in their order
    near      [N, k] the nearest rows of each among those that are searched, itself left out
    similar   [N, k] their cosines
    root      the folder of the data
    """

    part: str
    table: Table = field(repr=False)
    emb: Tensor = field(repr=False)
    asking: Rows = field(repr=False)
    scores: Scores = field(repr=False)
    near: Rows = field(repr=False)
    similar: Floats = field(repr=False)
    root: Path | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.table)

    def per_row(self, metric: str) -> Floats:
        """[N] the values of a metric; NaN for rows that only are searched."""
        values = np.full(len(self), np.nan)
        values[self.asking] = self.scores.per_query[metric]
        return values

    def row_name(self, row: int) -> str:
        """What a person can find the row by: its file below the data's folder, or its number.

        Of a file elsewhere only its own folder is told: a page is shared, and the folders above are this machine's.
        """
        if not self.table.paths:
            return f"row {self.table.row_numbers[row]}"
        path = self.table.paths[row]
        above = self.root if self.root is not None and path.is_relative_to(self.root) else path.parent.parent
        return path.relative_to(above).as_posix()

    @property
    def has_images(self) -> bool:
        return self.table.images.shape[0] > 0


def load_view(run: Run, *, reporter: Reporter) -> View:
    """What the run was judged on, with the vectors that were kept, or embedded now.

    The test classes of a run that has not opened them stay sealed.
    """
    result = run.result
    if result is None:
        raise RunError(f"{run.path}: this run is not finished. Run its training command again to go on.")
    recipe = run.recipe
    table = sources.load(recipe.data, reporter)
    if table.fingerprint != result["protocol"]["fingerprint"]:
        raise DataError(f"{table.source}: the data have changed since this run was made.")
    split, holdout = make_split(table, recipe.data)
    judged = result["test"] is not None
    part = holdout.open() if judged else split.val
    if part is None:
        raise DataError("the test classes are sealed, and there are no validation classes to look at instead.")
    name = "test" if judged else "validation"
    frozen = part.features is not None or recipe.model.freeze == "backbone"
    emb = None if frozen else load_embeddings(run, name, part)
    if emb is None:
        model = run.embedder().to(choose_device("auto"))
        if part.features is None and frozen:
            part = FrozenFeatures(model, table, on_disk=recipe.data.cache, reporter=reporter).add_to(part)
        emb = embed_table(model, part, reporter=reporter)
        if not frozen:
            save_embeddings(run, name, part, emb)
    stored = run.path / "per_query.npz"
    scores = Scores.load(stored) if judged and stored.exists() else score_embeddings(part, emb)
    asking, _ = query_and_gallery_rows(part)
    asking = np.arange(len(part)) if asking is None else asking
    if not np.array_equal(scores.labels, part.labels[asking]):
        raise DataError(f"{stored}: not the values of these images.")
    near, similar = _nearest(part, emb)
    root = recipe.data.root
    folder = root.parent if root is not None and root.is_file() else root
    return View(name, part, emb, asking, scores, near, similar, folder)


def _nearest(part: Table, emb: Tensor) -> tuple[Rows, Floats]:
    asking, searched = query_and_gallery_rows(part)
    if asking is None or searched is None:
        return neighbours(emb, k=min(NEIGHBOURS, len(emb) - 1))
    k = min(NEIGHBOURS, len(searched) - 1)
    near, similar = np.empty((len(emb), k), np.int64), np.empty((len(emb), k))
    near[asking], similar[asking] = neighbours(emb[asking], emb[searched], k=k)
    near[searched], similar[searched] = neighbours(emb[searched], k=k)  # so that a neighbour can be asked for its own
    return searched[near], similar
