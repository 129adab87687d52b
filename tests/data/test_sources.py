"""Folders, tables and feature files become a `Table`, or an error says why they cannot."""

import io
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.images import picture
from PIL import Image

from nearkin._common.progress import Reporter
from nearkin.config.recipe import DataConfig
from nearkin.data.check import check_target
from nearkin.data.listing import encode_labels, list_folder, list_table
from nearkin.data.sources import detect_source, fingerprint, list_source, load, load_features
from nearkin.data.splits import make_split
from nearkin.errors import ConfigError, DataError, MissingExtraError, UserError

# --- folders and tables ----------------------------------------------------------------------------------------------


def test_a_folder_with_train_and_test_has_parts(tmp_path):
    for part, classes in {"train": "abcd", "test": "ef"}.items():
        for name in classes:
            picture(tmp_path / part / name / "1.png")
    listing = list_folder(tmp_path)
    assert listing.class_names == tuple("abcdef")
    assert listing.part.tolist() == ["train"] * 4 + ["test"] * 2


def write_parts(root, **classes):
    for part, names in classes.items():
        for name in names:
            for i in range(2):
                picture(root / part / name / f"{i}.png")
    return DataConfig(source="folder", root=root, image_size=8)


def test_parts_that_share_their_classes_are_merged_and_split_by_class(tmp_path):
    data = write_parts(tmp_path, Train="abcdefgh", valid="abcdefgh", test="abcdefg")
    out = io.StringIO()
    table = load(data, Reporter(out=out))
    assert (len(table), table.num_classes, table.part) == (46, 8, None)
    assert "7 of 8 classes are in several of training, validation and test, as for a classifier; these parts are" in (
        out.getvalue()
    )
    split, holdout = make_split(table, data)
    names = [set(part.class_names) for part in (split.train, split.val, holdout.open())]
    assert sum(map(len, names)) == len(set.union(*names)) == 8
    assert "merged" in split.train.protocol()["data_notes"][0]
    report = check_target(str(tmp_path), tmp_path)
    assert report.find("shared_classes").level == "warning"
    assert report.find("shared_classes").cases == tuple("abcdefg")
    assert report.find("class_overlap") is None
    assert report.fingerprint == table.fingerprint


def test_only_validation_is_merged_if_the_test_classes_are_its_own(tmp_path, quiet):
    table = load(write_parts(tmp_path, train="abcd", val="abcd", test="efg"), quiet)
    assert table.parts == ("train", "test")
    assert (table.part == "train").sum() == 16


def test_class_disjoint_parts_are_used_as_they_are(tmp_path, quiet):
    data = write_parts(tmp_path, train="abcd", val="ef", test="gh")
    split, holdout = make_split(load(data, quiet), data)
    assert split.train.class_names == tuple("abcd")
    assert split.val.class_names == tuple("ef")
    assert holdout.open().class_names == tuple("gh")
    assert check_target(str(tmp_path), tmp_path).find("shared_classes") is None


def test_a_few_shared_classes_are_refused_before_any_image_is_read(tmp_path, quiet, monkeypatch):
    data = write_parts(tmp_path, train="abcd", test="aefg")
    monkeypatch.setattr("nearkin.data.sources.open_images", None)
    with pytest.raises(DataError, match=r"1 of 7 classes are in both training and test, first 'a'.*\n.*by_class"):
        load(data, quiet)
    monkeypatch.undo()
    assert load(replace(data, split="by_class"), quiet).num_classes == 7


def test_features_whose_parts_share_classes_are_merged(tmp_path, quiet):
    path = tmp_path / "f.npz"
    np.savez(path, features=np.eye(8), labels=list("abcdabcd"), split=["train"] * 4 + ["test"] * 4)
    table = load(DataConfig(source="features", root=path), quiet)
    assert table.part is None
    assert table.notes[0].startswith("4 of 4 classes are in several")


@pytest.mark.parametrize("setting", [{"crop_to_boxes": True}, {"path_column": "p"}, {"label_column": "l"}])
def test_settings_that_a_source_cannot_use_are_refused(setting, tmp_path, quiet):
    with pytest.raises(ConfigError, match=f"data.{next(iter(setting))}: a source of type folder does not use it"):
        load(DataConfig(source="folder", root=tmp_path, **setting), quiet)


def test_links_are_followed_and_loops_end(tmp_path):
    picture(tmp_path / "real" / "1.png", 1)
    for name in "ab":
        picture(tmp_path / "root" / name / "1.png")
    (tmp_path / "root" / "c").symlink_to(tmp_path / "real", target_is_directory=True)
    (tmp_path / "root" / "a" / "again").symlink_to(tmp_path / "root" / "a", target_is_directory=True)
    (tmp_path / "root" / "b" / "up").symlink_to(tmp_path / "root", target_is_directory=True)  # not a's images as b's
    (tmp_path / "real" / "up").symlink_to(tmp_path / "root", target_is_directory=True)
    (tmp_path / "root" / "b" / "gone.png").symlink_to(tmp_path / "nothing.png")
    (tmp_path / "root" / "b" / ".hidden.png").touch()
    listing = list_folder(tmp_path / "root")
    assert [listing.shown(p) for p in listing.paths] == ["a/1.png", "b/1.png", "b/gone.png", "c/1.png"]


def write_csv(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_csv_with_all_columns(tmp_path, quiet):
    for i in range(6):
        picture(tmp_path / "some images" / f"é {i}.png", i, size=(20, 16))
    rows = [f"some images/é {i}.png,{10 - i // 2},{'train' if i < 4 else 'Testing'},g,1,2,8,9" for i in range(6)]
    file = write_csv(tmp_path / "birds.csv", "\ufeffpath,label,split,group,x,y,w,h", *rows)
    assert detect_source(file) == "table"
    table = load(DataConfig(source="table", root=file, image_size=8), quiet)
    assert (table.source, table.class_names) == ("birds", ("8", "9", "10"))  # by value, not by letter
    assert table.part.tolist() == ["train"] * 4 + ["test"] * 2
    assert table.groups.tolist() == ["g"] * 6
    assert table.boxes is None
    assert (
        load(DataConfig(source="table", root=file, image_size=8, crop_to_boxes=True), quiet).boxes.tolist()
        == [[1, 2, 8, 9]] * 6
    )


def test_other_column_names_and_separators(tmp_path):
    for i in range(2):
        picture(tmp_path / f"{i}.png", i)
    file = write_csv(tmp_path / "t.csv", "where;what", "0.png;a", "1.png;b")
    with pytest.raises(DataError, match=r"no column named 'path'. Columns: where, what.(?s:.*)--data.path-column"):
        list_table(file)
    assert list_table(file, path_column="where", label_column="what").class_names == ("a", "b")
    with pytest.raises(DataError, match=r"no column named 'wat'. Columns: where, what. Did you mean 'what'"):
        list_table(file, path_column="where", label_column="wat")


@pytest.mark.parametrize("split", [False, True])
def test_a_hugging_face_folder(tmp_path, split, quiet):
    for part in ["train", "test"] if split else [""]:
        names = {"train": "abcd", "test": "xy", "": "abcdxy"}[part]
        for i, _ in enumerate(names):
            picture(tmp_path / part / f"{i}.png", i)
        rows = [f'{i}.png,"{name}, with a comma"' for i, name in enumerate(names)]
        write_csv(tmp_path / part / "metadata.csv", "file_name,label", *rows)
    assert detect_source(tmp_path) == "table"
    table = load(DataConfig(source="table", root=tmp_path, image_size=8), quiet)
    assert table.class_names == tuple(f"{name}, with a comma" for name in "abcdxy")
    assert table.parts == (("train", "test") if split else ())


def test_unusable_tables_raise_an_error(tmp_path, quiet):
    good = ["path,label", "a.png,x", "b.png,y"]
    for name in "ab":
        picture(tmp_path / f"{name}.png")
    for lines, message in (
        ([*good, "c.png"], r"row 4 has 1 values, but the header has 2"),
        ([*good, "c.png,"], r"row 4 has no label"),
        (good[:1], r"has a header but no rows"),
        ([""], r"is empty"),
        (good[:2], r"found 1 class, need at least 2"),
        (["path,label,split", "a.png,x,tst", "b.png,y,train"], r"unknown part 'tst'. Expected one of train, val"),
        (["path,label,x,y,w,h", "a.png,x,1,1,0,5", "b.png,y,1,1,1,1"], r"row 2 has an invalid box"),
        (["path,label,x,y,w,h", "a.png,x,1,1,a,5", "b.png,y,1,1,1,1"], r"a box is not numeric"),
    ):
        with pytest.raises(DataError, match=message):
            list_table(write_csv(tmp_path / "t.csv", *lines))
    file = write_csv(tmp_path / "t.csv", *good, "gone.png,z")
    with pytest.raises(DataError, match=r"1 of 3 listed files do not exist, first .*gone.png"):
        load(DataConfig(source="table", root=file), quiet)
    table = load(DataConfig(source="table", root=file, image_size=8, allow_missing=True), quiet)
    assert (len(table), table.num_classes, table.notes) == (2, 2, ("1 listed file did not exist",))
    with pytest.raises(DataError, match="has no boxes to crop to"):
        load(DataConfig(source="table", root=file, allow_missing=True, crop_to_boxes=True), quiet)
    (tmp_path / "t.csv").write_bytes(b"path,label\n\xff\xfe,x\n")
    with pytest.raises(DataError, match="not UTF-8 text"):
        list_table(file)
    with pytest.raises(DataError, match="no such file"):
        list_table(tmp_path / "none.csv")
    with pytest.raises(DataError, match=r"contains no metadata.csv"):
        list_table(tmp_path)


@pytest.mark.parametrize("count", [10, 20_000])  # the second exceeds the maximum length of a field
def test_an_unclosed_quote_is_an_error(tmp_path, count):
    rows = [f"{i}.png,class {i}" for i in range(count)]
    rows[5] = '5.png,"class 5'
    with pytest.raises(DataError, match=r"t\.csv: row 7 cannot be read \(.*\)\. Is there an unclosed quote\?"):
        list_table(write_csv(tmp_path / "t.csv", "path,label", *rows))


def test_rows_are_numbered_as_an_editor_shows_them(tmp_path):
    for lines, message in (
        (["path,label", "", "a.png,x", "b.png,y", "", "c.png"], "row 6 has 1 values"),
        (["", "path,label", "a.png,x", "", "b.png,"], "row 5 has no label"),
        (["path,label,x,y,w,h", "a.png,x,1,1,2,5", "", "b.png,y,1,1,0,1"], "row 4 has an invalid box"),
    ):
        with pytest.raises(DataError, match=message):
            list_table(write_csv(tmp_path / "t.csv", *lines))


def test_parquet_with_vectors_and_gaps_in_other_columns(tmp_path, monkeypatch):
    """With a stub for the reader, which needs a package that may not be installed."""
    pandas = pytest.importorskip("pandas")
    columns = {"path": ["a.png", "b.png"], "label": [1, 2], "vector": [np.ones(3), np.zeros(3)], "gap": [pandas.NA, 1]}
    (tmp_path / "t.parquet").touch()
    for name in "ab":
        picture(tmp_path / f"{name}.png")
    monkeypatch.setattr(pandas, "read_parquet", lambda path: pandas.DataFrame(columns))
    assert list_table(tmp_path / "t.parquet").class_names == ("1", "2")
    with pytest.raises(DataError, match=r"row 1 has no label"):
        list_table(tmp_path / "t.parquet", label_column="gap")
    with pytest.raises(DataError, match=r"column 'vector' contains a ndarray in row 1, expected text or a number"):
        list_table(tmp_path / "t.parquet", label_column="vector")


def test_a_broken_link_is_named_without_a_cache_too(tmp_path, quiet):
    for name in "ab":
        picture(tmp_path / name / "1.png")
    (tmp_path / "b" / "lost.png").symlink_to(tmp_path / "nowhere.png")
    data = DataConfig(source="folder", root=tmp_path, image_size=8, cache=False)
    with pytest.raises(DataError, match=r"b/lost\.png: cannot be read \(No such file.*--data\.skip-broken"):
        load(data, quiet)
    assert len(load(replace(data, skip_broken=True), quiet)) == 2


def test_parquet_is_read_or_asks_for_pandas(tmp_path, monkeypatch):
    file = tmp_path / "t.parquet"
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"path": ["a.png", "b.png"], "label": [1, 2], "part": ["train", "test"]})
    for name in "ab":
        picture(tmp_path / f"{name}.png")
    try:
        frame.to_parquet(file)
    except ImportError:  # without pyarrow: test the message, and the columns with a stub
        file.touch()
        with pytest.raises(MissingExtraError, match="pip install pandas pyarrow"):
            list_table(file)
        monkeypatch.setattr(pandas, "read_parquet", lambda path: frame)
    listing = list_table(file)
    assert listing.class_names == ("1", "2")
    assert listing.part.tolist() == ["train", "test"]


def test_class_names_sort_by_value_or_alphabetically():
    assert encode_labels(["b", "10", "a"])[1] == ("10", "a", "b")
    assert encode_labels(["2", "10", "2"])[1] == ("2", "10")
    long = "1" * 5000  # more digits than Python converts to an integer
    assert encode_labels([long, "007", "7"])[1] == ("007", "7", long)


def test_numbers_of_equal_value_have_a_fixed_order():
    """The order of a set differs between processes; labels, split and fingerprint must not."""
    names = [f"{value:0{width}d}" for value in range(1, 12) for width in (3, 2, 4)]
    expected = [name for value in range(1, 12) for name in (f"{value:04d}", f"{value:03d}", f"{value:02d}")]
    assert encode_labels(names)[1] == tuple(expected)


def test_unknown_sources_and_missing_roots_raise_an_error():
    with pytest.raises(UserError, match=r"no source named 'cubb'. Did you mean 'cub'"):
        list_source(DataConfig(source="cubb"))
    for source, message in (("table", "--data FILE"), ("folder", "--data FOLDER"), ("cub", "nearkin data get cub")):
        with pytest.raises(DataError, match=message):
            list_source(DataConfig(source=source))


def test_the_fingerprint_depends_on_content_labels_parts_and_boxes_but_not_on_file_names(tmp_path, quiet):
    for name in "ab":
        picture(tmp_path / "one" / name / "1.png", ord(name))
        picture(tmp_path / "two" / name / "renamed.png", ord(name))
    data = DataConfig(source="folder", root=tmp_path / "one", image_size=8)
    first = load(data, quiet).fingerprint
    assert load(replace(data, root=tmp_path / "two"), quiet).fingerprint == first
    picture(tmp_path / "two" / "a" / "renamed.png", 99)
    assert load(replace(data, root=tmp_path / "two"), quiet).fingerprint != first
    labels, part, boxes = np.array([0, 1]), np.array(["train", "test"]), np.ones((2, 4), np.int64)
    arguments = [([b"x", b"y"], labels, ("a", "b")), ([b"x", b"y"], labels, ("a", "b"), part)]
    arguments += [([b"x", b"y"], labels, ("a", "b"), None, boxes), ([b"x", b"y"], labels[::-1], ("a", "b"))]
    assert len({fingerprint(*args) for args in arguments}) == 4


def test_the_fingerprint_matches_the_cached_pixels(tmp_path, quiet):
    """A complete cache is trusted while sizes and times match, so its files are not read at every start."""
    for name in "ab":
        Image.new("RGB", (8, 8), "red").save(picture(tmp_path / name / "1.bmp"))
    data = DataConfig(source="folder", root=tmp_path, image_size=8)
    first = load(data, quiet)
    assert first.fingerprint == load(replace(data, cache=False), quiet).fingerprint
    changed = tmp_path / "a" / "1.bmp"
    before = changed.stat()
    Image.new("RGB", (8, 8), "blue").save(changed)
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert changed.stat().st_size == before.st_size
    again = load(data, quiet)
    assert np.array_equal(again.images.read(np.arange(2)), first.images.read(np.arange(2)))
    assert again.fingerprint == first.fingerprint
    assert load(replace(data, cache=False), quiet).fingerprint != first.fingerprint
    os.utime(changed)
    assert load(data, quiet).fingerprint != first.fingerprint


def test_a_folder_with_images_txt_is_not_mistaken_for_a_benchmark(tmp_path):
    for name in "abc":
        picture(tmp_path / name / "1.png", ord(name))
    (tmp_path / "images.txt").write_text("a note on my images\n")
    assert detect_source(tmp_path) == "folder"


def test_a_cache_above_its_limit_is_rejected(tmp_path, quiet):
    for name in "ab":
        picture(tmp_path / name / "1.png")
    with pytest.raises(DataError, match=r"(?i)cache"):
        load(DataConfig(source="folder", root=tmp_path, max_cache_gb=1e-9), quiet)
    assert len(load(DataConfig(source="folder", root=tmp_path, cache=False), quiet)) == 2


# --- features --------------------------------------------------------------------------------------------------------


def test_features_become_a_table(tmp_path):
    vectors = np.random.default_rng(0).normal(size=(12, 5)).astype(np.float16)
    labels = np.repeat([7, 30, 200, 1, 2, 3], 2)
    part = np.repeat(["train", "test"], 6)
    np.savez(tmp_path / "f.npz", features=vectors, labels=labels, part=part)
    table = load_features(tmp_path / "f.npz")
    assert table.features.dtype == np.float32
    assert table.class_names == ("1", "2", "3", "7", "30", "200")
    assert [table.class_names[c] for c in table.labels] == [str(v) for v in labels]
    test = table.of_classes(np.unique(table.of_part("test").labels))
    assert (len(test), test.num_classes, test.features.shape) == (6, 3, (6, 5))
    with pytest.raises(DataError, match="contains features, not images"):
        test.images.read(np.array([0]))
    np.save(tmp_path / "g.npy", vectors)
    (tmp_path / "g.labels.txt").write_text("\n".join(map(str, labels)) + "\n")
    assert np.array_equal(load_features(tmp_path / "g.npy").labels, table.labels)
    np.save(tmp_path / "other.npy", labels)
    assert np.array_equal(load_features(tmp_path / "g.npy", tmp_path / "other.npy").labels, table.labels)


def test_parts_of_features_are_read_like_those_of_a_table(tmp_path):
    words = ["Training"] * 8 + ["Test"] * 4
    for name, part in (("part", np.array(words)), ("part", np.array(words, np.bytes_)), ("split", np.array(words))):
        np.savez(tmp_path / "f.npz", features=np.eye(12), labels=np.repeat(np.arange(6), 2), **{name: part})
        table = load_features(tmp_path / "f.npz")
        assert table.part.tolist() == ["train"] * 8 + ["test"] * 4
        assert make_split(table, DataConfig())[1].num_images == 4


def test_labels_may_be_bytes_and_features_integers(tmp_path):
    np.savez(tmp_path / "F.NPZ", features=np.arange(6).reshape(2, 3), labels=np.array(["é", "b"]))
    (tmp_path / "F.NPZ.npz").rename(tmp_path / "F.NPZ")
    table = load_features(tmp_path / "F.NPZ")
    assert table.features.tolist() == [[0, 1, 2], [3, 4, 5]]
    np.savez(tmp_path / "g.npz", features=np.arange(6).reshape(2, 3), labels=np.array(["é".encode(), b"b"]))
    assert load_features(tmp_path / "g.npz").class_names == table.class_names == ("b", "é")


def test_unusable_features_raise_an_error(tmp_path):
    good = {"features": np.ones((2, 3)), "labels": np.array([0, 1])}
    for change, message in (
        ({"features": np.ones(3)}, r"expected numeric \[N, D\]"),
        ({"features": np.array([["a"], ["b"]])}, r"expected numeric \[N, D\]"),
        ({"features": np.array([[1.0, 1], [1e300, 1]])}, "NaN or infinity in 1 feature, first in row 1"),
        ({"labels": np.array([0, np.nan])}, "row 1 has no label"),
        ({"labels": np.array(["a", ""])}, "row 1 has no label"),
        ({"labels": np.array([b"a", b"\xff"])}, r"f\.npz: labels are bytes that are not UTF-8"),
        ({"part": np.array(["train", "tst"])}, "unknown part 'tst'. Expected one of train, val, test"),
        ({"part": np.array([0, 1])}, "unknown part '0'. Expected one of train, val, test"),
        ({"part": np.array(["train"])}, r"part have shape \[1\], expected one for each of 2 features"),
        ({"labels": np.arange(3)}, r"labels have shape \[3\], expected one for each of 2 features"),
        ({"features": np.array([[1.0, np.nan], [1, 1]])}, "NaN or infinity in 1 feature, first in row 0"),
        ({"features": np.array([[object()], [None]])}, "cannot be read as features"),
    ):
        np.savez(tmp_path / "f.npz", **(good | change))
        with pytest.raises(DataError, match=message):
            load_features(tmp_path / "f.npz")
    np.savez(tmp_path / "f.npz", features=np.ones((2, 3)))
    with pytest.raises(DataError, match="no array named 'labels'"):
        load_features(tmp_path / "f.npz")
    np.save(tmp_path / "f.npy", np.ones((2, 3)))
    with pytest.raises(DataError, match=r"labels not found. Expected .*f.labels.npy or f.labels.txt"):
        load_features(tmp_path / "f.npy")
    with pytest.raises(DataError, match="no such file"):
        load_features(tmp_path / "none.npz")
    (tmp_path / "f.npz").write_bytes(b"PK\x03\x04 nonsense")
    with pytest.raises(DataError, match="cannot be read as features"):
        load_features(tmp_path / "f.npz")
