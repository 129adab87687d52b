"""The evaluated images of a run with embeddings and neighbours, and the images of a page: thumbnails and map."""

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from nearkin._common.progress import Reporter
from nearkin.analysis.hardness import hardest
from nearkin.data import sources
from nearkin.data.images import Images, Rows
from nearkin.data.own import as_table
from nearkin.data.splits import make_split
from nearkin.data.table import Table
from nearkin.errors import DataError, import_extra
from nearkin.metrics.ranking import neighbours
from nearkin.metrics.scores import Scores
from nearkin.models.frozen import FrozenFeatures
from nearkin.models.own import OWN
from nearkin.ops.geometry import unit
from nearkin.training import evaluation
from nearkin.training.device import choose_device
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


def load_eval_data(run: Run, data: Any = None, *, reporter: Reporter) -> EvalData:
    """Load what a finished run was evaluated on. Sealed test classes stay sealed."""
    recipe, result = run.recipe, run.result
    assert result is not None
    table = sources.load(recipe.data, reporter) if data is None else as_table(data, recipe.data, reporter=reporter)
    if table.fingerprint != result["protocol"]["fingerprint"]:
        raise DataError(f"{table.source}: the data have changed since this run.")
    split, holdout = make_split(table, recipe.data)
    tested = result["test"] is not None
    part = holdout.open() if tested else split.val
    if part is None:
        raise DataError("the test classes are sealed, and there are no validation classes to show instead.")
    name = "test" if tested else "validation"
    is_own = recipe.model.backbone == OWN  # the saved embeddings do, without its module
    frozen = not is_own and (part.features is not None or recipe.model.freeze == "backbone")
    emb = None if frozen else evaluation.load_embeddings(run, name, part)
    if emb is None:
        model = run.embedder().to(choose_device("auto"))
        if part.features is None and frozen:
            part = FrozenFeatures(model, table, on_disk=recipe.data.cache, reporter=reporter).add_to(part)
        emb = evaluation.embed_table(model, part, raw=True, reporter=reporter)
        evaluation.save_embeddings(run, name, part, emb)
    if recipe.model.normalize:
        emb = F.normalize(emb, dim=1)
    stored = run.path / "per_query.npz"
    scores = Scores.load(stored) if tested and stored.exists() else evaluation.score_embeddings(part, emb)
    queries, gallery = evaluation.query_and_gallery_rows(part)
    if queries is None or gallery is None:
        queries = gallery = np.arange(len(part))
    k = min(NEIGHBOURS, len(gallery) - 1)
    nearest, similarities = np.empty((len(emb), k), np.int64), np.empty((len(emb), k))
    if queries is not gallery:
        nearest[queries], similarities[queries] = neighbours(emb[queries], emb[gallery], k=k)
    nearest[gallery], similarities[gallery] = neighbours(emb[gallery], k=k)  # any neighbour can become the query
    nearest = gallery[nearest]
    if not np.array_equal(scores.labels, part.labels[queries]):
        raise DataError(f"{stored}: the stored values belong to other images.")
    root = recipe.data.root
    folder = root.parent if root is not None and root.is_file() else root
    return EvalData(name, part, emb, queries, scores, nearest, similarities, folder)


MAX_QUERIES = 120  # of each selection
MAX_IMAGES = 6800  # per page; at 48 pixels, phones can still decode the sprite sheet
# (up to this many images, thumbnail side in pixels); all sides are multiples of the codec's block size
THUMBNAIL_SIZES = ((1200, 96), (2600, 64), (MAX_IMAGES, 48))
MAX_SHEET_BYTES = 6_000_000  # before base64
WEBP_QUALITIES = (78, 60, 45, 30)
MAP_SIZE = 1000  # coordinates of points on the map are integers from 0 to this


def example_queries(data: EvalData, *, max_queries: int, seed: int = 0) -> dict[str, Rows]:
    """Select the queries of the retrieval examples; confident errors have the widest margin over a positive."""
    labels, rows = data.table.labels, data.queries
    wrong = labels[data.neighbours[rows, 0]] != labels[rows]
    same_class = labels[data.neighbours[rows]] == labels[rows, None]
    # Without a positive among the neighbours, the last neighbour bounds the similarity of the nearest positive.
    positive = np.where(same_class, data.similarities[rows], -np.inf).max(1)
    positive = np.where(np.isfinite(positive), positive, data.similarities[rows, -1])
    margin = np.where(wrong, data.similarities[rows, 0] - positive, -np.inf)
    order = np.lexsort((rows, -margin))[: min(max_queries, int(wrong.sum()))]
    rng = np.random.default_rng(seed)
    return {
        "confident_errors": rows[order],
        "hardest": rows[hardest(data.scores, top=max_queries)],
        "random": rows[rng.permutation(len(rows))[:max_queries]],
    }


def choose_rows(neighbours: Sequence[Rows], first: Rows, *, max_rows: int) -> Rows:
    """Choose the rows that a page holds: all if they fit, else the first ones and their neighbours, list by list."""
    nearby = np.concatenate(neighbours, axis=1)
    if len(nearby) <= max_rows:
        return np.arange(len(nearby))
    rows = np.array(list(dict.fromkeys(first.tolist())), np.int64)[:max_rows]
    chosen = np.zeros(len(nearby), dtype=bool)
    chosen[rows] = True
    remaining = max_rows - len(rows)
    while len(rows):  # whole neighbour lists: those of `first`, then repeatedly those of the rows that miss the fewest
        for row in rows:
            missing = np.unique(nearby[row][~chosen[nearby[row]]])
            if len(missing) <= remaining:
                chosen[missing] = True
                remaining -= len(missing)
        candidates = np.flatnonzero(chosen)
        num_missing = (~chosen[nearby[candidates]]).sum(1)
        num_missing[num_missing == 0] = remaining + 1
        rows = candidates[(num_missing == num_missing.min()) & (num_missing <= remaining)]
    return np.flatnonzero(chosen)


@dataclass(frozen=True)
class SpriteSheet:
    """Thumbnails in one image: tile t is in column t % columns, row t // columns."""

    uri: str  # the image as a data URI
    side: int  # side of a thumbnail in pixels
    columns: int
    rows: int


def make_sprite_sheet(images: Images, rows: Rows, *, reporter: Reporter) -> SpriteSheet:
    """Draw thumbnails into one WebP image that is small enough for a page."""
    image_module = import_extra("PIL.Image", extra="images")
    side = next(side for max_images, side in THUMBNAIL_SIZES if len(rows) <= max_images)
    columns = math.ceil(math.sqrt(len(rows)))
    num_rows = math.ceil(len(rows) / columns)
    tiles = torch.zeros(num_rows * columns, images.shape[0], side, side, dtype=torch.uint8)
    with reporter.track("thumbnails", len(rows), unit="img") as bar:
        for start in range(0, len(rows), 256):
            pixels = images.read(rows[start : start + 256]).float()
            mode = "area" if max(pixels.shape[2:]) > side else "bilinear"
            drawn = F.interpolate(pixels, (side, side), mode=mode).round().clamp(0, 255).byte()
            tiles[start : start + len(drawn)] = drawn
            bar.advance(len(drawn))
    canvas = tiles.view(num_rows, columns, -1, side, side).permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)
    image = image_module.fromarray(canvas.squeeze(2).numpy())
    for quality in WEBP_QUALITIES:
        buffer = io.BytesIO()
        image.save(buffer, "WEBP", quality=quality, method=2)
        if buffer.tell() <= MAX_SHEET_BYTES:
            break
    encoded = base64.b64encode(buffer.getvalue()).decode()
    return SpriteSheet(f"data:image/webp;base64,{encoded}", side, columns, num_rows)


def sample(labels: NDArray[np.int64], rows: Rows, *, max_rows: int = MAX_IMAGES, seed: int = 0) -> Rows:
    """Sample rows class by class, so that classes stay complete."""
    if len(rows) <= max_rows:
        return rows
    class_order = np.random.default_rng(seed).permutation(int(labels.max()) + 1)[labels[rows]]
    return np.sort(rows[np.argsort(class_order, kind="stable")[:max_rows]])


def pca(emb: Tensor) -> NDArray[np.int64]:
    """Project unit vectors onto their first two principal components."""
    f = unit(emb.double())
    x = f - f.mean(0)
    _, vectors = torch.linalg.eigh(x.T @ x)
    components = vectors[:, -2:].flip(1)
    if components.shape[1] < 2:
        components = F.pad(components, (0, 2 - components.shape[1]))
    # The sign of a component is arbitrary. Make its largest weight positive, so that maps agree between machines.
    largest = components.gather(0, components.abs().argmax(0, keepdim=True))
    return _to_grid((x @ (components * torch.where(largest < 0, -1.0, 1.0))).numpy())


def tsne(emb: Tensor, *, seed: int = 0) -> NDArray[np.int64]:
    """Project unit vectors with t-SNE (scikit-learn). Distances between clusters mean little."""
    manifold = import_extra("sklearn.manifold", extra="bench")
    x = unit(emb.float()).numpy()
    perplexity = min(30.0, (len(x) - 1) / 3)
    # Euclidean distances of unit vectors rank as cosines do.
    return _to_grid(manifold.TSNE(perplexity=perplexity, init="pca", random_state=seed, n_jobs=-1).fit_transform(x))


def _to_grid(x: NDArray[np.floating]) -> NDArray[np.int64]:
    low, high = x.min(0), x.max(0)
    extent = float((high - low).max())
    if not extent > 1e-12:
        return np.full(x.shape, MAP_SIZE // 2, np.int64)
    centre = (low + high) / 2
    return np.asarray(np.rint(MAP_SIZE / 2 + (x - centre) / extent * MAP_SIZE), np.int64)
