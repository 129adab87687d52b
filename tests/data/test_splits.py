"""Splits by class: disjoint, complete and seeded."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearkin.config.recipe import DataConfig
from nearkin.data.images import ArrayImages
from nearkin.data.splits import fixed, half_half, kfold, make_split, official, split_by_class
from nearkin.data.table import Table
from nearkin.errors import ConfigError, DataError

SETTINGS = settings(derandomize=True, max_examples=40, deadline=None)


def make_table(classes: int, **more) -> Table:
    labels = np.repeat(np.arange(classes, dtype=np.int64), 3)
    pixels = np.arange(len(labels), dtype=np.uint8).reshape(-1, 1, 1, 1)
    return Table("test", labels, tuple(f"c{i}" for i in range(classes)), ArrayImages(pixels), "f", **more)


def with_parts(*parts: str) -> Table:
    """One class for each part."""
    return make_table(len(parts), part=np.repeat(np.array(parts), 3))


def names(*tables: Table) -> list[set[str]]:
    return [set(table.class_names) for table in tables]


def assert_partition(table: Table, parts: list[Table]) -> None:
    """Disjoint, complete, labels 0..C-1, and each row unchanged."""
    groups = names(*parts)
    assert sum(len(group) for group in groups) == table.num_classes
    assert set.union(*groups) == set(table.class_names)
    assert sum(len(part) for part in parts) == len(table)
    class_of_pixel = {
        int(p): table.class_names[c] for p, c in zip(table.images.pixels.flatten(), table.labels, strict=True)
    }
    for part in parts:
        assert sorted(set(part.labels.tolist())) == list(range(part.num_classes))
        for pixel, label in zip(part.images.pixels.flatten().tolist(), part.labels.tolist(), strict=True):
            assert class_of_pixel[pixel] == part.class_names[label]


@SETTINGS
@given(st.integers(20, 80), st.floats(0.01, 0.5), st.floats(0.01, 0.4), st.integers(0, 5))
def test_by_class(classes, val, test, seed):
    table = make_table(classes)
    split, holdout = split_by_class(table, val_fraction=val, test_fraction=test, seed=seed)
    assert_partition(table, [split.train, split.val, holdout.open()])
    assert min(split.val.num_classes, holdout.num_classes) >= 2
    again, _ = split_by_class(table, val_fraction=val, test_fraction=test, seed=seed)
    assert again.train.class_names == split.train.class_names


@SETTINGS
@given(st.integers(2, 12), st.integers(0, 30), st.integers(0, 5))
def test_every_class_validates_in_exactly_one_fold(folds, more, seed):
    table = make_table(2 * folds + more)
    splits = kfold(table, folds=folds, seed=seed)
    assert len(splits) == folds
    for split in splits:
        assert_partition(table, [split.train, split.val])
    assert sorted(name for split in splits for name in split.val.class_names) == sorted(table.class_names)
    sizes = [split.val.num_classes for split in splits]
    assert max(sizes) - min(sizes) <= 1
    assert [s.val.class_names for s in kfold(table, folds=folds, seed=seed)] == [s.val.class_names for s in splits]


@SETTINGS
@given(st.sampled_from([0.7, 0.8, 0.9, 0.95]), st.integers(4, 85), st.integers(0, 5))
def test_fixed_validation(ratio, classes, seed):
    table = make_table(classes)
    split = fixed(table, ratio=ratio, seed=seed)
    assert_partition(table, [split.train, split.val])
    assert split.val.num_classes == max(2, round((1 - ratio) * classes))
    assert fixed(table, ratio=ratio, seed=seed).val.class_names == split.val.class_names


@SETTINGS
@given(st.integers(6, 85))
def test_half_half_trains_on_the_first_half(classes):
    table = make_table(classes)
    training, holdout = half_half(table)
    assert_partition(table, [training, holdout.open()])
    assert training.class_names == table.class_names[: classes // 2]


@SETTINGS
@given(st.integers(4, 20), st.integers(2, 20), st.integers(0, 3))
def test_official_parts_are_used(train, test, seed):
    table = with_parts(*["train"] * train, *["test"] * test)
    split, holdout = make_split(table, DataConfig(split_seed=seed))
    assert_partition(table, [split.train, split.val, holdout.open()])
    assert holdout.open().class_names == table.class_names[train:]
    half, _ = make_split(table, DataConfig(split="half", split_seed=seed))
    assert half.train.class_names == split.train.class_names


def test_seeds_differ():
    table = make_table(50)
    assert len({fixed(table, seed=seed).val.class_names for seed in range(5)}) == 5
    assert kfold(table, seed=0)[0].val.class_names != kfold(table, seed=1)[0].val.class_names


def test_query_and_gallery_share_their_labels():
    table = with_parts(*["train"] * 4, "query", "query")
    part = table.part.astype("U7")
    part[-1] = part[-4] = "gallery"  # one image of each test class
    _, holdout = official(replace(table, part=part))
    test = holdout.open()
    query, gallery = test.of_part("query"), test.of_part("gallery")
    assert (len(query), len(gallery), holdout.num_classes) == (4, 2, 2)
    assert query.class_names == gallery.class_names
    assert set(query.labels) == set(gallery.labels) == {0, 1}


def test_a_class_in_both_training_and_test_is_an_error():
    table = with_parts(*["train"] * 5, *["test"] * 3)
    part = table.part.astype("U7")
    part[0] = "test"
    with pytest.raises(DataError, match=r"1 of 8 classes are in both training and test, first 'c0'.*unseen") as error:
        make_split(replace(table, part=part), DataConfig())
    assert "--data.split by_class" in str(error.value)
    split, holdout = make_split(replace(table, part=part), DataConfig(split="by_class"))
    assert_partition(table, [split.train, split.val, holdout.open()])
    part[:] = "train"
    part[0] = part[3] = "val"
    with pytest.raises(DataError, match="in both training and validation, first 'c0'"):
        fixed(replace(table, part=part), seed=0)


@pytest.mark.parametrize("name", ["closed_set", "train_test_split", "train_test_split.txt"])
def test_the_classification_split_is_rejected(name):
    with pytest.raises(ConfigError, match="not supported: it has images of the same classes on both sides"):
        make_split(make_table(20), DataConfig(split=name))


def test_the_holdout_exposes_only_its_size():
    _, holdout = split_by_class(make_table(20), val_fraction=0.2, test_fraction=0.3, seed=0)
    assert "sealed" in repr(holdout)
    assert set(vars(holdout)) == {"_Holdout__table", "num_images", "num_classes", "has_positives"}
    for name in ("images", "labels", "table"):
        assert not hasattr(holdout, name)


def test_the_validation_part_of_the_source_is_used():
    table = with_parts(*["train"] * 4, *["val"] * 2, *["test"] * 3)
    split, holdout = make_split(table, DataConfig())
    assert names(split.train, split.val, holdout.open()) == [{"c0", "c1", "c2", "c3"}, {"c4", "c5"}, {"c6", "c7", "c8"}]


def test_folds_through_the_recipe_cover_the_training_classes():
    table = with_parts(*["train"] * 20, *["test"] * 20)
    seen = []
    for fold in range(10):
        split, holdout = make_split(table, DataConfig(folds=10, fold=fold))
        seen += split.val.class_names
        assert holdout.open().class_names == table.class_names[20:]
        assert f"fold {fold + 1} of 10" in split.train.protocol()["split"]
    assert sorted(seen) == sorted(table.class_names[:20])
    split, holdout = make_split(make_table(40), DataConfig(folds=4, fold=1))
    assert_partition(make_table(40), [split.train, split.val, holdout.open()])


def test_the_protocol_describes_the_split():
    table = with_parts(*["train"] * 10, *["test"] * 5)
    split, holdout = make_split(table, DataConfig(val_fraction=0.3, split_seed=4))
    assert split.train.protocol() == {
        "source": "test",
        "fingerprint": "f",
        "split": "official; validation 30% of the training classes, seed 4",
        "boxes": False,
    }
    assert holdout.open().protocol()["split"] == "official"


def test_too_few_classes_raise_an_error_with_the_minimum():
    for split, message in (
        (
            lambda: split_by_class(make_table(5), val_fraction=0.1, test_fraction=0.4, seed=0),
            "too few to split by class",
        ),
        (lambda: kfold(make_table(10), folds=6, seed=0), "Use at most 5 folds"),
        (lambda: fixed(make_table(3), seed=0), "at least 4 are needed"),
        (
            lambda: split_by_class(make_table(10), val_fraction=0.4, test_fraction=0.5, seed=0),
            r"of 10 classes, 5 to test and 4 to validate leave 1 .*\n.*--data.test-fraction or --data.val-fraction",
        ),
        (
            lambda: make_split(make_table(10), DataConfig(test_fraction=0.8, folds=2)),
            r"of 10 classes, 8 to test leave 2 .*\n.*lower --data.test-fraction",
        ),
        (lambda: fixed(make_table(10), ratio=0.1, seed=0), r"9 to validate leave 1 .*\n.*lower --data.val-fraction"),
        (lambda: half_half(make_table(5)), "at least 6 are needed"),
        (lambda: official(with_parts("train", "train", "test")), "2 classes to train and 1 to test"),
        (lambda: make_split(make_table(5), DataConfig(folds=2)), "at least 6 are needed"),
    ):
        with pytest.raises(DataError, match=message):
            split()
    with pytest.raises(ConfigError, match="Did you mean 'half'"):
        make_split(make_table(9), DataConfig(split="halff"))
    with pytest.raises(ConfigError, match="between 0 and 1"):
        fixed(make_table(9), ratio=90, seed=0)
    with pytest.raises(ConfigError, match="from 0 to 9"):
        DataConfig(folds=10, fold=10)


@pytest.mark.parametrize(("parts", "sizes", "rejected"), [
    (["train"] * 4 + ["val"] * 2 + ["test"] * 2, [3] * 4 + [1, 1] + [3, 1], "validation"),
    (["train"] * 4 + ["val"] * 2 + ["test"] * 2, [1] * 4 + [3, 1] + [1, 1], "test"),
    (["train"] * 4 + ["query", "gallery"], [3] * 6, "test"),
    (["train"] * 4 + ["val"] * 2 + ["test"] * 2, [1] * 4 + [3, 1] + [2, 1], None),  # singletons are only negatives
])  # fmt: skip
def test_parts_without_positives_are_rejected(parts, sizes, rejected):
    labels = np.repeat(np.arange(len(parts)), sizes)
    images = ArrayImages(np.zeros((len(labels), 1, 1, 1), np.uint8))
    names = tuple(f"c{number}" for number in range(len(parts)))
    table = Table("test", labels, names, images, "f", part=np.array(parts)[labels])
    data = DataConfig(val_fraction=0.1 if "val" in parts else 0.0)
    if rejected is None:
        assert make_split(table, data)[1].num_images == 3
        return
    with pytest.raises(DataError, match=f"no {rejected} class has two images"):
        make_split(table, data)
