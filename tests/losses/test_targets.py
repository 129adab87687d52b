"""Own pairs, weights, several labels and hierarchies of labels, against loops over single terms in float64."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.batches import batch

import nearkin as nk
from nearkin.errors import ConfigError, DataError
from nearkin.losses import LOSSES

N, CLASSES, DIM = 14, 4, 5
PAIR_LOSSES = [
    name
    for name, entry in LOSSES.items()
    if entry.inputs.pairs and not entry.inputs.needs_classes and name != "npair_mc"
]


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


def objective(name: str, **options: object) -> nk.Objective:
    return nk.Objective(name, num_classes=CLASSES, dim=DIM, **options).double()


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_masks_of_the_labels_are_the_labels(name):
    emb, labels = batch(N, CLASSES, DIM)
    same = labels[:, None] == labels
    masks = (same & ~torch.eye(N, dtype=torch.bool), ~same)
    want, got = (objective(name)(emb, *args, **own) for args, own in (((labels,), {}), ((), {"pairs": masks})))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    indices = (*masks[0].nonzero(as_tuple=True), *masks[1].nonzero(as_tuple=True))
    torch.testing.assert_close(objective(name)(emb, pairs=indices), want, rtol=1e-12, atol=1e-12)


def test_triplets_and_pairs_against_a_loop():
    emb, _ = batch(N, CLASSES, DIM)
    a, p, n = torch.randint(0, N, (3, 40), generator=torch.Generator().manual_seed(0))
    hinges = [max(0.0, cosine(emb[i], emb[k]) - cosine(emb[i], emb[j]) + 0.1) for i, j, k in zip(a, p, n, strict=True)]
    got = objective("triplet", margin=0.1, reduction="sum")(emb, pairs=(a, p, n))
    assert float(got) == pytest.approx(math.fsum(hinges), rel=1e-12)
    refs, _ = batch(9, CLASSES, DIM, seed=3)
    p, n = p % 9, n % 9
    hinges = [
        max(0.0, cosine(emb[i], refs[k]) - cosine(emb[i], refs[j]) + 0.1) for i, j, k in zip(a, p, n, strict=True)
    ]
    got = objective("triplet", margin=0.1, reduction="sum")(emb, refs=refs, pairs=(a, p, n))
    assert float(got) == pytest.approx(math.fsum(hinges), rel=1e-12)
    none = objective("triplet")(emb.requires_grad_(), pairs=([], [], []))
    none.backward()
    assert none.item() == 0.0
    assert not emb.grad.any()


def test_several_labels_share_one_or_none():
    emb, _ = batch(N, CLASSES, DIM)
    targets = torch.rand(N, 6, generator=torch.Generator().manual_seed(1)) < 0.3
    scale = 3.0
    values = []
    for i in range(N):
        sets = [{t for t in range(6) if targets[k, t]} for k in range(N)]
        pos = [j for j in range(N) if j != i and sets[i] & sets[j]]
        every = [cosine(emb[i], emb[k]) * scale for k in range(N) if k != i]
        total = math.log(math.fsum(map(math.exp, every)))
        if pos:
            values.append(math.fsum(total - scale * cosine(emb[i], emb[j]) for j in pos) / len(pos))
    got = objective("supcon", temperature=1 / scale)(emb, targets)
    assert 0 < len(values) < N or len(values) == N
    assert float(got) == pytest.approx(math.fsum(values) / len(values), rel=1e-12)


def test_a_hierarchy_is_the_mean_over_its_levels():
    emb, fine = batch(N, CLASSES, DIM)
    levels = torch.stack([fine // 2, fine], 1)
    want = [float(objective("multi_similarity")(emb, labels)) for labels in (fine // 2, fine)]
    assert float(objective("multi_similarity")(emb, levels)) == pytest.approx(sum(want) / 2, rel=1e-12)
    refs, ref_fine = batch(9, CLASSES, DIM, seed=3)
    ref_levels = torch.stack([ref_fine // 2, ref_fine], 1)
    want = [float(objective("supcon")(emb, levels[:, k], refs=refs, ref_labels=ref_levels[:, k])) for k in range(2)]
    assert float(objective("supcon")(emb, levels, refs=refs, ref_labels=ref_levels)) == pytest.approx(sum(want) / 2)


@pytest.mark.parametrize("name", [name for name, entry in LOSSES.items() if entry.has_sample_values])
def test_weights_multiply_the_values(name):
    emb, labels = batch(N, CLASSES, DIM)
    weights, of_class = torch.rand(N, dtype=torch.float64), torch.tensor([0.5, 2.0, 0.0, 1.0], dtype=torch.float64)

    def make(reduction, **options):
        torch.manual_seed(0)
        return objective(name, reduction=reduction, **options).eval()

    values = make("none")(emb, labels)
    torch.testing.assert_close(make("none")(emb, labels, weights=weights), values * weights)
    both = make("sum", class_weights=of_class)(emb, labels, weights=weights)
    torch.testing.assert_close(both, (values * weights * of_class[labels]).sum())
    torch.testing.assert_close(make("mean")(emb, labels, weights=2 * torch.ones(N)), 2 * make("mean")(emb, labels))
    nonzero = values[values != 0]
    want = nonzero.mean() if len(nonzero) else values.sum()
    torch.testing.assert_close(make("nonzero")(emb, labels), want)


def test_what_cannot_be_used_is_refused():
    emb, labels = batch(N, CLASSES, DIM)
    masks = torch.zeros(2, N, N, dtype=torch.bool).unbind()
    for name, kwargs, message in (
        ("proxy_anchor", {"pairs": masks}, "proxy_anchor compares samples with classes: pass labels, and no pairs"),
        ("npair_mc", {"pairs": masks}, "npair_mc takes one pair of every class"),
        ("proxy_anchor", {"weights": torch.ones(N)}, "proxy_anchor has no value per sample"),
        ("npair_mc", {"weights": torch.ones(N)}, "npair_mc has no value per sample"),
    ):
        with pytest.raises(ConfigError, match=message):
            objective(name)(emb, labels, **kwargs)
    with pytest.raises(ConfigError, match="exclude a memory"):
        objective("contrastive", memory=20)(emb, labels, pairs=masks)
    with pytest.raises(ConfigError, match="contrastive: pass labels, or for a pair loss pairs"):
        objective("contrastive")(emb)
    with pytest.raises(ConfigError, match="no value per sample"):
        objective("proxy_anchor", class_weights=[1.0] * CLASSES)
    with pytest.raises(ConfigError, match=r"class_weights: expected one number per class, got shape \[3\]"):
        objective("contrastive", class_weights=[1.0] * 3)
    for pairs in ((), (masks[0],), (masks[0][:3], masks[1]), ([0, 1], [1], [0]), ([0.5], [1.0], [2.0])):
        with pytest.raises(DataError, match=r"pairs: expected two bool masks \[14, 14\], or integer indices"):
            objective("contrastive")(emb, pairs=pairs)
    with pytest.raises(DataError, match="pairs: expected indices from 0 to 13, got up to 14"):
        objective("contrastive")(emb, pairs=([0], [14], [0], [1]))
    for weights in (torch.ones(3), [1.0] * N):
        with pytest.raises(DataError, match=r"weights: expected a tensor \[14\]"):
            objective("contrastive")(emb, labels, weights=weights)
    with pytest.raises(DataError, match=r"ref_labels: expected torch.bool \[M, 6\], as labels"):
        objective("supcon")(emb, torch.ones(N, 6, dtype=torch.bool), refs=emb, ref_labels=labels)
