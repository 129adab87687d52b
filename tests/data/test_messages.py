"""What a newcomer reads when their folder is not what training expects; `data check` and training agree on it."""

import numpy as np
import pytest
from PIL import Image

from nearkin.config.recipe import DataConfig
from nearkin.data import sources
from nearkin.data.check import check_target
from nearkin.data.listing import list_folder, list_table
from nearkin.data.splits import make_split
from nearkin.deploy.index.sources import find_images
from nearkin.errors import DataError, UserError
from nearkin.report.data_check import render


def write_images(root, classes: int, per_class: int = 2, part: str = "") -> None:
    rng = np.random.default_rng(len(part))
    for c in range(classes):
        folder = root / part / f"class {c}"
        folder.mkdir(parents=True)
        for i in range(per_class):
            Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(folder / f"{i}.png")


@pytest.mark.parametrize("subfolder", ["", "class 0"])
def test_a_folder_of_other_files_says_what_it_contains(tmp_path, subfolder):
    (tmp_path / subfolder).mkdir(exist_ok=True)
    for i in range(6):
        (tmp_path / subfolder / f"{i}.pdf").touch()
    with pytest.raises(DataError, match=r": found 6 \.pdf files, no images\. Expected .*/CLASS/IMAGE\.jpg\."):
        list_folder(tmp_path)
    (tmp_path / "notes.TXT").touch()
    with pytest.raises(DataError, match=r": found 6 \.pdf files and 1 \.txt file, no images\."):
        find_images(tmp_path)


def test_a_folder_without_class_folders(tmp_path):
    with pytest.raises(DataError, match=r": the folder is empty\. Expected"):
        list_folder(tmp_path)
    Image.new("RGB", (8, 8)).save(tmp_path / "robin.png")
    with pytest.raises(DataError, match=r": found 1 image, but no class folders\. Expected"):
        list_folder(tmp_path)
    write_images(tmp_path, 1)
    with pytest.raises(DataError, match=r": found images in 1 class folder, need at least 6\."):
        list_folder(tmp_path)


@pytest.mark.parametrize("separator", [";", ",", "\t"])
def test_the_separator_of_a_table_is_detected(tmp_path, separator):
    write_images(tmp_path, 2)
    rows = ["path", "label"], ["class 0/0.png", "a"], ["class 1/0.png", '"b, the second"'], ["class 1/1.png", "c"]
    (tmp_path / "photos.csv").write_text("\n".join(separator.join(row) for row in rows), encoding="utf-8")
    listing = list_table(tmp_path / "photos.csv")
    assert [path.name for path in listing.paths] == ["0.png", "0.png", "1.png"]
    assert listing.class_names == ("a", "b, the second", "c")


def overlapping(root):
    write_images(root, 4, part="train")
    write_images(root, 4, part="test")


def unreadable(root):
    write_images(root, 6)
    (root / "class 0" / "0.png").write_bytes(b"not an image")


def duplicated(root):
    write_images(root, 6)
    (root / "class 1" / "0.png").write_bytes((root / "class 0" / "0.png").read_bytes())


@pytest.mark.parametrize(
    ("make", "refused"),
    [
        (lambda root: write_images(root, 6), False),
        (lambda root: write_images(root, 5), True),
        (lambda root: write_images(root, 2), True),
        (lambda root: write_images(root, 8, per_class=1), True),
        (overlapping, True),
        (unreadable, True),
        (duplicated, False),
    ],
    ids=["six", "five", "two", "singletons", "overlapping", "unreadable", "duplicated"],
)
def test_the_check_and_training_refuse_the_same_data(tmp_path, make, refused, quiet):
    make(tmp_path / "photos")
    report = check_target(str(tmp_path / "photos"), tmp_path)
    data = DataConfig(source="folder", root=tmp_path / "photos", image_size=8, max_cache_gb=1)
    message = ""
    try:
        make_split(sources.load(data, quiet), data)
    except UserError as error:
        message = str(error)
    assert (report.refused, bool(message)) == (refused, refused)
    text = str(render(report))
    assert ("Training would refuse this data." in text) == refused
    if finding := report.find("split"):
        assert finding.cases[0] in " ".join(message.split())
        assert "1 reason why the classes cannot be split" in text
    assert ("Training would accept this data, but its scores would be wrong." in text) == (make is duplicated)
