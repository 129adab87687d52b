"""Frozen backbones: features computed once, cached safely, with the same results as without the cache."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.limits import max_file_size

import nearkin as nk
from nearkin.config.recipe import ComponentConfig
from nearkin.data import sources
from nearkin.data.splits import make_split
from nearkin.data.transforms import training_inputs
from nearkin.errors import ConfigError, DataError
from nearkin.models import frozen
from nearkin.models.frozen import FrozenFeatures
from nearkin.report.baselines import comparison_lines
from nearkin.report.page import write_page
from nearkin.training.factory import make_model


@pytest.fixture
def frozen_recipe(tiny_recipe):
    """The tiny recipe with its (random) backbone frozen."""
    model = replace(tiny_recipe.model, freeze="backbone", head_init="whitened", dim=6)
    return replace(
        tiny_recipe, model=model, loss=ComponentConfig("norm_softmax"), train=replace(tiny_recipe.train, lr=1e-2)
    )


@pytest.fixture
def features_file(tmp_path):
    """Eight classes in 12 dimensions: three separate the classes, the others are noise."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(8), 20)
    features = rng.normal(0, 1, (160, 12)) * ([1] * 3 + [20] * 9)
    features[:, :3] += 8 * rng.normal(0, 1, (8, 3))[labels]
    path = tmp_path / "features.npz"
    np.savez(path, features=features.astype(np.float32), labels=np.array([f"class {c}" for c in labels]))
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


def test_a_frozen_run_trains_the_head_only_and_reports_the_raw_backbone(frozen_recipe, tmp_path, quiet):
    run = nk.fit(frozen_recipe, tmp_path, reporter=quiet)
    assert list(run.result["test"]) == ["raw pixels", "raw backbone", "whitened start", "trained"]
    assert list(run.result["differences"]) == ["raw pixels", "raw backbone", "whitened start"]
    before = make_model(frozen_recipe, sources.load(frozen_recipe.data, quiet), quiet)
    for name, value in run.embedder().backbone.state_dict().items():
        assert torch.equal(value, before.backbone.state_dict()[name]), name
    assert comparison_lines(run.result)[1].startswith("vs. raw backbone: R@1 ")


def test_features_are_computed_once_and_a_run_without_the_cache_has_the_same_result(
    frozen_recipe, tmp_path, quiet, monkeypatch
):
    first = nk.fit(frozen_recipe, tmp_path / "a", reporter=quiet)

    def fail(*args, **kwargs):
        raise AssertionError("features were computed again")

    monkeypatch.setattr(frozen._RowFile, "_compute", fail)
    again = nk.fit(replace(frozen_recipe, seed=frozen_recipe.seed), tmp_path / "b", reporter=quiet)
    assert again.result["test"] == first.result["test"]
    monkeypatch.undo()
    without = nk.fit(
        replace(frozen_recipe, data=replace(frozen_recipe.data, cache=False)), tmp_path / "c", reporter=quiet
    )
    assert without.result["test"] == first.result["test"]


def test_a_damaged_or_truncated_cache_is_repaired(frozen_recipe, quiet):
    table = sources.load(frozen_recipe.data, quiet)
    store = FrozenFeatures(make_model(frozen_recipe, table, quiet), table, reporter=quiet)
    features = store.add_to(table).features
    # Recomputed in another batch, which changes the last bits of a convolution.
    tolerance = {"rtol": 1e-4, "atol": 1e-6}
    [[stored]] = store.files
    with open(stored.path, "r+b") as file:
        file.seek(4 * stored.width * 3 + 5)
        file.write(b"\xff\x00\xff")
    np.testing.assert_allclose(store.add_to(table).features, features, **tolerance)
    with open(stored.path, "r+b") as file:
        file.truncate(4 * stored.width * 7)
    np.testing.assert_allclose(store.add_to(table).features, features, **tolerance)
    np.testing.assert_allclose(store.add_to(table.take(np.array([9, 2, 2]))).features, features[[9, 2, 2]], **tolerance)


def test_the_cache_depends_on_weights_and_preprocessing(frozen_recipe, quiet):
    table = sources.load(frozen_recipe.data, quiet)

    def path(recipe):
        [[stored]] = FrozenFeatures(make_model(recipe, table, quiet), table, reporter=quiet).files
        return stored.path

    paths = {path(frozen_recipe)}
    for change in (
        {"seed": 1},
        {"model": replace(frozen_recipe.model, pool="maximum")},
        {"model": replace(frozen_recipe.model, feature_levels="low_mid_high")},
    ):
        paths.add(path(replace(frozen_recipe, **change)))
    assert len(paths) == 4
    same_features = replace(
        frozen_recipe, model=replace(frozen_recipe.model, dim=3, head="residual"), loss=ComponentConfig("triplet")
    )
    assert path(same_features) in paths


def test_no_features_of_test_classes_are_computed_before_the_final_evaluation(
    frozen_recipe, tmp_path, quiet, monkeypatch
):
    seen = []
    original = FrozenFeatures.add_to
    monkeypatch.setattr(
        FrozenFeatures, "add_to", lambda self, part: seen.append(set(part.class_names)) or original(self, part)
    )
    _, holdout = make_split(sources.load(frozen_recipe.data, quiet), frozen_recipe.data)
    sealed = set(holdout.open().class_names)
    nk.fit(frozen_recipe, tmp_path, reporter=quiet, final=False)
    assert seen
    assert not any(classes & sealed for classes in seen)


def test_final_false_leaves_the_test_classes_sealed_and_a_later_call_evaluates_them(frozen_recipe, tmp_path, quiet):
    unfinished = nk.fit(frozen_recipe, tmp_path, reporter=quiet, final=False)
    assert unfinished.result["test"] is None
    assert 0 <= unfinished.result["val_R@1"] <= 1
    assert not any(event["event"] == "holdout_opened" for event in unfinished.events())
    final = nk.fit(frozen_recipe, tmp_path, reporter=quiet)
    assert final.path == unfinished.path
    direct = nk.fit(frozen_recipe, tmp_path / "other", reporter=quiet)
    assert final.result["test"] == direct.result["test"]


def test_precomputed_features_train_and_evaluate_without_images(features_recipe, tmp_path, quiet):
    run = nk.fit(features_recipe, tmp_path, reporter=quiet)
    assert list(run.result["test"]) == ["raw backbone", "whitened start", "trained"]
    recalls = {name: values["R@1"]["mean"] for name, values in run.result["test"].items()}
    assert recalls["whitened start"] > recalls["raw backbone"] + 0.1
    vectors = nk.load(run.path).embed(np.zeros((2, 12), np.float32))
    assert vectors.shape == (2, 3)
    assert "trained" in write_page(run, None, reporter=quiet).read_text()


def test_mismatched_features_and_backbones_are_rejected(features_recipe, tiny_recipe, tmp_path, quiet):
    wrong = replace(features_recipe, model=replace(features_recipe.model, backbone="small_conv"))
    with pytest.raises(ConfigError, match=r"--model\.backbone none"):
        nk.fit(wrong, tmp_path, reporter=quiet)
    wrong = replace(tiny_recipe, model=replace(tiny_recipe.model, backbone="none"))
    with pytest.raises(ConfigError, match="contains images"):
        nk.fit(wrong, tmp_path, reporter=quiet)
    wide = replace(features_recipe, model=replace(features_recipe.model, dim=13))
    with pytest.raises(ConfigError, match="12"):
        nk.fit(wide, tmp_path, reporter=quiet)


def test_without_validation_classes_the_last_epoch_is_used_and_recorded(features_recipe, tmp_path, quiet):
    run = nk.fit(
        replace(features_recipe, data=replace(features_recipe.data, val_fraction=0.0)), tmp_path, reporter=quiet
    )
    protocol = run.result["protocol"]
    assert (protocol["epoch"], protocol["classes"]["val"], protocol["classes"]["train"]) == (2, 0, 4)
    assert "no validation" in protocol["split"]
    assert run.result["val_R@1"] is None
    write_page(run, None, reporter=quiet)


def test_feature_noise_and_mixing_depend_on_the_step_and_stay_within_the_class(features_recipe, quiet):
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
    # Several processes see what one sees: shares of 6 and 10 rows.
    noisy = replace(features_recipe, train=replace(features_recipe.train, feature_noise=0.5, feature_mix=0.5))
    for share in (slice(0, 6), slice(6, 16)):
        shares = [rows[share] for rows in plan]
        own = list(training_inputs(table, shares, noisy, epoch=3, first=share.start, batch_size=16))
        for got, want in zip(own, batches(feature_noise=0.5, feature_mix=0.5), strict=True):
            assert torch.equal(got, want[share])
    # Mixing is within a class: with one image per class nothing changes.
    singletons = replace(table, labels=np.arange(160), class_names=tuple(map(str, range(160))))
    mixed = next(
        training_inputs(
            singletons, plan, replace(features_recipe, train=replace(features_recipe.train, feature_mix=1.0)), epoch=0
        )
    )
    torch.testing.assert_close(mixed, plain[0])


def test_a_full_disk_is_reported_and_cached_rows_stay_valid(frozen_recipe, quiet):
    table = sources.load(replace(frozen_recipe.data, image_size=17), quiet)
    store = FrozenFeatures(make_model(frozen_recipe, table, quiet), table, reporter=quiet)
    with max_file_size(200), pytest.raises(DataError, match=r"File too large.*\n.*--data.no-cache"):
        store.add_to(table)
    assert store.add_to(table).features.shape == (len(table), store.model.num_features)
