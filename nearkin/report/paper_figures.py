"""The figures of a paper's study, in the print style: as PNG and SVG, every method drawn, published values dashed."""

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch.nn import functional as F

from nearkin._common.progress import Reporter
from nearkin.bench.paper_studies import paper_studies
from nearkin.bench.trials import StudyFolder
from nearkin.report.paper_tables import Cell, paper_cells
from nearkin.report.print_figures import (
    COLOURS,
    HATCHES,
    WIDTH,
    draw_over,
    group_lines,
    panels,
    plot_lines,
    write_drawings,
)
from nearkin.training.run import Run

THUMBNAILS, THUMBNAIL, MAP_SIDE = 800, 40, 1600  # of a t-SNE map: number of images, their side and that of the map


def write_paper_figures(folder: StudyFolder) -> list[Path]:
    """Write the figures of a paper's study to its folder `figures`; those without data are left out."""
    paper = paper_studies()[folder.study.paper]
    cells = [cell for cell in paper_cells(folder) if cell.status != "quoted"]
    drawings: dict[str, Callable[[Any, StudyFolder], bool]] = {
        "bars": partial(_draw_bars, cells=cells),
        "sizes": partial(_draw_settings, cells=cells, field="size", x_label="embedding size"),
        "networks": partial(_draw_settings, cells=cells, field="backbone", x_label="network"),
        "recall": partial(_draw_recall, cells=cells),
        "variants": partial(_draw_variants, cells=cells, x_label=paper.x_label),
        "ratios": partial(_draw_variants, cells=cells, x_label="training classes, % of training and validation"),
        "training": _draw_training,
        "tsne": _draw_tsne,
    }
    return write_drawings({name: drawings[name] for name in paper.figures}, folder, folder.path / "figures")


def _curve(cells: Sequence[Cell], x: Callable[[Cell], Any], what: str = "ours") -> tuple[list[Any], list[float]]:
    points = [(x(cell), getattr(cell, what)) for cell in cells if not math.isnan(getattr(cell, what))]
    return [p[0] for p in points], [p[1] for p in points]


def _by(cells: Sequence[Cell], name: str) -> dict[Any, list[Cell]]:
    groups: dict[Any, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(getattr(cell, name), []).append(cell)
    return groups


def _draw_bars(figure: Any, folder: StudyFolder, cells: Sequence[Cell]) -> bool:
    """Methods with a bar for each metric, as figure 27 of the thesis; one plot per part."""
    cells = [cell for cell in cells if not math.isnan(cell.ours)]
    parts = _by(cells, "part")
    if not parts:
        return False
    plots = panels(figure, list(parts), wide=1.6 * WIDTH, rehearsal=folder.study.rehearsal)
    for axes, own in zip(plots, parts.values(), strict=True):
        rows, metrics = list(_by(own, "row")), _by(own, "metric")
        width = 0.84 / len(metrics)
        for i, (metric, bars) in enumerate(metrics.items()):
            x = np.array([rows.index(bar.row) for bar in bars]) + (i - (len(metrics) - 1) / 2) * width
            style = {"color": COLOURS[i % 6], "hatch": HATCHES[i % 6], "edgecolor": "white"}
            axes.bar(x, [bar.ours for bar in bars], width * 0.94, label=metric, **style)
        axes.set_xticks(range(len(rows)), rows, rotation=30, ha="right", fontsize=7)
        axes.grid(axis="x", visible=False)
        axes.set_ylabel("%")
        axes.legend(ncols=len(metrics), loc="lower left", bbox_to_anchor=(0.25, 1.0), fontsize=7)
    return True


def _draw_settings(figure: Any, folder: StudyFolder, cells: Sequence[Cell], field: str, x_label: str) -> bool:
    """The first metric of every method over sizes or networks; one plot for each setting of the rest."""
    cells = [cell for cell in cells if cell.metric == cells[0].metric]
    other = "backbone" if field == "size" else "size"
    lines = group_lines((f"{c.dataset} {getattr(c, other)}", c.row, getattr(c, field), c.ours) for c in cells)
    y_label = f"{cells[0].metric}, %"
    return draw_over(figure, lines, x_label, y_label, rehearsal=folder.study.rehearsal)


def _draw_recall(figure: Any, folder: StudyFolder, cells: Sequence[Cell]) -> bool:
    """R@k over k for every method; one plot per part."""
    known = [cell for cell in cells if cell.metric.startswith("R@") and not math.isnan(cell.ours)]
    points = ((cell.part, cell.row, int(cell.metric.removeprefix("R@")), cell.ours) for cell in known)
    lines = group_lines(points, fewest=1)  # some tables have R@1 only
    return draw_over(figure, lines, "k", "R@k, %", rehearsal=folder.study.rehearsal)


def _draw_variants(figure: Any, folder: StudyFolder, cells: Sequence[Cell], x_label: str) -> bool:
    """Each metric over the number in the names of the rows (K = 4, s = 64, 90/10), with the published curve in grey."""
    parts = _by(cells, "part")
    names = [f"{part}: {metric}" for part, own in parts.items() for metric in _by(own, "metric")]
    plots = iter(panels(figure, names, rehearsal=folder.study.rehearsal))
    for own in parts.values():
        for metric, points in _by(own, "metric").items():
            axes = next(plots)
            ours = ("ours", *_curve(points, _number))
            plot_lines(axes, [ours], x_label, f"{metric.removeprefix('val:')}, %")
            spread = [cell.std for cell in points if not math.isnan(cell.ours)]
            if ours[1] and not any(map(math.isnan, spread)):
                axes.errorbar(ours[1], ours[2], spread, fmt="none", ecolor=COLOURS[0], elinewidth=0.9, capsize=2)
            x, y = _curve(points, _number, "published")
            if x:
                axes.plot(x, y, color="#777777", linestyle="--", marker="s", label="published")
                axes.legend()
            axes.set_xticks([_number(cell) for cell in points])
    return bool(names)


def _number(cell: Cell) -> float:
    match = re.search(r"\d+(\.\d+)?", cell.row)
    return float(match[0]) if match else math.nan


def _draw_training(figure: Any, folder: StudyFolder) -> bool:
    """Training loss and validation R@1 of every method by epoch, from the runs of the first seed and dataset."""
    curves: dict[str, list[tuple[str, list[int], list[float]]]] = {"training loss": [], "validation R@1, %": []}
    first = folder.trials[0]
    for trial, outcome in folder.finished():
        if trial.dataset != first.dataset or trial.seed != first.seed or outcome.run is None:
            continue
        epochs = [event for event in Run(outcome.run).events() if event["event"] == "epoch"]
        x = [event["epoch"] for event in epochs]
        losses = [math.nan if event["loss"] is None else event["loss"] for event in epochs]
        curves["training loss"].append((trial.method, x, losses))
        recall = [100 * event["val"]["R@1"] if event["val"] else math.nan for event in epochs]
        curves["validation R@1, %"].append((trial.method, x, recall))
    if not curves["training loss"]:
        return False
    plots = panels(figure, [first.dataset] * 2, rehearsal=folder.study.rehearsal)
    for axes, (label, lines) in zip(plots, curves.items(), strict=True):
        axes.xaxis.get_major_locator().set_params(integer=True)
        plot_lines(axes, lines, "epoch", label)
    return True


def _draw_tsne(figure: Any, folder: StudyFolder) -> bool:
    """A t-SNE map of the test embeddings of the first finished trial, drawn with thumbnails."""
    from nearkin.report.gallery import load_eval_data, sample, tsne

    run = next((Run(outcome.run) for _, outcome in folder.finished() if outcome.run), None)
    if run is None:
        return False
    data = load_eval_data(run, reporter=Reporter(quiet=True))
    rows = sample(data.table.labels, np.arange(len(data)), max_rows=THUMBNAILS)
    xy = tsne(data.emb[rows]).astype(float)
    images = F.interpolate(data.table.images.read(rows).float(), (THUMBNAIL, THUMBNAIL), mode="area").byte()
    corners = (xy - xy.min(0)) / max(float(np.ptp(xy, axis=0).max()), 1.0) * (MAP_SIDE - THUMBNAIL)
    canvas = np.full((MAP_SIDE, MAP_SIDE, 3), 255, np.uint8)
    for (x, y), image in zip(corners.round().astype(int), images.permute(0, 2, 3, 1).numpy(), strict=True):
        canvas[y : y + THUMBNAIL, x : x + THUMBNAIL] = image
    figure.set_size_inches(7.0, 7.0)
    axes = figure.add_subplot()
    axes.imshow(canvas)
    axes.set_axis_off()
    mark = "REHEARSAL: " if folder.study.rehearsal else ""
    classes = len(np.unique(data.table.labels[rows]))
    axes.set_title(f"{mark}t-SNE of {len(rows)} test images of {classes} classes ({data.table.source})", fontsize=9)
    return True
