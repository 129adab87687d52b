"""CUB, Cars196, SOP and In-Shop in their official layouts: found, split and counted as in the papers."""

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from helpers.images import picture
from helpers.paths import SHARED

from nearkin.cli.train import parse_train
from nearkin.config.recipe import DataConfig
from nearkin.data.benchmarks import BENCHMARKS, Counts
from nearkin.data.sources import detect_source, load
from nearkin.data.splits import make_split
from nearkin.errors import DataError

CUB = SHARED / "data" / "CUB_200_2011"


def small(name: str, **parts: tuple[int, int]):
    """The benchmark with other counts, to match a fixture of a few images."""
    return replace(BENCHMARKS[name], parts=MappingProxyType({p: Counts(*c) for p, c in parts.items()}))


# --- CUB -------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not CUB.is_dir(), reason="CUB-200-2011 is not beside the project (../shared/data/CUB_200_2011)")
def test_real_cub_has_the_papers_split_and_not_the_classification_split():
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
    assert detect_source(CUB) == detect_source(CUB.parent) == "cub"
    assert BENCHMARKS["cub"].list(CUB.parent).paths == listing.paths


def make_cub(root: Path, boxes: bool = False) -> Path:
    """Six classes of two images in the official files; the labels are not in the order of the images."""
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
    monkeypatch.setitem(BENCHMARKS, "cub", small("cub", train=(6, 3), test=(6, 3)))


def test_cub_loads_by_name_and_splits_officially(tmp_path, small_cub, quiet):
    root = make_cub(tmp_path / "CUB_200_2011", boxes=True)
    table = load(DataConfig(source="cub", root=tmp_path, image_size=8), quiet)
    assert (table.source, len(table), table.num_classes, table.boxes) == ("cub", 12, 6, None)
    assert table.labels.tolist() == sorted(table.labels.tolist())
    with pytest.raises(DataError, match="3 classes to train and 3 to test"):
        make_split(table, DataConfig())
    cropped = load(DataConfig(source="cub", root=root, image_size=8, crop_to_boxes=True), quiet)
    assert cropped.boxes.tolist()[0] == [1, 2, 6, 5]
    assert cropped.protocol()["boxes"] is True
    assert cropped.fingerprint != table.fingerprint
    assert not np.array_equal(cropped.images.read(np.arange(12)), table.images.read(np.arange(12)))


def test_a_missing_image_is_named_with_the_fix(tmp_path, small_cub, quiet):
    root = make_cub(tmp_path / "CUB_200_2011")
    (root / "images" / "002.Bird_2" / "Bird_2_0001.jpg").unlink()
    with pytest.raises(DataError) as error:
        load(DataConfig(source="cub", root=root, image_size=8), quiet)
    assert str(error.value) == (
        f"cub: expected 12 images under {root}/images, found 11 (first missing: 002.Bird_2/Bird_2_0001.jpg).\n"
        "Unpack the archive again, or ignore missing files with --data.allow-missing."
    )
    table = load(DataConfig(source="cub", root=root, image_size=8, allow_missing=True), quiet)
    assert len(table) == 11
    assert "expected 12 images" in table.protocol()["data_notes"][0]


def test_damaged_annotation_files_are_named(tmp_path, small_cub):
    root = make_cub(tmp_path / "c")
    cub = BENCHMARKS["cub"]
    for file, text, message in (
        ("image_class_labels.txt", "1 1\n", "image 10 is only in one of"),
        ("images.txt", "1\n", "expected 'number value', got '1'"),
        ("classes.txt", "one Bird\n", "expected an integer, got 'one'"),
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
        DataError,
        match=r"CUB-200-2011 not found. Expected .*nowhere/image_class_labels.txt or .*CUB_200_2011/image_class_labels",
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
    assert listing.part.tolist() == ["train"] * 4 + ["test"] * 4  # the field `test` is the classification split
    assert listing.class_names[3] == "smart fortwo"
    assert listing.boxes[0].tolist() == [1, 2, 8, 6]
    with pytest.raises(DataError, match=r"expected 8,054 train images of 98 classes under .*, found 4 of 2"):
        BENCHMARKS["cars"].list(tmp_path)
    (tmp_path / "cars196" / "cars_annos.mat").write_bytes(b"no matlab")
    with pytest.raises(DataError, match="not the official annotation file"):
        BENCHMARKS["cars"].list(tmp_path)
    (tmp_path / "cars196" / "cars_annos.mat").unlink()
    with pytest.raises(DataError, match=r"cars_annos.mat: is missing"):
        BENCHMARKS["cars"].list(tmp_path)


@pytest.mark.parametrize("subfolders", [[""], ["train", "test"]])
def test_cars_as_class_folders(tmp_path, subfolders):
    for c, name in enumerate(["Audi", "AM General", "smart fortwo", "BMW"]):
        for i in range(4):
            picture(tmp_path / "cars196" / subfolders[i % len(subfolders)] / name / f"{i}.jpg", 4 * c + i)
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
    assert detect_source(root) == "sop"
    with pytest.raises(DataError, match="sop: expected 59,551 train images of 11,318 classes"):
        BENCHMARKS["sop"].list(root)
    (root / "mug_final" / "103_0.JPG").unlink()
    with pytest.raises(DataError, match=r"expected 8 images under .*, found 7 \(first missing: mug_final/103_0.JPG\)"):
        source.list(root)
    (root / "Ebay_test.txt").write_text(f"{header}\n1 2 3\n")
    with pytest.raises(DataError, match=r"Ebay_test.txt: expected 'image_id .*, got '1 2 3'"):
        source.list(root)


@pytest.mark.parametrize("image_root", ["", "Img"])
def test_inshop(tmp_path, image_root, quiet, monkeypatch):
    rows = []
    for item in range(1, 9):
        for i in range(2):
            name = f"img/WOMEN/Dresses/id_{item:08d}/{i:02d}_1_front.jpg"
            picture(tmp_path / image_root / name, 2 * item + i)
            part = "train" if item <= 5 else ["query", "gallery"][i]
            rows.append(f"{name}      id_{item:08d}    {part}")
    (tmp_path / "Eval").mkdir()
    file = tmp_path / "Eval" / "list_eval_partition.txt"
    file.write_text(f"{len(rows)}\nimage_name item_id evaluation_status\n" + "\n".join(rows) + "\n")
    source = small("inshop", train=(10, 5), query=(3, 3), gallery=(3, 3))
    assert source.total == Counts(16, 8)
    monkeypatch.setitem(BENCHMARKS, "inshop", source)
    table = load(DataConfig(source="inshop", root=tmp_path, image_size=8), quiet)
    assert table.parts == ("train", "query", "gallery")
    assert set(table.groups) == {"WOMEN/Dresses"}
    split, holdout = make_split(table, DataConfig(val_fraction=0.4))
    test = holdout.open()
    assert (holdout.num_images, holdout.num_classes) == (6, 3)
    assert test.of_part("query").labels.tolist() == test.of_part("gallery").labels.tolist() == [0, 1, 2]
    assert not set(split.train.class_names) & set(test.class_names)
    file.write_text(file.read_text().replace("gallery", "galery"))
    with pytest.raises(DataError, match="expected 'image_name item_id train"):
        source.list(tmp_path)


def test_official_counts_are_those_of_the_papers():
    assert {name: b.total for name, b in BENCHMARKS.items()} == {
        "cub": Counts(11_788, 200),
        "cars": Counts(16_185, 196),
        "sop": Counts(120_053, 22_634),
        "inshop": Counts(52_712, 7_982),
    }


def test_the_data_flag_detects_the_source(tmp_path):
    make_cub(tmp_path / "CUB_200_2011")
    recipe, _ = parse_train(["--data", str(tmp_path)])
    assert (recipe.data.source, recipe.data.root) == ("cub", tmp_path)
    picture(tmp_path / "1.png", 1)
    picture(tmp_path / "2.png", 2)
    (tmp_path / "photos.csv").write_text("path,species\n1.png,wren\n2.png,owl\n")
    recipe, _ = parse_train(["--data", str(tmp_path / "photos.csv"), "--data.label-column", "species"])
    assert (recipe.data.source, recipe.data.label_column) == ("table", "species")
