"""Miners select pairs without gradients, reproducibly. Their golden values are in test_golden.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.batches import listed
from pytorch_metric_learning import miners as pml_miners
from pytorch_metric_learning.distances import CosineSimilarity

import nearkin as nk
from nearkin.losses import miners
from nearkin.losses.miners import MINERS


def pairs(n: int = 40, classes: int = 8, dim: int = 8, seed: int = 0) -> nk.Pairs:
    g = torch.Generator().manual_seed(seed)
    emb = torch.randn(n, dim, generator=g, dtype=torch.float64).requires_grad_()
    return nk.pair_up(emb, torch.randint(0, classes, (n,), generator=g))


def test_registered_miners() -> None:
    assert set(MINERS) == {"all", "hard", "semihard", "multi_similarity", "distance_weighted", "random"}
    assert miners.all(pairs()).pos.any()


@pytest.mark.parametrize("name", list(MINERS))
@pytest.mark.parametrize(("n", "classes"), [(40, 8), (40, 30), (6, 1), (1, 1), (5, 1000)])
def test_a_miner_selects_a_subset(name: str, n: int, classes: int) -> None:
    p = pairs(n, classes)
    mined = MINERS[name](p)
    assert not (mined.pos & ~p.pos).any()
    assert not (mined.neg & ~p.neg).any()
    assert mined.sim is p.sim
    loss = nk.losses.contrastive(mined) + nk.losses.triplet(mined)
    loss.backward()
    assert torch.isfinite(loss)


@pytest.mark.parametrize("name", list(MINERS))
def test_against_a_memory(name: str) -> None:
    g = torch.Generator().manual_seed(0)
    emb, refs = torch.randn(6, 5, generator=g), torch.randn(50, 5, generator=g)
    labels, ref_labels = torch.randint(0, 9, (6,), generator=g), torch.randint(0, 9, (50,), generator=g)
    mined = MINERS[name](nk.pair_up(emb, labels, refs, ref_labels))
    assert torch.isfinite(nk.losses.triplet(mined))


def test_hard_agrees_with_pml() -> None:
    g = torch.Generator().manual_seed(4)
    emb, labels = torch.randn(32, 8, generator=g, dtype=torch.float64), torch.arange(32) // 4
    want = pml_miners.BatchHardMiner(distance=CosineSimilarity())(emb, labels)
    got = miners.hard(nk.pair_up(emb, labels)).triplets
    assert listed(got) == torch.stack(want, 1).tolist()


def test_multi_similarity_agrees_with_pml() -> None:
    g = torch.Generator().manual_seed(4)
    emb, labels = torch.randn(32, 8, generator=g, dtype=torch.float64), torch.arange(32) // 4
    a1, p, a2, n = pml_miners.MultiSimilarityMiner(epsilon=0.2)(emb, labels)
    mined = miners.multi_similarity(nk.pair_up(emb, labels), epsilon=0.2)
    assert sorted(mined.pos.nonzero().tolist()) == sorted(torch.stack([a1, p], 1).tolist())
    assert sorted(mined.neg.nonzero().tolist()) == sorted(torch.stack([a2, n], 1).tolist())


@pytest.mark.parametrize("name", ["distance_weighted", "random"])
def test_random_miners_use_their_generator(name: str) -> None:
    p = pairs()

    def draw(seed: int) -> nk.Pairs:
        return MINERS[name](p, generator=torch.Generator().manual_seed(seed))

    one, again, other = draw(1), draw(1), draw(2)
    assert torch.equal(one.neg, again.neg)
    assert torch.equal(one.pos, again.pos)
    assert not torch.equal(one.neg, other.neg)
    rows = one.pos.any(1)
    assert torch.equal(one.pos.sum(1), rows.long())
    assert torch.equal(one.neg.sum(1), rows.long())


def test_distance_weighted_draws_with_its_probabilities() -> None:
    p = pairs(12, 3, dim=4)
    probability = miners.distance_weights(p)
    g = torch.Generator().manual_seed(0)
    count = sum(miners.distance_weighted(p, generator=g).neg.double() for _ in range(600))
    rows = p.pos.any(1) & (probability.sum(1) > 0)
    assert float((count[rows] / 600 - probability[rows]).abs().max()) < 0.08


def test_distance_weights_need_a_dimension() -> None:
    p = pairs()
    bare = nk.Pairs(p.sim, p.pos, p.neg)
    with pytest.raises(nk.UserError, match=r"the embedding dimensions are unknown\. Pass dim="):
        miners.distance_weighted(bare)
    torch.testing.assert_close(miners.distance_weights(bare, dim=8), miners.distance_weights(p))


def test_unknown_settings_are_rejected() -> None:
    with pytest.raises(nk.UserError, match=r"miner multi_similarity: no setting 'epsilom'\. Did you mean 'epsilon'\?"):
        miners.multi_similarity(pairs(), epsilom=0.1)
    with pytest.raises(AttributeError, match="Did you mean 'hard'"):
        _ = miners.hardd


@pytest.mark.parametrize(
    ("miner", "settings", "message"),
    [
        ("multi_similarity", {"epsilom": 0.1}, "no setting 'epsilom'. Did you mean 'epsilon'"),
        ("multi_similarity", {"epsilon": float("nan")}, "epsilon must be a finite number, got nan"),
        ("multi_similarity", {"epsilon": None}, "epsilon must be a finite number, got None"),
        ("semihard", {"band": True}, "band must be a finite number, got True"),
        ("distance_weighted", {"dim": 2.5}, "dim must be an integer, got 2.5"),
        ("random", {"generator": 3}, "generator must be a torch.Generator, got 3"),
        (miners.hard, {"band": 0.1}, "miner hard: no setting 'band'. It has no settings"),
        (None, {"epsilon": 0.1}, "miner_settings: epsilon given without a miner"),
    ],
)
def test_invalid_settings_are_rejected_at_construction(miner: object, settings: dict, message: str) -> None:
    with pytest.raises(nk.UserError, match=message):
        nk.Objective("triplet", miner=miner, miner_settings=settings)


def test_settings_may_be_numpy_or_torch_scalars() -> None:
    p = pairs()
    want = miners.semihard(p, band=0.5).triplets
    for band in (np.float32(0.5), torch.tensor(0.5), np.array(0.5)):
        assert torch.equal(miners.semihard(p, band=band).triplets, want)
    assert torch.equal(miners.semihard(p, band=None).triplets, miners.semihard(p).triplets)
    assert miners.semihard(p, band=1).triplets.shape[2] == 2
    own = nk.Objective("triplet", miner=lambda p, *, share: p, miner_settings={"share": [1, 2]})
    assert own.miner_settings == {"share": [1, 2]}
