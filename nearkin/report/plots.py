"""Charts drawn as inline SVG: no script, sharp at any size, coloured by the page's own style."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 44, 120, 16, 34


def learning_curve(epochs: Sequence[dict[str, Any]], chosen: int) -> str:
    """Validation R@1 and MAP@R by epoch, with the epoch that was chosen."""
    epochs = [event for event in epochs if event["val"] is not None]  # a run may have no validation classes
    if not epochs:
        return ""
    numbers: list[int] = [event["epoch"] for event in epochs]
    first, last = numbers[0], max(numbers[-1], numbers[0] + 1)

    def x(epoch: int) -> float:
        return LEFT + (epoch - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(share: float) -> float:
        return TOP + (1 - share) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Validation R@1 and MAP@R by epoch">']
    for percent in (0, 25, 50, 75, 100):
        at = y(percent / 100)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{percent}</text>')
    step = max(1, len(numbers) // 8)
    for number in numbers[::step]:
        parts.append(f'<text class="tick" x="{x(number):.1f}" y="{HEIGHT - 12}" text-anchor="middle">{number}</text>')
    parts.append(f'<text class="tick" x="{WIDTH - RIGHT + 8}" y="{HEIGHT - 12}">epoch</text>')
    parts.append(f'<line class="chosen" x1="{x(chosen):.1f}" x2="{x(chosen):.1f}" y1="{TOP}" y2="{y(0):.1f}"/>')
    for order, metric in enumerate(("R@1", "MAP@R")):
        values = [event["val"][metric] for event in epochs]
        points = " ".join(f"{x(n):.1f},{y(v):.1f}" for n, v in zip(numbers, values, strict=True))
        parts.append(f'<polyline class="line c{order}" points="{points}"/>')
        for number, value in zip(numbers, values, strict=True):
            title = f"<title>epoch {number}: {metric} {100 * value:.1f}</title>"
            parts.append(
                f'<circle class="dot c{order}" cx="{x(number):.1f}" cy="{y(value):.1f}" r="4">{title}</circle>'
            )
        label_y = y(values[-1]) + 4
        parts.append(
            f'<text class="name c{order}" x="{WIDTH - RIGHT + 10}" y="{label_y:.1f}">'
            f"{metric} {100 * values[-1]:.1f}</text>"
        )
    parts.append("</svg>")
    return "".join(parts)
