"""Every loss of pytorch-metric-learning that the coverage table calls the same: equal values and gradients.

On random batches with unbalanced classes, singletons and copies, in float32 and float64, at default and other settings,
with and without pairs, triplets and references, and with the main reducers and distances.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("pytorch_metric_learning", reason="compares with pytorch-metric-learning")

from helpers.compat_matching import (
    CLASSES,
    DIM,
    batch,
    compare_losses,
    library,
    pair_indices,
    triplet_indices,
)
from helpers.paths import ROOT

from nearkin.compat.pml.coverage import COVERAGE

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # from PML
LIBRARIES = library("nearkin.compat.pml"), library("pytorch_metric_learning")
Build = Callable[[SimpleNamespace], torch.nn.Module]


@dataclass(frozen=True)
class Case:
    name: str
    settings: tuple[dict[str, Any], ...] = ({},)  # a function of the library as a value is called
    indices: str = "pairs"  # "pairs": selects, "weights": of samples, "": not taken
    refs: bool = True
    copies: bool = True
    classes: bool = False  # takes num_classes and embedding_size
    tolerance: float | None = None

    def builds(self) -> list[Build]:
        return [self.build(settings) for settings in self.settings]

    def build(self, settings: dict[str, Any]) -> Build:
        def make(lib: SimpleNamespace) -> torch.nn.Module:
            given = {name: value(lib) if callable(value) else value for name, value in settings.items()}
            size = {"num_classes": CLASSES, "embedding_size": DIM} if self.classes else {}
            return getattr(lib.losses, self.name)(**size, **given)

        return make


def distance(name: str, **settings: Any) -> Callable[[SimpleNamespace], Any]:
    return lambda lib: getattr(lib.distances, name)(**settings)


def reducer(name: str, **settings: Any) -> Callable[[SimpleNamespace], Any]:
    return lambda lib: getattr(lib.reducers, name)(**settings)


def regularizer(name: str, **settings: Any) -> Callable[[SimpleNamespace], Any]:
    return lambda lib: getattr(lib.regularizers, name)(**settings)


COSINE, EUCLIDEAN = distance("CosineSimilarity"), distance("LpDistance")
DOT = distance("DotProductSimilarity", normalize_embeddings=False)
SQUARED, CITY = distance("LpDistance", power=2), distance("LpDistance", p=1, normalize_embeddings=False)
SNR = distance("SNRDistance")
LP_REG = {"embedding_regularizer": regularizer("LpRegularizer"), "embedding_reg_weight": 0.1}
FACE_REG = {"weight_regularizer": regularizer("RegularFaceRegularizer"), "weight_reg_weight": 0.3}

CASES = [
    Case(
        "ContrastiveLoss",
        (
            {},
            {"pos_margin": 0.2, "neg_margin": 0.8},
            {"pos_margin": 0.9, "neg_margin": 0.3, "distance": COSINE},
            LP_REG,
            {"distance": CITY},
        ),
    ),
    Case("SignalToNoiseRatioContrastiveLoss", ({}, {"pos_margin": 0.1, "neg_margin": 2.0})),
    Case("CircleLoss", ({}, {"m": 0.25, "gamma": 128})),
    Case("MultiSimilarityLoss", ({}, {"alpha": 18, "beta": 75, "base": 0.77}, {"distance": EUCLIDEAN}, LP_REG)),
    Case("SupConLoss", ({}, {"temperature": 0.5}, {"distance": EUCLIDEAN})),
    Case("GeneralizedLiftedStructureLoss", ({}, {"neg_margin": 0.5, "pos_margin": 0.1}, {"distance": COSINE})),
    Case("LiftedStructureLoss", ({}, {"neg_margin": 0.5, "pos_margin": 0.1}, {"distance": COSINE})),
    Case("NTXentLoss", ({}, {"temperature": 0.5}, {"distance": EUCLIDEAN}, {"distance": DOT, "temperature": 1.0})),
    Case("TupletMarginLoss", ({}, {"margin": 10.0, "scale": 16}), copies=False),
    Case("IntraPairVarianceLoss", ({}, {"pos_eps": 0.1, "neg_eps": 0.05}, {"distance": EUCLIDEAN})),
    Case(
        "ThresholdConsistentMarginLoss", ({}, {"lambda_plus": 2.0, "margin_plus": 0.7, "margin_minus": 0.2}), refs=False
    ),
    Case("AngularLoss", ({}, {"alpha": 25})),
    Case("NPairsLoss", ({}, {"distance": EUCLIDEAN}, {"distance": DOT}), refs=False),
    Case("NCALoss", ({}, {"softmax_scale": 9}, {"distance": COSINE}), indices="weights"),
    Case("InstanceLoss", ({}, {"gamma": 8}), indices="", refs=False),
    Case(
        "RankedListLoss",
        (
            {"margin": 0.4, "Tn": 4},
            {"margin": 0.8, "Tn": 1, "Tp": 2, "imbalance": 0.2},
            {"margin": 0.3, "Tn": 2, "alpha": 1.1},
        ),
        indices="",
        refs=False,
    ),
    Case("FastAPLoss", ({}, {"num_bins": 25}, {"distance": EUCLIDEAN}), indices="weights", refs=False),
    Case(
        "PNPLoss",
        ({}, *({"variant": v, "anneal": 0.05, "alpha": 1.5} for v in ("O", "Ds", "Dq", "Iu", "Ib"))),
        indices="",
        refs=False,
    ),
    Case(
        "TripletMarginLoss",
        (
            {},
            {"margin": 0.3},
            {"swap": True},
            {"smooth_loss": True},
            {"margin": 0.1, "distance": COSINE},
            {"swap": True, "smooth_loss": True, "distance": COSINE},
            {"triplets_per_anchor": 5},
            {"distance": SQUARED},
            LP_REG,
        ),
    ),
    Case(
        "MarginLoss",
        (
            {},
            {"margin": 0.1, "beta": 0.9},
            {"learn_beta": True, "nu": 0.1},
            {"distance": COSINE, "beta": 0.3},
            {"learn_beta": True, "num_classes": CLASSES, "nu": 0.2},
            {"triplets_per_anchor": 3},
            {"num_classes": CLASSES},
        ),
    ),
    # PML rounds the edges of the bins to float32.
    Case("HistogramLoss", ({}, {"n_bins": 20}, {"delta": 0.1}), refs=False, copies=False, tolerance=1e-5),
    Case(
        "DynamicSoftMarginLoss", ({"num_bins": 20, "min_val": -2.5}, {"num_bins": 40, "min_val": -3.0, "momentum": 0.1})
    ),
    *(
        Case(name, ({}, settings, {**FACE_REG, **LP_REG}), indices="weights", refs=False, classes=True)
        for name, settings in {
            "ArcFaceLoss": {"margin": 10.0, "scale": 16},
            "CosFaceLoss": {"margin": 0.1, "scale": 16},
            "SphereFaceLoss": {"margin": 3, "scale": 2},
            "LargeMarginSoftmaxLoss": {"margin": 3, "scale": 0.5},
            "SubCenterArcFaceLoss": {"sub_centers": 2, "margin": 20, "scale": 30},
            "NormalizedSoftmaxLoss": {"temperature": 0.2, "distance": EUCLIDEAN},
            "ProxyAnchorLoss": {"margin": 0.2, "alpha": 16},
            "ProxyNCALoss": {"softmax_scale": 9},
            "SoftTripleLoss": {"centers_per_class": 3, "la": 10, "gamma": 0.2, "margin": 0.1},
        }.items()
    ),
]
ALL_REDUCERS = (
    reducer("MeanReducer"),
    reducer("SumReducer"),
    reducer("AvgNonZeroReducer"),
    reducer("ThresholdReducer", low=0.1, high=0.9),
    reducer("ThresholdReducer", high=0.5),
)


def variants(case: Case, seed: int, dtype: torch.dtype):
    """(what, arguments) for each way to call the loss."""
    emb, labels = batch(seed, dtype, copies=case.copies)
    refs, ref_labels = batch(seed + 500, dtype, copies=case.copies, n=26)
    pairs, triplets = pair_indices(labels, labels, seed, same=True), triplet_indices(labels, labels, seed, same=True)
    yield "labels", (emb, labels), {}
    if case.indices:
        yield "pairs", (emb, labels, pairs), {}
        yield "triplets", (emb, labels, triplets), {}
    if case.refs:
        given = {"refs": refs, "ref_labels": ref_labels}
        yield "refs", (emb, labels), given
        yield "refs and pairs", (emb, labels, pair_indices(labels, ref_labels, seed, same=False)), given
        yield "refs and triplets", (emb, labels, triplet_indices(labels, ref_labels, seed, same=False)), given


def check(case: Case, settings: dict[str, Any], seeds: range, dtype: torch.dtype) -> None:
    for seed in seeds:
        for what, args, kwargs in variants(case, seed, dtype):
            if settings.get("swap") and "ref" in what:
                continue  # PML indexes the references by the positives' rows
            try:
                compare_losses(case.build(settings), LIBRARIES, *args, **kwargs, tolerance=case.tolerance)
            except AssertionError as error:
                raise AssertionError(f"{case.name} {settings} seed {seed}, {what}: {error}") from error


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_values_and_gradients(case: Case) -> None:
    check(case, case.settings[0], range(1), torch.float64)
    check(case, case.settings[-1], range(1, 2), torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_values_and_gradients_on_many_batches(case: Case, dtype: torch.dtype) -> None:
    for settings in case.settings:
        check(case, settings, range(6), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_reducers(case: Case) -> None:
    for make in ALL_REDUCERS:
        for settings in case.settings[:3]:
            check(case, {**settings, "reducer": make}, range(1), torch.float64)


def test_every_loss_called_the_same_is_compared() -> None:
    """Here, or in test_wrappers.py because it is called in another way."""
    elsewhere = {"BaseLossWrapper", "BaseMetricLossFunction", "GenericPairLoss", "MultipleLosses", "P2SGradLoss",
                 "SelfSupervisedLoss", "VICRegLoss"}  # fmt: skip
    same = {name for name, row in COVERAGE["losses"].items() if row.status == "same"}
    assert same <= {case.name for case in CASES} | elsewhere


@pytest.mark.slow
def test_memory_grows_with_the_square_of_the_batch() -> None:
    """At N = 1024, where PML's triplets alone would need gigabytes, a step needs some matrices [N, N]."""
    names = ["TripletMarginLoss", "MarginLoss", "NTXentLoss", "LiftedStructureLoss", "TupletMarginLoss", "PNPLoss",
             "AngularLoss", "DynamicSoftMarginLoss", "FastAPLoss", "SignalToNoiseRatioContrastiveLoss"]  # fmt: skip
    code = """
import sys, torch
from pathlib import Path
from nearkin.compat.pml import losses, reducers
def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(key))
n = 1024
emb, labels = torch.randn(n, 32), torch.arange(n) % 32
for name in sys.argv[1:]:
    step = getattr(losses, name)()
    step(emb[:64].requires_grad_(), labels[:64]).backward()
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    leaf = emb.clone().requires_grad_()
    step(leaf, labels).backward()
    print(name, memory("VmHWM") - before)
"""
    command = [sys.executable, "-c", code, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    megabytes = {name: float(value) for name, value in (line.split() for line in done.stdout.splitlines())}
    assert list(megabytes) == names
    assert max(megabytes.values()) < 250, megabytes  # a matrix has 4 MB
