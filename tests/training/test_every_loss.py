"""Every registered loss trains with its default settings, and so do sums, reductions and regularisers."""

import numpy as np
import pytest

from nearkin import cli
from nearkin._common.progress import Reporter
from nearkin.losses import LOSSES
from nearkin.training import loop
from nearkin.training.run import Run

TRAIN = ("--train.epochs", "2", "--train.batch-size", "24", "--train.samples-per-class", "4", "--model.dim", "8")


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    rng = np.random.default_rng(0)
    labels = np.arange(20).repeat(8)
    path = tmp_path_factory.mktemp("features") / "f.npz"
    np.savez(path, features=rng.normal(size=(20, 12))[labels] + rng.normal(size=(160, 12)), labels=labels)
    return path


def train(capsys, features, runs, *flags) -> Run:
    code = cli.main(["train", "--data", str(features), "--runs", str(runs), "--quiet", *TRAIN, *flags])
    assert not code, capsys.readouterr().err
    [path] = runs.iterdir()
    return Run(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(LOSSES))
def test_every_loss_trains_with_default_settings(capsys, features, tmp_path, name):
    run = train(capsys, features, tmp_path / "runs", "--loss", name)
    assert run.recipe.loss.name == name
    assert all(np.isfinite(event["loss"]) for event in run.events() if event["event"] == "epoch" and event["epoch"])


@pytest.mark.parametrize(
    ("flags", "loss"),
    [
        (("--loss", "proxy_anchor+0.1*contrastive", "--memory", "16"), "proxy_anchor+0.1*contrastive"),
        (("--loss", "dynamic_arcface+hierarchical_triplet"), "dynamic_arcface+hierarchical_triplet"),
        (("--loss", "triplet", "--reduction", "nonzero", "--loss.regularizers", "lp=0.1,zero_mean=1"), "triplet"),
    ],
)
def test_sums_reductions_and_regularizers_train_and_resume(capsys, features, tmp_path, monkeypatch, flags, loss):
    whole = train(capsys, features, tmp_path / "whole", *flags)
    assert whole.recipe.loss.name == loss
    assert "*" not in whole.path.name
    train_epoch = loop.train_epoch

    def interrupted(session, epoch, sigint_received):
        if epoch == 1:
            raise KeyboardInterrupt
        train_epoch(session, epoch, sigint_received)

    quiet = Reporter(quiet=True)
    monkeypatch.setattr(loop, "train_epoch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.fit(whole.recipe, tmp_path / "resumed", reporter=quiet)
    monkeypatch.setattr(loop, "train_epoch", train_epoch)
    resumed = loop.fit(whole.recipe, tmp_path / "resumed", reporter=quiet)
    assert resumed.path.name == whole.path.name
    losses = [[e["loss"] for e in run.events() if e["event"] == "epoch"] for run in (whole, resumed)]
    assert losses[0] == losses[1]
    assert resumed.result["test"]["trained"] == whole.result["test"]["trained"]
