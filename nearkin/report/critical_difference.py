"""The critical-difference diagram: mean ranks on an axis, bars over methods without a significant difference."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nearkin.bench.summary import format_p
from nearkin.bench.tournament import Tournament
from nearkin.errors import DataError, import_extra

INK, FAINT = "#222222", "#666666"
BLUE, ORANGE = "#0072B2", "#D55E00"  # distinguishable with any colour vision deficiency
# Inches: distance of two names, distance of two bars, width of a letter, minimum width (the caption needs it).
NAME_STEP, BAR_STEP, LETTER_WIDTH, MIN_WIDTH = 0.29, 0.17, 0.085, 8.0


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
    figure_class = import_extra("matplotlib.figure", extra="images").Figure
    rc_context = import_extra("matplotlib", extra="images").rc_context
    # A fixed salt and no date: the same tournament gives the same file.
    with rc_context({"svg.hashsalt": "nearkin", "font.size": 10, "font.family": "sans-serif"}):
        figure = _draw(figure_class, tournament)
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Software": None} if path.suffix.lower() == ".png" else {"Date": None}
        figure.savefig(path, dpi=dpi, metadata=metadata, facecolor="white", bbox_inches="tight", pad_inches=0.12)
    return path


def _draw(figure_class: Any, tournament: Tournament) -> Any:
    ranked, test = tournament.complete_ranks, tournament.friedman
    assert test is not None
    k = len(ranked)
    half = math.ceil(k / 2)  # the better half is named on the left, the others on the right
    first_name = -(0.2 + BAR_STEP * len(tournament.groups)) - 0.1  # y of the first name; the axis is at 0
    bottom, top = first_name - NAME_STEP * half - 0.25, 0.85
    left, right = (0.85 + LETTER_WIDTH * max(len(name) for name, _ in side) for side in (ranked[:half], ranked[half:]))
    width = max(MIN_WIDTH, left + right + 0.3 * k)
    figure = figure_class(figsize=(width, top - bottom))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(bottom, top)
    axes.axis("off")

    def x(rank: float) -> float:
        return left + (rank - 1) / (k - 1) * (width - left - right)

    _draw_axis(axes, x, k)
    _draw_critical_difference(axes, x, tournament.critical, k)
    for level, group in enumerate(tournament.groups):
        means = [mean for name, mean in ranked if name in group]
        ends = [x(min(means)) - 0.05, x(max(means)) + 0.05]
        axes.plot(ends, [-0.16 - BAR_STEP * level] * 2, color=BLUE, linewidth=4.0, solid_capstyle="round", zorder=2)
    for index, (name, mean) in enumerate(ranked):
        on_left = index < half
        y = first_name - NAME_STEP * (index if on_left else k - 1 - index)
        edge = left - 0.2 if on_left else width - right + 0.2
        axes.plot([x(mean), x(mean), edge], [0, y, y], color=FAINT, linewidth=0.9, zorder=1)
        axes.plot([x(mean)], [0], marker="o", markersize=4.5, color=INK, zorder=3)
        text, gap, align = (f"{name}  {mean:.2f}", -0.06, "right") if on_left else (f"{mean:.2f}  {name}", 0.06, "left")
        axes.text(edge + gap, y, text, ha=align, va="center", color=INK, parse_math=False)
    caption = (
        f"Mean ranks over {test.experiments} experiments, 1 is best (Friedman {format_p(test.p_value)}). "
        f"Bars join methods without a significant difference (Nemenyi, {tournament.alpha:g})."
    )
    axes.text(width / 2, bottom + 0.1, caption, ha="center", va="bottom", color=FAINT, fontsize=8.5)
    return figure


def _draw_axis(axes: Any, x: Callable[[float], float], k: int) -> None:
    axes.plot([x(1), x(k)], [0, 0], color=INK, linewidth=1.2, solid_capstyle="butt")
    for rank in range(1, k + 1, 1 + k // 15):
        axes.plot([x(rank)] * 2, [0, 0.07], color=INK, linewidth=1.0)
        axes.text(x(rank), 0.1, str(rank), ha="center", va="bottom", color=INK, fontsize=9)


def _draw_critical_difference(axes: Any, x: Callable[[float], float], critical: float, k: int) -> None:
    """Draw the length of the critical difference; one longer than the axis is cut off and labelled so."""
    length, y = min(critical, k - 1), 0.47
    axes.plot([x(1), x(1 + length)], [y, y], color=ORANGE, linewidth=1.6, solid_capstyle="butt")
    for end in (1, 1 + length):
        axes.plot([x(end)] * 2, [y - 0.05, y + 0.05], color=ORANGE, linewidth=1.6)
    label = f"critical difference {critical:.2f}" + (", longer than the axis" if length < critical else "")
    axes.text(x(1), y + 0.09, label, color=ORANGE, va="bottom", fontsize=9)
