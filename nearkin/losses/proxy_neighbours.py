"""Proxy losses on neighbour probabilities: a softmax over distances to proxies, or a random walk among them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nearkin.losses.classes import PROXIES, ToClasses, proxy_similarities
from nearkin.losses.ranges import linear, log
from nearkin.losses.registry import Inputs, loss
from nearkin.ops.geometry import full_precision, unit
from nearkin.ops.reductions import log_sum, own_and_others, softplus


@loss(
    family="proxy",
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
    family="proxy",
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
