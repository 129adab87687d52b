"""The samplers of pytorch-metric-learning, which draw from numpy's global generator: a seed gives the same batches."""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, Subset, WeightedRandomSampler

from nearkin.compat.pml._tuples import sample_weights
from nearkin.compat.pml.utils.inference import default_device
from nearkin.errors import ConfigError

_shuffle, _choice = np.random.shuffle, np.random.choice


def _draw(items: Any, size: int) -> Any:
    """Draw without replacement, or with it if there are too few."""
    return _choice(items, size=size, replace=len(items) < size)


def _by_label(labels: Any) -> dict[Any, Any]:
    """Label -> array of its rows, in the order of first occurrence."""
    rows: dict[Any, list[int]] = defaultdict(list)
    for i, label in enumerate(labels.cpu().numpy() if isinstance(labels, Tensor) else labels):
        rows[label].append(i)
    return {label: np.array(indices, dtype=int) for label, indices in rows.items()}


class MPerClassSampler(Sampler[int]):
    """Rows such that m consecutive ones have the same class."""

    def __init__(self, labels: Any, m: int, batch_size: int | None = None, length_before_new_iter: int = 100000):
        self.m_per_class = int(m)
        self.batch_size = None if batch_size is None else int(batch_size)
        self.labels_to_indices = _by_label(labels)
        self.labels = list(self.labels_to_indices)
        self.length_of_single_pass = self.m_per_class * len(self.labels)
        self.list_size = length_before_new_iter
        whole = self.batch_size or self.length_of_single_pass
        if self.batch_size and (whole > min(self.list_size, self.length_of_single_pass) or whole % self.m_per_class):
            limits = f"{self.list_size} (length_before_new_iter) and {self.length_of_single_pass} (m times the classes)"
            raise ConfigError(
                f"MPerClassSampler: batch_size={whole} must be a multiple of m={m}, and at most {limits}."
            )
        if whole <= self.list_size:
            self.list_size -= self.list_size % whole

    def __len__(self) -> int:
        return self.list_size

    def __iter__(self) -> Iterator[int]:
        rows = [0] * self.list_size
        whole = self.batch_size or self.length_of_single_pass
        i, m = 0, self.m_per_class
        for _ in range(max(1, self.list_size // whole)):
            _shuffle(self.labels)
            for label in self.labels[: whole // m]:
                rows[i : i + m] = _draw(self.labels_to_indices[label], m)
                i += m
        return iter(rows)


class FixedSetOfTriplets(Sampler[int]):
    """Random triplets that are drawn once: rows of anchors, positives and negatives in turn."""

    def __init__(self, labels: Any, num_triplets: int) -> None:
        self.labels_to_indices = _by_label(labels)
        self.num_triplets = int(num_triplets)
        if self.num_triplets <= 0:
            raise ConfigError(f"FixedSetOfTriplets: num_triplets must be above 0, got {num_triplets}.")
        names, triplets = list(self.labels_to_indices), []
        for _ in range(self.num_triplets):
            own, other = _choice(names, size=2, replace=False)
            pair = _draw(self.labels_to_indices[own], 2)
            triplets.append([*pair, _choice(self.labels_to_indices[other], replace=False)])
        self.fixed_set_of_triplets = np.array(triplets, dtype=int)

    def __len__(self) -> int:
        return self.fixed_set_of_triplets.size

    def __iter__(self) -> Iterator[int]:
        _shuffle(self.fixed_set_of_triplets)
        return iter(self.fixed_set_of_triplets.flatten().tolist())


@dataclass(eq=False)
class HierarchicalSampler(Sampler[list[int]]):
    """Batches with few super classes, and several classes of each."""

    labels: InitVar[Any]
    batch_size: int
    samples_per_class: int | str
    batches_per_super_tuple: int = 4
    super_classes_per_batch: int = 2
    inner_label: int = 0
    outer_label: int = 1

    def __post_init__(self, labels: Any) -> None:
        self.sub_batch_len = self.batch_size // self.super_classes_per_batch
        fits = self.samples_per_class == "all" or self.sub_batch_len % int(self.samples_per_class) == 0
        if self.batch_size % self.super_classes_per_batch or not fits:
            what = f"batch_size={self.batch_size} must be a multiple of super_classes_per_batch"
            raise ConfigError(f"HierarchicalSampler: {what}, and each part of samples_per_class.")
        labels = labels.cpu().numpy() if isinstance(labels, Tensor) else labels
        names = set(labels[:, self.outer_label])
        self.super_image_lists: dict[Any, dict[Any, list[int]]] = {name: defaultdict(list) for name in names}
        for i, row in enumerate(labels):
            self.super_image_lists[row[self.outer_label]][row[self.inner_label]].append(i)
        self.super_pairs = list(itertools.combinations(names, self.super_classes_per_batch))
        self.reshuffle()

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        self.reshuffle()
        return iter(self.batches)

    def reshuffle(self) -> None:
        """Draw the batches of an epoch."""
        self.batches = []
        for names in self.super_pairs:
            for _ in range(self.batches_per_super_tuple):
                batch = [row for name in names for row in self._part(self.super_image_lists[name])]
                _shuffle(batch)
                self.batches.append(batch)
        _shuffle(self.batches)

    def _part(self, by_class: dict[Any, list[int]]) -> list[int]:
        part: list[int] = []
        names = list(by_class)
        _shuffle(names)
        for name in names:
            size = len(by_class[name]) if self.samples_per_class == "all" else int(self.samples_per_class)
            if len(part) + size <= self.sub_batch_len:
                part.extend(_draw(by_class[name], size))
        return part


@dataclass(eq=False)
class TuplesToWeightsSampler(Sampler[int]):
    """Rows drawn with replacement by how often a miner selects them, with the embeddings of a model."""

    model: nn.Module
    miner: nn.Module
    dataset: Any
    subset_size: int | None = None
    _: KW_ONLY
    batch_size: int = 32
    data_device: torch.device | str | None = None
    dataloader_num_workers: int = 2
    normalize_embeddings: bool = True
    weights: Tensor | None = field(default=None, init=False)

    def __len__(self) -> int:
        return self.subset_size or len(self.dataset)

    def __iter__(self) -> Iterator[int]:
        rows = np.arange(len(self.dataset))
        rows = _draw(rows, self.subset_size) if self.subset_size else rows
        data, device = Subset(self.dataset, rows.tolist()), default_device(self.data_device)
        loader = DataLoader(data, batch_size=self.batch_size, num_workers=self.dataloader_num_workers)
        self.model.eval()
        with torch.no_grad():
            parts = [(self.model(x.to(device)), labels.to(device).flatten()) for x, labels in loader]
        embeddings, labels = (torch.cat(x) for x in zip(*parts, strict=True))
        embeddings = nn.functional.normalize(embeddings) if self.normalize_embeddings else embeddings
        found = self.miner(embeddings, labels)
        self.weights = torch.zeros(len(self.dataset), device=embeddings.device)
        self.weights[torch.as_tensor(rows)] = sample_weights(found, labels, torch.float32)
        return iter(WeightedRandomSampler(self.weights.tolist(), len(self), replacement=True))
