"""The critical-difference diagram: mean ranks on an axis, bars over methods without a significant difference."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from nearkin.bench.summary import format_p
from nearkin.bench.tournament import Tournament
from nearkin.errors import DataError, import_extra
from nearkin.report.print_figures import COLOURS, save_figure

INK, FAINT = "#222222", "#666666"
BLUE, ORANGE, *_ = COLOURS


def draw_critical_difference(tournament: Tournament, path: Path, *, dpi: int = 150) -> Path:
    """Draw the diagram, best method on the left.

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
    if path.suffix.lower() not in {".png", ".svg"}:
        raise DataError(f"{path}: expected a .png or .svg file, got '{path.suffix}'.")
    rows = math.ceil(len(tournament.complete_ranks) / 2) + len(tournament.groups) + 2
    size = (6.5, 0.26 * rows)
    save_figure(_draw, [path], tournament, size=size, dpi=dpi, bbox_inches="tight", pad_inches=0.12)
    return path


def _draw(figure: Any, tournament: Tournament) -> None:
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
        crossbar_props={"color": BLUE, "linewidth": 4.0, "solid_capstyle": "round", "clip_on": False},
        text_h_margin=0.015 * (k - 1),
    )
    axes.set_xlim(1, k)
    axes.set_xticks(range(1, k + 1, 1 + k // 15))
    # The length of the critical difference, above the axis; one longer than the axis is cut off and labelled so.
    length = min(critical, k - 1)
    label = f"critical difference {critical:.2f}" + (", longer than the axis" if length < critical else "")
    axes.errorbar(1 + length / 2, 1.6, xerr=length / 2, color=ORANGE, linewidth=1.6, capsize=4, clip_on=False)
    axes.text(1, 1.9, label, color=ORANGE, va="bottom", fontsize=9)
    caption = (
        f"Mean ranks over {test.experiments} experiments, 1 is best (Friedman {format_p(test.p_value)}). "
        f"Bars join methods without a significant difference (Nemenyi, {tournament.alpha:g})."
    )
    axes.text(0.5, -0.03, caption, ha="center", va="top", color=FAINT, fontsize=8.5, transform=axes.transAxes)
