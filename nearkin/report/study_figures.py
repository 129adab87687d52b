"""Figures of a study for a paper: losses side by side, the metric by size, networks compared, who is ahead of whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from nearkin.report.critical_difference import draw_critical_difference
from nearkin.report.figures import COLOURS, DASHES, WIDTH, write_drawings
from nearkin.report.study import StudyReport

LINES = 6  # methods on one plot


def write_study_figures(report: StudyReport, folder: Path) -> list[Path]:
    """Every figure that the study has the numbers for, as .png and .svg; returns what was written."""
    drawings = {"losses": _losses, "sizes": _sizes, "networks": _networks}
    written = write_drawings(drawings, report, folder)
    if report.tournament is not None and report.tournament.friedman is not None:
        written += [
            draw_critical_difference(report.tournament, folder / f"critical_difference{suffix}")
            for suffix in (".png", ".svg")
        ]
    return written


def _losses(picture: Any, report: StudyReport) -> bool:
    """A line for each method: experiments as dots, their mean as a stroke. No bars: those would have to begin at 0."""
    rows = []
    for method in report.methods:
        found = [report.cells[e, method].mean for e in report.experiments if (e, method) in report.cells]
        if known := [value for value in found if not np.isnan(value)]:
            rows.append((method, known))
    picture.set_size_inches(WIDTH, 0.8 + 0.2 * len(rows))
    axes = picture.add_subplot()
    for at, (_, values) in enumerate(rows):
        axes.plot(values, [at] * len(values), "o", color=COLOURS[0], markersize=3.5)
        axes.plot([np.mean(values)], [at], "|", color=COLOURS[1], markersize=11, markeredgewidth=2.2)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(f"{report.metric}, % (dots: experiments, stroke: mean)")
    return bool(rows)


def _sizes(picture: Any, report: StudyReport) -> bool:
    """The metric over embedding sizes, averaged over data sets and networks, of the leading methods."""
    return _lines(picture, report, 2, "embedding size")


def _networks(picture: Any, report: StudyReport) -> bool:
    """The metric of each network, averaged over data sets and sizes, of the leading methods."""
    return _lines(picture, report, 1, "network")


def _lines(picture: Any, report: StudyReport, axis: int, name: str) -> bool:
    kinds = list(dict.fromkeys(place[axis] for place in report.places.values()))
    if len(kinds) < 2:
        return False
    numbers = all(isinstance(kind, int) for kind in kinds)
    kinds = sorted(kinds, key=lambda kind: kind if numbers else 0)
    axes = picture.add_subplot()
    for at, method in enumerate(report.methods[:LINES]):
        y = []
        for kind in kinds:
            cells = [report.cells.get((e, method)) for e, place in report.places.items() if place[axis] == kind]
            known = [cell.mean for cell in cells if cell is not None and cell.values]
            y.append(np.mean(known) if known else np.nan)
        x = kinds if numbers else list(range(len(kinds)))
        axes.plot(x, y, color=COLOURS[at], linestyle=DASHES[at], marker="o", label=method)
    if numbers:
        axes.set_xscale("log", base=2)
        axes.set_xticks(kinds, [f"{kind:g}" for kind in kinds])
        axes.minorticks_off()
    else:
        axes.set_xticks(range(len(kinds)), kinds)
    axes.set_xlabel(name)
    axes.set_ylabel(f"{report.metric}, %")
    axes.legend(fontsize=7)
    return True
