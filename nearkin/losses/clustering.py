"""Clustering losses: the clusters that the embeddings form, compared with the classes as wholes."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.losses.ranges import log
from nearkin.losses.registry import Inputs, loss
from nearkin.ops.geometry import full_precision, unit
from nearkin.ops.pairs import Pairs, as_batch, pair_up

_RIDGE = 1e-6  # relative to embeddings of length 1: keeps directions that the batch does not use out of the projection


def projector_pairs(emb: Tensor, labels: Tensor) -> Pairs:
    """Pair up a batch by the projection onto the span of its embeddings F: the similarities are F F^+ [N, N]."""
    emb, labels = as_batch(emb, labels)
    with full_precision(emb):
        f = unit(emb)
        ridge = _RIDGE**0.5 * torch.eye(f.shape[1], dtype=f.dtype, device=f.device)
        basis = torch.linalg.qr(torch.cat([f, ridge])).Q[: len(f)]
        return pair_up(basis, labels, metric="dot")


@loss(
    paper="Law et al. 2017",
    formula="(1/N) |Y Y^+ - F F^+|^2 for one-hot labels Y [N, C] and embeddings F [N, D]",
    use="Batches larger than the embedding, of few classes: one closed form for the relaxed clustering of the batch.",
    inputs=Inputs(projector_pairs, pairs=True, call_example="nearkin.losses.clustering.projector_pairs(emb, labels)"),
    cost="N D^2 + N^2 D",
)
def spectral_clustering(p: Pairs) -> Tensor:
    """Squared difference between the projections onto the classes and onto the span of the embeddings.

    A batch of N <= D independent embeddings spans everything: then the loss is constant.

    Args:
        p: The projection F F^+ [N, N] with masks.

    Returns:
        One value per sample [N].

    Example:
        >>> emb = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> abs(round(float(spectral_clustering(projector_pairs(emb, torch.tensor([0, 0, 1])))), 4))
        0.0
    """
    p.require_square("spectral_clustering")
    same = p.pos | torch.eye(len(p.sim), dtype=torch.bool, device=p.sim.device)
    return (same / same.sum(1, keepdim=True) - p.sim).square().sum(1)


class _Medoids:
    """Select medoids, one per class, that maximise F(S) + gamma (1 - NMI(clusters, labels)), F as in the loss."""

    def __init__(self, distance: NDArray[Any], labels: NDArray[Any], gamma: float) -> None:
        self.distance, self.labels, self.gamma = distance, labels, gamma
        self.num_classes = int(labels.max()) + 1
        self.one_hot = np.eye(self.num_classes)[labels]

    def search(self, rounds: int = 5) -> NDArray[Any]:
        """Add medoids greedily, then replace each by the best member of its cluster, for a few rounds."""
        chosen: list[int] = []
        everything = np.arange(len(self.labels))
        for _ in range(self.num_classes):
            rest = np.setdiff1d(everything, chosen)
            chosen.append(int(rest[self.scores(chosen, rest).argmax()]))
        for _ in range(rounds):
            before = chosen.copy()
            for place, medoid in enumerate(chosen):
                others = [*chosen[:place], *chosen[place + 1 :]]
                members = everything[self.distance[:, chosen].argmin(1) == place]
                candidates = np.setdiff1d(np.append(members, medoid), others)
                scores = self.scores(others, candidates)
                best = int(scores.argmax())
                if scores[best] > scores[list(candidates).index(medoid)] + 1e-12:
                    chosen[place] = int(candidates[best])
            if chosen == before:
                break
        return np.array(chosen)

    def scores(self, chosen: list[int], candidates: NDArray[Any]) -> NDArray[Any]:
        """Return F + gamma (1 - NMI) of `chosen` with each candidate added, without a block [candidates, N, N]."""
        to_new = self.distance[:, candidates].T
        nearest, assigned = np.full(len(self.labels), np.inf), np.zeros(len(self.labels), int)
        if chosen:
            nearest, assigned = self.distance[:, chosen].min(1), self.distance[:, chosen].argmin(1)
        moved = (to_new < nearest).astype(float)
        clusters = np.eye(max(1, len(chosen)))[assigned]
        _, cell = np.unique(assigned * self.num_classes + self.labels, return_inverse=True)
        cells = np.eye(cell.max() + 1)[cell]
        joint = np.hstack([cells.sum(0) - moved @ cells, moved @ self.one_hot])
        sizes = np.hstack([clusters.sum(0) - moved @ clusters, moved.sum(1, keepdims=True)])
        facility = -np.minimum(to_new, nearest).sum(1)
        return np.asarray(facility + self.gamma * (1 - self.nmi(joint, sizes)))

    def nmi(self, joint: NDArray[Any], sizes: NDArray[Any]) -> NDArray[Any]:
        """Return I / sqrt(H H) of counts [m, cells] and cluster sizes [m, clusters]; 1 if there is a single class."""

        def entropy(counts: NDArray[Any]) -> NDArray[Any]:
            share = counts / len(self.labels)
            return np.asarray(-(share * np.log(np.where(share > 0, share, 1.0))).sum(-1))

        classes, clusters = entropy(self.one_hot.sum(0)), entropy(sizes)
        if classes == 0:
            return np.ones(len(sizes))
        information = classes + clusters - entropy(joint)
        return np.asarray(information / np.sqrt(np.maximum(classes * clusters, 1e-300)))


def _find_medoids(distance: Tensor, same: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Return the mask of the medoids [N], and 1 - NMI of the clusters around them."""
    _, labels = np.unique(same.cpu().numpy().argmax(1), return_inverse=True)
    search = _Medoids(distance.double().cpu().numpy(), labels, gamma)
    chosen = search.search()
    facility = -search.distance[:, chosen].min(1).sum()
    gap = (search.scores(list(chosen[:-1]), chosen[-1:])[0] - facility) / gamma if gamma else 0.0
    mask = np.isin(np.arange(len(labels)), chosen)
    return torch.from_numpy(mask).to(same.device), torch.tensor(gap, dtype=distance.dtype).to(distance.device)


# For torch.compile, which then does not look inside: the search has no gradient and runs on the CPU.
@torch.library.custom_op(
    "nearkin::find_medoids", mutates_args=(), schema="(Tensor distance, Tensor same, float gamma) -> (Tensor, Tensor)"
)
def _compiled_find_medoids(distance: Tensor, same: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    return _find_medoids(distance, same, gamma)


@_compiled_find_medoids.register_fake
def _(distance: Tensor, same: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    return same.new_empty(len(same)), distance.new_empty(())


@loss(
    paper="Song et al. 2017, eq 6 to 9",
    formula="(1/N) max(0, max_S [F(S) + gamma (1 - NMI(clusters of S, classes))] - F*),  "
    "F(S) = -sum_i min_{j in S} d_ij,  F* = sum over classes of max_j in class of -sum_i d_ij",
    use="To optimise a clustering of the batch (NMI). The search runs on the CPU: batches of 128; raise gamma slowly.",
    space={"gamma": log(0.1, 100, legal="[0, inf)")},
    inputs=Inputs(pair_up, pairs=True),
    cost="N^2 D + N^3 C",
    reductions=("mean",),
)
def facility_location(p: Pairs, *, gamma: float = 1.0) -> Tensor:
    """Keep the clustering by the true classes better than the best other clustering, by a margin of their difference.

    The best other medoids are found by greedy addition and five rounds of swaps; the gradient takes them as constants.
    The search runs in NumPy, on an accelerator as well, which waits for it.

    Args:
        p: Cosines [N, N] with masks.
        gamma: Weight of the difference between clusters and classes, in sums of distances.

    Returns:
        The 0-dim loss.

    Example:
        >>> emb = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8], [0.0, 1.0]])
        >>> float(facility_location(pair_up(emb, torch.tensor([0, 1, 0, 1]))))
        0.3819...
    """
    p.require_square("facility_location")
    same = p.pos | torch.eye(len(p.sim), dtype=torch.bool, device=p.sim.device)
    distance = p.distance()
    within = torch.where(same, distance, 0.0).sum(0)  # of each sample as the medoid of its class
    best = torch.where(same, within, 1e30).amin(1) / same.sum(1)
    find_medoids = _compiled_find_medoids if torch.compiler.is_compiling() else _find_medoids
    medoids, gap = find_medoids(distance.detach(), same, gamma)
    nearest = torch.where(medoids, distance, 1e30).amin(1)
    return torch.relu(best.sum() - nearest.sum() + gamma * gap) / len(p.sim)
