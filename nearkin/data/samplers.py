"""Batch samplers. An epoch is a pure function of (seed, epoch), so any step can be reproduced.

With several processes (`rank` of `world_size`) each gets a contiguous share of every batch; the shares of one step,
concatenated in rank order, are the batch of a single process. Shares differ by at most one row.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.errors import ConfigError

Rows = NDArray[np.int64]
Labels = NDArray[Any] | Sequence[Any] | Tensor  # a number or a name per row


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

    def _set_batch_size(self, batch_size: int, rank: int, world_size: int) -> None:
        if batch_size < world_size:  # the losses accept an empty share, but batch norm does not
            raise ConfigError(
                f"train.batch_size: a batch of {batch_size} leaves some of {world_size} processes without an image. "
                f"Start at most {batch_size} processes."
            )
        self.batch_size, self.share = batch_size, rank_share(batch_size, rank, world_size)


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
        self._set_batch_size(min(batch_size, self.num_rows), rank, world_size)
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
        labels: Class of each row, a number or a name; or bool [N, T], where every label is a class of the rows that
            have it, and an image is in a batch only once if there are others.
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
        array = np.asarray(labels)
        self.has_label_sets = array.ndim == 2 and array.dtype == bool
        if self.has_label_sets and not array.any():
            raise ConfigError("labels: no row has a label.")
        self.class_rows = [r for r in map(np.flatnonzero, array.T) if len(r)] if self.has_label_sets else _rows(labels)
        self.samples_per_class, self.seed = samples_per_class, seed
        # If there are fewer classes than fit in a batch, every batch holds every class once.
        self.classes_per_batch = min(batch_size // samples_per_class, len(self.class_rows))
        self._set_batch_size(self.classes_per_batch * samples_per_class, rank, world_size)
        num_groups = np.array([max(1, len(rows) // samples_per_class) for rows in self.class_rows])
        self.batches_per_epoch = longest_epoch(num_groups, self.classes_per_batch)
        self.num_groups = np.minimum(num_groups, self.batches_per_epoch)

    def epoch(self, number: int) -> list[Rows]:
        """Return all batches of this epoch, in order."""
        return list(self._batches(np.random.default_rng((self.seed, number))))

    def _batches(self, rng: np.random.Generator) -> Iterable[Rows]:
        groups = self._draw_groups(rng)
        # Assign each class's groups to different batches, classes with the most groups first and always to the
        # emptiest batches (ties broken at random): no batch gets a class twice and all stay equally full.
        batches: list[dict[int, Rows]] = [{} for _ in range(self.batches_per_epoch)]  # rows by class
        filled = np.zeros(self.batches_per_epoch, np.int64)
        order = rng.permutation(len(groups))
        for c in sorted(order, key=lambda c: -len(groups[c])):
            emptiest = np.lexsort((rng.random(len(batches)), filled))[: len(groups[c])]
            for batch, group in zip(emptiest, groups[c], strict=True):
                batches[batch][int(c)] = group
                filled[batch] += 1
        for batch in batches:  # every step has the same size
            absent = [c for c in range(len(self.class_rows)) if c not in batch]
            if missing := self.classes_per_batch - len(batch):
                batch |= {int(c): self._draw(c, rng) for c in rng.choice(absent, missing, replace=False)}
        return [self._join(batches[b], rng) for b in rng.permutation(len(batches))]

    def _draw_groups(self, rng: np.random.Generator) -> list[list[Rows]]:
        """Groups of K random images of each class."""
        groups: list[list[Rows]] = []
        for rows, count in zip(self.class_rows, self.num_groups, strict=True):
            shuffled = rng.permutation(rows)
            if len(rows) < self.samples_per_class:
                shuffled = np.concatenate([shuffled, rng.choice(rows, self.samples_per_class - len(rows))])
            groups.append(list(shuffled[: count * self.samples_per_class].reshape(count, self.samples_per_class)))
        return groups

    def _draw(self, c: int, rng: np.random.Generator) -> Rows:
        """K random images of a class."""
        rows, k = self.class_rows[c], self.samples_per_class
        return np.asarray(rng.choice(rows, k, replace=len(rows) < k))

    def _batch(self, classes: Iterable[int], rng: np.random.Generator) -> Rows:
        return self._join({c: self._draw(c, rng) for c in classes}, rng)

    def _join(self, batch: Mapping[int, Rows], rng: np.random.Generator) -> Rows:
        """This rank's rows of a batch."""
        rows = np.concatenate(list(batch.values()))
        if self.has_label_sets:  # an image may have been drawn for several of its labels
            for c, place in zip(batch, range(0, len(rows), self.samples_per_class), strict=True):
                own = slice(place, place + self.samples_per_class)
                is_copy = np.isin(rows[own], rows[:place])
                unused = np.setdiff1d(self.class_rows[c], rows)
                fresh = rng.permutation(unused)[: is_copy.sum()]
                rows[own][np.flatnonzero(is_copy)[: len(fresh)]] = fresh
        return np.asarray(rows[self.share])


class CategorySampler(BalancedSampler):
    """Class-balanced batches from few categories each: the hard negatives of a car are other cars, not sofas.

    Every batch draws its categories in proportion to their images, and its classes from them. Where those have too few
    classes, further categories fill the batch.

    Args:
        labels: Class of each row, a number or a name.
        categories: Category of each row, a number or a name; all rows of a class have the same.
        categories_per_batch: How many categories share a batch.
        **settings: Those of `BalancedSampler`.

    Example:
        >>> labels = np.repeat(np.arange(6), 4)
        >>> sampler = CategorySampler(labels, labels % 2, batch_size=4, samples_per_class=2, seed=0)
        >>> {len(set(labels[batch] % 2)) for batch in sampler}
        {1}
    """

    def __init__(self, labels: Labels, categories: Labels, *, categories_per_batch: int = 1, **settings: Any) -> None:
        super().__init__(labels, **settings)
        codes = _encode(categories)
        if self.has_label_sets or len(codes) != sum(map(len, self.class_rows)):
            raise ConfigError("categories: expected as many as labels, and one label per row.")
        if categories_per_batch < 1:
            raise ConfigError(f"categories_per_batch: expected at least 1, got {categories_per_batch}.")
        if mixed := [rows[0] for rows in self.class_rows if len(set(codes[rows])) > 1]:
            raise ConfigError(f"categories: the class of row {mixed[0]} is in several categories; expected one.")
        self.categories_per_batch = categories_per_batch
        self.category_share = np.bincount(codes) / len(codes)
        self._category = np.array([codes[rows[0]] for rows in self.class_rows])

    def _batches(self, rng: np.random.Generator) -> Iterable[Rows]:
        share = self.category_share
        for _ in range(self.batches_per_epoch):
            drawn = rng.choice(len(share), len(share), replace=False, p=share)
            place = np.argsort(drawn)[self._category]  # of each class's category in this order
            # Classes of the first categories in random order, then those of each further one.
            order = np.lexsort((rng.random(len(place)), np.maximum(place, self.categories_per_batch - 1)))
            yield self._batch(order[: self.classes_per_batch], rng)


class NearClassSampler(BalancedSampler):
    """Class-balanced batches of classes that are near each other, as hierarchical triplet loss draws them.

    A batch has several neighbourhoods: a class and those whose mean embeddings are nearest. Classes take turns to begin
    one. Until the first `refresh`, batches are those of `BalancedSampler`; to resume in the middle of training, call
    `refresh` with the same embeddings first.

    Args:
        labels: Class of each row, a number or a name.
        neighbourhood: Classes in each, including the first.
        **settings: Those of `BalancedSampler`.

    Example:
        >>> labels = np.repeat(np.arange(8), 4)
        >>> settings = {"batch_size": 8, "samples_per_class": 4, "seed": 0}
        >>> sampler = NearClassSampler(labels, neighbourhood=2, **settings)
        >>> sampler.refresh(np.stack([labels // 2, labels % 2 / 9], axis=1))  # 0 and 1 are near, 2 and 3, ...
        >>> [sorted(set(labels[batch].tolist())) for batch in sampler.epoch(0)][:3]
        [[2, 3], [4, 5], [2, 3]]
    """

    def __init__(self, labels: Labels, *, neighbourhood: int = 4, **settings: Any) -> None:
        super().__init__(labels, **settings)
        if self.has_label_sets:
            raise ConfigError("labels: expected one label per row; classes that share rows have no distance.")
        if not 2 <= neighbourhood <= self.classes_per_batch:
            raise ConfigError(f"neighbourhood: expected 2 to {self.classes_per_batch} classes, got {neighbourhood}.")
        self.neighbourhood = neighbourhood
        self._nearest: Rows | None = None

    def refresh(self, emb: NDArray[Any] | Tensor) -> None:
        """Recompute which classes are near each other, from the embeddings [N, dim] of all rows."""
        vectors = _checked(emb, sum(map(len, self.class_rows)))
        means = np.stack([vectors[rows].mean(0) for rows in self.class_rows])
        square = (means**2).sum(1)
        distance = square[:, None] + square - 2 * means @ means.T
        np.fill_diagonal(distance, -np.inf)
        self._nearest = np.argsort(distance, axis=1, kind="stable")

    def _batches(self, rng: np.random.Generator) -> Iterable[Rows]:
        if self._nearest is None:
            yield from super()._batches(rng)
            return
        nearest = self._nearest.tolist()
        turns = (c for _ in itertools.count() for c in rng.permutation(len(nearest)).tolist())
        for _ in range(self.batches_per_epoch):
            chosen: dict[int, None] = {}  # in order
            while len(chosen) < self.classes_per_batch:
                if (c := next(turns)) not in chosen:
                    chosen |= dict.fromkeys([n for n in nearest[c] if n not in chosen][: self.neighbourhood])
            yield self._batch(list(chosen)[: self.classes_per_batch], rng)


class HardNegativeSampler(BalancedSampler):
    """Class-balanced batches around images and their hardest negatives, the nearest images of other classes.

    Images take turns as anchors. A batch has the anchor with others of its class, then its nearest negatives, each with
    others of its class, then the next anchor. Until the first `refresh`, batches are those of `BalancedSampler`; to
    resume in the middle of training, call `refresh` with the same embeddings first.

    Args:
        labels: Class of each row, a number or a name.
        negatives: Hard negatives of each anchor, of different classes.
        **settings: Those of `BalancedSampler`.

    Example:
        >>> labels = np.repeat(np.arange(4), 4)
        >>> sampler = HardNegativeSampler(labels, negatives=1, batch_size=4, samples_per_class=2, seed=0)
        >>> sampler.refresh(np.stack([labels // 2, 1 + labels % 2 / 9], axis=1))  # 0 and 1 are near, 2 and 3
        >>> sorted({tuple(sorted(set(labels[batch].tolist()))) for batch in sampler})
        [(0, 1), (2, 3)]
    """

    def __init__(self, labels: Labels, *, negatives: int = 3, **settings: Any) -> None:
        super().__init__(labels, **settings)
        if self.has_label_sets or negatives < 1:
            raise ConfigError(f"negatives: expected at least 1, and one label per row; got {negatives}.")
        self.negatives = negatives
        self._class = _encode(labels)
        self._nearest: Rows | None = None

    def refresh(self, emb: NDArray[Any] | Tensor) -> None:
        """Find the nearest rows of other classes by cosine, from the embeddings [N, dim] of all rows."""
        x = torch.nn.functional.normalize(torch.as_tensor(_checked(emb, len(self._class))), dim=1)
        codes = torch.as_tensor(self._class)
        most = min(4 * self.negatives, len(codes) - max(map(len, self.class_rows)))  # several may share a class
        found = []
        for rows in torch.split(torch.arange(len(x)), 1024):
            similarity = (x[rows] @ x.T).masked_fill_(codes[rows, None] == codes, -torch.inf)
            found.append(similarity.topk(most).indices)
        self._nearest = torch.cat(found).numpy()

    def _batches(self, rng: np.random.Generator) -> Iterable[Rows]:
        if self._nearest is None:
            yield from super()._batches(rng)
            return
        turns = (row for _ in itertools.count() for row in rng.permutation(len(self._class)))
        for _ in range(self.batches_per_epoch):
            chosen: dict[int, Rows] = {}  # rows by class
            while len(chosen) < self.classes_per_batch:
                if self._class[anchor := next(turns)] not in chosen:
                    found: dict[int, int] = {}  # the nearest row of each class that the batch does not have yet
                    for row in self._nearest[anchor].tolist():
                        if (c := int(self._class[row])) not in chosen:
                            found.setdefault(c, row)
                    for row in (anchor, *list(found.values())[: self.negatives]):
                        chosen[int(self._class[row])] = self._with_others(row, rng)
            yield self._join(dict(list(chosen.items())[: self.classes_per_batch]), rng)

    def _with_others(self, row: int, rng: np.random.Generator) -> Rows:
        """A row and K - 1 others of its class, which repeat if there are too few."""
        rows, k = self.class_rows[self._class[row]], self.samples_per_class - 1
        others = rows[rows != row] if len(rows) > 1 else rows
        return np.concatenate([[row], rng.choice(others, k, replace=len(others) < k)])


def _checked(emb: NDArray[Any] | Tensor, rows: int) -> NDArray[np.float64]:
    """Return the embeddings of all rows as float64."""
    vectors = np.asarray(emb.detach().cpu() if isinstance(emb, Tensor) else emb, dtype=np.float64)
    if vectors.ndim != 2 or len(vectors) != rows or not np.isfinite(vectors).all():
        raise ConfigError(f"emb: expected finite [{rows}, dim], a row per label; got {list(vectors.shape)}.")
    return vectors


def _rows(labels: Labels) -> list[Rows]:
    """Return the rows of each class."""
    classes = _encode(labels)
    by_class = np.argsort(classes, kind="stable")
    return np.split(by_class, np.flatnonzero(np.diff(classes[by_class])) + 1)


def _encode(labels: Labels) -> Rows:
    """Return the class of each row as an integer; the order of the classes is that of the labels."""
    array = np.asarray(labels)
    if array.ndim != 1 or not len(array) or array.dtype.kind not in "biuUSO":
        raise ConfigError(f"labels: expected a number or a name for each row, got {array.dtype} {list(array.shape)}.")
    try:
        return np.unique(array, return_inverse=True)[1].astype(np.int64)
    except TypeError:  # None among names, or numbers and names mixed
        raise ConfigError("labels: expected all numbers or all names.") from None


def longest_epoch(num_groups: NDArray[np.int64], classes_per_batch: int) -> int:
    """Return how many batches of different classes, the last perhaps short, can be filled without repeating a group."""
    batches = -(-len(num_groups) // classes_per_batch)  # enough for every class once
    # A batch takes at most one group of a class, so B batches use min(num_groups[c], B) groups of class c.
    while -(-int(np.minimum(num_groups, batches + 1).sum()) // classes_per_batch) > batches:
        batches += 1
    return batches


def rank_share(count: int, rank: int, world_size: int) -> slice:
    """Return a rank's contiguous share of `count` rows; shares differ in length by at most one."""
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank: expected 0 to {world_size - 1} of {world_size} processes, got {rank}.")
    return slice(rank * count // world_size, (rank + 1) * count // world_size)


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
    settings = {"batch_size": batch_size, "seed": seed, "rank": rank, "world_size": world_size}
    if samples_per_class == 0:
        return RandomSampler(labels, **settings)
    return BalancedSampler(labels, samples_per_class=samples_per_class, **settings)
