"""Runs against each other, on the same images: what one gained, query by query and class by class."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nearkin.analysis.hardness import class_table
from nearkin.data.images import Rows
from nearkin.errors import RunError
from nearkin.metrics.scores import compare
from nearkin.report.contents import Shown, rounded
from nearkin.report.view import View
from nearkin.training.evaluation import HEADLINE_METRICS
from nearkin.training.run import Run

EACH = 120  # queries listed as mended and as broken


def check_same_images(runs: Sequence[Run], views: Sequence[View]) -> None:
    """Refuse runs that were judged on different images: their numbers say nothing about each other."""
    for run, view in zip(runs[1:], views[1:], strict=True):
        first = views[0]
        if view.part != first.part:
            why = f"one was judged on {first.part} classes, the other on {view.part} classes"
        elif view.table.fingerprint != first.table.fingerprint:
            why = f"their data differ ({first.table.source} and {view.table.source})"
        elif not np.array_equal(view.table.row_numbers, first.table.row_numbers):
            why = f"their {first.part} classes differ ({first.table.split}; {view.table.split})"
        else:
            continue
        raise RunError(
            f"{runs[0].path} and {run.path} cannot be compared: {why}.\n"
            "Write a page for each, or train both on the same data and split (--data.split-seed)."
        )


def changed(first: View, second: View) -> tuple[Rows, Rows]:
    """The rows whose nearest neighbour became right with the second run, and wrong; the greatest change first."""
    before, after = first.scores.per_query["R@1"], second.scores.per_query["R@1"]
    change = second.scores.per_query["MAP@R"] - first.scores.per_query["MAP@R"]
    change = np.where(np.isnan(change), 0.0, change)  # lone queries, which MAP@R leaves out
    mended = np.flatnonzero((before == 0) & (after == 1))
    broken = np.flatnonzero((before == 1) & (after == 0))
    return first.asking[mended[np.argsort(-change[mended])]], first.asking[broken[np.argsort(change[broken])]]


def difference(first: View, second: View, shown: Shown) -> dict[str, Any]:
    """What the second run gains over the first: metrics with paired intervals, queries mended and broken, classes."""
    metrics = [
        compare(first.scores, second.scores, name) for name in HEADLINE_METRICS if name in first.scores.per_query
    ]
    mended, broken = changed(first, second)
    old = {row.label: row for row in class_table(first.scores)}
    classes = []
    for row in class_table(second.scores):
        was, now = old[row.label].means["R@1"], row.means["R@1"]
        if not (math.isnan(was) or math.isnan(now)):
            gain = round(now - was, 4)
            classes.append(
                {"class": int(row.label), "queries": row.queries, "before": round(was, 4), "after": round(now, 4)}
                | {"gain": gain}
            )
    return {
        "metrics": [
            {"name": d.name}
            | {key: rounded(getattr(d, key), 6) for key in ("first", "second", "difference")}
            | {"low": rounded(d.low, 6), "high": rounded(d.high, 6), "p": rounded(d.p_value)}
            for d in metrics
        ],
        "queries": len(first.asking),
        "mended": {"count": len(mended), "items": shown.items_of(mended[:EACH])},
        "broken": {"count": len(broken), "items": shown.items_of(broken[:EACH])},
        "classes": sorted(classes, key=lambda row: row["gain"]),
    }


def verdict(metrics: Sequence[Mapping[str, Any]], first: str, second: str) -> str:
    """One sentence on R@1, as far as the paired interval allows it to be said."""
    row = next(row for row in metrics if row["name"] == "R@1")
    if row["low"] is None:
        return "There are too few classes to say which of the two is better."
    low, high = 100 * row["low"], 100 * row["high"]
    if low > 0:
        return f"{second} is better than {first}: {low:.1f} to {high:.1f} points of R@1 on the same queries."
    if high < 0:
        return f"{second} is worse than {first}: {-high:.1f} to {-low:.1f} points of R@1 on the same queries."
    return (
        f"Which of {first} and {second} is better is not settled by this many classes: the difference is {low:+.1f} to "
        f"{high:+.1f} points of R@1."
    )


def settings_that_differ(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """The settings in which the recipes are not alike, with the value of each run."""
    flat = [_flat(run.recipe.to_dict()) for run in runs]
    names = dict.fromkeys(name for one in flat for name in one)
    rows = [(name, [str(one.get(name, "-")) for one in flat]) for name in names if name != "data.root"]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in values.items():
        out |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return out
