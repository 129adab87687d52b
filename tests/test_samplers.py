"""Batches: every class each epoch, the same from the same seed, never two groups of one class in a batch."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearkin.errors import ConfigError
from nearkin.samplers import BalancedSampler, RandomSampler, make_sampler

class_sizes = st.lists(st.integers(1, 13), min_size=2, max_size=12)


def labels_of(sizes):
    return np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))


@settings(derandomize=True, max_examples=80, deadline=None)
@given(class_sizes, st.integers(1, 4), st.integers(1, 5), st.integers(0, 3))
def test_balanced_batches(sizes, per_class, classes_per_batch, epoch):
    labels = labels_of(sizes)
    sampler = BalancedSampler(labels, batch_size=per_class * classes_per_batch, per_class=per_class, seed=1)
    batches = sampler.epoch(epoch)
    assert len(batches) == sampler.batches_per_epoch
    for rows in batches:
        counts = Counter(labels[rows].tolist())
        assert set(counts.values()) == {per_class}
        assert len(counts) == min(classes_per_batch, len(sizes))
    assert set(labels[np.concatenate(batches)].tolist()) == set(range(len(sizes)))
    again = BalancedSampler(labels, batch_size=per_class * classes_per_batch, per_class=per_class, seed=1)
    for one, other in zip(batches, again.epoch(epoch), strict=True):
        assert np.array_equal(one, other)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(class_sizes, st.integers(2, 9), st.integers(0, 3))
def test_random_batches_hold_every_image_at_most_once(sizes, batch_size, epoch):
    labels = labels_of(sizes)
    sampler = RandomSampler(labels, batch_size=batch_size, seed=5)
    rows = np.concatenate(sampler.epoch(epoch))
    assert len(set(rows.tolist())) == len(rows) > len(labels) - batch_size


def test_equal_classes_are_seen_whole_and_epochs_differ():
    labels = labels_of([8] * 6)
    sampler = BalancedSampler(labels, batch_size=12, per_class=4, seed=0)
    epochs = [np.concatenate(sampler.epoch(e)) for e in (0, 1)]
    assert all(sorted(rows.tolist()) == list(range(48)) for rows in epochs)
    assert not np.array_equal(*epochs)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"multiple of train.per_class \(4\), got 10"):
        make_sampler(labels_of([5, 5]), batch_size=10, per_class=4, seed=0)
