"""Diagnostics against plain NumPy and closed forms, and alarms on healthy and broken runs."""

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


# --- against plain loops ----------------------------------------------------------------------------------------------


def neighbour_information(dist: dict[tuple[int, int], float], y: np.ndarray, k: int = 3) -> float:
    """Ross 2014, eq. 3, as a loop; the digamma function of an integer is a harmonic number minus a constant."""
    harmonic = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, len(y) + 1))])
    total = 0.0
    for i in range(len(y)):
        own = sorted(dist[i, j] for j in range(len(y)) if j != i and y[j] == y[i])
        radius = own[min(k, len(own)) - 1]
        m = sum(dist[i, j] <= radius for j in range(len(y)) if j != i)
        total += (
            harmonic[len(y) - 1] - harmonic[(y == y[i]).sum() - 1] + harmonic[min(k, len(own)) - 1] - harmonic[m - 1]
        )
    return min(max(total / len(y), 0.0), math.log(len(np.unique(y))))


def plain(emb: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """The definitions, computed pair by pair."""
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
        "label_entropy": math.log(len(classes)),  # classes of one size
        "information": neighbour_information(dist, y),
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


def test_statistics_match_plain_loops(small):
    emb, labels, diagnosis = small
    for name, value in plain(emb, labels).items():
        assert getattr(diagnosis, name) == pytest.approx(value, rel=1e-9, abs=1e-12), name


def test_histograms_and_hubness_match_numpy_and_scipy(small):
    stats = pytest.importorskip("scipy.stats")
    emb, labels, diagnosis = small
    f = torch.nn.functional.normalize(emb).numpy()
    sim, same = f @ f.T, labels.numpy()[:, None] == labels.numpy()
    upper = np.triu(np.ones_like(same), 1)
    for mask, counts in ((same, diagnosis.positive_histogram), (~same, diagnosis.negative_histogram)):
        want, _ = np.histogram(sim[mask & upper], bins=BINS, range=(-1, 1))
        assert list(counts) == want.tolist()
    np.fill_diagonal(sim, -2)
    nearest = np.argsort(-sim, axis=1)[:, :10]
    assert diagnosis.hubness == pytest.approx(stats.skew(np.bincount(nearest.ravel(), minlength=len(f))))


def test_entropies_and_parts_match_the_information_module(small):
    emb, labels, diagnosis = small
    f = torch.nn.functional.normalize(emb)
    assert diagnosis.feature_entropy == pytest.approx(information.feature_entropy(f))
    assert diagnosis.conditional_entropy == pytest.approx(information.conditional_entropy(f, labels))
    assert diagnosis.information == pytest.approx(information.mutual_information(f, labels))
    parts = information.decompose("snca", emb, labels, sigma=SIGMA)
    assert diagnosis.tightness == pytest.approx(float(parts.tightness))
    assert diagnosis.contrastive == pytest.approx(float(parts.contrastive))


# --- closed forms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 3, 20])
def test_effective_rank_of_an_isotropic_sample_is_its_rank(rank):
    g = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(50, rank, generator=g, dtype=torch.float64)).Q
    x = torch.randn(4000, rank, generator=g, dtype=torch.float64) @ basis.T + 5.0  # centring removes the common mean
    assert effective_rank(x) == pytest.approx(rank, rel=0.01)
    assert effective_rank(x[:30]) <= min(rank, 29) + 1e-9  # fewer rows than dimensions: the Gram matrix is used


def test_identical_rows():
    diagnosis = diagnose(torch.full((20, 8), 0.3), torch.arange(4).repeat(5))
    assert diagnosis.effective_rank == 1.0
    assert diagnosis.uniformity == pytest.approx(0.0, abs=1e-9)
    assert diagnosis.alignment == pytest.approx(0.0, abs=1e-9)
    assert diagnosis.negative_mean == pytest.approx(1.0)
    assert diagnosis.separation == pytest.approx(0.5)
    assert diagnosis.feature_entropy == pytest.approx(8 * math.log(1e-12))  # coincident: clamped, as documented
    assert diagnosis.information == pytest.approx(0.0, abs=1e-9)


def test_uniform_points_have_the_uniformity_of_the_sphere():
    # E exp(-2 |u - v|^2) = e^-4 E exp(4 t) with t = u.v; on the circle that mean is the Bessel function I_0(4).
    angles = torch.arange(1000, dtype=torch.float64) * (2 * math.pi / 1000)
    points = torch.stack([angles.cos(), angles.sin()], 1)
    diagnosis = diagnose(points, torch.arange(1000) % 10)
    bessel = float(torch.special.i0(torch.tensor(4.0, dtype=torch.float64)))
    mean = (math.exp(-4) * bessel * 1000 - 1) / 999  # all pairs of different rows
    assert diagnosis.uniformity == pytest.approx(math.log(mean), rel=1e-6)


def test_perfectly_separated_classes():
    diagnosis = diagnose(torch.eye(4).repeat_interleave(5, 0), torch.arange(4).repeat_interleave(5))
    assert (diagnosis.alignment, diagnosis.positive_mean, diagnosis.negative_mean) == (0.0, 1.0, 0.0)
    assert (diagnosis.separation, diagnosis.active_negatives, diagnosis.active_positives) == (1.0, 0.0, 0.0)
    assert diagnosis.effective_rank == pytest.approx(3.0)  # four corners of a simplex
    assert diagnosis.information_bound == pytest.approx(math.log(4), abs=0.01)


# --- the sample -------------------------------------------------------------------------------------------------------


def test_sample_of_many_small_classes_contains_their_pairs():
    labels = torch.arange(4000).repeat_interleave(3)[torch.randperm(12000, generator=torch.Generator().manual_seed(1))]
    emb = torch.randn(12000, 4, generator=torch.Generator().manual_seed(2))
    diagnosis = diagnose(emb, labels, sample=300)
    assert diagnosis.rows == 300
    assert diagnosis.classes == 100
    assert sum(diagnosis.positive_histogram) == 100 * 3  # every class is complete
    assert diagnose(emb, labels, sample=300) == diagnosis
    assert diagnose(emb, labels, sample=300, seed=1) != diagnosis


def test_few_large_classes_share_the_sample():
    labels = torch.tensor([0] * 900 + [1] * 90 + [2] * 10 + [3])
    diagnosis = diagnose(torch.randn(1001, 4, generator=torch.Generator().manual_seed(0)), labels, sample=120)
    assert diagnosis.classes == 3  # the singleton has no pair
    assert diagnosis.rows == 40 + 40 + 10


# --- edge cases -------------------------------------------------------------------------------------------------------


def test_non_finite_rows_are_counted_and_excluded():
    emb, labels = blobs()
    clean = diagnose(emb[2:], labels[2:])
    emb[0, 0], emb[1, 3] = math.nan, math.inf
    diagnosis = diagnose(emb, labels)
    assert diagnosis.non_finite == 2
    assert diagnosis.rows == len(emb) - 2
    assert diagnosis.alignment == clean.alignment
    nothing = diagnose(emb * math.nan, labels)
    assert (nothing.non_finite, nothing.rows) == (len(emb), 0)
    assert [a.name for a in alarms([nothing])] == ["not finite"]
    assert "30 embeddings contain NaN" in str(alarms([clean, nothing])[0])


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
def test_degenerate_sets_give_finite_values_or_nan_and_no_warning(emb, labels):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        diagnosis = diagnose(emb, labels)
        alarms([diagnosis, diagnosis, diagnosis])
    text = json.dumps(diagnosis.to_dict(), allow_nan=False)
    again = Diagnosis.from_dict(json.loads(text))
    assert again.to_dict() == diagnosis.to_dict()
    assert isinstance(again.positive_histogram, tuple)


def test_invalid_input_raises():
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
    """Networks this small are slower with several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def history(table: Table, name: str, *, lr: float = 2e-3, epochs: int = 2, **settings) -> list[Diagnosis]:
    """Train a small network on twenty glyphs; diagnose before training and after each epoch."""
    torch.manual_seed(0)
    rows = np.nonzero(table.labels < 20)[0]
    labels, pixels = torch.from_numpy(table.labels[rows]), table.images.read(rows)[:, :, ::2, ::2]
    model = Embedder(ModelConfig(backbone="small_conv", width=8, dim=32), tuple(pixels.shape[1:]))
    objective = Objective(name, num_classes=20, dim=32, **settings)
    optimizer = make_optimizer(model, objective, TrainConfig(lr=lr, class_lr=15 * lr))
    sampler = BalancedSampler(labels.numpy(), batch_size=40, samples_per_class=4, seed=0)

    @torch.no_grad()
    def diagnose_now() -> Diagnosis:
        model.eval()
        diagnosis = diagnose(model(pixels), labels)
        model.train()
        return diagnosis

    diagnoses = [diagnose_now()]
    for epoch in range(epochs):
        for batch in sampler.epoch(epoch):
            optimizer.zero_grad()
            objective(model(pixels[batch]), labels[batch]).backward()
            optimizer.step()
        diagnoses.append(diagnose_now())
    return diagnoses


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["proxy_anchor", "multi_similarity", "triplet", "contrastive", "softmax"])
def test_healthy_runs_raise_no_alarm(glyphs_table, name):
    diagnoses = history(glyphs_table, name)
    for end in range(len(diagnoses)):
        assert alarms(diagnoses[: end + 1]) == [], (end, diagnoses[end])


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("name", "settings", "want"),
    [
        ("contrastive", {"margin": 1.0}, {"collapse", "no contrast"}),  # negative pairs are never pushed
        ("triplet", {"lr": 0.2}, {"exploding norms"}),
        ("contrastive", {"lr": 0.2}, {"exploding norms", "no contrast"}),
    ],
)
def test_broken_runs_raise_their_alarms(glyphs_table, name, settings, want):
    diagnoses = history(glyphs_table, name, **settings)
    raised = alarms(diagnoses)
    assert want <= {alarm.name for alarm in raised}, (raised, diagnoses[-1])
    for alarm in raised:
        assert any(c.isdigit() for c in alarm.observation)
        assert alarm.fix.endswith(".")
        assert len(str(alarm)) < 240


def test_dimensional_collapse_and_dead_networks_raise_alarms():
    emb, labels = blobs(classes=12, dim=32)
    start = diagnose(emb, labels)
    line = torch.linspace(-1, 1, 32, dtype=torch.float64)
    flat = diagnose(labels[:, None] * line + torch.ones(32) + 0.01 * emb, labels)
    assert [a.name for a in alarms([start, flat])] == []  # a single epoch is tolerated
    assert [a.name for a in alarms([start, flat, flat])] == ["dimensional collapse"]
    dead = diagnose(torch.zeros_like(emb), labels)
    assert "dead" in [a.name for a in alarms([start, dead])]
