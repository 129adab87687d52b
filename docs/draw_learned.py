"""Draw docs/images/learned.png: images of eight unseen classes, before and after training.

python docs/draw_learned.py RUN        # the run folder of `nearkin demo`
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

import nearkin as nk
from nearkin._common.progress import Reporter
from nearkin.data import load, make_split
from nearkin.training import Run, make_model

NUM_CLASSES = 8
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#222222", "#8a6d00")
MARKERS = "osD^vP*X"


def main() -> None:
    reporter = Reporter(quiet=True)
    run = Run(sys.argv[1])
    table = load(run.recipe.data, reporter)
    split, holdout = make_split(table, run.recipe.data)
    test = holdout.open()
    sample = test.of_classes(np.arange(0, test.num_classes, test.num_classes // NUM_CLASSES)[:NUM_CLASSES])
    untrained = make_model(run.recipe, table, reporter)
    untrained.fit_pixel_norm(split.train.images)
    figure = Figure(figsize=(8, 3.9), layout="constrained")
    models = {"before": untrained, "after": run.embedder()}
    for axes, (when, model) in zip(figure.subplots(1, 2), models.items(), strict=True):
        embeddings = model.embed(sample.images)
        projected = torch.pca_lowrank(embeddings, 2, niter=8)[0].numpy()
        for label in range(NUM_CLASSES):
            points = projected[sample.labels == label]
            name = sample.class_names[label]
            axes.scatter(*points.T, s=26, marker=MARKERS[label], color=COLOURS[label], label=name)
        recall = 100 * nk.score(embeddings, sample.labels)["R@1"]
        axes.set_title(f"{when} training: R@1 {recall:.0f} %", fontsize=10)
        axes.set_xticks([])
        axes.set_yticks([])
    figure.savefig(Path(__file__).parent / "images" / "learned.png", dpi=90, facecolor="white")


if __name__ == "__main__":
    main()
