"""Sums over all triplets, without enumerating them, equal three nested loops in value and gradient."""

from __future__ import annotations

import pytest
import torch
from helpers.batches import listed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import nearkin as nk
from nearkin.ops.pairs import Pairs


def brute(sim: Tensor, pos: Tensor, neg: Tensor, margin: float) -> tuple[float, int, Tensor]:
    """Return the sum and the number of all triplets, and the gradient of the sum on the similarities."""
    total, count, grad = 0.0, 0, torch.zeros_like(sim)
    for a in range(len(sim)):
        for p in pos[a].nonzero().flatten().tolist():
            for n in neg[a].nonzero().flatten().tolist():
                violation = float(sim[a, n] + margin - sim[a, p])
                count += 1
                if violation > 0:
                    total += violation
                    grad[a, n] += 1
                    grad[a, p] -= 1
    return total, count, grad


def check(pairs: Pairs, margin: float) -> None:
    sim = pairs.sim.detach().clone().requires_grad_()
    total, count, grad = brute(sim.detach(), pairs.pos, pairs.neg, margin)
    ours = Pairs(sim, pairs.pos, pairs.neg)
    value = nk.losses.triplet(ours, margin=margin, reduction="sum")
    value.backward()
    assert float(value.detach()) == pytest.approx(total, rel=1e-9, abs=1e-12)
    assert torch.equal(sim.grad, grad)
    mean = nk.losses.triplet(Pairs(sim.detach(), pairs.pos, pairs.neg), margin=margin)
    assert float(mean) == pytest.approx(total / max(count, 1), rel=1e-9, abs=1e-12)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=14),
    seed=st.integers(0, 10**6),
    margin=st.sampled_from([0.0, 0.1, 0.5, 2.5]),
)
def test_random_batches(labels: list[int], seed: int, margin: float) -> None:
    emb = torch.randn(len(labels), 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    check(nk.pair_up(emb, torch.tensor(labels)), margin)


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(
    grid=st.lists(st.integers(-3, 3), min_size=48, max_size=48),
    labels=st.lists(st.integers(0, 2), min_size=8, max_size=8),
)
def test_ties(grid: list[int], labels: list[int]) -> None:
    """Similarities on a coarse grid: many are equal, and many violations are exactly 0."""
    y, refs = torch.tensor(labels[:6]), torch.tensor(labels)
    same = y[:, None] == refs
    check(Pairs(torch.tensor(grid, dtype=torch.float64).view(6, 8) / 4, same, ~same), 0.25)


def test_batch_against_memory() -> None:
    g = torch.Generator().manual_seed(3)
    emb, refs = torch.randn(7, 5, generator=g).double(), torch.randn(31, 5, generator=g).double()
    labels, ref_labels = torch.randint(0, 12, (7,), generator=g), torch.randint(0, 12, (31,), generator=g)
    pairs = nk.pair_up(emb, labels, refs, ref_labels)
    check(pairs, 0.3)


def test_many_positives_in_float32() -> None:
    """Two classes of 200 samples: long prefix sums stay accurate."""
    emb = torch.randn(400, 16, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(400) % 2
    got = nk.losses.triplet(nk.pair_up(emb, labels))
    want = nk.losses.triplet(nk.pair_up(emb.double(), labels))
    assert float(got) == pytest.approx(float(want), rel=1e-5)


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(labels=st.lists(st.integers(0, 3), min_size=2, max_size=12), seed=st.integers(0, 10**6), coarse=st.booleans())
def test_semihard(labels: list[int], seed: int, coarse: bool) -> None:
    """Per (anchor, positive): the nearest negative strictly farther than the positive, lowest index on ties."""
    n = len(labels)
    sim = torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    sim = (sim * 2).round() / 2 if coarse else sim
    same = torch.tensor(labels)[:, None] == torch.tensor(labels)
    pairs = Pairs(sim, same & ~torch.eye(n, dtype=torch.bool), ~same)
    want = []
    for a in range(n):
        for p in range(n):
            if p != a and labels[p] == labels[a]:
                below = [k for k in range(n) if labels[k] != labels[a] and sim[a, k] < sim[a, p]]
                if below:
                    want.append([a, p, max(below, key=lambda k: (float(sim[a, k]), -k))])
    mined = nk.miners.semihard(pairs)
    assert listed(mined.triplets) == want
    terms = [max(0.0, float(sim[a, k] - sim[a, p]) + 0.4) for a, p, k in want]
    value = nk.losses.triplet(mined, margin=0.4)
    assert float(value) == pytest.approx(sum(terms) / max(len(terms), 1), abs=1e-12)
    banded = nk.miners.semihard(pairs, band=0.4)
    assert listed(banded.triplets) == [t for t, term in zip(want, terms, strict=True) if term > 0]
