"""Charts as inline SVG: no script, sharp at any size, coloured by the style of the page, readable on a phone."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from nearkin.report.html import environment

WIDTH, HEIGHT = 360, 210
LEFT, RIGHT, TOP, FLOOR = 44, 346, 30, 184  # edges of the plot
LEGEND_ROW = 16
MAX_DOTS = 60  # longer lines are drawn without dots


class Series(NamedTuple):
    """A line of a chart."""

    name: str
    x: Sequence[float]  # from left to right
    y: Sequence[float | None]  # None, NaN and infinity leave a gap


def line_chart(
    series: Sequence[Series], label: str, *, x_name: str = "epoch", mark: float | None = None, logarithmic: bool = False
) -> str:
    """Draw lines over a common axis; empty without any value."""
    known = [[(x, y) for x, y in zip(s.x, s.y, strict=True) if y is not None and math.isfinite(y)] for s in series]
    xs, ys = ([point[axis] for points in known for point in points] for axis in (0, 1))
    if not ys:
        return ""
    ticks = _ticks(min(ys), max(ys))
    decimals = next((d for d in range(8) if all(abs(round(t, d) - t) < 1e-9 for t in ticks)), 8)
    legend = _legend([line.name for line in series])
    top = TOP - 14 + legend[-1][1]
    x_pixel = _scale(min(xs), max(xs), LEFT, RIGHT, math.log if logarithmic else float)
    y_pixel = _scale(min(ticks[0], min(ys)), max(ticks[-1], max(ys)), FLOOR, top)
    x_values = sorted(set(xs))
    lines = []
    for (name, *_), points in zip(series, known, strict=True):
        dots = [(x_pixel(x), y_pixel(y), f"{name}, {x_name} {x:g}: {y:.4g}") for x, y in points]
        lines.append(([dot[:2] for dot in dots], dots if len(dots) <= MAX_DOTS else []))
    return _render(
        label=label,
        y_ticks=[(y_pixel(t), f"{t:.{decimals}f}" if abs(t) < 1e5 else f"{t:.1e}") for t in ticks],
        x_ticks=[(x_pixel(x), f"{x:g}") for x in x_values[:: max(1, math.ceil(len(x_values) / 7))]],
        x_name=x_name,
        mark=None if mark is None else x_pixel(mark),
        top=top,
        lines=lines,
        legend=legend,
    )


def histogram(groups: Sequence[tuple[str, Sequence[float]]], label: str, low: float, high: float) -> str:
    """Draw overlaid histograms, each normalized to a total of 100 %."""
    if not all(sum(counts) for _, counts in groups):
        return ""
    shares = [[100 * count / sum(counts) for count in counts] for _, counts in groups]
    used = [i for i in range(len(shares[0])) if any(group[i] for group in shares)]
    bins = range(max(0, used[0] - 1), min(len(shares[0]), used[-1] + 2))
    bin_width = (high - low) / len(shares[0])
    left, right, peak = low + bins[0] * bin_width, low + (bins[-1] + 1) * bin_width, max(map(max, shares))
    x_pixel, y_pixel = _scale(left, right, LEFT, RIGHT), _scale(0, 1.05 * peak, FLOOR, TOP)
    areas = []
    for group in shares:
        steps = [(low + (b + side) * bin_width, group[b]) for b in bins for side in (0, 1)]
        areas.append([(x_pixel(x), y_pixel(y)) for x, y in [(left, 0), *steps, (right, 0)]])
    return _render(
        label=label,
        y_ticks=[(y_pixel(t), f"{t:g} %") for t in _ticks(0, peak) if t <= 1.05 * peak],
        x_ticks=[(x_pixel(t), f"{t:g}") for t in _ticks(left, right) if left <= t <= right],
        areas=areas,
        legend=_legend([name for name, _ in groups]),
    )


def _render(**values: Any) -> str:
    edges = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "floor": FLOOR}
    return environment().get_template("chart.html").render(edges | values)  # type: ignore[no-any-return]


def _scale(
    low: float, high: float, start: float, end: float, transform: Callable[[float], float] = float
) -> Callable[[float], float]:
    """Map low to the pixel `start` and high to `end`; the middle if they are the same."""
    first, last = transform(low), transform(high)

    def pixel(value: float) -> float:
        position = (transform(value) - first) / (last - first) if last > first else 0.5
        return round(start + position * (end - start), 1)

    return pixel


def _legend(names: Sequence[str]) -> list[tuple[int, int, str]]:
    """Place the names above a chart, in as many rows as they need."""
    placed: list[tuple[int, int, str]] = []
    x, y = LEFT, 14
    for name in names:
        text = name if len(name) <= 24 else f"{name[:23]}…"
        width = 40 + 7 * len(text)
        if x > LEFT and x + width > WIDTH + 12:
            x, y = LEFT, y + LEGEND_ROW
        placed.append((x, y, text))
        x += width
    return placed


def _ticks(low: float, high: float, max_ticks: int = 5) -> list[float]:
    """Return round numbers that cover low to high."""
    if not high > low:
        pad = abs(low) / 10 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / (max_ticks - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]
