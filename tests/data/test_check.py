"""The data check names every problem with a fix, and finds duplicates as a person would."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from helpers.paths import SHARED
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance

from nearkin import cli
from nearkin._common.progress import Reporter
from nearkin.config.recipe import DataConfig
from nearkin.data.check import LEVELS, check, check_target, normalize_class_name
from nearkin.data.image_info import confirm_pairs, hash_image, near_pairs
from nearkin.data.listing import list_folder
from nearkin.data.sources import load
from nearkin.errors import DataError
from nearkin.report.data_check import render

CUB = SHARED / "data" / "CUB_200_2011"


def scene(seed: int, side: int = 64) -> Image.Image:
    """A smooth colour image, which is hashed like a photo, unlike noise."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 255, (6, 6, 3), np.uint8))
    return coarse.resize((side, side), Image.Resampling.BICUBIC)


def save(path: Path, image: Image.Image, **how) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **how)
    return path


@pytest.fixture(scope="module")
def bad_folder(tmp_path_factory) -> Path:
    """Seven classes with every problem of the catalogue for files."""
    root = tmp_path_factory.mktemp("bad") / "photos of birds é"
    for c in range(6):
        for i in range(3):
            save(root / f"bird {c}" / f"{i}.jpg", scene(10 * c + i))
    whole = (root / "bird 0" / "0.jpg").read_bytes()
    (root / "bird 0" / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (root / "bird 0" / "words.jpg").write_text("this is not an image")
    (root / "bird 0" / "nothing.jpg").touch()
    (root / "bird 0" / "notes.txt").write_text("notes")
    (root / "no images").mkdir()
    save(root / "lonely ü" / "only one.png", scene(900))
    save(root / "BIRD_5" / "0.jpg", scene(901))
    save(root / "BIRD_5" / "1.jpg", scene(902))
    save(root / "bird 1" / "huge.png", Image.new("1", (20_000, 20_000)))
    save(root / "bird 1" / "large.png", Image.new("1", (8_000, 7_000)))
    (root / "bird 1" / "link.jpg").symlink_to(root / "bird 1" / "0.jpg")
    (root / "bird 1" / "lost.jpg").symlink_to(root / "nowhere.jpg")
    rotated = Image.Exif()
    rotated[0x0112] = 6
    save(root / "bird 2" / "rotated.jpg", scene(903), exif=rotated)
    for mode in ("L", "CMYK", "P", "RGBA", "LA", "1"):
        save(root / "bird 3" / f"{mode}.tif", scene(910 + ord(mode[0])).convert(mode))
    save(root / "bird 3" / "deep.png", Image.fromarray(np.arange(900, dtype=np.uint16).reshape(30, 30) * 70))
    (root / "bird 4" / "copy.jpg").write_bytes((root / "bird 5" / "2.jpg").read_bytes())
    lighter = ImageEnhance.Brightness(scene(41)).enhance(1.1).resize((50, 50))
    save(root / "bird 2" / "smaller and lighter.webp", lighter, quality=60)
    return root


@pytest.fixture(scope="module")
def report(bad_folder):
    return check(list_folder(bad_folder), Reporter(quiet=True))


@pytest.mark.parametrize(
    ("kind", "level", "cases"),
    [
        (
            "unreadable",
            "error",
            [
                r"bird 0/cut.jpg: image file is truncated",
                r"bird 0/nothing.jpg: empty file",
                r"bird 0/words.jpg: a text file, not an image",
            ],
        ),
        ("too_many_pixels", "error", ["bird 1/huge.png: 20,000 x 20,000 pixels"]),
        ("broken_link", "error", ["bird 1/lost.jpg: links to"]),
        (
            "exact_across_labels",
            "error",
            ["bird 4/copy.jpg = bird 5/2.jpg"],
        ),
        ("near_across_labels", "warning", ["bird 2/smaller and lighter.webp = bird 4/1.jpg"]),
        ("huge", "warning", ["bird 1/large.png: 8000 x 7000"]),
        ("label_typo", "warning", ["'BIRD_5' = 'bird 5'"]),
        ("single_image", "warning", ["lonely ü"]),
        ("empty_class", "warning", ["no images"]),
        ("turned", "note", ["bird 2/rotated.jpg"]),
        ("link", "note", ["bird 1/link.jpg"]),
        ("exact_within_class", "note", ["bird 1/0.jpg = bird 1/link.jpg"]),
        ("ignored", "note", ["bird 0/notes.txt"]),
    ],
)
def test_each_problem_is_found(report, kind, level, cases):
    finding = report.find(kind)
    assert finding is not None
    assert finding.level == level
    assert finding.advice
    assert len(finding.cases) == len(cases)
    for case, start in zip(finding.cases, cases, strict=True):
        assert case.startswith(start)


def test_modes_are_listed(report):
    modes = {case.partition(": ")[2] for case in report.find("not_rgb").cases}
    assert modes >= {"L", "CMYK", "P", "RGBA", "LA", "1", "I;16"}


def test_findings_are_sorted_by_severity_and_rendered(report):
    levels = [LEVELS.index(finding.level) for finding in report.findings]
    assert levels == sorted(levels)
    assert not report.ok
    text = render(report, cases=2).plain
    assert "3 images cannot be decoded" in text
    assert "and 1 more" in text
    assert "--data.skip-broken" in text


def test_training_stops_at_or_skips_broken_images(bad_folder, quiet):
    data = DataConfig(source="folder", root=bad_folder, image_size=8)
    named = r"5 of \d+ images cannot be read:\n  .*bird 0/cut.jpg: .*\n(?s:.*)and 2 more\n.*--data.skip-broken"
    with pytest.raises(DataError, match=named):
        load(data, quiet)
    table = load(DataConfig(source="folder", root=bad_folder, image_size=8, skip_broken=True), quiet)
    assert table.notes == ("5 images could not be read and were skipped",)
    assert len(table) == len(list_folder(bad_folder)) - 5


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read every file")
def test_files_without_permission_are_found(tmp_path, quiet):
    for name in "ab":
        save(tmp_path / name / "1.png", scene(ord(name)))
    (tmp_path / "a" / "1.png").chmod(0)
    found = check(list_folder(tmp_path), quiet).find("no_permission")
    assert found.cases == ("a/1.png: no permission to read it",)


def test_missing_permission_is_distinguished_from_damage(tmp_path, quiet, monkeypatch):
    for name in "ab":
        save(tmp_path / name / "1.png", scene(ord(name)))
    real = os.open

    def refuse(path: str, *args: int) -> int:
        if Path(path).parent.name == "a":
            raise PermissionError(13, "Permission denied")
        return real(path, *args)

    monkeypatch.setattr(os, "open", refuse)
    report = check(list_folder(tmp_path), quiet)
    assert report.find("no_permission").cases == ("a/1.png: no permission to read it",)
    assert report.find("unreadable") is None
    assert report.fingerprint is None


def test_overlapping_parts_are_errors(tmp_path, quiet):
    for c, name in enumerate("abcdef"):
        for i in range(2):
            save(tmp_path / ("train" if c < 4 else "test") / name / f"{i}.png", scene(10 * c + i))
    assert check(list_folder(tmp_path), quiet).findings == ()
    save(tmp_path / "test" / "e" / "same.png", scene(0))
    save(tmp_path / "test" / "a" / "9.png", scene(77))
    save(tmp_path / "test" / "f" / "alike.jpg", scene(11), quality=80)
    report = check(list_folder(tmp_path), quiet)
    assert report.find("class_overlap").cases == ("a",)
    assert report.find("exact_across_parts").cases == ("train/a/0.png (train) = test/e/same.png (test)",)
    assert report.find("near_across_parts").cases == ("train/b/1.png (train) = test/f/alike.jpg (test)",)
    assert report.find("exact_across_labels") is None
    assert report.parts["test"] == {"images": 7, "classes": 3}


def test_report_and_table_have_the_same_fingerprint(photo_folder, quiet):
    report = check(list_folder(photo_folder), quiet)
    assert report.fingerprint == load(DataConfig(source="folder", root=photo_folder, image_size=8), quiet).fingerprint


def test_float_images_are_unreadable_as_in_training(tmp_path, quiet):
    for name in "abc":
        save(tmp_path / name / "1.png", scene(ord(name)))
    save(tmp_path / "a" / "float.tif", Image.fromarray(np.random.default_rng(0).random((20, 20), np.float32)))
    report = check(list_folder(tmp_path), quiet)
    assert [case.partition(":")[0] for case in report.find("unreadable").cases] == ["a/float.tif"]
    assert "float pixels" in report.find("unreadable").cases[0]
    # A table without this file is not the one that the report describes.
    assert report.fingerprint is None


def test_images_outside_of_class_folders_are_reported_by_check_and_training(tmp_path, capsys):
    for c, name in enumerate("abcdef"):
        save(tmp_path / ("train" if c < 4 else "test") / name / "1.png", scene(c))
    save(tmp_path / "loose.jpg", scene(70))
    save(tmp_path / "train" / "astray.jpg", scene(71))
    found = check(list_folder(tmp_path), Reporter(quiet=True)).find("loose")
    assert (found.level, found.cases) == ("warning", ("loose.jpg", "train/astray.jpg"))
    load(DataConfig(source="folder", root=tmp_path, image_size=8), Reporter())
    assert "ignoring 2 images outside any class folder: loose.jpg, train/astray.jpg" in capsys.readouterr().err


def test_queries_without_a_gallery_image_are_found(tmp_path, quiet):
    parts = {"train": "abcd", "query": "ef", "gallery": "eg"}
    for part, names in parts.items():
        for name in names:
            for i in range(2):
                save(tmp_path / part / name / f"{i}.png", scene(10 * ord(name) + 2 * len(part) + i))
    found = check(list_folder(tmp_path), quiet).find("unanswerable")
    assert (found.level, found.cases) == ("warning", ("f",))


def test_blank_images_are_not_duplicates(tmp_path, quiet):
    for c, name in enumerate("abc"):
        save(tmp_path / name / "1.png", Image.new("RGB", (20, 20), (250, 250, 250 - c)))
    assert [f.kind for f in check(list_folder(tmp_path), quiet).findings] == ["split", "single_image"]


def test_features_are_checked(tmp_path, quiet):
    vectors = np.random.default_rng(0).normal(size=(7, 4))
    vectors[3] = vectors[0]
    np.savez(tmp_path / "f.npz", features=vectors, labels=np.array(["a", "a", "b", "b", "B", "B", "c"]))
    (tmp_path / "f.npz").rename(tmp_path / "f.NPZ")
    report = check_target(str(tmp_path / "f.NPZ"), tmp_path, quiet)
    assert report.find("exact_across_labels").cases == ("row 0 = row 3",)
    assert report.find("label_typo").cases == ("'B' = 'b'",)
    assert report.find("single_image").cases == ("c",)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("Blue Jay", "blue_jay", True),
        ("Café", "Cafe\u0301", True),
        ("Straße", "STRASSE", True),
        ("A 1", "A1", False),
        ("robin", "robins", False),
    ],
)
def test_spellings_of_one_class_are_equal(a, b, same):
    assert (normalize_class_name(a) == normalize_class_name(b)) is same


# --- near pairs ------------------------------------------------------------------------------------------------------


@settings(derandomize=True, max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 120), st.integers(0, 6))
def test_near_pairs_are_all_found(seed, count, bits):
    rng = np.random.default_rng(seed)
    hashes = rng.integers(0, 2**64, count, np.uint64)
    for row in range(1, count, 2):  # half of the rows are an earlier one with up to eight bits flipped
        hashes[row] = hashes[rng.integers(row)]
        for bit in rng.integers(0, 64, rng.integers(0, 9)):
            hashes[row] ^= np.uint64(1) << np.uint64(bit)
    expected = [
        [a, b] for a in range(count) for b in range(a + 1, count) if int(hashes[a] ^ hashes[b]).bit_count() <= bits
    ]
    assert near_pairs(hashes, bits).tolist() == expected


def test_near_pairs_of_a_large_set_are_fast():
    import time

    hashes = np.random.default_rng(0).integers(0, 2**64, 60_000, np.uint64)
    hashes[1::1000] = hashes[::1000] ^ np.uint64(5)
    began = time.process_time()
    assert len(near_pairs(hashes)) >= 60
    assert time.process_time() - began < 20


def test_duplicates_are_found_after_scaling_and_compression(tmp_path):
    hashed = []
    for seed in range(20):
        first = scene(seed, 200)
        again = Image.open(save(tmp_path / "again.jpg", first.resize((90, 90)), quality=50))
        hashed += [hash_image(first.convert("L")), hash_image(again.convert("L"))]
    hashes = np.array([value for value, _ in hashed], np.uint64)
    pairs = confirm_pairs(near_pairs(hashes), np.stack([thumb for _, thumb in hashed]))
    assert pairs.tolist() == [[2 * i, 2 * i + 1] for i in range(20)]


@pytest.mark.skipif(not CUB.is_dir(), reason="CUB-200-2011 is not beside the project (../shared/data/CUB_200_2011)")
def test_cub_has_one_photo_in_both_a_training_and_a_test_class(quiet):
    """Confirmed by eye: one photo, named Chuck-will's-widow in class 22 and Whip-poor-will in class 105."""
    from nearkin.data.benchmarks import BENCHMARKS

    listing = BENCHMARKS["cub"].list(CUB)
    some = np.flatnonzero(np.isin(listing.labels, [21, 57, 104]))  # the whole set takes a dozen seconds
    report = check(listing.take(some), quiet)
    assert report.find("near_across_parts").cases == (
        "images/022.Chuck_will_Widow/Chuck_Will_Widow_0042_796983.jpg (train) = "
        "images/105.Whip_poor_Will/Whip_Poor_Will_0002_796427.jpg (test)",
    )
    assert len(report.find("exact_within_class").cases) == 1


# --- the command -----------------------------------------------------------------------------------------------------


def run(capsys, *args: object) -> tuple[int, str, str]:
    code = 0
    try:
        cli.main([str(a) for a in args])
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_prints_and_writes_json(capsys, bad_folder, photo_folder, tmp_path):
    code, out, _ = run(capsys, "data", "check", bad_folder, "--json", tmp_path / "deep" / "r.json")
    assert code == 1
    assert "images cannot be decoded" in out
    stored = json.loads((tmp_path / "deep" / "r.json").read_text())
    assert not stored["ok"]
    [unreadable] = [f for f in stored["findings"] if f["kind"] == "unreadable"]
    assert unreadable["count"] == len(unreadable["cases"]) == 3
    code, out, _ = run(capsys, "data", "check", photo_folder, "--quiet")
    assert code == 0
    assert "120 images of 10 classes" in out


def test_json_supports_any_file_name_and_reports_write_errors(capsys, tmp_path):
    for name in "abcdef":
        for i in range(2):
            save(tmp_path / "data" / name / f"{i}.png", scene(2 * ord(name) + i))
    odd = os.fsdecode(os.fsencode(tmp_path / "data" / "a") + b"/caf\xe9.txt")
    Path(odd).touch()
    code, _, _ = run(capsys, "data", "check", tmp_path / "data", "--json", tmp_path / "r.json")
    assert code == 0
    stored = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    [ignored] = [f for f in stored["findings"] if f["kind"] == "ignored"]
    assert ignored["cases"] == ["a/" + Path(odd).name]
    code, _, err = run(capsys, "data", "check", tmp_path / "data", "--json", tmp_path / "r.json" / "r.json")
    assert code == 2
    assert "r.json: cannot be written (" in err


def test_data_list_and_command_errors(capsys):
    code, out, _ = run(capsys, "data", "list")
    assert code == 0
    for word in ("cub", "11,788", "cars", "sop", "22,634", "inshop", "on request", "glyphs", "folder"):
        assert word in out
    for args, message in (
        (["lst"], "no action named 'lst'. Did you mean 'list'?"),
        (["check"], "missing argument: a benchmark, a folder or a file"),
        (["check", "cubb"], "cubb: no such benchmark or path. Did you mean 'cub'?"),
        (["check", "glyphs"], "generated by nearkin"),
        (["check", "cub", "--root", "/nowhere"], "nearkin data get cub --root /nowhere"),
        (["get", "cubs"], "No benchmark named 'cubs'. Did you mean 'cub'?"),
    ):
        code, _, err = run(capsys, "data", *args)
        assert code == 2
        assert message in err
    for action in ("list", "check", "get"):
        assert "usage" in run(capsys, "data", action, "--help")[1]
