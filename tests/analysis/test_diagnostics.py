"""The panel against plain NumPy and closed forms, and the alarms on runs that go well and runs that do not."""

import json
import math
import warnings

import numpy as np
import pytest
import torch

from nearkin.analysis import information
from nearkin.analysis.diagnostics import BINS, SIGMA, Diagnosis, alarms, diagnose, effective_rank
from nearkin.config.recipe import ModelConfig, TrainConfig
from nearkin.data.samplers import BalancedSampler
from nearkin.data.table import Table
from nearkin.errors import ConfigError, DataError
from nearkin.losses.objective import Objective
from nearkin.models.embedder import Embedder
from nearkin.training.loop import make_optimizer


def blobs(classes: int = 5, per: int = 6, dim: int = 7, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat_interleave(per)
    centres = torch.randn(classes, dim, generator=g, dtype=torch.float64)
    return 3 * (centres[labels] + torch.randn(len(labels), dim, generator=g, dtype=torch.float64)), labels


@pytest.fixture(scope="module")
def small():
    emb, labels = blobs()
    return emb, labels, diagnose(emb, labels)


# --- every number against plain loops ---------------------------------------------------------------------------------


def plain(emb: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """The definitions, one pair at a time."""
    x, y = emb.numpy(), labels.numpy()
    n, dim = x.shape
    f = x / np.linalg.norm(x, axis=1, keepdims=True)
    every = [(i, j) for i in range(n) for j in range(n) if i != j]
    pos, neg = [p for p in every if y[p[0]] == y[p[1]]], [p for p in every if y[p[0]] != y[p[1]]]
    dist = {p: float(np.linalg.norm(f[p[0]] - f[p[1]])) for p in every}
    sim = {p: float(f[p[0]] @ f[p[1]]) for p in every}
    own = [[sim[i, j] for j in range(n) if j != i and y[j] == y[i]] for i in range(n)]
    others = [[sim[i, j] for j in range(n) if y[j] != y[i]] for i in range(n)]
    classes = np.unique(y)
    entropy = dim * np.mean([math.log(dist[p]) for p in every])
    conditional = sum(
        (y == c).sum() / n * dim * np.mean([math.log(dist[p]) for p in pos if y[p[0]] == c]) for c in classes
    )
    tightness = -np.mean([math.log(sum(math.exp(s / SIGMA) for s in row)) for row in own])
    contrastive = np.mean([math.log(sum(math.exp(s / SIGMA) for s in a + b)) for a, b in zip(own, others, strict=True)])
    wins = [(sim[p] > sim[q]) + (sim[p] == sim[q]) / 2 for p in pos for q in neg]
    share = np.linalg.eigvalsh(np.cov(f.T))
    share = share / share.sum()
    return {
        "norm_mean": np.linalg.norm(x, axis=1).mean(),
        "norm_std": np.linalg.norm(x, axis=1).std(),
        "tightness": tightness,
        "contrastive": contrastive,
        "feature_entropy": entropy,
        "conditional_entropy": conditional,
        "information": entropy - conditional,
        "information_bound": math.log(len(classes)) - tightness - contrastive,  # classes of one size
        "alignment": np.mean([dist[p] ** 2 for p in pos]),
        "uniformity": math.log(np.mean([math.exp(-2 * dist[p] ** 2) for p in every])),
        "effective_rank": math.exp(-sum(p * math.log(p) for p in share)),
        "positive_mean": np.mean([sim[p] for p in pos]),
        "negative_mean": np.mean([sim[p] for p in neg]),
        "separation": np.mean(wins),
        "active_negatives": np.mean([s > min(own[i]) for i in range(n) for s in others[i]]),
        "active_positives": np.mean([s < max(others[i]) for i in range(n) for s in own[i]]),
    }


def test_every_number_against_plain_loops(small):
    emb, labels, seen = small
    for name, value in plain(emb, labels).items():
        assert getattr(seen, name) == pytest.approx(value, rel=1e-9, abs=1e-12), name


def test_histograms_and_hubness_against_numpy_and_scipy(small):
    stats = pytest.importorskip("scipy.stats")
    emb, labels, seen = small
    f = torch.nn.functional.normalize(emb).numpy()
    sim, same = f @ f.T, labels.numpy()[:, None] == labels.numpy()
    upper = np.triu(np.ones_like(same), 1)
    for kind, counts in ((same, seen.positive_histogram), (~same, seen.negative_histogram)):
        want, _ = np.histogram(sim[kind & upper], bins=BINS, range=(-1, 1))
        assert list(counts) == want.tolist()
    np.fill_diagonal(sim, -2)
    nearest = np.argsort(-sim, axis=1)[:, :10]
    assert seen.hubness == pytest.approx(stats.skew(np.bincount(nearest.ravel(), minlength=len(f))))


def test_entropies_and_parts_are_those_of_the_information_module(small):
    emb, labels, seen = small
    f = torch.nn.functional.normalize(emb)
    assert seen.feature_entropy == pytest.approx(information.feature_entropy(f))
    assert seen.conditional_entropy == pytest.approx(information.conditional_entropy(f, labels))
    assert seen.information == pytest.approx(information.mutual_information(f, labels))
    parts = information.decompose("snca", emb, labels, sigma=SIGMA)
    assert seen.tightness == pytest.approx(float(parts.tightness))
    assert seen.contrastive == pytest.approx(float(parts.contrastive))


# --- closed forms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 3, 20])
def test_effective_rank_of_an_isotropic_sample_is_its_rank(rank):
    g = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(50, rank, generator=g, dtype=torch.float64)).Q
    x = torch.randn(4000, rank, generator=g, dtype=torch.float64) @ basis.T + 5.0  # a common mean does not count
    assert effective_rank(x) == pytest.approx(rank, rel=0.01)
    assert effective_rank(x[:30]) <= min(rank, 29) + 1e-9  # fewer rows than dimensions: the other product


def test_identical_rows():
    seen = diagnose(torch.full((20, 8), 0.3), torch.arange(4).repeat(5))
    assert seen.effective_rank == 1.0
    assert seen.uniformity == pytest.approx(0.0, abs=1e-9)
    assert seen.alignment == pytest.approx(0.0, abs=1e-9)
    assert seen.negative_mean == pytest.approx(1.0)
    assert seen.separation == pytest.approx(0.5)
    assert seen.feature_entropy == pytest.approx(8 * math.log(1e-12))  # coincident: clamped, as documented
    assert seen.information == pytest.approx(0.0, abs=1e-9)


def test_uniform_points_have_the_uniformity_of_the_sphere():
    # E exp(-2 |u - v|^2) = e^-4 E exp(4 t) with t = u.v; on the circle that mean is the Bessel function I_0(4).
    angles = torch.arange(1000, dtype=torch.float64) * (2 * math.pi / 1000)
    points = torch.stack([angles.cos(), angles.sin()], 1)
    seen = diagnose(points, torch.arange(1000) % 10)
    bessel = float(torch.special.i0(torch.tensor(4.0, dtype=torch.float64)))
    mean = (math.exp(-4) * bessel * 1000 - 1) / 999  # all pairs but the row with itself
    assert seen.uniformity == pytest.approx(math.log(mean), rel=1e-6)


def test_perfectly_apart():
    seen = diagnose(torch.eye(4).repeat_interleave(5, 0), torch.arange(4).repeat_interleave(5))
    assert (seen.alignment, seen.positive_mean, seen.negative_mean) == (0.0, 1.0, 0.0)
    assert (seen.separation, seen.active_negatives, seen.active_positives) == (1.0, 0.0, 0.0)
    assert seen.effective_rank == pytest.approx(3.0)  # four corners of a simplex
    assert seen.information_bound == pytest.approx(math.log(4), abs=0.01)


# --- the sample -------------------------------------------------------------------------------------------------------


def test_many_small_classes_keep_their_pairs():
    labels = torch.arange(4000).repeat_interleave(3)[torch.randperm(12000, generator=torch.Generator().manual_seed(1))]
    emb = torch.randn(12000, 4, generator=torch.Generator().manual_seed(2))
    seen = diagnose(emb, labels, sample=300)
    assert seen.rows == 300
    assert seen.classes == 100
    assert sum(seen.positive_histogram) == 100 * 3  # every class is whole
    assert diagnose(emb, labels, sample=300) == seen
    assert diagnose(emb, labels, sample=300, seed=1) != seen


def test_few_large_classes_share_the_sample():
    labels = torch.tensor([0] * 900 + [1] * 90 + [2] * 10 + [3])
    seen = diagnose(torch.randn(1001, 4, generator=torch.Generator().manual_seed(0)), labels, sample=120)
    assert seen.classes == 3  # the lone row has no pair
    assert seen.rows == 40 + 40 + 10


# --- odd input --------------------------------------------------------------------------------------------------------


def test_rows_that_are_not_finite_are_counted_and_left_out():
    emb, labels = blobs()
    clean = diagnose(emb[2:], labels[2:])
    emb[0, 0], emb[1, 3] = math.nan, math.inf
    seen = diagnose(emb, labels)
    assert seen.non_finite == 2
    assert seen.rows == len(emb) - 2
    assert seen.alignment == clean.alignment
    nothing = diagnose(emb * math.nan, labels)
    assert (nothing.non_finite, nothing.rows) == (len(emb), 0)
    assert [a.name for a in alarms([nothing])] == ["not finite"]
    assert "30 embeddings hold NaN" in str(alarms([clean, nothing])[0])


@pytest.mark.parametrize(
    ("emb", "labels"),
    [
        (torch.randn(1, 3), [0]),
        (torch.randn(3, 1), [0, 0, 1]),
        (torch.randn(4, 3), [0, 1, 2, 3]),
        (torch.randn(4, 3), [5, 5, 5, 5]),
        (torch.zeros(4, 3), [0, 0, 1, 1]),
        (torch.randn(6, 3).half(), [0, 0, 1, 1, 2, 2]),
        (torch.randn(6, 3).requires_grad_(), [0, 0, 1, 1, 2, 2]),
        (torch.tensor([[3e38, 3e38], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), [0, 0, 1, 1]),
    ],
)
def test_odd_sets_give_numbers_or_nothing_and_no_warning(emb, labels):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seen = diagnose(emb, labels)
        alarms([seen, seen, seen])
    text = json.dumps(seen.to_dict(), allow_nan=False)
    again = Diagnosis.from_dict(json.loads(text))
    assert again.to_dict() == seen.to_dict()
    assert isinstance(again.positive_histogram, tuple)


def test_what_is_refused():
    emb, labels = blobs()
    with pytest.raises(ConfigError, match="sample: expected at least 16"):
        diagnose(emb, labels, sample=4)
    with pytest.raises(DataError, match="expected integers"):
        diagnose(emb, labels.double())
    with pytest.raises(DataError, match="expected a float tensor"):
        diagnose(emb.numpy(), labels)
    with pytest.raises(DataError, match="not a diagnosis: rows"):
        Diagnosis.from_dict({"loss": 1.0})
    assert alarms([]) == []


# --- alarms on real runs ----------------------------------------------------------------------------------------------


@pytest.fixture
def one_thread():
    """Networks as small as these lose more to waiting threads than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def history(table: Table, name: str, *, lr: float = 2e-3, epochs: int = 2, **settings) -> list[Diagnosis]:
    """A small network on twenty glyphs: the panel before training and after each epoch."""
    torch.manual_seed(0)
    rows = np.nonzero(table.labels < 20)[0]
    labels, pixels = torch.from_numpy(table.labels[rows]), table.images.read(rows)[:, :, ::2, ::2]
    model = Embedder(ModelConfig(backbone="small_conv", width=8, dim=32), tuple(pixels.shape[1:]))
    objective = Objective(name, num_classes=20, dim=32, **settings)
    optimizer = make_optimizer(model, objective, TrainConfig(lr=lr, class_lr=15 * lr))
    sampler = BalancedSampler(labels.numpy(), batch_size=40, samples_per_class=4, seed=0)

    @torch.no_grad()
    def look() -> Diagnosis:
        model.eval()
        seen = diagnose(model(pixels), labels)
        model.train()
        return seen

    seen = [look()]
    for epoch in range(epochs):
        for batch in sampler.epoch(epoch):
            optimizer.zero_grad()
            objective(model(pixels[batch]), labels[batch]).backward()
            optimizer.step()
        seen.append(look())
    return seen


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["proxy_anchor", "multi_similarity", "triplet", "contrastive", "softmax"])
def test_healthy_runs_raise_no_alarm(glyphs_table, name):
    seen = history(glyphs_table, name)
    for end in range(len(seen)):
        assert alarms(seen[: end + 1]) == [], (end, seen[end])


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("name", "settings", "want"),
    [
        ("contrastive", {"margin": 1.0}, {"collapse", "no contrast"}),  # no negative pair is ever pushed
        ("triplet", {"lr": 0.2}, {"exploding norms"}),
        ("contrastive", {"lr": 0.2}, {"exploding norms", "no contrast"}),
    ],
)
def test_broken_runs_raise_theirs(glyphs_table, name, settings, want):
    seen = history(glyphs_table, name, **settings)
    found = alarms(seen)
    assert want <= {alarm.name for alarm in found}, (found, seen[-1])
    for alarm in found:
        assert any(c.isdigit() for c in alarm.seen)
        assert alarm.cure.endswith(".")
        assert len(str(alarm)) < 240


def test_other_alarms():
    emb, labels = blobs(classes=12, dim=32)
    start = diagnose(emb, labels)
    line = torch.linspace(-1, 1, 32, dtype=torch.float64)
    flat = diagnose(labels[:, None] * line + torch.ones(32) + 0.01 * emb, labels)
    assert [a.name for a in alarms([start, flat])] == []  # once may pass
    assert [a.name for a in alarms([start, flat, flat])] == ["dimensional collapse"]
    dead = diagnose(torch.zeros_like(emb), labels)
    assert "dead" in [a.name for a in alarms([start, dead])]
