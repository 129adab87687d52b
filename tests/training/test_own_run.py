"""Training, evaluation and reports with a network and data of the user."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

import nearkin as nk
from nearkin import cli
from nearkin.config import ModelConfig
from nearkin.data import as_table, make_split
from nearkin.errors import ConfigError, DataError, RunError, TrainingStoppedError
from nearkin.report import write_page

MEAN, STD = (0.5,) * 3, (0.25,) * 3


class Stripes(Dataset):
    """Twelve classes of six images 16 x 16."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def __len__(self) -> int:
        return 72

    def __getitem__(self, index: int):
        label, rng = index // 6, np.random.default_rng([self.seed, index])
        colours = np.random.default_rng(1000 + label).uniform(0, 255, (2, 3))
        rows = colours[np.arange(16) // (1 + label % 3) % 2][:, None] + rng.normal(0, 70, (16, 16, 3))
        return Image.fromarray(rows.clip(0, 255).astype(np.uint8)), f"class {label}"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1))

    def forward(self, x):
        return self.conv(x).flatten(2).mean(2)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 8)

    def forward(self, ids):
        return self.embedding(ids).mean(1)


def halves(image):
    """PIL image -> float [3, 8, 8]."""
    return torch.from_numpy(np.asarray(image.resize((8, 8))).copy()).permute(2, 0, 1) / 255


def seeded(make):
    torch.manual_seed(0)
    return make()


def wrapped(**settings):
    return nk.Embedder.wrap(seeded(Net), (MEAN, STD, 16), **settings)


@pytest.fixture
def recipe():
    recipe = nk.recipes.from_scratch()
    train = replace(recipe.train, epochs=2, batch_size=12, samples_per_class=3)
    # Without validation classes the last epoch is used, not the untrained model.
    return replace(recipe, data=replace(recipe.data, augment="none", val_fraction=0), train=train)


def trained_module(run, module):
    """The module with the weights of the best epoch, loaded by hand."""
    state = torch.load(run.path / "best.pt", weights_only=True)["model"]
    prefix = "backbone.module."
    module.load_state_dict({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})
    return module.eval()


def test_items(data, run):
    """The items of the sealed test classes, and their labels."""
    _, holdout = make_split(as_table(data, run.recipe.data), run.recipe.data)
    table = holdout.open()
    return [data[row][0] for row in table.row_numbers], table.labels


test_items.__test__ = False


def test_training_and_evaluation_are_those_of_the_module(recipe, tmp_path, quiet):
    data, model = Stripes(), wrapped()
    before = copy.deepcopy(model.state_dict())
    run = nk.fit(recipe, tmp_path, data=data, model=model, reporter=quiet)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert run.path.name.startswith("own-proxy_anchor-0-")
    images, labels = test_items(data, run)
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2)
    module = trained_module(run, Net())
    with torch.no_grad():
        expected = nk.score(module((pixels / 255 - 0.5) / 0.25), labels)
    stored = run.result["test"]
    assert stored["trained"]["R@1"]["mean"] == pytest.approx(expected["R@1"])
    assert stored["trained"]["MAP@R"]["mean"] == pytest.approx(expected["MAP@R"], abs=1e-5)
    assert list(stored) == ["raw pixels", "untrained", "trained"]
    assert nk.load(run.path, module=Net()).fingerprint() != model.fingerprint()
    other = Stripes(seed=1)
    scores = nk.evaluate(nk.load(run.path, module=Net()), other)
    pixels = torch.from_numpy(np.stack([np.asarray(other[i][0]) for i in range(72)])).permute(0, 3, 1, 2)
    with torch.no_grad():
        expected = nk.score(module((pixels / 255 - 0.5) / 0.25), np.arange(72) // 6)
    assert scores["MAP@R"] == pytest.approx(expected["MAP@R"], abs=1e-5)
    assert nk.fit(recipe, tmp_path, data=data, model=wrapped(), reporter=quiet).path == run.path  # already complete
    assert nk.fit(recipe, tmp_path, data=other, model=wrapped(), reporter=quiet).path != run.path


def test_an_interrupted_run_resumes(recipe, tmp_path, quiet):
    train = replace(recipe.train, epochs=3, ema=0.9)
    recipe = replace(recipe, data=replace(recipe.data, val_fraction=0.2), train=train)
    model = wrapped(dim=4)
    torch.manual_seed(99)  # only the recipe's seed counts
    whole = nk.fit(recipe, tmp_path / "whole", data=Stripes(), model=model, reporter=quiet)
    with pytest.raises(TrainingStoppedError):
        nk.fit(
            recipe,
            tmp_path / "parts",
            data=Stripes(),
            model=wrapped(dim=4),
            reporter=quiet,
            on_epoch_end=lambda epoch, _: epoch == 2,
        )
    resumed = nk.fit(recipe, tmp_path / "parts", data=Stripes(), model=wrapped(dim=4), reporter=quiet)
    assert resumed.path.name == whole.path.name
    first, second = (torch.load(run.path / "last.pt", weights_only=True)["model"] for run in (whole, resumed))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["head.maps.0.weight"].shape == (4, 8)
    assert whole.result["test"] == resumed.result["test"]


def test_the_recipe_of_such_a_run_cannot_be_trained_by_a_command(recipe, tmp_path, quiet, capsys):
    run = nk.fit(recipe, tmp_path, data=Stripes(), model=wrapped(), reporter=quiet)
    assert (run.recipe.data.source, run.recipe.model.backbone, run.recipe.data.image_size) == ("own", "own", 16)
    with pytest.raises(SystemExit) as exit:
        cli.main(["train", str(run.path / "recipe.toml"), "--runs", str(tmp_path)])
    assert exit.value.code == 2
    assert "nk.fit(recipe, model=nk.Embedder.wrap(module))" in capsys.readouterr().err
    named = replace(recipe, model=ModelConfig(width=4, dim=4))
    run = nk.fit(named, tmp_path, data=Stripes(), reporter=quiet)
    with pytest.raises(SystemExit) as exit:
        cli.main(["train", str(run.path / "recipe.toml"), "--runs", str(tmp_path)])
    assert exit.value.code == 2
    assert "Pass them again: nk.fit(recipe, data=...)" in capsys.readouterr().err
    assert nk.load(run.path).model.backbone == "small_conv"


def test_a_frozen_module_and_a_whitened_head(recipe, tmp_path, quiet):
    config = ModelConfig(pool="average", dim=4, freeze="backbone", head_init="whitened")
    model = wrapped(config=config)
    run = nk.fit(recipe, tmp_path, data=Stripes(), model=model, reporter=quiet)
    assert list(run.result["test"]) == ["raw pixels", "raw backbone", "whitened start", "trained"]
    trained = nk.load(run.path, module=Net())
    for name, value in model.own.module.state_dict().items():
        assert torch.equal(trained.own.module.state_dict()[name], value)
    images, labels = test_items(Stripes(), run)
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2)
    with torch.no_grad():
        expected = nk.score(seeded(Net).eval()((pixels / 255 - 0.5) / 0.25), labels)
    assert run.result["test"]["raw backbone"]["R@1"]["mean"] == pytest.approx(expected["R@1"])
    assert "data:image/webp" in write_page(run, data=Stripes()).read_text()  # the module is not needed again


def test_cached_features_are_those_of_the_preprocessing(recipe, tmp_path, quiet):
    config = ModelConfig(pool="average", dim=4, freeze="backbone")
    expected = []
    for preprocess in (halves, lambda image: 1 - halves(image)):
        model = nk.Embedder.wrap(seeded(Net), preprocess, config=config)
        run = nk.fit(recipe, tmp_path, data=Stripes(), model=model, reporter=quiet)
        images, labels = test_items(Stripes(), run)
        with torch.no_grad():
            vectors = seeded(Net).eval()(torch.stack([preprocess(image) for image in images]))
        expected.append(nk.score(vectors, labels)["MAP@R"])
        assert run.result["test"]["raw backbone"]["MAP@R"]["mean"] == pytest.approx(expected[-1], abs=1e-5)
    assert expected[0] != pytest.approx(expected[1], abs=1e-5)


def test_a_function_as_preprocessing(recipe, tmp_path, quiet):
    model = nk.Embedder.wrap(seeded(Net), halves)
    run = nk.fit(recipe, tmp_path, data=Stripes(), model=model, reporter=quiet)
    images, labels = test_items(Stripes(), run)
    module = trained_module(run, Net())
    with torch.no_grad():
        expected = nk.score(module(torch.stack([halves(image) for image in images])), labels)
    assert run.result["test"]["trained"]["MAP@R"]["mean"] == pytest.approx(expected["MAP@R"], abs=1e-5)
    augmented = replace(recipe, data=replace(recipe.data, augment="light"))
    with pytest.raises(ConfigError, match=r"data.augment: light changes pixels, but this model takes"):
        nk.fit(augmented, tmp_path, data=Stripes(), model=model, reporter=quiet)


def test_a_folder_of_files_with_a_module(recipe, photo_folder, tmp_path, quiet):
    data = replace(recipe.data, source="folder", root=photo_folder, augment="light")
    run = nk.fit(replace(recipe, data=data), tmp_path, model=wrapped(), reporter=quiet)
    assert run.recipe.data.image_size == 16
    run = nk.fit(
        replace(recipe, data=replace(data, augment="none")),
        tmp_path,
        model=nk.Embedder.wrap(seeded(Net), halves),
        reporter=quiet,
    )
    assert run.result["test"] is not None


@pytest.fixture
def sentences():
    """Twelve classes of six sequences: a class prefers three words."""
    rng = np.random.default_rng(0)
    favourites = rng.integers(0, 40, (12, 3))
    labels = np.arange(72) // 6
    ids = np.where(rng.random((72, 5)) < 0.7, favourites[labels][:, [0, 1, 2, 0, 1]], rng.integers(0, 40, (72, 5)))
    return ids, labels


def test_token_ids(recipe, sentences, tmp_path, quiet):
    ids, labels = sentences
    model = nk.Embedder.wrap(seeded(Words), example=torch.from_numpy(ids[:1]))
    run = nk.fit(recipe, tmp_path, data=(ids, labels), model=model, reporter=quiet)
    assert list(run.result["test"]) == ["untrained", "trained"]
    trained = nk.load(run.path, module=Words())
    with torch.no_grad():
        expected = nk.score(trained_module(run, Words())(torch.from_numpy(ids)), labels)
    assert nk.evaluate(trained, sentences)["MAP@R"] == pytest.approx(expected["MAP@R"], abs=1e-6)
    assert write_page(run, tmp_path / "page.html", data=sentences).exists()


@pytest.mark.parametrize("freeze", ["none", "backbone"])
def test_vectors_of_the_size_that_the_module_returns(recipe, tmp_path, quiet, freeze):
    rng = np.random.default_rng(0)
    labels = np.arange(72) // 6
    x = (rng.normal(size=(12, 6))[labels] + rng.normal(size=(72, 6))).astype(np.float32)
    module = seeded(lambda: nn.Linear(6, 6))
    model = nk.Embedder.wrap(
        module, example=torch.from_numpy(x), config=ModelConfig(pool="average", dim=3, freeze=freeze)
    )
    run = nk.fit(recipe, tmp_path, data=(x, labels), model=model, reporter=quiet)
    trained = nk.load(run.path, module=nn.Linear(6, 6))
    weights = trained.own.module.weight
    assert torch.equal(weights, module.weight) == (freeze == "backbone")
    expected = trained.head(trained.own.module(torch.from_numpy(x))).detach()
    torch.testing.assert_close(trained.embed(x, raw=True), expected)


def test_features_and_labels(tmp_path, quiet):
    rng = np.random.default_rng(0)
    labels = np.arange(240) // 10
    features = (rng.normal(size=(24, 12))[labels] + rng.normal(size=(240, 12))).astype(np.float32)
    base = nk.recipes.features_default()
    base = replace(base, model=replace(base.model, dim=6), train=replace(base.train, epochs=1, batch_size=32))
    run = nk.fit(base, tmp_path / "own", data=(features, labels), reporter=quiet)
    np.savez(tmp_path / "features.npz", features=features, labels=labels)
    stored = replace(base, data=replace(base.data, root=tmp_path / "features.npz"))
    expected = nk.fit(stored, tmp_path / "file", reporter=quiet)
    assert run.result["test"]["trained"] == expected.result["test"]["trained"]


def test_the_report_takes_the_data(recipe, tmp_path, quiet, capsys):
    data = Stripes()
    run = nk.fit(recipe, tmp_path, data=data, model=wrapped(), reporter=quiet)
    page = write_page(run, data=data).read_text()
    assert "data:image/webp" in page
    cli.main(["report", str(run.path), "-o", str(tmp_path / "bare.html")])
    assert "nearkin.report.write_page(run, data=...)" in capsys.readouterr().err
    assert "data:image/webp" not in (tmp_path / "bare.html").read_text()
    bare = write_page(run, tmp_path / "other.html", data=Stripes(seed=1)).read_text()
    assert "the data have changed since this run" in bare


def test_the_command_evaluates_the_stored_embeddings(recipe, tmp_path, quiet, capsys):
    run = nk.fit(recipe, tmp_path, data=Stripes(), model=wrapped(), reporter=quiet)
    cli.main(["evaluate", str(run.path)])
    assert "R@1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        (Stripes, Net, "model: got a Net, expected your network as nk.Embedder.wrap"),
        (Stripes, lambda: nk.Embedder(ModelConfig(width=4), (3, 16, 16)), "model: got a Embedder, expected your net"),
        (Stripes, lambda: nk.Embedder.wrap(lambda x: x.mean((2, 3)), image_size=16), "model: a function cannot be tr"),
        (
            lambda: (np.zeros((72, 3, 5), np.float32), np.arange(72) // 6),
            wrapped,
            r"contains tensors of shape \[3, 5\]",
        ),
        (
            Stripes,
            lambda: nk.Embedder.wrap(nn.Flatten(), example=torch.zeros(1, 3, 4)),
            r"own: contains images of shape \[3, .*but the module takes tensors of shape \[3, 4\]",
        ),
        (
            lambda: (np.zeros((72, 3, 16, 16), np.float32), np.arange(72) // 6),
            lambda: None,
            r"(?s)contains tensors of shape \[3, 16, 16\], which need a module.*without ToTensor\(\)",
        ),
    ],
)
def test_what_is_refused(recipe, tmp_path, quiet, data, model, message):
    with pytest.raises(ConfigError, match=message):
        nk.fit(recipe, tmp_path, data=data(), model=model(), reporter=quiet)


def test_a_module_with_a_head_of_its_own_size_cannot_be_whitened(recipe, tmp_path, quiet):
    x = np.random.default_rng(0).normal(size=(72, 6)).astype(np.float32)
    config = ModelConfig(pool="average", dim=3, head_init="whitened")
    model = nk.Embedder.wrap(nn.Linear(6, 6), example=torch.from_numpy(x), config=config)
    with pytest.raises(ConfigError, match=r"model.head_init: this module returns vectors of the size that it takes"):
        nk.fit(recipe, tmp_path, data=(x, np.arange(72) // 6), model=model, reporter=quiet)


def test_data_that_cannot_be_split(recipe, tmp_path, quiet):
    items = [Stripes()[i] for i in range(18)]
    with pytest.raises(DataError, match="own: 3 classes are too few to split by class; at least 6 are needed"):
        nk.fit(recipe, tmp_path, data=items, model=wrapped(), reporter=quiet)


def test_loading_without_the_module_says_what_to_pass(recipe, tmp_path, quiet):
    run = nk.fit(recipe, tmp_path, data=Stripes(), model=wrapped(), reporter=quiet)
    with pytest.raises(RunError, match=r"Pass an instance: nearkin.load\('.*', module=Net\(...\)\)"):
        run.embedder()
