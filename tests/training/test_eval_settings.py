"""Metrics, similarity and length as settings of a recipe."""

import json
from dataclasses import replace

import numpy as np
import pytest
from helpers.scored import QUIET
from helpers.studies import write_features

import nearkin as nk
from nearkin.bench.tune_space import grid_recipe
from nearkin.cli import main
from nearkin.cli.train import parse_train
from nearkin.config.recipe import DataConfig, EvalConfig, Recipe, TrainConfig
from nearkin.data.sources import load
from nearkin.errors import ConfigError, UnknownNameError
from nearkin.training import recipes
from nearkin.training._run_key import run_key
from nearkin.training.evaluation import reported_metrics
from nearkin.training.factory import validate_recipe
from nearkin.training.step import learning_rate_factor


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A head on features with k = 1, 3 and both similarities, trained for 5 steps."""
    folder = tmp_path_factory.mktemp("eval")
    recipe = recipes.find("features_default")
    recipe = replace(
        recipe,
        data=replace(recipe.data, root=write_features(folder / "clouds.npz"), test_fraction=0.5),
        model=replace(recipe.model, dim=6, head_init="random"),
        train=replace(recipe.train, steps=5, batch_size=32, lr=0.1),
        eval=EvalConfig(ks=(1, 3), metrics=("nDCG@2",), similarity="both"),
    )
    return nk.fit(recipe, folder / "runs", device="cpu", reporter=QUIET)


def reference(run, ks, similarity):
    """Recall of the run's model on its test classes, by a loop over queries."""
    table = load(run.recipe.data)
    order = np.random.default_rng(0).permutation(table.num_classes)[: table.num_classes // 2]
    test = table.of_classes(np.sort(order))
    emb = run.embedder().embed(test.features, raw=True).double().numpy()
    if similarity == "cosine":
        emb = emb / np.linalg.norm(emb, axis=1, keepdims=True)
    distance = np.linalg.norm(emb[:, None] - emb[None], axis=2)
    np.fill_diagonal(distance, np.inf)
    nearest = np.argsort(distance, axis=1)
    hits = test.labels[nearest] == test.labels[:, None]
    return {f"R@{k}": hits[:, :k].any(1).mean() for k in ks}


def test_a_run_reports_the_metrics_of_its_recipe(run):
    test, euclidean = run.result["test"]["trained"], run.result["euclidean"]
    assert list(test) == list(euclidean) == ["R@1", "R@3", "nDCG@2"]
    for stored, similarity in ((test, "cosine"), (euclidean, "euclidean")):
        for name, value in reference(run, (1, 3), similarity).items():
            assert stored[name]["mean"] == pytest.approx(value)
    assert test["R@3"] != euclidean["R@3"]


@pytest.mark.parametrize("similarity", ["cosine", "euclidean"])
def test_other_k_are_computed_from_the_saved_embeddings(run, similarity, tmp_path, capsys):
    main(["evaluate", str(run.path), "--ks", "5", "9", "--similarity", similarity, "--out", str(tmp_path / "q.npz")])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if "R@" in line][:2] == ["R@5", "R@9"]
    with np.load(tmp_path / "q.npz") as stored:
        for name, value in reference(run, (5, 9), similarity).items():
            assert stored[name].mean() == pytest.approx(value)
    main(["evaluate", str(run.path), "--metrics", "MAP@2/k"])
    assert "MAP@2/k" in capsys.readouterr().out


def test_length_in_steps(run):
    epochs = [event for event in run.events() if event["event"] == "epoch"]
    images = 24 // 2 * 8 - 2 * 8  # without the test and the two validation classes
    assert len(epochs) == 1 + -(-5 // (images // 32))  # the first is the start
    config = TrainConfig(steps=5, lr_schedule="cosine")
    assert [learning_rate_factor(config, step, 2) for step in (0, 5)] == pytest.approx([1, 0])
    with pytest.raises(ConfigError, match=r"train\.steps: expected at least 1, got 0"):
        TrainConfig(steps=0)


def test_epochs_on_the_command_line_replace_the_steps_of_a_recipe():
    assert parse_train(["ice_cub"])[0].train.steps == 4000
    recipe, _ = parse_train(["ice_cub", "--train.epochs", "3"])
    assert (recipe.train.epochs, recipe.train.steps) == (3, None)
    assert parse_train(["glyphs_small", "--train.steps", "7", "--eval.ks", "1", "5"])[0].eval.ks == (1, 5)
    with pytest.raises(ConfigError, match="both set the length"):
        parse_train(["ice_cub", "--train.epochs", "3", "--train.steps", "7"])


def test_metrics_by_dataset():
    expected = {
        "cub": ["R@1", "R@2", "R@4", "R@8", "MAP@R", "nDCG@8"],
        "sop": ["R@1", "R@10", "R@100", "R@1000", "MAP@R", "nDCG@1000"],
        "inshop": ["R@1", "R@10", "R@20", "R@30", "R@40", "R@50", "MAP@R", "nDCG@50"],
    }
    assert {name: list(reported_metrics(EvalConfig(), name)) for name in expected} == expected
    assert reported_metrics(EvalConfig(ks=(5,)), "sop") == ("R@1", "R@5", "MAP@R", "nDCG@5")
    with pytest.raises(UnknownNameError, match="No metric named 'nDGC@4'"):
        validate_recipe(replace(recipes.glyphs_small(), eval=EvalConfig(metrics=("nDGC@4",))))
    with pytest.raises(ConfigError, match=r"eval\.ks: expected integers of at least 1"):
        EvalConfig(ks=(0,))


def test_settings_of_the_evaluation_change_the_run_key_only_if_given():
    plain = recipes.glyphs_small()
    assert "eval" not in json.dumps(plain.to_dict())
    assert run_key(replace(plain, eval=EvalConfig(ks=(1, 5))), "") != run_key(plain, "")
    stored = replace(plain, eval=EvalConfig(ks=(1, 5), metrics=("nDCG@4",), similarity="both"))
    assert Recipe.from_dict(stored.to_dict()) == stored


def test_part_of_the_data(tmp_path):
    features = write_features(tmp_path / "f.npz", classes=10, samples_per_class=6)
    table = load(DataConfig(source="features", root=features, max_classes=4, max_per_class=3))
    whole = load(DataConfig(source="features", root=features))
    assert table.class_names == tuple(whole.class_names[c] for c in (0, 3, 6, 9))
    assert np.bincount(table.labels).tolist() == [3, 3, 3, 3]
    assert np.array_equal(table.features[:3], whole.features[:3])
    assert table.fingerprint != whole.fingerprint


def test_grid_search_of_multi_similarity_takes_five_images_per_class():
    base = grid_recipe(recipes.find("thesis_proxy_anchor:cub:bn_inception:512"), "multi_similarity")
    assert (base.train.samples_per_class, base.train.batch_size, base.miner.name) == (5, 180, "multi_similarity")
