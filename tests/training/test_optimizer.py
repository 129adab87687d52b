"""Learning rates and parameter groups: what the papers and torch's own schedulers say."""

import math

import pytest
import torch

from nearkin.config.recipe import ModelConfig, TrainConfig
from nearkin.losses.objective import Objective
from nearkin.models.embedder import Embedder
from nearkin.training.step import learning_rate_factor, make_optimizer, set_learning_rate


@pytest.mark.parametrize("lr_schedule", ["one_cycle", "cosine", "constant", "step"])
def test_the_learning_rate_starts_peaks_and_ends_as_it_should(lr_schedule):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    optimizer.param_groups[0]["highest_lr"] = 2.0
    rates = []
    for step in range(101):
        set_learning_rate(optimizer, TrainConfig(lr_schedule=lr_schedule, epochs=10, step_epochs=5), step, 10)
        rates.append(optimizer.param_groups[0]["lr"])
    assert max(rates) == 2.0
    ends = {"one_cycle": (0.08, 0.0), "cosine": (2.0, 0.0), "constant": (2.0, 2.0), "step": (2.0, 0.02)}[lr_schedule]
    assert (rates[0], rates[-1]) == pytest.approx(ends)
    assert rates.index(2.0) == {"one_cycle": 20, "cosine": 0, "constant": 0, "step": 0}[lr_schedule]


def test_step_is_torchs_step_scheduler():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.25)
    hyper = TrainConfig(lr_schedule="step", epochs=10, step_epochs=3, step_factor=0.25)
    for epoch in range(10):
        assert learning_rate_factor(hyper, 7 * epoch + 6, 7) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


def test_cosine_with_warm_up_is_the_cross_entropy_papers():
    hyper = TrainConfig(lr_schedule="cosine", epochs=30, warmup_steps=100)
    total = 30 * 41
    for i in (0, 50, 98, 99, 100, 500, total - 1):
        want = min((i + 1) / 100, 0.5 * (1 + math.cos(math.pi * i / total)))
        assert learning_rate_factor(hyper, i, 41) == pytest.approx(want)


def groups_of(hyper, loss="proxy_anchor", **model):
    embedder = Embedder(ModelConfig(width=4, dim=8, **model), (3, 16, 16))
    return {g["name"]: g for g in make_optimizer(embedder, Objective(loss, num_classes=5, dim=8), hyper).param_groups}


def test_head_and_proxies_have_rates_of_their_own_and_only_matrices_decay():
    groups = groups_of(TrainConfig(lr=1e-3, head_lr=1e-2, weight_decay=0.5))
    assert {name: g["lr"] for name, g in groups.items()} == {
        "backbone": 1e-3,
        "backbone, 1-D": 1e-3,
        "head": 1e-2,
        "head, 1-D": 1e-2,
        "proxies": 0.1,
    }
    assert {name: g["weight_decay"] for name, g in groups.items()} == {
        "backbone": 0.5,
        "backbone, 1-D": 0.0,
        "head": 0.5,
        "head, 1-D": 0.0,
        "proxies": 0.0,
    }
    assert all(p.ndim <= 1 for name, g in groups.items() if "1-D" in name for p in g["params"])


def test_class_matrices_decay_where_a_recipe_says_so_and_biases_never():
    groups = groups_of(TrainConfig(weight_decay=0.5, class_decay=True), "softmax")
    assert groups["weight"]["weight_decay"] == 0.5
    assert groups["bias"]["weight_decay"] == 0.0


def test_what_is_frozen_is_not_given_to_the_optimizer():
    assert "backbone" not in groups_of(TrainConfig(), freeze="backbone")
    everything, without = groups_of(TrainConfig()), groups_of(TrainConfig(), freeze_norm="all")
    assert "backbone, 1-D" in everything
    assert "backbone, 1-D" not in without


def test_momentum_zero_turns_nesterov_off():
    embedder = Embedder(ModelConfig(width=4, dim=8), (3, 16, 16))
    objective = Objective("contrastive")
    assert not make_optimizer(embedder, objective, TrainConfig(optimizer="sgd", momentum=0.0)).defaults["nesterov"]
    assert make_optimizer(embedder, objective, TrainConfig(optimizer="sgd", momentum=0.8)).defaults["momentum"] == 0.8
