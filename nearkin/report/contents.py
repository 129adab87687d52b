"""What a page says of a run, as plain values: the same that `--json` writes."""

from __future__ import annotations

import base64
import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin.data.images import Rows
from nearkin.diagnostics import diagnose
from nearkin.difficulty import class_table, confused_pairs, hubness, hubs
from nearkin.errors import DataError
from nearkin.evaluate import scores_of
from nearkin.pairs import pair_up
from nearkin.progress import Reporter
from nearkin.report import gallery, projection
from nearkin.report.view import View
from nearkin.runs import Run
from nearkin.suspects import Duplicate, find_duplicates, find_suspects

PAIRS, HUBS, SUSPECTS, COPIES = 30, 20, 100, 60  # how many of each a page lists
CSV_ROWS = 1000
LIKELY, FEWEST = 0.05, 12  # chance from which a label is listed as suspect, and how many are listed in any case
PAIRED, BINS = 1000, 50  # rows whose pairs are looked at, and bins of their similarities
SIZES_UP_TO = 12_000  # rows for which recall by embedding size is still cheap
MANY = 200  # pairs above a threshold that cannot all be copies
THRESHOLDS = (0.96, 0.98, 0.99, 0.995, 0.999)  # cosines above which rows pass for copies


@dataclass(frozen=True)
class Shown:
    """The rows that are on the page. An item is a place in `rows`; `items_of` finds the items of rows."""

    rows: Rows
    place: NDArray[np.int64]  # [N] the item of each row, -1 for those that are not shown

    @staticmethod
    def of(rows: Rows, total: int) -> Shown:
        place = np.full(total, -1, np.int64)
        place[rows] = np.arange(len(rows))
        return Shown(rows, place)

    def items_of(self, rows: Any) -> list[int]:
        found = self.place[np.asarray(rows, np.int64)]
        return [int(item) for item in found if item >= 0]


def rounded(value: float, digits: int = 4) -> float | None:
    """For JSON, which has no NaN: None stands for it.

    >>> rounded(0.123456), rounded(math.nan)
    (0.1235, None)
    """
    return round(float(value), digits) if math.isfinite(value) else None


# --- what the run folder says ----------------------------------------------------------------------------------------


def story(run: Run) -> dict[str, Any]:
    """Learning, alarms, protocol, recipe and environment. Paths and the command line stay out: a page is shared."""
    result = run.result
    assert result is not None
    events = run.events()
    data, model = run.recipe.data, run.recipe.model
    recipe = replace(run.recipe, data=replace(data, root=None), model=replace(model, weights=Path(model.weights).name))
    environment = json.loads((run.path / "env.json").read_text(encoding="utf-8"))
    environment.pop("command", None)
    return {
        "key": run.path.resolve().name,
        "loss": recipe.loss.name,
        "result": result,
        "epochs": [_epoch(event) for event in events if event["event"] == "epoch"],
        "alarms": [{"epoch": e["epoch"], "text": e["text"]} for e in events if e["event"] == "alarm"],
        "recipe": recipe.to_toml(),
        "environment": environment,
    }


DIAGNOSED = (
    "tightness",
    "contrastive",
    "information",
    "information_bound",
    "effective_rank",
    "alignment",
    "uniformity",
    "separation",
    "hubness",
    "norm_mean",
)


def _epoch(event: dict[str, Any]) -> dict[str, Any]:
    seen = event.get("diagnosis") or {}
    return {
        "epoch": event["epoch"],
        "loss": event["loss"],
        "val": event["val"],
        "diagnosis": {name: seen.get(name) for name in DIAGNOSED},
    }


# --- what the images say ---------------------------------------------------------------------------------------------


def items(view: View, shown: Shown) -> dict[str, Any]:
    """The rows on the page, shared by all runs of it."""
    return {
        "part": view.part,
        "total": len(view),
        "classes": list(view.table.class_names),
        "label": view.table.labels[shown.rows].tolist(),
        "name": [view.row_name(int(row)) for row in shown.rows],
    }


def findings(view: View, shown: Shown, *, tsne: bool, reporter: Reporter) -> dict[str, Any]:
    """All that a page tells of one run's images. Items stand for rows; numbers are rounded to what is shown."""
    labels = view.table.labels
    recall, precision = view.per_row("R@1")[shown.rows], view.per_row("MAP@R")[shown.rows]
    near = shown.place[view.near[shown.rows]]
    whole: list[bool] = np.all(
        near >= 0, axis=1
    ).tolist()  # only items whose neighbours are all on the page can be asked for
    asked = view.near[view.asking]
    return {
        "near": [row.tolist() if full else None for row, full in zip(near, whole, strict=True)],
        "similar": [
            np.rint(1000 * row).astype(int).tolist() if full else None
            for row, full in zip(view.similar[shown.rows], whole, strict=True)
        ],
        "recall": [None if math.isnan(v) else int(v) for v in recall],
        "precision": [rounded(v, 3) for v in precision],
        "views": {name: shown.items_of(rows) for name, rows in gallery.views(view).items()},
        "classes": _classes(view),
        "pairs": _pairs(view, shown),
        "hubs": [
            {"item": item, "lists": hub.lists, "wrong": hub.wrong}
            for hub in hubs(asked, labels[view.asking], labels, top=HUBS)
            for item in shown.items_of([hub.item])
        ],
        "hubness": round(hubness(asked, len(view)), 2),
        "similarity": _similarity(view),
        "sizes": _sizes(view, reporter),
        "map": _map(view, shown, tsne, reporter),
        "suspects": _suspects(view, shown),
        "copies": _copies(view, shown),
    }


def _similarity(view: View) -> dict[str, Any]:
    """How similar pairs of one class and of two classes are, over the range that they take."""
    rows = torch.from_numpy(projection.sample(view.table.labels, np.arange(len(view)), most=PAIRED))
    labels = torch.from_numpy(view.table.labels)[rows]
    seen = diagnose(view.emb[rows], labels)
    pairs = pair_up(view.emb[rows], labels)
    positive, negative = pairs.sim[pairs.pos].numpy(), pairs.sim[pairs.neg].numpy()
    ends = np.array([np.quantile(each, [0.001, 0.999]) for each in (positive, negative) if len(each)])
    low, high = (float(ends[:, 0].min()), float(ends[:, 1].max())) if len(ends) else (-1.0, 1.0)
    high = min(1.0, math.ceil(high * 50) / 50)
    low = min(math.floor(low * 50) / 50, high - 0.02)
    edges = np.linspace(low, high, BINS + 1)
    counts = [np.histogram(np.clip(each.astype(float), low, high), edges)[0].tolist() for each in (positive, negative)]
    return {
        "low": low,
        "high": high,
        "positive": counts[0],
        "negative": counts[1],
        "separation": rounded(seen.separation),
        "rows": len(rows),
    }


def _classes(view: View) -> list[dict[str, Any]]:
    """Every class with what its queries are most often taken for, hardest first."""
    taken: dict[int, tuple[int, int]] = {}
    for pair in confused_pairs(view.near[view.asking], view.scores.labels, view.table.labels, top=None):
        taken.setdefault(int(pair.label), (int(pair.taken_for), pair.count))
    rows = []
    for row in class_table(view.scores):
        other, count = taken.get(int(row.label), (None, 0))
        means = {name: rounded(value) for name, value in row.means.items()}
        rows.append({"class": int(row.label), "queries": row.queries, **means, "taken_for": other, "times": count})
    return rows


def _pairs(view: View, shown: Shown) -> list[dict[str, Any]]:
    labels, asking = view.table.labels, view.asking
    first = labels[view.near[asking, 0]]
    found = []
    for pair in confused_pairs(view.near[asking], labels[asking], labels, top=PAIRS):
        rows = asking[(labels[asking] == pair.label) & (first == pair.taken_for)]
        found.append(
            {
                "class": int(pair.label),
                "taken_for": int(pair.taken_for),
                "count": pair.count,
                "share": round(pair.share, 4),
                "items": shown.items_of(rows[: gallery.EACH]),
            }
        )
    return found


def _sizes(view: View, reporter: Reporter) -> list[dict[str, Any]]:
    """R@1 of the first 8, 16, 32, ... numbers of each vector, and of all."""
    dim = view.emb.shape[1]
    if len(view) > SIZES_UP_TO:
        return []
    sizes = [size for size in (8, 16, 32, 64, 128, 256, 512, 1024, 2048) if size < dim]
    found = []
    with reporter.track("recall by size", len(sizes), unit="size") as bar:
        for size in sizes:
            found.append({"size": size, "R@1": rounded(scores_of(view.table, view.emb[:, :size])["R@1"])})
            bar.advance()
    return [*found, {"size": dim, "R@1": rounded(view.scores["R@1"])}]


def _map(view: View, shown: Shown, tsne: bool, reporter: Reporter) -> dict[str, Any]:
    rows = projection.sample(view.table.labels, shown.rows)
    made = {"PCA": projection.pca(view.emb[torch.from_numpy(rows)])}
    if tsne:
        reporter.say(f"t-SNE of {len(rows):,} points")
        made["t-SNE"] = projection.tsne(view.emb[torch.from_numpy(rows)])
    return {"items": shown.items_of(rows), "kinds": {name: points.tolist() for name, points in made.items()}}


def _suspects(view: View, shown: Shown) -> dict[str, Any]:
    """Labels that look wrong, with all of the first ones as a CSV file to work through."""
    try:
        found = find_suspects(view.emb, view.table.labels)
    except DataError as error:  # each class has one row
        return {"why": str(error), "rows": [], "csv": ""}
    names = [view.row_name(row) for row in range(len(view))]
    top = min(CSV_ROWS, int(np.isfinite(found.score).sum()))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "suspects.csv"
        found.to_csv(path, paths=names, class_names=view.table.class_names, top=top)
        written = path.read_bytes()
    listed = max(FEWEST, int((found.probability[found.order[: min(top, SUSPECTS)]] >= LIKELY).sum()))
    rows = [row for row in found.order[: min(top, listed)].tolist() if shown.place[row] >= 0]
    return {
        "why": "",
        "share": rounded(found.share),
        "expected": rounded(found.expected(SUSPECTS), 1),
        "rows": [
            {
                "item": int(shown.place[row]),
                "suggested": int(found.suggested[row]),
                "probability": rounded(found.probability[row]),
            }
            for row in rows
        ],
        "csv": "data:text/csv;charset=utf-8;base64," + base64.b64encode(written).decode(),
        "csv_rows": top,
    }


def _copies(view: View, shown: Shown) -> dict[str, Any]:
    """Rows that are the same or nearly, by the features of a backbone that was not trained where there are those."""
    by_features = view.table.features is not None
    vectors = view.table.features if by_features else view.emb
    for threshold in THRESHOLDS:
        try:
            found: Sequence[Duplicate] = find_duplicates(vectors, view.table.labels, threshold=threshold, most=MANY)
        except DataError:
            continue
        listed = found[:COPIES]
        return {
            "threshold": threshold,
            "by_features": by_features,
            "count": len(found),
            "rows": [
                {"items": shown.items_of([d.first, d.second]), "similarity": round(d.similarity, 4), "exact": d.exact}
                for d in listed
                if len(shown.items_of([d.first, d.second])) == 2
            ],
        }
    return {"threshold": None, "by_features": by_features, "count": None, "rows": []}
