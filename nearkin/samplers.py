"""Which images form each batch. A sampler is a pure function of (seed, epoch), so any step can be found again."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nearkin.errors import ConfigError

Rows = NDArray[np.int64]


class Sampler(Protocol):
    """Batches of row numbers, epoch by epoch."""

    batches_per_epoch: int
    batch_size: int  # what batches really hold: less than asked for when there are few images or classes

    def epoch(self, number: int) -> list[Rows]:
        """All batches of this epoch, in order."""
        ...


class RandomSampler:
    """Every image once per epoch in random order; a last batch that is not full is left out.

    >>> sampler = RandomSampler(np.array([0, 0, 1, 1, 2]), batch_size=2, seed=0)
    >>> [len(batch) for batch in sampler.epoch(0)]
    [2, 2]
    """

    def __init__(self, labels: Rows, *, batch_size: int, seed: int) -> None:
        self.count, self.batch_size, self.seed = len(labels), min(batch_size, len(labels)), seed
        self.batches_per_epoch = self.count // self.batch_size

    def epoch(self, number: int) -> list[Rows]:
        order = np.random.default_rng((self.seed, number)).permutation(self.count)
        used = order[: self.batches_per_epoch * self.batch_size]
        return list(used.reshape(self.batches_per_epoch, self.batch_size))


class BalancedSampler:
    """Batches of P different classes with K images each. Every class appears in every epoch.

    A class gives one group of K for every K images it has (at least one; a class smaller than K repeats images).
    Groups are dealt so that a batch never holds two groups of one class; an epoch sees about every image once.

    >>> sampler = BalancedSampler(np.repeat(np.arange(6), 4), batch_size=4, per_class=2, seed=0)
    >>> sampler.batches_per_epoch, [len(batch) for batch in sampler.epoch(0)]
    (6, [4, 4, 4, 4, 4, 4])
    """

    def __init__(self, labels: Rows, *, batch_size: int, per_class: int, seed: int) -> None:
        if batch_size % per_class:
            raise ConfigError(
                f"train.batch_size: expected a multiple of train.per_class ({per_class}), got {batch_size}."
            )
        by_class = np.argsort(labels, kind="stable")
        self.members = np.split(by_class, np.flatnonzero(np.diff(labels[by_class])) + 1)
        self.per_class, self.seed = per_class, seed
        # With fewer classes than a batch has room for, a batch holds every class once.
        self.classes_per_batch = min(batch_size // per_class, len(self.members))
        self.batch_size = self.classes_per_batch * per_class
        groups = [max(1, len(rows) // per_class) for rows in self.members]
        # A class with more groups than there are batches could not be dealt one group per batch.
        self.batches_per_epoch = max(-(-sum(groups) // self.classes_per_batch), max(groups))

    def epoch(self, number: int) -> list[Rows]:
        rng = np.random.default_rng((self.seed, number))
        groups: list[list[Rows]] = []  # of each class, in random order
        for rows in self.members:
            count = max(1, len(rows) // self.per_class)
            shuffled = rng.permutation(rows)
            if len(rows) < self.per_class:
                shuffled = np.concatenate([shuffled, rng.choice(rows, self.per_class - len(rows))])
            groups.append(list(shuffled[: count * self.per_class].reshape(count, self.per_class)))
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
        return [np.concatenate(batches[b]) for b in rng.permutation(len(batches))]

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
                    batch.append(rng.choice(rows, self.per_class, replace=len(rows) < self.per_class))


def make_sampler(labels: Rows, *, batch_size: int, per_class: int, seed: int) -> Sampler:
    """Class-balanced batches, or random ones when per_class is 0."""
    if per_class == 0:
        return RandomSampler(labels, batch_size=batch_size, seed=seed)
    return BalancedSampler(labels, batch_size=batch_size, per_class=per_class, seed=seed)
