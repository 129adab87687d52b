"""Classification losses: a softmax over the training classes, or over the classes of the batch."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nearkin.errors import DataError
from nearkin.losses.classes import HEAD, PROXIES, ToClasses, linear_logits
from nearkin.losses.ranges import linear, log
from nearkin.losses.registry import Inputs, Param, loss
from nearkin.ops.checks import check_range, on_host, squared_norms
from nearkin.ops.geometry import full_precision
from nearkin.ops.pairs import as_batch
from nearkin.ops.reductions import own_and_others, sine, softplus


@loss(
    paper="Boudiaf et al. 2020",
    formula="mean_i of  -sum_c t_ic log softmax(W x_i + b)_c,  t = 1 - smoothing (own), smoothing/(C - 1) (others)",
    use="The simplest baseline, and hard to beat when tuned; it needs neither pairs nor a special sampler.",
    space={"smoothing": linear(0.0, 0.3, legal="[0, 1]"), "dropout": linear(0.0, 0.6, legal="[0, 1)")},
    inputs=HEAD,
)
def softmax(c: ToClasses, *, smoothing: float = 0.1) -> Tensor:
    """Cross entropy of a linear head with label smoothing, on embeddings that are not normalised.

    The head starts at zero: the first loss is log C and sends no gradient to the embeddings.

    Args:
        c: Logits [N, C].
        smoothing: Probability mass of all other classes; 0 to 0.2. torch's label_smoothing is smoothing * C / (C - 1).

    Returns:
        One value per sample [N].

    Example:
        >>> emb, labels = torch.eye(2), torch.tensor([0, 1])
        >>> float(softmax(emb, labels, torch.eye(2), torch.zeros(2), smoothing=0.0))
        0.3132...
    """
    return _cross_entropy(c, smoothing)


def _cross_entropy(c: ToClasses, smoothing: float = 0.0, scale: float = 1.0) -> Tensor:
    own, others = own_and_others(c.sim, c.labels, scale)
    plain = softplus(others - scale * own)
    if smoothing == 0 or c.sim.shape[1] == 1:
        return plain
    mean_of_others = (c.sim.sum(1) - own) / (c.sim.shape[1] - 1)
    return plain + smoothing * scale * (own - mean_of_others)


@loss(
    paper="Wang et al. 2017; Zhai and Wu 2019",
    formula="mean_i of  log(1 + sum_{c != y} exp((s_ic - s_iy) / temperature))",
    use="A strong and simple baseline that needs no miner and no sampler.",
    space={"temperature": log(0.01, 0.3)},
    inputs=PROXIES,
)
def norm_softmax(c: ToClasses, *, temperature: float = 0.05) -> Tensor:
    """Cross entropy on cosines to the class proxies.

    Args:
        c: Cosines [N, C].
        temperature: Softmax temperature; 0.03 to 0.1.

    Returns:
        One value per sample [N].

    Example:
        >>> float(norm_softmax(torch.eye(2), torch.tensor([0, 1]), torch.eye(2), temperature=0.5))
        0.1269...
    """
    return _cross_entropy(c, scale=1 / temperature)


@loss(
    paper="Deng et al. 2019",
    formula="mean_i of  log(1 + sum_{c != y} exp(scale (cos t_ic - cos(t_iy + margin))))",
    use="Many classes (faces, products); needs long training and a large scale.",
    space={"margin_degrees": linear(5.0, 45.0), "scale": log(8, 256)},
    inputs=PROXIES,
)
def arcface(c: ToClasses, *, margin_degrees: float = 28.6, scale: float = 64.0) -> Tensor:
    """Cross entropy on cosines, with an angular margin between each sample and its class.

    Args:
        c: Cosines [N, C].
        margin_degrees: Angular margin in degrees; 28.6 is half a radian.
        scale: Inverse temperature; 16 to 64.

    Returns:
        One value per sample [N].

    Example:
        >>> float(arcface(torch.eye(2), torch.tensor([0, 1]), torch.eye(2), margin_degrees=60.0, scale=2.0))
        0.3132...
    """
    m = math.radians(margin_degrees)
    own, others = own_and_others(c.sim, c.labels, scale)
    rotated = own * math.cos(m) - sine(own) * math.sin(m)
    # Beyond 180 degrees the cosine would rise again.
    target = torch.where(own < -math.cos(m), own - m * math.sin(m), rotated)
    return softplus(others - scale * target)


def _logits_and_center_distances(
    emb: Tensor, labels: Tensor | Sequence[int], weight: Tensor, bias: Tensor, centers: Tensor
) -> ToClasses:
    c = linear_logits(emb, labels, weight, bias)
    difference = emb.to(c.sim.dtype) - centers.to(c.sim.dtype)[c.labels]
    return ToClasses(c.sim, c.labels, own=difference.square().sum(1))


@loss(
    paper="Wen et al. 2016",
    formula="mean_i of  -log softmax(W x_i + b)_y  +  (strength / 2) |x_i - center_y|^2",
    use="Cross entropy with more compact classes; strength sets the trade-off.",
    space={"strength": log(1e-4, 0.1, legal="[0, inf)")},
    inputs=Inputs(
        _logits_and_center_distances,
        params=(*HEAD.params, Param("centers", "CD", init="zeros", lr=100.0, decay=False)),
        logits="linear",
    ),
)
def center(c: ToClasses, *, strength: float = 0.003) -> Tensor:
    """Cross entropy of a linear head, plus the squared distance to a learned centre of the class.

    Args:
        c: Logits [N, C] and squared distances to the class centre [N].
        strength: Weight of the distance; 0.001 to 0.01.

    Returns:
        One value per sample [N].

    Example:
        >>> emb, labels = torch.eye(2), torch.tensor([0, 1])
        >>> float(center(emb, labels, torch.eye(2), torch.zeros(2), torch.zeros(2, 2), strength=0.2))
        0.4132...
    """
    assert c.own is not None
    return _cross_entropy(c) + (strength / 2) * c.own


def _class_sums(emb: Tensor, labels: Tensor, num_classes: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return labels in 0..C-1, the sum of each class over N [C, D], and which classes count [C]; None for all."""
    squared_norms(emb)
    present = None
    if num_classes is not None:
        emb = check_range(emb, labels, num_classes)
    elif on_host(emb):
        classes, labels = torch.unique(labels, return_inverse=True)
        num_classes = len(classes)
    else:  # N classes, of which those count that have samples: a static shape
        labels = (labels[:, None] == labels).to(torch.uint8).argmax(1)  # the first sample of the class
        num_classes = len(labels)
        present = labels == torch.arange(num_classes, device=labels.device)
    return labels, emb.new_zeros(num_classes, emb.shape[1]).index_add(0, labels, emb) / len(emb), present


def _counted(logits: Tensor, present: Tensor | None) -> Tensor:
    # Not -inf: times a probability of 0 that would be NaN.
    return logits if present is None else logits.masked_fill(~present, -1e30)


def _class_sum_logits(emb: Tensor, labels: Tensor | Sequence[int], num_classes: int | None = None) -> ToClasses:
    emb, labels = as_batch(emb, labels)
    with full_precision(emb):
        labels, theta, present = _class_sums(emb, labels, num_classes)
        return ToClasses(_counted(emb @ theta.t(), present), labels)


def _soft_mean_logits(
    emb: Tensor, labels: Any, probabilities: Tensor | None = None, num_classes: int | None = None
) -> ToClasses:
    emb, labels = as_batch(emb, labels)
    with full_precision(emb):
        if probabilities is not None:
            if probabilities.dim() != 2 or len(probabilities) != len(emb):
                shape = list(probabilities.shape)
                raise DataError(f"probabilities: expected [N, C] for {len(emb)} embeddings, got {shape}.")
            num_classes = probabilities.shape[1]
        labels, theta, present = _class_sums(emb, labels, num_classes)
        if probabilities is None:
            probabilities = torch.softmax(_counted(emb.detach() @ theta.detach().t(), present), 1)
        probabilities = probabilities.detach().to(emb.dtype)
        sim = emb @ (probabilities.t() @ emb / len(emb)).t()
        own = (emb * theta[labels]).sum(1)
        return ToClasses(_counted(sim, present), labels, own=own, probs=probabilities)


@loss(
    paper="Boudiaf et al. 2020, eq 12",
    formula="-1/(2 lam N^2) sum_k |sum_{i in k} x_i|^2 + (1/N) sum_i log sum_k exp(x_i.c_k / lam) "
    "- 1/(2 lam) sum_k |c_k|^2,  c_k = (1/N) sum_i p_ik x_i",
    use="To study cross entropy as a pairwise loss; for training, spce is simpler.",
    space={"lam": log(0.05, 20)},
    inputs=Inputs(_soft_mean_logits, constants=("probabilities",), takes_num_classes=True),
)
def pce(c: ToClasses, *, lam: float = 1.0) -> Tensor:
    """Pairwise cross entropy: tightness of the classes against soft class means, without learned parameters.

    Embeddings are not normalised. Call it as pce(emb, labels, probabilities); the probabilities [N, C] get no gradient.
    Without them the softmax of the `spce` logits is used.

    Args:
        c: Products with the soft means [N, C] and with the own class sum [N], and the probabilities [N, C].
        lam: Inverse scale of the implied head.

    Returns:
        One value per sample [N].

    Example:
        >>> emb, labels = torch.eye(2), torch.tensor([0, 1])
        >>> float(pce(emb, labels, torch.eye(2)))
        0.4740...
    """
    assert c.own is not None
    assert c.probs is not None
    soft = (c.probs * c.sim).sum(1)
    own, others = own_and_others(c.sim, c.labels, 1 / lam)
    return torch.logaddexp(own / lam, others) - (c.own + soft) / (2 * lam)


@loss(
    paper="Boudiaf et al. 2020, eq 15",
    formula="mean_i of  -log softmax(theta x_i)_y,  theta_k = (1/N) sum_{j in k} x_j",
    use="Cross entropy without a learned head: the weights are the class sums of the batch. Use large batches.",
    inputs=Inputs(_class_sum_logits, takes_num_classes=True),
)
def spce(c: ToClasses) -> Tensor:
    """Simplified pairwise cross entropy: cross entropy of a head built from the class sums of the batch.

    Embeddings are not normalised. Call it as spce(emb, labels, num_classes); classes absent from the batch have the
    logit 0. Without num_classes only the classes in the batch count.

    Args:
        c: Products with the class sums divided by N [N, C].

    Returns:
        One value per sample [N].

    Example:
        >>> float(spce(torch.eye(2), torch.tensor([0, 1])))
        0.4740...
    """
    return _cross_entropy(c)
