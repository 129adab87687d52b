"""Figures of a study for a paper: methods, embedding sizes, networks, and the critical-difference diagram."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nearkin.bench.summary import format_p
from nearkin.bench.tournament import Tournament
from nearkin.errors import DataError, import_extra
from nearkin.report.print_figures import COLOURS, SUFFIXES, WIDTH, plot_lines, save_figure, write_drawings

if TYPE_CHECKING:
    from nearkin.report.study import StudyReport

MAX_LINES = 6  # methods per plot
INK, FAINT = "#222222", "#666666"


def write_study_figures(report: StudyReport, folder: Path) -> list[Path]:
    """Write every figure that the study has data for, each as .png and .svg."""
    # Sizes and networks: the metric of the leading methods, averaged over everything else.
    drawings: dict[str, Callable[[Any, StudyReport], bool]] = {
        "losses": _draw_losses,
        "sizes": partial(_draw_lines, field=2, x_label="embedding size"),
        "networks": partial(_draw_lines, field=1, x_label="network"),
    }
    written = write_drawings(drawings, report, folder)
    return written + ([] if report.tournament is None else write_critical_difference(report.tournament, folder))


def write_critical_difference(tournament: Tournament, folder: Path) -> list[Path]:
    """Write the diagram, if there is one, as .png and .svg."""
    paths = [folder / f"critical_difference{suffix}" for suffix in SUFFIXES]
    return [] if tournament.friedman is None else [draw_critical_difference(tournament, path) for path in paths]


def _draw_losses(figure: Any, report: StudyReport) -> bool:
    """A row per method with its experiments as dots and their mean as a tick. Not bars: those must start at 0."""
    means = {m: [mean for e in report.experiments if not np.isnan(mean := report.mean(e, m))] for m in report.methods}
    rows = [(method, known) for method, known in means.items() if known]
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
            means = [report.mean(e, method) for e, setup in report.setups.items() if setup[field] == value]
            known = [mean for mean in means if not np.isnan(mean)]
            y.append(float(np.mean(known)) if known else np.nan)
        curves.append((method, x, y))
    axes = figure.add_subplot()
    if numeric:
        axes.set_xscale("log", base=2)
    axes.set_xticks(x, [str(value) for value in x_values])
    axes.minorticks_off()
    return plot_lines(axes, curves, x_label, f"{report.metric}, %")


def draw_critical_difference(tournament: Tournament, path: Path, *, dpi: int = 150) -> Path:
    """Draw the critical-difference diagram: mean ranks on an axis, bars over methods without a significant difference.

    Args:
        tournament: The tournament.
        path: A .png or .svg file.
        dpi: Resolution of a .png file.

    Returns:
        The path.

    Raises:
        DataError: Fewer than two complete experiments, or another file type.
    """
    if tournament.friedman is None:
        raise DataError("The diagram needs at least two experiments in which every method has a value.")
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(f"{path}: expected a .png or .svg file, got '{path.suffix}'.")
    rows = math.ceil(len(tournament.complete_ranks) / 2) + len(tournament.groups) + 2
    size = (6.5, 0.26 * rows)
    save_figure(_draw_ranks, [path], tournament, size=size, dpi=dpi, bbox_inches="tight", pad_inches=0.12)
    return path


def _draw_ranks(figure: Any, tournament: Tournament) -> None:
    figure.set_layout_engine("none")
    axes = figure.add_axes((0, 0, 1, 1))  # names extend beyond it: the saved area is that of all that is drawn
    axes.grid(visible=False)
    axes.spines.top.set_visible(True)
    test, critical, ranks = tournament.friedman, tournament.critical, dict(tournament.complete_ranks)
    assert test is not None
    k = len(ranks)
    pandas = import_extra("pandas", extra="bench")
    # The bars are those of the tournament: 1 joins two methods, 0 separates them.
    joined = [[float(a == b or any({a, b} <= set(g) for g in tournament.groups)) for b in ranks] for a in ranks]
    import_extra("scikit_posthocs", extra="bench").critical_difference_diagram(
        ranks,
        pandas.DataFrame(joined, index=list(ranks), columns=list(ranks)),
        ax=axes,
        label_fmt_left="{label}  {rank:.2f}",
        label_fmt_right="{rank:.2f}  {label}",
        marker_props={"color": INK, "s": 18, "clip_on": False},
        elbow_props={"color": INK, "linewidth": 0.7, "clip_on": False},
        crossbar_props={"color": COLOURS[0], "linewidth": 4.0, "solid_capstyle": "round", "clip_on": False},
        text_h_margin=0.015 * (k - 1),
    )
    axes.set_xlim(1, k)
    axes.set_xticks(range(1, k + 1, 1 + k // 15))
    # The length of the critical difference, above the axis; one longer than the axis is cut off and labelled so.
    length = min(critical, k - 1)
    label = f"critical difference {critical:.2f}" + (", longer than the axis" if length < critical else "")
    axes.errorbar(1 + length / 2, 1.6, xerr=length / 2, color=COLOURS[1], linewidth=1.6, capsize=4, clip_on=False)
    axes.text(1, 1.9, label, color=COLOURS[1], va="bottom", fontsize=9)
    caption = (
        f"Mean ranks over {test.experiments} experiments, 1 is best (Friedman {format_p(test.p_value)}). "
        f"Bars join methods without a significant difference (Nemenyi, {tournament.alpha:g})."
    )
    axes.text(0.5, -0.03, caption, ha="center", va="top", color=FAINT, fontsize=8.5, transform=axes.transAxes)
