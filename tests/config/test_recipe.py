"""Recipes: typed, strict about unknown keys, and keyed by what changes a result."""

import inspect
import os
from dataclasses import replace
from pathlib import Path

import pytest

from nearkin.config.recipe import ComponentConfig, Recipe
from nearkin.errors import ConfigError
from nearkin.losses.miners import MINERS
from nearkin.losses.registry import LOSSES, loss
from nearkin.training import recipes
from nearkin.training._run_key import run_key


@pytest.mark.parametrize("name", list(recipes.RECIPES))
def test_toml_round_trip(name, tmp_path):
    recipe = replace(recipes.find(name), miner=ComponentConfig("semihard", {"band": True}), seed=7)
    path = tmp_path / "recipe.toml"
    path.write_text(recipe.to_toml())
    assert Recipe.from_toml(path) == recipe


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nbatchsize = 8", "train.batchsize: no such setting. Did you mean 'train.batch_size'?"),
        ("lr = 0.1", "lr: no such setting. Did you mean 'train.lr'?"),
        ("[trian]\nlr = 1", "trian: no such setting. Did you mean 'train'?"),
        ("[train]\nepochs = 'ten'", "train.epochs: expected an integer, got 'ten'"),
        ("[train]\nepochs = true", "train.epochs: expected an integer, got True"),
        ("[train]\nlr = 'x'", "train.lr: expected a number, got 'x'"),
        ("[train]\nbatch_size = 10", "train.batch_size: expected a multiple of train.samples_per_class (4), got 10"),
        ("[model]\ndim = 99999999999999999999", "model.dim: expected at most 65,536, got 99999999999999999999"),
        ("[train]\nepochs = -1", "train.epochs: expected 0 or above, got -1"),
        ("[train]\noptimizer = 'adam'", "train.optimizer: expected one of 'adamw', 'sgd', got 'adam'"),
        ("[data]\nval_fraction = 0.7\ntest_fraction = 0.6", "data.val_fraction + data.test_fraction: expected below 1"),
        ("train = 3", "train: expected a section [train], got 3"),
        ("[loss]\nalpha = 3.0", "loss.name: expected a name"),
        ("[loss]\nname = 'ice'\nscale = [1]", "loss.scale: expected a number"),
        ("seed = -1", "seed: expected 0 to 2**63 - 1, got -1"),
        (f"seed = {2**70}", f"seed: expected 0 to 2**63 - 1, got {2**70}"),
        ("[data]\nsplit_seed = -1", "data.split_seed: expected 0 to 2**63 - 1, got -1"),
        ("not toml", "not valid TOML"),
    ],
)
def test_errors_of_a_recipe_file_name_the_key_and_the_fix(text, message, tmp_path):
    path = tmp_path / "r.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        Recipe.from_toml(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_integers_are_accepted_as_floats():
    assert Recipe.from_dict({"train": {"lr": 1}}).train.lr == 1.0


def test_run_key_depends_on_everything_that_changes_a_result_and_on_nothing_else():
    base = recipes.glyphs_small()
    same = replace(base, data=replace(base.data, root=Path("elsewhere")))
    assert run_key(same, "f") == run_key(base, "f")
    changed = [
        replace(base, seed=1),
        replace(base, memory=64),
        replace(base, loss=ComponentConfig("proxy_anchor", {"alpha": 16.0})),
        replace(base, miner=ComponentConfig("hard")),
        replace(base, model=replace(base.model, dim=64)),
        replace(base, train=replace(base.train, lr=1e-4)),
        replace(base, data=replace(base.data, split_seed=1)),
    ]
    keys = {run_key(base, "f"), run_key(base, "g"), *(run_key(recipe, "f") for recipe in changed)}
    assert len(keys) == 2 + len(changed)


@pytest.mark.parametrize("same", [
    {"loss": ComponentConfig("proxy_anchor")},
    {"loss": ComponentConfig("proxy_anchor", {"margin": 0.1})},
    {"loss": ComponentConfig("proxy_anchor", {"alpha": 32, "margin": 0.1})},
    {"train": replace(recipes.glyphs_small().train, clip_norm=10)},
])  # fmt: skip
def test_equivalent_recipes_have_the_same_key(same):
    base = recipes.glyphs_small()
    assert LOSSES["proxy_anchor"].settings == {"alpha": 32.0, "margin": 0.1}
    assert (base.loss.name, base.train.clip_norm) == ("proxy_anchor", 10.0)
    assert run_key(replace(base, **same), "f") == run_key(base, "f")


def test_keys_of_miners_and_of_user_registered_losses(monkeypatch):
    base = replace(
        recipes.glyphs_small(), loss=ComponentConfig("multi_similarity"), miner=ComponentConfig("multi_similarity")
    )
    [(setting, default)] = [
        (name, p.default)
        for name, p in inspect.signature(MINERS["multi_similarity"]).parameters.items()
        if p.kind is p.KEYWORD_ONLY
    ]
    explicit = replace(base, miner=ComponentConfig("multi_similarity", {setting: default}))
    assert run_key(explicit, "f") == run_key(base, "f")
    assert run_key(replace(base, miner=ComponentConfig("multi_similarity", {setting: 2 * default})), "f") != run_key(
        base, "f"
    )
    assert run_key(replace(base, miner=None), "f") != run_key(base, "f")

    mine = replace(
        base, loss=ComponentConfig("mine"), miner=None
    )  # not registered: the key takes the settings as given
    assert run_key(replace(mine, loss=ComponentConfig("mine", {"a": 1})), "f") == run_key(
        replace(mine, loss=ComponentConfig("mine", {"a": 1.0})), "f"
    )
    monkeypatch.setitem(LOSSES, "mine_too", LOSSES["triplet"])  # removed at the end of the test
    del LOSSES["mine_too"]

    @loss(family="pair", paper="none", formula="none", use="none")
    def mine_too(p, *, a: float = 1.0, shape: tuple[int, ...] = (1, 2)):
        return p.sim.mean(1)

    custom = replace(mine, loss=ComponentConfig("mine_too", {"a": 1}))
    assert run_key(custom, "f") == run_key(replace(mine, loss=ComponentConfig("mine_too")), "f")
    assert run_key(custom, "f") != run_key(replace(mine, loss=ComponentConfig("mine_too", {"a": 2})), "f")


def test_find_accepts_names_files_and_run_folders(tmp_path):
    recipe = replace(recipes.glyphs_small(), seed=3)
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    assert recipes.find(str(tmp_path)) == recipe
    assert recipes.find(str(tmp_path / "recipe.toml")) == recipe
    assert recipes.find("glyphs_small").seed == 0
    with pytest.raises(ConfigError, match="Did you mean 'glyphs_small'"):
        recipes.find("glyph_small")


@pytest.mark.parametrize("change", [
    {"data": replace(Recipe().data, root=Path(os.fsdecode(b"ph\xffotos")))},
    {"model": replace(Recipe().model, weights=os.fsdecode(b"w\xff.pth"))},
])  # fmt: skip
def test_paths_that_are_not_unicode_are_rejected(change):
    with pytest.raises(ConfigError, match="valid Unicode"):
        replace(Recipe(), **change)
