"""Recipes: typed, strict about unknown keys, and keyed by what changes a result."""

import inspect
import os
from dataclasses import replace
from pathlib import Path

import pytest

from nearkin.config.recipe import ComponentConfig, Recipe
from nearkin.errors import ConfigError, UserError
from nearkin.losses.miners import MINERS
from nearkin.losses.registry import LOSSES, loss
from nearkin.training import recipes
from nearkin.training._run_key import run_key
from nearkin.training.factory import make_objective, validate_recipe


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
        ("[loss]\nname = 'ice'\nregularizers = 'lp'", "loss.regularizers: expected names with weights"),
        ("[[loss]]\nname = 'ice'\nweight = 'a'", "loss[0].weight: expected a number, got 'a'"),
        ("[[loss]]\nweight = 2", "loss[0].name: expected a name"),
        ("loss = []", "loss: expected at least one loss"),
        ("loss = ['ice']", "loss: expected a section [loss], got ['ice']"),
        ("[[miner]]\nname = 'hard'", "miner: expected a section [miner]"),
        ("[miner]\nname = 'hard'\nregularizers = { lp = 1 }", "miner.regularizers: expected a number"),
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


SUM = """
[[loss]]
name = "proxy_anchor"
alpha = 16.0

[[loss]]
name = "contrastive"
weight = 0.1
reduction = "nonzero"
regularizers = { lp = 1 }
"""


def test_a_sum_of_losses_with_regularizers_and_reductions(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text(SUM)
    recipe = Recipe.from_toml(path)
    assert recipe.loss.name == "proxy_anchor+0.1*contrastive"
    path.write_text(recipe.to_toml())
    assert Recipe.from_toml(path) == recipe
    objective = make_objective(recipe, 8, 3)
    assert objective.weights == [1.0, 0.1]
    anchor, contrastive = objective.parts
    assert (anchor.loss_kwargs["alpha"], contrastive.reduction) == (16.0, "nonzero")
    assert contrastive.regularizers == {"lp": 1.0}
    assert run_key(recipe, "f").startswith("glyphs-proxy_anchor+contrastive-128-")
    single = Recipe.from_dict({"loss": {"name": "triplet", "regularizers": {"zero_mean": 0.1}}})
    assert Recipe.from_dict(single.to_dict()) == single
    assert make_objective(single, 8, 3).regularizers == {"zero_mean": 0.1}


def test_a_sum_gives_its_miner_and_memory_to_the_parts_that_can_use_them():
    recipe = Recipe.from_dict({"loss": [{"name": "cosface"}, {"name": "triplet", "weight": 2}], "memory": 8})
    objective = make_objective(replace(recipe, miner=ComponentConfig("hard")), 8, 3)
    assert [(part.miner, part.memory_size) for part in objective.parts] == [(None, 0), ("hard", 8)]
    unused = Recipe.from_dict({"loss": [{"name": "cosface"}, {"name": "softmax"}]})
    for change in ({"memory": 8}, {"miner": ComponentConfig("hard")}):
        with pytest.raises(ConfigError, match=r"no loss of cosface\+softmax can use it"):
            make_objective(replace(unused, **change), 8, 3)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"name": "triplet", "reduction": "none"}, "loss.reduction: training needs a single value"),
        ({"name": "proxy_anchor", "reduction": "sum"}, "proxy_anchor: reduction must be 'mean', got 'sum'"),
        ({"name": "triplet", "dim": 3}, "triplet: no setting 'dim'"),
        ({"name": "triplet", "weight": 3}, "triplet: no setting 'weight'"),
        ({"name": "triplet", "regularizers": {"regular_face": 1}}, "regular_face needs vectors of the classes"),
        ({"name": "triplet", "regularizers": {"l2": 1}}, "No regularizer named 'l2'"),
        ([{"name": "triplet"}, {"name": "nosuch"}], "No loss named 'nosuch'"),
    ],
)
def test_impossible_losses_are_refused_before_training(loss, message):
    with pytest.raises(UserError) as error:
        validate_recipe(Recipe.from_dict({"loss": loss}))
    assert message in str(error.value)


# Of the version before there were sums, reductions and regularisers: runs written then stay valid.
KEYS = {
    "glyphs_small": "glyphs-proxy_anchor-128-0f163adb5b67",
    "folder_default": "folder-norm_softmax-512-bb811047961b",
    "thesis_multi_similarity": "cub-multi_similarity-512-0478ae344bb3",
    "thesis_margin": "cub-margin-512-b0d6ca7f0b7a",
    "mpa_cub": "cub-mpa-512-8920e3d4a83e",
    "ce_cub": "cub-softmax-0-aaee2ca5771d",
    "ice_sop": "sop-ice-512-b951e35f177f",
}


@pytest.mark.parametrize("name", KEYS)
def test_keys_do_not_change(name):
    assert run_key(recipes.find(name), "f") == KEYS[name]


@pytest.mark.parametrize(
    "change",
    [
        {"settings": {"reduction": "nonzero"}},
        {"regularizers": {"lp": 0.1}},
        {"regularizers": {"lp": 0.2}},
        {"parts": ((1.0, ComponentConfig("triplet")),)},
        {"parts": ((2.0, ComponentConfig("triplet")),)},
    ],
)
def test_the_key_has_reductions_regularizers_and_sums(change):
    base = Recipe(loss=ComponentConfig("triplet"))
    assert run_key(Recipe(loss=replace(base.loss, **change)), "f") != run_key(base, "f")
    assert run_key(Recipe(loss=ComponentConfig("triplet", {"reduction": "mean"})), "f") == run_key(base, "f")


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
