"""What a page says of a run, as plain values: the same that `--json` writes."""

from __future__ import annotations

import base64
import json
import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin._common.progress import Reporter
from nearkin.analysis.diagnostics import diagnose
from nearkin.analysis.hardness import class_table, confused_pairs, hubness
from nearkin.data.images import Rows
from nearkin.ops.pairs import pair_up
from nearkin.report import projection
from nearkin.report.lists import COPIES, SUSPECTS, Copies, Lists
from nearkin.report.view import View
from nearkin.training.evaluation import score_embeddings
from nearkin.training.run import Run

CSV_ROWS = 1000
PAIRED, BINS = 1000, 50  # rows whose pairs are looked at, and bins of their similarities
SIZES_UP_TO = 12_000  # rows for which recall by embedding size is still cheap


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


def summary(run: Run) -> dict[str, Any]:
    """Learning, alarms, protocol, recipe and environment. Paths and the command line stay out: a page is shared."""
    result = run.result
    assert result is not None
    events = run.events()
    data, model = run.recipe.data, run.recipe.model
    recipe = replace(run.recipe, data=replace(data, root=None), model=replace(model, weights=Path(model.weights).name))
    stored = run.path / "env.json"
    environment = json.loads(stored.read_text(encoding="utf-8")) if stored.exists() else {}
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
        "sizes": np.bincount(view.table.labels, minlength=len(view.table.class_names)).tolist(),
        "label": view.table.labels[shown.rows].tolist(),
        "name": [view.row_name(int(row)) for row in shown.rows],
    }


def findings(view: View, lists: Lists, shown: Shown, *, tsne: bool, reporter: Reporter) -> dict[str, Any]:
    """All that a page tells of one run's images. Items stand for rows; numbers are rounded to what is shown.

    A neighbour that is not on the page is known by its class alone: it stands as -1 less that class.
    """
    near = view.near[shown.rows]
    place = shown.place[near]
    return {
        "near": np.where(place < 0, -1 - view.table.labels[near], place).tolist(),
        "similar": np.rint(1000 * view.similar[shown.rows]).astype(int).tolist(),
        "recall": [None if math.isnan(v) else int(v) for v in view.per_row("R@1")[shown.rows]],
        "precision": [rounded(v, 3) for v in view.per_row("MAP@R")[shown.rows]],
        "views": {name: shown.items_of(rows) for name, rows in lists.views.items()},
        "classes": _classes(view),
        "pairs": [
            {"class": int(pair.label), "taken_for": int(pair.taken_for), "count": pair.count}
            | {"share": round(pair.share, 4), "items": shown.items_of(rows)}
            for pair, rows in lists.pairs
        ],
        "hubs": [
            {"item": item, "lists": hub.lists, "wrong": hub.wrong}
            for hub in lists.hubs
            for item in shown.items_of([hub.item])
        ],
        "hubness": round(hubness(view.near[view.asking], len(view)), 2),
        "similarity": _similarity(view),
        "sizes": _sizes(view, reporter),
        "map": _map(view, shown, tsne, reporter),
        "suspects": _suspects(view, lists, shown),
        "copies": _copies(lists.copies, shown),
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


def _sizes(view: View, reporter: Reporter) -> list[dict[str, Any]]:
    """R@1 of the first 8, 16, 32, ... numbers of each vector, and of all."""
    dim = view.emb.shape[1]
    if len(view) > SIZES_UP_TO:
        return []
    sizes = [size for size in (8, 16, 32, 64, 128, 256, 512, 1024, 2048) if size < dim]
    found = []
    with reporter.track("recall by size", len(sizes), unit="size") as bar:
        for size in sizes:
            found.append({"size": size, "R@1": rounded(score_embeddings(view.table, view.emb[:, :size])["R@1"])})
            bar.advance()
    return [*found, {"size": dim, "R@1": rounded(view.scores["R@1"])}]


def _map(view: View, shown: Shown, tsne: bool, reporter: Reporter) -> dict[str, Any]:
    rows = projection.sample(view.table.labels, shown.rows)
    made = {"PCA": projection.pca(view.emb[torch.from_numpy(rows)])}
    if tsne:
        reporter.info(f"t-SNE of {len(rows):,} points")
        made["t-SNE"] = projection.tsne(view.emb[torch.from_numpy(rows)])
    return {"items": shown.items_of(rows), "kinds": {name: points.tolist() for name, points in made.items()}}


def _suspects(view: View, lists: Lists, shown: Shown) -> dict[str, Any]:
    """Labels that look wrong, with all of the first ones as a CSV file to work through."""
    found = lists.suspects
    if isinstance(found, str):
        return {"why": found, "rows": [], "csv": ""}
    names = [view.row_name(row) for row in range(len(view))]
    top = min(CSV_ROWS, int(np.isfinite(found.score).sum()))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "suspects.csv"
        found.to_csv(path, paths=names, class_names=view.table.class_names, top=top)
        written = path.read_bytes()
    return {
        "why": "",
        "share": rounded(found.error_rate),
        "expected": rounded(found.expected(SUSPECTS), 1),
        "rows": [
            {"item": item, "suggested": int(found.suggested[row]), "probability": rounded(found.probability[row])}
            for row in lists.listed
            for item in shown.items_of([row])
        ],
        "csv": "data:text/csv;charset=utf-8;base64," + base64.b64encode(written).decode(),
        "csv_rows": top,
    }


def _copies(found: Copies, shown: Shown) -> dict[str, Any]:
    pairs = [(shown.items_of([pair.first, pair.second]), pair) for pair in (found.pairs or [])[:COPIES]]
    return {
        "threshold": found.threshold,
        "by_features": found.by_features,
        "count": None if found.pairs is None else len(found.pairs),
        "rows": [
            {"items": items, "similarity": round(pair.similarity, 4), "exact": pair.exact}
            for items, pair in pairs
            if len(items) == 2
        ],
    }
