"""The contents of a page as plain values, the same that `--json` writes: runs, images and comparisons."""

import base64
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin._common.progress import Reporter
from nearkin.analysis.diagnostics import diagnose
from nearkin.analysis.hardness import class_table, confused_pairs, find_duplicates, hubness, hubs
from nearkin.analysis.label_errors import find_label_errors
from nearkin.data.images import Rows
from nearkin.errors import DataError, RunError
from nearkin.metrics.scores import compare
from nearkin.ops.pairs import pair_up
from nearkin.report import gallery
from nearkin.report.gallery import EvalData
from nearkin.training.autopilot import read_record
from nearkin.training.evaluation import score_embeddings
from nearkin.training.run import Run

MAX_CONFUSED_PAIRS, MAX_QUERIES_PER_PAIR = 30, 40
MAX_HUBS, MAX_LABEL_ERRORS, MAX_DUPLICATES = 20, 100, 60
MAX_CSV_ROWS = 1000
# A label is listed from this error probability on; at least this many are listed in any case.
MIN_ERROR_PROBABILITY, MIN_LABEL_ERRORS = 0.05, 12
DUPLICATE_THRESHOLDS = (0.96, 0.98, 0.99, 0.995, 0.999)  # cosine similarities, tried in this order
MAX_PLAUSIBLE_DUPLICATES = 200  # more pairs above a threshold cannot all be duplicates
HISTOGRAM_ROWS, HISTOGRAM_BINS = 1000, 50  # rows whose pairs are counted, and bins of their similarities
MAX_ROWS_BY_SIZE = 12_000  # recall by embedding size is computed for up to this many rows
MAX_CHANGED = 120  # queries listed as fixed, and as broken
DIAGNOSTICS = (
    *("tightness", "contrastive", "feature_entropy", "conditional_entropy"),
    *("label_entropy", "information", "information_bound", "effective_rank"),
    *("alignment", "uniformity", "separation", "hubness", "norm_mean"),
)


@dataclass(frozen=True)
class PageItems:
    """The rows on a page. An item is a position in `rows`."""

    rows: Rows  # the rows on the page, in order
    item_of_row: NDArray[np.int64]  # the item of each row [N], -1 for rows that are not on the page

    @staticmethod
    def from_rows(rows: Rows, total: int) -> "PageItems":
        item_of_row = np.full(total, -1, np.int64)
        item_of_row[rows] = np.arange(len(rows))
        return PageItems(rows, item_of_row)

    def items_of(self, rows: Any) -> list[int]:
        """Return the items of rows, without those that are not on the page."""
        return [int(item) for item in self.item_of_row[np.asarray(rows, np.int64)] if item >= 0]

    def place(self, entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Replace the row in the "item" of each entry by its item; leave out entries whose row is not on the page."""
        return [{**entry, "item": item} for entry in entries for item in self.items_of([entry["item"]])]


def round_or_none(value: float, digits: int = 4) -> float | None:
    """Round a number for JSON; NaN and infinity become None."""
    return round(float(value), digits) if math.isfinite(value) else None


def summarize_run(run: Run) -> dict[str, Any]:
    """Collect what a page says about a finished run, without paths and the command line: pages are shared."""
    result = run.result
    assert result is not None
    events = run.events()
    data, model = run.recipe.data, run.recipe.model
    weights = ",".join(Path(name).name for name in model.weights.split(","))
    recipe = replace(run.recipe, data=replace(data, root=None), model=replace(model, weights=weights))
    environment = {name: value for name, value in run.stored_environment.items() if name != "command"}
    return {
        "key": run.path.resolve().name,
        "loss": recipe.loss.name,
        "result": result,
        "epochs": [
            {name: event[name] for name in ("epoch", "loss", "val")}
            | {"diagnosis": {name: (event.get("diagnosis") or {}).get(name) for name in DIAGNOSTICS}}
            for event in events
            if event["event"] == "epoch"
        ],
        "search": read_record(run),
        "alarms": [{"epoch": e["epoch"], "text": e["text"]} for e in events if e["event"] == "alarm"],
        "recipe": recipe.to_toml(),
        "environment": environment,
    }


def find_highlights(data: EvalData) -> dict[str, Any]:
    """Find what a page lists: entries of `analyze`, with rows of the table where those have items."""
    labels, queries = data.table.labels, data.queries
    near = (data.neighbours[queries], labels[queries], labels)
    nearest = labels[data.neighbours[queries, 0]]
    return {
        "example_queries": gallery.example_queries(data, max_queries=gallery.MAX_QUERIES),
        "confused_pairs": [
            {"class": int(pair.label), "confused_with": int(pair.taken_for), "count": pair.count}
            | {"share": round(pair.share, 4)}
            | {"items": queries[(near[1] == pair.label) & (nearest == pair.taken_for)][:MAX_QUERIES_PER_PAIR]}
            for pair in confused_pairs(*near, top=MAX_CONFUSED_PAIRS)
        ],
        "hubs": [{"item": h.item, "occurrences": h.lists, "wrong_class": h.wrong} for h in hubs(*near, top=MAX_HUBS)],
        "label_errors": _label_errors(data),
        "near_duplicates": _near_duplicates(data),
    }


def listed_rows(found: Mapping[str, Any]) -> Rows:
    """Return all rows that a page lists, most important first, with repeats."""
    parts = [*found["example_queries"].values(), [entry["item"] for entry in found["label_errors"]["suspects"]]]
    parts += [pair["items"] for pair in found["near_duplicates"]["pairs"]]
    parts += [[hub["item"] for hub in found["hubs"]], *(pair["items"] for pair in found["confused_pairs"])]
    return np.concatenate([np.asarray(rows, np.int64) for rows in parts])


def _label_errors(data: EvalData) -> dict[str, Any]:
    """Suspected label errors, and more of them as a CSV file."""
    try:
        errors = find_label_errors(data.emb, data.table.labels)
    except DataError as error:  # every class is a singleton
        return {"unavailable": str(error), "suspects": [], "csv": ""}
    first = errors.order[np.isfinite(errors.score[errors.order])][:MAX_LABEL_ERRORS]
    likely = int((errors.probability[first] >= MIN_ERROR_PROBABILITY).sum())
    names = [data.row_name(row) for row in range(len(data))]
    top = min(MAX_CSV_ROWS, int(np.isfinite(errors.score).sum()))
    csv = errors.to_csv(None, paths=names, class_names=data.table.class_names, top=top)
    return {
        "unavailable": "",
        "share": round_or_none(errors.error_rate),
        "expected": round_or_none(errors.expected(MAX_LABEL_ERRORS), 1),
        "suspects": [
            {
                "item": row,
                "suggested": int(errors.suggested[row]),
                "probability": round_or_none(errors.probability[row]),
            }
            for row in first[: max(MIN_LABEL_ERRORS, likely)]
        ],
        "csv": "data:text/csv;charset=utf-8;base64," + base64.b64encode(csv).decode(),
        "csv_rows": top,
    }


def _near_duplicates(data: EvalData) -> dict[str, Any]:
    """Search the features of the untrained backbone where they are known, else the run's embeddings."""
    by_features = data.table.features is not None
    vectors, found = data.table.features if by_features else data.emb, None
    for threshold in DUPLICATE_THRESHOLDS:
        with suppress(DataError):  # too many rows are that similar to be duplicates
            found = find_duplicates(vectors, data.table.labels, threshold=threshold, max_pairs=MAX_PLAUSIBLE_DUPLICATES)
            break
    return {
        "threshold": None if found is None else threshold,
        "by_features": by_features,
        "count": None if found is None else len(found),
        "pairs": [
            {"items": [pair.first, pair.second], "similarity": round(pair.similarity, 4), "exact": pair.exact}
            for pair in (found or [])[:MAX_DUPLICATES]
        ],
    }


def describe_items(data: EvalData, page_items: PageItems) -> dict[str, Any]:
    return {
        "split": data.split,
        "total": len(data),
        "class_names": list(data.table.class_names),
        "class_sizes": np.bincount(data.table.labels, minlength=len(data.table.class_names)).tolist(),
        "labels": data.table.labels[page_items.rows].tolist(),
        "names": [data.row_name(int(row)) for row in page_items.rows],
    }


def analyze(
    data: EvalData, found: Mapping[str, Any], page_items: PageItems, *, tsne: bool, reporter: Reporter
) -> dict[str, Any]:
    """Collect what a page shows about the images of one run. Numbers are rounded for display.

    Images are given as items. A neighbour that is not on the page is given as -1 - its class. Similarities are in
    thousandths.
    """
    neighbours = data.neighbours[page_items.rows]
    items = page_items.item_of_row[neighbours]
    pairs = [{**pair, "items": page_items.items_of(pair["items"])} for pair in found["near_duplicates"]["pairs"]]
    return {
        "neighbours": np.where(items < 0, -1 - data.table.labels[neighbours], items).tolist(),
        "similarities": np.rint(1000 * data.similarities[page_items.rows]).astype(int).tolist(),
        "R@1": [None if math.isnan(v) else int(v) for v in data.per_row("R@1")[page_items.rows]],
        "MAP@R": [round_or_none(v, 3) for v in data.per_row("MAP@R")[page_items.rows]],
        "example_queries": {name: page_items.items_of(rows) for name, rows in found["example_queries"].items()},
        "classes": _class_rows(data),
        "confused_pairs": [{**pair, "items": page_items.items_of(pair["items"])} for pair in found["confused_pairs"]],
        "hubs": page_items.place(found["hubs"]),
        "hubness": round(hubness(data.neighbours[data.queries], len(data)), 2),
        "similarity_histogram": _similarity_histogram(data),
        "recall_by_size": _recall_by_size(data, reporter),
        "map": _map(data, page_items, tsne, reporter),
        "label_errors": found["label_errors"] | {"suspects": page_items.place(found["label_errors"]["suspects"])},
        "near_duplicates": found["near_duplicates"] | {"pairs": [pair for pair in pairs if len(pair["items"]) == 2]},
    }


def _similarity_histogram(data: EvalData) -> dict[str, Any]:
    """Histograms of the similarities of positive and negative pairs over their common range."""
    rows = torch.from_numpy(gallery.sample(data.table.labels, np.arange(len(data)), max_rows=HISTOGRAM_ROWS))
    labels = torch.from_numpy(data.table.labels)[rows]
    diagnosis = diagnose(data.emb[rows], labels)
    pairs = pair_up(data.emb[rows], labels)
    groups = [pairs.sim[pairs.pos].numpy(), pairs.sim[pairs.neg].numpy()]
    ends = np.array([np.quantile(group, [0.001, 0.999]) for group in groups if len(group)])
    low, high = (float(ends[:, 0].min()), float(ends[:, 1].max())) if len(ends) else (-1.0, 1.0)
    high = min(1.0, math.ceil(high * 50) / 50)
    low = min(math.floor(low * 50) / 50, high - 0.02)
    edges = np.linspace(low, high, HISTOGRAM_BINS + 1)
    positive, negative = (np.histogram(np.clip(group.astype(float), low, high), edges)[0] for group in groups)
    return {
        "low": low,
        "high": high,
        "positive": positive.tolist(),
        "negative": negative.tolist(),
        "separation": round_or_none(diagnosis.separation),
        "images": len(rows),
    }


def _class_rows(data: EvalData) -> list[dict[str, Any]]:
    """Every class with the class it is most often confused with, hardest first."""
    confused: dict[int, tuple[int, int]] = {}
    for pair in confused_pairs(data.neighbours[data.queries], data.scores.labels, data.table.labels, top=None):
        confused.setdefault(int(pair.label), (int(pair.taken_for), pair.count))
    rows = []
    for row in class_table(data.scores):
        other, count = confused.get(int(row.label), (None, 0))
        means = {name: round_or_none(value) for name, value in row.means.items()}
        rows.append({"class": int(row.label), "queries": row.queries, **means, "confused_with": other, "count": count})
    return rows


def _recall_by_size(data: EvalData, reporter: Reporter) -> list[dict[str, Any]]:
    """R@1 of the embeddings truncated to their first 8, 16, 32, ... dimensions, and of all dimensions."""
    dim = data.emb.shape[1]
    if len(data) > MAX_ROWS_BY_SIZE:
        return []
    sizes = [size for size in (8, 16, 32, 64, 128, 256, 512, 1024, 2048) if size < dim]
    rows = []
    with reporter.track("recall by size", len(sizes), unit="size") as bar:
        for size in sizes:
            rows.append({"size": size, "R@1": round_or_none(score_embeddings(data.table, data.emb[:, :size])["R@1"])})
            bar.advance()
    return [*rows, {"size": dim, "R@1": round_or_none(data.scores["R@1"])}]


def _map(data: EvalData, page_items: PageItems, tsne: bool, reporter: Reporter) -> dict[str, Any]:
    rows = gallery.sample(data.table.labels, page_items.rows)
    emb = data.emb[torch.from_numpy(rows)]
    points = {"PCA": gallery.pca(emb)}
    if tsne:
        reporter.info(f"t-SNE of {len(rows):,} points")
        points["t-SNE"] = gallery.tsne(emb)
    return {"items": page_items.items_of(rows), "projections": {name: xy.tolist() for name, xy in points.items()}}


def check_same_images(runs: Sequence[Run], datasets: Sequence[EvalData]) -> None:
    first = datasets[0]
    for run, data in zip(runs[1:], datasets[1:], strict=True):
        if data.split != first.split:
            reason = f"one was evaluated on {first.split} classes, the other on {data.split} classes"
        elif data.table.fingerprint != first.table.fingerprint:
            reason = f"their data differ ({first.table.source} and {data.table.source})"
        elif not np.array_equal(data.table.row_numbers, first.table.row_numbers):
            reason = f"their {first.split} classes differ ({first.table.split}; {data.table.split})"
        else:
            continue
        raise RunError(
            f"{runs[0].path} and {run.path} cannot be compared: {reason}.\n"
            "Write a page for each, or train both on the same data and split (--data.split-seed)."
        )


def changed_queries(first: EvalData, second: EvalData) -> tuple[Rows, Rows]:
    """Rows whose nearest neighbour is right in one run only: fixed and broken by the second, largest change first."""
    before, after = first.scores.per_query["R@1"], second.scores.per_query["R@1"]
    change = second.scores.per_query["MAP@R"] - first.scores.per_query["MAP@R"]
    change = np.where(np.isnan(change), 0.0, change)  # singleton queries have no MAP@R
    fixed = np.flatnonzero((before == 0) & (after == 1))
    broken = np.flatnonzero((before == 1) & (after == 0))
    return first.queries[fixed[np.argsort(-change[fixed])]], first.queries[broken[np.argsort(change[broken])]]


def compare_runs(first: EvalData, second: EvalData, page_items: PageItems) -> dict[str, Any]:
    metrics = []
    for name in first.scores.shown():
        if name in second.scores.per_query and name not in ("RP", "MRR"):
            found = compare(first.scores, second.scores, name)
            keys = ("first", "second", "difference", "low", "high")
            rounded = {key: round_or_none(getattr(found, key), 6) for key in keys}
            metrics.append({"name": name, **rounded, "p_value": round_or_none(found.p_value)})
    fixed, broken = changed_queries(first, second)
    return {
        "metrics": metrics,
        "queries": len(first.queries),
        "fixed": {"count": len(fixed), "items": page_items.items_of(fixed[:MAX_CHANGED])},
        "broken": {"count": len(broken), "items": page_items.items_of(broken[:MAX_CHANGED])},
        "classes": _class_gains(first, second),
    }


def _class_gains(first: EvalData, second: EvalData) -> list[dict[str, Any]]:
    """R@1 of each class in both runs, smallest gain first."""
    first_rows = {row.label: row for row in class_table(first.scores)}
    classes = []
    for row in class_table(second.scores):
        before, after = first_rows[row.label].means["R@1"], row.means["R@1"]
        if math.isnan(before) or math.isnan(after):
            continue
        gains = {"before": round(before, 4), "after": round(after, 4), "gain": round(after - before, 4)}
        classes.append({"class": int(row.label), "queries": row.queries, **gains})
    return sorted(classes, key=lambda row: row["gain"])


def comparison_headline(metrics: Sequence[Mapping[str, Any]], first: str, second: str) -> str:
    """Say in one sentence which run has the higher R@1, and claim no more than the paired interval supports."""
    row = next(row for row in metrics if row["name"] == "R@1")
    if row["low"] is None:
        return f"Too few classes to compare {first} and {second}."
    low, high = 100 * row["low"], 100 * row["high"]
    if low > 0:
        return f"{second} is better than {first}: {low:.1f} to {high:.1f} points of R@1 on the same queries."
    if high < 0:
        return f"{second} is worse than {first}: {-high:.1f} to {-low:.1f} points of R@1 on the same queries."
    return (
        f"The difference between {first} and {second} is not significant: {low:+.1f} to {high:+.1f} points of R@1 on "
        "the same queries."
    )


def differing_settings(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    recipes = [_flatten(run.recipe.to_dict()) for run in runs]
    names = dict.fromkeys(name for recipe in recipes for name in recipe)
    rows = [(name, [str(recipe.get(name, "-")) for recipe in recipes]) for name in names if name != "data.root"]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat
