"""Miners select pairs without gradients, reproducibly. Their golden values are in test_golden.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
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
    assert set(MINERS) == {
        "all",
        "hard",
        "semihard",
        "multi_similarity",
        "distance_weighted",
        "random",
        "easy_positive",
        "n_hardest",
        "pair_margin",
        "triplet_margin",
        "angular",
        "hard_aware",
        "uniform_histogram",
    }
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


@pytest.mark.parametrize("name", [name for name in MINERS if name != "angular"])  # it compares a batch with itself
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
    assert [[anchor, *pair] for anchor, (pair,) in enumerate(got.tolist())] == torch.stack(want, 1).tolist()


def test_multi_similarity_agrees_with_pml() -> None:
    g = torch.Generator().manual_seed(4)
    emb, labels = torch.randn(32, 8, generator=g, dtype=torch.float64), torch.arange(32) // 4
    a1, p, a2, n = pml_miners.MultiSimilarityMiner(epsilon=0.2)(emb, labels)
    mined = miners.multi_similarity(nk.pair_up(emb, labels), epsilon=0.2)
    assert sorted(mined.pos.nonzero().tolist()) == sorted(torch.stack([a1, p], 1).tolist())
    assert sorted(mined.neg.nonzero().tolist()) == sorted(torch.stack([a2, n], 1).tolist())


def pml_batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Unbalanced classes with two singletons, embeddings of length 1."""
    g = torch.Generator().manual_seed(seed)
    emb = torch.randn(24, 4, generator=g, dtype=torch.float64)
    labels = torch.cat([torch.tensor([5, 6]), torch.randint(0, 4, (22,), generator=g)])
    return torch.nn.functional.normalize(emb), labels


def assert_selects(mined: nk.Pairs, want: tuple[torch.Tensor, ...]) -> None:
    """Compare with the indices of PML: pairs (a1, p, a2, n), or triplets (a, p, n)."""
    a1, p, a2, n = want if len(want) == 4 else (want[0], want[1], want[0], want[2])
    assert set(map(tuple, mined.pos.nonzero().tolist())) == set(zip(a1.tolist(), p.tolist(), strict=True))
    assert set(map(tuple, mined.neg.nonzero().tolist())) == set(zip(a2.tolist(), n.tolist(), strict=True))


COS = {"distance": CosineSimilarity()}
PML_MINERS = [
    ("easy_positive", {}, pml_miners.BatchEasyHardMiner("easy", "semihard", **COS)),
    ("easy_positive", {"negatives": "hard"}, pml_miners.BatchEasyHardMiner("easy", "hard", **COS)),
    ("n_hardest", {"negatives": 1}, pml_miners.BatchEasyHardMiner("hard", "hard", **COS)),
    ("pair_margin", {"pos_margin": 0.7, "neg_margin": 0.2}, pml_miners.PairMarginMiner(0.7, 0.2, **COS)),
    *(
        ("triplet_margin", {"margin": margin, "kind": kind}, pml_miners.TripletMarginMiner(margin, kind, **COS))
        for kind in ("all", "hard", "semihard", "easy")
        for margin in (0.05, 0.3)
    ),
    ("angular", {"angle_degrees": 20.0}, pml_miners.AngularMiner(angle=20)),
    ("angular", {"angle_degrees": 40.0}, pml_miners.AngularMiner(angle=40)),
]


@pytest.mark.parametrize(("name", "settings", "theirs"), PML_MINERS)
def test_agrees_with_pml(name: str, settings: dict[str, float], theirs: torch.nn.Module) -> None:
    for seed in range(10):
        emb, labels = pml_batch(seed)
        assert_selects(MINERS[name](nk.pair_up(emb, labels), **settings), theirs(emb, labels))


@pytest.mark.parametrize("share", [0.5, 0.2])
def test_hard_aware_agrees_with_pml(share: float) -> None:
    """In the similarities that it selects: both directions of a pair tie, and one may be cut off."""
    for seed in range(10):
        emb, labels = pml_batch(seed)
        p = nk.pair_up(emb, labels)
        mined = miners.hard_aware(p, share=share)
        a1, i, a2, j = pml_miners.HDCMiner(share, **COS)(emb, labels)
        torch.testing.assert_close(p.sim[mined.pos].sort()[0], p.sim[a1, i].sort()[0])
        torch.testing.assert_close(p.sim[mined.neg].sort()[0], p.sim[a2, j].sort()[0])


def test_n_hardest_selects_several() -> None:
    p = pairs(24, 4)
    mined = miners.n_hardest(p, positives=2, negatives=3)
    for i in range(24):
        order = sorted(range(24), key=p.sim[i].tolist().__getitem__)
        assert mined.pos[i].nonzero().flatten().tolist() == sorted([j for j in order if p.pos[i, j]][:2])
        assert mined.neg[i].nonzero().flatten().tolist() == sorted([j for j in order if p.neg[i, j]][-3:])


def test_uniform_histogram_draws_up_to_a_number_of_each_bin() -> None:
    p = pairs(40, 4, seed=3)
    mined = miners.uniform_histogram(
        p, bins=10, pos_per_bin=3, neg_per_bin=5, generator=torch.Generator().manual_seed(0)
    )
    for mask, drawn, most in ((p.pos, mined.pos, 3), (p.neg, mined.neg, 5)):
        all_pairs, selected = p.sim.detach()[mask], p.sim.detach()[drawn]
        edges = torch.linspace(float(all_pairs.min()), float(all_pairs.max()) + 1e-9, 11, dtype=torch.float64)
        present, count = (torch.histogram(x, edges).hist for x in (all_pairs, selected))
        assert count.tolist() == present.clamp(max=most).tolist()


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
        ("triplet_margin", {"kind": "soft"}, "kind must be one of all, hard, semihard, easy, got 'soft'"),
        ("easy_positive", {"negatives": "easy"}, "negatives must be one of semihard, hard, got 'easy'"),
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
