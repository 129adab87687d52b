"""Pairs, pair_up, geometry and the masked reductions."""

from __future__ import annotations

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch

import nearkin as nk
from nearkin.ops import log1p_sum_exp, log_sum_exp, one_pair_per_class, plain
from nearkin.ops.geometry import gram, unit, zero_or_root


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_self_pairs_are_removed_by_index_and_duplicates_stay() -> None:
    emb = torch.ones(3, 2)
    pairs = nk.pair_up(emb, torch.tensor([1, 1, 2]))
    assert pairs.pos.tolist() == [[False, True, False], [True, False, False], [False, False, False]]
    assert pairs.neg.tolist() == [[False, False, True], [False, False, True], [True, True, False]]


@pytest.mark.parametrize("classes", [2, 40])
def test_masks(classes: int) -> None:
    labels = torch.randint(0, classes, (60,), generator=torch.Generator().manual_seed(1)) * 2**40 - 5
    pairs = nk.pair_up(randn(60, 4), labels)
    ids = labels.tolist()
    assert pairs.pos.tolist() == [[a == b and i != j for j, b in enumerate(ids)] for i, a in enumerate(ids)]
    assert pairs.neg.tolist() == [[a != b for b in ids] for a in ids]
    for context in (nullcontext, plain):
        with context():
            columns, is_positive = pairs.positive_columns()
        found = [c[m].tolist() for c, m in zip(columns, is_positive, strict=True)]
        assert found == [row.nonzero().flatten().tolist() for row in pairs.pos]
    assert columns.shape == (60, 60)  # off the host the shape does not depend on the labels


def test_labels_that_are_equal_in_float32() -> None:
    labels = torch.tensor([2**24, 2**24 + 1, 2**62, 2**62 + 1])
    assert not nk.pair_up(randn(4, 3), labels).pos.any()


@pytest.mark.parametrize(
    "labels",
    [
        ["a", "a", "b"],
        np.array(["a", "a", "b"]),
        np.array(["a", "a", "b"], dtype=object),
        [None] * 3,
        None,
        [2**70] * 3,
    ],
    ids=["strings", "array of strings", "array of objects", "list of None", "None", "beyond 64 bits"],
)
def test_labels_that_are_not_integers(labels: object) -> None:
    with pytest.raises(nk.UserError, match=r"labels: expected integers, got .* Number the classes: np\.unique"):
        nk.pair_up(randn(3, 2), labels)


def test_references() -> None:
    emb, refs = randn(3, 4), randn(5, 4, seed=1)
    labels, ref_labels = torch.tensor([0, 1, 2]), torch.tensor([0, 1, 1, 0, 5])
    pairs = nk.pair_up(emb, labels, refs, ref_labels, self_columns=torch.tensor([3, 1, 0]))
    want = torch.nn.functional.normalize(emb) @ torch.nn.functional.normalize(refs).t()
    torch.testing.assert_close(pairs.sim, want)
    assert pairs.pos.nonzero().tolist() == [[0, 0], [1, 2]]
    # A positive that is the anchor itself is in neither mask.
    assert not pairs.neg[0, 3]
    assert pairs.neg[2].all()


def test_squares_of_zero_vectors() -> None:
    emb = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    pairs = nk.pair_up(emb, torch.tensor([0, 0]))
    assert pairs.distance().tolist() == [[0.0, 1.0], [1.0, 0.0]]
    raw = nk.pair_up(emb, torch.tensor([0, 0]), metric="dot")
    assert raw.distance().tolist() == [[0.0, 5.0], [5.0, 0.0]]


def test_distances_of_near_duplicates_are_zero_with_zero_gradient() -> None:
    x = randn(1, 512).float().expand(4, 512).clone().requires_grad_()
    distance = nk.pair_up(x, torch.arange(4)).distance()
    distance.sum().backward()
    assert torch.equal(distance, torch.zeros(4, 4))
    assert torch.equal(x.grad, torch.zeros_like(x))


def test_one_long_vector_does_not_erase_the_distances_between_others() -> None:
    """Values and gradients in float32, against differences in float64."""
    x = randn(9, 3) * 0.5
    x[4] *= 2000
    x[8] = x[7]
    leaf, exact = x.float().requires_grad_(), x.float().double().requires_grad_()
    distance = nk.pair_up(leaf, torch.arange(9), metric="dot").distance()
    differ = (exact[:, None] - exact).square().sum(2)
    far = differ > 0
    torch.testing.assert_close(distance.double()[far], differ[far].sqrt(), rtol=1e-4, atol=1e-5)
    assert torch.equal(distance[~far], torch.zeros(11))  # each from itself, and rows 7 and 8 from each other
    far[4] = far[:, 4] = False
    distance[far].sum().backward()
    differ[far].sqrt().sum().backward()
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=1e-3, atol=1e-4)


def test_one_pair_per_class() -> None:
    emb = randn(7, 3)
    pairs = one_pair_per_class(emb, torch.tensor([5, 9, 5, 1, 9, 5, 9]))
    torch.testing.assert_close(pairs.sim, emb[[0, 1]] @ emb[[2, 4]].t())
    assert pairs.pos.tolist() == [[True, False], [False, True]]
    empty = one_pair_per_class(emb, torch.arange(7))
    assert empty.sim.shape == (0, 0)
    with plain():  # a static shape: N / 2, of which two are used
        static = one_pair_per_class(emb, torch.tensor([5, 9, 5, 1, 9, 5, 9]))
    assert static.sim.shape == (3, 3)
    torch.testing.assert_close(static.sim[:2, :2], pairs.sim)
    assert static.pos.nonzero().tolist() == [[0, 0], [1, 1]]
    assert static.neg.nonzero().tolist() == [[0, 1], [1, 0]]


def test_unit() -> None:
    x = randn(4, 3)
    x[2] = 0
    x.requires_grad_()
    f = unit(x)
    torch.testing.assert_close(f.norm(dim=1), torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64))
    f.sum().backward()
    assert torch.equal(x.grad[2], torch.zeros(3, dtype=torch.float64))
    assert torch.autograd.gradcheck(unit, randn(4, 3).requires_grad_())
    # The squares overflow float32, the direction is still exact.
    torch.testing.assert_close(unit(torch.tensor([[3e30, 4e30]])), torch.tensor([[0.6, 0.8]]))


@pytest.mark.parametrize("n", [3, 300])
def test_gram(n: int) -> None:
    x = randn(n, 5)
    torch.testing.assert_close(gram(x), x @ x.t())


@pytest.mark.parametrize("filled", [0.001, 0.9], ids=["sparse", "dense"])
def test_gram_gradient_sparse_and_dense(filled: float) -> None:
    x = randn(300, 5).requires_grad_()
    weight = randn(300, 300, seed=1) * (torch.rand(300, 300, generator=torch.Generator().manual_seed(2)) < filled)
    (gram(x) * weight).sum().backward()
    torch.testing.assert_close(x.grad, (weight + weight.t()) @ x.detach())


def test_zero_or_root() -> None:
    x = torch.tensor([4.0, 0.0, -1e-17], dtype=torch.float64, requires_grad=True)
    root = zero_or_root(x, 1e-16)
    root.sum().backward()
    assert root.tolist() == [2.0, 0.0, 0.0]
    assert x.grad.tolist() == [0.25, 0.0, 0.0]


def test_log_sums() -> None:
    x = torch.tensor([[800.0, 1.0, 2.0], [-900.0, 5.0, 5.0], [1.0, 1.0, 1.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    total = log_sum_exp(x, mask)
    assert total.tolist() == [800.0, -900.0, -math.inf]
    with_one = log1p_sum_exp(x, mask, 0.5, 1.0)
    torch.testing.assert_close(with_one, torch.tensor([399.5, 0.0, 0.0], dtype=torch.float64))
    (total[:2].sum() + with_one.sum()).backward()
    want = torch.tensor([[1.5, 0, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(x.grad, want)


def test_error_messages() -> None:
    emb, labels = randn(4, 3), torch.tensor([0, 0, 1, 1])
    with pytest.raises(nk.UserError, match="metric: expected 'cosine' or 'dot', got 'l2'"):
        nk.pair_up(emb, labels, metric="l2")
    with pytest.raises(nk.UserError, match="pass refs and ref_labels together"):
        nk.pair_up(emb, labels, emb)
    with pytest.raises(nk.UserError, match="refs: expected 3 dimensions, as the embeddings have, got 2"):
        nk.pair_up(emb, labels, emb[:, :2], labels)
    with pytest.raises(nk.UserError, match=r"expected a float tensor \[N, D\], got torch.int64 \[4\]"):
        nk.pair_up(labels, labels)
    with pytest.raises(nk.UserError, match="the batch is empty"):
        nk.pair_up(emb[:0], labels[:0])
    with pytest.raises(nk.UserError, match="triplet takes Pairs"):
        nk.losses.triplet(emb, labels)
    with pytest.raises(nk.UserError, match=r"'normalize' is a setting of nk\.Objective"):
        nk.losses.contrastive_l2(nk.pair_up(emb, labels), normalize=False)
