"""Low-rank adaptation, layer-wise learning rates, and the networks of the recipes for GPUs."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import nearkin as nk
from nearkin.config import ModelConfig, TrainConfig
from nearkin.errors import ConfigError
from nearkin.models.embedder import Embedder
from nearkin.models.lora import merge_lora
from nearkin.training import recipes
from nearkin.training.step import make_optimizer

timm = pytest.importorskip("timm")
if not timm.is_model("test_vit4"):
    pytest.skip("timm is too old to have small networks for tests", allow_module_level=True)


def images(size=64):
    return torch.randint(0, 256, (3, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def adapted(rank=2):
    torch.manual_seed(0)
    return Embedder(ModelConfig(backbone="test_vit", dim=8, lora_rank=rank), (3, 64, 64))


def test_it_starts_from_the_plain_network_and_trains_updates_and_head_only():
    model = adapted()
    plain = Embedder(ModelConfig(backbone="test_vit", dim=8), (3, 64, 64))
    state = {name.replace(".parametrizations.weight.original", ".weight"): v for name, v in model.state_dict().items()}
    plain.load_state_dict({name: v for name, v in state.items() if ".parametrizations." not in name})
    torch.testing.assert_close(model.eval()(images()), plain.eval()(images()))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {
        name for name in dict(model.named_parameters()) if name.endswith((".a", ".b")) or "head." in name
    }
    model.freeze_backbone(True)
    assert not any(p.requires_grad for p in model.backbone.parameters())
    model.freeze_backbone(False)
    assert trained == {name for name, p in model.named_parameters() if p.requires_grad}


def test_the_update_is_the_product_of_two_matrices_and_merging_changes_nothing():
    model = adapted().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(".b"):
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))) / 10)
    layer = model.backbone.network.blocks[0].attn.qkv
    update, original = layer.parametrizations.weight[0], layer.parametrizations.weight.original
    torch.testing.assert_close(layer.weight, original + update.b @ update.a)
    before, merged = model(images()), copy.deepcopy(model)
    merge_lora(merged)
    torch.testing.assert_close(merged(images()), before)
    assert not any("parametrizations" in name for name in merged.state_dict())


@pytest.mark.parametrize("backbone", ["test_resnet", "small_conv"])
def test_networks_without_attention_are_refused(backbone):
    with pytest.raises(ConfigError, match="no attention layers"):
        Embedder(ModelConfig(backbone=backbone, dim=4, lora_rank=2), (3, 64, 64))
    with pytest.raises(ConfigError, match="lora_rank"):
        ModelConfig(backbone=backbone, freeze="backbone", lora_rank=2)


@pytest.fixture
def lora_recipe(photo_folder):
    recipe = recipes.for_gpu("dinov2_small", lora=True)
    data = replace(recipe.data, root=photo_folder, image_size=64, val_fraction=0.3)
    model = replace(recipe.model, backbone="test_vit", weights="none", dim=8, lora_rank=2)
    train = replace(recipe.train, epochs=3, batch_size=16, micro_batch_size=8, precision="fp32")
    return replace(recipe, data=data, model=model, train=train)


def test_an_interrupted_run_resumes_exactly(lora_recipe, tmp_path, quiet):
    whole = nk.fit(lora_recipe, tmp_path / "whole", reporter=quiet)
    with pytest.raises(nk.UserError):
        nk.fit(lora_recipe, tmp_path / "parts", reporter=quiet, on_epoch_end=lambda epoch, metric: epoch == 2)
    resumed = nk.fit(lora_recipe, tmp_path / "parts", reporter=quiet)
    assert resumed.result["test"] == whole.result["test"]
    a, b = nk.load(whole.path).state_dict(), nk.load(resumed.path).state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
    folder = nk.load(whole.path).save(tmp_path / "saved")
    assert torch.equal(nk.load(folder).embed(images()), nk.load(whole.path).embed(images()))


@pytest.mark.slow
def test_an_exported_file_has_merged_weights(lora_recipe, tmp_path, quiet, capsys):
    from nearkin import cli

    run = nk.fit(lora_recipe, tmp_path / "runs", reporter=quiet)
    cli.main(["export", str(run.path), "--to", "onnx", "-o", str(tmp_path / "model.onnx")])
    onnx = pytest.importorskip("onnx")
    names = {tensor.name for tensor in onnx.load(tmp_path / "model.onnx").graph.initializer}
    assert not any("parametrizations" in name for name in names)
    session = pytest.importorskip("onnxruntime").InferenceSession(tmp_path / "model.onnx")
    [entry] = session.get_inputs()
    [vectors, *_] = session.run(None, {entry.name: images().numpy()})
    np.testing.assert_allclose(vectors, nk.load(run.path).embed(images()).numpy(), atol=1e-5)


@pytest.mark.parametrize("backbone", ["test_vit", "test_efficientnet", "test_convnext"])
def test_layer_decay_gives_each_layer_the_rate_of_its_depth(backbone):
    model = Embedder(ModelConfig(backbone=backbone, pool="average", dim=8), (3, 64, 64))
    config = TrainConfig(lr=1e-3, head_lr=5e-3, layer_decay=0.5, weight_decay=0.1)
    optimizer = make_optimizer(model, nk.Objective("contrastive"), config)
    groups = optimizer.param_groups
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    assert len(rates) == sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    named = dict(model.named_parameters())
    assert rates[id(named["head.maps.0.weight"])] == 5e-3
    backbone_rates = sorted({rates[id(p)] for name, p in named.items() if name.startswith("backbone")}, reverse=True)
    assert backbone_rates[0] == 1e-3
    np.testing.assert_allclose(backbone_rates, [1e-3 / 2**k for k in range(len(backbone_rates))])
    if backbone == "test_vit":
        first = [rates[id(named[f"backbone.network.blocks.{k}.mlp.fc1.weight"])] for k in range(2)]
        assert first[1] == pytest.approx(2 * first[0])
    assert all(group["weight_decay"] == 0 for group in groups if group["params"] and group["params"][0].ndim <= 1)
    with pytest.raises(ConfigError, match="layer_decay"):
        make_optimizer(Embedder(ModelConfig(dim=8), (3, 64, 64)), nk.Objective("contrastive"), config)


NETWORKS = [name for name, _, _ in recipes._FOR_GPU.values() if name.startswith("vit")]


@pytest.mark.slow
@pytest.mark.parametrize("size", [224, 336])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_the_recipes_build_load_a_file_and_equal_timm(name, size, tmp_path):
    architecture = name.partition(".")[0]
    torch.manual_seed(0)
    peer = timm.create_model(architecture, num_classes=0, dynamic_img_size=True).eval()
    with torch.no_grad():
        for p in peer.parameters():
            p.add_(torch.randn_like(p) * 0.01)
    save_file({k: v.contiguous() for k, v in peer.state_dict().items()}, tmp_path / "weights.safetensors")
    config = ModelConfig(backbone=name, weights=str(tmp_path / "weights.safetensors"), pool="average", dim=0)
    model = Embedder(config, (3, size, size)).eval()
    x = images(size)[:1]
    with torch.no_grad():
        expected = peer((x.float() / 255 - model.mean) / model.std)
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    settings = timm.get_pretrained_cfg(name)
    torch.testing.assert_close(model.mean.flatten(), torch.tensor(settings.mean))
    torch.testing.assert_close(model.std.flatten(), torch.tensor(settings.std))
