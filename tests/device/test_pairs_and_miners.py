"""Pairs and miners on the second device."""

from __future__ import annotations

import pytest
import torch
from helpers.batches import listed
from helpers.devices import DEVICE, DTYPE, assert_agree, random_batch, tied_batch

import nearkin as nk
from nearkin.losses.miners import MINERS
from nearkin.ops.checks import plain
from nearkin.ops.pairs import one_pair_per_class

BATCHES = {"small": random_batch(), "ties": tied_batch(), "many rows": random_batch(300, classes=40)}


@pytest.fixture(params=BATCHES)
def batch(request):
    return BATCHES[request.param]


def assert_pairs_agree(actual: nk.Pairs, expected: nk.Pairs) -> None:
    for name in ("sim", "anchor_sq", "ref_sq"):
        assert_agree(getattr(actual, name), getattr(expected, name), name)
    for name in ("pos", "neg"):
        assert torch.equal(getattr(actual, name).cpu(), getattr(expected, name)), name
    assert (actual.triplets is None) == (expected.triplets is None)
    if expected.triplets is not None:
        assert listed(actual.triplets) == listed(expected.triplets)


@pytest.mark.parametrize("metric", ["cosine", "dot"])
def test_pair_up(batch, metric):
    emb, labels = batch
    expected = nk.pair_up(emb, labels, metric=metric)
    assert_pairs_agree(nk.pair_up(emb.to(DEVICE), labels, metric=metric), expected)
    expected = nk.pair_up(emb[:9], labels[:9], emb[9:], labels[9:], metric=metric)
    assert_pairs_agree(
        nk.pair_up(emb[:9].to(DEVICE), labels[:9], emb[9:].to(DEVICE), labels[9:], metric=metric), expected
    )


def test_distances_and_one_pair_per_class(batch):
    emb, labels = batch
    # The root of a difference of squares near 0 has half the digits.
    root = torch.finfo(DTYPE).eps ** 0.5
    expected, actual = nk.pair_up(emb, labels), nk.pair_up(emb.to(DEVICE), labels)
    assert_agree(actual.distance(), expected.distance(), "the distance", rtol=root, atol=10 * root)
    with plain():  # off the CPU its shape does not depend on the labels
        expected = one_pair_per_class(emb, labels)
    assert_pairs_agree(one_pair_per_class(emb.to(DEVICE), labels), expected)


SAME_ON_EVERY_DEVICE = [name for name in MINERS if name not in ("random", "distance_weighted", "uniform_histogram")]


@pytest.mark.parametrize("name", SAME_ON_EVERY_DEVICE)
def test_a_miner_selects_what_it_selects_on_the_cpu(batch, name):
    expected, actual = nk.pair_up(*batch), nk.pair_up(batch[0].to(DEVICE), batch[1])
    if name == "hard_aware" or (name != "all" and batch is BATCHES["ties"]):
        # Equal similarities (for hard_aware, of both directions): devices round them differently, so both get the same.
        actual = nk.Pairs(expected.sim.to(DEVICE), actual.pos, actual.neg, actual.anchor_sq, actual.ref_sq)
    miner = getattr(nk.miners, name)
    assert_pairs_agree(miner(actual), miner(expected))


@pytest.mark.parametrize("name", ["random", "distance_weighted"])
def test_a_random_miner_selects_one_legal_pair_of_each_type(batch, name):
    pairs = nk.pair_up(batch[0].to(DEVICE), batch[1])
    mined = getattr(nk.miners, name)(pairs)
    for drawn, allowed in ((mined.pos, pairs.pos), (mined.neg, pairs.neg)):
        assert drawn.device.type == DEVICE.type
        assert not (drawn & ~allowed).any()
    has_both = (pairs.pos.any(1) & pairs.neg.any(1)).cpu()
    for drawn in (mined.pos.sum(1).cpu(), mined.neg.sum(1).cpu()):
        assert (drawn <= has_both).all()
        assert name != "random" or torch.equal(drawn, has_both.long())


@pytest.mark.parametrize("name", ["random", "distance_weighted"])
def test_a_generator_of_the_cpu_draws_the_same_pairs(name):
    emb, labels = random_batch()
    miner = getattr(nk.miners, name)
    expected = miner(nk.pair_up(emb, labels), generator=torch.Generator().manual_seed(7))
    actual = miner(nk.pair_up(emb.to(DEVICE), labels), generator=torch.Generator().manual_seed(7))
    assert_pairs_agree(actual, expected)
