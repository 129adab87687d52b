"""Parts of losses, entropies of embeddings in nats, and bounds, after Boudiaf et al. 2020."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearkin.errors import ConfigError, DataError, did_you_mean
from nearkin.losses import LOSSES
from nearkin.losses.classes import ToClasses
from nearkin.ops.geometry import full_precision, unit, where_float64_exists
from nearkin.ops.pairs import Pairs, as_batch, as_labels
from nearkin.ops.reductions import log1p_sum_exp, log_sum_exp


class Parts(NamedTuple):
    """A loss as the sum of a term that pulls classes together and a term that pushes them apart, both 0-dim."""

    tightness: Tensor
    contrastive: Tensor


def decompose(name: str, emb: Tensor, labels: Tensor | Sequence[int], *params: Tensor, **settings: Any) -> Parts:
    """Split a loss into its tightness and its contrastive part.

    Args:
        name: contrastive_l2, snca, multi_similarity, pce, spce or center.
        emb: [N, D] embeddings.
        labels: [N] integers.
        *params: What the loss itself takes after the labels: (probabilities) for pce, (weight, bias) for center.
        **settings: Of the loss; `strength` of center is 1 here, and its centres are the class means of the batch.

    Returns:
        The two parts, which add up to the loss.

    Example:
        >>> emb, labels = torch.eye(4), torch.tensor([0, 0, 1, 1])
        >>> [round(float(part), 3) for part in decompose("snca", emb, labels, sigma=1.0)]
        [-0.0, 1.099]
    """
    entry = LOSSES[name]
    if name not in _PARTS:
        hint = f"{did_you_mean(name, _PARTS)} Available: {', '.join(_PARTS)}."
        raise ConfigError(f"{name}: no decomposition into two parts.{hint}")
    settings = entry.check(settings)
    emb, labels = as_batch(emb, labels)
    with full_precision(emb):
        if name == "center":
            return _center_parts(emb, labels, *params)
        built = entry.inputs.build(emb, labels, *params, **entry.inputs.build_kwargs(settings))
        loss_kwargs = {k: settings.get(k, default) for k, default in entry.loss_kwargs.items()}
        return _PARTS[name](built, **loss_kwargs)


def _contrastive_parts(p: Pairs, margin: float) -> Parts:
    push = torch.relu(margin - p.distance()).square() * p.neg
    return Parts((p.sq_distance() * p.pos).sum(1).mean(), push.sum(1).mean())


def snca_parts(p: Pairs, sigma: float) -> Parts:
    """Split snca, the cross entropy of a soft nearest-neighbour classifier, into its two parts."""
    pos, neg = log_sum_exp(p.sim, p.pos, 1 / sigma), log_sum_exp(p.sim, p.neg, 1 / sigma)
    no_positives = pos == float("-inf")
    everyone = torch.logaddexp(pos.masked_fill(no_positives, 0.0), neg)
    return Parts(-pos.masked_fill(no_positives, 0.0).mean(), everyone.masked_fill(no_positives, 0.0).mean())


def _multi_similarity_parts(p: Pairs, alpha: float, beta: float, base: float) -> Parts:
    pull = log1p_sum_exp(p.sim, p.pos, -alpha, base) / alpha
    push = log1p_sum_exp(p.sim, p.neg, beta, base) / beta
    return Parts(pull.mean(), push.mean())


def _pce_parts(c: ToClasses, lam: float) -> Parts:
    assert c.own is not None
    assert c.probs is not None
    push = torch.logsumexp(c.sim / lam, 1) - (c.probs * c.sim).sum(1) / (2 * lam)
    return Parts(-c.own.mean() / (2 * lam), push.mean())


def _spce_parts(c: ToClasses) -> Parts:
    own = c.sim.gather(1, c.labels[:, None])
    return Parts(-own.mean(), torch.logsumexp(c.sim, 1).mean())


def _center_parts(emb: Tensor, labels: Tensor, weight: Tensor, bias: Tensor) -> Parts:
    present, index, count = torch.unique(labels, return_inverse=True, return_counts=True)
    means = emb.new_zeros(len(present), emb.shape[1]).index_add(0, index, emb) / count[:, None]
    logits = torch.addmm(bias.to(emb.dtype), emb, weight.to(emb.dtype).t())
    tightness = (emb - means[index]).square().sum(1).sum() / 2
    return Parts(tightness, torch.nn.functional.cross_entropy(logits, labels))


_PARTS: dict[str, Callable[..., Parts]] = {
    "contrastive_l2": _contrastive_parts,
    "snca": snca_parts,
    "multi_similarity": _multi_similarity_parts,
    "pce": _pce_parts,
    "spce": _spce_parts,
    "center": _center_parts,
}


def label_entropy(labels: Tensor | Sequence[int]) -> float:
    """Compute the entropy H(Y) of the labels.

    Args:
        labels: [N] integers.

    Returns:
        The entropy in nats.
    """
    share = torch.unique(as_labels(labels).cpu(), return_counts=True)[1].double() / len(labels)
    return abs(float((share * share.log()).sum()))


def feature_entropy(emb: Tensor, *, literal: bool = False) -> float:
    """Estimate the differential entropy H(Z) of features from their pairwise distances, up to a constant.

    The estimate is D times the mean log distance of pairs, so that scaling the features by c adds D log c, as it must.
    Coincident points are clamped to a distance of 1e-12, with a warning.

    Args:
        emb: [N, D] features.
        literal: Use the log of the squared distance as printed in the paper, which doubles the value.

    Returns:
        The entropy in nats; NaN below two samples.
    """
    n, dim = emb.shape
    if n < 2:
        return math.nan
    x = where_float64_exists(emb.detach()).double()
    distance = torch.nn.functional.pdist(x)
    if bool((distance < 1e-12).any()):
        warnings.warn("feature_entropy: coincident features, distance clamped to 1e-12", stacklevel=2)
    value = dim * float(distance.clamp(min=1e-12).log().mean())
    return 2 * value if literal else value


def conditional_entropy(emb: Tensor, labels: Tensor | Sequence[int]) -> float:
    """Estimate H(Z | Y): `feature_entropy` within classes, each weighted by its size.

    Args:
        emb: [N, D] features.
        labels: [N] integers.

    Returns:
        The entropy in nats; singleton classes add 0, NaN if all classes are singletons.
    """
    emb, labels = as_batch(emb, labels)
    classes = [emb[labels == k] for k in torch.unique(labels)]
    terms = [len(rows) * feature_entropy(rows) for rows in classes if len(rows) > 1]
    return sum(terms) / len(emb) if terms else math.nan


def mutual_information(emb: Tensor, labels: Tensor | Sequence[int], *, neighbours: int = 3) -> float:
    """Estimate I(Z; Y), what an embedding says about its class, from nearest neighbours (Ross 2014).

    A sample whose class holds all of its nearest neighbours contributes log(N / N_y), one among strangers 0. Samples of
    singleton classes count as misplaced. The difference of `feature_entropy` and `conditional_entropy` is no
    substitute: both are relative, and it exceeds H(Y) many times.

    Args:
        emb: [N, D] features; distances are Euclidean.
        labels: [N] integers.
        neighbours: The radius of a sample reaches to its k-th neighbour of the same class: few for a small bias, more
            for a small variance.

    Returns:
        The mutual information in nats, between 0 and H(Y).
    """
    if neighbours < 1:
        raise ConfigError(f"neighbours: expected 1 or more, got {neighbours}.")
    emb, labels = as_batch(emb, labels)
    x, labels = where_float64_exists(emb.detach()).double(), labels.to(where_float64_exists(emb).device)
    x = x - x.mean(0)
    sq_norm = x.square().sum(1)
    own, everyone = [], []
    for rows in torch.split(torch.arange(len(x), device=x.device), 1024):
        near = count_neighbours(sq_norm - 2 * x[rows] @ x.t(), labels[rows, None] == labels, rows, neighbours)
        own.append(near[0])
        everyone.append(near[1])
    return neighbour_information(torch.cat(own), torch.cat(everyone), labels)


def count_neighbours(distance: Tensor, same: Tensor, rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Count the neighbours of the same and of any class up to each row's k-th of the same class; ties add some."""
    is_self = rows[:, None] == torch.arange(distance.shape[1], device=rows.device)
    distance = distance.masked_fill(is_self, math.inf)
    own = distance.masked_fill(~same, math.inf)
    ranked = own.topk(min(k, own.shape[1]), largest=False).values
    radius = ranked.masked_fill(ranked.isinf(), -math.inf).amax(1, keepdim=True)
    return (own <= radius).sum(1), (distance <= radius).sum(1)


def neighbour_information(own: Tensor, everyone: Tensor, labels: Tensor) -> float:
    """Compute Ross's estimate of I(Z; Y) from the counts of `count_neighbours`, clipped to what is possible."""
    _, code, size = torch.unique(labels, return_inverse=True, return_counts=True)
    alone = own == 0  # a singleton: as if everyone were within its radius
    k, m, n_y = own.where(~alone, 1), everyone.where(~alone, len(labels)), size[code]
    n = torch.full_like(k, len(labels))
    value = float((n.double().digamma() - n_y.double().digamma() + k.double().digamma() - m.double().digamma()).mean())
    return min(max(value, 0.0), label_entropy(labels))


def mutual_information_bound(labels: Tensor | Sequence[int], cross_entropy: float) -> float:
    """Compute a lower bound of I(Z; Y): H(Y) minus the cross entropy of any classifier on Z.

    Args:
        labels: [N] integers.
        cross_entropy: Of the classifier, in nats.

    Returns:
        The bound in nats.
    """
    return label_entropy(labels) - cross_entropy


class Bound(NamedTuple):
    """A quantity and what Lemma 1 says about it."""

    value: float
    bound: float
    relation: str  # of the value to the bound: "<=", ">=" or "=="


def lemma_1(
    emb: Tensor,
    labels: Tensor | Sequence[int],
    *,
    sigma: float = 0.05,
    alpha: float = 2.0,
    beta: float = 50.0,
    base: float = 0.5,
) -> dict[str, Bound]:
    """Compute the tightness and contrast of losses with their bounds by sums of squared distances (Lemma 1).

    Args:
        emb: [N, D] embeddings, which are normalised.
        labels: [N] integers; all classes must have the same number of samples, at least two.
        sigma: Temperature of snca.
        alpha: Of multi_similarity.
        beta: Of multi_similarity.
        base: Of multi_similarity.

    Returns:
        The bounds by name, such as "tightness of snca".

    Raises:
        DataError: Classes of different sizes, for which the lemma does not hold.
    """
    emb, labels = as_batch(emb, labels)
    z = unit(emb.double())
    classes, counts = torch.unique(labels, return_counts=True)
    m, n, k = int(counts[0]), len(z), len(classes)
    if bool((counts != m).any()) or m < 2 or k < 2:
        raise DataError("lemma_1: expected at least two classes with the same number of samples, two or more each.")
    same = labels[:, None] == labels[None, :]
    squared = (2 - 2 * z @ z.T).clamp(min=0)
    means = torch.stack([z[labels == c].mean(0) for c in classes])
    center = float((z - means[torch.searchsorted(classes, labels)]).square().sum()) / 2
    within, between = float(squared[same].sum()) / n, float(squared[~same].sum())
    snca = decompose("snca", z, labels, sigma=sigma)
    ms = decompose("multi_similarity", z, labels, alpha=alpha, beta=beta, base=base)
    snca_pull = -math.log(m - 1) - 1 / sigma + within / (2 * sigma * (m - 1))
    snca_push = math.log(n - 1) + 1 / sigma - float(squared.sum()) / (2 * sigma * n * (n - 1))
    # The "+ 1" of multi-similarity's logarithms can only increase both of its parts.
    ms_pull = math.log(m - 1) / alpha + base - 1 + within / (2 * (m - 1))
    ms_push = math.log(n - m) / beta + 1 - base - between / (2 * n * (n - m))
    return {
        "tightness of contrastive": Bound(within, 4 * center / k, "=="),
        "tightness of snca": Bound(float(snca.tightness), snca_pull, "<="),
        "tightness of multi_similarity": Bound(float(ms.tightness), ms_pull, ">="),
        "contrast of snca": Bound(float(snca.contrastive), snca_push, ">="),
        "contrast of multi_similarity": Bound(float(ms.contrastive), ms_push, ">="),
    }


def pce_lambda(emb: Tensor, probabilities: Tensor) -> float:
    """Compute the largest lambda of PCE for which every class block of its second part is convex.

    It is the smallest eigenvalue of the matrices (1/n) sum_i (p_ik - p_ik^2) z_i z_i^T over the classes k: a D x D
    eigenvalue problem for each class, and 0 if there are fewer samples than dimensions. No lambda makes the second part
    convex in all classes at once.

    Args:
        emb: [N, D] embeddings, not normalised.
        probabilities: [N, C] class probabilities of the current classifier.

    Returns:
        The eigenvalue, at least 0.
    """
    z, p = emb.detach().double(), probabilities.detach().double()
    blocks = torch.einsum("nk,nd,ne->kde", p - p.square(), z, z) / len(z)
    return max(0.0, float(torch.linalg.eigvalsh(blocks)[:, 0].min()))
