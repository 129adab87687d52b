"""Samplers: every class in every epoch, reproducible by seed, never two groups of one class in a batch."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nearkin as nk
from nearkin.data.samplers import (
    BalancedSampler,
    CategorySampler,
    HardNegativeSampler,
    NearClassSampler,
    RandomSampler,
    longest_epoch,
    make_sampler,
)
from nearkin.errors import ConfigError

class_sizes = st.lists(st.integers(1, 13), min_size=2, max_size=12)


def labels_of(sizes):
    return np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))


@settings(derandomize=True, max_examples=80, deadline=None)
@given(class_sizes, st.integers(1, 4), st.integers(1, 5), st.integers(0, 3))
def test_balanced_batches(sizes, samples_per_class, classes_per_batch, epoch):
    labels = labels_of(sizes)
    sampler = BalancedSampler(
        labels, batch_size=samples_per_class * classes_per_batch, samples_per_class=samples_per_class, seed=1
    )
    batches = sampler.epoch(epoch)
    assert len(batches) == sampler.batches_per_epoch
    for rows in batches:
        counts = Counter(labels[rows].tolist())
        assert set(counts.values()) == {samples_per_class}
        assert len(counts) == min(classes_per_batch, len(sizes))
    assert set(labels[np.concatenate(batches)].tolist()) == set(range(len(sizes)))
    again = BalancedSampler(
        labels, batch_size=samples_per_class * classes_per_batch, samples_per_class=samples_per_class, seed=1
    )
    for batch, repeated in zip(batches, again.epoch(epoch), strict=True):
        assert np.array_equal(batch, repeated)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(class_sizes, st.integers(2, 9), st.integers(0, 3))
def test_random_batches_hold_every_image_at_most_once(sizes, batch_size, epoch):
    labels = labels_of(sizes)
    sampler = RandomSampler(labels, batch_size=batch_size, seed=5)
    rows = np.concatenate(sampler.epoch(epoch))
    assert len(set(rows.tolist())) == len(rows) > len(labels) - batch_size


def test_equal_classes_are_seen_whole_and_epochs_differ():
    labels = labels_of([8] * 6)
    sampler = BalancedSampler(labels, batch_size=12, samples_per_class=4, seed=0)
    epochs = [np.concatenate(sampler.epoch(e)) for e in (0, 1)]
    assert all(sorted(rows.tolist()) == list(range(48)) for rows in epochs)
    assert not np.array_equal(*epochs)


def test_batch_size_must_be_a_multiple_of_samples_per_class():
    with pytest.raises(ConfigError, match=r"multiple of train.samples_per_class \(4\), got 10"):
        make_sampler(labels_of([5, 5]), batch_size=10, samples_per_class=4, seed=0)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(class_sizes, st.sampled_from([0, 1, 2, 3]), st.integers(1, 4), st.integers(0, 3), st.data())
def test_any_step_can_be_reproduced(sizes, samples_per_class, classes_per_batch, epoch, data):
    labels = labels_of(sizes)
    settings_ = {
        "batch_size": max(1, samples_per_class) * classes_per_batch,
        "samples_per_class": samples_per_class,
        "seed": 3,
    }
    whole = [batch.tolist() for batch in make_sampler(labels, **settings_).epoch(epoch)]
    stop = data.draw(st.integers(0, len(whole)))
    resumed = make_sampler(labels, **settings_)
    assert whole[:stop] + [batch.tolist() for batch in resumed.epoch(epoch)[stop:]] == whole


@settings(derandomize=True, max_examples=120, deadline=None)
@given(
    st.lists(st.integers(1, 13), min_size=6, max_size=12),
    st.sampled_from([0, 1, 2, 3]),
    st.sampled_from([2, 3, 4]),
    st.integers(2, 12),
    st.integers(0, 3),
)
def test_shares_of_all_ranks_concatenate_to_the_batch_of_one_process(
    sizes, samples_per_class, world_size, groups, epoch
):
    labels = labels_of(sizes)
    settings_ = {
        "batch_size": max(4, max(1, samples_per_class) * groups),
        "samples_per_class": samples_per_class,
        "seed": 3,
    }
    if samples_per_class:
        settings_["batch_size"] = -(-settings_["batch_size"] // samples_per_class) * samples_per_class
    single = make_sampler(labels, **settings_)
    ranks = [make_sampler(labels, **settings_, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert all(rank.batches_per_epoch == single.batches_per_epoch for rank in ranks)
    assert all(rank.batch_size == single.batch_size for rank in ranks)
    steps = zip(single.epoch(epoch), *(rank.epoch(epoch) for rank in ranks), strict=True)
    for whole, *shares in steps:
        assert len(whole) == single.batch_size
        lengths = [len(share) for share in shares]
        assert 0 < min(lengths) <= max(lengths) <= min(lengths) + (len(whole) % world_size > 0)
        assert np.concatenate(shares).tolist() == whole.tolist()
        assert all(np.array_equal(whole[rank.share], share) for rank, share in zip(ranks, shares, strict=True))
        if (
            samples_per_class and not lengths[0] % samples_per_class and len(set(lengths)) == 1
        ):  # whole groups: no class on two ranks
            classes = [set(labels[share].tolist()) for share in shares]
            assert sum(map(len, classes)) == len(set.union(*classes))


def test_a_group_is_split_between_ranks_only_if_shares_are_not_multiples_of_groups():
    labels = labels_of([6] * 6)
    shares = [
        make_sampler(labels, batch_size=12, samples_per_class=4, seed=0, rank=r, world_size=2).epoch(0)[0]
        for r in (0, 1)
    ]
    assert [len(share) for share in shares] == [6, 6]
    assert [sorted(Counter(labels[share].tolist()).values()) for share in shares] == [[2, 4], [2, 4]]


def test_batches_smaller_than_the_world_are_rejected():
    for samples_per_class in (0, 3):
        with pytest.raises(ConfigError, match="a batch of 3 leaves some of 4 processes without an image"):
            make_sampler(labels_of([5] * 9), batch_size=3, samples_per_class=samples_per_class, seed=0, world_size=4)
    with pytest.raises(ConfigError, match="rank: expected 0 to 1 of 2 processes, got 2"):
        make_sampler(labels_of([5] * 9), batch_size=8, samples_per_class=0, seed=0, rank=2, world_size=2)


def test_one_large_class_does_not_lengthen_the_epoch():
    sizes = [1000] + [4] * 100
    labels = labels_of(sizes)
    sampler = BalancedSampler(labels, batch_size=128, samples_per_class=4, seed=0)
    assert sampler.batches_per_epoch == 4  # 101 classes, 32 per batch
    seen = [np.concatenate(sampler.epoch(epoch)) for epoch in range(30)]
    for rows in seen:
        counts = Counter(labels[rows].tolist())
        assert set(counts) == set(range(101))
        assert counts[0] == 16
    # Few images of the large class per epoch, but different ones: 30 epochs of 16 out of 1000 repeat few.
    large = [row for rows in seen for row in rows.tolist() if labels[row] == 0]
    assert len(set(large)) > 350


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=2, max_size=15), st.integers(1, 6))
def test_the_epoch_is_the_longest_that_repeats_no_group(groups, per_batch):
    per_batch = min(per_batch, len(groups))

    def needs_less_than_a_batch_of_repeats(batches):
        return sum(min(group, batches) for group in groups) > (batches - 1) * per_batch

    brute = max(b for b in range(1, sum(groups) + 1) if needs_less_than_a_batch_of_repeats(b))
    assert longest_epoch(np.array(groups), per_batch) == brute
    assert brute * per_batch >= len(groups)  # room for every class


@pytest.mark.parametrize("make", [list, torch.tensor, lambda codes: [f"class {code:02d}" for code in codes]])
def test_labels_may_be_lists_tensors_and_names(make):
    codes = labels_of([5, 3, 11, 4]).tolist()
    settings = {"batch_size": 6, "samples_per_class": 2, "seed": 3}
    expected = BalancedSampler(np.array(codes), **settings).epoch(1)
    given = nk.samplers.BalancedSampler(make(codes), **settings).epoch(1)
    assert [rows.tolist() for rows in given] == [rows.tolist() for rows in expected]
    shuffled = nk.samplers.RandomSampler(make(codes), batch_size=6, seed=3)
    assert sorted(np.concatenate(shuffled.epoch(0)).tolist())[-1] < len(codes)


@pytest.mark.parametrize("labels", [[], [[0, 1], [1, 0]], [0.5, 1.5], ["robin", 3.0, None], "robin"])
def test_labels_that_name_no_classes_are_refused(labels):
    with pytest.raises(ConfigError, match=r"^labels: expected"):
        BalancedSampler(labels, batch_size=2, samples_per_class=1, seed=0)


# --- as a batch_sampler of torch --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("samples_per_class", [0, 2])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_takes_it(samples_per_class, workers):
    """Iteration by iteration it yields the epochs; ranks share each batch, and an interrupted epoch resumes."""
    labels = np.repeat(np.arange(7), 5)
    data = torch.utils.data.TensorDataset(torch.arange(35), torch.from_numpy(labels))
    options = {"batch_size": 8, "samples_per_class": samples_per_class, "seed": 3}

    def epochs(**more):
        sampler = make_sampler(labels, **options, **more)
        loader = torch.utils.data.DataLoader(data, batch_sampler=sampler, num_workers=workers)
        assert len(loader) == sampler.batches_per_epoch
        return sampler, loader

    sampler, loader = epochs()
    seen = [[rows.tolist() for rows, _ in loader] for _ in range(3)]
    assert seen == [[batch.tolist() for batch in make_sampler(labels, **options).epoch(e)] for e in range(3)]
    ranks = [
        [[rows.tolist() for rows, _ in loader] for _ in range(2)]
        for _, loader in (epochs(rank=rank, world_size=2) for rank in (0, 1))
    ]
    assert [[a + b for a, b in zip(*both, strict=True)] for both in zip(*ranks, strict=True)] == seen[:2]
    sampler.set_epoch(1, first_batch=2)
    assert [rows.tolist() for rows, _ in loader] == seen[1][2:]
    assert [rows.tolist() for rows, _ in loader] == seen[2]


# --- categories, near classes, several labels -------------------------------------------------------------------------


@settings(derandomize=True, max_examples=60, deadline=None)
@given(class_sizes, st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2))
def test_batches_of_few_categories(sizes, samples_per_class, classes_per_batch, categories_per_batch, epoch):
    labels = labels_of(sizes)
    size = {"batch_size": samples_per_class * classes_per_batch, "samples_per_class": samples_per_class, "seed": 2}
    sampler = CategorySampler(labels, labels % 3, categories_per_batch=categories_per_batch, **size)
    available = Counter(c % 3 for c in range(len(sizes)))
    for rows in sampler.epoch(epoch):
        counts = Counter(labels[rows].tolist())
        assert set(counts.values()) == {samples_per_class}
        assert len(counts) == min(classes_per_batch, len(sizes))
        categories = {c % 3 for c in counts}
        if len(categories) > categories_per_batch:  # only because fewer could not fill the batch
            smallest = sorted(available[c] for c in categories)
            assert sum(smallest[:categories_per_batch]) < len(counts)
    assert [rows.tolist() for rows in sampler.epoch(epoch)] == [rows.tolist() for rows in sampler.epoch(epoch)]


def test_large_categories_are_drawn_more_often():
    labels = np.repeat(np.arange(40), 4)
    categories = np.where(labels < 30, "car", "sofa")
    settings_ = {"batch_size": 8, "samples_per_class": 2, "seed": 0}
    sampler = CategorySampler(labels.astype(str), categories, **settings_)
    drawn = [categories[rows[0]] for epoch in range(30) for rows in sampler.epoch(epoch)]
    assert drawn.count("car") / len(drawn) == pytest.approx(0.75, abs=0.05)
    with pytest.raises(ConfigError, match="the class of row 0 is in several categories"):
        CategorySampler(labels, np.arange(160), **settings_)
    with pytest.raises(ConfigError, match="expected as many as labels"):
        CategorySampler(labels, categories[:3], **settings_)


def test_near_classes_share_batches():
    """Classes on a line: without ties, a neighbourhood is a range of them."""
    labels = labels_of([6] * 12)
    place = np.random.default_rng(1).permutation(12)
    settings_ = {"batch_size": 12, "samples_per_class": 2, "seed": 0}
    sampler = NearClassSampler(labels, neighbourhood=3, **settings_)
    plain = BalancedSampler(labels, **settings_)
    assert [rows.tolist() for rows in sampler.epoch(3)] == [rows.tolist() for rows in plain.epoch(3)]
    noise = np.random.default_rng(2).normal(0, 0.01, (72, 2))
    sampler.refresh(torch.as_tensor(np.stack([place[labels] ** 1.1, 0 * labels], 1) + noise))
    begun = Counter()
    for epoch in range(12):
        for rows in sampler.epoch(epoch):
            classes = list(dict.fromkeys(labels[rows].tolist()))
            assert set(Counter(labels[rows].tolist()).values()) == {2}
            assert len(classes) == 6
            places = sorted(place[c] for c in classes[:3])
            assert places[2] - places[0] == 2  # the first neighbourhood is contiguous
            assert place[classes[0]] in (places[1], 0, 11)
            begun[classes[0]] += 1
    assert set(begun) == set(range(12))
    with pytest.raises(ConfigError, match="neighbourhood: expected 2 to 6"):
        NearClassSampler(labels, neighbourhood=7, **settings_)
    with pytest.raises(ConfigError, match=r"emb: expected finite \[72, dim\]"):
        sampler.refresh(noise[:5])


def test_hard_negatives_share_the_batch_of_their_anchor():
    """Against a loop: the second class of a batch has the nearest row of another class to the first row."""
    labels = labels_of([5] * 9 + [1, 2])
    emb = np.random.default_rng(3).normal(size=(len(labels), 4))
    unit = emb / np.linalg.norm(emb, axis=1, keepdims=True)
    settings_ = {"batch_size": 12, "samples_per_class": 3, "seed": 0}
    sampler = HardNegativeSampler(labels, negatives=2, **settings_)
    plain = BalancedSampler(labels, **settings_)
    assert [rows.tolist() for rows in sampler.epoch(1)] == [rows.tolist() for rows in plain.epoch(1)]
    sampler.refresh(torch.as_tensor(emb))
    anchors = set()
    for epoch in range(8):
        for rows in sampler.epoch(epoch):
            assert set(Counter(labels[rows].tolist()).values()) == {3}
            anchor, first, second = rows[0], rows[3], rows[6]
            anchors.add(int(anchor))
            others = sorted(
                (j for j in range(len(labels)) if labels[j] != labels[anchor]), key=lambda j: -unit[anchor] @ unit[j]
            )
            assert first == others[0]
            assert second == next(j for j in others if labels[j] != labels[first])
    assert len(anchors) > 18  # of about 30 batches
    share = [HardNegativeSampler(labels, negatives=2, rank=r, world_size=2, **settings_) for r in range(2)]
    for part in share:
        part.refresh(emb)
    joined = [np.concatenate(parts).tolist() for parts in zip(share[0].epoch(2), share[1].epoch(2), strict=True)]
    assert joined == [rows.tolist() for rows in sampler.epoch(2)]
    with pytest.raises(ConfigError, match="negatives: expected at least 1"):
        HardNegativeSampler(labels, negatives=0, **settings_)


def test_several_labels_per_row():
    tags = np.random.default_rng(0).random((200, 10)) < 0.2
    sampler = BalancedSampler(torch.as_tensor(tags), batch_size=24, samples_per_class=4, seed=0)
    seen = np.concatenate(sampler.epoch(0))
    assert set(np.flatnonzero(tags[seen].any(0))) == set(range(10))
    for rows in sampler.epoch(0):
        assert len(rows) == len(set(rows.tolist())) == 24  # an image with two of the labels is there once
        assert (tags[rows].sum(0) >= 4).sum() >= 6
    with pytest.raises(ConfigError, match="no row has a label"):
        BalancedSampler(np.zeros((4, 2), dtype=bool), batch_size=2, samples_per_class=2, seed=0)
    with pytest.raises(ConfigError, match="labels: expected a number or a name for each row"):
        BalancedSampler(np.zeros((4, 2), dtype=int), batch_size=2, samples_per_class=2, seed=0)
