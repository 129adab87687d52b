"""The papers' recipes against their tables, copied here by hand from the papers and their published code."""

import dataclasses

import pytest

from nearkin.cli import train
from nearkin.errors import ConfigError
from nearkin.losses.registry import LOSSES
from nearkin.training import recipes
from nearkin.training.factory import validate_recipe

# Instance cross entropy: SGD with momentum 0.8, weight decay 1e-5, learning rate 1e-3 and ten times that for the new
# layer; BN-Inception with 512 dimensions; crops of 227; scale 64. Steps: 4,000 on CUB and Cars, 20,000 on SOP.
ICE = {
    "ice_cub": {"batch": (60, 10), "steps": 4000, "train images": 5864},
    "ice_cars": {"batch": (60, 10), "steps": 4000, "train images": 8054},
    "ice_sop": {"batch": (180, 2), "steps": 20000, "train images": 59551},
}


@pytest.mark.parametrize("name", ICE)
def test_instance_cross_entropy(name):
    recipe, expected = recipes.find(name), ICE[name]
    train = recipe.train
    assert (recipe.model.backbone, recipe.model.dim, recipe.data.image_size) == ("bn_inception", 512, 227)
    assert recipe.loss.to_dict() == {"name": "ice", "scale": 64.0}
    assert (train.optimizer, train.momentum, train.weight_decay, train.lr) == ("sgd", 0.8, 1e-5, 1e-3)
    assert train.head_lr == 10 * train.lr
    assert (train.batch_size, train.samples_per_class) == expected["batch"]
    assert train.steps == expected["steps"]
    assert recipe.data.augment == "ice"


# Cross-entropy: learning rate, momentum, epochs, normalisation of the features (without scale and shift).
CE = {
    "ce_cub": (0.02, 0.0, 30, "none"),
    "ce_cars": (0.05, 0.0, 100, "batch"),
    "ce_sop": (0.003, 0.99, 100, "batch"),
    "ce_inshop": (0.003, 0.99, 100, "batch"),
}


@pytest.mark.parametrize("name", CE)
def test_cross_entropy(name):
    recipe = recipes.find(name)
    train, model = recipe.train, recipe.model
    assert (train.lr, train.momentum, train.epochs, model.norm) == CE[name]
    assert train.nesterov == (train.momentum > 0)
    assert (model.backbone, model.pool, model.dim, model.freeze_norm) == ("resnet50", "average", 0, "statistics")
    assert recipe.loss.to_dict() == {"name": "softmax", "smoothing": 0.1, "dropout": 0.5}
    assert (train.optimizer, train.weight_decay, train.class_decay, train.class_lr) == ("sgd", 5e-4, True, train.lr)
    assert (train.lr_schedule, train.warmup_steps, train.batch_size, train.samples_per_class) == ("cosine", 100, 128, 0)
    assert (recipe.data.image_size, recipe.data.augment) == (224, name)


# The thesis, table 3: learning rate, epochs between decays, factor.
TABLE_3 = {
    ("cub", "resnet50"): (1e-4, 5, 0.1),
    ("cub", "bn_inception"): (1e-4, 10, 0.1),
    ("cub", "googlenet"): (1e-4, 10, 0.1),
    ("cars", "resnet50"): (1e-4, 10, 0.1),
    ("cars", "bn_inception"): (1e-4, 20, 0.1),
    ("cars", "googlenet"): (1e-4, 20, 0.1),
    ("sop", "resnet50"): (6e-4, 10, 0.25),
    ("sop", "bn_inception"): (6e-4, 20, 0.25),
    ("sop", "googlenet"): (6e-4, 20, 0.25),
}
# Tables 4 and 5, corrected as docs/recipes.md says: settings, miner, learning rate of the class parameters.
TABLES_4_5 = {
    "contrastive": ({"margin": 0.5}, None, None),
    "triplet": ({"margin": 0.1}, {"name": "semihard"}, None),
    "lifted_structure": ({"margin": 0.5}, {"name": "multi_similarity", "epsilon": 0.1}, None),
    "npair": ({}, None, None),
    "proxy_nca": ({}, None, 1e-5),
    "margin": ({"alpha": 0.2, "beta": 1.2, "learn_beta": True}, {"name": "distance_weighted"}, 5e-5),
    "arcface": ({"margin_degrees": 28.6, "scale": 64.0}, None, 1e-4),
    "multi_similarity": (
        {"base": 0.5, "alpha": 2.0, "beta": 50.0},
        {"name": "multi_similarity", "epsilon": 0.1},
        None,
    ),
    "soft_triple": ({"margin": 0.01, "scale": 20.0, "gamma": 0.1, "tau": 0.2, "centers": 10}, None, 1e-4),
    "proxy_anchor": ({"margin": 0.1, "alpha": 32.0}, None, 1e-2),
}


@pytest.mark.parametrize(("dataset", "network"), TABLE_3)
@pytest.mark.parametrize("loss", TABLES_4_5)
def test_thesis(loss, dataset, network):
    recipe = recipes.find(f"thesis_{loss}:{dataset}:{network}:128")
    train, model = recipe.train, recipe.model
    assert (train.lr, train.step_epochs, train.step_factor) == TABLE_3[dataset, network]
    assert (train.optimizer, train.weight_decay, train.lr_schedule, train.epochs) == ("adamw", 1e-4, "step", 100)
    assert train.batch_size == (100 if network == "resnet50" else 180)
    assert (train.frozen_epochs, train.clip_norm) == (1, 10.0)
    assert (model.backbone, model.pool, model.dim, model.freeze_norm) == (network, "average_maximum", 128, "statistics")
    settings, miner, class_lr = TABLES_4_5[loss]
    if loss == "soft_triple" and dataset == "sop":
        settings = {**settings, "centers": 2}
    assert recipe.loss.to_dict() == {"name": loss, **settings}
    assert (recipe.miner.to_dict() if recipe.miner else None) == miner
    assert train.class_lr == class_lr
    assert train.samples_per_class == (5 if LOSSES[loss].inputs.pairs else 0)


@pytest.mark.parametrize("loss", ["proxy_repulsion", "proxy_repulsion_batch"])
def test_new_losses_of_the_thesis_are_trained_like_proxy_anchor(loss):
    recipe, anchor = (recipes.find(f"thesis_{name}:cars:bn_inception:512") for name in (loss, "proxy_anchor"))
    assert dataclasses.replace(recipe, loss=anchor.loss) == anchor
    assert recipe.loss.to_dict() == {"name": loss, "alpha": 32.0, "margin": 0.1}


def test_settings_of_table_15():
    """The searched values of the thesis; SoftTriple's "weights lr" is the rate of its class weights."""
    tuned = {name: recipes.find(f"thesis_tuned_{name}") for name in ("multi_similarity", "soft_triple", "proxy_anchor")}
    ms, soft, anchor = tuned.values()
    assert (ms.loss.settings, ms.miner.settings) == ({"alpha": 18.0, "beta": 76.0, "base": 0.8}, {"epsilon": 0.4})
    assert (ms.model.backbone, ms.train.samples_per_class) == ("bn_inception", 5)
    expected = {"scale": 78.0, "margin": 0.4, "tau": 0.4, "centers": 10, "gamma": pytest.approx(1 / 58)}
    assert soft.loss.settings == expected
    assert (soft.train.class_lr, soft.train.lr) == (5e-5, 1e-4)
    assert anchor.loss.settings == {"alpha": 32.0, "margin": 0.1}


@pytest.mark.parametrize("loss", ["mpa", "mpa_dw", "mpa_ap"])
@pytest.mark.parametrize(
    ("dataset", "batch", "epochs", "centers"), [("cub", 180, 60, 10), ("cars", 64, 60, 10), ("sop", 32, 100, 2)]
)
def test_multi_proxy_anchor(loss, dataset, batch, epochs, centers):
    recipe = recipes.find(f"mpa_{dataset}:{loss}")
    train, model = recipe.train, recipe.model
    assert (model.backbone, model.pool, model.gem_p, model.dim) == ("bn_inception", "gem", 3.0, 512)
    expected = {"name": loss, "alpha": 32.0, "margin": 0.1, "gamma": 0.1, "tau": 0.2, "centers": centers}
    assert recipe.loss.to_dict() == expected
    assert (train.optimizer, train.lr, train.class_lr) == ("adamw", 1e-4, 1e-2)
    assert (train.lr_schedule, train.step_epochs, train.step_factor) == ("step", 20, 0.5)
    assert (train.batch_size, train.samples_per_class, train.epochs) == (batch, 0, epochs)


@pytest.mark.parametrize("name", list(recipes.RECIPES))
def test_every_recipe_is_valid(name):
    backbone = recipes.find(name).model.backbone.partition(".")[0]
    if "dinov3" in backbone and not pytest.importorskip("timm").is_model(backbone):
        pytest.skip("this version of timm does not have DINOv3")
    validate_recipe(recipes.find(name))


def test_help_and_page_list_every_recipe(pytestconfig, capsys):
    page = (pytestconfig.rootpath / "docs" / "recipes.md").read_text()
    for name in recipes.RECIPES:
        assert f"`{name}`" in page, name
    with pytest.raises(SystemExit):
        train.run(["--help"])
    text = capsys.readouterr().out
    missing = [n for n in recipes.RECIPES if n not in text and not n.startswith("thesis_")]
    assert not missing


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("thesis_proxy_anchr", "Did you mean 'thesis_proxy_anchor'"),
        ("thesis_proxy_anchor:birds", "No dataset named 'birds'"),
        ("thesis_proxy_anchor:cub:vgg", "No network named 'vgg'"),
        ("thesis_proxy_anchor:cub:resnet50:many", "expected an integer, got 'many'"),
        ("mpa_cub:triplet", "No loss named 'triplet'"),
        ("ice_cub:512", "does not take 1 arguments"),
    ],
)
def test_errors_of_a_recipe_name_name_the_alternatives(name, message):
    with pytest.raises(ConfigError, match=message):
        recipes.find(name)


def test_weights_and_freeze_have_short_flags():
    recipe, _ = train.parse_train(["glyphs_small", "--weights", "net.pth", "--freeze=backbone"])
    assert (recipe.model.weights, recipe.model.freeze) == ("net.pth", "backbone")
