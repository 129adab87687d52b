"""Lemma 1 against golden values, and the lambda of PCE against the Hessian of the log-partition."""

import json

import pytest
import torch
from helpers.paths import GOLDEN

from nearkin.analysis import lemma_1, pce_lambda
from nearkin.errors import DataError


def test_lemma_1_against_golden_values():
    golden = json.loads(GOLDEN.read_text())
    batch, expected = golden["batches"]["A_balanced"], golden["lemma1"]
    found = lemma_1(torch.tensor(batch["embeddings"], dtype=torch.float64), batch["labels"], sigma=0.1)
    keys = {
        "tightness of contrastive": ("T_contrast", "T_center"),  # four classes: the factor 4 / K is 1
        "tightness of snca": ("T_SNCA", "T_SNCA_upper_bound"),
        "tightness of multi_similarity": ("T_MS", "T_MS_lower_bound"),
        "contrast of snca": ("C_SNCA", "C_SNCA_lower_bound"),
        "contrast of multi_similarity": ("C_MS", "C_MS_lower_bound"),
    }
    assert found.keys() == keys.keys()
    for name, (value, bound) in keys.items():
        assert found[name][:2] == pytest.approx((expected[value], expected[bound]), rel=1e-9), name


@pytest.mark.parametrize("seed", range(6))
def test_bounds_hold(seed):
    generator = torch.Generator().manual_seed(seed)
    classes, m = 3 + seed % 3, 2 + seed % 4
    emb = torch.randn(classes * m, 5, generator=generator)
    for name, (value, bound, relation) in lemma_1(emb, torch.arange(classes).repeat_interleave(m)).items():
        holds = {"<=": value <= bound + 1e-9, ">=": value >= bound - 1e-9, "==": abs(value - bound) < 1e-9}
        assert holds[relation], name


def test_classes_of_different_sizes_are_refused():
    with pytest.raises(DataError, match="same number of samples"):
        lemma_1(torch.eye(3), [0, 0, 1])


def test_lambda_of_pce_is_the_smallest_eigenvalue_of_the_class_blocks():
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    theta = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    hessian = torch.autograd.functional.hessian(lambda t: torch.logsumexp(z @ t.T, 1).mean(), theta)
    smallest = min(float(torch.linalg.eigvalsh(hessian[k, :, k])[0]) for k in range(4))
    assert pce_lambda(z, (z @ theta.T).softmax(1)) == pytest.approx(smallest, rel=1e-9)
    # Fewer samples than dimensions:
    assert pce_lambda(z[:2], (z[:2] @ theta.T).softmax(1)) == pytest.approx(
        0, abs=1e-12
    )  # fewer samples than dimensions
