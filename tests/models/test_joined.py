"""Several backbones in one model: their features side by side, each of length 1."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.paths import ROOT
from PIL import Image

import nearkin as nk
from nearkin.config import ModelConfig
from nearkin.errors import ConfigError

NAMES = ("efficientnet_lite0", "bn_inception")  # of other channel orders and pixel ranges
CUB = ROOT.parent / "shared" / "data" / "CUB_200_2011"


def embedder(backbone: str, **settings) -> nk.Embedder:
    torch.manual_seed(0)
    return nk.Embedder(ModelConfig(backbone=backbone, **({"pool": "average", "dim": 0} | settings)), (3, 64, 64)).eval()


def photos(count: int = 3) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def joined():
    """A joined model, and its networks alone."""
    model, single = embedder(",".join(NAMES)), [embedder(name) for name in NAMES]
    for part, other in zip(model.backbone.parts, single, strict=True):
        part.load_state_dict(other.backbone.state_dict(), strict=True)
    return model, single


def test_the_features_are_those_of_each_network_scaled_to_length_1(joined):
    model, single = joined
    expected = [torch.nn.functional.normalize(other.embed_features(photos()), dim=1) for other in single]
    assert model.num_features == model.dim == 1280 + 1024
    torch.testing.assert_close(model.embed_features(photos()), torch.cat(expected, 1), rtol=1e-5, atol=1e-6)


def test_it_is_saved_loaded_and_indexed(joined, tmp_path):
    model = joined[0]
    loaded = nk.load(model.save(tmp_path / "model"))
    assert torch.equal(loaded.embed(photos()), model.embed(photos()))
    assert loaded.fingerprint() == model.fingerprint()
    paths = []
    for row, pixels in enumerate(photos(6)):
        paths.append(tmp_path / f"{row}.png")
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(paths[-1])
    index = nk.Index.build(loaded, paths, list("aabbcc"))
    hits = index.search(paths[3], k=1)
    assert hits[0].id == str(paths[3])


@pytest.mark.slow
def test_it_is_trained_on_frozen_features_and_exported(photo_folder, tmp_path, quiet):
    pytest.importorskip("onnxscript", reason="needs nearkin[export]")
    import onnxruntime

    from nearkin.deploy import export_run

    recipe = nk.recipes.folder_default()
    recipe = replace(
        recipe,
        data=replace(recipe.data, root=photo_folder, image_size=64),
        model=replace(recipe.model, backbone="efficientnet_lite0,efficientnet_lite1", dim=16),
        train=replace(recipe.train, epochs=1, batch_size=8),
    )
    run = nk.fit(recipe, tmp_path, reporter=quiet)
    model = run.embedder()
    assert model.num_features == 2560
    export_run(run.path, "onnx", tmp_path / "x.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "x.onnx")
    [vectors] = session.run(None, {session.get_inputs()[0].name: photos().numpy()})
    np.testing.assert_allclose(vectors, model.embed(photos()).numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backbone": "resnet50,"}, "expected different names, separated by commas, got 'resnet50,'"),
        ({"backbone": "resnet50,resnet50"}, "expected different names"),
        ({"backbone": "resnet50,none"}, "expected different names"),
        ({"backbone": "resnet50,small_conv"}, "small_conv has no pixel normalisation of its own"),
        ({"backbone": "resnet50,googlenet", "feature_levels": "all"}, "only their last feature maps"),
        ({"backbone": "efficientnet_lite0,efficientnet_lite1", "weights": "x.pth"}, "for 2 backbones"),
    ],
)
def test_what_cannot_be_joined_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        embedder(**settings)
