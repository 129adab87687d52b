"""Figures of a study for a paper: methods, embedding sizes, networks, and the critical-difference diagram."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nearkin.report.critical_difference import draw_critical_difference
from nearkin.report.print_figures import COLOURS, WIDTH, plot_lines, write_drawings
from nearkin.report.study import StudyReport

MAX_LINES = 6  # methods per plot


def write_study_figures(report: StudyReport, folder: Path) -> list[Path]:
    """Write every figure that the study has data for, each as .png and .svg."""
    # Sizes and networks: the metric of the leading methods, averaged over everything else.
    drawings: dict[str, Callable[[Any, StudyReport], bool]] = {
        "losses": _draw_losses,
        "sizes": partial(_draw_lines, field=2, x_label="embedding size"),
        "networks": partial(_draw_lines, field=1, x_label="network"),
    }
    written = write_drawings(drawings, report, folder)
    if report.tournament is not None and report.tournament.friedman is not None:
        written += [
            draw_critical_difference(report.tournament, folder / f"critical_difference{suffix}")
            for suffix in (".png", ".svg")
        ]
    return written


def _draw_losses(figure: Any, report: StudyReport) -> bool:
    """A row per method with its experiments as dots and their mean as a tick. Not bars: those must start at 0."""
    rows = []
    for method in report.methods:
        means = [report.cells[e, method].mean for e in report.experiments if (e, method) in report.cells]
        if known := [mean for mean in means if not np.isnan(mean)]:
            rows.append((method, known))
    figure.set_size_inches(WIDTH, 0.8 + 0.2 * len(rows))
    axes = figure.add_subplot()
    for y, (_, values) in enumerate(rows):
        axes.plot(values, [y] * len(values), "o", color=COLOURS[0], markersize=3.5)
        axes.plot([np.mean(values)], [y], "|", color=COLOURS[1], markersize=11, markeredgewidth=2.2)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(f"{report.metric}, % (dots: experiments, tick: mean)")
    return bool(rows)


def _draw_lines(figure: Any, report: StudyReport, field: int, x_label: str) -> bool:
    x_values = list(dict.fromkeys(setup[field] for setup in report.setups.values()))
    if len(x_values) < 2:
        return False
    numeric = all(isinstance(value, int) for value in x_values)
    x_values = sorted(x_values, key=lambda value: value if numeric else 0)
    x = x_values if numeric else list(range(len(x_values)))
    curves = []
    for method in report.methods[:MAX_LINES]:
        y = []
        for value in x_values:
            cells = [report.cells.get((e, method)) for e, setup in report.setups.items() if setup[field] == value]
            means = [cell.mean for cell in cells if cell is not None and cell.values]
            y.append(float(np.mean(means)) if means else np.nan)
        curves.append((method, x, y))
    axes = figure.add_subplot()
    if numeric:
        axes.set_xscale("log", base=2)
    axes.set_xticks(x, [str(value) for value in x_values])
    axes.minorticks_off()
    return plot_lines(axes, curves, x_label, f"{report.metric}, %")
