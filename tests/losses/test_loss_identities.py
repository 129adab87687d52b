"""Identities between losses, agreement with pytorch-metric-learning (PML), and brute-force values."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.batches import DOUBLE, balanced, batch, build, proxies
from helpers.rows import ROWS, Row
from pytorch_metric_learning import distances as pml_distances
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning.reducers import MeanReducer
from torch import Tensor

import nearkin as nk
from nearkin.analysis import information
from nearkin.losses import LOSSES
from nearkin.ops.pairs import Pairs

# --- identities -------------------------------------------------------------------------------------------------------


def test_mpa_with_one_centre_is_proxy_anchor() -> None:
    for seed, classes in ((0, 7), (1, 1), (2, 3)):
        emb, labels = batch(9, classes, seed=seed)
        w = proxies(7)
        got = nk.losses.mpa(emb, labels, w[:, None], tau=0.0)
        assert float(got) == pytest.approx(float(nk.losses.proxy_anchor(emb, labels, w)), rel=1e-12)


def test_spce_is_cross_entropy_at_class_sums() -> None:
    emb, labels = batch(14, 4)
    one_hot = torch.nn.functional.one_hot(labels, 5).double()
    head = one_hot.t() @ emb / len(emb)
    want = torch.nn.functional.cross_entropy(emb @ head.t(), labels)
    assert float(nk.losses.spce(emb, labels, 5)) == pytest.approx(float(want), rel=1e-12)


def test_ice_is_nt_xent_times_the_positive_pairs() -> None:
    emb, labels = balanced(5, 3)
    peer = pml.NTXentLoss(temperature=1.0)(emb, labels)
    assert float(nk.losses.ice(nk.pair_up(emb, labels))) == pytest.approx(5 * 3 * 2 * float(peer), rel=1e-9)


@pytest.mark.parametrize("sigma", [0.05, 0.3, 1.0])
def test_snca_is_nca_of_unit_vectors(sigma: float) -> None:
    emb, labels = balanced(5, 3)
    peer = pml.NCALoss(softmax_scale=1 / (2 * sigma))(emb, labels)
    assert float(nk.losses.snca(nk.pair_up(emb, labels), sigma=sigma)) == pytest.approx(float(peer), rel=1e-9)
    # The same with our nca, on vectors of length 1 / sqrt(2 sigma).
    scaled = torch.nn.functional.normalize(emb) / math.sqrt(2 * sigma)
    own = nk.losses.nca(nk.pair_up(scaled, labels, metric="dot"))
    assert float(own) == pytest.approx(float(peer), rel=1e-9)


def test_proxy_nca_with_include_positive_is_norm_softmax() -> None:
    emb, labels = batch(12, 5)
    w = proxies(5)
    got = nk.losses.proxy_nca(emb, labels, w, scale=20.0, include_positive=True)
    assert float(got) == pytest.approx(float(nk.losses.norm_softmax(emb, labels, w, temperature=0.05)), rel=1e-12)


def test_label_smoothing_is_rescaled_torch_label_smoothing() -> None:
    emb, labels = batch(12, 5)
    w, b = proxies(5), proxies(1, 5)[0]
    want = torch.nn.functional.cross_entropy(emb @ w.t() + b, labels, label_smoothing=0.1 * 5 / 4)
    assert float(nk.losses.softmax(emb, labels, w, b, smoothing=0.1)) == pytest.approx(float(want), rel=1e-12)
    one = nk.losses.softmax(emb, torch.zeros_like(labels), w[:1], b[:1], smoothing=0.1)
    assert float(one) == 0.0


def test_a_zero_head_sends_no_gradient() -> None:
    emb, labels = batch(12, 5)
    emb.requires_grad_()
    loss = nk.Objective("softmax", num_classes=5, dim=6).double()(emb, labels)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(math.log(5), rel=1e-12)
    assert torch.equal(emb.grad, torch.zeros_like(emb))


@pytest.mark.parametrize("seed", range(8))
def test_lemma_1(seed: int) -> None:
    """The bounds between tightness and contrast of balanced batches of unit vectors (Boudiaf et al. 2020)."""
    classes, m, dim = 3 + seed % 4, 2 + seed % 3, 4 + seed
    emb, labels = balanced(classes, m, dim, seed)
    emb = torch.nn.functional.normalize(emb)
    n, sigma, alpha, beta, base = classes * m, 0.2, 2.0, 50.0, 0.5
    square = torch.cdist(emb, emb).square()
    same = labels[:, None] == labels
    contrast = information.decompose("contrastive_l2", emb, labels)
    snca = information.decompose("snca", emb, labels, sigma=sigma)
    ms = information.decompose("multi_similarity", emb, labels, alpha=alpha, beta=beta, base=base)
    head = torch.zeros(classes, dim, dtype=DOUBLE), torch.zeros(classes, dtype=DOUBLE)
    center = information.decompose("center", emb, labels, *head)
    pce = information.decompose("pce", emb, labels, torch.full((n, classes), 1 / classes, dtype=DOUBLE))
    slack = 1e-9
    t = float(contrast.tightness)
    assert t == pytest.approx(4 / classes * float(center.tightness), rel=1e-9)
    assert float(snca.tightness) <= -math.log(m - 1) - 1 / sigma + t / (2 * sigma * (m - 1)) + slack
    assert float(ms.tightness) >= math.log(m - 1) / alpha + base - 1 + t / (2 * (m - 1)) - slack
    assert float(pce.tightness) == pytest.approx(-(m - t / 2) / (2 * n), rel=1e-9)
    spread = float(square.sum()) / (2 * sigma * n * (n - 1))
    assert float(snca.contrastive) >= math.log(n - 1) + 1 / sigma - spread - slack
    push = float(square[~same].sum()) / (2 * n * (n - m))
    assert float(ms.contrastive) >= math.log(n - m) / beta + 1 - base - push - slack


@pytest.mark.parametrize("seed", range(5))
def test_parts_sum_to_the_loss(seed: int) -> None:
    emb, labels = batch(12, 4, seed=seed)
    pairs = nk.pair_up(emb, labels)
    p = torch.softmax(emb @ proxies(4).t(), 1)
    for parts, whole in (
        (information.decompose("contrastive_l2", emb, labels), nk.losses.contrastive_l2(pairs)),
        (information.decompose("snca", emb, labels), nk.losses.snca(pairs)),
        (information.decompose("multi_similarity", emb, labels), nk.losses.multi_similarity(pairs)),
        (information.decompose("pce", emb, labels, p), nk.losses.pce(emb, labels, p)),
        (information.decompose("spce", emb, labels), nk.losses.spce(emb, labels)),
    ):
        torch.testing.assert_close(sum(parts), whole, rtol=1e-9, atol=1e-9)
    with pytest.raises(nk.UserError, match="triplet: no decomposition into two parts"):
        information.decompose("triplet", emb, labels)


def test_against_pml() -> None:
    emb, labels = balanced(6, 4, dim=16)
    pairs, w = nk.pair_up(emb, labels), proxies(6, 16)
    cosine, classes = pml_distances.CosineSimilarity(), {"num_classes": 6, "embedding_size": 16}

    def with_weight(peer: torch.nn.Module, weight: Tensor, name: str) -> Tensor:
        getattr(peer, name).data = weight.clone()
        return peer(emb, labels)

    triplets = pml.TripletMarginLoss(margin=0.1, distance=cosine, reducer=MeanReducer())
    lifted = pml.GeneralizedLiftedStructureLoss(neg_margin=0, pos_margin=0.5, distance=cosine)
    normalised = pml.NormalizedSoftmaxLoss(**classes, temperature=0.05)
    for got, want in (
        (nk.losses.multi_similarity(pairs), pml.MultiSimilarityLoss(2, 50, 0.5)(emb, labels)),
        (nk.losses.triplet(pairs), triplets(emb, labels)),
        (nk.losses.lifted_structure(pairs), lifted(emb, labels)),
        (nk.losses.lifted_song(pairs), pml.LiftedStructureLoss(neg_margin=1, pos_margin=0)(emb, labels)),
        (nk.losses.proxy_anchor(emb, labels, w), with_weight(pml.ProxyAnchorLoss(**classes), w, "proxies")),
        (nk.losses.norm_softmax(emb, labels, w), with_weight(normalised, w.t(), "W")),
        (nk.losses.arcface(emb, labels, w), with_weight(pml.ArcFaceLoss(**classes), w.t(), "W")),
    ):
        assert float(got.detach()) == pytest.approx(float(want.detach()), rel=1e-6)


# --- brute force ------------------------------------------------------------------------------------------------------


def _hinge(x: float) -> float:
    return max(0.0, x)


def _lse(values: list[float]) -> float:
    return math.log(sum(math.exp(v) for v in values)) if values else -math.inf


def _softplus(x: float) -> float:
    return math.log1p(math.exp(x))


Sets = list[tuple[int, list[int], list[int]]]


def _brute(name: str, s: list[list[float]], d: list[list[float]], sets: Sets) -> float:
    """Compute a loss with default settings from cosines s and unit distances d, in loops over anchors."""
    n = len(s)
    if name == "contrastive":
        terms = [-s[a][p] for a, pos, _ in sets for p in pos]
        terms += [_hinge(s[a][k] - 0.5) for a, _, neg in sets for k in neg]
        return sum(terms) / len(terms)
    if name == "contrastive_l2":
        near = sum(d[a][p] ** 2 for a, pos, _ in sets for p in pos)
        return (near + sum(_hinge(1 - d[a][k]) ** 2 for a, _, neg in sets for k in neg)) / n
    if name == "triplet":
        terms = [_hinge(s[a][k] - s[a][p] + 0.1) for a, pos, neg in sets for p in pos for k in neg]
        return sum(terms) / len(terms)
    if name == "lifted_structure":
        both = [(a, pos, neg) for a, pos, neg in sets if pos and neg]
        return (
            sum(_hinge(_lse([0.5 - s[a][p] for p in pos]) + _lse([s[a][k] for k in neg])) for a, pos, neg in both) / n
        )
    if name == "lifted_song":
        far = {a: [1 - d[a][k] for k in neg] for a, _, neg in sets}
        pairs = [(a, p) for a, pos, _ in sets for p in pos if a < p]
        return sum(_hinge(d[a][p] + _lse(far[a] + far[p])) ** 2 for a, p in pairs) / (2 * len(pairs))
    if name == "npair":
        return sum(math.log1p(sum(math.exp(s[a][k] - s[a][p]) for p in pos for k in neg)) for a, pos, neg in sets) / n
    if name == "margin":
        terms = [_hinge(0.2 + d[a][p] - 1.2) for a, pos, _ in sets for p in pos]
        terms += [_hinge(0.2 - d[a][k] + 1.2) for a, _, neg in sets for k in neg]
        return sum(terms) / sum(t > 0 for t in terms)
    if name == "margin_similarity":
        terms = [_hinge(0.2 + 0.28 - s[a][p]) for a, pos, _ in sets for p in pos]
        terms += [_hinge(0.2 - 0.28 + s[a][k]) for a, _, neg in sets for k in neg]
        return sum(terms) / sum(t > 0 for t in terms)
    if name == "multi_similarity":
        pull = sum(_softplus(_lse([-2 * (s[a][p] - 0.5) for p in pos])) / 2 for a, pos, _ in sets if pos)
        return (pull + sum(_softplus(_lse([50 * (s[a][k] - 0.5) for k in neg])) / 50 for a, _, neg in sets)) / n
    if name == "snca":
        return (
            sum(
                _lse([s[a][k] * 20 for k in pos + neg]) - _lse([s[a][p] * 20 for p in pos])
                for a, pos, neg in sets
                if pos
            )
            / n
        )
    assert name == "ice"
    return sum(-s[a][p] + _lse([s[a][k] for k in [p, *neg]]) for a, pos, neg in sets for p in pos)


PAIR_LOSSES = [
    "contrastive",
    "contrastive_l2",
    "triplet",
    "lifted_structure",
    "lifted_song",
    "npair",
    "margin",
    "margin_similarity",
    "multi_similarity",
    "snca",
    "ice",
]


def _sets(labels: list[int]) -> Sets:
    n = len(labels)
    return [
        (a, [j for j in range(n) if j != a and labels[j] == labels[a]], [j for j in range(n) if labels[j] != labels[a]])
        for a in range(n)
    ]


@pytest.mark.parametrize("classes", [2, 12], ids=["few classes", "many classes"])
@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_brute_force(name: str, classes: int) -> None:
    emb, labels = batch(26, classes, dim=4, seed=3)
    f = emb / emb.norm(dim=1, keepdim=True)
    s, d = (f @ f.t()).tolist(), (f[:, None] - f).norm(dim=2).tolist()
    want = _brute(name, s, d, _sets(labels.tolist()))
    assert float(nk.Objective(name)(emb, labels)) == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("classes", [2, 12], ids=["few classes", "many classes"])
@pytest.mark.parametrize("row", [row for row in ROWS if row.gradient], ids=lambda row: row.id)
def test_gradient_matches_finite_differences(row: Row, classes: int) -> None:
    emb, labels = batch(20, classes, dim=3, seed=4)
    objective = build(row, 12, 3)
    probabilities = [torch.softmax(emb @ proxies(12, 3).t(), 1)] if row.name == "pce" else []
    params = [p.requires_grad_() for p in objective.parameters()]
    inputs = (emb.requires_grad_(), *params)
    assert torch.autograd.gradcheck(lambda x, *_: objective(x, labels, *probabilities), inputs, fast_mode=True)


SETTINGS = [
    (name, key) for name, entry in LOSSES.items() for key, v in entry.loss_kwargs.items() if isinstance(v, float)
]


@pytest.mark.parametrize(("name", "key"), SETTINGS)
def test_a_learnable_setting_gets_its_gradient_and_others_are_rejected(name: str, key: str) -> None:
    """Against finite differences of the value, with few classes and with many."""
    value = torch.tensor(LOSSES[name].loss_kwargs[key], dtype=DOUBLE, requires_grad=True)
    if key not in LOSSES[name].learnable:
        with pytest.raises(nk.UserError, match=f"{name}: {key} cannot be learned. Pass a number"):
            nk.Objective(name, num_classes=3, dim=4, **{key: value})
        plain = nk.Objective(name, num_classes=3, dim=4, **{key: value.detach()})
        assert isinstance(plain.loss_kwargs[key], float)
        return
    for classes in (2, 12):
        emb, labels = batch(26, classes, dim=4, seed=3)
        for options in ({}, {"miner": "multi_similarity"}, {"normalize": False}):
            if "normalize" in options and "normalize" not in LOSSES[name].settings:
                continue

            def value_at(
                x: Tensor, options: dict[str, object] = options, pair: tuple[Tensor, Tensor] = (emb, labels)
            ) -> Tensor:
                return nk.Objective(name, **{key: x}, **options)(*pair)

            assert torch.autograd.gradcheck(value_at, (value,))
            assert float(torch.autograd.grad(value_at(value), value)[0]) != 0, (
                "the test would not detect a missing gradient"
            )


def test_which_settings_are_learnable() -> None:
    learnable = {name: sorted(entry.learnable) for name, entry in LOSSES.items() if entry.learnable}
    assert learnable == {
        "contrastive": ["margin"],
        "contrastive_l2": ["margin"],
        "margin": ["alpha", "beta"],
        "margin_similarity": ["beta", "margin"],
        "lifted_structure": ["margin"],
        "lifted_song": ["margin"],
        "info_nce": ["temperature"],
        "siglip": ["bias", "scale"],
        "prototypical": ["scale"],
    }


def test_lifted_song_of_one_sided_pairs() -> None:
    """A one-sided pair has half the weight of a two-sided one, so the mean over otherwise equal pairs is the same."""
    sim = torch.tensor([[1.0, 0.8, 0.6], [0.8, 1.0, 0.6], [0.6, 0.6, 1.0]], dtype=DOUBLE)
    pos, neg = torch.zeros(3, 3, dtype=torch.bool), torch.zeros(3, 3, dtype=torch.bool)
    neg[:2, 2] = pos[0, 1] = True
    once = float(nk.losses.lifted_song(Pairs(sim, pos.clone(), neg)))
    pos[1, 0] = True
    assert once == pytest.approx(float(nk.losses.lifted_song(Pairs(sim, pos, neg))), rel=1e-12)
    distance = (2 - 2 * 0.8) ** 0.5
    want = (distance + _lse([1 - (2 - 2 * 0.6) ** 0.5] * 2)) ** 2 / 2
    assert once == pytest.approx(want, rel=1e-9)
