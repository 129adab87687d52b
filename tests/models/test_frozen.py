"""The frozen-feature lane: same protocol, features computed once, kept safely, and never a digit different."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import nearkin as nk
from nearkin.config.recipe import ComponentConfig
from nearkin.data import sources
from nearkin.data.batches import training_inputs
from nearkin.data.splits import make_split
from nearkin.errors import ConfigError, DataError
from nearkin.models import frozen
from nearkin.models.frozen import FrozenFeatures
from nearkin.report.page import write_page
from nearkin.report.text import headline
from nearkin.training.loop import make_model


@pytest.fixture
def lane(tiny_recipe):
    """The tiny recipe with its (random) backbone frozen."""
    model = replace(tiny_recipe.model, freeze="backbone", head_init="whitened", dim=6)
    return replace(
        tiny_recipe, model=model, loss=ComponentConfig("norm_softmax"), train=replace(tiny_recipe.train, lr=1e-2)
    )


@pytest.fixture
def features_file(tmp_path):
    """Eight classes in 12 dimensions, three of which tell them apart and the others only add noise."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(8), 20)
    features = rng.normal(0, 1, (160, 12)) * ([1] * 3 + [20] * 9)
    features[:, :3] += 8 * rng.normal(0, 1, (8, 3))[labels]
    path = tmp_path / "features.npz"
    np.savez(path, features=features.astype(np.float32), labels=np.array([f"kind {c}" for c in labels]))
    return path


@pytest.fixture
def features_recipe(features_file):
    recipe = nk.recipes.features_default()
    return replace(
        recipe,
        data=replace(recipe.data, root=features_file, val_fraction=0.25, split="half"),
        model=replace(recipe.model, dim=3, shrinkage=0.01),
        train=replace(recipe.train, epochs=2, batch_size=16),
    )


def test_a_frozen_run_trains_the_head_only_and_reports_the_raw_backbone(lane, tmp_path, quiet):
    run = nk.fit(lane, tmp_path, reporter=quiet)
    assert list(run.result["test"]) == ["raw pixels", "raw backbone", "whitened start", "trained"]
    assert run.result["gain"]["over"] == "raw backbone"
    before = make_model(lane, sources.load(lane.data, quiet), quiet)
    for name, value in run.embedder().backbone.state_dict().items():
        assert torch.equal(value, before.backbone.state_dict()[name]), name
    assert "(raw backbone: " in headline(run)


def test_features_are_computed_once_and_a_run_without_them_on_disk_ends_alike(lane, tmp_path, quiet, monkeypatch):
    first = nk.fit(lane, tmp_path / "a", reporter=quiet)

    def never(*args, **kwargs):
        raise AssertionError("features were computed again")

    monkeypatch.setattr(FrozenFeatures, "_compute", never)
    again = nk.fit(replace(lane, seed=lane.seed), tmp_path / "b", reporter=quiet)
    assert again.result["test"] == first.result["test"]
    monkeypatch.undo()
    without = nk.fit(replace(lane, data=replace(lane.data, cache=False)), tmp_path / "c", reporter=quiet)
    assert without.result["test"] == first.result["test"]


def test_a_damaged_or_half_written_store_is_mended(lane, quiet):
    table = sources.load(lane.data, quiet)
    store = FrozenFeatures(make_model(lane, table, quiet), table, reporter=quiet)
    whole = store.add_to(table).features
    # What is made again comes from another batch, which moves a convolution's last bits.
    alike = {"rtol": 1e-4, "atol": 1e-6}
    with open(store.path, "r+b") as file:
        file.seek(4 * store.width * 3 + 5)
        file.write(b"\xff\x00\xff")
    np.testing.assert_allclose(store.add_to(table).features, whole, **alike)
    with open(store.path, "r+b") as file:
        file.truncate(4 * store.width * 7)
    np.testing.assert_allclose(store.add_to(table).features, whole, **alike)
    np.testing.assert_allclose(store.add_to(table.take(np.array([9, 2, 2]))).features, whole[[9, 2, 2]], **alike)


def test_a_store_belongs_to_its_weights_and_its_preprocessing(lane, quiet):
    table = sources.load(lane.data, quiet)
    model = make_model(lane, table, quiet)
    paths = {FrozenFeatures(model, table, reporter=quiet).path}
    for change in (
        {"seed": 1},
        {"model": replace(lane.model, pool="maximum")},
        {"model": replace(lane.model, feature_levels="low_mid_high")},
    ):
        paths.add(FrozenFeatures(make_model(replace(lane, **change), table, quiet), table, reporter=quiet).path)
    assert len(paths) == 4
    same_features = replace(lane, model=replace(lane.model, dim=3, head="residual"), loss=ComponentConfig("triplet"))
    assert FrozenFeatures(make_model(same_features, table, quiet), table, reporter=quiet).path in paths


def test_the_test_classes_are_not_looked_at_before_the_end(lane, tmp_path, quiet, monkeypatch):
    seen = []
    real = FrozenFeatures.add_to
    monkeypatch.setattr(
        FrozenFeatures, "add_to", lambda self, part: seen.append(set(part.class_names)) or real(self, part)
    )
    _, holdout = make_split(sources.load(lane.data, quiet), lane.data)
    sealed = set(holdout.open().class_names)
    nk.fit(lane, tmp_path, reporter=quiet, final=False)
    assert seen
    assert not any(classes & sealed for classes in seen)


def test_a_search_leaves_the_test_classes_sealed_and_the_same_call_opens_them_later(lane, tmp_path, quiet):
    searched = nk.fit(lane, tmp_path, reporter=quiet, final=False)
    assert searched.result["test"] is None
    assert 0 <= searched.result["val_R@1"] <= 1
    assert not any(event["event"] == "holdout_opened" for event in searched.events())
    final = nk.fit(lane, tmp_path, reporter=quiet)
    assert final.path == searched.path
    direct = nk.fit(lane, tmp_path / "other", reporter=quiet)
    assert final.result["test"] == direct.result["test"]


def test_ready_features_train_whiten_and_are_judged_without_any_image(features_recipe, tmp_path, quiet):
    run = nk.fit(features_recipe, tmp_path, reporter=quiet)
    assert list(run.result["test"]) == ["raw backbone", "whitened start", "trained"]
    recalls = {name: values["R@1"]["mean"] for name, values in run.result["test"].items()}
    assert recalls["whitened start"] > recalls["raw backbone"] + 0.1
    vectors = nk.load(run.path).embed(np.zeros((2, 12), np.float32))
    assert vectors.shape == (2, 3)
    assert "trained" in write_page(run, None, reporter=quiet).read_text()


def test_features_and_backbones_that_do_not_fit_are_refused(features_recipe, tiny_recipe, tmp_path, quiet):
    wrong = replace(features_recipe, model=replace(features_recipe.model, backbone="small_conv"))
    with pytest.raises(ConfigError, match=r"--model\.backbone none"):
        nk.fit(wrong, tmp_path, reporter=quiet)
    wrong = replace(tiny_recipe, model=replace(tiny_recipe.model, backbone="none"))
    with pytest.raises(ConfigError, match="holds images"):
        nk.fit(wrong, tmp_path, reporter=quiet)
    wide = replace(features_recipe, model=replace(features_recipe.model, dim=13))
    with pytest.raises(ConfigError, match="12"):
        nk.fit(wide, tmp_path, reporter=quiet)


def test_without_validation_classes_the_last_epoch_is_kept_and_said(features_recipe, tmp_path, quiet):
    run = nk.fit(
        replace(features_recipe, data=replace(features_recipe.data, val_fraction=0.0)), tmp_path, reporter=quiet
    )
    protocol = run.result["protocol"]
    assert (protocol["epoch"], protocol["classes"]["val"], protocol["classes"]["train"]) == (2, 0, 4)
    assert "no validation" in protocol["split"]
    assert run.result["val_R@1"] is None
    write_page(run, None, reporter=quiet)


def test_feature_noise_and_mixing_are_drawn_by_step_and_stay_within_the_class(features_recipe, quiet):
    table = sources.load(features_recipe.data, quiet)
    plan = [np.arange(0, 160, 10), np.arange(5, 160, 10)]

    def batches(start=0, **train):
        recipe = replace(features_recipe, train=replace(features_recipe.train, **train))
        return list(training_inputs(table, plan, recipe, epoch=3, start=start))

    plain = batches()
    np.testing.assert_array_equal(plain[0].numpy(), table.features[plan[0]])
    for varied in (batches(feature_noise=0.5), batches(feature_mix=0.5)):
        assert not torch.equal(varied[1], plain[1])
    assert torch.equal(batches(start=1, feature_noise=0.5)[0], batches(feature_noise=0.5)[1])
    spread = torch.from_numpy(table.features).std(0)
    added = torch.cat([(a - b) / spread for a, b in zip(batches(feature_noise=0.5), plain, strict=True)])
    assert added.std() == pytest.approx(0.5, rel=0.15)
    # A mixture of two images of a class lies between them: with one image per class nothing changes.
    single = replace(table, labels=np.arange(160), class_names=tuple(map(str, range(160))))
    mixed = next(
        training_inputs(
            single, plan, replace(features_recipe, train=replace(features_recipe.train, feature_mix=1.0)), epoch=0
        )
    )
    torch.testing.assert_close(mixed, plain[0])


def test_a_full_disk_is_said_and_what_was_written_stays(lane, quiet, monkeypatch):
    table = sources.load(replace(lane.data, image_size=17), quiet)
    store = FrozenFeatures(make_model(lane, table, quiet), table, reporter=quiet)
    monkeypatch.setattr(frozen.os, "pwrite", lambda *given: 0)  # what a full disk answers
    with pytest.raises(DataError, match=r"No space left.*\n.*--data.no-cache"):
        store.add_to(table)
    monkeypatch.undo()
    assert store.add_to(table).features.shape == (len(table), store.width)
