"""Miners, reducers, distances, regularizers and samplers give what those of pytorch-metric-learning give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("pytorch_metric_learning", reason="compares with pytorch-metric-learning")

from helpers.compat_matching import DIM, assert_close, batch, library, pair_indices, triplet_indices

from nearkin.compat.pml.coverage import COVERAGE
from nearkin.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # from PML
OURS, THEIRS = library("nearkin.compat.pml"), library("pytorch_metric_learning")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)

DISTANCES: dict[str, list[dict[str, Any]]] = {
    "CosineSimilarity": [{}],
    "DotProductSimilarity": [{}, {"normalize_embeddings": False}, {"power": 2}],
    "LpDistance": [
        {},
        {"power": 2},
        {"p": 1},
        {"normalize_embeddings": False},
        {"p": 3, "normalize_embeddings": False},
    ],
    "SNRDistance": [{}, {"normalize_embeddings": False}, {"power": 2}],
}


@DTYPES
@pytest.mark.parametrize("name", DISTANCES)
def test_distances(name: str, dtype: torch.dtype) -> None:
    for settings in DISTANCES[name]:
        found = []
        for lib in (OURS, THEIRS):
            distance = getattr(lib.distances, name)(**settings)
            emb, refs = (batch(seed, dtype)[0].requires_grad_() for seed in (0, 1))
            out = [distance(emb, refs), distance(emb), distance.pairwise_distance(emb, refs)]
            sum((x * torch.arange(x.numel()).view_as(x)).sum() for x in (out[0], out[2])).backward()
            found.append([*out, emb.grad, refs.grad, distance.margin(out[0], 0.3), distance.get_norm(emb)])
            found[-1] += [distance.smallest_dist(out[0], dim=1)[1], distance.largest_dist(out[0], out[0].flip(0))]
        for i, (got, want) in enumerate(zip(*found, strict=True)):
            assert_close(got, want, 1e-9 if dtype == torch.float64 else 1e-5, f"{name} {settings} output {i}")


def test_batched_distance() -> None:
    emb, refs = (batch(seed, torch.float64)[0] for seed in (0, 1))
    for other in (None, refs):
        found = []
        for lib in (OURS, THEIRS):
            parts: list[Any] = []
            receive = lambda mat, s, e, parts=parts: parts.append((mat, s, e))  # noqa: E731
            batched = lib.distances.BatchedDistance(lib.distances.CosineSimilarity(), receive, batch_size=4)
            batched(emb, other)
            assert batched.is_inverted
            found.append(parts)
        for (got, *bounds), (want, *their_bounds) in zip(*found, strict=True):
            assert bounds == their_bounds
            assert_close(got, want, 1e-12, "part")


MINERS: dict[str, list[dict[str, Any]]] = {
    "AngularMiner": [{}, {"angle": 35}],
    "BatchEasyHardMiner": [
        {},
        *(
            {"pos_strategy": p, "neg_strategy": n, **extra}
            for p, n in [
                ("hard", "hard"), ("easy", "easy"), ("semihard", "hard"), ("semihard", "easy"), ("hard", "semihard"),
                ("all", "hard"), ("easy", "all"), ("all", "all"), ("all", "easy"),
            ]
            for extra in ({}, {"allowed_pos_range": (0.2, 1.0)}, {"allowed_neg_range": (0.4, 1.2)})
        ),
    ],
    "BatchHardMiner": [{}, {"allowed_pos_range": (0.2, 1.0)}],
    "DistanceWeightedMiner": [{}, {"cutoff": 0.7, "nonzero_loss_cutoff": 1.2}],
    "EmbeddingsAlreadyPackagedAsTriplets": [{}],
    "HDCMiner": [{}, {"filter_percentage": 0.2}],
    "MultiSimilarityMiner": [{}, {"epsilon": 0.5}],
    "PairMarginMiner": [{}, {"pos_margin": 0.5, "neg_margin": 1.0}],
    "TripletMarginMiner": [
        {"type_of_triplets": kind, "margin": m} for kind in ("all", "hard", "semihard", "easy") for m in (0.2, 0.4)
    ],
    "UniformHistogramMiner": [{}, {"num_bins": 10, "pos_per_bin": 3, "neg_per_bin": 20}],
}  # fmt: skip
ANY_DISTANCE = {"BatchEasyHardMiner", "BatchHardMiner", "HDCMiner", "MultiSimilarityMiner", "PairMarginMiner",
                "TripletMarginMiner", "UniformHistogramMiner"}  # fmt: skip


def mined(lib: Any, name: str, settings: dict[str, Any], distance: str, seed: int, dtype: torch.dtype, refs: bool):
    given = {"distance": getattr(lib.distances, distance)()} if distance else {}
    miner = getattr(lib.miners, name)(**settings, **given)
    emb, labels = batch(seed, dtype, copies=name not in ("HDCMiner", "MultiSimilarityMiner"))  # ties in any order
    others = batch(seed + 500, dtype, copies=False, n=26) if refs else ()
    torch.manual_seed(seed)
    out = miner(emb, labels, *others)
    counts = {n: getattr(miner, n) for n in ("num_pos_pairs", "num_neg_pairs", "num_triplets") if getattr(miner, n, 0)}
    return out, counts


def check_miner(name: str, seeds: range, dtype: torch.dtype, settings_to_check: int | None = None) -> None:
    for settings in MINERS[name][:settings_to_check]:
        for distance in ("", "CosineSimilarity", "LpDistance")[: 3 if name in ANY_DISTANCE else 1]:
            for seed in seeds:
                for refs in (False, True):
                    got, counts = mined(OURS, name, settings, distance, seed, dtype, refs)
                    want, their_counts = mined(THEIRS, name, settings, distance, seed, dtype, refs)
                    what = f"{settings} {distance} seed {seed} refs {refs}"
                    assert len(got) == len(want), what
                    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), f"{what}\n{got}\n{want}"
                    assert counts == their_counts, what


@pytest.mark.parametrize("name", MINERS)
def test_miners(name: str) -> None:
    check_miner(name, range(1), torch.float32, settings_to_check=8)


@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize("name", MINERS)
def test_miners_on_many_batches(name: str, dtype: torch.dtype) -> None:
    check_miner(name, range(1, 12), dtype)


def test_hdc_miner_with_given_pairs() -> None:
    emb, labels = batch(3, torch.float64, copies=False)
    given = pair_indices(labels, labels, 0, same=True)
    found = []
    for lib in (OURS, THEIRS):
        miner = lib.miners.HDCMiner(filter_percentage=0.3)
        miner.set_idx_externally(given, labels)
        first, second = miner(emb, labels), miner(emb, labels)
        miner.reset_idx()
        found.append([sorted(zip(*(x.tolist() for x in out[i : i + 2]), strict=True))
                      for out in (first, second, miner(emb, labels)) for i in (0, 2)])  # fmt: skip
    assert found[0] == found[1]


def losses_and_indices(dtype: torch.dtype) -> list[tuple[dict[str, Any], Tensor, Tensor]]:
    emb, labels = batch(0, dtype)
    order = torch.randperm(len(labels) ** 2, generator=torch.Generator().manual_seed(0))[:30]
    a1, p = order // len(labels), order % len(labels)  # each once: of equal pairs PML's PerAnchorReducer takes the last
    g = torch.Generator().manual_seed(1)
    values = torch.randn(len(a1), generator=g, dtype=dtype)
    triplets = triplet_indices(labels, labels, 0, same=True)
    of_triplets = torch.randn(len(triplets[0]), generator=g, dtype=dtype)
    rows = torch.tensor([1, 4, 9])
    info: list[dict[str, Any]] = [
        {"losses": values, "indices": (a1, p), "reduction_type": "pos_pair", "divisor": 7},
        {"losses": values, "indices": (a1, p), "reduction_type": "neg_pair", "divisor": torch.tensor(3)},
        {"losses": of_triplets, "indices": triplets, "reduction_type": "triplet", "divisor": 0},
        {"losses": values[:3], "indices": rows, "reduction_type": "element", "divisor": 2},
        {"losses": values[:3].abs() * 0, "indices": rows, "reduction_type": "element", "divisor": 2},
        {"losses": values[:3].sum(), "indices": None, "reduction_type": "already_reduced"},
        {"losses": 0, "indices": None, "reduction_type": "already_reduced"},
    ]
    return [(x, emb, labels) for x in info]


REDUCERS: dict[str, Callable[[Any], Any]] = {
    "AvgNonZeroReducer": lambda r: r.AvgNonZeroReducer(),
    "ClassWeightedReducer": lambda r: r.ClassWeightedReducer(torch.arange(7.0) + 1),
    "DivisorReducer": lambda r: r.DivisorReducer(),
    "DoNothingReducer": lambda r: r.DoNothingReducer(),
    "MeanReducer": lambda r: r.MeanReducer(),
    "MultipleReducers": lambda r: r.MultipleReducers({"other": r.SumReducer()}),
    "MultipleReducers default": lambda r: r.MultipleReducers({"loss": r.SumReducer()}, r.AvgNonZeroReducer()),
    "PerAnchorReducer": lambda r: r.PerAnchorReducer(),
    "PerAnchorReducer sum": lambda r: r.PerAnchorReducer(r.AvgNonZeroReducer(), lambda x, n: x.sum(1)),
    "SumReducer": lambda r: r.SumReducer(),
    "ThresholdReducer": lambda r: r.ThresholdReducer(low=-0.5, high=0.5),
    "ThresholdReducer low": lambda r: r.ThresholdReducer(low=0.3),
    "ThresholdReducer high": lambda r: r.ThresholdReducer(high=-9.0),
}


@DTYPES
@pytest.mark.parametrize("name", REDUCERS)
def test_reducers(name: str, dtype: torch.dtype) -> None:
    for info, emb, labels in losses_and_indices(dtype):
        if "PerAnchor" in name and info["reduction_type"] == "triplet":
            continue
        found = []
        for lib in (OURS, THEIRS):
            losses = info["losses"].clone().requires_grad_() if isinstance(info["losses"], Tensor) else 0
            leaf = emb.clone().requires_grad_()
            out = REDUCERS[name](lib.reducers)({"loss": {**info, "losses": losses}}, leaf, labels)
            if name == "DoNothingReducer":
                assert out["loss"]["losses"] is losses
                continue
            out.backward()
            found.append((out, losses.grad if isinstance(losses, Tensor) and losses.grad is not None else leaf.grad))
        for got, want in zip(*found, strict=True) if found else ():
            assert_close(got, want, 1e-9 if dtype == torch.float64 else 1e-5, f"{name} {info['reduction_type']}")


def test_statistics_are_an_error() -> None:
    for make in (OURS.reducers.AvgNonZeroReducer, OURS.losses.ContrastiveLoss, OURS.miners.PairMarginMiner):
        with pytest.raises(ConfigError, match="collect_stats=True is not supported"):
            make(collect_stats=True)


@pytest.mark.parametrize("kind", ["pos_pair", "triplet", "element"])
def test_a_reducer_of_the_user_gets_lists(kind: str) -> None:
    emb, labels = batch(0, torch.float64)
    loss = {"pos_pair": "NTXentLoss", "triplet": "TripletMarginLoss", "element": "SupConLoss"}[kind]
    found = []
    for lib in (OURS, THEIRS):

        class Largest(lib.reducers.BaseReducer):
            def element_reduction(self, losses, loss_indices, embeddings, labels):
                return losses.max() + sum(x.sum() for x in loss_indices)

            def pos_pair_reduction(self, losses, loss_indices, embeddings, labels):
                return self.element_reduction(losses, loss_indices, embeddings, labels)

            def triplet_reduction(self, losses, loss_indices, embeddings, labels):
                return self.element_reduction(losses, loss_indices, embeddings, labels)

        found.append(getattr(lib.losses, loss)(reducer=Largest())(emb, labels))
    assert_close(*found, 1e-9, kind)


def test_do_nothing_reducer_returns_the_same_values_and_indices() -> None:
    emb, labels = batch(0, torch.float64)
    for name in ("ContrastiveLoss", "TripletMarginLoss", "MarginLoss", "NCALoss"):
        got, want = (
            getattr(x.losses, name)(reducer=x.reducers.DoNothingReducer())(emb, labels) for x in (OURS, THEIRS)
        )
        assert list(got) == list(want)
        for part in want:
            if not isinstance(want[part]["losses"], Tensor):
                continue
            assert_close(got[part]["losses"], want[part]["losses"], 1e-9, f"{name} {part}")
            pairs = zip(got[part]["indices"], want[part]["indices"], strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)


REGULARIZERS: dict[str, list[dict[str, Any]]] = {
    "CenterInvariantRegularizer": [{}],
    "LpRegularizer": [{}, {"p": 1}, {"power": 2}],
    "RegularFaceRegularizer": [{}],
    "SparseCentersRegularizer": [
        {"num_classes": 7, "centers_per_class": 3},
        {"num_classes": 3, "centers_per_class": 7},
    ],
    "ZeroMeanRegularizer": [{}],
}


@DTYPES
@pytest.mark.parametrize("name", REGULARIZERS)
def test_regularizers(name: str, dtype: torch.dtype) -> None:
    for settings in REGULARIZERS[name]:
        for reducer in (None, "SumReducer", "AvgNonZeroReducer"):
            found = []
            for lib in (OURS, THEIRS):
                given = {"reducer": getattr(lib.reducers, reducer)()} if reducer else {}
                x = batch(0, dtype, copies=False)[0].requires_grad_()
                out = getattr(lib.regularizers, name)(**settings, **given)(x)
                out.backward()
                found.append((out, x.grad))
            for got, want in zip(*found, strict=True):
                assert_close(got, want, 1e-9 if dtype == torch.float64 else 1e-5, name)


LABELS = np.random.default_rng(0).integers(0, 9, 80)
SUPER = np.stack([LABELS, LABELS // 3], 1)
EMBEDDED = torch.utils.data.TensorDataset(
    torch.randn(80, DIM, generator=torch.Generator().manual_seed(0)), torch.tensor(LABELS)
)
SAMPLERS: dict[str, list[Callable[[Any], Any]]] = {
    "MPerClassSampler": [
        lambda lib: lib.samplers.MPerClassSampler(LABELS, 4, length_before_new_iter=100),
        lambda lib: lib.samplers.MPerClassSampler(torch.tensor(LABELS), 3, 12, 200),
        lambda lib: lib.samplers.MPerClassSampler(list(LABELS), 2, length_before_new_iter=10),
        lambda lib: lib.samplers.MPerClassSampler(LABELS, 20, batch_size=40, length_before_new_iter=40),
    ],
    "FixedSetOfTriplets": [lambda lib: lib.samplers.FixedSetOfTriplets(LABELS, 50)],
    "HierarchicalSampler": [
        lambda lib: lib.samplers.HierarchicalSampler(SUPER, 16, 4),
        lambda lib: lib.samplers.HierarchicalSampler(torch.tensor(SUPER), 60, "all", 2, 3),
    ],
    "TuplesToWeightsSampler": [
        lambda lib: lib.samplers.TuplesToWeightsSampler(
            torch.nn.Identity(), lib.miners.PairMarginMiner(), EMBEDDED, dataloader_num_workers=0
        ),
        lambda lib: lib.samplers.TuplesToWeightsSampler(
            torch.nn.Identity(), lib.miners.BatchHardMiner(), EMBEDDED, subset_size=40, dataloader_num_workers=0
        ),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers(name: str) -> None:
    for build in SAMPLERS[name]:
        found = []
        for lib in (OURS, THEIRS):
            np.random.seed(3)  # noqa: NPY002
            torch.manual_seed(3)
            sampler = build(lib)
            _ = list(sampler)
            found.append([list(map(np.asarray, sampler)) for _ in range(2)])
        for got, want in zip(*found, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


def test_everything_called_the_same_is_compared_here() -> None:
    """The names of the tables above, or of the tests of each base class."""
    bases = {"BaseDistance", "BaseMiner", "BaseReducer", "BaseRegularizer", "BatchedDistance"}
    done = {*DISTANCES, *MINERS, *REGULARIZERS, *SAMPLERS, *(name.split()[0] for name in REDUCERS), *bases}
    named = {name for module, names in COVERAGE.items() if "." not in module and module != "losses" for name in names}
    assert named == done
