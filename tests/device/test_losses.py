"""Every registered loss has the value and the gradients of the CPU."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from helpers.devices import DEVICE, DTYPE, assert_agree, random_batch
from torch import Tensor

import nearkin as nk
from nearkin.losses import LOSSES

CLASSES, DIM = 6, 8
MINERS = ("all", "hard", "semihard", "multi_similarity")  # without random numbers
PAIR_LOSSES = [name for name in LOSSES if LOSSES[name].inputs.pairs]


@dataclass(frozen=True)
class Case:
    name: str
    miner: str | None = None
    memory: int = 0
    matryoshka_dims: tuple[int, ...] = ()
    reduction: str = "mean"
    learned: str | None = None  # a switch of the loss
    rows: int = 20
    steps: int = 1

    def __str__(self) -> str:
        options = {k: v for k, v in vars(self).items() if k != "name" and v != getattr(Case("x"), k)}
        return "-".join([self.name, *(f"{k}={v}" for k, v in options.items())])

    def objective(self) -> nk.Objective:
        """Return the objective on the CPU with random class parameters, without dropout."""
        objective = nk.Objective(
            self.name,
            num_classes=CLASSES,
            dim=DIM,
            miner=self.miner,
            memory=self.memory,
            matryoshka_dims=self.matryoshka_dims,
            reduction=self.reduction,
            **({self.learned: True} if self.learned else {}),
            **({"dropout": 0.0} if LOSSES[self.name].inputs.dropout else {}),
        ).to(DTYPE)
        g = torch.Generator().manual_seed(1)
        for value in objective.parameters():
            if value.dim():
                value.data = torch.randn(value.shape, generator=g, dtype=DTYPE)
        return objective


# Reductions, miners and slices are the objective's work, the same for every loss: all of them with two losses, and
# every loss with one miner and with a memory.
CASES = [Case(name) for name in LOSSES]
CASES += [Case(name, reduction=reduction) for name in ("contrastive", "supcon") for reduction in ("sum", "none")]
CASES += [Case(n, matryoshka_dims=(2, 5, 8)) for n in ("contrastive", "proxy_anchor", "norm_softmax", "soft_triple")]
CASES += [Case(name, miner="multi_similarity") for name in PAIR_LOSSES]
CASES += [Case(name, miner=miner) for name in ("contrastive", "triplet") for miner in MINERS]
CASES += [Case(n, learned=s.switch) for n in LOSSES for s in LOSSES[n].inputs.learned_scalars if s.switch]
# A memory that is filled after two steps and overwritten in the third; one smaller than the batch; one with a miner.
CASES += [Case(name, memory=30, steps=3) for name in LOSSES if LOSSES[name].inputs.memory]
CASES += [Case("contrastive", memory=12, steps=2), Case("margin", memory=30, steps=3, learned="learn_beta")]
CASES += [Case("multi_similarity", miner=miner, memory=30, steps=3) for miner in MINERS]
CASES += [Case("multi_similarity", memory=30, steps=3, matryoshka_dims=(4, 8))]
CASES = list(dict.fromkeys(CASES))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_loss_has_the_value_and_the_gradients_of_the_cpu(case):
    expected = case.objective()
    actual = copy.deepcopy(expected).to(DEVICE)
    for step in range(case.steps):
        emb, labels = random_batch(case.rows, DIM, CLASSES, seed=step)
        value, grad = loss_and_gradient(expected, emb, labels)
        device_value, device_grad = loss_and_gradient(actual, emb.to(DEVICE), labels.to(DEVICE))
        assert_agree(device_value, value, "the loss")
        assert_agree(device_grad, grad, "the gradient")
    assert grad.abs().max() > 0
    for (name, p), q in zip(expected.named_parameters(), actual.parameters(), strict=True):
        assert_agree(q.grad, p.grad, f"the gradient of {name}")
    for (name, p), q in zip(expected.named_buffers(), actual.buffers(), strict=True):
        assert_agree(q, p, name)


def loss_and_gradient(objective: nk.Objective, emb: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    leaf = emb.clone().requires_grad_()
    value = objective(leaf, labels)
    value.sum().backward()
    return value.detach(), leaf.grad


@pytest.mark.parametrize("name", ["contrastive", "npair", "proxy_anchor", "softmax"])
def test_labels_on_the_cpu_are_moved_to_the_embeddings(name):
    emb, labels = random_batch(dim=DIM, classes=CLASSES)
    objective = Case(name).objective()
    expected = objective(emb, labels)
    objective.to(DEVICE)
    for given in (labels, labels.to(torch.int32), labels.tolist()):
        assert_agree(objective(emb.to(DEVICE), given), expected, "the loss")


def test_the_functions_take_class_parameters_on_the_device():
    emb, labels = random_batch(dim=DIM, classes=CLASSES)
    proxies = torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(1), dtype=DTYPE)
    expected = nk.losses.proxy_anchor(emb, labels, proxies)
    assert_agree(nk.losses.proxy_anchor(emb.to(DEVICE), labels, proxies.to(DEVICE)), expected, "the loss")
    probabilities = torch.softmax(emb[:, :CLASSES], dim=1)
    expected = Case("pce").objective()(emb, labels, probabilities)
    actual = Case("pce").objective().to(DEVICE)(emb.to(DEVICE), labels, probabilities.to(DEVICE))
    assert_agree(actual, expected, "the loss")


@pytest.mark.parametrize("name", ["proxy_anchor", "soft_triple"])
def test_proxies_start_at_the_class_means(name):
    emb, labels = random_batch(dim=DIM, classes=CLASSES)
    expected = Case(name).objective()
    actual = copy.deepcopy(expected).to(DEVICE)
    expected.init_proxies(emb, labels)
    actual.init_proxies(emb.to(DEVICE), labels.to(DEVICE))
    assert_agree(actual.proxies, expected.proxies, "the proxies")


def test_a_weighted_sum_of_objectives():
    emb, labels = random_batch(dim=DIM, classes=CLASSES)
    both = nk.losses.WeightedSum((1.0, Case("proxy_anchor").objective()), (0.1, Case("contrastive").objective()))
    expected = both(emb, labels)
    assert_agree(both.to(DEVICE)(emb.to(DEVICE), labels), expected, "the loss")


def test_a_memory_saved_on_one_device_is_loaded_on_the_other():
    first = Case("contrastive", memory=30).objective()
    first(*random_batch(dim=DIM))
    second = Case("contrastive", memory=30).objective().to(DEVICE)
    second.load_state_dict(first.state_dict())
    emb, labels = random_batch(dim=DIM, seed=1)
    assert_agree(second(emb.to(DEVICE), labels), first(emb, labels), "the loss")
