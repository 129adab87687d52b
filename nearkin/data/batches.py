"""Training inputs of one epoch: augmented images, or augmented features if the backbone is frozen."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from nearkin.config.recipe import Recipe
from nearkin.data.images import Rows
from nearkin.data.table import Table
from nearkin.data.transforms import AUGMENTS, training_batches


def training_inputs(
    table: Table,
    plan: Sequence[Rows],
    recipe: Recipe,
    *,
    epoch: int,
    start: int = 0,
    first: int = 0,
    batch_size: int | None = None,
) -> Iterator[Tensor]:
    """Yield the batches plan[start:] of an epoch; those of a rank begin at row `first` of `batch_size` global ones."""
    if table.features is None:
        order = {"seed": recipe.seed, "epoch": epoch, "start": start, "first": first}
        augment = AUGMENTS[recipe.data.augment]
        yield from training_batches(table.images, plan, augment, workers=recipe.data.num_workers, **order)
        return
    # Features are mixed with others of their class and with Gaussian noise as the recipe says.
    features, labels = torch.from_numpy(table.features), table.labels
    noise, mix = recipe.train.feature_noise, recipe.train.feature_mix
    std = features.std(dim=0) if noise else torch.empty(0)
    by_class = np.argsort(labels, kind="stable")
    class_sizes = np.bincount(labels, minlength=table.num_classes)
    class_starts = np.cumsum(class_sizes) - class_sizes
    for step in range(start, len(plan)):
        rows = plan[step]
        batch = features[torch.from_numpy(rows)]
        # Drawn for the global batch, so that an image does not depend on the number of ranks.
        rng = np.random.default_rng((recipe.seed, epoch, step, 0))
        size, share = batch_size or len(rows), slice(first, first + len(rows))
        if mix:
            classes = labels[rows]
            within_class = (rng.random(size)[share] * class_sizes[classes]).astype(np.int64)
            partners = by_class[class_starts[classes] + within_class]
            weight = torch.from_numpy(rng.random((size, 1))[share] * mix).float()
            batch = batch.lerp(features[torch.from_numpy(partners)], weight)
        if noise:
            draws = rng.standard_normal((size, batch.shape[1]))[share]
            batch = batch + noise * std * torch.from_numpy(draws).float()
        yield batch
