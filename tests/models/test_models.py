"""Backbones, pooling, heads and the embedder, against torchvision, timm, golden values and identities."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import rows
from PIL import Image
from torch import nn

import nearkin as nk
from nearkin.config.recipe import ModelConfig
from nearkin.errors import ConfigError, DataError, RunError, UserError
from nearkin.models.backbones import BACKBONES, check_backbone
from nearkin.models.embedder import Embedder
from nearkin.models.heads import POOLINGS, Pool, gem

# Backbones without classifiers: published totals minus the last layer.
PARAMETERS = {
    "resnet50": 25_557_032 - 2_049_000,
    "googlenet": 6_624_904 - 1_025_000,
    "bn_inception": 11_295_240 - 1_025_000,
    "efficientnet_lite0": 4_652_008 - 1_281_000,
}


def embedder(**model):
    torch.manual_seed(0)
    side = model.pop("side", 64)
    return Embedder(ModelConfig(**{"dim": 12, "width": 4, "pool": "average", **model}), (3, side, side)).eval()


def pixels(count=2, side=64, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (count, 3, side, side), np.uint8))


@pytest.mark.parametrize("name", list(PARAMETERS))
def test_shapes_and_parameter_counts(name):
    model = embedder(backbone=name)
    assert sum(p.numel() for p in model.backbone.parameters()) == PARAMETERS[name]
    maps = model.backbone(torch.zeros(1, 3, 64, 64))
    channels = {"resnet50": 2048, "googlenet": 1024, "bn_inception": 1024, "efficientnet_lite0": 1280}[name]
    assert maps.shape == (1, channels, 2, 2)
    assert model.embed(pixels()).shape == (2, 12)
    levels = model.backbone.forward_levels(torch.zeros(1, 3, 64, 64))
    assert list(levels) == ["low", "mid", "high"]
    torch.testing.assert_close(levels["high"], maps)


def test_small_conv_matches_a_second_implementation():
    """In float64: a 5 x 5 convolution of stride 2, then twice two 3 x 3 and a max pool, with batch norm and ReLU."""
    model = embedder().double()
    state = model.backbone.state_dict()
    for name, value in state.items():  # statistics other than 0 and 1
        if "running" in name:
            value.copy_(torch.rand(value.shape) + 0.5)
    images = torch.randn(2, 3, 20, 24, dtype=torch.float64)

    def layer(x, index, stride, padding):
        x = nn.functional.conv2d(x, state[f"layers.{index}.weight"], stride=stride, padding=padding)
        norm = {
            n: state[f"layers.{index + 1}.{n}"][:, None, None]
            for n in ("weight", "bias", "running_mean", "running_var")
        }
        x = (x - norm["running_mean"]) / (norm["running_var"] + 1e-5).sqrt() * norm["weight"] + norm["bias"]
        return x.clamp(min=0)

    x = layer(images, 0, 2, 2)
    for index in (3, 10):
        x = layer(layer(x, index, 1, 1), index + 3, 1, 1)
        x = x.unfold(2, 2, 2).unfold(3, 2, 2).amax(dim=(4, 5))
    torch.testing.assert_close(model.backbone(images), x)


@pytest.mark.parametrize("name", ["resnet50", "googlenet"])
def test_torchvision_backbones_match_torchvision(name):
    """Same weights, same images: torchvision's own preprocessing and forward, up to its pooling."""
    from torchvision import models
    from torchvision.transforms.v2.functional import normalize

    ours = embedder(backbone=name)
    extra = {"aux_logits": False, "transform_input": True, "init_weights": False} if name == "googlenet" else {}
    reference = getattr(models, name)(**extra).eval()
    reference.load_state_dict(ours.backbone.state_dict(), strict=False)
    captured = {}
    reference.avgpool.register_forward_hook(lambda module, args, out: captured.update(pooled=out))
    images = pixels()
    with torch.no_grad():
        reference(normalize(images / 255, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
        torch.testing.assert_close(ours.features(images), captured["pooled"].flatten(1), rtol=1e-3, atol=1e-4)


def test_bn_inception_input_is_bgr_from_0_to_255_minus_the_mean():
    model = embedder(backbone="bn_inception")
    seen = {}
    model.backbone.register_forward_pre_hook(lambda module, args: seen.update(x=args[0]))
    images = pixels()
    with torch.no_grad():
        model.features(images)
    expected = images.float()[:, [2, 1, 0]] - torch.tensor([104.0, 117.0, 128.0]).view(3, 1, 1)
    torch.testing.assert_close(seen["x"], expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", ["resnet10t", "vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_timm_backbones_match_timm(name):
    """Average-pooled maps of a convolutional model, or a transformer's own vector, are timm's features."""
    import timm

    ours = embedder(backbone=name, dim=0, side=224)
    config = timm.get_pretrained_cfg(name)
    images = pixels(1, 224)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (config.mean, config.std))
    with torch.no_grad():
        expected = ours.backbone.network((images / 255 - mean) / std)  # num_classes = 0: pooled features
        torch.testing.assert_close(ours.features(images), expected, rtol=1e-4, atol=1e-4)


def test_an_unknown_backbone_is_rejected_with_a_suggestion():
    with pytest.raises(ConfigError, match="Did you mean 'resnet50'"):
        check_backbone("resnet_50")
    for name in BACKBONES:
        check_backbone(name)


def test_errors_name_the_weights_and_sizes_of_a_timm_model():
    pytest.importorskip("timm")
    with pytest.raises(ConfigError, match=r"no weights 'nonsense' for resnet18.*resnet18\.\w+"):
        check_backbone("resnet18.nonsense")
    check_backbone("resnet18.a1_in1k")
    with pytest.raises(ConfigError, match=r"does not accept images of 128 x 128 pixels .*--data\.image-size 224"):
        Embedder(ModelConfig(backbone="mixer_s32_224", dim=4), (3, 128, 128))


def test_poolings_match_the_golden_values():
    golden = rows.golden()["pooling"]
    maps = torch.tensor(golden["features"], dtype=torch.float64)
    names = {"average": "GAP", "maximum": "GMP", "average_maximum": "GAP_plus_GMP", "gem": "GeM_p3"}
    for name, key in names.items():
        expected = torch.tensor(golden[key], dtype=torch.float64)
        torch.testing.assert_close(POOLINGS[name](maps), expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(POOLINGS["grid"](maps), maps.flatten(1))


def test_gem_is_between_average_and_maximum_and_learns_its_exponent():
    maps = torch.rand(2, 3, 4, 4, dtype=torch.float64) * 100
    torch.testing.assert_close(Pool(ModelConfig(pool="gem", gem_p=1.0))(maps), maps.mean(dim=(2, 3)))
    largest = Pool(ModelConfig(pool="gem", gem_p=1e4))(maps.float())
    torch.testing.assert_close(largest, maps.amax(dim=(2, 3)).float(), rtol=1e-3, atol=0)
    pool = Pool(ModelConfig(pool="gem", learn_gem_p=True))
    small = (torch.rand(2, 3, 4, 4, dtype=torch.float64) + 0.1).requires_grad_()
    assert torch.autograd.gradcheck(gem, (small, torch.tensor(3.0, dtype=torch.float64)))
    pool(small.float()).sum().backward()
    assert pool.p.grad is not None
    assert pool.p.grad != 0


def test_each_of_three_levels_maps_to_a_third_of_the_embedding():
    model = embedder(feature_levels="low_mid_high")
    assert model.head.parts == (4, 8, 16)
    with torch.no_grad():
        before = model(pixels())
        model.head.maps[1].weight.zero_()
        model.head.maps[1].bias.zero_()
        after = model(pixels())
    assert torch.equal(before[:, :4], after[:, :4])
    assert torch.equal(before[:, 8:], after[:, 8:])
    assert (after[:, 4:8] == 0).all()
    with pytest.raises(ConfigError, match="multiple of 3"):
        ModelConfig(feature_levels="low_mid_high", dim=512)


def test_heads_without_layers_with_norms_and_residual():
    features = torch.randn(6, 16)
    assert torch.equal(embedder(dim=0).head(features), features)
    layer = embedder(dim=0, norm="layer").head(features)
    torch.testing.assert_close(layer.mean(1), torch.zeros(6), atol=1e-6, rtol=0)
    batch = embedder(dim=0, norm="batch").head.train()(features)
    torch.testing.assert_close(batch.mean(0), torch.zeros(16), atol=1e-6, rtol=0)
    residual = embedder(head="residual")
    assert torch.equal(residual.head(features), residual.head.maps[0](features))  # the correction starts at zero
    assert not list(embedder(dim=0, norm="batch").head.parameters())
    assert embedder(head="mlp").head(features).shape == (6, 12)


def test_dropout_acts_in_training_only():
    model = embedder(dropout=0.5, dim=0)
    features = torch.ones(4, 16)
    assert torch.equal(model.head.eval()(features), features)
    assert set(model.head.train()(features).unique().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_whitened_init_whitens_within_classes(norm):
    torch.manual_seed(1)
    labels = torch.arange(5).repeat_interleave(200)
    spread = torch.randn(16, 16, dtype=torch.float64)
    features = torch.randn(1000, 16, dtype=torch.float64) @ spread + 10 * torch.randn(5, 16)[labels]
    model = embedder(dim=16, norm=norm).double().train()  # as in training
    model.head.init_whitened(features, labels, shrinkage=1e-6)
    assert all(module.training for module in model.head.modules())
    out = model.eval().head(features)
    torch.testing.assert_close(out.mean(0), torch.zeros(16, dtype=torch.float64), atol=1e-4, rtol=0)
    residuals = torch.cat([out[labels == c] - out[labels == c].mean(0) for c in range(5)])
    covariance = residuals.T @ residuals / (1000 - 5)
    torch.testing.assert_close(covariance, torch.eye(16, dtype=torch.float64), atol=5e-3, rtol=0)
    with pytest.raises(ConfigError, match="linear or residual"):
        ModelConfig(head="mlp", head_init="whitened")


@pytest.mark.parametrize(("freeze_norm", "learn"), [("none", True), ("statistics", True), ("all", False)])
def test_batch_norm_statistics_and_parameters_freeze_separately(freeze_norm, learn):
    model = embedder(freeze_norm=freeze_norm).train()
    norm = model.backbone.layers[1]
    before = norm.running_mean.clone()
    model(pixels(8)).sum().backward()
    assert torch.equal(norm.running_mean, before) == (freeze_norm != "none")
    assert (norm.weight.grad is not None) == learn


def test_a_frozen_backbone_has_no_trainable_parameters_until_unfrozen():
    model = embedder(freeze_norm="all").train()
    model.freeze_backbone(True)
    assert {n.partition(".")[0] for n, p in model.named_parameters() if p.requires_grad} == {"head"}
    model.freeze_backbone(False)
    assert model.backbone.layers[0].weight.requires_grad
    assert not model.backbone.layers[1].weight.requires_grad


def test_a_frozen_backbone_updates_no_statistics_until_unfrozen():
    model = embedder().train()
    model.freeze_backbone(True)
    before = {name: value.clone() for name, value in model.backbone.state_dict().items()}
    model.train()(pixels(8))
    model.embed(pixels(2))  # restores training mode
    model(pixels(8))
    assert all(torch.equal(value, before[name]) for name, value in model.backbone.state_dict().items())
    assert model.head.training
    model.freeze_backbone(False)
    model(pixels(8))
    assert not torch.equal(model.backbone.layers[1].running_mean, before["layers.1.running_mean"])


@pytest.mark.parametrize("name", ["small_conv", "efficientnet_lite0", "bn_inception"])
def test_save_load_and_embed_are_bit_equal(name, tmp_path):
    model = embedder(backbone=name, pool="gem", learn_gem_p=True, feature_levels="low_mid_high")
    folder = model.save(tmp_path / "model")
    assert sorted(p.name for p in folder.iterdir()) == ["model.json", "model.safetensors"]
    again = nk.load(folder)
    assert torch.equal(again.embed(pixels(3)), model.embed(pixels(3)))
    assert again.fingerprint() == model.fingerprint()
    photos = [Image.fromarray(np.random.default_rng(i).integers(0, 255, (90, 70, 3), np.uint8)) for i in range(3)]
    paths = [tmp_path / f"{i}.png" for i in range(3)]
    for photo, path in zip(photos, paths, strict=True):
        photo.save(path)
    assert torch.equal(again.embed(paths), model.embed(photos))


def test_a_damaged_or_mismatched_saved_model_is_rejected(tmp_path):
    folder = embedder().save(tmp_path / "a")
    other = embedder(dim=24).save(tmp_path / "b")
    (folder / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    with pytest.raises(RunError, match="its checksum differs"):
        nk.load(folder)
    config = json.loads((other / "model.json").read_text())
    (other / "model.json").write_text(json.dumps({**config, "format": 99}))
    with pytest.raises(RunError, match="format 99"):
        nk.load(other)
    (other / "model.json").write_text("{")
    with pytest.raises(RunError, match="not a readable model"):
        nk.load(other)
    with pytest.raises(RunError, match="no trained model here"):
        nk.load(tmp_path)


@pytest.mark.parametrize("name", ["small_conv", "efficientnet_lite0"])
def test_half_precision_and_channels_last_agree(name):
    """Documented tolerances: 1e-6 for the memory format, 2e-2 (cosine 0.999) for half precision."""
    model = embedder(backbone=name)
    for m in model.modules():  # initial statistics would hide the error of half precision
        if isinstance(m, nn.BatchNorm2d):
            m.running_var.fill_(2.0)
    full = model.embed(pixels(4))
    torch.testing.assert_close(model.to(memory_format=torch.channels_last).embed(pixels(4)), full, atol=1e-6, rtol=0)
    half = model.half().embed(pixels(4))
    assert half.dtype == torch.float32
    assert (half - full).abs().max() < 2e-2
    assert (half * full).sum(1).min() > 0.999


def test_invalid_inputs_of_embed_are_rejected():
    model = embedder()
    with pytest.raises(DataError, match=r"expected bytes of shape \[N, 3, 64, 64\] or features of shape \[N, 16\]"):
        model.embed(torch.zeros(2, 3, 32, 32, dtype=torch.uint8))
    assert model.embed([]).shape == (0, 12)
    for path in ("photo.jpg", Path("photo.jpg")):
        with pytest.raises(DataError, match=r"embed\(\['photo\.jpg'\]\)"):
            model.embed(path)
    no_backbone = Embedder(ModelConfig(backbone="none", dim=4), (16, 1, 1))
    assert no_backbone.embed(torch.randn(5, 16)).shape == (5, 4)
    with pytest.raises(DataError, match="features"):
        no_backbone.embed(pixels())
    with pytest.raises(UserError, match="3 channels"):
        Embedder(ModelConfig(backbone="resnet50"), (1, 64, 64))


def test_embed_returns_unit_vectors_unless_disabled():
    torch.testing.assert_close(embedder().embed(pixels()).norm(dim=1), torch.ones(2))
    raw = embedder(normalize=False)
    with torch.no_grad():
        torch.testing.assert_close(raw.embed(pixels()), raw(pixels()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backbone": "none", "weights": "default"}, "model.weights: expected none without a backbone, got default"),
        ({"pool": "average", "gem_p": 4.0}, "model.gem_p: expected 3.0 without model.pool gem, got 4.0"),
        ({"pool": "average", "learn_gem_p": True}, "model.learn_gem_p: expected False without model.pool gem"),
    ],
)
def test_settings_that_a_model_cannot_use_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**settings)
