"""Diagnostics, information measures and whitening of tensors on the second device."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from helpers.devices import DEVICE, DTYPE, assert_agree, random_batch

from nearkin import analysis
from nearkin.ops.whitening import covariance_whitening, within_class_whitening

EMB, LABELS = random_batch(60, classes=5)
CLOSE = {"rtol": 1e-4, "atol": 1e-4} if DEVICE.type == "mps" else {"rtol": 1e-8, "atol": 1e-8}


@pytest.mark.parametrize(
    "measure",
    [
        analysis.conditional_entropy,
        analysis.mutual_information,
        lambda emb, labels: analysis.feature_entropy(emb),
        lambda emb, labels: analysis.effective_rank(emb),
        lambda emb, labels: analysis.label_entropy(labels),
    ],
)
def test_a_measure(measure):
    assert_agree(measure(EMB.to(DEVICE), LABELS.to(DEVICE)), measure(EMB, LABELS), "the measure", **CLOSE)


def test_diagnose():
    expected = dataclasses.asdict(analysis.diagnose(EMB, LABELS))
    actual = dataclasses.asdict(analysis.diagnose(EMB.to(DEVICE), LABELS))
    for name, value in expected.items():
        assert_agree(actual[name], value, name, **CLOSE)


@pytest.mark.parametrize("shrinkage", [0.0, 0.5])
def test_whitening(shrinkage):
    for actual, expected in (
        (covariance_whitening(EMB.to(DEVICE), shrinkage=shrinkage), covariance_whitening(EMB, shrinkage=shrinkage)),
        (
            within_class_whitening(EMB.to(DEVICE), LABELS, dim=4, shrinkage=shrinkage),
            within_class_whitening(EMB, LABELS, dim=4, shrinkage=shrinkage),
        ),
    ):
        # The eigenvectors of XLA have six digits, also in float64.
        assert_agree(actual[0], expected[0], "the weight", rtol=1e-4, atol=1e-5)
        assert_agree(actual[1], expected[1], "the bias", rtol=1e-4, atol=1e-5)


def test_label_errors_and_duplicates():
    emb = EMB + 3 * torch.eye(8, dtype=DTYPE)[LABELS]
    emb[7] = emb[3]
    expected, actual = analysis.find_label_errors(emb, LABELS), analysis.find_label_errors(emb.to(DEVICE), LABELS)
    np.testing.assert_allclose(actual.score, expected.score, rtol=1e-3, atol=1e-3)  # computed in float32
    np.testing.assert_array_equal(actual.suggested, expected.suggested)
    pairs = analysis.find_duplicates(emb, LABELS, threshold=0.9)
    found = analysis.find_duplicates(emb.to(DEVICE), LABELS.to(DEVICE), threshold=0.9)
    assert [(d.first, d.second, d.exact) for d in found] == [(d.first, d.second, d.exact) for d in pairs]
    assert any(d.exact for d in pairs)


@pytest.mark.parametrize("name", ["contrastive_l2", "snca", "multi_similarity", "spce"])
def test_the_parts_of_a_loss(name):
    expected, actual = analysis.decompose(name, EMB, LABELS), analysis.decompose(name, EMB.to(DEVICE), LABELS)
    assert_agree(actual.tightness, expected.tightness, "tightness")
    assert_agree(actual.contrastive, expected.contrastive, "contrastive")
