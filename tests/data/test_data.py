"""Glyphs and folders of images."""

import importlib.util
import zipfile

import numpy as np
import pytest
from PIL import Image

from nearkin._common.progress import Reporter
from nearkin.config.recipe import DataConfig
from nearkin.data import glyphs
from nearkin.data.sources import load
from nearkin.errors import DataError, MissingExtraError


def test_glyphs_are_a_few_hundred_classes_of_small_images(glyphs_table):
    assert 200 <= glyphs_table.num_classes <= 400
    assert glyphs_table.images.shape == (1, 40, 40)
    assert len(glyphs_table.images) == len(glyphs_table)
    assert 8_000 <= len(glyphs_table) <= 14_000
    counts = np.bincount(glyphs_table.labels)
    assert counts.min() == counts.max()


def test_glyphs_have_no_look_alikes_across_scripts_or_cases(glyphs_table):
    names = set(glyphs_table.class_names)
    for group in ["AΑА", "BΒВ", "OΟОoοо", "pр", "HΗН", "Ss", "Чч", "Ии", "XxΧх", "nп"]:
        assert len(names & set(group)) <= 1, group
    assert {"A", "B", "R", "8", "Q", "Ж", "λ", "Ω"} <= names


def test_glyphs_are_reproducible_and_differ_by_seed(glyphs_table):
    stencil = glyphs._stencil(glyphs._fonts()[0], "Q")
    first, again, other = (glyphs._distort(stencil, np.random.default_rng(seed)) for seed in (3, 3, 4))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert glyphs.load().fingerprint == glyphs_table.fingerprint


def test_glyphs_are_redrawn_if_the_cache_is_damaged_or_not_writable(tmp_path, monkeypatch, glyphs_table):
    stored = (glyphs_table.images.pixels.numpy(), glyphs_table.labels, np.array(glyphs_table.class_names))
    drawn = []
    monkeypatch.setattr(glyphs, "draw", lambda seed: drawn.append(seed) or stored)
    assert glyphs.load(cache=tmp_path).fingerprint == glyphs_table.fingerprint
    assert drawn == [0]
    [file] = tmp_path.iterdir()
    middle = len(file.read_bytes()) // 2
    with open(file, "r+b") as handle:  # a flipped byte in the middle, then a cut file
        handle.seek(middle)
        byte = handle.read(1)
        handle.seek(middle)
        handle.write(bytes([byte[0] ^ 255]))
    assert glyphs.load(cache=tmp_path).fingerprint == glyphs_table.fingerprint
    content = bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as members:  # an invalid block type at the start of the first member
        first = members.infolist()[0].header_offset
    names = int.from_bytes(content[first + 26 : first + 28], "little") + int.from_bytes(
        content[first + 28 : first + 30], "little"
    )
    content[first + 30 + names] = 0b111
    file.write_bytes(content)
    assert glyphs.load(cache=tmp_path).fingerprint == glyphs_table.fingerprint
    file.write_bytes(file.read_bytes()[:1000])
    assert glyphs.load(cache=tmp_path).fingerprint == glyphs_table.fingerprint
    blocked = tmp_path / "a file, not a folder"
    blocked.touch()
    assert glyphs.load(cache=blocked).fingerprint == glyphs_table.fingerprint
    assert len(drawn) == 5


def test_glyphs_need_matplotlib(tmp_path, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else real(name))
    with pytest.raises(MissingExtraError, match=r"matplotlib's fonts. Run: pip install 'nearkin\[images\]'"):
        glyphs.load(cache=tmp_path)


def test_a_folder_is_read_with_its_class_names(photo_folder, quiet):
    table = load(DataConfig(source="folder", root=photo_folder, image_size=16), quiet)
    assert table.images.shape == (3, 16, 16)
    assert len(table) == 120
    assert table.class_names == tuple(f"class {c}" for c in range(10))
    assert len(table.paths) == 120


def test_grey_alpha_palette_16_bit_and_rotated_images_are_read(tmp_path, quiet):
    rng = np.random.default_rng(0)
    base = Image.fromarray(rng.integers(0, 255, (20, 30, 3), np.uint8))
    rotated = Image.Exif()
    rotated[0x0112] = 6  # by 90 degrees
    for c in "ab":
        (tmp_path / c).mkdir()
        base.convert("L").save(tmp_path / c / "grey.png")
        base.convert("RGBA").save(tmp_path / c / "alpha.png")
        base.convert("P").save(tmp_path / c / "palette.gif")
        base.convert("CMYK").save(tmp_path / c / "cmyk.JPG")
        Image.fromarray(rng.integers(0, 65535, (20, 30), np.uint16)).save(tmp_path / c / "deep.png")
        base.save(tmp_path / c / "rotated.jpg", exif=rotated)
        (tmp_path / c / "notes.txt").write_text("not an image")
    table = load(DataConfig(source="folder", root=tmp_path, image_size=8), quiet)
    assert len(table) == 12


def test_broken_images_are_named_and_skipped_only_on_request(photo_folder, tmp_path, quiet, capsys):
    for c in range(3):
        (tmp_path / f"c{c}").mkdir()
        for i in range(3):
            good = (photo_folder / f"class {c}" / f"{i:02d}.png").read_bytes()
            (tmp_path / f"c{c}" / f"{i}.png").write_bytes(good)
    (tmp_path / "c1" / "0.png").write_bytes(good[:200])
    (tmp_path / "c2" / "words.jpg").write_text("words")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"2 of 10 images cannot be read:\n.*c1/0.png: .*\n.*c2/words.jpg: ") as error:
        load(DataConfig(source="folder", root=tmp_path, image_size=8), quiet)
    assert "--data.skip-broken" in str(error.value)
    table = load(DataConfig(source="folder", root=tmp_path, image_size=8, skip_broken=True), Reporter())
    messages = capsys.readouterr().err
    assert len(table) == 8
    assert "skipping 2 of 10 images that cannot be read:" in messages
    assert "c1/0.png" in messages
    assert "ignoring 1 folder without images: empty" in messages


def test_unusable_folders_raise_an_error(tmp_path, quiet):
    with pytest.raises(DataError, match="no such folder"):
        load(DataConfig(source="folder", root=tmp_path / "none", image_size=8), quiet)
    with pytest.raises(DataError, match="the folder is empty"):
        load(DataConfig(source="folder", root=tmp_path, image_size=8), quiet)
