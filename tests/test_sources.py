"""The benchmarks in their official layouts, folders, tables and features: read as they are, refused with the reason."""

import os
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from conftest import SHARED
from PIL import Image

from nearkin.data.benchmarks import BENCHMARKS, Counts
from nearkin.data.listing import list_folder, list_table, number_classes
from nearkin.data.sources import fingerprint, list_source, load, load_features, recognise
from nearkin.data.splits import split_for
from nearkin.errors import DataError, MissingExtra, UserError
from nearkin.recipe import Data
from nearkin.train_command import parse_train

CUB = SHARED / "data" / "CUB_200_2011"


def picture(path: Path, seed: int = 0, size: tuple[int, int] = (12, 10)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def small(name: str, **parts: tuple[int, int]):
    """The benchmark with other counts, so that a fixture of a few images can match it."""
    return replace(BENCHMARKS[name], parts=MappingProxyType({p: Counts(*c) for p, c in parts.items()}))


# --- CUB -------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not CUB.is_dir(), reason="CUB-200-2011 is not beside the project (../shared/data/CUB_200_2011)")
def test_real_cub_has_the_papers_split_and_not_the_one_for_classification():
    listing = BENCHMARKS["cub"].list(CUB)
    train, test = listing.part == "train", listing.part == "test"
    assert (train.sum(), test.sum()) == (5_864, 5_924)
    assert set(listing.labels[train]) == set(range(100))
    assert set(listing.labels[test]) == set(range(100, 200))
    assert listing.class_names[0] == "001.Black_footed_Albatross"
    assert listing.class_names[199] == "200.Common_Yellowthroat"
    assert all(listing.class_names[c] == p.parent.name for c, p in zip(listing.labels, listing.paths, strict=True))
    closed_set = [line.split()[1] == "1" for line in (CUB / "train_test_split.txt").read_text().splitlines()]
    assert sum(closed_set) == 5_994
    assert not np.array_equal(closed_set, train)
    assert recognise(CUB) == recognise(CUB.parent) == "cub"
    assert BENCHMARKS["cub"].list(CUB.parent).paths == listing.paths


def make_cub(root: Path, boxes: bool = False) -> Path:
    """Six classes of two images in the official files; image 3 is of another number than its line."""
    files = [f"{c:03d}.Bird_{c}/Bird_{c}_{i:04d}.jpg" for c in range(1, 7) for i in range(2)]
    for seed, name in enumerate(files):
        picture(root / "images" / name, seed)
    lines = {
        "images.txt": [f"{i} {name}" for i, name in enumerate(files, 1)],
        "image_class_labels.txt": [f"{i} {(i + 1) // 2}" for i in reversed(range(1, 13))],
        "classes.txt": [f"{c} {c:03d}.Bird_{c}" for c in range(1, 7)],
        "train_test_split.txt": [f"{i} {i % 2}" for i in range(1, 13)],
    }
    if boxes:
        lines["bounding_boxes.txt"] = [f"{i} 1.0 2.0 6.0 5.0" for i in range(1, 13)]
    for name, text in lines.items():
        (root / name).write_text("\n".join(text) + "\n")
    return root


@pytest.fixture
def small_cub(monkeypatch):
    monkeypatch.setitem(BENCHMARKS._items, "cub", small("cub", train=(6, 3), test=(6, 3)))


def test_cub_loads_by_name_and_splits_officially(tmp_path, small_cub, quiet):
    root = make_cub(tmp_path / "CUB_200_2011", boxes=True)
    table = load(Data(source="cub", root=tmp_path, image_size=8), quiet)
    assert (table.source, len(table), table.num_classes, table.boxes) == ("cub", 12, 6, None)
    assert table.labels.tolist() == sorted(table.labels.tolist())
    with pytest.raises(DataError, match="3 classes to train and 3 to test"):
        split_for(table, Data())
    cut = load(Data(source="cub", root=root, image_size=8, boxes=True), quiet)
    assert cut.boxes.tolist()[0] == [1, 2, 6, 5]
    assert cut.protocol()["boxes"] is True
    assert cut.fingerprint != table.fingerprint
    assert not np.array_equal(cut.images.read(np.arange(12)), table.images.read(np.arange(12)))


def test_a_missing_image_is_named_with_the_cure(tmp_path, small_cub, quiet):
    root = make_cub(tmp_path / "CUB_200_2011")
    (root / "images" / "002.Bird_2" / "Bird_2_0001.jpg").unlink()
    with pytest.raises(DataError) as error:
        load(Data(source="cub", root=root, image_size=8), quiet)
    assert str(error.value) == (
        f"cub: expected 12 images under {root}/images, found 11 (first missing: 002.Bird_2/Bird_2_0001.jpg).\n"
        "Unpack the archive again, or pass --data.allow-missing to go on without them."
    )
    table = load(Data(source="cub", root=root, image_size=8, allow_missing=True), quiet)
    assert len(table) == 11
    assert "expected 12 images" in table.protocol()["data_notes"][0]


def test_damaged_lists_are_named(tmp_path, small_cub):
    root = make_cub(tmp_path / "c")
    cub = BENCHMARKS["cub"]
    for file, text, message in (
        ("image_class_labels.txt", "1 1\n", "image 10 is in only one of"),
        ("images.txt", "1\n", "expected a number and a value, got '1'"),
        ("classes.txt", "one Bird\n", "expected a whole number, got 'one'"),
        ("bounding_boxes.txt", "1 2 3\n", "expected x, y, width and height"),
        ("classes.txt", "1 Bird\n", "class 2 is outside 1 to 1"),
    ):
        before = (root / file).read_text() if (root / file).exists() else None
        (root / file).write_text(text)
        with pytest.raises(DataError, match=message):
            cub.list(root)
        (root / file).unlink() if before is None else (root / file).write_text(before)
    (root / "classes.txt").unlink()
    with pytest.raises(DataError, match=r"classes.txt: is missing. Unpack"):
        cub.list(root)
    with pytest.raises(
        DataError, match=r"looked for .*nowhere/image_class_labels.txt or .*CUB_200_2011/image_class_labels"
    ):
        cub.list(tmp_path / "nowhere")


# --- Cars, SOP, In-Shop ----------------------------------------------------------------------------------------------


def make_cars(root: Path) -> Path:
    from scipy.io import savemat

    rows = []
    for i in range(8):
        name = f"car_ims/{i + 1:06d}.jpg"
        picture(root / name, i)
        rows.append((name, 2, 3, 9, 8, i // 2 + 1, i % 2))
    fields = [("relative_im_path", object), *((f"bbox_{c}", object) for c in ("x1", "y1", "x2", "y2"))]
    annotations = np.array([rows], dtype=[*fields, ("class", object), ("test", object)])
    names = np.array([["AM General Hummer SUV 2000", "Acura RL", "Audi A5", "smart fortwo"]], dtype=object)
    savemat(root / "cars_annos.mat", {"annotations": annotations, "class_names": names})
    return root


def test_cars_from_the_official_annotations(tmp_path):
    listing = small("cars", train=(4, 2), test=(4, 2)).list(make_cars(tmp_path / "cars196"))
    assert listing.labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert listing.part.tolist() == ["train"] * 4 + ["test"] * 4  # the field `test` is the split for classification
    assert listing.class_names[3] == "smart fortwo"
    assert listing.boxes[0].tolist() == [1, 2, 8, 6]
    with pytest.raises(DataError, match=r"expected 8,054 train images of 98 classes under .*, found 4 of 2"):
        BENCHMARKS["cars"].list(tmp_path)
    (tmp_path / "cars196" / "cars_annos.mat").write_bytes(b"no matlab")
    with pytest.raises(DataError, match="is not the official annotation file"):
        BENCHMARKS["cars"].list(tmp_path)
    (tmp_path / "cars196" / "cars_annos.mat").unlink()
    with pytest.raises(DataError, match=r"cars_annos.mat: is missing"):
        BENCHMARKS["cars"].list(tmp_path)


@pytest.mark.parametrize("below", [[""], ["train", "test"]])
def test_cars_as_class_folders(tmp_path, below):
    for c, name in enumerate(["Audi", "AM General", "smart fortwo", "BMW"]):
        for i in range(4):
            picture(tmp_path / "cars196" / below[i % len(below)] / name / f"{i}.jpg", 4 * c + i)
    listing = small("cars", train=(8, 2), test=(8, 2)).list(tmp_path)
    assert listing.class_names == ("AM General", "Audi", "BMW", "smart fortwo")  # the official order
    assert listing.part.tolist() == ["train"] * 8 + ["test"] * 8


def test_sop(tmp_path):
    root = tmp_path / "Stanford_Online_Products"
    header = "image_id class_id super_class_id path"
    lines = {"train": [header], "test": [header]}
    for i in range(8):
        path = f"{['bicycle', 'mug'][i % 2]}_final/{100 + i}_0.JPG"
        picture(root / path, i)
        lines["train" if i < 4 else "test"].append(f"{i + 1} {i // 2 + 1} {i % 2 + 1} {path}")
    for part, text in lines.items():
        (root / f"Ebay_{part}.txt").write_text("\n".join(text) + "\n")
    source = small("sop", train=(4, 2), test=(4, 2))
    listing = source.list(tmp_path)
    assert listing.labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert listing.part.tolist() == ["train"] * 4 + ["test"] * 4
    assert listing.groups.tolist() == ["bicycle", "mug"] * 4
    assert recognise(root) == "sop"
    with pytest.raises(DataError, match="sop: expected 59,551 train images of 11,318 classes"):
        BENCHMARKS["sop"].list(root)
    (root / "mug_final" / "103_0.JPG").unlink()
    with pytest.raises(DataError, match=r"expected 8 images under .*, found 7 \(first missing: mug_final/103_0.JPG\)"):
        source.list(root)
    (root / "Ebay_test.txt").write_text(f"{header}\n1 2 3\n")
    with pytest.raises(DataError, match=r"Ebay_test.txt: expected 'image_id .*, got '1 2 3'"):
        source.list(root)


@pytest.mark.parametrize("above", ["", "Img"])
def test_inshop(tmp_path, above, quiet, monkeypatch):
    rows = []
    for item in range(1, 9):
        for i in range(2):
            name = f"img/WOMEN/Dresses/id_{item:08d}/{i:02d}_1_front.jpg"
            picture(tmp_path / above / name, 2 * item + i)
            part = "train" if item <= 5 else ["query", "gallery"][i]
            rows.append(f"{name}      id_{item:08d}    {part}")
    (tmp_path / "Eval").mkdir()
    file = tmp_path / "Eval" / "list_eval_partition.txt"
    file.write_text(f"{len(rows)}\nimage_name item_id evaluation_status\n" + "\n".join(rows) + "\n")
    source = small("inshop", train=(10, 5), query=(3, 3), gallery=(3, 3))
    assert source.total == Counts(16, 8)
    monkeypatch.setitem(BENCHMARKS._items, "inshop", source)
    table = load(Data(source="inshop", root=tmp_path, image_size=8), quiet)
    assert table.parts == ("train", "query", "gallery")
    assert set(table.groups) == {"WOMEN/Dresses"}
    split, holdout = split_for(table, Data(val_share=0.4))
    judged = holdout.open()
    assert (holdout.num_images, holdout.num_classes) == (6, 3)
    assert judged.of_part("query").labels.tolist() == judged.of_part("gallery").labels.tolist() == [0, 1, 2]
    assert not set(split.train.class_names) & set(judged.class_names)
    file.write_text(file.read_text().replace("gallery", "galery"))
    with pytest.raises(DataError, match="expected 'image_name item_id train"):
        source.list(tmp_path)


def test_declared_counts_are_those_of_the_papers():
    assert {name: b.total for name, b in BENCHMARKS.items()} == {
        "cub": Counts(11_788, 200),
        "cars": Counts(16_185, 196),
        "sop": Counts(120_053, 22_634),
        "inshop": Counts(52_712, 7_982),
    }


# --- folders and tables ----------------------------------------------------------------------------------------------


def test_a_folder_with_train_and_test_keeps_its_parts(tmp_path):
    for part, classes in {"train": "abcd", "test": "ef"}.items():
        for name in classes:
            picture(tmp_path / part / name / "1.png")
    listing = list_folder(tmp_path)
    assert listing.class_names == tuple("abcdef")
    assert listing.part.tolist() == ["train"] * 4 + ["test"] * 2


def test_links_are_followed_and_circles_end(tmp_path):
    picture(tmp_path / "real" / "1.png", 1)
    for name in "ab":
        picture(tmp_path / "root" / name / "1.png")
    (tmp_path / "root" / "c").symlink_to(tmp_path / "real", target_is_directory=True)
    (tmp_path / "root" / "a" / "again").symlink_to(tmp_path / "root" / "a", target_is_directory=True)
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
    assert recognise(file) == "table"
    table = load(Data(source="table", root=file, image_size=8), quiet)
    assert (table.source, table.class_names) == ("birds", ("8", "9", "10"))  # by value, not by letter
    assert table.part.tolist() == ["train"] * 4 + ["test"] * 2
    assert table.groups.tolist() == ["g"] * 6
    assert table.boxes is None
    assert load(Data(source="table", root=file, image_size=8, boxes=True), quiet).boxes.tolist() == [[1, 2, 8, 9]] * 6


def test_columns_may_be_named_and_separated_otherwise(tmp_path):
    for i in range(2):
        picture(tmp_path / f"{i}.png", i)
    file = write_csv(tmp_path / "t.csv", "where;what", "0.png;a", "1.png;b")
    with pytest.raises(DataError, match=r"no column named 'path'; it has where, what.(?s:.*)--data.path-column"):
        list_table(file)
    assert list_table(file, path_column="where", label_column="what").class_names == ("a", "b")
    with pytest.raises(DataError, match=r"no column named 'wat'; it has where, what. Did you mean 'what'"):
        list_table(file, path_column="where", label_column="wat")


@pytest.mark.parametrize("split", [False, True])
def test_a_hugging_face_folder(tmp_path, split, quiet):
    for part in ["train", "test"] if split else [""]:
        names = {"train": "abcd", "test": "xy", "": "abcdxy"}[part]
        for i, _ in enumerate(names):
            picture(tmp_path / part / f"{i}.png", i)
        rows = [f'{i}.png,"{name}, with a comma"' for i, name in enumerate(names)]
        write_csv(tmp_path / part / "metadata.csv", "file_name,label", *rows)
    assert recognise(tmp_path) == "table"
    table = load(Data(source="table", root=tmp_path, image_size=8), quiet)
    assert table.class_names == tuple(f"{name}, with a comma" for name in "abcdxy")
    assert table.parts == (("train", "test") if split else ())


def test_tables_that_cannot_serve_say_why(tmp_path, quiet):
    good = ["path,label", "a.png,x", "b.png,y"]
    for name in "ab":
        picture(tmp_path / f"{name}.png")
    for lines, message in (
        ([*good, "c.png"], r"row 4 has 1 values, the header names 2"),
        ([*good, "c.png,"], r"row 4 has no label"),
        (good[:1], r"has a header and no rows"),
        ([""], r"is empty"),
        (good[:2], r"names 1 classes, need at least 2"),
        (["path,label,split", "a.png,x,tst", "b.png,y,train"], r"part 'tst' is none of train, val"),
        (["path,label,x,y,w,h", "a.png,x,1,1,0,5", "b.png,y,1,1,1,1"], r"row 2 has no proper box"),
        (["path,label,x,y,w,h", "a.png,x,1,1,a,5", "b.png,y,1,1,1,1"], r"a box is not a number"),
    ):
        with pytest.raises(DataError, match=message):
            list_table(write_csv(tmp_path / "t.csv", *lines))
    file = write_csv(tmp_path / "t.csv", *good, "gone.png,z")
    with pytest.raises(DataError, match=r"1 of 3 files it lists are not there, first .*gone.png"):
        load(Data(source="table", root=file), quiet)
    table = load(Data(source="table", root=file, image_size=8, allow_missing=True), quiet)
    assert (len(table), table.num_classes, table.notes) == (2, 2, ("1 listed files were not there",))
    with pytest.raises(DataError, match="has no boxes to cut to"):
        load(Data(source="table", root=file, allow_missing=True, boxes=True), quiet)
    (tmp_path / "t.csv").write_bytes(b"path,label\n\xff\xfe,x\n")
    with pytest.raises(DataError, match="is not UTF-8"):
        list_table(file)
    with pytest.raises(DataError, match="there is no such file"):
        list_table(tmp_path / "none.csv")
    with pytest.raises(DataError, match=r"holds no metadata.csv"):
        list_table(tmp_path)


@pytest.mark.parametrize("count", [10, 20_000])  # the second is longer than a field may be
def test_a_quote_that_is_never_closed_is_named(tmp_path, count):
    rows = [f"{i}.png,class {i}" for i in range(count)]
    rows[5] = '5.png,"class 5'
    with pytest.raises(DataError, match=r"t\.csv: row 7 cannot be read \(.*\)\. Is a quote never closed\?"):
        list_table(write_csv(tmp_path / "t.csv", "path,label", *rows))


def test_rows_are_numbered_as_an_editor_shows_them(tmp_path):
    for lines, message in (
        (["path,label", "", "a.png,x", "b.png,y", "", "c.png"], "row 6 has 1 values"),
        (["", "path,label", "a.png,x", "", "b.png,"], "row 5 has no label"),
        (["path,label,x,y,w,h", "a.png,x,1,1,2,5", "", "b.png,y,1,1,0,1"], "row 4 has no proper box"),
    ):
        with pytest.raises(DataError, match=message):
            list_table(write_csv(tmp_path / "t.csv", *lines))


def test_parquet_may_hold_vectors_beside_and_gaps(tmp_path, monkeypatch):
    """Its columns through a stand-in for the reader, which needs a package that may not be there."""
    pandas = pytest.importorskip("pandas")
    columns = {"path": ["a.png", "b.png"], "label": [1, 2], "vector": [np.ones(3), np.zeros(3)], "gap": [pandas.NA, 1]}
    (tmp_path / "t.parquet").touch()
    for name in "ab":
        picture(tmp_path / f"{name}.png")
    monkeypatch.setattr(pandas, "read_parquet", lambda path: pandas.DataFrame(columns))
    assert list_table(tmp_path / "t.parquet").class_names == ("1", "2")
    with pytest.raises(DataError, match=r"row 1 has no label"):
        list_table(tmp_path / "t.parquet", label_column="gap")
    with pytest.raises(DataError, match=r"column 'vector' holds a ndarray in row 1, expected one word or number"):
        list_table(tmp_path / "t.parquet", label_column="vector")


def test_a_link_that_leads_nowhere_is_named_without_a_cache_too(tmp_path, quiet):
    for name in "ab":
        picture(tmp_path / name / "1.png")
    (tmp_path / "b" / "lost.png").symlink_to(tmp_path / "nowhere.png")
    data = Data(source="folder", root=tmp_path, image_size=8, cache=False)
    with pytest.raises(DataError, match=r"b/lost\.png: cannot be read \(No such file.*--data\.skip-broken"):
        load(data, quiet)
    assert len(load(replace(data, skip_broken=True), quiet)) == 2


def test_parquet_is_read_or_says_what_it_needs(tmp_path, monkeypatch):
    file = tmp_path / "t.parquet"
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"path": ["a.png", "b.png"], "label": [1, 2], "part": ["train", "test"]})
    for name in "ab":
        picture(tmp_path / f"{name}.png")
    try:
        frame.to_parquet(file)
    except ImportError:  # no pyarrow here: the message is what can be tested, and the columns through a stand-in
        file.touch()
        with pytest.raises(MissingExtra, match="pip install pandas pyarrow"):
            list_table(file)
        monkeypatch.setattr(pandas, "read_parquet", lambda path: frame)
    listing = list_table(file)
    assert listing.class_names == ("1", "2")
    assert listing.part.tolist() == ["train", "test"]


def test_numbers_sort_by_value_and_words_by_letter():
    assert number_classes(["b", "10", "a"])[1] == ("10", "a", "b")
    assert number_classes(["2", "10", "2"])[1] == ("2", "10")
    long = "1" * 5000  # more digits than Python turns into a number
    assert number_classes([long, "007", "7"])[1] == ("007", "7", long)


def test_numbers_of_one_value_have_an_order_too():
    """A set's own order changes from process to process, and with it labels, split and fingerprint would."""
    names = [f"{value:0{width}d}" for value in range(1, 12) for width in (3, 2, 4)]
    expected = [name for value in range(1, 12) for name in (f"{value:04d}", f"{value:03d}", f"{value:02d}")]
    assert number_classes(names)[1] == tuple(expected)


def test_unknown_sources_and_missing_roots_say_what_there_is():
    with pytest.raises(UserError, match=r"no source named 'cubb'. Did you mean 'cub'"):
        list_source(Data(source="cubb"))
    for source, message in (("table", "--data FILE"), ("folder", "--data FOLDER"), ("cub", "nearkin data get cub")):
        with pytest.raises(DataError, match=message):
            list_source(Data(source=source))


def test_data_flag_recognises_what_it_is_given(tmp_path):
    make_cub(tmp_path / "CUB_200_2011")
    recipe, _ = parse_train(["--data", str(tmp_path)])
    assert (recipe.data.source, recipe.data.root) == ("cub", tmp_path)
    picture(tmp_path / "1.png", 1)
    picture(tmp_path / "2.png", 2)
    (tmp_path / "photos.csv").write_text("path,species\n1.png,wren\n2.png,owl\n")
    recipe, _ = parse_train(["--data", str(tmp_path / "photos.csv"), "--data.label-column", "species"])
    assert (recipe.data.source, recipe.data.label_column) == ("table", "species")


def test_the_fingerprint_knows_content_labels_parts_and_boxes_but_no_names(tmp_path, quiet):
    for name in "ab":
        picture(tmp_path / "one" / name / "1.png", ord(name))
        picture(tmp_path / "two" / name / "renamed.png", ord(name))
    data = Data(source="folder", root=tmp_path / "one", image_size=8)
    first = load(data, quiet).fingerprint
    assert load(replace(data, root=tmp_path / "two"), quiet).fingerprint == first
    picture(tmp_path / "two" / "a" / "renamed.png", 99)
    assert load(replace(data, root=tmp_path / "two"), quiet).fingerprint != first
    labels, part, boxes = np.array([0, 1]), np.array(["train", "test"]), np.ones((2, 4), np.int64)
    given = [([b"x", b"y"], labels, ("a", "b")), ([b"x", b"y"], labels, ("a", "b"), part)]
    given += [([b"x", b"y"], labels, ("a", "b"), None, boxes), ([b"x", b"y"], labels[::-1], ("a", "b"))]
    assert len({fingerprint(*one) for one in given}) == 4


def test_the_fingerprint_is_that_of_the_cached_pixels(tmp_path, quiet):
    """A finished cache is believed as long as sizes and times stay, so its files are not read again at every start."""
    for name in "ab":
        Image.new("RGB", (8, 8), "red").save(picture(tmp_path / name / "1.bmp"))
    data = Data(source="folder", root=tmp_path, image_size=8)
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


def test_a_folder_of_ones_own_is_not_taken_for_a_benchmark(tmp_path):
    for name in "abc":
        picture(tmp_path / name / "1.png", ord(name))
    (tmp_path / "images.txt").write_text("a note on my images\n")
    assert recognise(tmp_path) == "folder"


def test_a_cache_beyond_its_limit_is_refused_before_it_is_written(tmp_path, quiet):
    for name in "ab":
        picture(tmp_path / name / "1.png")
    with pytest.raises(DataError, match=r"(?i)cache"):
        load(Data(source="folder", root=tmp_path, cache_gb=1e-9), quiet)
    assert len(load(Data(source="folder", root=tmp_path, cache=False), quiet)) == 2


# --- features --------------------------------------------------------------------------------------------------------


def test_features_of_any_modality_become_a_table(tmp_path):
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
    with pytest.raises(DataError, match="holds features, not images"):
        test.images.read(np.array([0]))
    np.save(tmp_path / "g.npy", vectors)
    (tmp_path / "g.labels.txt").write_text("\n".join(map(str, labels)) + "\n")
    assert np.array_equal(load_features(tmp_path / "g.npy").labels, table.labels)
    np.save(tmp_path / "other.npy", labels)
    assert np.array_equal(load_features(tmp_path / "g.npy", tmp_path / "other.npy").labels, table.labels)


def test_the_part_of_features_is_read_like_that_of_a_table(tmp_path):
    words = ["Training"] * 8 + ["Test"] * 4
    for part in (np.array(words), np.array(words, np.bytes_)):
        np.savez(tmp_path / "f.npz", features=np.eye(12), labels=np.repeat(np.arange(6), 2), part=part)
        table = load_features(tmp_path / "f.npz")
        assert table.part.tolist() == ["train"] * 8 + ["test"] * 4
        assert split_for(table, Data())[1].num_images == 4


def test_labels_may_be_bytes_and_features_whole_numbers(tmp_path):
    np.savez(tmp_path / "F.NPZ", features=np.arange(6).reshape(2, 3), labels=np.array(["é", "b"]))
    (tmp_path / "F.NPZ.npz").rename(tmp_path / "F.NPZ")
    table = load_features(tmp_path / "F.NPZ")
    assert table.features.tolist() == [[0, 1, 2], [3, 4, 5]]
    np.savez(tmp_path / "g.npz", features=np.arange(6).reshape(2, 3), labels=np.array(["é".encode(), b"b"]))
    assert load_features(tmp_path / "g.npz").class_names == table.class_names == ("b", "é")


def test_features_that_cannot_serve_say_why(tmp_path):
    good = {"features": np.ones((2, 3)), "labels": np.array([0, 1])}
    for change, message in (
        ({"features": np.ones(3)}, r"expected numbers \[N, D\]"),
        ({"features": np.array([["a"], ["b"]])}, r"expected numbers \[N, D\]"),
        ({"features": np.array([[1.0, 1], [1e300, 1]])}, "1 features hold NaN or infinity, first row 1"),
        ({"labels": np.array([0, np.nan])}, "row 1 has no label"),
        ({"labels": np.array(["a", ""])}, "row 1 has no label"),
        ({"labels": np.array([b"a", b"\xff"])}, r"f\.npz: labels are bytes that are not UTF-8"),
        ({"part": np.array(["train", "tst"])}, "part 'tst' is none of train, val, test"),
        ({"part": np.array([0, 1])}, "part '0' is none of train, val, test"),
        ({"part": np.array(["train"])}, r"2 features and part of shape \[1\]; expected one each"),
        ({"labels": np.arange(3)}, r"2 features and labels of shape \[3\]"),
        ({"features": np.array([[1.0, np.nan], [1, 1]])}, "1 features hold NaN or infinity, first row 0"),
        ({"features": np.array([[object()], [None]])}, "cannot be read as features"),
    ):
        np.savez(tmp_path / "f.npz", **(good | change))
        with pytest.raises(DataError, match=message):
            load_features(tmp_path / "f.npz")
    np.savez(tmp_path / "f.npz", features=np.ones((2, 3)))
    with pytest.raises(DataError, match="no array named 'labels'"):
        load_features(tmp_path / "f.npz")
    np.save(tmp_path / "f.npy", np.ones((2, 3)))
    with pytest.raises(DataError, match=r"looked for .*f.labels.npy and f.labels.txt"):
        load_features(tmp_path / "f.npy")
    with pytest.raises(DataError, match="no such file"):
        load_features(tmp_path / "none.npz")
    (tmp_path / "f.npz").write_bytes(b"PK\x03\x04 nonsense")
    with pytest.raises(DataError, match="cannot be read as features"):
        load_features(tmp_path / "f.npz")
