"""The critical-difference diagram: mean ranks on a line, bars over those that cannot be told apart."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from nearkin.bench.summary import format_p
from nearkin.bench.tournament import Tournament
from nearkin.errors import DataError, import_extra

INK, FAINT = "#222222", "#666666"
BLUE, ORANGE = "#0072B2", "#D55E00"  # told apart by every kind of colour vision
# Inches: between names, between bars, for a letter of a name, and the least width, which the caption needs.
ROW, BAR, LETTER, WIDTH = 0.29, 0.17, 0.085, 8.0


def draw_critical_difference(judged: Tournament, path: Path, *, dpi: int = 150) -> Path:
    """Write the diagram as .png or .svg (by the name of the file). Best on the left; returns the path."""
    if judged.friedman is None:
        raise DataError("The diagram needs two experiments or more in which every method has a value.")
    if path.suffix.lower() not in {".png", ".svg"}:
        raise DataError(f"{path}: the diagram is written as .png or .svg; got '{path.suffix}'.")
    figure = import_extra("matplotlib.figure", extra="report").Figure
    context = import_extra("matplotlib", extra="report").rc_context
    # Without a salt and with a date, the same tournament would give another file every time.
    with context({"svg.hashsalt": "nearkin", "font.size": 10, "font.family": "sans-serif"}):
        picture = _picture(figure, judged)
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Software": None} if path.suffix.lower() == ".png" else {"Date": None}
        picture.savefig(path, dpi=dpi, metadata=metadata, facecolor="white", bbox_inches="tight", pad_inches=0.12)
    return path


def _picture(figure: Any, judged: Tournament) -> Any:
    ranked, test = judged.complete_ranks, judged.friedman
    assert test is not None
    k = len(ranked)
    half = math.ceil(k / 2)  # the better half is named on the left, the others on the right
    names = -(0.2 + BAR * len(judged.groups)) - 0.1  # the height of the first name; the line is at 0
    bottom, top = names - ROW * half - 0.25, 0.85
    left, right = (
        0.85 + LETTER * max(len(name) for name, _ in side) for side in (ranked[:half], ranked[half:])
    )  # room for names and figures
    width = max(WIDTH, left + right + 0.3 * k)
    picture = figure(figsize=(width, top - bottom))
    axes = picture.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(bottom, top)
    axes.axis("off")

    def at(rank: float) -> float:
        return left + (rank - 1) / (k - 1) * (width - left - right)

    axes.plot([at(1), at(k)], [0, 0], color=INK, linewidth=1.2, solid_capstyle="butt")
    for rank in range(1, k + 1, 1 + k // 15):
        axes.plot([at(rank)] * 2, [0, 0.07], color=INK, linewidth=1.0)
        axes.text(at(rank), 0.1, str(rank), ha="center", va="bottom", color=INK, fontsize=9)

    # A difference longer than the whole line is drawn as far as the line goes, and says so.
    length, y = min(judged.critical, k - 1), 0.47
    axes.plot([at(1), at(1 + length)], [y, y], color=ORANGE, linewidth=1.6, solid_capstyle="butt")
    for end in (1, 1 + length):
        axes.plot([at(end)] * 2, [y - 0.05, y + 0.05], color=ORANGE, linewidth=1.6)
    label = f"critical difference {judged.critical:.2f}" + (", beyond the line" if length < judged.critical else "")
    axes.text(at(1), y + 0.09, label, color=ORANGE, va="bottom", fontsize=9)

    for level, group in enumerate(judged.groups):
        means = [mean for name, mean in ranked if name in group]
        ends = [at(min(means)) - 0.05, at(max(means)) + 0.05]
        axes.plot(ends, [-0.16 - BAR * level] * 2, color=BLUE, linewidth=4.0, solid_capstyle="round", zorder=2)
    for place, (name, mean) in enumerate(ranked):
        west = place < half
        y = names - ROW * (place if west else k - 1 - place)
        edge = left - 0.2 if west else width - right + 0.2
        axes.plot([at(mean), at(mean), edge], [0, y, y], color=FAINT, linewidth=0.9, zorder=1)
        axes.plot([at(mean)], [0], marker="o", markersize=4.5, color=INK, zorder=3)
        text, side, align = (f"{name}  {mean:.2f}", -0.06, "right") if west else (f"{mean:.2f}  {name}", 0.06, "left")
        axes.text(edge + side, y, text, ha=align, va="center", color=INK, parse_math=False)
    caption = (
        f"Mean ranks over {test.experiments} experiments, 1 is best (Friedman {format_p(test.p_value)}). "
        f"Bars join what Nemenyi's test at {judged.alpha:g} cannot tell apart."
    )
    axes.text(width / 2, bottom + 0.1, caption, ha="center", va="bottom", color=FAINT, fontsize=8.5)
    return picture
