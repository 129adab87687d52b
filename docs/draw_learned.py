"""Draw docs/images/learned.png: images of eight kinds that were never trained on, before and after training.

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
from nearkin.data import sources
from nearkin.data.splits import make_split
from nearkin.training.factory import make_model
from nearkin.training.run import Run

KINDS = 8
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#222222", "#8a6d00")
MARKS = "osD^vP*X"


def main() -> None:
    quiet = Reporter(quiet=True)
    run = Run(sys.argv[1])
    table = sources.load(run.recipe.data, quiet)
    split, holdout = make_split(table, run.recipe.data)
    unseen = holdout.open()
    some = unseen.of_classes(np.arange(0, unseen.num_classes, unseen.num_classes // KINDS)[:KINDS])
    start = make_model(run.recipe, table, quiet)
    start.fit_pixel_norm(split.train.images)
    figure = Figure(figsize=(8, 3.9), layout="constrained")
    for axes, model, title in zip(figure.subplots(1, 2), (start, run.embedder()), ("before", "after"), strict=True):
        vectors = model.embed(some.images)
        flat = torch.pca_lowrank(vectors, 2, niter=8)[0].numpy()
        for kind in range(KINDS):
            rows = some.labels == kind
            axes.scatter(*flat[rows].T, s=26, marker=MARKS[kind], color=COLOURS[kind], label=some.class_names[kind])
        recall = 100 * nk.score(vectors, some.labels)["R@1"]
        axes.set_title(f"{title} training: the nearest is of its kind for {recall:.0f} %", fontsize=10)
        axes.set_xticks([])
        axes.set_yticks([])
    figure.savefig(Path(__file__).parent / "images" / "learned.png", dpi=90, facecolor="white")


if __name__ == "__main__":
    main()
