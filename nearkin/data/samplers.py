"""Batch samplers. An epoch is a pure function of (seed, epoch), so any step can be reproduced.

With several processes (`rank` of `world_size`) each gets a contiguous share of every batch; the shares of one step,
concatenated in rank order, are the batch of a single process. Shares differ by at most one row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin.errors import ConfigError

Rows = NDArray[np.int64]
Labels = NDArray[Any] | Sequence[Any]  # a number or a name per row; a tensor is fine too


class Sampler(ABC):
    """Batches of row indices, epoch by epoch. It is a `batch_sampler` for torch's DataLoader as well.

    Iterating yields the batches of epoch 0, the next time those of epoch 1, and so on; `set_epoch` selects another one.

    Attributes:
        batches_per_epoch: Number of batches in every epoch.
        batch_size: Actual global batch size; below the requested one if there are too few images or classes.
        share: This rank's rows of a global batch.

    Example:
        >>> sampler = BalancedSampler(["a", "a", "b", "b"], batch_size=4, samples_per_class=2, seed=0)
        >>> [sorted(batch) for batch in sampler], len(sampler)
        ([[0, 1, 2, 3]], 1)
    """

    batches_per_epoch: int
    batch_size: int
    share: slice
    _next_epoch = _next_batch = 0

    @abstractmethod
    def epoch(self, number: int) -> list[Rows]:
        """Return all batches of this epoch, in order."""

    def __len__(self) -> int:
        return self.batches_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        # A generator, which begins with its first batch: DataLoader creates iterators that it never uses.
        epoch, first = self._next_epoch, self._next_batch
        self.set_epoch(epoch + 1)
        for rows in self.epoch(epoch)[first:]:
            yield rows.tolist()

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        """Select the epoch that the next iteration yields, and its first batch, to resume in the middle of an epoch."""
        self._next_epoch, self._next_batch = epoch, first_batch


class RandomSampler(Sampler):
    """Random batches: every image at most once per epoch; an incomplete last batch is dropped.

    Args:
        labels: Class of each row, numbers or names; only their number matters.
        batch_size: Global batch size.
        seed: Seed of the shuffling.
        rank: This process, of `world_size`.
        world_size: Number of processes.

    Example:
        >>> sampler = RandomSampler(np.array([0, 0, 1, 1, 2]), batch_size=2, seed=0)
        >>> [len(batch) for batch in sampler.epoch(0)]
        [2, 2]
    """

    def __init__(self, labels: Labels, *, batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        self.num_rows, self.seed = len(_encode(labels)), seed
        self.batch_size = min(batch_size, self.num_rows)
        self.share = _batch_share(self.batch_size, rank, world_size)
        self.batches_per_epoch = self.num_rows // self.batch_size

    def epoch(self, number: int) -> list[Rows]:
        """Return all batches of this epoch, in order."""
        order = np.random.default_rng((self.seed, number)).permutation(self.num_rows)
        used = order[: self.batches_per_epoch * self.batch_size]
        return list(used.reshape(self.batches_per_epoch, self.batch_size)[:, self.share])


class BalancedSampler(Sampler):
    """Class-balanced batches: P different classes with K images each. Every class appears in every epoch.

    A class contributes one group of K images for every K images it has, and at least one (a class smaller than K
    repeats images). No batch holds two groups of one class; an epoch shows each image about once. With very imbalanced
    classes, an epoch has as many batches as can be filled without using any class more often than it has groups; a
    class with more groups contributes one to every batch, with different images in each epoch.

    Args:
        labels: Class of each row, a number or a name.
        batch_size: Global batch size; a multiple of samples_per_class.
        samples_per_class: K, images per class in a batch.
        seed: Seed of the shuffling.
        rank: This process.
        world_size: Number of processes.

    Example:
        >>> sampler = BalancedSampler(np.repeat(np.arange(6), 4), batch_size=4, samples_per_class=2, seed=0)
        >>> sampler.batches_per_epoch, [len(batch) for batch in sampler.epoch(0)]
        (6, [4, 4, 4, 4, 4, 4])
        >>> labels = np.repeat(np.arange(101), [1000] + [4] * 100)  # not 250 batches full of repeated small classes
        >>> BalancedSampler(labels, batch_size=128, samples_per_class=4, seed=0).batches_per_epoch
        4
    """

    def __init__(
        self, labels: Labels, *, batch_size: int, samples_per_class: int, seed: int, rank: int = 0, world_size: int = 1
    ) -> None:
        if batch_size % samples_per_class:
            raise ConfigError(
                f"train.batch_size: expected a multiple of train.samples_per_class ({samples_per_class}), "
                f"got {batch_size}."
            )
        classes = _encode(labels)
        by_class = np.argsort(classes, kind="stable")
        self.class_rows = np.split(by_class, np.flatnonzero(np.diff(classes[by_class])) + 1)
        self.samples_per_class, self.seed = samples_per_class, seed
        # If there are fewer classes than fit in a batch, every batch holds every class once.
        self.classes_per_batch = min(batch_size // samples_per_class, len(self.class_rows))
        self.batch_size = self.classes_per_batch * samples_per_class
        self.share = _batch_share(self.batch_size, rank, world_size)
        num_groups = np.array([max(1, len(rows) // samples_per_class) for rows in self.class_rows])
        self.batches_per_epoch = longest_epoch(num_groups, self.classes_per_batch)
        self.num_groups = np.minimum(num_groups, self.batches_per_epoch)

    def epoch(self, number: int) -> list[Rows]:
        """Return all batches of this epoch, in order."""
        rng = np.random.default_rng((self.seed, number))
        groups = self._draw_groups(rng)
        # Assign each class's groups to different batches, classes with the most groups first and always to the
        # emptiest batches (ties broken at random): no batch gets a class twice and all stay equally full.
        batches: list[list[Rows]] = [[] for _ in range(self.batches_per_epoch)]
        filled = np.zeros(self.batches_per_epoch, np.int64)
        order = rng.permutation(len(groups))
        for c in sorted(order, key=lambda c: -len(groups[c])):
            emptiest = np.lexsort((rng.random(len(batches)), filled))[: len(groups[c])]
            for batch, group in zip(emptiest, groups[c], strict=True):
                batches[batch].append(group)
                filled[batch] += 1
        self._fill_short_batches(batches, rng)
        return [np.concatenate(batches[b])[self.share] for b in rng.permutation(len(batches))]

    def _draw_groups(self, rng: np.random.Generator) -> list[list[Rows]]:
        """Groups of K random images of each class."""
        groups: list[list[Rows]] = []
        for rows, count in zip(self.class_rows, self.num_groups, strict=True):
            shuffled = rng.permutation(rows)
            if len(rows) < self.samples_per_class:
                shuffled = np.concatenate([shuffled, rng.choice(rows, self.samples_per_class - len(rows))])
            groups.append(list(shuffled[: count * self.samples_per_class].reshape(count, self.samples_per_class)))
        return groups

    def _fill_short_batches(self, batches: list[list[Rows]], rng: np.random.Generator) -> None:
        """Add groups of absent classes to short batches, so that every step has the same size."""
        class_of = {int(row): c for c, rows in enumerate(self.class_rows) for row in rows}
        for batch in batches:
            missing = self.classes_per_batch - len(batch)
            if missing > 0:
                present = {class_of[int(group[0])] for group in batch}
                absent = [c for c in range(len(self.class_rows)) if c not in present]
                for c in rng.choice(absent, missing, replace=False):
                    rows = self.class_rows[c]
                    batch.append(rng.choice(rows, self.samples_per_class, replace=len(rows) < self.samples_per_class))


def _encode(labels: Labels) -> Rows:
    """Return the class of each row as an integer; the order of the classes is that of the labels."""
    array = np.asarray(labels)
    if array.ndim != 1 or not len(array) or array.dtype.kind not in "biuUSO":
        raise ConfigError(
            f"labels: expected a number or a name for each row, got {array.dtype} of shape {list(array.shape)}."
        )
    try:
        return np.unique(array, return_inverse=True)[1].astype(np.int64)
    except TypeError:  # None among names, or numbers and names mixed
        raise ConfigError("labels: expected all numbers or all names.") from None


def longest_epoch(num_groups: NDArray[np.int64], classes_per_batch: int) -> int:
    """Return how many batches of different classes, the last perhaps short, can be filled without repeating a group.

    Example:
        >>> longest_epoch(np.array([250, 1, 1, 1]), classes_per_batch=2)
        4
    """
    batches = -(-len(num_groups) // classes_per_batch)  # enough for every class once
    # A batch takes at most one group of a class, so B batches use min(num_groups[c], B) groups of class c.
    while -(-int(np.minimum(num_groups, batches + 1).sum()) // classes_per_batch) > batches:
        batches += 1
    return batches


def rank_share(count: int, rank: int, world_size: int) -> slice:
    """Return a rank's contiguous share of `count` rows; shares differ in length by at most one.

    Example:
        >>> [rank_share(7, rank, 3) for rank in range(3)]
        [slice(0, 2, None), slice(2, 4, None), slice(4, 7, None)]
    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank: expected 0 to {world_size - 1} of {world_size} processes, got {rank}.")
    return slice(rank * count // world_size, (rank + 1) * count // world_size)


def _batch_share(batch_size: int, rank: int, world_size: int) -> slice:
    if batch_size < world_size:  # the losses accept an empty share, but batch norm does not
        raise ConfigError(
            f"train.batch_size: a batch of {batch_size} leaves some of {world_size} processes without an image. "
            f"Start at most {batch_size} processes."
        )
    return rank_share(batch_size, rank, world_size)


def make_sampler(
    labels: Labels, *, batch_size: int, samples_per_class: int, seed: int, rank: int = 0, world_size: int = 1
) -> Sampler:
    """Create a `BalancedSampler`, or a `RandomSampler` if samples_per_class is 0.

    Args:
        labels: Class of each row, a number or a name.
        batch_size: Global batch size.
        samples_per_class: Images per class in a batch; 0 for random batches.
        seed: Seed of the shuffling.
        rank: This process.
        world_size: Number of processes.

    Returns:
        The sampler, which yields this rank's share of every batch.
    """
    if samples_per_class == 0:
        return RandomSampler(labels, batch_size=batch_size, seed=seed, rank=rank, world_size=world_size)
    return BalancedSampler(
        labels, batch_size=batch_size, samples_per_class=samples_per_class, seed=seed, rank=rank, world_size=world_size
    )
