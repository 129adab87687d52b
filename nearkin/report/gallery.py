"""Which queries a page shows, and their pictures as one sheet."""

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
from nearkin.report.view import View

EACH = 120  # queries of each view
MOST = 6800  # pictures on a page; with 48 pixels a side their sheet is what a phone still decodes
SIDES = ((1200, 96), (2600, 64), (MOST, 48))  # pixels a side for up to so many; all whole blocks of the coding
BYTES = 6_000_000  # of the sheet, before base64
QUALITIES = (78, 60, 45, 30)


def views(view: View, *, each: int, seed: int = 0) -> dict[str, Rows]:
    """Rows to ask for, by what they show; the draw is seeded, so that a page shows the same each time.

    sure      the nearest is of another class, and nearer than the nearest of its own by most
    hardest   the lowest MAP@R
    random    any
    """
    labels, rows = view.table.labels, view.asking
    wrong = labels[view.near[rows, 0]] != labels[rows]
    same = labels[view.near[rows]] == labels[rows, None]
    # Where no neighbour shown is of the class, the last one says how far the right ones are at least.
    own = np.where(same, view.similar[rows], -np.inf).max(1)
    own = np.where(np.isfinite(own), own, view.similar[rows, -1])
    lead = np.where(wrong, view.similar[rows, 0] - own, -np.inf)
    order = np.lexsort((rows, -lead))[: min(each, int(wrong.sum()))]
    rng = np.random.default_rng(seed)
    return {
        "sure": rows[order],
        "hardest": rows[hardest(view.scores, top=each)],
        "random": rows[rng.permutation(len(rows))[:each]],
    }


def choose(near: Sequence[Rows], first: Rows, *, most: int) -> Rows:
    """The rows that get a picture, in order: all where they fit, else the first ones and, as a query wants all of its
    neighbours, whole lists of them: those of the first ones, then always of the rows that lack the fewest.

    near   [N, k] for each of the runs on the page
    """
    around = np.concatenate(near, axis=1)
    if len(around) <= most:
        return np.arange(len(around))
    rows = np.array(list(dict.fromkeys(first.tolist())), np.int64)[:most]
    known = np.zeros(len(around), dtype=bool)
    known[rows] = True
    left = most - len(rows)
    while len(rows):
        for row in rows:
            lacking = np.unique(around[row][~known[around[row]]])
            if len(lacking) <= left:
                known[lacking] = True
                left -= len(lacking)
        inside = np.flatnonzero(known)
        lacks = (~known[around[inside]]).sum(1)
        lacks[lacks == 0] = left + 1
        rows = inside[(lacks == lacks.min()) & (lacks <= left)]
    return np.flatnonzero(known)


@dataclass(frozen=True)
class Sheet:
    """Pictures side by side in one image: tile t is in column t % columns, row t // columns."""

    uri: str
    side: int
    columns: int
    rows: int


def sheet(images: Images, chosen: Rows, *, reporter: Reporter) -> Sheet:
    """The chosen pictures as a data URI of a size that a page can carry."""
    image_module = import_extra("PIL.Image", extra="report")
    side = next(side for most, side in SIDES if len(chosen) <= most)
    columns = math.ceil(math.sqrt(len(chosen)))
    rows = math.ceil(len(chosen) / columns)
    channels = images.shape[0]
    canvas = torch.zeros(channels, rows * side, columns * side, dtype=torch.uint8)
    with reporter.track("thumbnails", len(chosen), unit="img") as bar:
        for start in range(0, len(chosen), 256):
            part = chosen[start : start + 256]
            tiles = _scaled(images.read(part), side)
            for t, tile in enumerate(tiles, start):
                y, x = t // columns * side, t % columns * side
                canvas[:, y : y + side, x : x + side] = tile
            bar.advance(len(part))
    pixels = canvas.numpy()
    picture = image_module.fromarray(pixels[0] if channels == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))
    coded = b""
    for quality in QUALITIES:
        buffer = io.BytesIO()
        picture.save(buffer, "WEBP", quality=quality, method=2)
        coded = buffer.getvalue()
        if len(coded) <= BYTES:
            break
    return Sheet(f"data:image/webp;base64,{base64.b64encode(coded).decode()}", side, columns, rows)


def _scaled(pixels: torch.Tensor, side: int) -> torch.Tensor:
    """uint8 [n, c, side, side]"""
    x = pixels.float()
    if max(x.shape[2:]) > side:
        x = F.interpolate(x, (side, side), mode="area")
    elif tuple(x.shape[2:]) != (side, side):
        x = F.interpolate(x, (side, side), mode="bilinear")
    return x.round().clamp(0, 255).byte()
