"""The samplers of pytorch-metric-learning, which draw from numpy's global generator: a seed gives the same batches."""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, WeightedRandomSampler

from nearkin.compat.pml._tuples import sample_weights
from nearkin.compat.pml.coverage import absent_names
from nearkin.errors import ConfigError

__all__ = ["FixedSetOfTriplets", "HierarchicalSampler", "MPerClassSampler", "TuplesToWeightsSampler"]
__getattr__ = absent_names("samplers")

_shuffle, _choice = np.random.shuffle, np.random.choice


def _draw(items: Any, size: int) -> Any:
    """Draw without replacement, or with it if there are too few."""
    return _choice(items, size=size, replace=len(items) < size)


def _as_array(labels: Any) -> Any:
    return labels.cpu().numpy() if isinstance(labels, Tensor) else labels


def _by_label(labels: Any) -> dict[Any, Any]:
    """Label -> array of its rows, in the order of first occurrence."""
    rows: dict[Any, list[int]] = defaultdict(list)
    for i, label in enumerate(_as_array(labels)):
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
        size = self.batch_size
        if size is None:
            if self.length_of_single_pass < self.list_size:
                self.list_size -= self.list_size % self.length_of_single_pass
        elif size > min(self.list_size, self.length_of_single_pass) or size % self.m_per_class:
            raise ConfigError(
                f"MPerClassSampler: batch_size={size} must be a multiple of m={self.m_per_class}, and at most "
                f"{self.list_size} (length_before_new_iter) and {self.length_of_single_pass} (m times the classes)."
            )
        else:
            self.list_size -= self.list_size % size

    def __len__(self) -> int:
        return self.list_size

    def __iter__(self) -> Iterator[int]:
        rows = [0] * self.list_size
        whole = self.length_of_single_pass if self.batch_size is None else self.batch_size
        i, m = 0, self.m_per_class
        for _ in range(self.list_size // whole if whole < self.list_size else 1):
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
            anchor, positive = _draw(self.labels_to_indices[own], 2)
            triplets.append([anchor, positive, _choice(self.labels_to_indices[other], replace=False)])
        self.fixed_set_of_triplets = np.array(triplets, dtype=int)

    def __len__(self) -> int:
        return self.fixed_set_of_triplets.size

    def __iter__(self) -> Iterator[int]:
        _shuffle(self.fixed_set_of_triplets)
        return iter(self.fixed_set_of_triplets.flatten().tolist())


class HierarchicalSampler(Sampler[list[int]]):
    """Batches with few super classes, and several classes of each."""

    def __init__(
        self,
        labels: Any,
        batch_size: int,
        samples_per_class: int | str,
        batches_per_super_tuple: int = 4,
        super_classes_per_batch: int = 2,
        inner_label: int = 0,
        outer_label: int = 1,
    ) -> None:
        labels = _as_array(labels)
        self.batch_size, self.samples_per_class = batch_size, samples_per_class
        self.batches_per_super_tuple, self.super_classes_per_batch = batches_per_super_tuple, super_classes_per_batch
        self.sub_batch_len = batch_size // super_classes_per_batch
        fits = samples_per_class == "all" or self.sub_batch_len % int(samples_per_class) == 0
        if batch_size % super_classes_per_batch or not fits:
            raise ConfigError(
                f"HierarchicalSampler: batch_size={batch_size} must be a multiple of super_classes_per_batch="
                f"{super_classes_per_batch}, and each part of samples_per_class={samples_per_class}."
            )
        names = set(labels[:, outer_label])
        self.super_image_lists: dict[Any, dict[Any, list[int]]] = {name: defaultdict(list) for name in names}
        for i, row in enumerate(labels):
            self.super_image_lists[row[outer_label]][row[inner_label]].append(i)
        self.super_pairs = list(itertools.combinations(names, super_classes_per_batch))
        self.reshuffle()

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        self.reshuffle()
        return iter(self.batches)

    def reshuffle(self) -> None:
        """Draw the batches of an epoch."""
        combinations = [names for names in self.super_pairs for _ in range(self.batches_per_super_tuple)]
        self.batches = []
        for names in combinations:
            batch = [row for name in names for row in self._part(self.super_image_lists[name])]
            _shuffle(batch)
            self.batches.append(batch)
        _shuffle(self.batches)

    def _part(self, by_class: dict[Any, list[int]]) -> list[int]:
        part: list[int] = []
        names = list(by_class)
        _shuffle(names)
        for name in names:
            if len(part) >= self.sub_batch_len:
                break
            size = len(by_class[name]) if self.samples_per_class == "all" else int(self.samples_per_class)
            if len(part) + size <= self.sub_batch_len:
                part.extend(_draw(by_class[name], size))
        return part


class TuplesToWeightsSampler(Sampler[int]):
    """Rows drawn with replacement by how often a miner selects them, with the embeddings of a model."""

    def __init__(
        self,
        model: nn.Module,
        miner: nn.Module,
        dataset: Dataset[Any],
        subset_size: int | None = None,
        *,
        batch_size: int = 32,
        data_device: torch.device | str | None = None,
        dataloader_num_workers: int = 2,
        normalize_embeddings: bool = True,
    ) -> None:
        self.model, self.miner, self.dataset, self.subset_size = model, miner, dataset, subset_size
        self.batch_size, self.num_workers, self.normalize = batch_size, dataloader_num_workers, normalize_embeddings
        self.device = torch.device(data_device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.weights: Tensor | None = None

    def __len__(self) -> int:
        return self.subset_size or len(self.dataset)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        total = len(self.dataset)  # type: ignore[arg-type]
        rows = _draw(np.arange(total), self.subset_size) if self.subset_size else np.arange(total)
        embeddings, labels = self._embed(Subset(self.dataset, rows.tolist()))
        found = self.miner(embeddings, labels)
        self.weights = torch.zeros(total, device=self.device)
        self.weights[torch.as_tensor(rows, device=self.device)] = sample_weights(found, labels, torch.float32)
        return iter(WeightedRandomSampler(self.weights.tolist(), len(self), replacement=True))

    @torch.no_grad()
    def _embed(self, data: Dataset[Any]) -> tuple[Tensor, Tensor]:
        loader = DataLoader(data, batch_size=self.batch_size, num_workers=self.num_workers)
        self.model.eval()
        parts = [(self.model(x.to(self.device)), labels) for x, labels in loader]
        embeddings = torch.cat([x for x, _ in parts])
        embeddings = nn.functional.normalize(embeddings) if self.normalize else embeddings
        return embeddings, torch.cat([labels.flatten() for _, labels in parts]).to(self.device)
