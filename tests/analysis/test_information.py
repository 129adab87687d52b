"""Mutual information of Gaussian mixtures, where it is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from nearkin.analysis import label_entropy, mutual_information
from nearkin.errors import ConfigError

# Class probabilities, distance between neighbouring class means in standard deviations, dimensions.
MIXTURES = {
    "two near": ([0.5, 0.5], 1.5, 1),
    "two unequal": ([0.8, 0.2], 2.0, 2),
    "four": ([0.25] * 4, 2.5, 2),
    "eight far": ([0.125] * 8, 6.0, 3),
    "three in five dimensions": ([0.5, 0.3, 0.2], 3.0, 5),
}


def draw(shares, gap, dim, n, seed):
    rng = np.random.default_rng(seed)
    means = np.zeros((len(shares), dim))
    means[:, 0] = gap * np.arange(len(shares))
    labels = rng.choice(len(shares), n, p=shares)
    return means, means[labels] + rng.normal(size=(n, dim)), labels


def known_information(shares, gap, dim):
    """H(Y) - E H(Y | Z) with the exact posterior, averaged over 400,000 draws: good to about 0.002 nats."""
    means, x, _ = draw(shares, gap, dim, 400_000, seed=1)
    logits = np.log(shares) - ((x[:, None] - means) ** 2).sum(2) / 2
    posterior = np.exp(logits - logits.max(1, keepdims=True))
    posterior /= posterior.sum(1, keepdims=True)
    entropy = -(posterior * np.log(np.maximum(posterior, 1e-300))).sum(1).mean()
    return -np.sum(np.multiply(shares, np.log(shares))) - entropy


@pytest.mark.parametrize("name", MIXTURES)
def test_a_gaussian_mixture(name):
    _, x, labels = draw(*MIXTURES[name], 3000, seed=0)
    found = mutual_information(torch.from_numpy(x), torch.from_numpy(labels))
    assert found == pytest.approx(known_information(*MIXTURES[name]), rel=0.1)
    assert 0 <= found <= label_entropy(labels)


def test_it_stays_within_its_limits():
    labels = torch.arange(4).repeat_interleave(50)
    noise = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    assert mutual_information(noise, labels) < 0.05  # nothing to learn from
    far = torch.eye(4).repeat_interleave(50, 0)  # equal within the class
    assert mutual_information(far, labels) == pytest.approx(math.log(4))
    assert mutual_information(torch.zeros(200, 3), labels) == 0.0
    assert mutual_information(noise, torch.arange(200)) == 0.0  # singletons
    assert mutual_information(noise, torch.zeros(200, dtype=torch.int64)) == 0.0  # one class


def test_it_does_not_depend_on_order_scale_or_block_size():
    _, x, labels = draw(*MIXTURES["four"], 1500, seed=3)  # more than one block of rows
    emb, labels = torch.from_numpy(x), torch.from_numpy(labels)
    value = mutual_information(emb, labels)
    order = torch.randperm(1500, generator=torch.Generator().manual_seed(0))
    assert mutual_information(emb[order] * 64 + 7, labels[order]) == pytest.approx(value, abs=1e-9)
    with pytest.raises(ConfigError, match="neighbours"):
        mutual_information(emb, labels, neighbours=0)
