"""Distillation: a small network learns the similarities of another."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.scored import QUIET

import nearkin as nk
from nearkin import cli
from nearkin.config import ModelConfig
from nearkin.data import sources
from nearkin.data.splits import make_split
from nearkin.training import recipes
from nearkin.training.distillation import distil, teacher_vectors


@pytest.fixture(scope="module")
def teacher(photo_folder, tmp_path_factory):
    recipe = recipes.from_scratch()
    data = replace(recipe.data, root=photo_folder, image_size=32, val_fraction=0.2)
    train = replace(recipe.train, epochs=2, batch_size=16, samples_per_class=2)
    recipe = replace(recipe, data=data, model=replace(recipe.model, width=8, dim=12), train=train)
    return nk.fit(recipe, tmp_path_factory.mktemp("teacher"), reporter=QUIET)


@pytest.fixture
def student(teacher):
    recipe = teacher.recipe
    model = ModelConfig(backbone="small_conv", width=4, dim=8)
    train = replace(recipe.train, epochs=4, teacher=str(teacher.path), teacher_weight=100.0)
    return replace(recipe, data=replace(recipe.data, image_size=24), model=model, train=train)


def test_the_term_is_the_mean_squared_difference_of_cosines():
    rng = np.random.default_rng(0)
    emb, taught, labels = rng.standard_normal((5, 3)), rng.standard_normal((5, 4)), np.array([0, 0, 1, 1, 2])
    taught /= np.linalg.norm(taught, axis=1, keepdims=True)
    objective = nk.Objective("contrastive")
    tensors = torch.from_numpy(emb), torch.from_numpy(labels)
    total = 0.0
    for i in range(5):
        for j in range(5):
            cosine = emb[i] @ emb[j] / np.linalg.norm(emb[i]) / np.linalg.norm(emb[j])
            total += (cosine - taught[i] @ taught[j]) ** 2 / 25
    got = distil(objective, torch.from_numpy(taught), 3.0, *tensors)
    assert float(got) == pytest.approx(float(objective(*tensors)) + 3 * total, rel=1e-12)


def test_the_vectors_are_those_of_the_teacher_at_its_own_size(teacher, student, quiet):
    table = sources.load(student.data, quiet)
    train = make_split(table, student.data)[0].train
    vectors = teacher_vectors(nk.load(teacher.path), student, train, torch.device("cpu"), quiet)
    expected = nk.load(teacher.path).embed(train.paths)
    torch.testing.assert_close(vectors, expected, rtol=1e-4, atol=1e-5)


def test_a_taught_network_comes_nearer_to_its_teacher(teacher, student, tmp_path, quiet):
    taught = nk.fit(student, tmp_path, reporter=quiet)
    plain = nk.fit(replace(student, train=replace(student.train, teacher="")), tmp_path, reporter=quiet)
    other = nk.fit(replace(student, train=replace(student.train, teacher=str(plain.path))), tmp_path, reporter=quiet)
    assert len({taught.path, plain.path, other.path}) == 3  # another teacher is another run
    table = sources.load(student.data, quiet)
    train = make_split(table, student.data)[0].train
    goal = teacher_vectors(nk.load(teacher.path), student, train, torch.device("cpu"), quiet)

    def distance(run):
        checkpoint = torch.load(run.path / "last.pt", weights_only=True)
        model = nk.load(run.path)
        model.load_state_dict(checkpoint["model"])
        emb = model.embed(train.images)
        return float((emb @ emb.T - goal @ goal.T).square().mean())

    assert distance(taught) < 0.8 * distance(plain)


def test_an_interrupted_run_resumes_exactly(student, tmp_path, quiet):
    whole = nk.fit(student, tmp_path / "whole", reporter=quiet)
    with pytest.raises(nk.UserError):
        nk.fit(student, tmp_path / "parts", reporter=quiet, on_epoch_end=lambda epoch, metric: epoch == 2)
    assert nk.fit(student, tmp_path / "parts", reporter=quiet).result["test"] == whole.result["test"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--data", "features.npz", "--distil", "TEACHER"], "reads the images"),
        (["--data", "FOLDER", "--distil", "nowhere"], "no trained model here"),
        (["--data", "FOLDER", "--train.teacher-weight", "0"], "train.teacher_weight"),
    ],
)
def test_what_cannot_teach_is_refused(argv, message, teacher, photo_folder, tmp_path, monkeypatch, capsys):
    from helpers.studies import write_features

    monkeypatch.chdir(tmp_path)
    write_features(tmp_path / "features.npz")
    words = {"FOLDER": str(photo_folder), "TEACHER": str(teacher.path)}
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", *(words.get(word, word) for word in argv)])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
