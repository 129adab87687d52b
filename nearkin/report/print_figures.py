"""Figures for a paper as PNG and SVG, in one style that is readable in greyscale and with any colour vision."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nearkin.errors import import_extra
from nearkin.report.html import writing

if TYPE_CHECKING:
    from nearkin.report.page import Report

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")  # Okabe and Ito
DASHES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1)), (0, (1, 3)))
MARKERS = ("o", "s", "^", "v", "D", "P", "X", "<", ">", "*", "h")
HATCHES = ("", "//", "..", "xx", "\\\\", "++")
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
SUFFIXES = (".png", ".svg")
MAX_CLASSES = 40  # bars; of more classes only the hardest and the easiest are drawn


def write_figures(report: Report, folder: Path) -> list[Path]:
    """Write every figure that the report has data for, each as .png and .svg.

    Args:
        report: The contents of a page.
        folder: Where to write; created if missing.

    Returns:
        The written files.
    """
    drawings = {
        "learning": _draw_learning,
        "similarity": _draw_similarity,
        "size": _draw_size,
        "classes": _draw_classes,
        "comparison": _draw_comparison,
    }
    return write_drawings({name: partial(draw, report=report) for name, draw in drawings.items()}, folder)


def write_drawings(drawings: Mapping[str, Callable[[Any], bool]], folder: Path, title: str = "") -> list[Path]:
    """Write drawings by file stem as .png and .svg; a function that returns False has no data to draw."""
    written = []
    with writing("figures", folder, " Choose another folder with --figures."):
        for name, draw in drawings.items():
            paths = [folder / f"{name}{suffix}" for suffix in SUFFIXES]
            written += paths if save_figure(draw, paths, title=title) else []
    return written


def save_figure(
    draw: Callable[[Any], bool | None],
    paths: Sequence[Path],
    *,
    title: str = "",
    size: tuple[float, float] = (WIDTH, HEIGHT),
    dpi: int = 200,
    **options: Any,
) -> bool:
    """Call draw(figure) in the common style and save the figure, the same bytes every time, unless it returns False."""
    figure_class = import_extra("matplotlib.figure", extra="images").Figure
    rc_context = import_extra("matplotlib", extra="images").rc_context
    with rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a class name in a script the font lacks
        figure = figure_class(figsize=size, layout="constrained")
        if draw(figure) is False:
            return False
        if title:
            figure.suptitle(title, fontsize=9, color="#AA0000")
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            metadata = {"Date": None} if path.suffix.lower() == ".svg" else {"Software": None}
            figure.savefig(path, dpi=dpi, metadata=metadata, facecolor="white", **options)
    return True


def plot_lines(
    axes: Any,
    curves: Sequence[tuple[str, Sequence[Any], Sequence[Any]]],
    x_label: str,
    y_label: str,
    marker: str | None = None,
    *,
    outside: bool = False,
) -> bool:
    """Plot (name, x, y) as lines that differ in colour, dashes and markers; False without curves."""
    for i, (name, x, y) in enumerate(curves):
        shape = MARKERS[i % len(MARKERS)] if marker is None else marker
        axes.plot(x, y, color=COLOURS[i % 6], linestyle=DASHES[(i + i // 6) % 6], marker=shape, label=name)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    if curves:
        axes.legend(**({"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "fontsize": 7} if outside else {}))
    return bool(curves)


def plot_bars(
    axes: Any, bars: Mapping[str, Any], names: Sequence[str], intervals: Mapping[str, Any] | None = None
) -> None:
    """Plot groups of bars, a group for each name, with the ends of their intervals [names, 2]; NaN leaves a gap."""
    width = 0.84 / len(bars)
    for i, (label, values) in enumerate(bars.items()):
        x = np.arange(len(names)) + (i - (len(bars) - 1) / 2) * width
        style = {"color": COLOURS[i % 6], "hatch": HATCHES[i % 6], "edgecolor": "white"}
        axes.bar(x, values, width * 0.94, label=label, **style)
        if intervals:
            errors = np.abs(np.transpose(intervals[label]) - values)
            axes.errorbar(x, values, errors, fmt="none", ecolor="#222222", elinewidth=0.9, capsize=2)
    axes.set_xticks(range(len(names)), names)
    axes.grid(axis="x", visible=False)


def panels(figure: Any, names: Sequence[str], *, wide: float = WIDTH) -> list[Any]:
    """One plot below the other, or from four on in two columns, each with its name."""
    columns = 1 if len(names) < 4 else 2
    rows = -(-len(names) // columns)
    figure.set_size_inches(wide * columns, 0.4 + HEIGHT * rows)
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in grid[len(names) :]:
        axes.remove()
    for axes, name in zip(grid, names, strict=False):
        axes.set_title(name, fontsize=9, loc="left")
    return grid[: len(names)]


Lines = dict[str, dict[str, dict[Any, float]]]  # panel -> line -> x -> y


def group_lines(points: Iterable[tuple[str, str, Any, float]], fewest: int = 2) -> Lines:
    """Group (panel, line, x, y), where all lines of a panel have the same x; panels with fewer x are left out."""
    groups: Lines = {}
    for panel, line, x, y in points:
        groups.setdefault(panel, {}).setdefault(line, {})[x] = y
    return {panel: lines for panel, lines in groups.items() if len(next(iter(lines.values()))) >= fewest}


def draw_over(figure: Any, groups: Lines, x_label: str, y_label: str) -> bool:
    """Draw the lines of each panel; sizes on a logarithmic axis, names at even distances."""
    plots = panels(figure, list(groups), wide=1.4 * WIDTH) if groups else []
    for axes, lines in zip(plots, groups.values(), strict=True):
        values = list(next(iter(lines.values())))
        x = values if isinstance(values[0], int) else list(range(len(values)))
        if x is values:
            axes.set_xscale("log", base=2)
        axes.set_xticks(x, [str(value) for value in values])
        axes.minorticks_off()
        curves = [(name, x, y) for name, line in lines.items() if np.isfinite(y := list(line.values())).any()]
        plot_lines(axes, curves, x_label, y_label, outside=True)
    return bool(groups)


def _draw_learning(figure: Any, report: Report) -> bool:
    """Validation R@1 by epoch; a ring marks the selected epoch."""
    axes = figure.add_subplot()
    selected = [summary["result"]["protocol"]["epoch"] for summary in report.summaries]
    curves = [(curve, epoch) for curve, epoch in zip(report.learning_curves, selected, strict=True) if curve[1]]
    for i, ((_, x, y), epoch) in enumerate(curves):
        ring = dict(zip(x, y, strict=True)).get(epoch, np.nan)
        axes.plot([epoch], [ring], "o", markersize=9, markerfacecolor="none", color=COLOURS[i % 6])
    axes.xaxis.get_major_locator().set_params(integer=True)
    return plot_lines(axes, [curve for curve, _ in curves], "epoch (ring: selected)", "validation R@1, %")


def _draw_similarity(figure: Any, report: Report) -> bool:
    """Similarity histograms of positive and negative pairs, one plot per run."""
    histograms = [(n, a["similarity_histogram"]) for n, a in zip(report.names, report.analyses, strict=False)]
    histograms = [(name, pairs) for name, pairs in histograms if sum(pairs["positive"]) and sum(pairs["negative"])]
    if not histograms:
        return False
    figure.set_size_inches(WIDTH, 0.8 + 2.0 * len(histograms))
    plots = figure.subplots(len(histograms), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, pairs) in zip(plots, histograms, strict=True):
        edges = np.linspace(pairs["low"], pairs["high"], len(pairs["positive"]) + 1)
        for i, (label, counts) in enumerate((("same class", pairs["positive"]), ("other class", pairs["negative"]))):
            share = 100 * np.array(counts) / sum(counts)
            axes.stairs(share, edges, fill=True, color=COLOURS[i], alpha=0.3)
            axes.stairs(share, edges, color=COLOURS[i], linestyle=DASHES[i], label=label)
        axes.set_ylabel("share of pairs, %")
        axes.set_title(name, fontsize=9, loc="left")
    plots[0].legend()
    plots[-1].set_xlabel("cosine similarity")
    return True


def _draw_size(figure: Any, report: Report) -> bool:
    axes = figure.add_subplot()
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    sizes = zip(report.names, (analysis["recall_by_size"] for analysis in report.analyses), strict=False)
    curves = [(n, [r["size"] for r in rows], [100 * r["R@1"] for r in rows]) for n, rows in sizes if len(rows) > 1]
    return plot_lines(axes, curves, "first dimensions of the embedding", "R@1, %")


def _draw_classes(figure: Any, report: Report) -> bool:
    """R@1 of each class of the first run; of many classes the hardest and the easiest."""
    if report.items is None:
        return False
    rows = [row for row in report.analyses[0]["classes"] if row["R@1"] is not None]
    half = MAX_CLASSES // 2
    cut = len(rows) > MAX_CLASSES
    rows = rows[:half] + rows[-half:] if cut else rows
    figure.set_size_inches(WIDTH, 0.8 + 0.16 * len(rows))
    axes = figure.add_subplot()
    names = [report.items["class_names"][row["class"]] for row in rows]
    positions = np.arange(len(rows)) + (np.arange(len(rows)) >= half if cut else 0)
    axes.barh(positions, [100 * row["R@1"] for row in rows], color=COLOURS[0], height=0.7)
    axes.set_yticks(positions, [name if len(name) <= 28 else f"{name[:27]}…" for name in names], fontsize=7)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 100)
    axes.set_xlabel("R@1, %" + (f" ({half} hardest and {half} easiest classes)" if cut else ""))
    axes.set_title(report.names[0], fontsize=9, loc="left")
    return bool(rows)


def _draw_comparison(figure: Any, report: Report) -> bool:
    """The test metrics of several runs, with their intervals."""
    tests = [summary["result"]["test"] for summary in report.summaries]
    if len(tests) < 2 or any(test is None for test in tests):
        return False
    metrics = list(tests[0]["trained"])
    figure.set_size_inches(max(WIDTH, 0.9 * len(metrics) + 0.25 * len(metrics) * len(tests)), HEIGHT)
    axes = figure.add_subplot()
    found = {name: [test["trained"][m] for m in metrics] for name, test in zip(report.names, tests, strict=True)}
    means = {name: 100 * np.array([value["mean"] for value in values], float) for name, values in found.items()}
    ends = {name: 100 * np.array([value["interval"] for value in values], float) for name, values in found.items()}
    plot_bars(axes, means, metrics, ends)
    axes.set_ylabel("%, with 95 % interval over classes")
    figure.legend(loc="outside upper left", ncols=min(3, len(tests)))
    return True
