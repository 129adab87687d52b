"""Losses that wrap or extend others, and those whose calls differ from the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("pytorch_metric_learning", reason="compares with pytorch-metric-learning")

from helpers.compat_matching import (
    CLASSES,
    DIM,
    TOLERANCE,
    assert_close,
    balanced,
    batch,
    compare_losses,
    library,
    pair_indices,
    triplet_indices,
)

from nearkin.errors import ConfigError, DataError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # from PML
LIBRARIES = OURS, THEIRS = library("nearkin.compat.pml"), library("pytorch_metric_learning")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
MEMORY = {
    "AngularLoss": {}, "CircleLoss": {}, "ContrastiveLoss": {}, "GeneralizedLiftedStructureLoss": {},
    "IntraPairVarianceLoss": {}, "LiftedStructureLoss": {}, "MarginLoss": {}, "MultiSimilarityLoss": {}, "NCALoss": {},
    "NTXentLoss": {}, "SignalToNoiseRatioContrastiveLoss": {}, "SupConLoss": {}, "TripletMarginLoss": {},
    "TupletMarginLoss": {},
}  # fmt: skip


def steps(memory: torch.nn.Module, dtype: torch.dtype, mode: str) -> list[Any]:
    found: list[Any] = []
    for seed in range(5):  # the memory is full after the third batch and wraps around
        emb, labels = batch(seed, dtype, copies=False)
        leaf = emb.requires_grad_()
        extra: dict[str, Any] = {}
        if mode == "mask":
            extra["enqueue_mask"] = torch.arange(len(labels)) % 3 != 0
        if mode == "pairs":
            extra["indices_tuple"] = pair_indices(labels, labels, seed, same=True)
        if mode == "triplets":
            extra["indices_tuple"] = triplet_indices(labels, labels, seed, same=True)
        loss = memory(leaf, labels, **extra)
        loss.backward()
        found += [loss, leaf.grad]
    return found


def check_memory(name: str, dtype: torch.dtype, mode: str, miner: str = "") -> None:
    found = []
    for lib in LIBRARIES:
        given = {"miner": getattr(lib.miners, miner)()} if miner else {}
        memory = lib.losses.CrossBatchMemory(getattr(lib.losses, name)(), DIM, memory_size=50, **given)
        found.append([*steps(memory, dtype, mode), memory.embedding_memory, memory.label_memory, memory.queue_idx])
    for i, (got, want) in enumerate(zip(*found, strict=True)):
        # TupletMarginLoss and SNR amplify rounding, and a memory holds copies of the batch.
        assert_close(got, want, TOLERANCE[dtype], f"{name} {mode} {miner} output {i}")


@pytest.mark.parametrize("name", [n for n in MEMORY if n != "TupletMarginLoss"])
def test_cross_batch_memory(name: str) -> None:
    check_memory(name, torch.float64, "")


WITH_MINERS = [
    (name, miner)
    for name in ("ContrastiveLoss", "TripletMarginLoss", "NTXentLoss", "MultiSimilarityLoss")
    for miner in ("", "MultiSimilarityMiner", "TripletMarginMiner", "PairMarginMiner")
    if (name, miner) != ("NTXentLoss", "TripletMarginMiner")  # PML compares all pairs of so many triplets: 15 s each
]


@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize("mode", ["", "mask", "pairs", "triplets"])
@pytest.mark.parametrize(("name", "miner"), WITH_MINERS)
def test_cross_batch_memory_with_miners(name: str, miner: str, mode: str, dtype: torch.dtype) -> None:
    if name == "MultiSimilarityLoss" and mode in ("pairs", "triplets"):
        # The given indices are rows of the memory, where the labels differ: some pairs have both signs.
        for lib, error in ((OURS, DataError), (THEIRS, AssertionError)):
            memory = lib.losses.CrossBatchMemory(lib.losses.MultiSimilarityLoss(), DIM, memory_size=50)
            with pytest.raises(error, match="positive"):
                steps(memory, dtype, mode)
        return
    check_memory(name, dtype, mode, miner)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", [n for n in MEMORY if n != "MarginLoss"])
def test_self_supervised_loss(name: str, symmetric: bool) -> None:
    found = []
    for lib in LIBRARIES:
        loss = lib.losses.SelfSupervisedLoss(getattr(lib.losses, name)(), symmetric=symmetric)
        a, b = (batch(seed, torch.float64, copies=False)[0].requires_grad_() for seed in (0, 1))
        value = loss(a, b)
        value.backward()
        found.append((value, a.grad, b.grad))
    for got, want in zip(*found, strict=True):
        assert_close(got, want, 1e-9, name)


def test_multiple_losses() -> None:
    emb, labels = batch(0, torch.float64)

    def as_list(lib: Any) -> torch.nn.Module:
        losses = [lib.losses.ContrastiveLoss(), lib.losses.ArcFaceLoss(CLASSES, DIM), lib.losses.TripletMarginLoss()]
        return lib.losses.MultipleLosses(losses, weights=[1, 0.5, 2])

    def as_dict(lib: Any) -> torch.nn.Module:
        losses = {"a": lib.losses.ContrastiveLoss(), "b": lib.losses.TripletMarginLoss()}
        return lib.losses.MultipleLosses(losses, {"b": lib.miners.BatchHardMiner()}, {"a": 2.0, "b": 0.1})

    compare_losses(as_list, LIBRARIES, emb, labels)
    compare_losses(as_list, LIBRARIES, emb, labels, pair_indices(labels, labels, 0, same=True))
    compare_losses(as_dict, LIBRARIES, emb, labels)
    with pytest.raises(ConfigError, match="belong to the losses"):
        OURS.losses.MultipleLosses({"a": OURS.losses.NCALoss()}, weights={"b": 1.0})
    assert as_list(OURS).state_dict().keys() == as_list(THEIRS).state_dict().keys()


@DTYPES
@pytest.mark.parametrize("settings", [{}, {"invariance_lambda": 1, "variance_mu": 5, "covariance_v": 3, "eps": 0.1}])
def test_vicreg(settings: dict[str, Any], dtype: torch.dtype) -> None:
    emb, refs = batch(0, dtype)[0] * 0.7, batch(1, dtype)[0]
    for extra in ({}, {"reducer": "SumReducer"}):
        build = lambda lib, extra=extra: lib.losses.VICRegLoss(  # noqa: E731
            **settings, **{k: getattr(lib.reducers, v)() for k, v in extra.items()}
        )
        compare_losses(build, LIBRARIES, emb, None, refs=refs)


@DTYPES
def test_p2s_grad_loss(dtype: torch.dtype) -> None:
    emb, labels = batch(0, dtype)
    for classes in (CLASSES, 20):
        compare_losses(lambda lib, c=classes: lib.losses.P2SGradLoss(DIM, c), LIBRARIES, emb, labels)


def test_losses_without_labels() -> None:
    emb, labels = batch(0, torch.float64)
    pairs = pair_indices(labels, labels, 0, same=True)
    for name in ("ContrastiveLoss", "TripletMarginLoss", "MultiSimilarityLoss", "MarginLoss", "NTXentLoss"):
        compare_losses(lambda lib, n=name: getattr(lib.losses, n)(), LIBRARIES, emb, None, pairs)
        for lib in LIBRARIES:
            with pytest.raises(ValueError, match="cannot both be None"):
                getattr(lib.losses, name)()(emb)
    for n in (12, 21, 30):
        refs = batch(1, torch.float64, copies=False, n=n)[0]
        made = (lib.losses.DynamicSoftMarginLoss(min_val=-2.5, num_bins=20) for lib in LIBRARIES)
        assert_close(*(loss(emb, ref_emb=refs) for loss in made), 1e-9, "DynamicSoftMarginLoss")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pairs", "triplets"])
@pytest.mark.parametrize("n", [0, 1])
def test_empty_and_single_tuples(kind: str, n: int) -> None:
    emb, labels = batch(0, torch.float64)
    make = pair_indices if kind == "pairs" else triplet_indices
    indices = tuple(x[:n] for x in make(labels, labels, 0, same=True))
    for name in (*MEMORY, "ThresholdConsistentMarginLoss", "HistogramLoss", "NPairsLoss"):
        compare_losses(lambda lib, name=name: getattr(lib.losses, name)(), LIBRARIES, emb, labels, indices)
    only_pos = (*pair_indices(labels, labels, 0, same=True)[:2], labels[:0], labels[:0])
    only_neg = (labels[:0], labels[:0], *pair_indices(labels, labels, 0, same=True)[2:])
    for name in MEMORY:
        if name != "TupletMarginLoss":
            for some in (only_pos, only_neg):
                compare_losses(lambda lib, name=name: getattr(lib.losses, name)(), LIBRARIES, emb, labels, some)


def test_batches_of_one_class_and_of_singletons() -> None:
    emb, _ = batch(0, torch.float64, copies=False)
    for labels in (torch.zeros(len(emb), dtype=torch.int64), torch.arange(len(emb))):
        for name in MEMORY:
            if name != "NCALoss" or not labels.any():  # PML's mean of nothing is NaN
                compare_losses(lambda lib, name=name: getattr(lib.losses, name)(), LIBRARIES, emb, labels)


def test_own_losses_extend_the_base_classes() -> None:
    emb, labels = batch(0, torch.float64)

    def by_matrix(lib: Any) -> torch.nn.Module:
        class Mine(lib.losses.GenericPairLoss):
            def __init__(self):
                super().__init__(mat_based_loss=True)

            def _compute_loss(self, mat, pos_mask, neg_mask):
                losses = (mat * pos_mask - mat * neg_mask).sum(1)
                return {"loss": {"losses": losses, "indices": torch.arange(len(mat)), "reduction_type": "element"}}

        return Mine()

    def by_pairs(lib: Any) -> torch.nn.Module:
        class Mine(lib.losses.GenericPairLoss):
            def __init__(self):
                super().__init__(mat_based_loss=False, reducer=lib.reducers.SumReducer())

            def _compute_loss(self, pos_pairs, neg_pairs, indices_tuple):
                a1, p = indices_tuple[:2]
                return {"pos": {"losses": pos_pairs * (a1 + 1), "indices": (a1, p), "reduction_type": "pos_pair"}}

        return Mine()

    def from_scratch(lib: Any) -> torch.nn.Module:
        class Mine(lib.losses.BaseMetricLossFunction):
            def compute_loss(self, embeddings, labels, indices_tuple, ref_emb, ref_labels):
                losses = (self.distance(embeddings, ref_emb) * labels).sum(1)
                return {"loss": {"losses": losses, "indices": labels, "reduction_type": "element"}}

        return Mine(embedding_regularizer=lib.regularizers.LpRegularizer(), embedding_reg_weight=0.3)

    for build in (by_matrix, by_pairs, from_scratch):
        compare_losses(build, LIBRARIES, emb, labels)


def test_get_logits_and_outliers() -> None:
    emb = batch(0, torch.float32)[0]
    for name in ("ArcFaceLoss", "CosFaceLoss", "SphereFaceLoss", "LargeMarginSoftmaxLoss", "SubCenterArcFaceLoss",
                 "NormalizedSoftmaxLoss", "ProxyAnchorLoss", "ProxyNCALoss", "SoftTripleLoss"):  # fmt: skip
        found = []
        for lib in LIBRARIES:
            torch.manual_seed(0)
            loss = getattr(lib.losses, name)(num_classes=CLASSES, embedding_size=DIM)
            found.append(loss.get_logits(emb))
        assert_close(*found, 1e-5, name)
    found = []
    for lib in LIBRARIES:
        torch.manual_seed(0)
        loss = lib.losses.SubCenterArcFaceLoss(num_classes=5, embedding_size=DIM)
        found.append(loss.get_outliers(*balanced(0, torch.float32, classes=5), threshold=60))
    assert found[0][0].tolist() == found[1][0].tolist()
    assert_close(found[0][1], found[1][1], 1e-6, "dominant centres")


@pytest.mark.parametrize("name", ["ArcFaceLoss", "SubCenterArcFaceLoss", "ProxyAnchorLoss", "SoftTripleLoss"])
def test_checkpoints_of_pml_load(name: str) -> None:
    ours, theirs = (getattr(lib.losses, name)(num_classes=CLASSES, embedding_size=DIM) for lib in LIBRARIES)
    ours.load_state_dict(theirs.state_dict())
    emb, labels = batch(0, torch.float32)
    assert_close(ours(emb, labels), theirs(emb, labels), 1e-5, name)
    theirs.load_state_dict(ours.state_dict())


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("ArcFaceLoss", {"ref_emb": torch.ones(2, DIM), "ref_labels": torch.zeros(2)}),
        ("NPairsLoss", {"ref_emb": torch.ones(2, DIM), "ref_labels": torch.zeros(2)}),
        ("PNPLoss", {"indices_tuple": (torch.zeros(1),) * 3}),
        ("RankedListLoss", {"indices_tuple": (torch.zeros(1),) * 3}),
        ("InstanceLoss", {"indices_tuple": (torch.zeros(1),) * 3}),
    ],
)
def test_what_a_loss_does_not_take_is_an_error(name: str, call: dict[str, Any]) -> None:
    emb, labels = batch(0, torch.float32)
    sizes = {"ArcFaceLoss": {"num_classes": CLASSES, "embedding_size": DIM}, "RankedListLoss": {"margin": 0.4, "Tn": 4}}
    for lib in LIBRARIES:
        with pytest.raises(ValueError, match="not supported"):
            getattr(lib.losses, name)(**sizes.get(name, {}))(emb, labels, **call)


def test_wrong_settings_are_errors() -> None:
    distance = OURS.distances.LpDistance()
    for name in ("CircleLoss", "TupletMarginLoss", "SmoothAPLoss", "PNPLoss", "InstanceLoss"):
        with pytest.raises(ConfigError, match="requires the distance CosineSimilarity"):
            getattr(OURS.losses, name)(distance=distance)
    with pytest.raises(TypeError):
        OURS.losses.ContrastiveLoss(margin=0.1)
    with pytest.raises(ConfigError, match="does not support ArcFaceLoss"):
        OURS.losses.CrossBatchMemory(OURS.losses.ArcFaceLoss(3, DIM), DIM)
    emb, labels = batch(0, torch.float32)
    with pytest.raises(ValueError, match="1D tensor"):
        OURS.losses.ContrastiveLoss()(emb, labels[:, None])
    with pytest.raises(ValueError, match="must equal number of labels"):
        OURS.losses.ContrastiveLoss()(emb, labels[:3])


def test_overriding_an_inner_method_of_pml_is_an_error() -> None:
    with pytest.raises(ConfigError, match="pos_calc would not be called"):

        class Mine(OURS.losses.ContrastiveLoss):
            def pos_calc(self, pos_pair_dist, margin):
                return pos_pair_dist
