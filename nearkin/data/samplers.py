"""Which images form each batch. A sampler is a pure function of (seed, epoch), so any step can be found again.

Over several processes (`rank` of `world`) each gets its share of every batch: the shares of one step, one after another
in the order of the ranks, are the batch that one process would get, row by row. They are of equal size where world
divides the batch, else differ by one row. A share is a run of the batch, so a class's images stay on one rank where the
share holds whole groups (batch_size / world is a multiple of per_class), and are cut between two neighbouring ranks
where not.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nearkin.errors import ConfigError

Rows = NDArray[np.int64]


class Sampler(Protocol):
    """Batches of row numbers, epoch by epoch."""

    batches_per_epoch: int
    batch_size: int  # what batches really hold over all ranks: less than asked for when images or classes are few
    share: slice  # which rows of a batch are this rank's

    def epoch(self, number: int) -> list[Rows]:
        """All batches of this epoch, in order."""
        ...


class RandomSampler:
    """Every image once per epoch in random order; a last batch that is not full is left out.

    >>> sampler = RandomSampler(np.array([0, 0, 1, 1, 2]), batch_size=2, seed=0)
    >>> [len(batch) for batch in sampler.epoch(0)]
    [2, 2]
    """

    def __init__(self, labels: Rows, *, batch_size: int, seed: int, rank: int = 0, world: int = 1) -> None:
        self.count, self.seed = len(labels), seed
        self.batch_size = min(batch_size, len(labels))
        self.share = _share_of_batch(self.batch_size, rank, world)
        self.batches_per_epoch = self.count // self.batch_size

    def epoch(self, number: int) -> list[Rows]:
        order = np.random.default_rng((self.seed, number)).permutation(self.count)
        used = order[: self.batches_per_epoch * self.batch_size]
        return list(used.reshape(self.batches_per_epoch, self.batch_size)[:, self.share])


class BalancedSampler:
    """Batches of P different classes with K images each. Every class appears in every epoch.

    A class gives one group of K for every K images it has (at least one; a class smaller than K repeats images).
    Groups are dealt so that a batch never holds two groups of one class; an epoch sees about every image once.

    Very uneven classes: an epoch is as long as batches can be filled without showing any class more often than it has
    groups. A class with more groups than that gives one group to every batch, other images of it in each epoch.

    >>> sampler = BalancedSampler(np.repeat(np.arange(6), 4), batch_size=4, samples_per_class=2, seed=0)
    >>> sampler.batches_per_epoch, [len(batch) for batch in sampler.epoch(0)]
    (6, [4, 4, 4, 4, 4, 4])
    >>> labels = np.repeat(np.arange(101), [1000] + [4] * 100)  # not 250 batches, each full of repeated small classes
    >>> BalancedSampler(labels, batch_size=128, samples_per_class=4, seed=0).batches_per_epoch
    4
    """

    def __init__(
        self, labels: Rows, *, batch_size: int, samples_per_class: int, seed: int, rank: int = 0, world: int = 1
    ) -> None:
        if batch_size % samples_per_class:
            raise ConfigError(
                f"train.batch_size: expected a multiple of train.samples_per_class ({samples_per_class}), "
                f"got {batch_size}."
            )
        by_class = np.argsort(labels, kind="stable")
        self.members = np.split(by_class, np.flatnonzero(np.diff(labels[by_class])) + 1)
        self.samples_per_class, self.seed = samples_per_class, seed
        # With fewer classes than a batch has room for, a batch holds every class once.
        self.classes_per_batch = min(batch_size // samples_per_class, len(self.members))
        self.batch_size = self.classes_per_batch * samples_per_class
        self.share = _share_of_batch(self.batch_size, rank, world)
        groups = np.array([max(1, len(rows) // samples_per_class) for rows in self.members])
        self.batches_per_epoch = longest_epoch(groups, self.classes_per_batch)
        self.groups = np.minimum(groups, self.batches_per_epoch)

    def epoch(self, number: int) -> list[Rows]:
        rng = np.random.default_rng((self.seed, number))
        groups: list[list[Rows]] = []  # of each class, in random order
        for rows, count in zip(self.members, self.groups, strict=True):
            shuffled = rng.permutation(rows)
            if len(rows) < self.samples_per_class:
                shuffled = np.concatenate([shuffled, rng.choice(rows, self.samples_per_class - len(rows))])
            groups.append(list(shuffled[: count * self.samples_per_class].reshape(count, self.samples_per_class)))
        # Deal each class's groups to different batches, the classes with most groups first and always to the
        # emptiest batches (random among equals): no batch gets a class twice and all stay equally full.
        batches: list[list[Rows]] = [[] for _ in range(self.batches_per_epoch)]
        filled = np.zeros(self.batches_per_epoch, np.int64)
        order = rng.permutation(len(groups))
        for c in sorted(order, key=lambda c: -len(groups[c])):
            emptiest = np.lexsort((rng.random(len(batches)), filled))[: len(groups[c])]
            for batch, group in zip(emptiest, groups[c], strict=True):
                batches[batch].append(group)
                filled[batch] += 1
        self._top_up(batches, rng)
        return [np.concatenate(batches[b])[self.share] for b in rng.permutation(len(batches))]

    def _top_up(self, batches: list[list[Rows]], rng: np.random.Generator) -> None:
        """Fill batches that are short with groups of classes they lack, so that every step has the same size."""
        class_of = {int(row): c for c, rows in enumerate(self.members) for row in rows}
        for batch in batches:
            short = self.classes_per_batch - len(batch)
            if short > 0:
                present = {class_of[int(group[0])] for group in batch}
                absent = [c for c in range(len(self.members)) if c not in present]
                for c in rng.choice(absent, short, replace=False):
                    rows = self.members[c]
                    batch.append(rng.choice(rows, self.samples_per_class, replace=len(rows) < self.samples_per_class))


def longest_epoch(groups: NDArray[np.int64], per_batch: int) -> int:
    """The most batches of `per_batch` different classes that can be filled when class c has groups[c] groups.

    Each batch takes one group of a class at most, so B batches use min(groups[c], B) of them. The last may be short.

    >>> longest_epoch(np.array([3, 3, 3, 3]), per_batch=2), longest_epoch(np.array([250, 1, 1, 1]), per_batch=2)
    (6, 4)
    """
    batches = -(-len(groups) // per_batch)  # enough for every class once
    while -(-int(np.minimum(groups, batches + 1).sum()) // per_batch) > batches:
        batches += 1
    return batches


def rank_share(count: int, rank: int, world: int) -> slice:
    """The rows of `count` that this rank works on: a run of them, at most one longer than another rank's.

    >>> [rank_share(7, rank, 3) for rank in range(3)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 7, None)]
    """
    if not 0 <= rank < world:
        raise ConfigError(f"rank: expected 0 to {world - 1} of {world} processes, got {rank}.")
    return slice(rank * count // world, (rank + 1) * count // world)


def _share_of_batch(batch_size: int, rank: int, world: int) -> slice:
    if batch_size < world:  # the losses could bear it, but networks cannot: batch norm has no statistics of nothing
        raise ConfigError(
            f"train.batch_size: a batch of {batch_size} leaves some of {world} processes without an image. "
            f"Start {batch_size} processes at most."
        )
    return rank_share(batch_size, rank, world)


def make_sampler(
    labels: Rows, *, batch_size: int, samples_per_class: int, seed: int, rank: int = 0, world: int = 1
) -> Sampler:
    """Class-balanced batches, or random ones when per_class is 0; of several processes, this rank's share of them."""
    if samples_per_class == 0:
        return RandomSampler(labels, batch_size=batch_size, seed=seed, rank=rank, world=world)
    return BalancedSampler(
        labels, batch_size=batch_size, samples_per_class=samples_per_class, seed=seed, rank=rank, world=world
    )
