"""Losses against loops in float64, written from the definitions of the papers.

For losses that no other library has, or where pytorch-metric-learning is wrong on some batches (test_pml.py says how).
Gradients are checked by finite differences in test_loss_identities.py; here where the definition has constants in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from pytorch_metric_learning import losses as pml
from torch import Tensor
from torch.nn.functional import normalize

import nearkin as nk
from nearkin.losses import clustering, margins

DOUBLE = torch.float64
Sets = list[tuple[int, list[int], list[int]]]


def batch(seed: int, n: int = 12, dim: int = 4) -> tuple[Tensor, Tensor]:
    """Unbalanced classes, two singletons, a duplicate within a class and one across classes."""
    g = torch.Generator().manual_seed(seed)
    emb = torch.randn(n, dim, generator=g, dtype=DOUBLE)
    labels = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 4])[:n]
    emb[1], emb[5] = emb[0], emb[2]
    return emb, labels[torch.randperm(n, generator=g)]


def cosines(emb: Tensor) -> list[list[float]]:
    f = normalize(emb)
    return (f @ f.t()).tolist()


def sets(labels: Tensor) -> Sets:
    """Return (anchor, positives, negatives) of every sample."""
    y = labels.tolist()
    return [
        (i, [j for j in range(len(y)) if y[j] == y[i] and j != i], [k for k in range(len(y)) if y[k] != y[i]])
        for i in range(len(y))
    ]


def lse(values: list[float]) -> float:
    return math.log(sum(math.exp(v) for v in values)) if values else -math.inf


def softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x))) if x > -math.inf else 0.0


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def info_nce(s: list[list[float]], triples: Sets, t: float = 0.07) -> float:
    return mean([lse([s[i][k] / t for k in pos + neg]) - s[i][j] / t for i, pos, neg in triples for j in pos])


def siglip(s: list[list[float]], triples: Sets) -> float:
    pull = [[softplus(-(10 * s[i][j] - 10)) for j in pos] for i, pos, _ in triples]
    push = [[softplus(10 * s[i][k] - 10) for k in neg] for i, _, neg in triples]
    return mean([sum(a) + sum(b) for a, b in zip(pull, push, strict=True)])


def smooth_ap(s: list[list[float]], triples: Sets, t: float = 0.01) -> float:
    def precision(i: int, j: int, pos: list[int], neg: list[int]) -> float:
        before = sum(sigmoid((s[i][k] - s[i][j]) / t) for k in pos if k != j)
        return (1 + before) / (1 + before + sum(sigmoid((s[i][k] - s[i][j]) / t) for k in neg))

    return mean([1 - mean([precision(i, j, pos, neg) for j in pos]) for i, pos, neg in triples if pos])


def recall_surrogate(s: list[list[float]], triples: Sets, t: float = 0.01) -> float:
    def recall(i: int, k: int, pos: list[int], neg: list[int]) -> float:
        ranks = [sum(sigmoid((s[i][z] - s[i][j]) / t) for z in pos + neg if z != j) for j in pos]
        return mean([sigmoid(k - 1 - rank) for rank in ranks])

    return mean([1 - recall(i, k, pos, neg) for i, pos, neg in triples if pos for k in (1, 2, 4, 8, 16)])


def sup_ap(s: list[list[float]], triples: Sets, t: float = 0.01, rho: float = 100.0, lam: float = 0.5) -> float:
    delta = t * math.log(99)

    def upper(x: float) -> float:
        if x < 0:
            return sigmoid(x / t)
        return sigmoid(x / t) + 0.5 if x <= delta else rho * (x - delta) + sigmoid(delta / t) + 0.5

    def value(i: int, pos: list[int], neg: list[int]) -> float:
        terms = []
        for j in pos:
            rank = 1 + sum(s[i][k] > s[i][j] for k in pos)
            terms.append(rank / (rank + sum(upper(s[i][k] - s[i][j]) for k in neg)))
        calibration = mean([max(0, 0.9 - s[i][j]) for j in pos]) + mean([max(0, s[i][k] - 0.6) for k in neg])
        return (1 - lam) * (1 - mean(terms)) + lam * calibration

    return mean([value(i, pos, neg) for i, pos, neg in triples if pos])


def pnp(s: list[list[float]], triples: Sets, t: float = 0.01) -> float:
    def before(i: int, j: int, neg: list[int]) -> float:
        return sum(sigmoid((s[i][k] - s[i][j]) / t) for k in neg)

    return mean([mean([1 - 1 / (1 + before(i, j, neg)) for j in pos]) for i, pos, neg in triples if pos])


def histogram(s: list[list[float]], triples: Sets, bins: int = 100) -> float:
    def density(values: list[float]) -> list[float]:
        width = 2 / bins
        return [mean([max(0.0, 1 - abs(v - (-1 + r * width)) / width) for v in values]) for r in range(bins + 1)]

    pos = density([min(1.0, s[i][j]) for i, pos, _ in triples for j in pos])
    neg = density([s[i][k] for i, _, neg in triples for k in neg])
    return sum(neg[r] * sum(pos[: r + 1]) for r in range(bins + 1))


def ranked_list(s: list[list[float]], triples: Sets) -> float:
    def value(i: int, pos: list[int], neg: list[int]) -> float:
        far = [d - 0.8 for j in pos if (d := distance(s[i][j])) > 0.8]
        near = [1.2 - d for k in neg if (d := distance(s[i][k])) < 1.2]
        weight = [math.exp(10 * x) for x in near]
        push = sum(w * x for w, x in zip(weight, near, strict=True)) / sum(weight) if near else 0.0
        return 0.5 * mean(far) + 0.5 * push

    return mean([value(i, pos, neg) for i, pos, neg in triples])


def tuplet_margin(s: list[list[float]], triples: Sets) -> float:
    def target(x: float) -> float:
        return math.cos(math.acos(max(-1.0, min(1.0, x))) - math.radians(5.73))

    terms = [lse([64 * (s[i][k] - target(s[i][j])) for k in neg]) for i, pos, neg in triples for j in pos]
    return mean([softplus(term) for term in terms])


def angular(s: list[list[float]], triples: Sets) -> float:
    t = math.tan(math.radians(40)) ** 2
    return mean(
        [
            softplus(lse([4 * t * (s[i][k] + s[j][k]) - 2 * (1 + t) * s[i][j] for k in neg]))
            for i, pos, neg in triples
            for j in pos
        ]
    )


def hierarchical_triplet(s: list[list[float]], triples: Sets) -> float:
    return mean(
        [max(0.0, s[i][k] - s[i][j] + 0.05) for i, pos, neg in triples for j in pos for k in neg]
    )  # half the margin 0.1 in squared distances


def distance(s: float) -> float:
    return math.sqrt(max(0.0, 2 - 2 * s))


LOOPS: list[Callable[..., float]] = [
    info_nce,
    siglip,
    smooth_ap,
    recall_surrogate,
    sup_ap,
    pnp,
    histogram,
    ranked_list,
    tuplet_margin,
    angular,
    hierarchical_triplet,
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("seed", range(5))
def test_pair_losses(loop: Callable[..., float], seed: int) -> None:
    emb, labels = batch(seed)
    want = loop(cosines(emb), sets(labels))
    got = nk.Objective(loop.__name__, num_classes=5)(emb, labels)
    assert float(got) == pytest.approx(want, rel=1e-6)  # duplicates: the root of a rounding error


@pytest.mark.parametrize("seed", range(5))
def test_prototypical(seed: int) -> None:
    emb, labels = batch(seed)
    f, y = normalize(emb), labels.tolist()

    def logit(i: int, c: int) -> float:
        members = [j for j in range(len(y)) if y[j] == c and j != i]
        return -10 * float((f[i] - f[members].mean(0)).square().sum())

    terms = []
    for i, pos, _ in sets(labels):
        if pos:
            terms.append(lse([logit(i, c) for c in set(y)]) - logit(i, y[i]))
    assert float(nk.Objective("prototypical")(emb, labels)) == pytest.approx(mean(terms), rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_hyperbolic(seed: int) -> None:
    """By Moebius addition, as the paper defines the distance."""
    emb, labels = batch(seed)
    emb, c = emb * 2, 0.1
    length = emb.norm(dim=1, keepdim=True)
    clipped = emb * (2.3 / length).clamp(max=1)
    size = clipped.norm(dim=1, keepdim=True)
    ball = torch.tanh(math.sqrt(c) * size) * clipped / (math.sqrt(c) * size)

    def geodesic(u: Tensor, v: Tensor) -> float:
        u = -u
        uv, uu, vv = float(u @ v), float(u @ u), float(v @ v)
        added = ((1 + 2 * c * uv + c * vv) * u + (1 - c * uu) * v) / (1 + 2 * c * uv + c**2 * uu * vv)
        return 2 / math.sqrt(c) * math.atanh(math.sqrt(c) * float(added.norm()))

    terms = [
        softplus(lse([(geodesic(ball[i], ball[j]) - geodesic(ball[i], ball[k])) / 0.2 for k in neg]))
        for i, pos, neg in sets(labels)
        for j in pos
    ]
    assert float(nk.Objective("hyperbolic")(emb, labels)) == pytest.approx(mean(terms), rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_spectral_clustering(seed: int) -> None:
    """With the pseudo-inverses from a singular value decomposition."""
    emb, labels = batch(seed)
    f, y = normalize(emb), torch.nn.functional.one_hot(labels).double()
    want = float((y @ torch.linalg.pinv(y) - f @ torch.linalg.pinv(f)).square().sum()) / len(emb)
    assert float(nk.Objective("spectral_clustering")(emb, labels)) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_facility_location(seed: int) -> None:
    """The value of the medoids that the search found, which may be a local optimum, against all sets of three."""
    g = torch.Generator().manual_seed(seed)
    emb, labels = torch.randn(9, 3, generator=g, dtype=DOUBLE), torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2])
    f, y = normalize(emb), labels.tolist()
    d = (f[:, None] - f).norm(dim=2).tolist()

    def entropy(items: list[object]) -> float:
        return -sum(n / 9 * math.log(n / 9) for n in map(items.count, set(items)))

    def score(medoids: tuple[int, ...], gamma: float) -> float:
        cluster = [min(medoids, key=lambda j: d[i][j]) for i in range(9)]
        information = entropy(cluster) + entropy(y) - entropy(list(zip(cluster, y, strict=True)))
        nmi = information / math.sqrt(entropy(cluster) * entropy(y))
        return -sum(d[i][j] for i, j in enumerate(cluster)) + gamma * (1 - nmi)

    own = -sum(min(sum(d[i][j] for i in range(9) if y[i] == c) for j in range(9) if y[j] == c) for c in set(y))
    for gamma in (0.0, 1.0, 10.0):
        best = max(score(s, gamma) for s in combinations(range(9), 3))
        want = max(0.0, best - own) / 9
        got = float(nk.Objective("facility_location", gamma=gamma)(emb, labels))
        assert got <= want + 1e-9
        assert got >= 0.8 * want
        distance, same = nk.pair_up(emb, labels).distance(), labels[:, None] == labels
        medoids, gap = clustering._find_medoids(distance, same, gamma)
        found = tuple(medoids.nonzero().flatten().tolist())
        assert len(found) == 3
        assert got == pytest.approx(max(0.0, score(found, gamma) - own) / 9, rel=1e-9)
        assert not gamma or float(gap) == pytest.approx(score(found, 1.0) - score(found, 0.0), rel=1e-9)


# --- class losses -----------------------------------------------------------------------------------------------------


def class_batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    emb = 15 * torch.randn(10, 4, generator=g, dtype=DOUBLE)
    return emb, torch.randint(0, 5, (10,), generator=g), torch.randn(5, 4, generator=g, dtype=DOUBLE)


def rotated(own: Tensor, m: float | Tensor) -> Tensor:
    m = torch.as_tensor(m, dtype=DOUBLE)
    angle = own.acos()
    return torch.where(angle + m > math.pi, own - m * m.sin(), (angle + m).cos())


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none")


def put(sim: Tensor, labels: Tensor, own: Tensor) -> Tensor:
    return sim.scatter(1, labels[:, None], own[:, None])


def assert_same(got: Tensor, want: Tensor, leaves: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    wants = torch.autograd.grad(want, leaves, retain_graph=True)
    for one, two in zip(torch.autograd.grad(got, leaves), wants, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("seed", range(5))
def test_margins_of_samples_and_classes(seed: int) -> None:
    emb, labels, w = class_batch(seed)
    leaves = (emb.requires_grad_(), w.requires_grad_())
    sim, length = normalize(emb) @ normalize(w).t(), emb.norm(dim=1)
    own = sim.gather(1, labels[:, None]).squeeze(1)

    counts = torch.tensor([1.0, 2, 5, 50, 1000], dtype=DOUBLE)
    margin = 0.5 * counts[labels] ** -0.25 + 0.05
    want = cross_entropy(45 * put(sim, labels, rotated(own, margin)), labels).mean()
    assert_same(nk.losses.dynamic_arcface(emb, labels, w, class_counts=counts), want, leaves)

    a = length.clamp(10, 110)
    target = rotated(own, 0.35 / 100 * (a - 10) + 0.45)
    want = (cross_entropy(64 * put(sim, labels, target), labels) + 35 * (1 / a + a / 110**2)).mean()
    assert_same(nk.losses.magface(emb, labels, w), want, leaves)

    z = ((length.detach() - 20) / ((7 + 1e-3) / 0.333)).clamp(-1, 1)
    target = (own.acos() - 0.4 * z).clamp(0, math.pi).cos() - (0.4 + 0.4 * z)
    want = cross_entropy(64 * put(sim, labels, target), labels).mean()
    statistics = {"length_mean": torch.tensor(20.0), "length_std": torch.tensor(7.0)}
    assert_same(nk.losses.adaface(emb, labels, w, **statistics), want, leaves)

    target = rotated(own, math.radians(28.6))
    hard = torch.where(sim > target[:, None], sim * (0.3 + sim), sim)
    want = cross_entropy(64 * put(hard, labels, target), labels).mean()
    assert_same(nk.losses.curricularface(emb, labels, w, own_mean=torch.tensor(0.3, dtype=DOUBLE)), want, leaves)


def test_running_statistics() -> None:
    """Updated in training only, part of the state_dict, and used by the next batch."""
    emb, labels, _ = class_batch(0)
    objective = nk.Objective("adaface", num_classes=5, dim=4).double()
    objective(emb, labels)
    length = emb.norm(dim=1)
    assert float(objective.length_mean) == pytest.approx(0.01 * 20 + 0.99 * float(length.mean()))
    assert float(objective.length_std) == pytest.approx(0.01 * 100 + 0.99 * float(length.std()))
    other = nk.Objective("adaface", num_classes=5, dim=4).double()
    other.load_state_dict(objective.state_dict())
    assert torch.equal(other.eval()(emb, labels), objective.eval()(emb, labels))
    before = objective.length_mean.clone()
    objective(2 * emb, labels)
    assert torch.equal(objective.length_mean, before)

    curricular = nk.Objective("curricularface", num_classes=5, dim=4, matryoshka_dims=(2, 4)).double()
    own = (normalize(emb) @ normalize(curricular.proxies).t()).gather(1, labels[:, None]).mean().detach()
    curricular(emb, labels).backward()
    assert float(curricular.own_mean) == pytest.approx(0.01 * float(own))  # once, of the full size


def test_dynamic_soft_margin() -> None:
    """The weights are constants: the value and gradient of a loop with the distribution of the batch."""
    emb, labels = batch(3)
    leaf = emb.requires_grad_()
    f = normalize(leaf)
    d = (f[:, None] - f).square().sum(2).clamp(min=1e-30).sqrt()
    gaps = []
    for i, pos, neg in sets(labels):
        for j in pos:
            nearest = torch.minimum(d[i, neg].min(), d[neg, j].min())
            gaps.append(d[i, j] - nearest)
    gap = torch.stack(gaps)
    edges = [-2 + 0.4 * r for r in range(11)]
    density = [mean([max(0.0, 1 - abs(v - e) / 0.4) for v in gap.tolist()]) for e in edges]
    weight = [sum(density[: int((v + 2) // 0.4) + 1]) for v in gap.tolist()]
    want = (torch.tensor(weight, dtype=DOUBLE) * gap).mean()
    got = nk.Objective("dynamic_soft_margin")(leaf, labels)
    assert float(got.detach()) == pytest.approx(float(want.detach()), rel=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(got, leaf)[0], torch.autograd.grad(want, leaf)[0], rtol=1e-5, atol=1e-7
    )


def test_class_gaps() -> None:
    """The tree by repeated merging, and the mean squared distances by loops over all pairs."""
    g = torch.Generator().manual_seed(0)
    emb = torch.randn(30, 3, generator=g, dtype=DOUBLE)
    labels = torch.arange(30) % 6
    f = normalize(emb)
    square = (f[:, None] - f).square().sum(2)
    members = [torch.nonzero(labels == c).flatten() for c in range(6)]
    within = [float(square[m][:, m].sum()) / (len(m) * (len(m) - 1)) for m in members]
    between = {(p, q): float(square[members[p]][:, members[q]].mean()) for p, q in combinations(range(6), 2)}
    base, levels = mean(within), 16
    got = margins.class_gaps(emb, labels, 6)
    groups = [{c} for c in range(6)]
    level_of: dict[tuple[int, int], float] = {}
    for level in range(1, levels + 1):
        threshold = base + level * (4 - base) / levels
        merged = True
        while merged:
            merged = False
            for a, b in combinations(groups, 2):
                if min(between[min(p, q), max(p, q)] for p in a for q in b) < threshold:
                    for p in a:
                        for q in b:
                            level_of[p, q] = level_of[q, p] = threshold
                    groups = [x for x in groups if x not in (a, b)] + [a | b]
                    merged = True
                    break
    for (p, q), threshold in level_of.items():
        assert float(got[p, q]) == pytest.approx(threshold - within[p], rel=1e-9)

    objective = nk.Objective("hierarchical_triplet", num_classes=6).double()
    objective.refresh(labels, emb)
    y = labels.tolist()
    terms = [
        max(0.0, (float(square[i, j] - square[i, k]) + 0.1 + level_of[y[i], y[k]] - within[y[i]]) / 2)
        for i, pos, neg in sets(labels)
        for j in pos
        for k in neg
    ]
    assert float(objective(emb, labels)) == pytest.approx(mean(terms), rel=1e-9)


def test_refresh_counts_the_classes() -> None:
    objective = nk.Objective("dynamic_arcface", num_classes=4, dim=3)
    objective.refresh(torch.tensor([0, 0, 0, 1, 1, 3]))
    assert objective.class_counts.tolist() == [3, 2, 0, 1]
    with pytest.raises(nk.UserError, match="labels: expected 0 to 3 for 4 classes"):
        objective.refresh([4])
    with pytest.raises(nk.UserError, match="hierarchical_triplet stores class_gaps for every class: pass num_classes="):
        nk.Objective("hierarchical_triplet")
    with pytest.raises(
        nk.UserError, match=r"pass the embeddings of the training set: objective.refresh\(labels, emb\)"
    ):
        nk.Objective("hierarchical_triplet", num_classes=2).refresh([0, 1])
    nk.Objective("contrastive").refresh([0, 1])  # nothing to do


# --- where pytorch-metric-learning is wrong ---------------------------------------------------------------------------


def test_smooth_ap_of_pml_takes_the_wrong_positives() -> None:
    """With 2 classes of 4 samples it takes 2 neighbouring samples for a class; ours is the loop for any sizes."""
    g = torch.Generator().manual_seed(1)
    emb, labels = torch.randn(8, 4, generator=g, dtype=DOUBLE), torch.arange(8) // 4
    s = cosines(emb)
    with_query = [(i, [i, *pos], neg) for i, pos, neg in sets(labels)]
    want = smooth_ap(s, with_query)
    assert float(nk.Objective("smooth_ap", with_query=True)(emb, labels)) == pytest.approx(want, rel=1e-9)
    assert abs(float(pml.SmoothAPLoss()(emb, labels)) - want) > 0.01


@pytest.mark.filterwarnings("ignore::UserWarning")  # from PML
def test_histogram_of_pml_fails_on_duplicates() -> None:
    emb = torch.eye(4, dtype=DOUBLE)[[0, 0, 1, 2]]
    with pytest.raises(RuntimeError, match="out of bounds"):
        pml.HistogramLoss()(emb, torch.tensor([0, 0, 1, 1]))


def test_instance_of_pml_depends_on_the_order() -> None:
    emb, labels = batch(0)
    order = torch.arange(11, -1, -1)
    theirs = pml.InstanceLoss()
    assert abs(float(theirs(emb, labels) - theirs(emb[order], labels[order]))) > 0.1


def test_tuplet_margin_of_pml_has_no_gradient_on_duplicates() -> None:
    emb = torch.eye(3, dtype=DOUBLE)[[0, 0, 1]].requires_grad_()
    pml.TupletMarginLoss()(emb, torch.tensor([0, 0, 1])).backward()
    assert torch.isnan(emb.grad).any()


def test_spectral_clustering_takes_square_pairs() -> None:
    emb, labels = batch(0)
    pairs = clustering.projector_pairs(emb, labels)
    torch.testing.assert_close(pairs.sim @ pairs.sim, pairs.sim, rtol=0, atol=1e-4)
    with pytest.raises(nk.UserError, match=r"takes Pairs \[N, N\], a batch with itself, got \[12, 4\]"):
        nk.losses.spectral_clustering(nk.pair_up(emb, labels, emb[:4], labels[:4]))
