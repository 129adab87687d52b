"""Figures for a paper, as PNG and SVG, all in one style: told apart by every kind of colour vision, and in grey."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from nearkin.errors import RunError, import_extra
from nearkin.report.page import Report

T = TypeVar("T")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")  # Okabe and Ito's
DASHES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1)), (0, (1, 3)))
STYLE = {
    "svg.hashsalt": "nearkin",  # the same report gives the same file
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "text.parse_math": False,  # a class may be called $x$
}
WIDTH, HEIGHT = 4.6, 3.0  # inches
CLASSES = 40  # most bars: with more classes the hardest and the easiest


def write_figures(report: Report, folder: Path) -> list[Path]:
    """Every figure that the report has the numbers for, each as .png and .svg; returns what was written."""
    drawings: dict[str, Callable[[Any, Report], bool]] = {
        "learning": _learning,
        "similarity": _similarity,
        "size": _size,
        "classes": _classes,
        "comparison": _comparison,
    }
    return write_drawings(drawings, report, folder)


def write_drawings(drawings: Mapping[str, Callable[[Any, T], bool]], report: T, folder: Path) -> list[Path]:
    """Draw each onto a figure of the common style and write it as .png and .svg; one that returns False is left out."""
    figure = import_extra("matplotlib.figure", extra="report").Figure
    context = import_extra("matplotlib", extra="report").rc_context
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, draw in drawings.items():
            with context(STYLE), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Glyph .* missing")  # a class name in a script the font lacks
                picture = figure(figsize=(WIDTH, HEIGHT), layout="constrained")
                if not draw(picture, report):
                    continue
                for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None})):
                    path = folder / f"{name}{suffix}"
                    picture.savefig(path, dpi=200, metadata=metadata, facecolor="white")
                    written.append(path)
    except OSError as error:
        raise RunError(f"{folder}: cannot be written ({error.strerror}). Give another folder with --figures.") from None
    return written


def _learning(picture: Any, report: Report) -> bool:
    axes = picture.add_subplot()
    drawn = False
    for at, (name, told) in enumerate(zip(report.names, report.stories, strict=True)):
        epochs = [event for event in told["epochs"] if event["val"] is not None]
        if not epochs:
            continue
        x, y = [e["epoch"] for e in epochs], [100 * e["val"]["R@1"] for e in epochs]
        axes.plot(x, y, color=COLOURS[at % 6], linestyle=DASHES[at % 6], marker="o", label=name)
        kept = told["result"]["protocol"]["epoch"]
        if kept in x:
            axes.plot([kept], [y[x.index(kept)]], "o", markersize=9, markerfacecolor="none", color=COLOURS[at % 6])
        drawn = True
    axes.set_xlabel("epoch (ring: kept)")
    axes.set_ylabel("R@1 on validation classes, %")
    if drawn:
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend()
    return drawn


def _similarity(picture: Any, report: Report) -> bool:
    found = [(n, f["similarity"]) for n, f in zip(report.names, report.findings, strict=False)]
    found = [(name, one) for name, one in found if sum(one["positive"]) and sum(one["negative"])]
    if not found:
        return False
    picture.set_size_inches(WIDTH, 0.8 + 2.0 * len(found))
    every = picture.subplots(len(found), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, one) in zip(every, found, strict=True):
        edges = np.linspace(one["low"], one["high"], len(one["positive"]) + 1)
        for at, (kind, counts) in enumerate((("same class", one["positive"]), ("other class", one["negative"]))):
            share = 100 * np.array(counts) / sum(counts)
            axes.stairs(share, edges, fill=True, color=COLOURS[at], alpha=0.3)
            axes.stairs(share, edges, color=COLOURS[at], linestyle=DASHES[at], label=kind)
        axes.set_ylabel("pairs of the kind, %")
        axes.set_title(name, fontsize=9, loc="left")
    every[0].legend()
    every[-1].set_xlabel("cosine similarity")
    return True


def _size(picture: Any, report: Report) -> bool:
    found = [(n, f["sizes"]) for n, f in zip(report.names, report.findings, strict=False) if len(f["sizes"]) > 1]
    axes = picture.add_subplot()
    for at, (name, sizes) in enumerate(found):
        x, y = [row["size"] for row in sizes], [100 * row["R@1"] for row in sizes]
        axes.plot(x, y, color=COLOURS[at % 6], linestyle=DASHES[at % 6], marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("first numbers of each vector")
    axes.set_ylabel("R@1, %")
    if found:
        axes.legend()
    return bool(found)


def _classes(picture: Any, report: Report) -> bool:
    """R@1 of each class of the first run; of many classes the hardest and the easiest."""
    if report.items is None:
        return False
    rows = [row for row in report.findings[0]["classes"] if row["R@1"] is not None]
    cut = len(rows) > CLASSES
    rows = rows[: CLASSES // 2] + rows[-CLASSES // 2 :] if cut else rows
    picture.set_size_inches(WIDTH, 0.8 + 0.16 * len(rows))
    axes = picture.add_subplot()
    names = [report.items["classes"][row["class"]] for row in rows]
    places = np.arange(len(rows)) + (np.arange(len(rows)) >= CLASSES // 2 if cut else 0)
    axes.barh(places, [100 * row["R@1"] for row in rows], color=COLOURS[0], height=0.7)
    axes.set_yticks(places, [name if len(name) <= 28 else f"{name[:27]}…" for name in names], fontsize=7)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 100)
    axes.set_xlabel("R@1, %" + (f" (the {CLASSES // 2} hardest and easiest)" if cut else ""))
    axes.set_title(report.names[0], fontsize=9, loc="left")
    return bool(rows)


def _comparison(picture: Any, report: Report) -> bool:
    """The headline metrics of several runs, with their intervals."""
    tests = [told["result"]["test"] for told in report.stories]
    if len(tests) < 2 or any(test is None for test in tests):
        return False
    metrics = list(tests[0]["trained"])
    picture.set_size_inches(max(WIDTH, 0.9 * len(metrics) + 0.25 * len(metrics) * len(tests)), HEIGHT)
    axes = picture.add_subplot()
    width = 0.8 / len(tests)
    for at, (name, test) in enumerate(zip(report.names, tests, strict=True)):
        values = [test["trained"][metric] for metric in metrics]
        mean = 100 * np.array([value["mean"] for value in values], dtype=float)
        reach = 100 * np.array([value["interval"] for value in values], dtype=float)
        x = np.arange(len(metrics)) + (at - (len(tests) - 1) / 2) * width
        axes.bar(
            x,
            mean,
            width * 0.92,
            color=COLOURS[at % 6],
            label=name,
            hatch=("", "//", "..", "xx", "\\\\", "++")[at % 6],
            edgecolor="white",
        )
        axes.errorbar(x, mean, np.abs(reach.T - mean), fmt="none", ecolor="#222222", elinewidth=0.9, capsize=2)
    axes.set_xticks(np.arange(len(metrics)), metrics)
    axes.grid(axis="x", visible=False)
    axes.set_ylabel("%, with 95 % interval over classes")
    picture.legend(loc="outside upper left", ncols=min(3, len(tests)))
    return True
