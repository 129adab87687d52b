"""Margin softmax losses: cross entropy on cosines to the class proxies, with the own class made harder by a margin."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nearkin.losses.classes import CENTERS, PROXIES, ToClasses, class_batch, proxy_similarities
from nearkin.losses.ranges import integer, linear, log
from nearkin.losses.registry import Buffer, loss
from nearkin.ops.checks import squared_norms
from nearkin.ops.geometry import full_precision, unit
from nearkin.ops.reductions import own_and_others, sine, softplus
from nearkin.ops.row_blocks import by_rows

_SCALE, _FRACTION = log(8, 256), linear(0.1, 1.0)


def _rotate(own: Tensor, margin: float | Tensor) -> Tensor:
    """Return cos(t + margin); beyond 180 degrees, where the cosine would rise again, cos t - margin sin margin."""
    m = torch.as_tensor(margin, dtype=own.dtype, device=own.device)
    return torch.where(own < -m.cos(), own - m * m.sin(), own * m.cos() - sine(own) * m.sin())


@loss(
    paper="Wang et al. 2018 (CosFace)",
    formula="mean_i of  log(1 + sum_{c != y} exp(scale (s_ic - s_iy + margin)))",
    use="Many classes; simpler and more stable than arcface, with about the same results.",
    space={"margin": linear(0.0, 0.6), "scale": _SCALE},
    inputs=PROXIES,
)
def cosface(c: ToClasses, *, margin: float = 0.35, scale: float = 64.0) -> Tensor:
    """Cross entropy on cosines, with a margin subtracted from the cosine to the sample's own class.

    Args:
        c: Cosines [N, C].
        margin: Margin in cosine; 0.1 to 0.4.
        scale: Inverse temperature; 16 to 64.

    Returns:
        One value per sample [N].

    Example:
        >>> float(cosface(torch.eye(2), torch.tensor([0, 1]), torch.eye(2), margin=0.5, scale=2.0))
        0.3132...
    """
    own, others = own_and_others(c.sim, c.labels, scale)
    return softplus(others - scale * (own - margin))


def _products(emb: Any, labels: Any, proxies: Tensor, *, directions: bool = False) -> ToClasses:
    """Return dot products with the proxies, and the product of both lengths for the own class as `own`."""
    emb, labels = class_batch(emb, labels, proxies, "proxies")
    weight = (unit(proxies) if directions else proxies).to(emb.dtype)
    squared_norms(weight)
    squared_norms(emb)
    with full_precision(emb):
        length, weight_length = (torch.linalg.vector_norm(x, dim=1) for x in (emb, weight))
        return ToClasses(emb @ weight.t(), labels, own=length * weight_length[labels])


def _multiple_angle(own: Tensor, m: int) -> Tensor:
    """Return (-1)^k cos(m t) - 2 k with k = floor(m t / pi), which falls monotonically from t = 0 to pi."""
    before, cosine = torch.ones_like(own), own
    for _ in range(m - 1):  # cos(m t) as a Chebyshev polynomial of cos t
        before, cosine = cosine, 2 * own * cosine - before
    k = (own.detach().clamp(-1, 1).acos() * (m / math.pi)).floor().clamp(max=m - 1)
    return (1 - 2 * (k % 2)) * cosine - 2 * k


def _multiplied_angle_loss(c: ToClasses, margin: int, scale: float) -> Tensor:
    assert c.own is not None
    product, others = own_and_others(c.sim, c.labels, scale)
    cosine = torch.where(c.own > 0, product / c.own.clamp(min=torch.finfo(c.own.dtype).tiny), 0.0)
    return softplus(others - scale * c.own * _multiple_angle(cosine, margin))


@loss(
    paper="Liu et al. 2017 (SphereFace)",
    formula="mean_i of  log(1 + sum_{c != y} exp(scale |x_i| (cos t_ic - psi(t_iy)))),  "
    "psi(t) = (-1)^k cos(margin t) - 2 k,  k = floor(margin t / pi)",
    use="To compare with the original angular margin; arcface and cosface are easier to train.",
    space={"margin": integer(1, 4), "scale": log(0.1, 64)},
    inputs=replace(PROXIES, build=partial(_products, directions=True), logits="direction"),
)
def sphereface(c: ToClasses, *, margin: int = 4, scale: float = 1.0) -> Tensor:
    """Cross entropy with a multiplied angle to the own class; the length of the embedding is the inverse temperature.

    Args:
        c: Products with the unit proxies [N, C], and lengths [N].
        margin: Factor on the angle; 1 is no margin.
        scale: Further factor on the logits.

    Returns:
        One value per sample [N].

    Example:
        >>> float(sphereface(torch.eye(2), torch.tensor([0, 1]), torch.eye(2)))
        0.3132...
    """
    return _multiplied_angle_loss(c, margin, scale)


@loss(
    paper="Liu et al. 2016 (L-Softmax)",
    formula="mean_i of  -log softmax_c(scale |w_c| |x_i| g_ic)_y,  "
    "g = psi(t_iy) as in sphereface (own), cos t_ic (others)",
    use="To compare with the original: a softmax head whose own angle is multiplied.",
    space={"margin": integer(1, 4), "scale": log(0.1, 64)},
    inputs=replace(PROXIES, build=_products, logits="linear"),
)
def large_margin_softmax(c: ToClasses, *, margin: int = 4, scale: float = 1.0) -> Tensor:
    """Cross entropy of a linear head without bias, with a multiplied angle to the own class.

    Args:
        c: Products with the weights [N, C], and the product of both lengths for the own class [N].
        margin: As in `sphereface`.
        scale: As in `sphereface`.

    Returns:
        One value per sample [N].

    Example:
        >>> float(large_margin_softmax(torch.eye(2), torch.tensor([0, 1]), 2 * torch.eye(2)))
        0.1269...
    """
    return _multiplied_angle_loss(c, margin, scale)


@loss(
    paper="Deng et al. 2020 (sub-center ArcFace)",
    formula="arcface with  cos t_ic = max_k cos(x_i, w_ck)",
    use="Noisy labels, or classes with several modes: wrong samples gather at centres of their own.",
    space={"margin_degrees": linear(5.0, 45.0), "scale": _SCALE, "centers": integer(1, 10)},
    inputs=replace(CENTERS, builder_kwargs={"centers": 3}),
    cost="N C K D",
)
def subcenter_arcface(c: ToClasses, *, margin_degrees: float = 28.6, scale: float = 64.0) -> Tensor:
    """Cross entropy on the cosines to the nearest centre of every class, with an angular margin.

    Args:
        c: Cosines [N, C, K].
        margin_degrees: Angular margin in degrees; 28.6 is half a radian.
        scale: Inverse temperature; 16 to 64.

    Returns:
        One value per sample [N].

    Example:
        >>> proxies = torch.eye(2)[:, None].expand(2, 3, 2)
        >>> float(subcenter_arcface(torch.eye(2), torch.tensor([0, 1]), proxies, margin_degrees=60.0, scale=2.0))
        0.3132...
    """
    own, others = own_and_others(c.sim.amax(2), c.labels, scale)
    return softplus(others - scale * _rotate(own, math.radians(margin_degrees)))


def _class_counts(_: Tensor | None, labels: Tensor, num_classes: int) -> dict[str, Tensor]:
    zeros = torch.zeros(num_classes, device=labels.device)
    return {"class_counts": zeros.index_add(0, labels, torch.ones_like(labels, dtype=zeros.dtype))}


@loss(
    paper="Ha et al. 2020",
    formula="arcface with the margin of class y in radians:  strength n_y^(-power) + base,  n_y samples of the class",
    use="Long-tailed classes: rare ones get the larger margin. Objective.refresh(labels) counts the samples.",
    space={"strength": _FRACTION, "power": linear(0, 1, legal="[0, inf)"), "base": linear(0, 0.3), "scale": _SCALE},
    inputs=replace(
        PROXIES, buffers=(Buffer("class_counts", "C", init=1.0),), refresh=_class_counts, refresh_embeddings=False
    ),
)
def dynamic_arcface(
    c: ToClasses,
    *,
    strength: float = 0.5,
    power: float = 0.25,
    base: float = 0.05,
    scale: float = 45.0,
    class_counts: Tensor | None = None,
) -> Tensor:
    """Arcface with a margin for each class, which falls with the number of its samples.

    Args:
        c: Cosines [N, C].
        strength: Additional margin of a class with one sample, in radians.
        power: How fast it falls with the number of samples.
        base: Margin of a class with very many samples, in radians.
        scale: Inverse temperature; 16 to 64.
        class_counts: Samples of each class [C]; 1 each by default.

    Returns:
        One value per sample [N].

    Example:
        >>> emb, labels = torch.eye(2), torch.tensor([0, 1])
        >>> float(dynamic_arcface(emb, labels, emb, scale=2.0, class_counts=torch.tensor([1.0, 10_000.0])))
        0.1475...
    """
    counts = c.sim.new_ones(c.sim.shape[1]) if class_counts is None else class_counts.to(c.sim.dtype)
    margin = strength * counts.clamp(min=1.0)[c.labels] ** -power + base
    own, others = own_and_others(c.sim, c.labels, scale)
    return softplus(others - scale * _rotate(own, margin))


def _lengths(emb: Tensor, labels: Tensor | Sequence[int], proxies: Tensor) -> ToClasses:
    """Return cosines to the proxies, with the lengths of the embeddings as `own`."""
    c = proxy_similarities(emb, labels, proxies)
    return replace(c, own=torch.linalg.vector_norm(emb.to(c.sim.dtype), dim=1))


def _length_statistics(c: ToClasses, state: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """Move the statistics of the lengths towards those of the batch; the batch has the weight `momentum`."""
    assert c.own is not None
    length, weight = c.own.clamp(1e-3, 100.0), settings["momentum"]
    deviation = ((length - length.mean()).square().sum() / max(1, len(length) - 1)).sqrt()
    return {
        "length_mean": (1 - weight) * state["length_mean"] + weight * length.mean(),
        "length_std": (1 - weight) * state["length_std"] + weight * deviation,
    }


@loss(
    paper="Kim et al. 2022 (AdaFace), eq 10 to 15",
    formula="mean_i of  log(1 + sum_{c != y} exp(scale (cos t_ic - cos(t_iy - margin z) + margin z + margin))),  "
    "z = clip(h (|x_i| - mean) / std, -1, 1)",
    use="Images of varying quality: the length of the embedding stands for it, and poor images get an easier margin.",
    space={"margin": linear(0.1, 0.6), "h": _FRACTION, "scale": _SCALE, "momentum": linear(0.01, 1, legal="[0, 1]")},
    inputs=replace(
        PROXIES,
        build=_lengths,
        buffers=(Buffer("length_mean", init=20.0), Buffer("length_std", init=100.0)),
        update=_length_statistics,
    ),
)
def adaface(
    c: ToClasses,
    *,
    margin: float = 0.4,
    h: float = 0.333,
    scale: float = 64.0,
    momentum: float = 0.99,
    length_mean: Tensor | None = None,
    length_std: Tensor | None = None,
) -> Tensor:
    """Cross entropy on cosines, with an angular margin for short embeddings and a cosine margin for long ones.

    Args:
        c: Cosines [N, C] and lengths [N].
        margin: Size of both margins; 0.4.
        h: Width of the adaptation: lengths within std / h of the mean get different margins.
        scale: Inverse temperature; 16 to 64.
        momentum: Weight of the batch in the running statistics of the lengths.
        length_mean: Running mean of the lengths; of the batch by default.
        length_std: Running standard deviation of the lengths; of the batch by default.

    Returns:
        One value per sample [N].

    Example:
        >>> float(adaface(torch.eye(2), torch.tensor([0, 1]), torch.eye(2), margin=0.5, scale=2.0))
        0.3132...
    """
    assert c.own is not None
    if length_mean is None or length_std is None:
        zero = c.sim.new_zeros(())
        batch = _length_statistics(c, {"length_mean": zero, "length_std": zero}, {"momentum": 1.0})
        length_mean, length_std = batch["length_mean"], batch["length_std"]
    z = h * (c.own.detach().clamp(1e-3, 100.0) - length_mean) / (length_std + 1e-3)
    angle = -margin * z.clamp(-1, 1)
    own, others = own_and_others(c.sim, c.labels, scale)
    rotated = own * angle.cos() - sine(own) * angle.sin()
    # An angle outside [0, pi] is clipped there.
    rotated = torch.where((angle < 0) & (own > angle.cos()), 1.0, rotated)
    rotated = torch.where((angle > 0) & (own < -angle.cos()), -1.0, rotated)
    return softplus(others - scale * (rotated + angle - margin))


def _mean_own_cosine(c: ToClasses, state: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Tensor]:
    own = c.sim.gather(1, c.labels[:, None]).mean()
    return {"own_mean": (1 - settings["momentum"]) * state["own_mean"] + settings["momentum"] * own}


@loss(
    paper="Huang et al. 2020 (CurricularFace), eq 8 to 12",
    formula="arcface, and a class nearer than the own one with margin has the cosine  s_ic (t + s_ic),  "
    "t the running mean of s_iy",
    use="As arcface; easy classes matter first, confusable ones later, as the running mean grows.",
    space={"margin_degrees": linear(5.0, 45.0), "scale": _SCALE, "momentum": linear(0.001, 0.1, legal="[0, 1]")},
    inputs=replace(PROXIES, buffers=(Buffer("own_mean"),), update=_mean_own_cosine),
)
def curricularface(
    c: ToClasses,
    *,
    margin_degrees: float = 28.6,
    scale: float = 64.0,
    momentum: float = 0.01,
    own_mean: Tensor | None = None,
) -> Tensor:
    """Arcface whose hard negative classes are reweighted by how far training has come.

    Args:
        c: Cosines [N, C].
        margin_degrees: Angular margin in degrees; 28.6 is half a radian.
        scale: Inverse temperature; 16 to 64.
        momentum: Weight of the batch in the running mean of the own cosines.
        own_mean: Running mean of the own cosines; 0 by default.

    Returns:
        One value per sample [N].

    Example:
        >>> float(curricularface(torch.eye(2), torch.tensor([0, 1]), torch.eye(2), margin_degrees=60.0, scale=2.0))
        0.3132...
    """
    mean = c.sim.new_zeros(()) if own_mean is None else own_mean

    def values(sim: Tensor, labels: Tensor) -> Tensor:
        own = sim.gather(1, labels[:, None]).squeeze(1)
        target = _rotate(own, math.radians(margin_degrees))
        _, others = own_and_others(torch.where(sim > target[:, None], sim * (sim + mean), sim), labels, scale)
        return softplus(others - scale * target)

    return by_rows(values, c.sim, c.labels)


@loss(
    paper="Meng et al. 2021 (MagFace), eq 4 to 8",
    formula="arcface with the margin  m(a) = low + (high - low) (a - 10) / 100  in radians,  "
    "+  strength (1/a + a / 110^2),  a = |x_i| clipped to [10, 110]",
    use="When the length of the embedding should measure quality: easy samples become long.",
    space={"low": linear(0.1, 0.6), "high": linear(0.5, 1), "strength": log(1, 100, legal="[0, inf)"), "scale": _SCALE},
    inputs=replace(PROXIES, build=_lengths),
)
def magface(
    c: ToClasses, *, low: float = 0.45, high: float = 0.8, strength: float = 35.0, scale: float = 64.0
) -> Tensor:
    """Arcface with a margin that grows with the length of the embedding, and a reward for length.

    Args:
        c: Cosines [N, C] and lengths [N].
        low: Margin at length 10, in radians.
        high: Margin at length 110, in radians.
        strength: Weight of the term that rewards length.
        scale: Inverse temperature; 16 to 64.

    Returns:
        One value per sample [N].

    Example:
        >>> emb, labels = 110 * torch.eye(2), torch.tensor([0, 1])
        >>> round(float(magface(emb, labels, torch.eye(2), scale=2.0)), 3)
        0.858
    """
    assert c.own is not None
    a = c.own.clamp(10.0, 110.0)
    own, others = own_and_others(c.sim, c.labels, scale)
    target = _rotate(own, low + (high - low) * (a - 10.0) / 100.0)
    return softplus(others - scale * target) + strength * (1 / a + a / 110.0**2)


@loss(
    paper="Zhang et al. 2019 (P2SGrad), eq 11 as a loss",
    formula="mean_i mean_c of  (s_ic - [c = y])^2",
    use="Without settings: neither scale nor margin has to be tuned.",
    inputs=PROXIES,
)
def p2sgrad(c: ToClasses) -> Tensor:
    """Squared difference between the cosines to all classes and the one-hot label.

    Args:
        c: Cosines [N, C].

    Returns:
        One value per sample [N].

    Example:
        >>> float(p2sgrad(torch.eye(2), torch.tensor([0, 0]), torch.eye(2)))
        0.5
    """
    difference = c.sim.scatter_add(1, c.labels[:, None], -torch.ones_like(c.sim[:, :1]))
    return (difference * difference).mean(1)


@loss(
    paper="Zheng et al. 2020 (dual-path embeddings)",
    formula="mean_i of  -log softmax_c(gamma s_ic)_y,  one class per instance",
    use="Two towers that share one head: number the instances as classes, and pass the embeddings of both.",
    space={"gamma": log(4, 256)},
    inputs=PROXIES,
)
def instance(c: ToClasses, *, gamma: float = 64.0) -> Tensor:
    """Cross entropy on cosines, where every instance (an image with its captions) is a class of its own.

    Args:
        c: Cosines [N, C].
        gamma: Inverse temperature; it is norm_softmax with temperature 1 / gamma.

    Returns:
        One value per sample [N].

    Example:
        >>> float(instance(torch.eye(2), torch.tensor([0, 1]), torch.eye(2), gamma=1.0))
        0.3132...
    """
    own, others = own_and_others(c.sim, c.labels, gamma)
    return softplus(others - gamma * own)
