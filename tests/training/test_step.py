"""One step: micro-batches, the running mean of weights, early stopping, and numbers that are not finite."""

import json
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

import nearkin as nk
from nearkin.config.recipe import ComponentConfig, ModelConfig, TrainConfig
from nearkin.errors import ConfigError, MissingExtraError, TrainingFailedError
from nearkin.losses.objective import Objective
from nearkin.losses.registry import LOSSES
from nearkin.models.embedder import Embedder
from nearkin.training.step import NonFiniteError, backward, optimizer_step, update_ema

SCALER = torch.amp.GradScaler("cpu", enabled=False)


def parts(loss="proxy_anchor", **model):
    torch.manual_seed(0)
    embedder = Embedder(ModelConfig(width=4, dim=8, freeze_norm="statistics", **model), (3, 16, 16)).double().train()
    objective = Objective(loss, num_classes=4, dim=8).double()
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (14, 3, 16, 16), np.uint8))
    return embedder, objective, images, torch.arange(14) % 4


def gradients(loss, micro, **model):
    embedder, objective, images, labels = parts(loss, **model)
    hyper = TrainConfig(batch_size=14, samples_per_class=0, micro_batch_size=micro)
    value = backward(embedder, objective, images, labels, hyper, SCALER, (0, 1, 2))
    named = [*embedder.named_parameters(), *objective.named_parameters()]
    return value, {name: p.grad for name, p in named if p.grad is not None}


# pce takes class probabilities beside the batch, which training does not have.
@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "pce"])
def test_micro_batches_give_the_gradient_of_the_whole_batch(loss):
    value, whole = gradients(loss, 0)
    pieced_value, pieced = gradients(loss, 4)
    assert pieced_value == pytest.approx(value, rel=1e-12)
    assert whole.keys() == pieced.keys()
    for name, grad in whole.items():
        torch.testing.assert_close(pieced[name], grad, rtol=1e-9, atol=1e-12)


def test_micro_batches_draw_the_same_dropout_in_both_passes():
    """The gradient of the second pass must belong to the embeddings of the first: checked by finite differences."""
    embedder, objective, images, labels = parts("contrastive", dropout=0.5)
    hyper = TrainConfig(batch_size=14, samples_per_class=0, micro_batch_size=5)

    def loss():
        return backward(embedder, objective, images, labels, hyper, SCALER, (0, 1, 2))

    loss()
    weight = embedder.head.maps[0].weight
    grad, step = weight.grad.clone(), 1e-6
    place = np.unravel_index(int(grad.abs().argmax()), grad.shape)
    weight.data[place] += step
    above = loss()
    weight.data[place] -= 2 * step
    below = loss()
    assert (above - below) / (2 * step) == pytest.approx(float(grad[place]), rel=1e-4)


def test_micro_batches_with_counting_batch_norms_are_refused(tiny_recipe, tmp_path, quiet):
    wrong = replace(tiny_recipe, train=replace(tiny_recipe.train, micro_batch_size=4))
    with pytest.raises(ConfigError, match=r"--model\.freeze-norm statistics"):
        nk.fit(wrong, tmp_path, reporter=quiet)


@pytest.mark.parametrize(
    ("model", "train", "loss"),
    [
        ({"freeze": "backbone"}, {}, "triplet"),
        ({}, {"frozen_epochs": 1}, "triplet"),
        ({"freeze_norm": "statistics"}, {"frozen_epochs": 1, "micro_batch_size": 4}, "proxy_anchor"),
    ],
)
def test_settings_that_leave_nothing_to_learn_are_refused(tiny_recipe, tmp_path, quiet, model, train, loss):
    still = replace(
        tiny_recipe,
        model=replace(tiny_recipe.model, dim=0, **model),
        train=replace(tiny_recipe.train, **train),
        loss=ComponentConfig(loss),
    )
    with pytest.raises(ConfigError, match=r"nothing is left to train.*--model\.dim 128"):
        nk.fit(still, tmp_path, reporter=quiet)


def test_proxies_may_learn_before_a_backbone_without_a_head(tiny_recipe, tmp_path, quiet):
    model, train = replace(tiny_recipe.model, dim=0), replace(tiny_recipe.train, epochs=2, frozen_epochs=1)
    assert nk.fit(replace(tiny_recipe, model=model, train=train), tmp_path, reporter=quiet).result["test"]


def test_half_precision_without_a_gpu_is_refused(tiny_recipe, tmp_path, quiet):
    for precision in ("fp16", "bf16"):
        wrong = replace(tiny_recipe, train=replace(tiny_recipe.train, precision=precision))
        with pytest.raises(ConfigError, match="needs a CUDA device"):
            nk.fit(wrong, tmp_path, reporter=quiet, device="cpu")


def test_double_precision_reaches_every_weight_and_changes_the_loss_by_rounding_only(tiny_recipe, tmp_path, quiet):
    losses = {}
    for precision in ("fp32", "fp64"):
        config = replace(tiny_recipe.train, precision=precision, epochs=1)
        run = nk.fit(replace(tiny_recipe, train=config), tmp_path, reporter=quiet, device="cpu")
        losses[precision] = next(e["loss"] for e in run.events() if e["event"] == "epoch" and e["epoch"] == 1)
        saved = torch.load(run.path / "last.pt", weights_only=True)["model"]
        kinds = {v.dtype for v in saved.values() if v.is_floating_point()}
        assert kinds == {torch.float64 if precision == "fp64" else torch.float32}
    assert losses["fp64"] != losses["fp32"]
    assert losses["fp64"] == pytest.approx(losses["fp32"], rel=1e-4)


def test_the_running_mean_follows_by_its_formula():
    model = Embedder(ModelConfig(width=4, dim=8), (3, 16, 16))
    average = Embedder(ModelConfig(width=4, dim=8), (3, 16, 16))
    before = {k: v.clone() for k, v in average.state_dict().items()}
    model.backbone.layers[1].num_batches_tracked.fill_(7)
    update_ema(average, model, 0.9, step=10_000)
    for name, value in average.state_dict().items():
        new = model.state_dict()[name]
        want = 0.9 * before[name] + 0.1 * new if value.is_floating_point() else new
        torch.testing.assert_close(value, want)
    update_ema(average, model, 0.9, step=0)  # the first step counts for nine tenths
    torch.testing.assert_close(average.head.maps[0].weight, model.head.maps[0].weight, rtol=0.2, atol=0.05)


def test_a_run_with_a_running_mean_resumes_exactly_and_keeps_the_mean(tiny_recipe, tmp_path, quiet):
    recipe = replace(tiny_recipe, train=replace(tiny_recipe.train, ema=0.9))
    whole = nk.fit(recipe, tmp_path / "a", reporter=quiet)
    stopped = nk.fit(recipe, tmp_path / "b", reporter=quiet)
    state = torch.load(stopped.path / "last.pt", weights_only=True)
    assert not torch.equal(state["ema_model"]["head.maps.0.weight"], state["model"]["head.maps.0.weight"])
    (stopped.path / "result.json").unlink()
    (stopped.path / "last.pt").unlink()
    (stopped.path / "previous.pt").rename(stopped.path / "last.pt")  # an epoch earlier
    again = nk.fit(recipe, tmp_path / "b", reporter=quiet)
    assert again.result["test"] == whole.result["test"]
    assert (again.path / "events.jsonl").read_text() == (whole.path / "events.jsonl").read_text()


def test_patience_stops_a_run_that_gets_no_better(tiny_recipe, tmp_path, quiet):
    still = replace(tiny_recipe.train, epochs=9, lr=1e-12, class_lr=1e-12, patience=2, lr_schedule="constant")
    run = nk.fit(replace(tiny_recipe, train=still), tmp_path, reporter=quiet)
    epochs = [event["epoch"] for event in run.events() if event["event"] == "epoch"]
    best = run.result["protocol"]["epoch"]
    assert epochs[-1] == best + 2 < 9


def test_an_input_that_overflows_ends_as_failed_with_its_row_named(tmp_path, quiet):
    features = np.random.default_rng(0).normal(size=(120, 6)).astype(np.float32)
    features[37] = 3e38  # finite as stored, not when it is squared
    np.savez(tmp_path / "f.npz", features=features, labels=np.arange(120) % 12)
    recipe = nk.recipes.features_default()
    recipe = replace(
        recipe,
        data=replace(recipe.data, root=tmp_path / "f.npz", split="half", val_fraction=0.0),
        model=replace(recipe.model, dim=4, head_init="random", norm="layer"),
        train=replace(recipe.train, epochs=1, batch_size=20),
    )
    table_row = 37
    with pytest.raises(TrainingFailedError, match=rf"the embeddings became NaN or infinite .* row {table_row}\b"):
        nk.fit(recipe, tmp_path / "runs", reporter=quiet)
    [path] = (tmp_path / "runs").iterdir()
    failed = json.loads((path / "failed.json").read_text())
    assert failed["files"] == [f"row {table_row}"]
    assert (failed["epoch"], failed["tensor"]) == (1, "the embeddings")
    assert not (path / "result.json").exists()


def test_a_loss_that_is_not_finite_names_the_files_of_its_batch(tiny_recipe, tmp_path, quiet):
    wild = replace(tiny_recipe, train=replace(tiny_recipe.train, lr=1e30, clip_norm=0.0, optimizer="sgd"))
    with pytest.raises(TrainingFailedError, match=r"First image of the batch: .*\.png"):
        nk.fit(wild, tmp_path, reporter=quiet)


def test_a_gradient_that_is_not_finite_is_named():
    embedder, objective, images, labels = parts()
    hyper = TrainConfig(batch_size=14, samples_per_class=0)
    optimizer = torch.optim.SGD(embedder.parameters(), lr=0.1)
    backward(embedder, objective, images, labels, hyper, SCALER, (0, 0, 0))
    embedder.head.maps[0].weight.grad[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"the gradient of head\.maps\.0\.weight"):
        optimizer_step(embedder, objective, optimizer, hyper, SCALER)
    embedder.head.maps[0].weight.grad[0, 0] = 0.0
    objective.proxies.grad[1, 1] = float("inf")
    with pytest.raises(NonFiniteError, match="the objective's proxies"):
        optimizer_step(embedder, objective, optimizer, hyper, SCALER)


@pytest.mark.parametrize("lr_schedule", ["constant", "one_cycle"])
def test_a_collapsing_run_raises_the_alarm(tiny_recipe, tmp_path, capsys, lr_schedule):
    """A learning rate a hundred times too high."""
    from nearkin._common.progress import Reporter

    wild = replace(tiny_recipe.train, lr=100 * tiny_recipe.train.lr, epochs=4, lr_schedule=lr_schedule, clip_norm=0.0)
    recipe = replace(tiny_recipe, loss=ComponentConfig("contrastive"), train=wild)
    run = nk.fit(recipe, tmp_path, reporter=Reporter())
    raised = [event for event in run.events() if event["event"] == "alarm"]
    assert raised
    assert "ALARM at epoch" in capsys.readouterr().err


def test_trackers_get_the_numbers_of_every_epoch(tiny_recipe, tmp_path, quiet, monkeypatch):
    board = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = nk.fit(tiny_recipe, tmp_path, reporter=quiet, trackers=("tensorboard",))
    events = board.EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    seen = [scalar.value for scalar in events.Scalars("val/R@1")]
    assert seen == pytest.approx([e["val"]["R@1"] for e in run.events() if e["event"] == "epoch"])
    with pytest.raises(ConfigError, match="Did you mean 'wandb'"):
        nk.fit(tiny_recipe, tmp_path / "other", reporter=quiet, trackers=("wandbb",))


def test_a_tracker_that_is_not_installed_names_its_extra(tiny_recipe, tmp_path, quiet, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'nearkin\[tensorboard\]'"):
        nk.fit(tiny_recipe, tmp_path, reporter=quiet, trackers=("tensorboard",))


@pytest.mark.slow
def test_wandb_offline_keeps_everything_in_the_run_folder(tiny_recipe, tmp_path, quiet, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = nk.fit(tiny_recipe, tmp_path, reporter=quiet, trackers=("wandb",))
    [stored] = (run.path / "wandb").glob("offline-run-*/*.wandb")
    end = time.monotonic() + 30  # W&B writes in a process of its own, which on a busy machine comes later
    while b"diagnosis/effective_rank" not in (content := stored.read_bytes()) and time.monotonic() < end:
        time.sleep(0.1)
    assert b"val/R@1" in content
    assert b"diagnosis/effective_rank" in content


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shrinkage": 0.3}, r"model\.shrinkage: only with a whitened head"),
        ({"backbone": "resnet50", "width": 8}, r"model\.width: resnet50 has a fixed width"),
        ({"backbone": "resnet18", "width": 8}, r"model\.width: resnet18 has a fixed width"),
    ],
)
def test_settings_that_the_model_cannot_use_are_refused(tiny_recipe, tmp_path, quiet, settings, message):
    recipe = replace(tiny_recipe, model=replace(tiny_recipe.model, **settings))
    with pytest.raises(ConfigError, match=message):
        nk.fit(recipe, tmp_path, reporter=quiet)
