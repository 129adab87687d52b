"""Losses over pairs: each pair of one class is pulled, each pair of two classes is pushed.

    contrastive         cosine; -s for positives, a hinge for negatives
    contrastive_l2      squared Euclidean distance; its two parts are tightness and contrast
    margin              hinges around a distance that may be learned
    margin_similarity   the same around a cosine
    multi_similarity    soft hinges, every pair weighted by how it compares with the others

All take `Pairs` (similarities [N, M] with masks) and return one value per anchor [N], alone or with the number of
terms that the mean is taken over.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nearkin.losses.registry import Inputs, linear, log, loss
from nearkin.ops.pairs import Pairs, pair_up
from nearkin.ops.reductions import hinge_sum, log_sums, pick, row_sum


@loss(
    family="pair",
    paper="Hadsell et al. 2006; cosine form of Psomas 2020, eq 2.15",
    formula="mean over ordered pairs of  -s_ij (same class),  max(0, s_ij - margin) (other class)",
    use="A plain, robust baseline, and the usual choice with a cross-batch memory.",
    space={"margin": linear(0.0, 1.0)},
)
def contrastive(p: Pairs, *, margin: float | Tensor = 0.5) -> tuple[Tensor, Tensor]:
    """Pull every pair of one class; push pairs of two classes that are nearer than a margin.

    p        cosines [N, M] with masks; returns totals per anchor [N] and the number of pairs
    margin   the cosine below which two classes are far enough; 0.3 to 0.7 works

    The least value is -1 (all positives coincide, no negative above the margin): a negative loss is right.

    >>> emb = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8]])
    >>> float(contrastive(pair_up(emb, torch.tensor([0, 0, 1])), margin=0.5))
    -0.2666...
    """
    pull = row_sum(p.sim, p.positives)
    push, _ = hinge_sum(p.sim, p.negatives, 1.0, margin)
    return push - pull, (p.positives.counts() + p.negatives.counts()).sum()


def _l2_pairs(*given: Any, normalize: bool = True, **options: Any) -> Pairs:
    return pair_up(*given, metric="cosine" if normalize else "dot", **options)


@loss(
    family="pair",
    paper="Hadsell et al. 2006; Boudiaf et al. 2020, eq 2",
    formula="(1/N) sum_i [ sum_{same} d_ij^2 + sum_{other} max(0, margin - d_ij)^2 ]",
    use="When distances rather than cosines matter, or to study tightness and contrast. It grows with the batch.",
    space={"margin": linear(0.2, 1.4)},
    inputs=Inputs(_l2_pairs, outer={"normalize": True}, pairs=True, memory=True),
)
def contrastive_l2(p: Pairs, *, margin: float | Tensor = 1.0) -> Tensor:
    """Squared distances within a class, squared margin violations between classes; summed, divided by N.

    p        similarities [N, M] with masks; plain products (`metric="dot"`) keep the lengths of the vectors
    margin   a distance; on unit vectors distances lie in 0 to 2, and 1.0 works

    >>> emb = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8]])
    >>> float(contrastive_l2(pair_up(emb, torch.tensor([0, 0, 1])), margin=1.0))
    0.0148...
    """
    i, j = p.positives.listed()
    anchor_sq, ref_sq = p.squares()
    tightness = anchor_sq[i] + ref_sq[j] - 2 * pick(p.sim, i, j)
    slack, _ = hinge_sum(p.distance(), p.negatives, -1.0, margin, power=2)
    return slack.index_add(0, i, tightness)


@loss(
    family="pair",
    paper="Wu et al. 2017",
    formula="sum of max(0, alpha + d_ij - beta) (same), max(0, alpha - d_ij + beta) (other) / number of non-zero terms",
    use="With the distance_weighted miner; learn_beta lets the data set the boundary.",
    space={"alpha": linear(0.05, 0.5), "beta": linear(0.6, 1.4)},
    inputs=Inputs(pair_up, outer={"learn_beta": False}, pairs=True, memory=True),
)
def margin(p: Pairs, *, alpha: float | Tensor = 0.2, beta: float | Tensor = 1.2) -> tuple[Tensor, Tensor]:
    """Keep positives nearer than beta - alpha and negatives farther than beta + alpha (Euclidean, unit vectors).

    p       cosines [N, M] with masks; returns totals per anchor [N] and the number of non-zero terms
    alpha   half the width of the gap; 0.1 to 0.3
    beta    the boundary, a distance (not a cosine: 1.2 is the cosine 0.28); a 0-dim tensor is learned

    >>> emb = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8]])
    >>> float(margin(pair_up(emb, torch.tensor([0, 0, 1]))))
    0.5055...
    """
    distance = p.distance()
    pull, n_pull = hinge_sum(distance, p.positives, 1.0, beta - alpha)
    push, n_push = hinge_sum(distance, p.negatives, -1.0, beta + alpha)
    return pull + push, (n_pull + n_push).sum()


@loss(
    family="pair",
    paper="Psomas 2020, eq 2.23, with signs -1 and +1",
    formula="sum of max(0, margin + beta - s) (same), max(0, margin - beta + s) (other) / number of non-zero terms",
    use="Margin loss for those who think in cosines; not the same loss as `margin`, even with matched beta.",
    space={"margin": linear(0.05, 0.5), "beta": linear(0.0, 0.8)},
)
def margin_similarity(p: Pairs, *, margin: float | Tensor = 0.2, beta: float | Tensor = 0.28) -> tuple[Tensor, Tensor]:
    """Keep positives above the cosine beta + margin and negatives below beta - margin.

    p        cosines [N, M] with masks; returns totals per anchor [N] and the number of non-zero terms
    margin   half the width of the gap
    beta     the boundary, a cosine

    >>> emb = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8]])
    >>> float(margin_similarity(pair_up(emb, torch.tensor([0, 0, 1]))))
    0.52...
    """
    pull, n_pull = hinge_sum(p.sim, p.positives, -1.0, beta + margin)
    push, n_push = hinge_sum(p.sim, p.negatives, 1.0, beta - margin)
    return pull + push, (n_pull + n_push).sum()


@loss(
    family="pair",
    paper="Wang et al. 2019",
    formula="mean_i of  (1/alpha) log(1 + sum_pos exp(-alpha (s - base)))"
    "  +  (1/beta) log(1 + sum_neg exp(beta (s - base)))",
    use="The strongest pair loss at small and middle batch sizes; use its own miner (epsilon 0.1).",
    space={"alpha": log(0.5, 50), "beta": log(2, 100), "base": linear(0, 1)},
)
def multi_similarity(p: Pairs, *, alpha: float = 2.0, beta: float = 50.0, base: float = 0.5) -> Tensor:
    """Pull weak positives and push near negatives, each weighted by how it compares with the others.

    p       cosines [N, M] with masks; returns one value per anchor [N]
    alpha   sharpness among positives; 2 is soft, 18 was found by search
    beta    sharpness among negatives; 40 to 80
    base    the cosine around which both turn; 0.5, or 0.8 with sharp settings

    >>> emb = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8]])
    >>> float(multi_similarity(pair_up(emb, torch.tensor([0, 0, 1]))))
    0.2091...
    """
    # Each is log(1 + sum exp(scale (s - base))), with scale -alpha over positives and beta over negatives.
    pull, push = log_sums(p.sim, p.positives, p.negatives, -alpha, beta, base, one=True)
    return pull / alpha + push / beta
