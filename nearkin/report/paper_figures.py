"""The figures of a paper's study, in the print style: as PNG and SVG, every method drawn, published values dashed."""

import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch.nn import functional as F

from nearkin._common.progress import Reporter
from nearkin.bench.paper_studies import paper_studies
from nearkin.bench.study import REHEARSAL
from nearkin.bench.trials import StudyFolder
from nearkin.report import print_figures as plot
from nearkin.report.paper_tables import Cell, paper_cells
from nearkin.training.run import Run

THUMBNAILS, THUMBNAIL, MAP_SIDE = 800, 40, 1600  # of a t-SNE map: number of images, their side and that of the map


def write_paper_figures(folder: StudyFolder) -> list[Path]:
    """Write the figures of a paper's study to its folder `figures`; those without data are left out."""
    paper = paper_studies()[folder.study.paper]
    cells = [cell for cell in paper_cells(folder) if cell.status != "quoted"]
    drawings = {
        "bars": partial(_draw_bars, cells=cells),
        "sizes": partial(_draw_settings, cells=cells, field="size", x_label="embedding size"),
        "networks": partial(_draw_settings, cells=cells, field="backbone", x_label="network"),
        "recall": partial(_draw_recall, cells=cells),
        "variants": partial(_draw_variants, cells=cells, x_label=paper.x_label),
        "ratios": partial(_draw_variants, cells=cells, x_label="training classes, % of training and validation"),
        "training": partial(_draw_training, folder=folder),
        "tsne": partial(_draw_tsne, folder=folder),
    }
    title = REHEARSAL.rstrip(": ") if folder.study.rehearsal else ""
    return plot.write_drawings({name: drawings[name] for name in paper.figures}, folder.path / "figures", title)


def _by(cells: Sequence[Cell], name: str) -> dict[Any, list[Cell]]:
    groups: dict[Any, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(getattr(cell, name), []).append(cell)
    return groups


def _draw_bars(figure: Any, cells: Sequence[Cell]) -> bool:
    """Methods with a bar for each metric, as figure 27 of the thesis; one plot per part."""
    parts = _by([cell for cell in cells if not math.isnan(cell.ours)], "part")
    plots = plot.panels(figure, list(parts), wide=1.6 * plot.WIDTH) if parts else []
    for axes, own in zip(plots, parts.values(), strict=True):
        values = {(cell.metric, cell.row): cell.ours for cell in own}
        rows, metrics = list(_by(own, "row")), list(_by(own, "metric"))
        plot.plot_bars(axes, {m: [values.get((m, row), math.nan) for row in rows] for m in metrics}, rows)
        axes.set_xticks(range(len(rows)), rows, rotation=30, ha="right", fontsize=7)
        axes.set_ylabel("%")
        axes.legend(ncols=len(metrics), loc="lower left", bbox_to_anchor=(0.25, 1.0), fontsize=7)
    return bool(parts)


def _draw_settings(figure: Any, cells: Sequence[Cell], field: str, x_label: str) -> bool:
    """The first metric of every method over sizes or networks; one plot for each setting of the rest."""
    cells = [cell for cell in cells if cell.metric == cells[0].metric]
    other = "backbone" if field == "size" else "size"
    lines = plot.group_lines((f"{c.dataset} {getattr(c, other)}", c.row, getattr(c, field), c.ours) for c in cells)
    return plot.draw_over(figure, lines, x_label, f"{cells[0].metric}, %")


def _draw_recall(figure: Any, cells: Sequence[Cell]) -> bool:
    """R@k over k for every method; one plot per part."""
    known = [cell for cell in cells if cell.metric.startswith("R@") and not math.isnan(cell.ours)]
    points = ((cell.part, cell.row, int(cell.metric.removeprefix("R@")), cell.ours) for cell in known)
    return plot.draw_over(figure, plot.group_lines(points, fewest=1), "k", "R@k, %")  # some tables have R@1 only


def _draw_variants(figure: Any, cells: Sequence[Cell], x_label: str) -> bool:
    """Each metric over the number in the names of the rows (K = 4, s = 64, 90/10), with the published curve in grey."""
    curves = [(f"{part}: {m}", c) for part, own in _by(cells, "part").items() for m, c in _by(own, "metric").items()]
    for axes, (_, points) in zip(plot.panels(figure, [name for name, _ in curves]), curves, strict=True):
        numbers = [re.search(r"\d+(\.\d+)?", cell.row) for cell in points]
        x = np.array([float(number[0]) if number else math.nan for number in numbers])
        ours, published, spread = np.array([(cell.ours, cell.published, cell.std) for cell in points]).T
        known, printed = np.isfinite(ours), np.isfinite(published)
        plot.plot_lines(axes, [("ours", x[known], ours[known])], x_label, f"{points[0].metric.removeprefix('val:')}, %")
        if known.any() and np.isfinite(spread[known]).all():
            bars = {"ecolor": plot.COLOURS[0], "elinewidth": 0.9, "capsize": 2}
            axes.errorbar(x[known], ours[known], spread[known], fmt="none", **bars)
        if printed.any():
            axes.plot(x[printed], published[printed], color="#777777", linestyle="--", marker="s", label="published")
            axes.legend()
        axes.set_xticks(x)
    return bool(curves)


def _draw_training(figure: Any, folder: StudyFolder) -> bool:
    """Training loss and validation R@1 of every method by epoch, from the runs of the first seed and dataset."""
    losses, recalls, first = [], [], folder.trials[0]
    for trial, outcome in folder.finished():
        if trial.dataset != first.dataset or trial.seed != first.seed or outcome.run is None:
            continue
        epochs = [event for event in Run(outcome.run).events() if event["event"] == "epoch"]
        x = [event["epoch"] for event in epochs]
        losses.append((trial.method, x, [math.nan if e["loss"] is None else e["loss"] for e in epochs]))
        recalls.append((trial.method, x, [100 * e["val"]["R@1"] if e["val"] else math.nan for e in epochs]))
    plots = plot.panels(figure, [first.dataset] * 2) if losses else []
    for axes, label, lines in zip(plots, ("training loss", "validation R@1, %"), (losses, recalls), strict=False):
        axes.xaxis.get_major_locator().set_params(integer=True)
        plot.plot_lines(axes, lines, "epoch", label)
    return bool(losses)


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
    classes = len(np.unique(data.table.labels[rows]))
    axes.set_title(f"t-SNE of {len(rows)} test images of {classes} classes ({data.table.source})", fontsize=9)
    return True
