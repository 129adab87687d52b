"""Distillation: a network learns to reproduce the similarities of a larger one, or of several joined (a teacher)."""

from dataclasses import replace

import torch
from torch import Tensor

from nearkin._common.progress import Reporter
from nearkin.config.recipe import Recipe
from nearkin.data import sources
from nearkin.data.splits import make_split
from nearkin.data.table import Table
from nearkin.errors import ConfigError
from nearkin.losses.weighted_sum import AnyObjective
from nearkin.models.embedder import Embedder
from nearkin.models.frozen import FrozenFeatures
from nearkin.models.heads import unit
from nearkin.models.saved import load


def load_teacher(recipe: Recipe, *, own_data: bool) -> Embedder | None:
    """Load the model that a recipe names as its teacher, if it names one."""
    if not recipe.train.teacher:
        return None
    if own_data or recipe.data.source == "features":
        raise ConfigError("train.teacher: reads the images of a folder, table or benchmark itself. Leave it out.")
    return load(recipe.train.teacher)


def teacher_vectors(
    teacher: Embedder, recipe: Recipe, train: Table, device: torch.device, reporter: Reporter
) -> Tensor:
    """Compute the unit vectors of the training images by the teacher, which reads them at its own size."""
    data = replace(recipe.data, image_size=teacher.image_shape[-1], augment=teacher.augment)
    table = sources.load(data, reporter)
    part = make_split(table, data)[0].train
    assert (part.labels == train.labels).all()
    features = FrozenFeatures(teacher.to(device), table, on_disk=data.cache, reporter=reporter).add_to(part).features
    assert features is not None
    return unit(teacher.embed(features, raw=True))


def distil(objective: AnyObjective, teacher: Tensor, weight: float, emb: Tensor, labels: Tensor) -> Tensor:
    """The loss of a batch, and the mean squared difference of its cosine similarities from those of the teacher.

    Args:
        objective: The loss.
        teacher: [N, T] unit vectors of the same images by the teacher.
        weight: Of the difference.
        emb: [N, D] embeddings.
        labels: [N].
    """
    student = unit(emb)
    difference = student @ student.T - (teacher @ teacher.T).to(emb)
    loss: Tensor = objective(emb, labels)
    return loss + weight * difference.square().mean()
