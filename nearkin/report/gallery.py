"""The retrieval examples of a page: which queries it shows, which images it holds, and their thumbnails."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from nearkin._common.progress import Reporter
from nearkin.analysis.hardness import hardest
from nearkin.data.images import Images, Rows
from nearkin.errors import import_extra
from nearkin.report.eval_data import EvalData

MAX_QUERIES = 120  # of each selection
MAX_IMAGES = 6800  # per page; at 48 pixels, phones can still decode the sprite sheet
# (up to this many images, thumbnail side in pixels); all sides are multiples of the codec's block size
THUMBNAIL_SIZES = ((1200, 96), (2600, 64), (MAX_IMAGES, 48))
MAX_SHEET_BYTES = 6_000_000  # before base64
WEBP_QUALITIES = (78, 60, 45, 30)


def example_queries(data: EvalData, *, max_queries: int, seed: int = 0) -> dict[str, Rows]:
    """Select the queries of the retrieval examples, by selection; a page is reproducible.

    confident_errors: the nearest neighbour is of another class, by the widest margin over the nearest of the same
    class; hardest: the lowest MAP@R; random: seeded.
    """
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
    """Choose the rows that a page holds: all if they fit, else the first ones and their neighbours.

    A query is shown with all of its neighbours, so whole neighbour lists are added: those of `first`, then repeatedly
    those of the rows that miss the fewest.
    """
    nearby = np.concatenate(neighbours, axis=1)
    if len(nearby) <= max_rows:
        return np.arange(len(nearby))
    rows = np.array(list(dict.fromkeys(first.tolist())), np.int64)[:max_rows]
    chosen = np.zeros(len(nearby), dtype=bool)
    chosen[rows] = True
    remaining = max_rows - len(rows)
    while len(rows):
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
    channels = images.shape[0]
    canvas = torch.zeros(channels, num_rows * side, columns * side, dtype=torch.uint8)
    with reporter.track("thumbnails", len(rows), unit="img") as bar:
        for start in range(0, len(rows), 256):
            batch = rows[start : start + 256]
            for t, tile in enumerate(_resize(images.read(batch), side), start):
                y, x = t // columns * side, t % columns * side
                canvas[:, y : y + side, x : x + side] = tile
            bar.advance(len(batch))
    pixels = canvas.numpy()
    image = image_module.fromarray(pixels[0] if channels == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))
    encoded = b""
    for quality in WEBP_QUALITIES:
        buffer = io.BytesIO()
        image.save(buffer, "WEBP", quality=quality, method=2)
        encoded = buffer.getvalue()
        if len(encoded) <= MAX_SHEET_BYTES:
            break
    return SpriteSheet(f"data:image/webp;base64,{base64.b64encode(encoded).decode()}", side, columns, num_rows)


def _resize(pixels: torch.Tensor, side: int) -> torch.Tensor:
    """Return uint8 thumbnails [n, c, side, side]."""
    x = pixels.float()
    if max(x.shape[2:]) > side:
        x = F.interpolate(x, (side, side), mode="area")
    elif tuple(x.shape[2:]) != (side, side):
        x = F.interpolate(x, (side, side), mode="bilinear")
    return x.round().clamp(0, 255).byte()
