"""Training, embedding and the page read image files the same way, with and without a cache."""

import os
import signal
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import nearkin as nk
from nearkin.config.recipe import ModelConfig
from nearkin.data import sources
from nearkin.data.cache import open_images
from nearkin.data.images import FileImages
from nearkin.data.loading import map_in_threads, prefetch
from nearkin.data.table import Table
from nearkin.data.transforms import AUGMENTS
from nearkin.models.embedder import Embedder
from nearkin.report.page import write_page
from nearkin.training import loop
from nearkin.training.checkpoint import TrainingInterrupted


def test_results_of_threads_are_in_order_and_errors_are_raised_in_turn():
    assert [x for part in map_in_threads(lambda x: x * x, range(100), workers=3) for x in part] == [
        x * x for x in range(100)
    ]
    results = prefetch([[lambda: 1], [lambda: 1 // 0], [lambda: 3]], workers=2)
    assert next(results) == 1
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_prefetch_depth_is_bounded_and_threads_end_with_the_iterator():
    started = []
    results = prefetch(([lambda i=i: started.append(i) or i] for i in range(100)), workers=1, depth=2)
    assert next(results) == 0
    assert len(started) <= 3
    threads = torch.get_num_threads()
    results.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("nearkin-loading")]
    assert torch.get_num_threads() == threads


@pytest.fixture
def photos(tmp_path):
    """Ten classes of eight images that are not square: a class is a colour."""
    rng = np.random.default_rng(0)
    for c in range(10):
        (tmp_path / "photos" / f"c{c}").mkdir(parents=True)
        colour = rng.uniform(0, 255, 3)
        for i in range(8):
            height, width = rng.integers(30, 60, 2)
            pixels = np.clip(colour + rng.normal(0, 30, (height, width, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / f"c{c}" / f"{i}.jpg")
    return tmp_path / "photos"


@pytest.fixture
def recipe(photos):
    """Input size 28: images are stored with a shorter side of 32."""
    chosen = nk.recipes.from_scratch()
    return replace(
        chosen,
        data=replace(chosen.data, root=photos, image_size=28, val_fraction=0.2, augment="ce_cub"),
        model=replace(chosen.model, width=4, dim=8),
        train=replace(chosen.train, epochs=2, batch_size=8, samples_per_class=2),
    )


@pytest.fixture
def as_files(monkeypatch, tmp_path):
    """Load folders as `FileImages`, with a cache if the recipe says so."""

    def load(data, reporter):
        paths = sorted(data.root.rglob("*.jpg"))
        names = sorted({path.parent.name for path in paths})
        labels = np.array([names.index(path.parent.name) for path in paths], np.int64)
        files = FileImages(paths, AUGMENTS[data.augment].stored_side(data.image_size), workers=data.num_workers)
        opened = open_images(files, cache=data.cache, folder=tmp_path / "cache", reporter=reporter)
        return Table("photos", labels[opened.kept], tuple(names), opened.images, "fingerprint", tuple(paths))

    monkeypatch.setattr(sources, "load", load)


def results_of(run) -> tuple:
    weights = torch.load(run.path / "best.pt", weights_only=True)["model"]
    scores = {key: value for key, value in run.result.items() if key != "seconds"}
    events = (run.path / "events.jsonl").read_text()
    return scores, events, {name: value.numpy().tobytes() for name, value in weights.items()}


def test_cache_and_threads_change_neither_results_nor_the_run_key(recipe, as_files, tmp_path, quiet):
    runs = []
    for cache, workers in [(False, 1), (True, 3)]:
        chosen = replace(recipe, data=replace(recipe.data, cache=cache, num_workers=workers))
        runs.append(nk.fit(chosen, tmp_path / f"runs {cache}", reporter=quiet))
    assert runs[0].path.name == runs[1].path.name
    assert results_of(runs[0]) == results_of(runs[1])
    assert (tmp_path / "cache").is_dir()


def test_a_run_resumed_within_an_epoch_equals_an_uninterrupted_one(recipe, as_files, tmp_path, quiet, monkeypatch):
    whole = nk.fit(recipe, tmp_path / "whole", reporter=quiet)
    steps, real = 0, loop.set_learning_rate

    def interrupting(*args):
        nonlocal steps
        steps += 1
        if steps == 3:
            os.kill(os.getpid(), signal.SIGINT)
        real(*args)

    monkeypatch.setattr(loop, "set_learning_rate", interrupting)
    with pytest.raises(TrainingInterrupted):
        nk.fit(recipe, tmp_path / "stopped", reporter=quiet)
    monkeypatch.setattr(loop, "set_learning_rate", real)
    assert results_of(nk.fit(recipe, tmp_path / "stopped", reporter=quiet)) == results_of(whole)


def test_augmented_training_differs_and_its_page_can_be_written(recipe, as_files, tmp_path, quiet):
    plain = replace(recipe, data=replace(recipe.data, augment="none"))
    runs = [nk.fit(chosen, tmp_path / "runs", reporter=quiet) for chosen in (recipe, plain)]
    assert runs[0].path != runs[1].path
    page = write_page(runs[0], None, reporter=quiet).read_text()
    assert "data:image/" in page


@pytest.mark.parametrize("augment", ["none", "ce_cub", "ce_cars"])
def test_files_and_stores_have_the_same_embeddings(photos, augment):
    paths = sorted(photos.rglob("*.jpg"))[:20]
    chosen = AUGMENTS[augment]
    torch.manual_seed(0)
    model = Embedder(ModelConfig(width=4, dim=8), (3, 28, 28), augment=augment).eval()
    store = FileImages(paths, chosen.stored_side(28))
    from_store = model.embed(store, batch_size=7)
    assert torch.equal(model.embed(paths, batch_size=7), from_store)
    assert torch.equal(model.embed([Image.open(path) for path in paths], batch_size=7), from_store)
    inputs = torch.stack([chosen.evaluate(store.whole(row), 28) for row in range(20)])
    assert torch.equal(model.embed(inputs, batch_size=7), from_store)


def test_a_grey_model_accepts_colour_files(photos):
    paths = sorted(photos.rglob("*.jpg"))[:3]
    model = Embedder(ModelConfig(width=4, dim=8), (1, 16, 16)).eval()
    assert model.embed(paths).shape == (3, 8)
