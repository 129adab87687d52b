"""The distances of pytorch-metric-learning: modules that return a matrix [N, M] for two sets of embeddings."""

from dataclasses import field
from typing import Any

import torch
from torch import Tensor, nn

from nearkin.compat.pml._module import SettingsModule

EUCLIDEAN = {"p": 2, "power": 1, "normalize_embeddings": True}  # the settings of LpDistance by default


class BaseDistance(SettingsModule):
    """A distance, or a similarity if it is inverted. Subclasses define `compute_mat` and `pairwise_distance`."""

    normalize_embeddings: bool = True
    p: float = 2
    power: float = 1
    is_inverted: bool = False

    def forward(self, query_emb: Tensor, ref_emb: Tensor | None = None) -> Tensor:
        if query_emb.dim() != 2 or (ref_emb is not None and ref_emb.dim() != 2):
            raise ValueError("embeddings must be a 2D tensor of shape (batch_size, embedding_size)")
        query = self.maybe_normalize(as_single(query_emb))
        ref = query if ref_emb is None or ref_emb is query_emb else self.maybe_normalize(as_single(ref_emb))
        mat: Tensor = self.compute_mat(query, ref)
        return (mat if self.power == 1 else torch.pow(mat, self.power)).to(query_emb.dtype)

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        raise NotImplementedError

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        raise NotImplementedError

    def margin(self, x: Any, y: Any) -> Any:
        """Return by how much x is farther than y."""
        return y - x if self.is_inverted else x - y

    def smallest_dist(self, *args: Any, **kwargs: Any) -> Any:
        return (torch.max if self.is_inverted else torch.min)(*args, **kwargs)

    def largest_dist(self, *args: Any, **kwargs: Any) -> Any:
        return (torch.min if self.is_inverted else torch.max)(*args, **kwargs)

    def normalize(self, embeddings: Tensor, dim: int = 1) -> Tensor:
        return nn.functional.normalize(embeddings, p=self.p, dim=dim)

    def maybe_normalize(self, embeddings: Tensor, dim: int = 1) -> Tensor:
        return self.normalize(embeddings, dim) if self.normalize_embeddings else embeddings

    def get_norm(self, embeddings: Tensor, dim: int = 1) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(embeddings, self.p, dim)
        return norm


def as_single(x: Tensor) -> Tensor:
    """Return half precision as float32: sums of products overflow in it, and cdist does not exist."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


class DotProductSimilarity(BaseDistance):
    """Dot products; of unit vectors unless `normalize_embeddings=False`."""

    is_inverted: bool = field(default=True, init=False)

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return torch.matmul(query_emb, ref_emb.transpose(-1, -2))

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return (query_emb * ref_emb).sum(1)


class CosineSimilarity(DotProductSimilarity):
    """Cosines."""

    normalize_embeddings: bool = field(default=True, init=False)


class LpDistance(BaseDistance):
    """The p-norm of the difference; Euclidean by default."""

    is_inverted: bool = field(default=False, init=False)

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return torch.cdist(query_emb, ref_emb, p=self.p)

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return nn.functional.pairwise_distance(query_emb, ref_emb, p=self.p)


class SNRDistance(BaseDistance):
    """The variance of the difference of two embeddings, divided by the variance of the query."""

    is_inverted: bool = field(default=False, init=False)

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        # The variance of a difference is the squared distance of the centred vectors: no buffer [N, M, D].
        query, ref = (x - x.mean(1, keepdim=True) for x in (query_emb, ref_emb))
        squares = torch.cdist(query, ref, compute_mode="donot_use_mm_for_euclid_dist").square()
        return squares / query.square().sum(1, keepdim=True)

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return (query_emb - ref_emb).var(1) / query_emb.var(1)


class BatchedDistance(SettingsModule):
    """Compute a distance for some queries at a time: `iter_fn(mat, start, end)` gets each part."""

    distance: nn.Module
    iter_fn: Any = None
    batch_size: int = 32

    def forward(self, query_emb: Tensor, ref_emb: Tensor | None = None) -> None:
        for start in range(0, len(query_emb), self.batch_size):
            end = start + self.batch_size
            self.iter_fn(self.distance(query_emb[start:end], query_emb if ref_emb is None else ref_emb), start, end)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("distance"), name)
