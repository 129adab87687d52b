"""Comparison of runs that were evaluated on the same images: per metric, per query and per class."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nearkin.analysis.hardness import class_table
from nearkin.data.images import Rows
from nearkin.errors import RunError
from nearkin.metrics.scores import compare
from nearkin.report.contents import PageItems, round_or_none
from nearkin.report.eval_data import EvalData
from nearkin.training.run import Run

MAX_CHANGED = 120  # queries listed as fixed, and as broken


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
