"""Search and verification with a trained model."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from nearkin.compat.pml.distances import CosineSimilarity
from nearkin.errors import ConfigError, import_extra
from nearkin.metrics.ranking import neighbours

Found = tuple[Tensor, Tensor]


def default_device(device: torch.device | str | None) -> torch.device:
    """Return the device, by default a GPU where there is one."""
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


@dataclass
class MatchFinder:
    """Decides which embeddings match."""

    distance: Any
    threshold: float | None = None

    def _matches(self, values: Tensor, threshold: float | None) -> Any:
        limit = self.threshold if threshold is None else threshold
        if limit is None:
            raise ConfigError("MatchFinder: pass a threshold.")
        return (values >= limit if self.distance.is_inverted else values <= limit).cpu().numpy()

    @torch.no_grad()
    def get_matching_pairs(
        self,
        query_emb: Tensor,
        ref_emb: Tensor | None = None,
        threshold: float | None = None,
        return_tuples: bool = False,
    ) -> Any:
        """Return bool [N, M], or a list of pairs of indices."""
        matches = self._matches(self.distance(query_emb, query_emb if ref_emb is None else ref_emb), threshold)
        return list(zip(*np.where(matches), strict=True)) if return_tuples else matches

    @torch.no_grad()
    def is_match(self, x: Tensor, y: Tensor, threshold: float | None = None) -> Any:
        """Return whether rows of x and y match; a bool for one row."""
        matches = self._matches(self.distance.pairwise_distance(x, y), threshold)
        return matches.item() if matches.size == 1 else matches


def _without_self(distances: Tensor, indices: Tensor) -> Found:
    """Remove each query's own index, or the last where it is not found."""
    is_self = indices == torch.arange(len(indices), device=indices.device)[:, None]
    is_self[:, -1] |= ~is_self.any(1)
    return distances[~is_self].view(len(indices), -1), indices[~is_self].view(len(indices), -1)


@dataclass
class FaissKNN:
    """Exact search by Euclidean distance, without faiss. Returns squared distances, as faiss does, and indices."""

    reset_before: bool = True
    reset_after: bool = True
    index_init_fn: Any = None
    gpus: Any = None
    index: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.index_init_fn is not None or self.gpus is not None:
            raise ConfigError("FaissKNN: index_init_fn and gpus are not supported. Use nearkin.Index or its stores.")

    def __call__(
        self, query: Tensor, k: int, reference: Tensor | None = None, ref_includes_query: bool = False
    ) -> Found:
        self.index = None if self.reset_before else self.index
        if reference is not None:
            self.add(reference)
        if self.index is None:
            raise ValueError("FaissKNN: there are no references. Call train or pass reference.")
        k = min(k + ref_includes_query, len(self.index))
        index, values = neighbours(query, self.index.to(query), k, similarity="euclidean")
        distances = torch.as_tensor(values).square().to(query.device, torch.float32)
        indices = torch.as_tensor(index).to(query.device)
        self.index = None if self.reset_after else self.index
        return _without_self(distances, indices) if ref_includes_query else (distances, indices)

    def train(self, embeddings: Any) -> None:
        """Replace the references."""
        self.index = torch.as_tensor(embeddings)

    def add(self, embeddings: Any) -> None:
        """Add references."""
        new = torch.as_tensor(embeddings)
        self.index = new if self.index is None else torch.cat([self.index, new.to(self.index)])

    def save(self, filename: str) -> None:
        """Write the references to a file."""
        torch.save(self.index, filename)

    def load(self, filename: str) -> None:
        """Read the references from a file that `save` wrote."""
        self.index = torch.load(filename, weights_only=True)


class FaissKMeans:
    """K-means clustering by faiss, or by scikit-learn where faiss is not installed."""

    def __init__(self, **kwargs: Any) -> None:
        self.kwargs = kwargs

    def __call__(self, x: Tensor, nmb_clusters: int) -> Tensor:
        data = np.ascontiguousarray(x.detach().cpu().numpy(), dtype=np.float32)
        try:
            import faiss
        except ModuleNotFoundError:
            cluster = import_extra("sklearn.cluster", extra="bench")
            settings = {"max_iter": self.kwargs.get("niter", 25), "random_state": self.kwargs.get("seed", 1234)}
            found = cluster.KMeans(nmb_clusters, n_init=1, **settings).fit_predict(data)
        else:
            kmeans = faiss.Kmeans(data.shape[1], nmb_clusters, **self.kwargs)
            kmeans.train(data)
            found = kmeans.index.search(data, 1)[1][:, 0]
        return torch.as_tensor(found, dtype=torch.int64, device=x.device)


@dataclass
class CustomKNN:
    """Exact search with any distance."""

    distance: Any
    batch_size: int | None = None

    def __call__(self, query: Tensor, k: int, reference: Tensor, ref_includes_query: bool = False) -> Found:
        batches = torch.split(query, self.batch_size or len(query))
        mats = (self.distance(batch, reference) for batch in batches)
        parts = [mat.topk(k + ref_includes_query, dim=1, largest=self.distance.is_inverted) for mat in mats]
        distances, indices = (torch.cat(part) for part in zip(*parts, strict=True))
        return _without_self(distances, indices) if ref_includes_query else (distances, indices)


@dataclass
class InferenceModel:
    """A trained model with a search and a match finder."""

    trunk: nn.Module
    embedder: nn.Module | None = None
    match_finder: Any = None
    normalize_embeddings: bool = True
    knn_func: Any = None
    data_device: torch.device | str | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        self.data_device = default_device(self.data_device)
        self.match_finder = self.match_finder or MatchFinder(CosineSimilarity(), 0.9)
        if self.knn_func is None:
            self.knn_func = FaissKNN(reset_before=False, reset_after=False)
        self.model = self.trunk if self.embedder is None else nn.Sequential(self.trunk, self.embedder)

    def train_knn(self, inputs: Any, batch_size: int = 64) -> None:
        """Search among these inputs, a tensor, a list of tensors or a dataset of (input, label)."""
        self.knn_func.train(self._embed_all(inputs, batch_size))

    def add_to_knn(self, inputs: Any, batch_size: int = 64) -> None:
        """Search among these inputs too."""
        self.knn_func.add(self._embed_all(inputs, batch_size))

    def _embed_all(self, inputs: Any, batch_size: int) -> Tensor:
        batches = DataLoader(inputs, batch_size=batch_size)
        return torch.cat([self.get_embeddings(x[0] if isinstance(inputs, Dataset) else x) for x in batches])

    def get_nearest_neighbors(self, query: Any, k: int) -> Found:
        """Return distances and indices [N, k] of the nearest inputs."""
        found: Found = self.knn_func(self.get_embeddings(query), k)
        return found

    @torch.no_grad()
    def get_embeddings(self, x: Any) -> Tensor:
        """Return embeddings [N, D]."""
        x = torch.stack(x) if isinstance(x, list) and all(isinstance(item, Tensor) for item in x) else x
        if isinstance(x, Tensor):
            x = x.to(self.data_device, self.dtype or x.dtype)
        emb: Tensor = self.model.eval()(x)
        return nn.functional.normalize(emb) if self.normalize_embeddings else emb

    def get_matches(
        self, query: Any, ref: Any = None, threshold: float | None = None, return_tuples: bool = False
    ) -> Any:
        """Return the matches of queries with references; see `MatchFinder.get_matching_pairs`."""
        refs = None if ref is None else self.get_embeddings(ref)
        return self.match_finder.get_matching_pairs(self.get_embeddings(query), refs, threshold, return_tuples)

    def is_match(self, x: Any, y: Any, threshold: float | None = None) -> Any:
        """Return whether rows of x and y match."""
        return self.match_finder.is_match(self.get_embeddings(x), self.get_embeddings(y), threshold)

    def save_knn_func(self, filename: str) -> None:
        """Write the search to a file."""
        self.knn_func.save(filename)

    def load_knn_func(self, filename: str) -> None:
        """Read the search from a file."""
        self.knn_func.load(filename)
