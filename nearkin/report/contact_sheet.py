"""Contact sheets: queries on the left, their neighbours on the right, in one PNG file."""

import importlib.util
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from nearkin._common.files import atomic_write
from nearkin.data.reading import read_image, square
from nearkin.deploy.index.search import Hit
from nearkin.errors import DataError, import_extra
from nearkin.report.html import writing

TILE, EDGE, GAP, TEXT = 148, 5, 12, 38  # pixels: image side, border, gap between tiles, text below an image
MARGIN, GUTTER = 20, 26  # around the sheet; between a query and its neighbours
MAX_ROWS, MAX_COLUMNS = 100, 50
PAPER, INK, FAINT, GREY = "#ffffff", "#1c1c1c", "#6b6b6b", "#b9bdc2"
# They differ in lightness, and a tick or cross repeats them, for readers who cannot distinguish red and green.
RIGHT, WRONG = "#1a8f4c", "#d9412f"


@dataclass(frozen=True)
class SheetRow:
    """One query with its results."""

    image: Any  # a path, a PIL image, or None for a vector
    title: str  # caption, if there is no label
    label: Any  # class of the query, if known
    hits: Sequence[Hit]
    known: bool | None = None  # whether the query is known; None without a threshold


def contact_sheet(rows: Sequence[SheetRow], paths: Sequence[Sequence[Path]], out: Path) -> Path:
    """Draw queries and their neighbours as a PNG file.

    Neighbours of the query's class have a green border and a tick, others a red border and a cross; the border is grey
    if a label is missing. A file that cannot be read becomes a grey tile with a note.
    """
    if not rows:
        raise DataError("sheet: no queries to draw.")
    if len(rows) > MAX_ROWS:
        raise DataError(f"sheet: {len(rows):,} queries are too many for one sheet; the limit is {MAX_ROWS}.")
    columns = max(len(row.hits) for row in rows)
    if columns > MAX_COLUMNS:
        raise DataError(f"sheet: the limit is {MAX_COLUMNS} neighbours. Request fewer with -k.")
    pil = import_extra("PIL.Image", extra="images")
    draw_on = import_extra("PIL.ImageDraw", extra="images").Draw
    step, height = TILE + 2 * EDGE + GAP, TILE + 2 * EDGE + TEXT + GAP
    width = 2 * MARGIN + step + (GUTTER + columns * step if columns else 0) - GAP
    sheet = pil.new("RGB", (max(width, 320), 2 * MARGIN + len(rows) * height - GAP), PAPER)
    draw = draw_on(sheet)
    for r, row in enumerate(rows):
        top = MARGIN + r * height
        state = "query" if row.known is None else "query · known" if row.known else "query · unknown"
        title = row.title if row.label is None else str(row.label)
        _draw_tile(sheet, draw, MARGIN, top, row.image, INK, title, state)
        for n, (hit, path) in enumerate(zip(row.hits, paths[r], strict=True)):
            left = MARGIN + step + GUTTER + n * step
            edge = GREY if row.label is None or hit.label is None else RIGHT if row.label == hit.label else WRONG
            name = Path(hit.id).name if hit.label is None else str(hit.label)
            _draw_tile(sheet, draw, left, top, path, edge, name, f"{hit.similarity:.4f}")
        if columns:
            x = MARGIN + step + GUTTER // 2 - GAP // 2
            draw.line([(x, top), (x, top + height - GAP)], fill="#e3e5e8", width=2)
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG")
    with writing("sheet", out, error=DataError):
        out.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(out, buffer.getvalue())
    return out


def _draw_tile(sheet: Any, draw: Any, left: int, top: int, image: Any, edge: str, title: str, note: str) -> None:
    """Draw an image with its border, a tick or a cross in the upper right corner, and two lines of text below."""
    width = TILE + 2 * EDGE
    x, y = left + EDGE, top + EDGE
    draw.rectangle([left, top, left + width - 1, top + width - 1], fill=edge)
    try:
        if image is None:
            raise DataError("vector")
        pixels = square(read_image(image, TILE), TILE).permute(1, 2, 0).numpy()
        sheet.paste(import_extra("PIL.Image", extra="images").fromarray(pixels), (x, y))
    except DataError:
        draw.rectangle([x, y, x + TILE - 1, y + TILE - 1], fill="#eef0f2")
        text = "vector" if image is None else "cannot read file"
        draw.text((x + TILE // 2, y + TILE // 2), text, fill=FAINT, font=font(13), anchor="mm")
    if edge in (RIGHT, WRONG):
        x = left + width - 20
        draw.rectangle([x, top, x + 19, top + 19], fill=edge)
        strokes = [[(5, 10), (9, 14), (15, 6)]] if edge == RIGHT else [[(6, 6), (14, 14)], [(14, 6), (6, 14)]]
        for stroke in strokes:
            draw.line([(x + a, top + b) for a, b in stroke], fill="white", width=2)
    bold = font(13, edge == INK)
    draw.text((left, top + width + 4), elide(printable(title), width, draw, bold), fill=INK, font=bold)
    draw.text((left, top + width + 21), elide(note, width, draw, font(12)), fill=FAINT, font=font(12))


def elide(text: str, width: int, draw: Any, text_font: Any) -> str:
    """Shorten text in the middle until it fits; names tend to differ at both ends."""
    if draw.textlength(text, font=text_font) <= width:
        return text
    for length in range(len(text) - 1, 1, -1):
        shorter = text[: (length + 1) // 2] + "…" + text[len(text) - length // 2 :]
        if draw.textlength(shorter, font=text_font) <= width:
            return shorter
    return "…"


def printable(text: str) -> str:
    """Escape characters that cannot be printed on one line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


@lru_cache(maxsize=8)
def font(size: int, bold: bool = False) -> Any:
    """Return DejaVu Sans, which covers most alphabets, if matplotlib is installed; else Pillow's default font."""
    module = import_extra("PIL.ImageFont", extra="images")
    spec = importlib.util.find_spec("matplotlib")
    if spec is not None and spec.origin is not None:
        name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
        path = Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf" / name
        if path.exists():
            return module.truetype(str(path), size)
    return module.load_default(size)
