"""Index, search, serving and export with a network, data or vectors of the user."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

import nearkin as nk
from nearkin import cli
from nearkin.deploy.export import export, export_run, load_exported
from nearkin.errors import ConfigError, DataError, RunError

MEAN, STD = (0.5,) * 3, (0.25,) * 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, x):
        return self.layers(x)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)

    def forward(self, ids):
        return self.embedding(ids).mean(1)


def shrunk(image):
    """PIL image -> float [3, 8, 8]."""
    return torch.from_numpy(np.asarray(image.resize((8, 8))).copy()).permute(2, 0, 1) / 255


def means(batch):
    """A function of arrays: the mean of each channel and row."""
    return batch.mean(3).reshape(len(batch), -1)


def seeded(make):
    torch.manual_seed(0)
    return make()


def pixels(index: int) -> np.ndarray:
    return np.random.default_rng(index).integers(0, 256, (16, 16, 3), np.uint8)


ITEMS = [(Image.fromarray(pixels(i)), f"class {i // 3}") for i in range(9)]


def by_hand(module) -> torch.Tensor:
    images = torch.from_numpy(np.stack([pixels(i) for i in range(9)])).permute(0, 3, 1, 2)
    with torch.no_grad():
        return F.normalize(module.eval()((images / 255 - 0.5) / 0.25), dim=1)


def test_an_index_of_a_dataset():
    module = seeded(Net)
    index = nk.Index.build(nk.Embedder.wrap(module, (MEAN, STD, 16)), ITEMS)
    np.testing.assert_allclose(index.vectors, by_hand(module), atol=1e-6)
    assert index.labels == [label for _, label in ITEMS]
    assert index.ids == [str(i) for i in range(9)]
    [hit] = index.search(ITEMS[4][0], k=1)
    assert (hit.id, hit.label) == ("4", "class 1")
    assert hit.similarity == pytest.approx(1)
    assert index.search(pixels(7).transpose(2, 0, 1), k=1)[0].id == "7"


def test_an_index_of_files_and_of_arrays(tmp_path):
    model = nk.Embedder.wrap(seeded(Net), (MEAN, STD, 16))
    expected = nk.Index.build(model, ITEMS)
    for i, (image, _) in enumerate(ITEMS):
        image.save(tmp_path / f"{i}.png")
    paths = [tmp_path / f"{i}.png" for i in range(9)]
    labelled = nk.Index.build(model, list(zip(paths, expected.labels, strict=True)))
    plain = nk.Index.build(model, paths, expected.labels)
    arrays = nk.Index.build(model, (np.stack([pixels(i) for i in range(9)]), expected.labels))
    assert labelled.ids == plain.ids == [str(path) for path in paths]
    for index in (labelled, plain, arrays):
        assert np.array_equal(index.vectors, expected.vectors)
        assert index.labels == expected.labels
    with pytest.raises(DataError, match="labels: the data have labels already"):
        nk.Index.build(model, ITEMS, ["a"] * 9)
    with pytest.raises(DataError, match=r"model: Net is no nearkin.Embedder"):
        nk.Index.build(Net(), ITEMS)


def test_an_index_is_saved_and_loaded_with_the_same_model_only(tmp_path):
    model = nk.Embedder.wrap(seeded(Net), (MEAN, STD, 16))
    nk.Index.build(model, ITEMS).save(tmp_path / "index")
    again = nk.Embedder.wrap(seeded(Net), (MEAN, STD, 16))
    assert nk.Index.load(tmp_path / "index", again).search(ITEMS[2][0], k=1)[0].id == "2"
    with pytest.raises(DataError, match="built with a different model"):
        nk.Index.load(tmp_path / "index", nk.Embedder.wrap(seeded(Net), (STD, MEAN, 16)))


def test_an_index_of_token_ids():
    words = seeded(Words)
    ids = np.random.default_rng(0).integers(0, 9, (6, 5))
    index = nk.Index.build(nk.Embedder.wrap(words, example=torch.from_numpy(ids)), (ids, ["a", "b"] * 3))
    np.testing.assert_allclose(index.vectors, F.normalize(words(torch.from_numpy(ids)), dim=1).detach(), atol=1e-6)


def test_an_index_of_vectors_with_a_function_for_queries(tmp_path):
    vectors = means(np.stack([pixels(i) for i in range(9)]).transpose(0, 3, 1, 2) / 255)
    index = nk.Index.build(None, vectors, list(range(9)))
    assert index.ids == [str(i) for i in range(9)]
    assert index.search(vectors[3], k=1)[0].label == 3
    with pytest.raises(ConfigError, match="index: has no run folder to load its model from"):
        index.search(ITEMS[3][0])
    function = nk.Embedder.wrap(means, image_size=16)
    index = nk.Index.build(None, vectors, list(range(9)), embed=function)
    assert index.search(ITEMS[3][0], k=1)[0].label == 3
    index.save(tmp_path / "index")
    assert nk.Index.load(tmp_path / "index", function).search(ITEMS[5][0], k=1)[0].label == 5


@pytest.mark.parametrize("preprocess", [(MEAN, STD, 16), shrunk], ids=["pixels", "function"])
def test_serving(preprocess):
    pytest.importorskip("fastapi", reason="needs nearkin[serve]")
    from starlette.testclient import TestClient

    from nearkin.deploy import Service, make_app

    model = nk.Embedder.wrap(seeded(Net), preprocess)
    service = Service(nk.Index.build(model, ITEMS), workers=1)
    try:
        client = TestClient(make_app(service))
        ITEMS[6][0].save(buffer := io.BytesIO(), "PNG")
        response = client.post("/search?k=2", content=buffer.getvalue(), headers={"Content-Type": "image/png"})
        assert response.status_code == 200
        assert response.json()["hits"][0]["id"] == "6"
        assert response.json()["nearest"] == pytest.approx(1, abs=1e-6)
    finally:
        service.close()


def test_a_model_without_images_is_not_served():
    pytest.importorskip("fastapi", reason="needs nearkin[serve]")
    from nearkin.deploy import Service

    ids = np.random.default_rng(0).integers(0, 9, (6, 5))
    model = nk.Embedder.wrap(Words(), example=torch.from_numpy(ids))
    with pytest.raises(ConfigError, match="serve: the model takes tensors, not images"):
        Service(nk.Index.build(model, (ids, ["a", "b"] * 3)))


INPUTS = {
    "pixels": (Net, {"preprocess": (MEAN, STD, 16)}, torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)),
    "function": (Net, {"preprocess": shrunk}, torch.randn(3, 3, 8, 8)),
    "ids": (Words, {"example": torch.zeros(1, 5, dtype=torch.int64)}, torch.randint(0, 9, (3, 5))),
}


@pytest.mark.slow
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("to", ["torch", "onnx"])
def test_export(inputs, to, tmp_path):
    if to == "onnx":
        pytest.importorskip("onnxruntime", reason="needs nearkin[export]")
    make, settings, batch = INPUTS[inputs]
    module = seeded(make)
    out = tmp_path / {"torch": "model.pt2", "onnx": "model.onnx"}[to]
    exported = export(nk.Embedder.wrap(module, dim=3, **settings), to, out)
    metadata = json.loads(exported.metadata_path.read_text())
    assert metadata["input"]["type"] == str(batch.dtype)[6:]
    assert metadata["input"]["shape"] == ["batch", *batch.shape[1:]]
    if inputs == "function":
        assert metadata["preprocessing"]["function"].startswith("shrunk, ")
    model = nk.Embedder.wrap(module, dim=3, **settings)
    with torch.no_grad():
        features = module.eval()((batch / 255 - 0.5) / 0.25 if inputs == "pixels" else batch)
        expected = F.normalize(model.head.maps[0](features), dim=1)
    np.testing.assert_allclose(load_exported(out, to)(batch.numpy()), expected.detach(), atol=1e-5)


def test_a_function_is_not_exported(tmp_path):
    with pytest.raises(ConfigError, match="export: this model is a function, of which there is no graph"):
        export(nk.Embedder.wrap(means, image_size=16), "torch", tmp_path / "model.pt2")


def test_commands_say_that_the_module_exists_in_python_only(tmp_path, capsys):
    folder = nk.Embedder.wrap(seeded(Net), (MEAN, STD, 16)).save(tmp_path / "model")
    with pytest.raises(RunError, match=r"module=Net\(...\)"):
        export_run(folder, "torch", tmp_path / "model.pt2")
    with pytest.raises(SystemExit) as exit:
        cli.main(["export", str(folder), "--to", "torch", "-o", str(tmp_path / "model.pt2")])
    assert exit.value.code == 2
    assert "Pass an instance: nearkin.load(" in capsys.readouterr().err
