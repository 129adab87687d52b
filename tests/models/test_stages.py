"""Training the last stages on cached inputs, views of an image, pooling of tokens, joined features in one cache."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import nearkin as nk
from nearkin.config import ModelConfig
from nearkin.data import sources
from nearkin.data.splits import make_split
from nearkin.data.transforms import training_inputs
from nearkin.errors import ConfigError
from nearkin.models import frozen
from nearkin.models.backbones import make_backbone
from nearkin.models.embedder import Embedder
from nearkin.models.frozen import FrozenFeatures, StemMaps
from nearkin.training.factory import make_model

timm = pytest.importorskip("timm")
if not timm.is_model("test_vit4"):
    pytest.skip("timm is too old to have small networks for tests", allow_module_level=True)
SMALL_VIT = "test_vit"  # of timm, for tests: 64 dimensions, 6 blocks


def images(count=3, size=64):
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("size", [48, 224, 336])
@pytest.mark.parametrize("name", [SMALL_VIT, "test_vit2", "test_vit4"])
def test_a_vision_transformer_takes_any_size_and_equals_timm(name, size):
    torch.manual_seed(0)
    backbone = make_backbone(ModelConfig(backbone=name), 3).eval()
    peer = timm.create_model(name, num_classes=0, img_size=size).eval()
    # Rows of positions differ in number; those of timm are resampled by its own loader.
    state = backbone.network.state_dict()
    peer.load_state_dict(timm.models.vision_transformer.checkpoint_filter_fn(dict(state), peer))
    x = torch.rand(2, 3, size, size)
    torch.testing.assert_close(backbone(x)[:, :, 0, 0], peer(x), rtol=1e-4, atol=1e-5)


def test_tokens_are_pooled_as_named():
    torch.manual_seed(0)
    model = Embedder(ModelConfig(backbone=SMALL_VIT, pool="token_patches", dim=0), (3, 64, 64)).eval()
    x = images()
    tokens = model.backbone.network.forward_features((x.float() / 255 - model.mean) / model.std)
    prefix = model.backbone.network.num_prefix_tokens
    expected = torch.cat([tokens[:, 0], tokens[:, prefix:].mean(1)], dim=1)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
    for pool, part in (("token", expected[:, :64]), ("patches", expected[:, 64:])):
        one = Embedder(ModelConfig(backbone=SMALL_VIT, pool=pool, dim=0), (3, 64, 64)).eval()
        one.backbone.load_state_dict(model.backbone.state_dict())
        torch.testing.assert_close(one(x), part)


@pytest.mark.parametrize("backbone", ["small_conv", "resnet18"])
def test_pooling_of_tokens_needs_tokens(backbone):
    with pytest.raises(ConfigError, match=r"model\.pool.*Use average"):
        Embedder(ModelConfig(backbone=backbone, pool="token", dim=4), (3, 64, 64))


def test_two_views_are_the_mean_over_the_image_and_its_mirror_image():
    model = Embedder(ModelConfig(views=2, dim=8), (3, 64, 64)).eval()
    x = images()
    single = Embedder(ModelConfig(dim=8), (3, 64, 64)).eval()
    single.load_state_dict(model.state_dict())
    expected = (single.features(x) + single.features(x.flip(-1))) / 2
    torch.testing.assert_close(model.features(x), expected)
    torch.testing.assert_close(model(x), model(x.flip(-1)), rtol=1e-4, atol=1e-6)  # blind to mirroring
    with pytest.raises(ConfigError, match="views"):
        Embedder(ModelConfig(backbone="none", views=2, dim=4), (16, 1, 1))


def test_joined_backbones_and_views_share_the_files_of_single_ones(tiny_recipe, quiet, monkeypatch):
    table = sources.load(tiny_recipe.data, quiet)
    shape = (3, 64, 64)
    networks = "test_resnet", "test_efficientnet"
    monkeypatch.setattr("torch.manual_seed", lambda seed: None)
    torch.random.default_generator.manual_seed(0)
    joined = Embedder(ModelConfig(backbone=",".join(networks), pool="average", dim=0, views=2), shape)
    rgb = replace(table, images=_Colour(table.images, shape))
    together = FrozenFeatures(joined, rgb, reporter=quiet).add_to(rgb).features

    def fail(*args):
        raise AssertionError("features were computed again")

    monkeypatch.setattr(frozen._RowFile, "_compute", fail)
    for name, part, width in zip(networks, joined.backbone.parts, (0, 1), strict=True):
        single = Embedder(ModelConfig(backbone=name, pool="average", dim=0, views=2), shape)
        single.backbone.load_state_dict(part.state_dict())
        alone = FrozenFeatures(single, rgb, reporter=quiet).add_to(rgb).features
        columns = np.split(together, [joined.widths[0]], axis=1)[width]
        unit = alone / np.linalg.norm(alone, axis=1, keepdims=True)
        np.testing.assert_allclose(columns, unit, rtol=1e-5, atol=1e-7)


class _Colour:
    """Images in three channels at another size, without copying them."""

    def __init__(self, images, shape):
        self.images, self.shape, self.is_pixels = images, shape, True

    def __len__(self):
        return len(self.images)

    def read(self, rows):
        pixels = torch.nn.functional.interpolate(self.images.read(rows).float(), self.shape[1:])
        return pixels.expand(-1, 3, -1, -1).to(torch.uint8)

    def whole(self, row):
        return self.read(np.array([row]))[0]

    def take(self, rows):
        return _Colour(self.images.take(rows), self.shape)


@pytest.mark.parametrize(
    "backbone", ["test_efficientnet", "test_resnet", "test_convnext", SMALL_VIT, "tf_efficientnet_lite0"]
)
def test_stem_and_tail_are_the_whole_network(backbone):
    torch.manual_seed(0)
    model = Embedder(ModelConfig(backbone=backbone, freeze="stages", pool="average", dim=8), (3, 64, 64)).eval()
    x = images()
    with torch.no_grad():
        maps = model.stem_maps(x)
        assert maps.shape == (3, model.cut.size)
        torch.testing.assert_close(model(maps), model(x), rtol=1e-4, atol=1e-5)
        both = torch.cat([maps, model.stem_maps(x.flip(-1))], dim=1)
        torch.testing.assert_close(model(both), (model(x) + model(x.flip(-1))) / 2, rtol=1e-4, atol=1e-5)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    model(x).sum().backward()
    assert trained == {name for name, p in model.named_parameters() if p.grad is not None}
    assert any(name.startswith("backbone") for name in trained)
    total = sum(p.numel() for p in model.backbone.parameters())
    assert sum(p.numel() for n, p in model.named_parameters() if n in trained and n.startswith("backbone")) < total


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"backbone": "small_conv"}, "can be cut"),
        ({"backbone": "test_resnet", "tuned_stages": 4}, "1 to 3, got 4"),
        ({"backbone": "swin_tiny_patch4_window7_224"}, "stages"),
        ({"backbone": "test_resnet,test_efficientnet"}, "can be cut"),
    ],
)
def test_what_cannot_be_cut_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        Embedder(ModelConfig(freeze="stages", dim=4, **config), (3, 224, 224))
    with pytest.raises(ConfigError, match="tuned_stages"):
        ModelConfig(tuned_stages=3)


@pytest.fixture
def staged_recipe(photo_folder):
    recipe = nk.recipes.folder_default()
    model = ModelConfig(
        backbone="test_resnet",
        pool="average",
        dim=8,
        head_init="whitened",
        freeze="stages",
        freeze_norm="statistics",
        views=2,
    )
    data = replace(recipe.data, root=photo_folder, image_size=64, val_fraction=0.3)
    train = replace(recipe.train, epochs=2, batch_size=16)
    return replace(recipe, data=data, model=model, train=train)


def test_training_the_last_stages(staged_recipe, tmp_path, quiet, monkeypatch):
    run = nk.fit(staged_recipe, tmp_path / "a", reporter=quiet)
    model = nk.load(run.path)
    torch.manual_seed(staged_recipe.seed)
    start = make_model(staged_recipe, sources.load(staged_recipe.data, quiet), quiet)
    same = {k for k, v in model.state_dict().items() if torch.equal(v, start.state_dict()[k])}
    assert any("layer1" in name for name in same)
    if run.result["protocol"]["epoch"]:
        assert not any("layer4" in name and "conv" in name for name in same)

    # The maps are cached: a second run computes none, and its numbers are the same.
    def computed(self, part, missing, out):
        raise AssertionError("maps were computed again")

    files = frozen._RowFile._compute
    monkeypatch.setattr(frozen._RowFile, "_compute", computed)
    again = nk.fit(staged_recipe, tmp_path / "b", reporter=quiet)
    monkeypatch.setattr(frozen._RowFile, "_compute", files)
    assert again.result["test"] == run.result["test"]
    assert again.result["val_R@1"] == run.result["val_R@1"]
    # Embedding whole images gives what the run measured from its cached maps, up to half precision.
    table = sources.load(staged_recipe.data, quiet)
    split, _ = make_split(table, staged_recipe.data)
    maps = StemMaps(model, table, reporter=quiet).add_to(split.val)
    torch.testing.assert_close(model.embed(split.val.images), model.embed(maps.features), rtol=0, atol=5e-3)


def test_a_batch_has_one_view_of_each_image_drawn_by_step(staged_recipe, quiet):
    table = sources.load(staged_recipe.data, quiet)
    model = make_model(staged_recipe, table, quiet)
    maps = StemMaps(model, table, reporter=quiet).add_to(table)
    image, mirrored = np.split(maps.features, 2, axis=1)
    rows = np.arange(20)
    plan = [rows, rows]
    first, second = (batch.numpy() for batch in training_inputs(maps, plan, staged_recipe, epoch=0))
    is_image = [(first[r] == image[r]).all() for r in rows]
    assert all(seen or (first[r] == mirrored[r]).all() for r, seen in enumerate(is_image))
    assert 2 < sum(is_image) < 18
    assert not np.array_equal(first, second)
    [resumed] = training_inputs(maps, plan, staged_recipe, epoch=0, start=1)
    np.testing.assert_array_equal(resumed.numpy(), second)
    [share] = training_inputs(maps, [rows[5:10]], staged_recipe, epoch=0, first=5, batch_size=20)
    np.testing.assert_array_equal(share.numpy(), first[5:10])


def test_maps_that_would_fill_the_memory_are_refused(staged_recipe, quiet, monkeypatch):
    monkeypatch.setattr(frozen, "_MAX_MAPS", 1000)
    table = sources.load(staged_recipe.data, quiet)
    maps = StemMaps(make_model(staged_recipe, table, quiet), table, reporter=quiet)
    with pytest.raises(nk.UserError, match="tuned-stages"):
        maps.add_to(table)
