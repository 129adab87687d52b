"""Proxy losses: the batch compared with learned proxies of the classes, normalised wherever they are compared."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nearkin.losses.classes import CENTERS, PROXIES, ToClasses, center_spread, class_similarity, proxy_similarities
from nearkin.losses.ranges import choice, integer, linear, log
from nearkin.losses.registry import Inputs, loss
from nearkin.ops.geometry import full_precision, gram, unit
from nearkin.ops.reductions import log1p_sum_exp, log_sum, own_and_others, softplus


@loss(
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
_MPA: dict[str, Any] = {
    "space": {**_ANCHOR_SPACE, "gamma": log(0.02, 0.5), "tau": linear(0.0, 0.5), "centers": integer(1, 20)},
    "inputs": CENTERS,
    "cost": "N C K D + C K^2 D",
}


@loss(
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
    return _pull_and_push(own, labels, softplus(others + alpha * margin), alpha, margin)


def _pull_and_push(own: Tensor, labels: Tensor, push: Tensor, alpha: float, margin: float) -> Tensor:
    """Return the mean pull of the classes present, log(1 + sum exp) over their samples, plus the mean push."""
    x, zeros = -alpha * (own - margin), own.new_zeros(len(push))
    top = zeros.scatter_reduce(0, labels, x.detach(), "amax")  # starts at 0: the zero logit
    total = torch.exp(-top).index_add(0, labels, torch.exp(x - top[labels]))
    return (top + total.log()).sum() / zeros.index_fill(0, labels, 1.0).sum() + push.mean()


@loss(
    paper="Saeki et al. 2023, multi-proxies anchor",
    formula="proxy_anchor with r_ic = sum_k softmax_k(s_ick / gamma) s_ick for s_ic,  +  tau * regulariser",
    use="proxy_anchor for classes with several modes. With one centre and tau 0 it is proxy_anchor.",
    **_MPA,
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
    paper="Saeki et al. 2023, data-wise form",
    formula="mean_i of  log(1 + exp(-alpha (r_iy - margin))) + log(1 + sum_{c != y} exp(alpha (r_ic + margin)))"
    "  +  tau * regulariser",
    use="As mpa, when batches hold few samples per class: the gradient is balanced per sample.",
    **_MPA,
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
    paper="Saeki et al. 2023, all-proxies form",
    formula="mean_i of  log(1 + exp(alpha (margin - r_iy)) + sum_{c != y} exp(alpha (r_ic + margin)))"
    "  +  tau * regulariser",
    use="As mpa_dw; a sample attends only to its worst relation, own class or other.",
    **_MPA,
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
    return _pull_and_push(own, c.labels, log1p_sum_exp(proxy_sim, others, alpha, -margin), alpha, margin)


@loss(
    paper="Teh et al. 2020 (ProxyNCA++)",
    formula="mean_i of  -log softmax_c(-|x_i - w_c|^2 / temperature)_y",
    use="proxy_nca with a probability over all proxies and a low temperature: stronger, and as simple.",
    space={"temperature": log(0.02, 1.0)},
    inputs=PROXIES,
)
def proxy_nca_pp(c: ToClasses, *, temperature: float = 1 / 9) -> Tensor:
    """Cross entropy on squared distances to the class proxies, all on the unit sphere.

    Args:
        c: Cosines [N, C].
        temperature: Softmax temperature; 1/9 is the paper's.

    Returns:
        One value per sample [N].

    Example:
        >>> float(proxy_nca_pp(torch.eye(2), torch.tensor([0, 1]), torch.eye(2), temperature=1.0))
        0.1269...
    """
    scale = 2 / temperature  # minus the squared distance is 2 s - 2
    own, others = own_and_others(c.sim, c.labels, scale)
    return softplus(others - scale * own)


def _walk(emb: Tensor, labels: Tensor | Sequence[int], proxies: Tensor, *, persistence: float = 0.8) -> ToClasses:
    """Return how often random walks from each sample visit each proxy, and the cosines of their visits as `probs`."""
    c = proxy_similarities(emb, labels, proxies)
    assert c.proxies is not None
    with full_precision(c.sim):
        nodes = torch.cat([unit(emb.to(c.sim.dtype)), c.proxies])
        eye = torch.eye(len(nodes), dtype=nodes.dtype, device=nodes.device)
        weight = torch.exp(2 * torch.relu(nodes @ nodes.t())) * (1 - eye)
        root = weight.sum(1).clamp(min=1e-12).rsqrt()
        system = eye - persistence * root[:, None] * weight * root
        visits = (1 - persistence) * torch.linalg.inv_ex(system).inverse
        samples, classes = visits[: len(emb)], visits[len(emb) :]
        return ToClasses(samples[:, len(emb) :], c.labels, c.proxies, probs=unit(samples) @ unit(classes).t())


@loss(
    paper="Aziere and Todorovic 2019 (manifold similarity)",
    formula="mean_i of  log(1 + sum_{c != y, violated} exp(f_ic - f_iy + margin))  "
    "+  context * the same on cosines of f,  "
    "f = (1 - persistence) (I - persistence D^-1/2 S D^-1/2)^-1 over samples and proxies, S = exp(2 max(0, s))",
    use="When classes are curved manifolds: similarity follows paths through the batch. The cost is a matrix inverse.",
    space={
        "margin": log(1e-5, 0.1, legal="[0, inf)"),
        "context": log(0.1, 10, legal="[0, inf)"),
        "persistence": linear(0.3, 0.99, legal="[0, 1)"),
    },
    inputs=Inputs(
        _walk,
        params=PROXIES.params,
        builder_kwargs={"persistence": 0.8},
        builder_docs={"persistence": "Probability that a random walk goes on at each step."},
    ),
    cost="(N + C)^2 D + (N + C)^3",
)
def manifold(c: ToClasses, *, margin: float = 5e-4, context: float = 1.0) -> Tensor:
    """Compare samples with class proxies by random walks through the batch.

    Args:
        c: Visits of the proxies [N, C], and the cosines of all visits [N, C].
        margin: Margin of both comparisons.
        context: Weight of the comparison of whole visit profiles.

    Returns:
        One value per sample [N].

    Example:
        >>> round(float(manifold(torch.eye(2), torch.tensor([0, 1]), torch.eye(2))), 3)
        0.0
    """
    assert c.probs is not None
    return _violations(c.sim, c.labels, margin) + context * _violations(c.probs, c.labels, margin)


def _violations(sim: Tensor, labels: Tensor, margin: float) -> Tensor:
    excess = sim - sim.gather(1, labels[:, None]) + margin
    violated = (excess >= 0).scatter(1, labels[:, None], False)
    return softplus(log_sum(excess.masked_fill(~violated, float("-inf"))))
