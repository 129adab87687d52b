"""Charts as inline SVG: no script, sharp at any size, coloured by the style of the page.

A chart is about 360 pixels wide, so that its text stays readable on a phone; a page puts several side by side.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 360, 210
LEFT, RIGHT, TOP, BOTTOM = 44, 14, 30, 26
LEGEND_ROW = 16
MAX_DOTS = 60  # longer lines are drawn without dots


@dataclass(frozen=True)
class Series:
    """A line of a chart."""

    name: str
    x: Sequence[float]  # from left to right
    y: Sequence[float | None]  # None, NaN and infinity leave a gap

    @property
    def points(self) -> list[tuple[float, float]]:
        return [(x, y) for x, y in zip(self.x, self.y, strict=True) if y is not None and math.isfinite(y)]


def line_chart(
    series: Sequence[Series],
    label: str,
    *,
    x_name: str = "epoch",
    mark: float | None = None,
    logarithmic: bool = False,
) -> str:
    """Draw lines over a common axis; empty without any value."""
    xs, ys = ([point[axis] for line in series for point in line.points] for axis in (0, 1))
    if not ys:
        return ""
    ticks = _ticks(min(ys), max(ys))
    low, high = min(ticks[0], min(ys)), max(ticks[-1], max(ys))
    scale = math.log if logarithmic else float
    first, last = scale(min(xs)), scale(max(xs))
    legend, legend_rows = _legend([line.name for line in series])
    top = TOP + LEGEND_ROW * (legend_rows - 1)

    def x_pixel(x: float) -> float:
        position = (scale(x) - first) / (last - first) if last > first else 0.5
        return LEFT + position * (WIDTH - LEFT - RIGHT)

    def y_pixel(y: float) -> float:
        return top + (high - y) / (high - low) * (HEIGHT - top - BOTTOM)

    x_values = sorted(set(xs))
    shown = x_values[:: max(1, math.ceil(len(x_values) / 7))]
    y_ticks = [(y_pixel(tick), _format_tick(tick, ticks)) for tick in ticks]
    parts = _frame(label, y_ticks, [(x_pixel(x), x) for x in shown])
    parts.append(f'<text class="tick" x="2" y="{HEIGHT - 8}">{escape(x_name)}</text>')
    if mark is not None:
        x = x_pixel(mark)
        parts.append(f'<line class="chosen" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{HEIGHT - BOTTOM}"/>')
    for i, line in enumerate(series):
        path = " ".join(f"{x_pixel(x):.1f},{y_pixel(y):.1f}" for x, y in line.points)
        parts.append(f'<polyline class="line c{i % 4}" points="{path}"/>')
        for x, y in line.points if len(line.points) <= MAX_DOTS else ():
            title = f"<title>{escape(line.name)}, {escape(x_name)} {x:g}: {y:.4g}</title>"
            parts.append(
                f'<circle class="dot c{i % 4}" cx="{x_pixel(x):.1f}" cy="{y_pixel(y):.1f}" r="3">{title}</circle>'
            )
    return "".join([*parts, legend]) + "</svg>"


def histogram(groups: Sequence[tuple[str, Sequence[float]]], label: str, low: float, high: float) -> str:
    """Draw overlaid histograms, each normalized to a total of 100 %."""
    totals = [sum(counts) for _, counts in groups]
    if not all(totals):
        return ""
    shares = [[count / total for count in counts] for (_, counts), total in zip(groups, totals, strict=True)]
    used = [i for i in range(len(shares[0])) if any(group[i] for group in shares)]
    begin, end = max(0, used[0] - 1), min(len(shares[0]), used[-1] + 2)
    bin_width = (high - low) / len(shares[0])
    peak = max(map(max, shares))
    left, right = low + begin * bin_width, low + end * bin_width
    floor = HEIGHT - BOTTOM

    def x_pixel(x: float) -> float:
        return LEFT + (x - left) / (right - left) * (WIDTH - LEFT - RIGHT)

    def y_pixel(share: float) -> float:
        return floor - share / (1.05 * peak) * (floor - TOP)

    y_ticks = [(y_pixel(tick / 100), f"{tick:g} %") for tick in _ticks(0, 100 * peak) if tick <= 105 * peak]
    parts = _frame(label, y_ticks, [(x_pixel(tick), tick) for tick in _ticks(left, right) if left <= tick <= right])
    for i, group in enumerate(shares):
        path = [f"M{x_pixel(left):.1f},{floor}"]
        for b in range(begin, end):
            edges, y = (low + b * bin_width, low + (b + 1) * bin_width), y_pixel(group[b])
            path += [f"L{x_pixel(edge):.1f},{y:.1f}" for edge in edges]
        parts.append(f'<path class="area c{i % 4}" d="{"".join(path)}L{x_pixel(right):.1f},{floor}Z"/>')
    return "".join([*parts, _legend([name for name, _ in groups])[0]]) + "</svg>"


def _frame(label: str, y_ticks: Iterable[tuple[float, str]], x_ticks: Iterable[tuple[float, float]]) -> list[str]:
    """Open a chart with grid lines at pixels y and values at pixels x."""
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">']
    for y, text in y_ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>')
    for x, value in x_ticks:
        parts.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{value:g}</text>')
    return parts


def _legend(names: Sequence[str]) -> tuple[str, int]:
    """Return the legend above a chart and its number of rows."""
    parts, x, row = [], float(LEFT), 0
    for i, name in enumerate(names):
        text = name if len(name) <= 24 else f"{name[:23]}…"
        width = 40 + 7.0 * len(text)
        if x > LEFT and x + width > WIDTH + 12:
            x, row = float(LEFT), row + 1
        y = 14 + LEGEND_ROW * row
        parts.append(f'<line class="line c{i % 4}" x1="{x:.0f}" x2="{x + 18:.0f}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="legend" x="{x + 23:.0f}" y="{y + 4}">{escape(text)}</text>')
        x += width
    return "".join(parts), row + 1


def _ticks(low: float, high: float, max_ticks: int = 5) -> list[float]:
    if not high > low:
        pad = abs(low) / 10 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / (max_ticks - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _format_tick(tick: float, ticks: Sequence[float]) -> str:
    """Format a tick with as many decimals as all ticks need."""
    decimals = next((d for d in range(8) if all(abs(round(t, d) - t) < 1e-9 for t in ticks)), 8)
    return f"{tick:.{decimals}f}" if abs(tick) < 1e5 else f"{tick:.1e}"
