"""Values and gradients of every loss that pytorch-metric-learning (PML) has too, at matched settings.

Each on 50 random batches in float64, with unbalanced classes, singletons and duplicates. Where PML is wrong or unstable
the case is narrower, a comment says why, and test_loss_definitions.py has the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.reducers import MeanReducer
from torch import Tensor, nn
from torch.nn.functional import normalize

import nearkin as nk
from nearkin.losses.contrastive import views

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # from PML
N, CLASSES, DIM, BATCHES = 14, 6, 5, 50
DOUBLE = torch.float64


@dataclass(frozen=True)
class Case:
    name: str
    theirs: Callable[..., nn.Module]
    settings: dict[str, Any] = field(default_factory=dict)
    classes: bool = False  # theirs takes num_classes and embedding_size
    duplicates: bool = True
    singletons: bool = True
    square: bool = False  # as many classes as samples of each, in order
    unit: bool = False
    label: str = ""

    def __str__(self) -> str:
        return self.name + self.label


def cosine(loss: Callable[..., nn.Module], **settings: Any) -> Callable[[], nn.Module]:
    return lambda: loss(distance=CosineSimilarity(), **settings)


CASES = [
    Case("triplet", cosine(pml.TripletMarginLoss, margin=0.1, reducer=MeanReducer())),
    Case("multi_similarity", lambda: pml.MultiSimilarityLoss(alpha=2, beta=50, base=0.5)),
    Case("norm_softmax", lambda **k: pml.NormalizedSoftmaxLoss(**k, distance=CosineSimilarity()), classes=True),
    Case("arcface", pml.ArcFaceLoss, classes=True),
    Case("proxy_anchor", pml.ProxyAnchorLoss, classes=True),
    Case("supcon", lambda: pml.SupConLoss(temperature=0.1)),
    Case("supcon", lambda: pml.SupConLoss(temperature=0.5), {"temperature": 0.5}, label=" warm"),
    Case("nt_xent", lambda: pml.NTXentLoss(temperature=0.07)),
    Case("nt_xent", lambda: pml.NTXentLoss(temperature=0.5), {"temperature": 0.5}, label=" warm"),
    Case("cosface", pml.CosFaceLoss, classes=True),
    Case("sphereface", pml.SphereFaceLoss, classes=True),
    Case("sphereface", lambda **k: pml.SphereFaceLoss(margin=3, **k), {"margin": 3}, classes=True, label=" 3"),
    Case("large_margin_softmax", pml.LargeMarginSoftmaxLoss, classes=True),
    Case("subcenter_arcface", pml.SubCenterArcFaceLoss, classes=True),
    Case("p2sgrad", lambda num_classes, embedding_size: pml.P2SGradLoss(embedding_size, num_classes), classes=True),
    Case("proxy_nca_pp", lambda **k: pml.ProxyNCALoss(softmax_scale=9, **k), classes=True),
    Case("circle", lambda: pml.CircleLoss(m=0.4, gamma=80)),
    Case("circle", lambda: pml.CircleLoss(m=0.25, gamma=256), {"margin": 0.25, "scale": 256.0}, label=" faces"),
    # PML normalises anchor and positive, but not the negative: equal for embeddings of length 1.
    Case("angular", lambda: pml.AngularLoss(alpha=40), unit=True),
    Case("angular", lambda: pml.AngularLoss(alpha=50), {"angle_degrees": 50.0}, unit=True, label=" 50"),
    # PML's acos has no gradient at cosine 1.
    Case("tuplet_margin", lambda: pml.TupletMarginLoss(margin=5.73, scale=64), duplicates=False),
    Case("intra_pair_variance", lambda: pml.IntraPairVarianceLoss(pos_eps=0.01, neg_eps=0.01)),
    Case("threshold_consistent_margin", pml.ThresholdConsistentMarginLoss),
    Case("snr_contrastive", pml.SignalToNoiseRatioContrastiveLoss),
    Case("fast_ap", lambda: pml.FastAPLoss(num_bins=10)),
    Case("fast_ap", lambda: pml.FastAPLoss(num_bins=25), {"bins": 25}, label=" 25"),
    # PML takes classes of equal size only, and the wrong samples as positives unless there are as many classes as
    # samples of each.
    Case("smooth_ap", lambda: pml.SmoothAPLoss(temperature=0.01), {"with_query": True}, square=True),
    Case("smooth_ap", lambda: pml.SmoothAPLoss(temperature=0.1), {"with_query": True, "temperature": 0.1}, square=True),
    *(
        Case(
            "pnp",
            lambda variant=variant: pml.PNPLoss(b=2, alpha=1.5, anneal=0.05, variant=variant),
            {"with_query": True, "variant": variant, "alpha": 1.5, "temperature": 0.05},
            label=" " + variant,
        )
        for variant in ("O", "Ds", "Dq", "Iu", "Ib")
    ),
    # PML leaves out pairs of two singletons, and its last bin is out of range at cosine 1.
    Case("histogram", lambda: pml.HistogramLoss(n_bins=100), duplicates=False, singletons=False),
    Case(
        "histogram", lambda: pml.HistogramLoss(n_bins=20), {"bins": 20}, duplicates=False, singletons=False, label="20"
    ),
]


def random_batch(case: Case, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    n = 16 if case.square else N
    emb = torch.randn(n, DIM, generator=g, dtype=DOUBLE)
    labels = torch.multinomial(torch.tensor([8.0, 4, 2, 1, 1, 1]), n, replacement=True, generator=g)
    if case.square:
        labels = torch.arange(4).repeat_interleave(4)
    elif case.singletons:
        labels[labels >= 4] = 0
        labels[:2] = torch.tensor([4, 5])
    else:
        labels = torch.arange(n) % 3
    if case.duplicates:
        emb[6], emb[7] = emb[5], emb[4]
    return normalize(emb) if case.unit else emb, labels


def make(case: Case, seed: int) -> tuple[nk.Objective, nn.Module]:
    """Return both losses with the same random class parameters."""
    ours = nk.Objective(case.name, num_classes=CLASSES, dim=DIM, **case.settings).double()
    theirs = case.theirs(num_classes=CLASSES, embedding_size=DIM) if case.classes else case.theirs()
    if case.classes:
        g = torch.Generator().manual_seed(1000 + seed)
        ours.proxies.data = torch.randn(ours.proxies.shape, generator=g, dtype=DOUBLE)
        flat = ours.proxies.data.reshape(-1, DIM).clone()
        (weight,) = theirs.parameters()
        weight.data = flat if weight.shape[1] == DIM and weight.shape[0] != DIM else flat.t().contiguous()
    return ours, theirs


def value_and_gradient(loss: Callable[..., Tensor], emb: Tensor, labels: Tensor, unit: bool) -> tuple[Tensor, Tensor]:
    leaf = emb.clone().requires_grad_()
    value = loss(normalize(leaf) if unit else leaf, labels)
    value.backward()
    return value.detach(), leaf.grad


def assert_equal(got: Tensor, want: Tensor, what: str, tolerance: float = 1e-6) -> None:
    scale = max(1.0, float(want.abs().max()))
    assert float((got - want).abs().max()) <= tolerance * scale, f"{what}: {got} is not {want}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equal_to_pml(case: Case) -> None:
    for seed in range(BATCHES):
        emb, labels = random_batch(case, seed)
        ours, theirs = make(case, seed)
        value, grad = value_and_gradient(ours, emb, labels, case.unit)
        want, want_grad = value_and_gradient(theirs, emb, labels, case.unit)
        assert_equal(value, want, f"value of batch {seed}")
        assert_equal(grad, want_grad, f"gradient of batch {seed}")
        if case.classes and case.name != "p2sgrad":  # PML's gradient there is on the normalised weight
            (weight,) = theirs.parameters()
            got = ours.proxies.grad.reshape(-1, DIM)
            assert_equal(got, weight.grad if weight.shape == got.shape else weight.grad.t(), f"proxies of batch {seed}")


def two_towers(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, N, DIM, generator=g, dtype=DOUBLE)
    return a, a + 0.5 * b, torch.arange(N)


@pytest.mark.parametrize("seed", range(5))
def test_info_nce_is_nt_xent_in_both_directions(seed: int) -> None:
    a, b, labels = (x.requires_grad_() if x.is_floating_point() else x for x in two_towers(seed))
    theirs = pml.NTXentLoss(temperature=0.07)
    again = labels.clone()  # of the same tensor PML would remove the diagonal
    want = (theirs(a, labels, ref_emb=b, ref_labels=again) + theirs(b, labels, ref_emb=a, ref_labels=again)) / 2
    got = nk.losses.info_nce(nk.pair_up(a, labels, b, labels), temperature=0.07)
    assert_equal(got.detach(), want.detach(), "value")
    for one, two in zip(torch.autograd.grad(got, (a, b)), torch.autograd.grad(want, (a, b)), strict=True):
        assert_equal(one, two, "gradient")


@pytest.mark.parametrize("seed", range(5))
def test_vicreg_of_two_towers(seed: int) -> None:
    a, b, labels = (x.requires_grad_() if x.is_floating_point() else x for x in two_towers(seed))
    want = pml.VICRegLoss()(a, ref_emb=b)
    got = nk.losses.vicreg(views(a, labels, b, labels))
    assert_equal(got.detach(), want.detach(), "value")
    for one, two in zip(torch.autograd.grad(got, (a, b)), torch.autograd.grad(want, (a, b)), strict=True):
        assert_equal(one, two, "gradient")


@pytest.mark.parametrize("seed", range(5))
def test_instance(seed: int) -> None:
    """PML's loss takes the sample with the index of the class as the class: right if they are numbered in order."""
    emb, _ = random_batch(CASES[0], seed)
    labels = torch.arange(N)
    emb.requires_grad_()
    got, want = nk.losses.instance(emb, labels, emb), pml.InstanceLoss(gamma=64)(emb, labels)
    assert_equal(got.detach(), want.detach(), "value")
    assert_equal(torch.autograd.grad(got, emb)[0], torch.autograd.grad(want, emb)[0], "gradient")


@pytest.mark.parametrize("seed", range(5))
def test_manifold(seed: int) -> None:
    """PML inverts in float32, so it agrees to four digits."""
    case = Case("manifold", lambda: None)
    emb, labels = random_batch(case, seed)
    ours, theirs = nk.Objective("manifold", num_classes=CLASSES, dim=DIM).double(), pml.ManifoldLoss(l=DIM, K=CLASSES)
    theirs.proxies.data = ours.proxies.data.clone()
    value, grad = value_and_gradient(ours, emb, labels, False)
    want, want_grad = value_and_gradient(lambda x, y: theirs(x, indices_tuple=y), emb, labels, False)
    assert_equal(value, want[0] if want.dim() else want, "value", 1e-4)
    assert_equal(grad, want_grad, "gradient", 1e-4)


def test_dynamic_soft_margin_of_two_towers() -> None:
    """PML adds the counts of a batch to a distribution; with the weight that this gives the batch ours is equal.

    The gradient of PML also flows through the histogram, so that its second step cannot be differentiated.
    """
    momentum, theirs = 0.01, pml.DynamicSoftMarginLoss(min_val=-2.0, num_bins=10, momentum=0.01)
    ours = nk.Objective("dynamic_soft_margin", momentum=momentum * N / (momentum * N + 1 - momentum)).double()
    for seed in range(4):
        a, b, labels = two_towers(seed)
        pairs = nk.pair_up(a, labels, b, labels)
        with torch.no_grad():
            want = theirs(a, ref_emb=b)
        state = ours._updated_buffers(pairs, is_last=True)
        got = nk.losses.dynamic_soft_margin(pairs, **state)
        assert_equal(got, want, f"value of step {seed}")


@pytest.mark.parametrize("seed", range(5))
def test_ranked_list_is_close_to_pml(seed: int) -> None:
    """PML adds 1e-5 to every weight, of absent pairs too, so it agrees to three digits; it skips negatives at 0."""
    emb, labels = random_batch(Case("ranked_list", lambda: None, duplicates=False), seed)
    ours, theirs = nk.Objective("ranked_list", temperature=4.0), pml.RankedListLoss(margin=0.4, Tn=4, alpha=1.2)
    value, grad = value_and_gradient(ours, emb, labels, False)
    want, want_grad = value_and_gradient(theirs, emb, labels, False)
    assert_equal(value, want, "value", 1e-3)
    assert_equal(grad, want_grad, "gradient", 1e-3)
