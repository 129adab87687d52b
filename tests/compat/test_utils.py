"""AccuracyCalculator, search, match finding, and several processes: equal to pytorch-metric-learning's."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("pytorch_metric_learning", reason="compares with pytorch-metric-learning")
pytest.importorskip("faiss", reason="pytorch-metric-learning searches with faiss")

from helpers.compat_matching import DIM, assert_close, batch, library

from nearkin.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # from PML
LIBRARIES = OURS, THEIRS = library("nearkin.compat.pml"), library("pytorch_metric_learning")
CPU = torch.device("cpu")
NEIGHBOURS = (
    "mean_average_precision",
    "mean_average_precision_at_r",
    "mean_reciprocal_rank",
    "precision_at_1",
    "r_precision",
)


def data(seed: int, n: int = 60) -> tuple[Any, Any]:
    g = torch.Generator().manual_seed(seed)
    labels = torch.multinomial(torch.tensor([8.0, 4, 2, 1, 1, 1]), n, replacement=True, generator=g)
    labels[0] = 77  # a singleton
    return torch.randn(n, DIM, generator=g) + labels[:, None].remainder(5), labels


def assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert list(got) == list(want)
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=0, atol=1e-6, err_msg=name)


def shared_neighbour(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a - b).abs() <= 1


SETTINGS: list[dict[str, Any]] = [
    {},
    {"k": 1},
    {"k": 3},
    {"k": 12},
    {"k": "max_bin_count"},
    {"avg_of_avgs": True},
    {"return_per_class": True, "k": 5},
    {"include": ("precision_at_1", "r_precision")},
    {"exclude": ("r_precision",)},
    {"label_comparison_fn": shared_neighbour, "exclude": ("AMI", "NMI")},
    {"label_comparison_fn": shared_neighbour, "k": 4, "avg_of_avgs": True, "exclude": ("AMI", "NMI")},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: " ".join(settings))
def test_accuracy(settings: dict[str, Any]) -> None:
    calculators = [lib.utils.accuracy_calculator.AccuracyCalculator(**settings, device=CPU) for lib in LIBRARIES]
    (emb, labels), (refs, ref_labels) = data(0), data(1, 90)
    calls: list[tuple[Any, ...]] = [
        (emb, labels),
        (emb, labels, refs, ref_labels),
        (emb, labels, torch.cat([emb, refs]), torch.cat([labels, ref_labels]), True),
        (emb.numpy(), labels.numpy()),
    ]
    for call in calls:
        assert_same(*(calculator.get_accuracy(*call) for calculator in calculators))


@pytest.mark.parametrize("k", [None, 4, "max_bin_count"])
def test_accuracy_with_another_search(k: Any) -> None:
    emb, labels = data(2)
    found = []
    for lib in LIBRARIES:
        search = lib.utils.inference.CustomKNN(lib.distances.CosineSimilarity(), batch_size=7)
        calculator = lib.utils.accuracy_calculator.AccuracyCalculator(
            k=k, knn_func=search, include=NEIGHBOURS, device=CPU
        )
        found.append(calculator.get_accuracy(emb, labels))
    assert_same(*found)


def test_accuracy_without_any_relevant_item() -> None:
    emb, _ = data(0, 8)
    for lib in LIBRARIES:
        calculator = lib.utils.accuracy_calculator.AccuracyCalculator(include=("precision_at_1",), device=CPU)
        assert math.isnan(calculator.get_accuracy(emb, torch.arange(8))["precision_at_1"])


def test_metrics_of_a_subclass() -> None:
    emb, labels = data(0)
    found = []
    for lib in LIBRARIES:

        class Mine(lib.utils.accuracy_calculator.AccuracyCalculator):
            def requires_knn(self):
                return [*super().requires_knn(), "share_of_2"] if hasattr(super(), "requires_knn") else []

            def calculate_share_of_2(self, knn_labels, query_labels, not_lone_query_mask, **kwargs):
                return float((knn_labels[:, :2] == query_labels[:, None]).double()[not_lone_query_mask].mean())

        found.append(Mine(include=("share_of_2", "precision_at_1"), k=3, device=CPU).get_accuracy(emb, labels))
    assert_same(*found)


def test_wrong_arguments_of_the_calculator() -> None:
    make = OURS.utils.accuracy_calculator.AccuracyCalculator
    with pytest.raises(ConfigError, match="Unknown metrics"):
        make(include=("recall",))
    with pytest.raises(ValueError, match="k must be"):
        make(k=0)
    with pytest.raises(ValueError, match="mutually exclusive"):
        make(avg_of_avgs=True, return_per_class=True)
    with pytest.raises(NotImplementedError, match="exclude them"):
        make(label_comparison_fn=torch.eq)
    emb, labels = data(0)
    with pytest.raises(ValueError, match="must begin with the queries"):
        make(device=CPU).get_accuracy(emb, labels, emb.flip(0), labels.flip(0), True)


def test_inference_model(tmp_path: Path) -> None:
    (emb, _), (refs, _) = data(0, 20), data(1, 40)
    found = []
    for lib in LIBRARIES:
        torch.manual_seed(0)
        model = lib.utils.inference.InferenceModel(torch.nn.Linear(DIM, 4), data_device=CPU)
        model.train_knn(refs, batch_size=16)
        model.add_to_knn(torch.utils.data.TensorDataset(emb, emb), batch_size=8)
        distances, indices = model.get_nearest_neighbors(emb[:5], 3)
        model.save_knn_func(str(tmp_path / "search"))
        model.load_knn_func(str(tmp_path / "search"))
        again = model.get_nearest_neighbors(list(emb[:5]), 3)[1]
        found.append([distances, indices, again, model.get_embeddings(emb)])
        found[-1] += [model.get_matches(emb, threshold=0.5), model.get_matches(emb, refs, 0.7, return_tuples=True)]
        found[-1] += [model.is_match(emb, refs[:20], 0.3), model.is_match(emb[:1], emb[:1])]
    for got, want in zip(*found, strict=True):
        assert_close(got, want, 1e-5, "inference")


def test_match_finder() -> None:
    (emb, _), (refs, _) = data(0, 20), data(1, 20)
    for name, threshold in (("LpDistance", 0.8), ("CosineSimilarity", 0.6)):
        found = []
        for lib in LIBRARIES:
            finder = lib.utils.inference.MatchFinder(getattr(lib.distances, name)(), threshold)
            found.append(
                (finder.get_matching_pairs(emb, refs), finder.is_match(emb, refs), finder.is_match(emb, refs, 0.5))
            )
        assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))
    with pytest.raises(ConfigError, match="threshold"):
        OURS.utils.inference.MatchFinder(OURS.distances.LpDistance()).is_match(emb, refs)


def test_search_without_faiss_options() -> None:
    with pytest.raises(ConfigError, match="not supported"):
        OURS.utils.inference.FaissKNN(index_init_fn=object)
    emb, _ = data(0)
    found = [lib.utils.inference.FaissKNN()(emb, 5, emb, True) for lib in LIBRARIES]
    assert torch.equal(found[0][1], found[1][1])
    assert_close(found[0][0], found[1][0], 1e-4, "squared distances")


def test_wrappers_in_a_single_process() -> None:
    emb, labels = batch(0, torch.float64)
    loss = OURS.losses.ContrastiveLoss()
    with pytest.warns(UserWarning, match="not initialised"):
        assert torch.equal(OURS.utils.distributed.DistributedLossWrapper(loss)(emb, labels), loss(emb, labels))
    with pytest.raises(TypeError, match="must extend"):
        OURS.utils.distributed.DistributedLossWrapper(torch.nn.MSELoss())
    with pytest.raises(TypeError, match="must extend"):
        OURS.utils.distributed.DistributedMinerWrapper(loss)


def _process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    try:
        for efficient in (False, True):
            for name in ("ContrastiveLoss", "TripletMarginLoss", "NTXentLoss", "memory"):
                if name == "memory" and efficient:
                    continue
                for with_miner in (False, True):
                    for with_refs in (False, True):
                        if with_refs and name == "memory":
                            continue
                        _compare_wrappers(rank, name, efficient, with_miner, with_refs)
    finally:
        torch.distributed.destroy_process_group()
    Path(folder, f"done {rank}").touch()


def _compare_wrappers(rank: int, name: str, efficient: bool, with_miner: bool, with_refs: bool) -> None:
    found = []
    for lib in LIBRARIES:
        if name == "memory":
            inner = lib.losses.CrossBatchMemory(lib.losses.ContrastiveLoss(), DIM, memory_size=64)
        else:
            inner = getattr(lib.losses, name)()
        wrapped = lib.utils.distributed.DistributedLossWrapper(inner, efficient=efficient)
        miner = lib.utils.distributed.DistributedMinerWrapper(lib.miners.PairMarginMiner(), efficient=efficient)
        emb, labels = batch(rank, torch.float64, copies=False)
        refs = batch(rank + 7, torch.float64, copies=False) if with_refs else ()
        leaf = emb.requires_grad_()
        indices = miner(leaf, labels, *refs) if with_miner and name != "memory" else None
        loss = wrapped(leaf, labels, indices, *refs)
        loss.backward()
        found.append((loss, leaf.grad))
    for got, want in zip(*found, strict=True):
        assert_close(got, want, 1e-9, f"{name} efficient={efficient} miner={with_miner} refs={with_refs}")


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="gloo with files needs POSIX")
def test_wrappers_in_two_processes(tmp_path: Path) -> None:
    context = torch.multiprocessing.get_context("fork")
    processes = [context.Process(target=_process, args=(rank, str(tmp_path))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert sorted(path.name for path in tmp_path.glob("done *")) == ["done 0", "done 1"]
