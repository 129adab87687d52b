"""Each difference from pytorch-metric-learning that the documentation states, and that nothing else is listed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import cosine_similarity, normalize

pytest.importorskip("pytorch_metric_learning", reason="compares with pytorch-metric-learning")
pytest.importorskip("faiss", reason="pytorch-metric-learning searches with faiss")

from helpers.compat_matching import DIM, assert_close, balanced, batch, library

from nearkin.compat.pml.coverage import DIFFERENCES

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # from PML
LIBRARIES = OURS, THEIRS = library("nearkin.compat.pml"), library("pytorch_metric_learning")
CPU = torch.device("cpu")


def accuracy(lib: Any, emb: Any, labels: Any, **settings: Any) -> Any:
    settings = {"include": ("precision_at_1",), **settings}
    found = lib.utils.accuracy_calculator.AccuracyCalculator(**settings, device=CPU).get_accuracy(emb, labels)
    return found[settings["include"][0]]


def test_every_difference_has_a_test() -> None:
    assert {name.removeprefix("test_") for name in globals() if name.startswith("test_")} == {
        *DIFFERENCES,
        "every_difference_has_a_test",
    }


def test_labels_are_exact() -> None:
    emb, labels = torch.randn(4, DIM, generator=torch.Generator().manual_seed(0)), 2**24 + torch.tensor([0, 1, 0, 1])
    emb[2], emb[3] = emb[1] + 0.01, emb[0] + 0.01  # the nearest neighbour is always of the other class
    assert accuracy(THEIRS, emb, labels) == 1.0
    assert accuracy(OURS, emb, labels) == 0.0


def test_ties_do_not_depend_on_row_order() -> None:
    labels = (torch.arange(100) < 90).long()
    emb = torch.ones(100, DIM)
    theirs = [accuracy(THEIRS, emb, x, k=1) for x in (labels, labels.flip(0))]
    ours = [accuracy(OURS, emb, x) for x in (labels, labels.flip(0))]
    assert abs(theirs[0] - theirs[1]) > 0.5
    assert ours == pytest.approx([(0.9 * 89 + 0.1 * 9) / 99] * 2)


def test_every_metric_works_alone() -> None:
    emb, labels = batch(0, torch.float32)
    with pytest.raises(TypeError):
        accuracy(THEIRS, emb, labels, include=("mean_reciprocal_rank",))
    alone = accuracy(OURS, emb, labels, include=("mean_reciprocal_rank",))
    calculator = OURS.utils.accuracy_calculator.AccuracyCalculator(exclude=("AMI", "NMI"), device=CPU)
    assert alone == calculator.get_accuracy(emb, labels)["mean_reciprocal_rank"]


def test_memory_state_is_saved() -> None:
    found = {}
    for lib in LIBRARIES:
        memories = [lib.losses.CrossBatchMemory(lib.losses.ContrastiveLoss(), DIM, memory_size=64) for _ in range(2)]
        memories[0](*batch(0, torch.float32))
        memories[1].load_state_dict(memories[0].state_dict())
        found[lib is OURS] = [memory(*batch(1, torch.float32)) for memory in memories]
    assert torch.equal(*found[True])
    assert not torch.equal(*found[False])
    ours = OURS.losses.CrossBatchMemory(OURS.losses.ContrastiveLoss(), DIM, memory_size=64)
    theirs = THEIRS.losses.CrossBatchMemory(THEIRS.losses.ContrastiveLoss(), DIM, memory_size=64)
    ours.load_state_dict(theirs.state_dict())  # without the fill state: empty
    assert (ours.has_been_filled, ours.queue_idx) == (False, 0)


def test_memory_excludes_self_in_batches_of_one() -> None:
    emb, labels = balanced(0, torch.float64, classes=1, each=3)
    found = []
    for lib in LIBRARIES:
        loss = lib.losses.ContrastiveLoss(reducer=lib.reducers.MeanReducer())
        memory = lib.losses.CrossBatchMemory(loss, DIM, memory_size=8)
        found.append([float(memory(emb[i : i + 1], labels[i : i + 1])) for i in range(3)][-1])
    distances = OURS.distances.LpDistance()(emb)[2]
    assert found[0] == pytest.approx(float(distances[:2].mean()))
    assert found[1] == pytest.approx(float(distances.sum() / 3))


def test_class_weights_belong_to_their_values() -> None:
    emb, labels = batch(0, torch.float64)
    weights = torch.arange(7.0, dtype=torch.float64)
    for name in ("MultiSimilarityLoss", "TupletMarginLoss", "NTXentLoss"):
        per_value = getattr(OURS.losses, name)(reducer=OURS.reducers.DoNothingReducer())(emb, labels)["loss"]
        anchors = per_value["indices"] if name == "MultiSimilarityLoss" else per_value["indices"][0]
        want = (per_value["losses"] * weights[labels[anchors]]).mean()
        ours, theirs = (
            getattr(lib.losses, name)(reducer=lib.reducers.ClassWeightedReducer(weights))(emb, labels)
            for lib in LIBRARIES
        )
        assert float(ours) == pytest.approx(float(want))
        mixed = float(per_value["losses"].mean() * weights[labels[anchors]].mean())
        assert float(theirs) == pytest.approx(float(want) if name == "NTXentLoss" else mixed)


def test_smooth_ap_uses_the_labels() -> None:
    for seed in range(3):
        for indices in (None, (torch.tensor([0, 1]), torch.tensor([1, 2]), torch.tensor([5, 6]))):
            emb, labels = balanced(seed, torch.float32)  # as many classes as samples of each: equal
            for settings in ({}, {"temperature": 0.1}):
                values, grads = [], []
                for lib in LIBRARIES:
                    leaf = emb.clone().requires_grad_()
                    values.append(lib.losses.SmoothAPLoss(**settings)(leaf, labels, indices))
                    values[-1].backward()
                    grads.append(leaf.grad)
                assert_close(*values, 1e-5, "value")
                assert_close(*grads, 1e-5, "gradient")
    emb = torch.eye(6, DIM)[[0, 0, 1, 1, 2, 2]] + 0.01 * balanced(0, torch.float32, 3, 2)[0]
    labels = torch.arange(3).repeat_interleave(2)  # perfectly ranked
    assert float(OURS.losses.SmoothAPLoss()(emb, labels)) < 0.01
    assert float(THEIRS.losses.SmoothAPLoss()(emb, labels)) > 0.1
    for lib in LIBRARIES:
        with pytest.raises(ValueError, match=r"equal size|same number"):
            lib.losses.SmoothAPLoss()(*batch(0, torch.float32))


def test_tcm_uses_the_references() -> None:
    (emb, labels), (refs, ref_labels) = batch(0, torch.float64), batch(1, torch.float64)
    sim = cosine_similarity(emb[:, None], refs, dim=2)
    same = labels[:, None] == ref_labels
    pull, push = 0.9 - sim[same & (sim <= 0.9)], sim[~same & (sim >= 0.5)] - 0.5
    got, theirs = (lib.losses.ThresholdConsistentMarginLoss()(emb, labels, None, refs, ref_labels) for lib in LIBRARIES)
    assert float(got) == pytest.approx(float(pull.mean() + push.mean()))
    assert float(theirs) != pytest.approx(float(got))


def test_dynamic_soft_margin_trains() -> None:
    values: list[list[float]] = []
    for lib in LIBRARIES:
        loss = lib.losses.DynamicSoftMarginLoss(min_val=-2.5, num_bins=20, momentum=0.3)
        values.append([])
        for seed in range(2):
            emb, labels = batch(seed, torch.float64)
            value = loss(emb.requires_grad_(), labels)
            values[-1].append(float(value))
            if lib is OURS or seed == 0:
                value.backward()
            else:
                with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                    value.backward()
    assert values[0] == pytest.approx(values[1], abs=1e-9)


def test_manifold_keeps_float64() -> None:
    emb = batch(0, torch.float32, n=40)[0]
    settings = {"l": DIM, "K": 10, "margin": 0.01}
    for extra in ({}, {"alpha": 0.5, "lambdaC": 2.0}):
        found = []
        for lib in LIBRARIES:
            torch.manual_seed(0)
            loss, leaf = lib.losses.ManifoldLoss(**settings, **extra), emb.clone().requires_grad_()
            value = loss(leaf)
            value.backward()
            found.append((value, leaf.grad, loss.proxies.grad))
        for got, want in zip(*found, strict=True):
            assert_close(got, want, 2e-5, "float32")
    exact, rounded = [], []
    for lib, values in ((OURS, exact), (THEIRS, rounded)):
        for dtype in (torch.float32, torch.float64):
            torch.manual_seed(0)
            loss = lib.losses.ManifoldLoss(**settings).to(dtype)
            values.append(float(loss(emb.to(dtype), indices_tuple=torch.arange(40) % 10)))
    assert 0 < abs(exact[1] - rounded[1]) < 1e-5
    for lib in LIBRARIES:
        value = float(lib.losses.ManifoldLoss(**settings, lambdaC=math.inf)(emb))
        assert math.isfinite(value) == (lib is OURS)


def test_nt_xent_has_no_floor() -> None:
    emb = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.1]])
    labels = torch.tensor([0, 0, 1])
    for lib in LIBRARIES:
        leaf = emb.clone().requires_grad_()
        value = lib.losses.NTXentLoss(temperature=0.005)(leaf, labels)
        value.backward()
        assert (float(value) > 190) == (lib is OURS)  # near 2 / 0.005 for one of the two pairs


def test_nca_keeps_hard_anchors() -> None:
    emb = normalize(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.0, 0.9]]))
    labels = torch.tensor([0, 0, 1, 2, 2])
    values = [float(lib.losses.NCALoss(softmax_scale=50)(emb, labels)) for lib in LIBRARIES]
    squares = torch.cdist(emb, emb).square() * 50
    hard = [squares[0, 1] - squares[0, 2], squares[1, 0] - squares[1, [3, 4]].min()]
    assert values[0] == pytest.approx(float(sum(hard)) / 4, rel=0.01)  # the third sample is a singleton
    assert values[1] < values[0]


def test_copies_have_gradients() -> None:
    emb, labels = batch(0, torch.float64)
    emb, labels = torch.cat([emb, emb]), labels.repeat(2)
    for lib in LIBRARIES:
        leaf = emb.clone().requires_grad_()
        lib.losses.TupletMarginLoss()(leaf, labels).backward()
        assert bool(leaf.grad.isfinite().all()) == (lib is OURS)


def test_histogram_takes_copies() -> None:
    emb, labels = torch.ones(4, 4, dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    assert float(OURS.losses.HistogramLoss()(emb, labels)) == pytest.approx(1.0)
    with pytest.raises(RuntimeError, match="out of bounds"):
        THEIRS.losses.HistogramLoss()(emb, labels)


def test_no_values_are_zero() -> None:
    emb = batch(0, torch.float32)[0]
    for lib in LIBRARIES:
        value = lib.losses.NCALoss()(emb, torch.arange(len(emb)))
        assert bool(value.isnan()) == (lib is THEIRS)
    assert float(OURS.losses.NCALoss()(emb, torch.arange(len(emb)))) == 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    emb, labels = batch(0, torch.float32)
    emb = emb.to(dtype)
    for name in ("ContrastiveLoss", "TripletMarginLoss", "MultiSimilarityLoss", "NTXentLoss"):
        leaf = emb.clone().requires_grad_()
        loss = getattr(OURS.losses, name)()
        value = loss(leaf, labels)
        value.backward()
        assert value.dtype == leaf.grad.dtype == dtype
        assert float(value) == pytest.approx(float(loss(emb.float(), labels).to(dtype)))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            under_autocast = loss(emb.float(), labels)
        assert torch.equal(under_autocast, loss(emb.float(), labels))
