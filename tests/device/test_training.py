"""The network and whole runs on the second device, compared with the CPU and resumed from it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.devices import DEVICE, assert_agree

import nearkin as nk
from nearkin.config.recipe import ComponentConfig, ModelConfig, Recipe
from nearkin.errors import ConfigError
from nearkin.models.embedder import Embedder
from nearkin.training import recipes
from nearkin.training.device import choose_device, end_step
from nearkin.training.distributed import fork_rng
from nearkin.training.run import Run
from nearkin.training.step import update_ema

CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # networks run in float32


def tiny(root: Path, **train: object) -> Recipe:
    """Return a recipe of two epochs on noisy images of ten classes, without random draws."""
    recipe = recipes.from_scratch()
    return replace(
        recipe,
        data=replace(recipe.data, root=root, image_size=16, val_fraction=0.2, augment="none"),
        model=replace(recipe.model, width=4, dim=8),
        loss=ComponentConfig("proxy_anchor"),
        train=replace(recipe.train, epochs=2, batch_size=8, samples_per_class=2, **train),
    )


def losses(run: Run) -> list[float]:
    return [event["loss"] for event in run.events() if event["event"] == "epoch" and event["epoch"]]


def weights(run: Run) -> dict[str, torch.Tensor]:
    return torch.load(run.path / "last.pt", weights_only=True)["model"]


def assert_same_run(actual: Run, expected: Run) -> None:
    assert losses(actual) == pytest.approx(losses(expected), rel=1e-3)
    assert actual.result["val_R@1"] == pytest.approx(expected.result["val_R@1"], abs=0.1)  # two of 24 images
    for name, value in weights(expected).items():
        saved = weights(actual)[name]
        assert saved.device.type == "cpu"
        if name.endswith("running_var"):  # of the biased variance on XLA
            torch.testing.assert_close(saved, value, rtol=0.2, atol=1e-3)
        else:
            torch.testing.assert_close(saved, value, rtol=1e-2, atol=1e-3, msg=lambda m, name=name: f"{name}: {m}")


def images(count: int = 6) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, 16, 16), generator=g, dtype=torch.uint8)


@pytest.mark.parametrize("head", ["linear", "residual", "mlp"])
def test_an_embedder(head):
    torch.manual_seed(0)
    expected = Embedder(ModelConfig(backbone="small_conv", width=4, dim=8, head=head), (3, 16, 16))
    actual = copy.deepcopy(expected).to(DEVICE)
    for given in (images(), images().to(DEVICE)):
        vectors = actual.embed(given, batch_size=4)
        assert vectors.device.type == "cpu"
        torch.testing.assert_close(vectors, expected.embed(images(), batch_size=4), **CLOSE)
    torch.testing.assert_close(actual.embed_features(images()), expected.embed_features(images()), **CLOSE)
    # Last, because XLA updates the running variance of a batch norm with the biased variance of the batch.
    out, device_out = expected(images()), actual(images().to(DEVICE))
    assert_agree(device_out, out, "forward", **CLOSE)
    out.square().sum().backward()
    device_out.square().sum().backward()
    for (name, p), q in zip(expected.named_parameters(), actual.parameters(), strict=True):
        if p.grad is not None:
            assert_agree(q.grad, p.grad, f"the gradient of {name}", rtol=1e-3, atol=1e-3)


def test_a_model_saved_from_the_device_is_loaded_on_the_cpu(tmp_path):
    model = Embedder(ModelConfig(backbone="small_conv", width=4, dim=8), (3, 16, 16)).to(DEVICE)
    loaded = nk.load(model.save(tmp_path / "model"))
    torch.testing.assert_close(loaded.embed(images()), model.embed(images()), **CLOSE)


def test_the_moving_average_of_the_weights():
    config = ModelConfig(backbone="small_conv", width=4, dim=8)
    average, model = Embedder(config, (3, 16, 16)), Embedder(config, (3, 16, 16))
    device_average, device_model = copy.deepcopy(average).to(DEVICE), copy.deepcopy(model).to(DEVICE)
    for step in (0, 50):
        update_ema(average, model, 0.9, step)
        update_ema(device_average, device_model, 0.9, step)
    for (name, value), other in zip(average.state_dict().items(), device_average.state_dict().values(), strict=True):
        assert_agree(other, value, name, **CLOSE)


@pytest.mark.parametrize(
    "settings",
    [{}, {"ema": 0.9}, {"micro_batch_size": 4}, {"clip_norm": 0.1}],
    ids=str,
)
def test_a_run_ends_as_on_the_cpu(photo_folder, tmp_path, quiet, settings):
    recipe = tiny(photo_folder, **settings)
    if "micro_batch_size" in settings:  # no batch norms in the trained part; XLA cannot train through frozen ones
        recipe = replace(recipe, model=replace(recipe.model, freeze="backbone"))
    expected = nk.fit(recipe, tmp_path / "cpu", device="cpu", reporter=quiet)
    actual = nk.fit(recipe, tmp_path / "device", device=str(DEVICE), reporter=quiet)
    assert_same_run(actual, expected)


@pytest.mark.parametrize(("first", "second"), [("cpu", str(DEVICE)), (str(DEVICE), "cpu")])
def test_a_run_started_on_one_device_resumes_on_the_other(photo_folder, tmp_path, quiet, first, second):
    recipe = replace(tiny(photo_folder, ema=0.9), loss=ComponentConfig("contrastive"), memory=20)
    expected = nk.fit(recipe, tmp_path / "whole", device="cpu", reporter=quiet)
    stopped = expected.path.name
    calls = []
    with pytest.raises(KeyboardInterrupt):
        nk.fit(recipe, tmp_path / "parts", device=first, reporter=quiet, on_epoch_end=lambda *_: stop_in_second(calls))
    assert torch.load(tmp_path / "parts" / stopped / "last.pt", weights_only=True)["epoch"] == 1
    assert_same_run(nk.fit(recipe, tmp_path / "parts", device=second, reporter=quiet), expected)


def stop_in_second(calls: list[int]) -> bool:
    calls.append(1)
    if len(calls) == 2:
        raise KeyboardInterrupt
    return False


def test_glyphs(tmp_path, quiet):
    """A third of an epoch of the recipe of `nearkin demo`, with a smaller network."""
    recipe = nk.recipes.glyphs_small()
    recipe = replace(
        recipe,
        model=replace(recipe.model, width=4, dim=16),
        train=replace(recipe.train, epochs=1, steps=15),
    )
    expected = nk.fit(recipe, tmp_path / "cpu", device="cpu", final=False, reporter=quiet)
    actual = nk.fit(recipe, tmp_path / "device", device=str(DEVICE), final=False, reporter=quiet)
    assert losses(actual) == pytest.approx(losses(expected), rel=0.02)
    assert actual.result["val_R@1"] == pytest.approx(expected.result["val_R@1"], abs=0.03)


def test_a_whitened_head_on_frozen_features(photo_folder, tmp_path, quiet):
    recipe = tiny(photo_folder)
    recipe = replace(recipe, model=replace(recipe.model, head="linear", head_init="whitened", freeze="backbone"))
    expected = nk.fit(recipe, tmp_path / "cpu", device="cpu", reporter=quiet)
    actual = nk.fit(recipe, tmp_path / "device", device=str(DEVICE), reporter=quiet)
    assert losses(actual) == pytest.approx(losses(expected), rel=1e-2)


def test_a_seed_repeats_the_random_numbers_of_the_device():
    drawn = []
    for key in ((1, 2), (1, 2), (1, 3)):
        with fork_rng(*key, device=DEVICE):
            drawn.append(torch.nn.functional.dropout(torch.ones(64, device=DEVICE), 0.5).cpu())
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_half_precision_is_refused_where_it_is_not_supported(photo_folder, tmp_path, quiet):
    if DEVICE.type == "cuda":
        pytest.skip("CUDA has half precision")
    with pytest.raises(ConfigError, match=f"fp16 needs a CUDA device, this is {DEVICE.type}"):
        nk.fit(tiny(photo_folder, precision="fp16"), tmp_path, device=str(DEVICE), reporter=quiet)


def test_the_end_of_a_step_keeps_the_graph_from_growing():
    if DEVICE.type != "xla":
        pytest.skip("only XLA defers operations")
    assert compilations(end_step) == 0
    assert compilations(lambda device: None) >= 3, "end_step is no longer needed"


def compilations(after_step: Callable[[torch.device], None]) -> int:
    """Return how often three steps of a training loop compile, after three that may."""
    metrics = pytest.importorskip("torch_xla.debug.metrics")
    model = torch.nn.Linear(8, 8).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8, device=DEVICE)).square().sum()
        loss.backward()
        float(loss.detach())
        optimizer.step()
        after_step(DEVICE)
        compiled.append(metrics.metric_data("CompileTime")[0])
    return compiled[5] - compiled[2]


def test_the_name_of_the_device_is_accepted_and_others_are_refused():
    assert choose_device(DEVICE.type).type == DEVICE.type
    with pytest.raises(ConfigError, match="cannot be used here"):
        choose_device(f"{DEVICE.type}:99")
