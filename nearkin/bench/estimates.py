"""What a study will cost, before anything runs: time and disk, from the arithmetic of its networks.

A trial takes about  fixed + epochs x images x 3 x (multiply-adds x 2 of the network) / speed : forward once, backward
twice. The speed of this machine is measured in a second, or given for another (`tflops`). As trials finish, the
estimates of the others are scaled by how far the finished ones were off.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nearkin.bench.machine import threads_for
from nearkin.bench.study import Trial
from nearkin.bench.trials import Outcome
from nearkin.config.recipe import DataConfig, ModelConfig
from nearkin.data.benchmarks import BENCHMARKS
from nearkin.data.transforms import AUGMENTS
from nearkin.errors import DataError
from nearkin.models.embedder import Embedder

SHARE_OF_PEAK = 0.4  # of a plain matrix product's speed that training reaches; seen with small networks on two cores
STEP = 0.008  # seconds per step beside the arithmetic: sampling, loss, optimiser
JUDGING = 2.0  # seconds per trial and 6,000 judged images: ranking, intervals, writing
GPU_STEP = 0.02  # seconds per step on a fast device, where small steps are bound by everything else


@dataclass(frozen=True)
class Size:
    """How many images a source has, and the shape of one."""

    images: int
    shape: tuple[int, int, int]


class Estimate:
    """Seconds and bytes of each trial."""

    def __init__(
        self, trials: list[Trial], outcomes: Mapping[str, Outcome], *, workers: int = 1, tflops: float | None = None
    ) -> None:
        self.speed = 1e12 * tflops if tflops is not None else measured_speed(workers)
        self.step = STEP if tflops is None else GPU_STEP
        raw = {trial.id: self._raw(trial) for trial in trials}
        done = [(raw[id], o.seconds) for id, o in outcomes.items() if o.status == "done" and id in raw and o.seconds]
        self.learned_from = len(done) if tflops is None else 0
        self.scale = sum(b for _, b in done) / sum(a for a, _ in done) if self.learned_from else 1.0
        self._seconds = {id: seconds * self.scale for id, seconds in raw.items()}

    def seconds(self, trial: Trial) -> float:
        return self._seconds[trial.id]

    def bytes(self, trial: Trial, *, keep_models: bool) -> float:
        """What stays on the disk when it is done."""
        size = size_of(trial.recipe.data)
        weights = 4 * parameters(trial.recipe.model, size.shape)
        per_query = 40 * size.images / 2  # compressed, about 20 metrics
        return per_query + 20_000 + (weights if keep_models else 0)

    def _raw(self, trial: Trial) -> float:
        recipe = trial.recipe
        size = size_of(recipe.data)
        augment = AUGMENTS[recipe.data.augment]
        shape = size.shape if recipe.model.backbone == "none" else augment.input_shape(size.shape)
        once, often = costs(recipe.model, shape)
        halved = recipe.data.split == "half" or recipe.data.source in BENCHMARKS
        judged = size.images * (0.5 if halved else recipe.data.test_fraction)
        validating = (size.images - judged) * recipe.data.val_fraction
        learning = size.images - judged - validating
        testing = 2 * judged  # before and after training
        work = once * size.images + often * (recipe.train.epochs * (3 * learning + validating) + testing)
        steps = recipe.train.epochs * learning / recipe.train.batch_size
        fixed = 1.0 + JUDGING * (judged / 6000) ** 2
        return fixed + work / (SHARE_OF_PEAK * self.speed) + self.step * steps


def size_of(data: DataConfig) -> Size:
    """How much data a recipe has, without decoding any; published counts where the files are not here."""
    return _size_of(data.source, data.root, data.image_size, data.path_column, data.label_column)


@functools.lru_cache(maxsize=64)
def _size_of(source: str, root: Path | None, side: int, path_column: str | None, label_column: str | None) -> Size:
    from nearkin.data import glyphs, sources

    if source == "glyphs":
        table = glyphs.load()
        return Size(len(table), _three(table.images.shape))
    if source == "features" and root is not None:
        features = sources.load_features(root).features
        assert features is not None
        return Size(len(features), (features.shape[1], 1, 1))
    if source in BENCHMARKS:
        return Size(BENCHMARKS[source].total.images, (3, side, side))
    data = DataConfig(source=source, root=root, path_column=path_column, label_column=label_column, allow_missing=True)
    listing = sources.list_source(data)
    if not len(listing):
        raise DataError(f"{root}: holds no images.")
    return Size(len(listing), (3, side, side))


def _three(shape: Any) -> tuple[int, int, int]:
    channels, height, width = shape
    return int(channels), int(height), int(width)


@functools.lru_cache(maxsize=256)
def costs(model: ModelConfig, shape: tuple[int, int, int]) -> tuple[float, float]:
    """Floating-point operations of one image: those needed once, and those of every look at it.

    Counted on tensors that hold nothing. A frozen backbone is run once for all epochs.
    """
    from torch.utils.flop_counter import FlopCounterMode

    network = _hollow(model, shape)
    head = 2.0 * network.num_features * network.dim
    if network.backbone is None:
        return 0.0, head
    with FlopCounterMode(display=False) as counter, torch.device("meta"), torch.no_grad():
        network(torch.zeros((2, *shape)))
    whole = counter.get_total_flops() / 2
    return (whole - head, head) if model.freeze == "backbone" else (0.0, whole)


@functools.lru_cache(maxsize=256)
def parameters(model: ModelConfig, shape: tuple[int, int, int]) -> int:
    return sum(p.numel() for p in _hollow(model, shape).parameters())


def _hollow(model: ModelConfig, shape: tuple[int, int, int]) -> Embedder:
    with torch.device("meta"):
        return Embedder(model, shape).eval()


@functools.lru_cache(maxsize=1)
def measured_speed(workers: int) -> float:
    """Floating-point operations per second of a plain matrix product by one of so many workers, the best of a few."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    side = 4096 if device == "cuda" else 768
    a = torch.randn(side, side, device=device)
    best, threads = 0.0, torch.get_num_threads()
    torch.set_num_threads(threads_for(workers))
    for _ in range(5):
        began = time.perf_counter()
        torch.mm(a, a).sum().item()  # item waits for the device
        best = max(best, 2 * side**3 / (time.perf_counter() - began))
    torch.set_num_threads(threads)
    return best / workers if device == "cuda" else best
