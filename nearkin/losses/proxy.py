"""Proxy losses: the batch compared with learned proxies of the classes, normalised wherever they are compared."""

import torch
from torch import Tensor

from nearkin.losses.classes import (
    CENTERS,
    PROXIES,
    ToClasses,
    center_spread,
    class_similarity,
    log1p_sum_exp_per_class,
)
from nearkin.losses.ranges import choice, integer, linear, log
from nearkin.losses.registry import loss
from nearkin.ops.geometry import gram
from nearkin.ops.reductions import log1p_sum_exp, own_and_others, softplus


@loss(
    family="proxy",
    paper="Movshovitz-Attias et al. 2017; Psomas 2020, eq 2.27",
    formula="mean_i of  log sum_{c != y} exp(scale s_ic)  -  scale s_iy",
    use="The first proxy loss; train with scale 8 to 32. With include_positive it is norm_softmax.",
    space={"scale": log(1, 64), "include_positive": choice(False, True)},
    inputs=PROXIES,
)
def proxy_nca(c: ToClasses, *, scale: float = 1.0, include_positive: bool = False) -> Tensor:
    """Keep each sample nearer to its own proxy than to the others.

    Args:
        c: Cosines [N, C].
        scale: Inverse temperature; 1 is literal, 2 is the squared distance of unit vectors, 8 to 32 trains better.
        include_positive: Whether the own proxy is in the denominator, as in most implementations.

    Returns:
        One value per sample [N], which may be negative.

    Example:
        >>> float(proxy_nca(torch.eye(2), torch.tensor([0, 1]), torch.eye(2)))
        -1.0
    """
    own, others = own_and_others(c.sim, c.labels, scale)
    if include_positive:
        return softplus(others - scale * own)
    return others - scale * own if c.sim.shape[1] > 1 else own * 0.0


@loss(
    family="proxy",
    paper="Qian et al. 2019",
    formula="mean_i of  -log softmax_c(scale (r_ic - margin [c = y]))_y  +  tau * regulariser,  "
    "r_ic = sum_k softmax_k(s_ick / gamma) s_ick",
    use="Classes with several modes (poses, colours): each can have its own centre, and unused ones merge.",
    space={
        "scale": log(5, 100),
        "gamma": log(0.02, 0.5),
        "margin": linear(0.0, 0.4),
        "tau": linear(0.0, 0.5),
        "centers": integer(1, 20),
    },
    inputs=CENTERS,
    cost="N C K D + C K^2 D",
)
def soft_triple(
    c: ToClasses, *, scale: float = 20.0, gamma: float = 0.1, margin: float = 0.01, tau: float = 0.2
) -> Tensor:
    """Cross entropy on similarities to classes of several centres, with a regulariser that merges unused centres.

    Args:
        c: Cosines [N, C, K].
        scale: Inverse temperature over classes.
        gamma: Temperature over the centres of a class.
        margin: Margin in cosine.
        tau: Weight of `sparse_centers`, which merges unused centres.

    Returns:
        One value per sample [N].

    Example:
        >>> float(soft_triple(torch.eye(2), torch.tensor([0, 1]), torch.eye(2)[:, None], scale=1.0))
        0.3159...
    """
    own, others = own_and_others(class_similarity(c.sim, gamma), c.labels, scale)
    return softplus(others - scale * (own - margin)) + _regulariser(c, tau)


def _regulariser(c: ToClasses, tau: float) -> Tensor | float:
    assert c.proxies is not None
    return tau * center_spread(c.proxies) if tau else 0.0


_ANCHOR_SPACE = {"alpha": log(8, 64), "margin": linear(0.0, 0.5)}
_MPA_SPACE = {**_ANCHOR_SPACE, "gamma": log(0.02, 0.5), "tau": linear(0.0, 0.5), "centers": integer(1, 20)}


@loss(
    family="proxy",
    paper="Kim et al. 2020",
    formula="mean over present classes of log(1 + sum_own exp(-alpha (s - margin)))  +  "
    "mean over all classes of log(1 + sum_others exp(alpha (s + margin)))",
    use="The default: fast, robust, no miner. Train its proxies with 100 times the learning rate.",
    space=_ANCHOR_SPACE,
    inputs=PROXIES,
    reductions=("mean",),
)
def proxy_anchor(c: ToClasses, *, alpha: float = 32.0, margin: float = 0.1) -> Tensor:
    """Use each proxy as an anchor: it pulls its own samples, hardest first, and pushes all others.

    Args:
        c: Cosines [N, C].
        alpha: Sharpness; the larger it is, the more hard samples dominate.
        margin: Margin in cosine, on both sides.

    Returns:
        The 0-dim loss: its two averages are part of its definition.

    Example:
        >>> float(proxy_anchor(torch.eye(2), torch.tensor([0, 1]), torch.eye(2)))
        3.2399...
    """
    return _anchor_loss(c.sim, c.labels, alpha, margin)


def _anchor_loss(sim: Tensor, labels: Tensor, alpha: float, margin: float) -> Tensor:
    own, others = own_and_others(sim, labels, alpha, dim=0)
    push = softplus(others + alpha * margin)
    return _anchor_pull(own, labels, sim.shape[1], alpha, margin) + push.mean()


def _anchor_pull(own: Tensor, labels: Tensor, num_classes: int, alpha: float, margin: float) -> Tensor:
    pull, present = log1p_sum_exp_per_class(-alpha * (own - margin), labels, num_classes)
    return pull.sum() / present


@loss(
    family="proxy",
    paper="Saeki et al. 2023, multi-proxies anchor",
    formula="proxy_anchor with r_ic = sum_k softmax_k(s_ick / gamma) s_ick for s_ic,  +  tau * regulariser",
    use="proxy_anchor for classes with several modes. With one centre and tau 0 it is proxy_anchor.",
    space=_MPA_SPACE,
    inputs=CENTERS,
    cost="N C K D + C K^2 D",
    reductions=("mean",),
)
def mpa(c: ToClasses, *, alpha: float = 32.0, margin: float = 0.1, gamma: float = 0.1, tau: float = 0.2) -> Tensor:
    """Proxy anchor over classes of several centres.

    Args:
        c: Cosines [N, C, K].
        alpha: Sharpness; the larger it is, the more hard samples dominate.
        margin: Margin in cosine, on both sides.
        gamma: Temperature over the centres of a class.
        tau: Weight of `sparse_centers`, which merges unused centres.

    Returns:
        The 0-dim loss.

    Example:
        >>> float(mpa(torch.eye(2), torch.tensor([0, 1]), torch.eye(2)[:, None]))
        3.2399...
    """
    return _anchor_loss(class_similarity(c.sim, gamma), c.labels, alpha, margin) + _regulariser(c, tau)


@loss(
    family="proxy",
    paper="Saeki et al. 2023, data-wise form",
    formula="mean_i of  log(1 + exp(-alpha (r_iy - margin))) + log(1 + sum_{c != y} exp(alpha (r_ic + margin)))"
    "  +  tau * regulariser",
    use="As mpa, when batches hold few samples per class: the gradient is balanced per sample.",
    space=_MPA_SPACE,
    inputs=CENTERS,
    cost="N C K D + C K^2 D",
)
def mpa_dw(c: ToClasses, *, alpha: float = 32.0, margin: float = 0.1, gamma: float = 0.1, tau: float = 0.2) -> Tensor:
    """Pull each sample to its own class and push it from all others, over several centres.

    Args:
        c: Cosines [N, C, K].
        alpha: As in `mpa`.
        margin: As in `mpa`.
        gamma: As in `mpa`.
        tau: As in `mpa`.

    Returns:
        One value per sample [N].

    Example:
        >>> float(mpa_dw(torch.eye(2), torch.tensor([0, 1]), torch.eye(2)[:, None]))
        3.2399...
    """
    own, others = own_and_others(class_similarity(c.sim, gamma), c.labels, alpha)
    return softplus(-alpha * (own - margin)) + softplus(others + alpha * margin) + _regulariser(c, tau)


@loss(
    family="proxy",
    paper="Saeki et al. 2023, all-proxies form",
    formula="mean_i of  log(1 + exp(alpha (margin - r_iy)) + sum_{c != y} exp(alpha (r_ic + margin)))"
    "  +  tau * regulariser",
    use="As mpa_dw; a sample attends only to its worst relation, own class or other.",
    space=_MPA_SPACE,
    inputs=CENTERS,
    cost="N C K D + C K^2 D",
)
def mpa_ap(c: ToClasses, *, alpha: float = 32.0, margin: float = 0.1, gamma: float = 0.1, tau: float = 0.2) -> Tensor:
    """One logarithm per sample over the pull of its own class and the push of all others, over several centres.

    Args:
        c: Cosines [N, C, K].
        alpha: As in `mpa`.
        margin: As in `mpa`.
        gamma: As in `mpa`.
        tau: As in `mpa`.

    Returns:
        One value per sample [N].

    Example:
        >>> float(mpa_ap(torch.eye(2), torch.tensor([0, 1]), torch.eye(2)[:, None]))
        3.2399...
    """
    own, others = own_and_others(class_similarity(c.sim, gamma), c.labels, alpha)
    return softplus(torch.logaddexp(alpha * (margin - own), others + alpha * margin)) + _regulariser(c, tau)


@loss(
    family="proxy",
    paper="Psomas 2020, eq 6.1",
    formula="pull of proxy_anchor  +  mean_w of log(1 + sum_{w' != w} exp(alpha (w.w' + margin)))",
    use="When the classes are few enough for C^2: the proxies spread the classes, whatever the batch holds.",
    space=_ANCHOR_SPACE,
    inputs=PROXIES,
    cost="N C D + C^2 D",
    reductions=("mean",),
)
def proxy_repulsion(c: ToClasses, *, alpha: float = 32.0, margin: float = 0.1) -> Tensor:
    """Proxies pull their own samples, as in proxy_anchor, and push each other.

    Args:
        c: Cosines [N, C] and the unit proxies [C, D].
        alpha: Sharpness; the larger it is, the more hard samples dominate.
        margin: Margin in cosine.

    Returns:
        The 0-dim loss.

    Example:
        >>> float(proxy_repulsion(torch.eye(2), torch.tensor([0, 1]), torch.eye(2)))
        3.2399...
    """
    assert c.proxies is not None
    return _repulsion_loss(c, gram(c.proxies), alpha, margin)


@loss(
    family="proxy",
    paper="Psomas 2020, eq 6.2",
    formula="pull of proxy_anchor  +  mean_w of log(1 + sum_{w' != w} exp(alpha (g + margin))),  g = sum_x (w.x)(x.w')",
    use="As proxy_repulsion, when the batch decides in which directions proxies must differ; average=True is milder.",
    space={**_ANCHOR_SPACE, "average": choice(False, True)},
    inputs=PROXIES,
    cost="N C D + N C^2",
    reductions=("mean",),
)
def proxy_repulsion_batch(c: ToClasses, *, alpha: float = 32.0, margin: float = 0.1, average: bool = False) -> Tensor:
    """Proxies pull their own samples and push each other, compared through the samples of the batch.

    Args:
        c: Cosines [N, C].
        alpha: Sharpness; the larger it is, the more hard samples dominate.
        margin: Margin in cosine.
        average: Divide the sum over the batch by N, so that the push does not grow with the batch.

    Returns:
        The 0-dim loss.

    Example:
        >>> float(proxy_repulsion_batch(torch.eye(2), torch.tensor([0, 1]), torch.eye(2)))
        3.2399...
    """
    products = gram(c.sim.t())
    return _repulsion_loss(c, products / len(c.sim) if average else products, alpha, margin)


def _repulsion_loss(c: ToClasses, proxy_sim: Tensor, alpha: float, margin: float) -> Tensor:
    own = c.sim.gather(1, c.labels[:, None]).squeeze(1)
    others = ~torch.eye(len(proxy_sim), dtype=torch.bool, device=proxy_sim.device)
    push = log1p_sum_exp(proxy_sim, others, alpha, -margin)
    return _anchor_pull(own, c.labels, c.sim.shape[1], alpha, margin) + push.mean()
