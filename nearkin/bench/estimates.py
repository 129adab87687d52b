"""Time and disk estimates of a study before it runs, from the operations of its networks.

Seconds per trial = fixed + epochs x images x 3 x FLOPs of the network / speed (one forward, a backward of twice that).
As trials finish, the ratio of their measured to their estimated time scales the remaining estimates. Before that, the
estimates for this machine only order the trials: loading and evaluation make them wrong by large factors.
"""

import functools
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from nearkin.bench.executor import threads_for
from nearkin.bench.study import Trial
from nearkin.bench.trials import Outcome
from nearkin.config.recipe import DataConfig, ModelConfig
from nearkin.data.benchmarks import BENCHMARKS
from nearkin.data.transforms import AUGMENTS
from nearkin.errors import DataError
from nearkin.models.embedder import Embedder

UTILIZATION = 0.4  # share of a plain matrix product's speed that training reaches; measured: small networks, two cores
STEP_OVERHEAD = 0.008  # seconds per step besides the arithmetic: sampling, loss, optimiser
GPU_STEP_OVERHEAD = 0.02  # on a fast device, where overhead dominates small steps
EVALUATION_OVERHEAD = 2.0  # seconds per trial and 6,000 test images: ranking, intervals, writing


class DatasetSize(NamedTuple):
    num_images: int  # images in all splits
    shape: tuple[int, int, int]  # (channels, height, width); features are (features, 1, 1)


class Estimate:
    """Estimated time and disk space of each trial, on this machine or on one with a throughput of `tflops`."""

    def __init__(
        self, trials: list[Trial], outcomes: Mapping[str, Outcome], *, workers: int = 1, tflops: float | None = None
    ) -> None:
        self.speed = 1e12 * tflops if tflops is not None else measure_speed(workers)
        self.step_overhead = STEP_OVERHEAD if tflops is None else GPU_STEP_OVERHEAD
        raw = {trial.id: self._raw_seconds(trial) for trial in trials}
        done = [(raw[id], o.seconds) for id, o in outcomes.items() if o.status == "done" and id in raw and o.seconds]
        self.calibration_trials = len(done) if tflops is None else 0
        self.is_known = self.calibration_trials > 0 or tflops is not None
        scale = sum(b for _, b in done) / sum(a for a, _ in done) if self.calibration_trials else 1.0
        self._seconds = {id: seconds * scale for id, seconds in raw.items()}

    def seconds(self, trial: Trial) -> float:
        return self._seconds[trial.id]

    def bytes(self, trial: Trial, *, keep_models: bool) -> float:
        size = dataset_size(trial.recipe.data)
        per_query = 40 * size.num_images / 2  # compressed, about 20 metrics
        return per_query + 20_000 + (4 * count_parameters(trial.recipe.model, size.shape) if keep_models else 0)

    def _raw_seconds(self, trial: Trial) -> float:
        recipe = trial.recipe
        size = dataset_size(recipe.data)
        augment = AUGMENTS[recipe.data.augment]
        shape = size.shape if recipe.model.backbone == "none" else augment.input_shape(size.shape)
        cached_flops, flops = count_flops(recipe.model, shape)
        half_split = recipe.data.split == "half" or recipe.data.source in BENCHMARKS
        test = size.num_images * (0.5 if half_split else recipe.data.test_fraction)
        val = (size.num_images - test) * recipe.data.val_fraction
        train = size.num_images - test - val
        evaluated = 2 * test  # before and after training
        steps = recipe.train.steps or recipe.train.epochs * train / recipe.train.batch_size
        epochs = steps * recipe.train.batch_size / train
        work = cached_flops * size.num_images + flops * (epochs * (3 * train + val) + evaluated)
        fixed = 1.0 + EVALUATION_OVERHEAD * (test / 6000) ** 2
        return fixed + work / (UTILIZATION * self.speed) + self.step_overhead * steps


def dataset_size(data: DataConfig) -> DatasetSize:
    """Return the size of a recipe's data without decoding any image."""
    same = ("source", "root", "image_size", "path_column", "label_column")
    size = _dataset_size(DataConfig(**{name: getattr(data, name) for name in same}, allow_missing=True))
    limit = (data.max_classes or size.num_images) * (data.max_per_class or size.num_images)
    return size._replace(num_images=min(size.num_images, limit))


@functools.lru_cache(maxsize=64)
def _dataset_size(data: DataConfig) -> DatasetSize:
    from nearkin.data import glyphs, sources

    if data.source == "glyphs":
        table = glyphs.load()
        channels, height, width = table.images.shape
        return DatasetSize(len(table), (channels, height, width))
    if data.source == "features" and data.root is not None:
        features = sources.load_features(data.root).features
        assert features is not None
        return DatasetSize(len(features), (features.shape[1], 1, 1))
    count = BENCHMARKS[data.source].total.images if data.source in BENCHMARKS else len(sources.list_source(data))
    if not count:
        raise DataError(f"{data.root}: no images found.")
    return DatasetSize(count, (3, data.image_size, data.image_size))


@functools.lru_cache(maxsize=256)
def count_flops(model: ModelConfig, shape: tuple[int, int, int]) -> tuple[float, float]:
    """Count the floating-point operations of one image on meta tensors: computed once, and in every epoch."""
    from torch.utils.flop_counter import FlopCounterMode

    network = _meta_model(model, shape)
    head = 2.0 * network.num_features * network.dim
    if network.backbone is None:
        return 0.0, head
    with FlopCounterMode(display=False) as counter, torch.device("meta"), torch.no_grad():
        network(torch.zeros((2, *shape)))
    total = counter.get_total_flops() / 2
    return (total - head, head) if model.freeze == "backbone" else (0.0, total)


def count_parameters(model: ModelConfig, shape: tuple[int, int, int]) -> int:
    return sum(p.numel() for p in _meta_model(model, shape).parameters())


@functools.lru_cache(maxsize=256)
def _meta_model(model: ModelConfig, shape: tuple[int, int, int]) -> Embedder:
    with torch.device("meta"):
        return Embedder(replace(model, weights="none"), shape).eval()


@functools.lru_cache(maxsize=1)
def measure_speed(workers: int) -> float:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    side = 4096 if device == "cuda" else 768
    a = torch.randn(side, side, device=device)
    best, threads = 0.0, torch.get_num_threads()
    torch.set_num_threads(threads_for(workers))
    for _ in range(5):
        start = time.perf_counter()
        torch.mm(a, a).sum().item()  # item() waits for the device
        best = max(best, 2 * side**3 / (time.perf_counter() - start))
    torch.set_num_threads(threads)
    return best / workers if device == "cuda" else best
