"""One self-contained HTML page for a run: no network, thumbnails inline."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin import __version__
from nearkin.data import sources
from nearkin.data.splits import split_for
from nearkin.data.table import Table
from nearkin.errors import RunError, need
from nearkin.evaluate import query_and_gallery
from nearkin.progress import Reporter
from nearkin.ranking import neighbours
from nearkin.report.plots import learning_curve
from nearkin.report.text import headline
from nearkin.runs import Run

NEIGHBOURS = 8
RIGHT, WRONG = 8, 6  # rows of the gallery: queries at random, and queries whose nearest neighbour is wrong


@dataclass(frozen=True)
class Item:
    """One thumbnail of the gallery."""

    image: str  # data URI
    label: str
    right: bool
    similarity: float


def write_page(run: Run, out: Path | None, *, reporter: Reporter) -> Path:
    """Write the page of a finished run and return where it is."""
    result = run.result
    if result is None:
        raise RunError(f"{run.path}: this run is not finished. Run its training command again to go on.")
    jinja2 = need("jinja2", extra="report")
    loader = jinja2.PackageLoader("nearkin.report", "templates")
    template = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True).get_template(
        "run.html"
    )
    random_rows, wrong_rows, wrong_share = gallery(run, reporter)
    epochs = [event for event in run.events() if event["event"] == "epoch"]
    page = template.render(
        version=__version__,
        run=run,
        recipe=run.recipe,
        recipe_toml=replace(run.recipe, data=replace(run.recipe.data, root=None)).to_toml(),
        environment=json.dumps(_environment(run), indent=2),
        result=result,
        headline=headline(run),
        curve=learning_curve(epochs, chosen=result["protocol"]["epoch"]),
        random_rows=random_rows,
        wrong_rows=wrong_rows,
        wrong_share=wrong_share,
        neighbours=NEIGHBOURS,
    )
    target = out or run.path / "report.html"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{target}: cannot write the page ({error.strerror}). Choose another place.") from None
    return target


def _environment(run: Run) -> dict[str, Any]:
    """What the run ran on, without the command line: a page is shared, and paths are nobody else's business."""
    stored = json.loads((run.path / "env.json").read_text(encoding="utf-8"))
    return {name: value for name, value in stored.items() if name != "command"}


def gallery(run: Run, reporter: Reporter) -> tuple[list[list[Item]], list[list[Item]], float]:
    """Queries with their nearest neighbours: some at random, some that fail, and the share that fails.

    Each row is the query followed by its neighbours. The draw is seeded, so the page shows the same each time.
    """
    table = sources.load(run.recipe.data, Reporter(quiet=True))
    _, holdout = split_for(table, run.recipe.data)
    queries, items = query_and_gallery(holdout.open())
    if queries.features is not None:  # ready features: there are no pictures to show
        return [], [], 0.0
    model = run.embedder()
    emb = model.embed(queries.images, reporter=reporter)
    if items is queries:
        near, similar = neighbours(emb, k=min(NEIGHBOURS, len(queries) - 1))
    else:
        near, similar = neighbours(emb, model.embed(items.images, reporter=reporter), k=min(NEIGHBOURS, len(items)))
    fails = items.labels[near[:, 0]] != queries.labels
    rng = np.random.default_rng(0)
    shown = rng.choice(len(queries), min(RIGHT, len(queries)), replace=False)
    wrong = rng.permutation(np.flatnonzero(fails))[:WRONG]
    rows = [[_row(queries, q, items, near[q], similar[q]) for q in chosen] for chosen in (shown, wrong)]
    return rows[0], rows[1], float(fails.mean())


def _row(queries: Table, query: int, items: Table, near: NDArray[Any], similar: NDArray[Any]) -> list[Item]:
    own = queries.labels[query]
    row = [Item(thumbnail(_pixels(queries, query)), queries.class_names[own], True, 1.0)]
    for other, similarity in zip(near, similar, strict=True):
        label = items.labels[other]
        row.append(Item(thumbnail(_pixels(items, other)), items.class_names[label], label == own, float(similarity)))
    return row


def _pixels(test: Table, row: int) -> NDArray[np.uint8]:
    return test.images.read(np.array([row]))[0].numpy()


def thumbnail(pixels: NDArray[np.uint8], most: int = 96) -> str:
    """An image [C, H, W] as a data URI."""
    image_module = need("PIL.Image", extra="report")
    image = image_module.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0))
    image.thumbnail((most, most))
    buffer = io.BytesIO()
    if len(pixels) == 1:
        image.save(buffer, "PNG", optimize=True)
        kind = "png"
    else:
        image.save(buffer, "JPEG", quality=80)
        kind = "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
