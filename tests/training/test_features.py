"""`nearkin features`: the features of a folder in one file, resumable; studies and searches make them themselves."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nearkin import cli
from nearkin.data import sources
from nearkin.data.splits import make_split
from nearkin.models import frozen
from nearkin.models.embedder import Embedder
from nearkin.training import auto_recipe, factory, features, recipes

SMALL = ("--backbone", "small_conv", "--weights", "none", "--image-size", "16")


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def run(capsys, *args) -> tuple[int, str, str]:
    code = 0
    try:
        cli.main([str(arg) for arg in args])
    except SystemExit as stop:
        code = int(stop.code or 0)
    except KeyboardInterrupt:
        code = 130
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def model_of(photo_folder, quiet) -> tuple[Embedder, list[str]]:
    """The network of the command, and the files in the order of the listing."""
    data = sources.DataConfig(source="folder", root=photo_folder)
    recipe = auto_recipe.features_recipe(data, backbone="small_conv", weights="none", image_size=16)
    table = sources.load(replace(recipe.data, cache=False), quiet)
    model = factory.make_model(recipe, table, quiet)
    model.fit_pixel_norm(table.images)
    return model, [str(path) for path in table.paths]


def test_the_file_has_the_features_labels_and_paths_of_every_image(capsys, photo_folder, quiet):
    code, out, _ = run(capsys, "features", photo_folder, "-o", "x.npz", *SMALL)
    assert code == 0
    assert out.startswith("x.npz: 120 images of 10 classes, ")
    model, paths = model_of(photo_folder, quiet)
    with np.load("x.npz") as stored:
        assert stored["paths"].tolist() == paths
        assert stored["labels"].tolist() == [path.split("/")[-2] for path in paths]
        torch.testing.assert_close(torch.from_numpy(stored["features"]), model.embed_features(paths))
    assert sources.load_features(Path("x.npz")).num_classes == 10
    assert run(capsys, "evaluate", "x.npz")[0] == 0
    assert not list((Path("cache") / "images").glob("*"))  # each image is read once, so that none is cached


def test_two_views_are_the_mean_of_the_image_and_its_mirror_image(capsys, photo_folder, quiet):
    run(capsys, "features", photo_folder, "-o", "one.npz", *SMALL)
    run(capsys, "features", photo_folder, "-o", "two.npz", *SMALL, "--views", "2")
    model, paths = model_of(photo_folder, quiet)
    pixels = torch.cat(list(model.stream(lambda batch: batch, paths, 50))).to(torch.uint8)
    expected = (model.embed_features(pixels) + model.embed_features(pixels.flip(-1))) / 2
    with np.load("one.npz") as one, np.load("two.npz") as two:
        torch.testing.assert_close(torch.from_numpy(two["features"]), expected)
        assert not np.allclose(one["features"], two["features"])


def test_an_interrupted_command_resumes(capsys, photo_folder, monkeypatch):
    monkeypatch.setattr(frozen, "_BATCH_SIZE", 20)
    real, computed = Embedder.network_features, []

    def interrupted(self, images, index=0):
        if len(images) == 20 and len(computed) == 3:
            raise KeyboardInterrupt
        if len(images) == 20:
            computed.append(len(images))
        return real(self, images, index)

    monkeypatch.setattr(Embedder, "network_features", interrupted)
    code, _, err = run(capsys, "features", photo_folder, "-o", "x.npz", *SMALL)
    assert code == 130
    assert "repeat the same command to resume" in err
    assert not Path("x.npz").exists()

    def counted(self, images, index=0):
        computed.append(len(images))
        return real(self, images, index)

    monkeypatch.setattr(Embedder, "network_features", counted)
    code, _, err = run(capsys, "features", photo_folder, "-o", "x.npz", *SMALL)
    assert code == 0
    assert ": 60 images to process" in err
    assert sum(count for count in computed[3:] if count == 20) == 60
    monkeypatch.setattr(Embedder, "network_features", real)
    before = Path("x.npz").read_bytes()
    Path("cache").rename("elsewhere")
    run(capsys, "features", photo_folder, "-o", "x.npz", *SMALL)  # at once
    with np.load("x.npz") as again:
        resumed = np.load(io.BytesIO(before))
        np.testing.assert_allclose(again["features"], resumed["features"], rtol=1e-5, atol=1e-6)


@pytest.fixture
def small_default(monkeypatch):
    """A default network that takes milliseconds."""
    recipe = recipes.folder_default()
    small = replace(recipe.model, backbone="small_conv", width=4)
    monkeypatch.setattr(recipes, "folder_default", lambda: replace(recipe, model=small))
    real = factory.make_model
    monkeypatch.setattr(
        factory,
        "make_model",
        lambda r, table, reporter: real(replace(r, model=replace(r.model, weights="none")), table, reporter),
    )


@pytest.mark.slow
def test_a_study_takes_a_folder_of_images(capsys, photo_folder, small_default):
    flags = ("--losses", "norm_softmax", "--sizes", "4", "--seeds", "0")
    code, out, err = run(capsys, "bench", "plan", "features", "--data", photo_folder, *flags)
    assert code == 0, err
    assert "features of small_conv: 120 images to process" in err
    assert "1 trial" in out
    name = f"{photo_folder.name}.npz"
    assert sources.load_features(Path(name)).num_classes == 10
    code, _, err = run(capsys, "bench", "plan", "features", "--data", photo_folder, *flags)
    assert "images to process" not in err  # they are cached
    np.savez(name, features=np.eye(3), labels=[0, 1, 2])
    code, _, err = run(capsys, "bench", "plan", "features", "--data", photo_folder, *flags)
    assert code == 2
    assert "was not written by nearkin. Move it away" in err


@pytest.mark.parametrize("test", [False, True])
def test_the_features_of_trials_are_cached_before_they_start(tiny_recipe, quiet, test, monkeypatch):
    recipe = replace(tiny_recipe, model=replace(tiny_recipe.model, freeze="backbone"))
    features.cache_features(recipe, test=test, device="cpu", reporter=quiet)
    table = sources.load(recipe.data, quiet)
    split, holdout = make_split(table, recipe.data)
    computed = []
    monkeypatch.setattr(
        frozen._RowFile, "_compute", lambda self, part, positions, *rest: computed.append(len(positions))
    )
    model = factory.make_model(recipe, table, quiet)
    model.fit_pixel_norm(split.train.images)
    cached = factory.initial_features(recipe, model, table, quiet)
    for part in (split.train, split.val):
        cached.add_to(part)
    assert computed == []
    cached.add_to(holdout.open())
    assert computed == ([] if test else [holdout.num_images])  # a search leaves the test classes sealed


def test_nothing_is_cached_without_a_frozen_backbone(tiny_recipe, quiet, monkeypatch):
    monkeypatch.setattr(sources, "load", pytest.fail)
    features.cache_features(tiny_recipe, test=True, device="cpu", reporter=quiet)
