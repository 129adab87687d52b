"""The inputs of one epoch's steps: augmented images, or varied features where the backbone is frozen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from nearkin.config.recipe import Recipe
from nearkin.data.images import Rows
from nearkin.data.table import Table
from nearkin.data.transforms import AUGMENTS, training_batches


def training_inputs(
    table: Table, plan: Sequence[Rows], recipe: Recipe, *, epoch: int, start: int = 0, first: int = 0
) -> Iterator[Tensor]:
    """The batches plan[start:] of an epoch. What varies is drawn from (seed, epoch, step), so a resumed run sees the
    same inputs as one that was not stopped. first: the place of this process's first row in the whole batch.
    """
    if table.features is None:
        data = recipe.data
        drawn = {"seed": recipe.seed, "epoch": epoch, "start": start, "workers": data.num_workers, "first": first}
        yield from training_batches(table.images, plan, AUGMENTS[data.augment], **drawn)
        return
    features, labels = torch.from_numpy(table.features), table.labels
    noise, mix = recipe.train.feature_noise, recipe.train.feature_mix
    spread = features.std(dim=0) if noise else torch.empty(0)
    order = np.argsort(labels, kind="stable")  # the rows of a class lie side by side
    sizes = np.bincount(labels, minlength=table.num_classes)
    begins = np.cumsum(sizes) - sizes
    for step in range(start, len(plan)):
        rows = plan[step]
        batch = features[torch.from_numpy(rows)]
        chance = np.random.default_rng((recipe.seed, epoch, step, first))
        if mix:
            of_class = labels[rows]
            others = order[begins[of_class] + (chance.random(len(rows)) * sizes[of_class]).astype(np.int64)]
            share = torch.from_numpy(chance.random((len(rows), 1)) * mix).float()
            batch = batch.lerp(features[torch.from_numpy(others)], share)
        if noise:
            batch = batch + noise * spread * torch.from_numpy(chance.standard_normal(batch.shape)).float()
        yield batch
