"""Charts drawn as inline SVG: no script, sharp at any size, coloured by the page's own style.

Each is made for about 360 pixels of width, so that its letters stay readable on a phone; a page puts several side by
side. Series are told apart by colour, by dashes and by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 360, 210
LEFT, RIGHT, TOP, BOTTOM = 44, 14, 30, 26


@dataclass(frozen=True)
class Series:
    """A line: its name, and its points from left to right; None and what is not finite leave a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]

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
    span: tuple[float, float] | None = None,
) -> str:
    """Lines over a common axis, or nothing where no series has a value.

    label        says in words what is drawn, for those who do not see it
    mark         an x that is pointed out, as the epoch that was kept
    logarithmic  spaces the x by their logarithms
    span         of the y axis; by default what the values take
    """
    xs, ys = ([point[axis] for one in series for point in one.points] for axis in (0, 1))
    if not ys:
        return ""
    ticks = _ticks(*(span or (min(ys), max(ys))))
    low, high = (min(ticks[0], min(ys)), max(ticks[-1], max(ys))) if span is None else span
    warp = math.log if logarithmic else float
    first, last = warp(min(xs)), warp(max(xs))

    def x_at(x: float) -> float:
        share = (warp(x) - first) / (last - first) if last > first else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    names, rows = _names([one.name for one in series])
    top = TOP + 16 * (rows - 1)

    def y_at(y: float) -> float:
        return top + (high - y) / (high - low) * (HEIGHT - top - BOTTOM)

    parts = [_open(label)]
    for tick in ticks:
        parts.append(_rule(y_at(tick), _number(tick, ticks)))
    places = sorted(set(xs))
    for x in places[:: max(1, math.ceil(len(places) / 7))]:
        parts.append(f'<text class="tick" x="{x_at(x):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{x:g}</text>')
    parts.append(f'<text class="tick" x="2" y="{HEIGHT - 8}">{escape(x_name)}</text>')
    if mark is not None:
        at = x_at(mark)
        parts.append(f'<line class="chosen" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{HEIGHT - BOTTOM}"/>')
    for order, one in enumerate(series):
        path = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in one.points)
        parts.append(f'<polyline class="line c{order % 4}" points="{path}"/>')
        for x, y in one.points if len(one.points) <= 60 else ():
            title = f"<title>{escape(one.name)}, {escape(x_name)} {x:g}: {y:.4g}</title>"
            parts.append(
                f'<circle class="dot c{order % 4}" cx="{x_at(x):.1f}" cy="{y_at(y):.1f}" r="3">{title}</circle>'
            )
    return "".join([*parts, names]) + "</svg>"


def histogram(groups: Sequence[tuple[str, Sequence[float]]], label: str, low: float, high: float) -> str:
    """Shares over even bins between low and high, each group as a filled outline of area 1."""
    total = [sum(counts) for _, counts in groups]
    if not all(total):
        return ""
    shares = [[count / all_ for count in counts] for (_, counts), all_ in zip(groups, total, strict=True)]
    used = [i for i in range(len(shares[0])) if any(one[i] for one in shares)]
    begin, end = max(0, used[0] - 1), min(len(shares[0]), used[-1] + 2)
    step = (high - low) / len(shares[0])
    peak = max(map(max, shares))
    left, right = low + begin * step, low + end * step

    def x_at(x: float) -> float:
        return LEFT + (x - left) / (right - left) * (WIDTH - LEFT - RIGHT)

    floor = HEIGHT - BOTTOM
    parts = [_open(label)]
    for tick in _ticks(0, 100 * peak):
        if tick <= 105 * peak:
            parts.append(_rule(floor - tick / (105 * peak) * (floor - TOP), f"{tick:g} %"))
    for tick in _ticks(left, right):
        if left <= tick <= right:
            parts.append(
                f'<text class="tick" x="{x_at(tick):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{tick:g}</text>'
            )
    for order, one in enumerate(shares):
        path = [f"M{x_at(left):.1f},{floor}"]
        for i in range(begin, end):
            y = floor - one[i] / (1.05 * peak) * (floor - TOP)
            path.append(f"L{x_at(low + i * step):.1f},{y:.1f}L{x_at(low + (i + 1) * step):.1f},{y:.1f}")
        parts.append(f'<path class="area c{order % 4}" d="{"".join(path)}L{x_at(right):.1f},{floor}Z"/>')
    return "".join([*parts, _names([name for name, _ in groups])[0]]) + "</svg>"


# --- the parts of a chart --------------------------------------------------------------------------------------------


def _open(label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'


def _rule(y: float, text: str) -> str:
    return (
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>'
    )


def _names(names: Sequence[str]) -> tuple[str, int]:
    """The names of the series above the chart, each after a piece of its line, and how many rows they take."""
    parts, x, row = [], float(LEFT), 0
    for order, name in enumerate(names):
        shown = name if len(name) <= 24 else f"{name[:23]}…"
        wide = 40 + 7.0 * len(shown)
        if x > LEFT and x + wide > WIDTH + 12:
            x, row = float(LEFT), row + 1
        y = 14 + 16 * row
        parts.append(f'<line class="line c{order % 4}" x1="{x:.0f}" x2="{x + 18:.0f}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="legend" x="{x + 23:.0f}" y="{y + 4}">{escape(shown)}</text>')
        x += wide
    return "".join(parts), row + 1


def _ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers that reach from low to high.

    >>> _ticks(0, 100)
    [0.0, 25.0, 50.0, 75.0, 100.0]
    >>> _ticks(0.31, 0.34)
    [0.31, 0.32, 0.33, 0.34]
    """
    if not high > low:
        pad = abs(low) / 10 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _number(tick: float, ticks: Sequence[float]) -> str:
    """A tick with as many digits as all of them need."""
    digits = next((d for d in range(8) if all(abs(round(t, d) - t) < 1e-9 for t in ticks)), 8)
    return f"{tick:.{digits}f}" if abs(tick) < 1e5 else f"{tick:.1e}"
