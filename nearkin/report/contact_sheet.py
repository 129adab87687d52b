"""A contact sheet: queries on the left, their neighbours to the right, as one PNG file to look at and to send."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from nearkin.data.reading import read_image, square
from nearkin.deploy.index.search import Hit
from nearkin.errors import DataError, import_extra

TILE, EDGE, GAP, TEXT = 148, 5, 12, 38  # pixels: a picture's side, its border, between tiles, below a picture
MARGIN, GUTTER = 20, 26  # around the sheet; between a query and its neighbours
MOST_ROWS, MOST_COLUMNS = 100, 50
PAPER, INK, FAINT, GREY = "#ffffff", "#1c1c1c", "#6b6b6b", "#b9bdc2"
# Told apart also by those who do not see red and green, by lightness and by the mark in the corner.
RIGHT, WRONG = "#1a8f4c", "#d9412f"


@dataclass(frozen=True)
class SheetRow:
    """One query. picture: a path, a PIL image, or None for a bare vector. label: its class where it is known."""

    picture: Any
    title: str
    label: Any
    hits: Sequence[Hit]
    known: bool | None = None


def contact_sheet(rows: Sequence[SheetRow], paths: Sequence[Sequence[Path]], out: Path) -> Path:
    """Draw the rows, with the files of each row's hits in `paths`, and write the sheet.

    A neighbour of the query's class has a green border and a tick, one of another class a red one and a cross; the
    border is grey where a label is missing. A file that cannot be read is a grey tile that says so.
    """
    if not rows:
        raise DataError("sheet: nothing to draw; there is no query.")
    if len(rows) > MOST_ROWS:
        raise DataError(f"sheet: {len(rows):,} queries are too many for one picture; at most {MOST_ROWS} are drawn.")
    if max(len(row.hits) for row in rows) > MOST_COLUMNS:
        raise DataError(f"sheet: at most {MOST_COLUMNS} neighbours are drawn. Ask for fewer with -k.")
    image = import_extra("PIL.Image", extra="vision")
    draw_on = import_extra("PIL.ImageDraw", extra="vision").Draw
    columns = max(len(row.hits) for row in rows)
    step, height = TILE + 2 * EDGE + GAP, TILE + 2 * EDGE + TEXT + GAP
    width = 2 * MARGIN + step + (GUTTER + columns * step if columns else 0) - GAP
    sheet = image.new("RGB", (max(width, 320), 2 * MARGIN + len(rows) * height - GAP), PAPER)
    pen = draw_on(sheet)
    for r, row in enumerate(rows):
        top = MARGIN + r * height
        _tile(sheet, pen, MARGIN, top, row.picture, INK)
        state = "query" if row.known is None else "query · known" if row.known else "query · unknown"
        _words(pen, MARGIN, top, row.title if row.label is None else str(row.label), state, bold=True)
        for n, (hit, path) in enumerate(zip(row.hits, paths[r], strict=True)):
            left = MARGIN + step + GUTTER + n * step
            judged = None if row.label is None or hit.label is None else row.label == hit.label
            _tile(sheet, pen, left, top, path, GREY if judged is None else RIGHT if judged else WRONG)
            if judged is not None:
                _mark(pen, left + TILE + 2 * EDGE, top, judged)
            _words(pen, left, top, Path(hit.id).name if hit.label is None else str(hit.label), f"{hit.similarity:.4f}")
        if columns:
            x = MARGIN + step + GUTTER // 2 - GAP // 2
            pen.line([(x, top), (x, top + height - GAP)], fill="#e3e5e8", width=2)
    aside = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        sheet.save(aside, "PNG")
        aside.replace(out)
    except OSError as error:
        with suppress(OSError):
            aside.unlink()
        raise DataError(f"{out}: cannot write the sheet ({error.strerror or error}).") from None
    return out


def _tile(sheet: Any, pen: Any, left: int, top: int, picture: Any, edge: str) -> None:
    pen.rectangle([left, top, left + TILE + 2 * EDGE - 1, top + TILE + 2 * EDGE - 1], fill=edge)
    inside = (left + EDGE, top + EDGE)
    try:
        if picture is None:
            raise DataError("vector")
        pixels = square(read_image(picture, TILE), TILE)
        sheet.paste(import_extra("PIL.Image", extra="vision").fromarray(pixels.permute(1, 2, 0).numpy()), inside)
    except DataError:
        pen.rectangle([*inside, inside[0] + TILE - 1, inside[1] + TILE - 1], fill="#eef0f2")
        said = "a vector" if picture is None else "no readable file"
        pen.text((inside[0] + TILE // 2, inside[1] + TILE // 2), said, fill=FAINT, font=font(13), anchor="mm")


def _mark(pen: Any, right: int, top: int, judged: bool) -> None:
    """A tick or a cross in the upper right corner, on its border's colour."""
    size = 20
    x, y = right - size, top
    pen.rectangle([x, y, x + size - 1, y + size - 1], fill=RIGHT if judged else WRONG)
    strokes = [[(5, 10), (9, 14), (15, 6)]] if judged else [[(6, 6), (14, 14)], [(14, 6), (6, 14)]]
    for stroke in strokes:
        pen.line([(x + a, y + b) for a, b in stroke], fill="white", width=2)


def _words(pen: Any, left: int, top: int, first: str, second: str, bold: bool = False) -> None:
    width = TILE + 2 * EDGE
    y = top + width + 4
    pen.text((left, y), fitted(printable(first), width, pen, font(13, bold)), fill=INK, font=font(13, bold))
    pen.text((left, y + 17), fitted(second, width, pen, font(12)), fill=FAINT, font=font(12))


def fitted(text: str, width: int, pen: Any, with_font: Any) -> str:
    """The text with its middle left out until it fits: names differ at both ends."""
    if pen.textlength(text, font=with_font) <= width:
        return text
    for kept in range(len(text) - 1, 1, -1):
        tried = text[: (kept + 1) // 2] + "…" + text[len(text) - kept // 2 :]
        if pen.textlength(tried, font=with_font) <= width:
            return tried
    return "…"


def printable(text: str) -> str:
    """Text that can be shown in one line, whatever a file is called.

    >>> printable("a\\nb\\udcff é")
    'a\\\\nb\\\\udcff é'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


@lru_cache(maxsize=8)
def font(size: int, bold: bool = False) -> Any:
    """DejaVu, which knows most alphabets, where matplotlib has brought it; else what Pillow has."""
    module = import_extra("PIL.ImageFont", extra="vision")
    found = importlib.util.find_spec("matplotlib")
    if found is not None and found.origin is not None:
        name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
        path = Path(found.origin).parent / "mpl-data" / "fonts" / "ttf" / name
        if path.exists():
            return module.truetype(str(path), size)
    return module.load_default(size)
