"""Draw docs/images/xor.png: the XOR problem, after a linear metric and after a kernel metric.

python docs/draw_xor.py
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import nearkin as nk
from nearkin.linear import KernelMetricLearner, MetricLearner


@dataclass(frozen=True)
class Panel:
    title: str
    points: Any  # [N, 2]
    labels: Any
    quality: float  # MAP@R


def make_xor(count: int = 60, noise: float = 0.18, seed: int = 0) -> tuple[Any, Any]:
    """Return points and labels of four clouds at the corners of a square; opposite corners have the same class."""
    rng = np.random.default_rng(seed)
    corner = np.arange(4 * count) % 4
    centres = np.array([[-1, -1], [1, 1], [-1, 1], [1, -1]])
    return centres[corner] + noise * rng.standard_normal((4 * count, 2)), corner // 2


def compare() -> dict[str, Panel]:
    """Train on one sample and show another. In the space of the kernel (x . y + 1)^2, x1 * x2 is a direction."""
    x, y = make_xor(seed=0)
    new, labels = make_xor(seed=1)
    linear = MetricLearner(form="A").fit(x, y)
    kernel = KernelMetricLearner("polynomial", degree=2, metric=MetricLearner(form="A", dim=2)).fit(x, y)
    embeddings = {"input": new, "linear": linear.transform(new), "kernel": kernel.transform(new)}
    titles = {"input": "input", "linear": "linear metric", "kernel": "metric with a polynomial kernel"}
    return {
        name: Panel(titles[name], points, labels, nk.score(points, labels, similarity="euclidean")["MAP@R"])
        for name, points in embeddings.items()
    }


def draw(panels: dict[str, Panel], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(9.6, 3.3), layout="constrained")
    for axis, panel in zip(axes, panels.values(), strict=True):
        for label, colour, marker in ((0, "#1f5fa8", "o"), (1, "#d9822b", "^")):
            points = panel.points[panel.labels == label]
            axis.scatter(points[:, 0], points[:, 1], s=16, c=colour, marker=marker, alpha=0.7, linewidths=0)
        axis.set_title(f"{panel.title}\nMAP@R {100 * panel.quality:.1f} %", fontsize=10)
        axis.set_aspect("equal", adjustable="datalim")
        axis.set_xticks([])
        axis.set_yticks([])
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    draw(compare(), Path(__file__).parent / "images" / "xor.png")
