"""The cache has the same pixels as the files, is built once, and is rebuilt when damaged."""

import hashlib
import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.limits import leftover_of_a_killed_process
from PIL import Image

from nearkin._common.progress import Reporter
from nearkin.data import cache, reading
from nearkin.data.cache import CachedImages, cache_key, open_images
from nearkin.data.images import FileImages
from nearkin.errors import DataError


@pytest.fixture
def photos(tmp_path) -> list[Path]:
    """Twenty-five images of different sizes and aspect ratios."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "photos é"
    (folder / "sub").mkdir(parents=True)
    paths = [folder / ("sub" if i % 2 else ".") / f"{i:02d}.{'png' if i % 3 else 'jpg'}" for i in range(25)]
    for path in paths:
        height, width = rng.integers(12, 60, 2)
        Image.fromarray(rng.integers(0, 255, (height, width, 3), np.uint8)).save(path)
    return paths


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def reporter():
    return Reporter(out=io.StringIO())


def messages(reporter) -> str:
    return reporter._out.getvalue()


def image_bytes(images) -> list[bytes]:
    return [images.whole(row).contiguous().numpy().tobytes() for row in range(len(images))]


def cache_file(folder: Path) -> Path:
    [path] = folder.glob("*.pixels")
    return path


def flip_byte(path: Path, offset: int) -> None:
    with open(path, "r+b") as handle:
        handle.seek(offset)
        byte = handle.read(1)
        handle.seek(offset)
        handle.write(bytes([byte[0] ^ 255]))


@pytest.mark.parametrize("channels", [1, 3])
def test_a_cache_has_the_same_pixels_as_the_files(photos, folder, reporter, channels):
    files = FileImages(photos, 24, channels=channels)
    images = open_images(files, folder=folder, reporter=reporter).images
    assert isinstance(images, CachedImages)
    assert image_bytes(images) == image_bytes(files)
    rows = np.array([24, 0, 3, 3, 11])
    assert torch.equal(images.read(rows), files.read(rows))
    assert torch.equal(images.take(rows).take(np.array([4, 1])).read(np.array([0])), files.read(rows[4:]))
    assert images.damaged(np.arange(25)) == []


def test_files_are_decoded_only_once(photos, folder, monkeypatch, quiet):
    files = FileImages(photos, 24)
    first = image_bytes(open_images(files, folder=folder, reporter=quiet).images)
    monkeypatch.setattr(FileImages, "whole", lambda self, row: pytest.fail("decoded again"))
    assert image_bytes(open_images(files, folder=folder, reporter=quiet).images) == first


def test_the_size_is_reported_in_advance_and_matches(photos, folder, reporter):
    files = FileImages(photos, 24)
    expected = sum(files.whole(row).numel() for row in range(len(files)))
    open_images(files, folder=folder, reporter=reporter)
    assert "cache: 25 images at 24 pixels, " in messages(reporter)
    assert "free)" in messages(reporter)
    estimate = cache._expected_bytes(files, Reporter(quiet=True))
    assert expected <= estimate
    assert abs(cache_file(folder).stat().st_size - estimate) < 64 * len(files)
    assert {path.suffix for path in folder.iterdir()} == {".pixels", ".lock", ".txt"}


def test_the_size_of_images_cropped_to_boxes_is_estimated(tmp_path, folder, quiet):
    Image.new("RGB", (200, 200)).save(tmp_path / "1.png")
    boxes = np.array([[10, 10, 80, 20], [0, 0, 200, 200], [190, 0, 100, 100], [0, 0, 30, 200]], np.float64)
    files = FileImages([tmp_path / "1.png"] * len(boxes), 13, boxes=boxes)
    expected = sum(files.whole(row).numel() for row in range(len(files)))
    assert expected > 13 * 13 * 3 * len(boxes)
    assert 0 <= cache._expected_bytes(files, Reporter(quiet=True)) - expected < 100 * len(files)


def test_the_key_depends_on_everything_that_could_change_a_pixel(photos, tmp_path, monkeypatch):
    key = cache_key(FileImages(photos, 24))
    boxes = np.tile([0.0, 0.0, 5.0, 5.0], (25, 1))
    others = [
        FileImages(photos, 25),
        FileImages(photos, 24, channels=1),
        FileImages(photos, 24, boxes=boxes),
        FileImages(photos, 24, boxes=boxes + 1),
        FileImages(photos[::-1], 24),
    ]
    keys = {key, *map(cache_key, others)}
    with monkeypatch.context() as patch:
        patch.setattr(reading, "_torchvision_io", lambda: None)
        keys.add(cache_key(FileImages(photos, 24)))
    assert len(keys) == 7
    assert cache_key(FileImages(photos, 24, workers=7)) == key
    moved = photos[0].parents[0].rename(tmp_path / "moved")
    again = [moved / path.relative_to(photos[0].parent) for path in photos]
    assert cache_key(FileImages(again, 24)) == key
    os.utime(again[3], ns=(1, 1))
    assert cache_key(FileImages(again, 24)) != key


@pytest.mark.parametrize("damage", ["cut", "empty", "index", "sampled pixel", "foreign"])
def test_a_damaged_cache_is_rebuilt(photos, folder, reporter, quiet, damage):
    files = FileImages(photos, 24)
    open_images(files, folder=folder, reporter=quiet)
    path = cache_file(folder)
    data = path.read_bytes()
    if damage == "index":
        flip_byte(path, data.index(b'"heights"') + 15)
    elif damage == "sampled pixel":
        flip_byte(path, 5)
    else:
        path.write_bytes({"cut": data[:-100], "empty": b"", "foreign": b"x" * 5000}[damage])
    assert image_bytes(open_images(files, folder=folder, reporter=reporter).images) == image_bytes(files)
    assert "; rebuilding" in messages(reporter)
    assert path.read_bytes() == data


def test_a_damaged_image_is_read_from_its_file(photos, folder, reporter, quiet):
    files = FileImages(photos * 3, 24)  # more than are sampled when a cache is opened
    images = open_images(files, folder=folder, reporter=quiet).images
    row = 40
    sampled = np.linspace(0, len(files) - 1, 16).astype(int)
    assert row not in sampled
    flip_byte(images.path, int(images.starts[row]) + 7)
    again = open_images(files, folder=folder, reporter=reporter).images
    assert messages(reporter) == ""
    assert again.damaged(np.arange(75)) == [row]
    assert image_bytes(again) == image_bytes(files)
    assert f"is damaged at {files.paths[row]}" in messages(reporter)


def test_a_cache_above_the_limit_or_the_free_space_is_rejected_in_advance(photos, folder, quiet, monkeypatch):
    files = FileImages(photos, 24)
    with pytest.raises(DataError, match=r"need 0\.0\d MB, more than the limit of 1e-06 GB.\nRaise --data.max-cache-gb"):
        open_images(files, folder=folder, limit_gb=1e-6, reporter=quiet)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DataError, match=r"No space left on .* 0\.00 MB are free.\nFree some space"):
        open_images(files, folder=folder, reporter=quiet)
    assert not list(folder.glob("*.pixels*"))


def run_python(code: str, **kwargs) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_full_disk_leaves_nothing_behind(photos, folder):
    code = f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
from pathlib import Path
from nearkin.data import reading
from nearkin.data.cache import open_images
from nearkin.data.images import FileImages
reading._torchvision_io = lambda: None  # which takes long to import
open_images(FileImages({[str(p) for p in photos]!r}, 24), folder=Path({str(folder)!r}))
"""
    _, err = run_python(code).communicate()
    assert "cannot write the cache of 25 images (File too large); the partial file was removed" in err
    assert [path.suffix for path in folder.iterdir()] == [".lock"]


@pytest.mark.slow
def test_two_processes_build_it_once(photos, folder):
    code = f"""
import sys, time
from pathlib import Path
from nearkin.data import cache, images, reading
from nearkin._common.progress import Reporter
reading._torchvision_io = lambda: None  # which takes long to import
real = images.FileImages.whole
def slow(self, row):
    print("decoded")
    time.sleep(0.02)
    return real(self, row)
images.FileImages.whole = slow
files = images.FileImages({[str(p) for p in photos]!r}, 24, workers=1)
store = cache.open_images(files, folder=Path({str(folder)!r}), reporter=Reporter(out=sys.stderr)).images
print("sum", sum(int(store.whole(row).sum()) for row in range(len(store))))
"""
    ends = [process.communicate() for process in [run_python(code), run_python(code)]]
    sums = {line for out, _ in ends for line in out.splitlines() if line.startswith("sum")}
    files = FileImages(photos, 24)
    assert sums == {f"sum {sum(int(files.whole(row).sum()) for row in range(25))}"}, ends
    assert sorted(out.count("decoded") for out, _ in ends) == [0, 25]
    assert not list(folder.glob("*.tmp"))


def test_the_partial_file_of_a_killed_process_is_removed(photos, folder, quiet):
    files = FileImages(photos, 24)
    folder.mkdir()
    leftover = leftover_of_a_killed_process(folder / f"{cache_key(files)}.pixels")
    open_images(files, folder=folder, reporter=quiet)
    assert not leftover.exists()


def test_an_interrupted_build_leaves_nothing_behind(photos, folder, quiet, monkeypatch):
    files, real = FileImages(photos, 24), FileImages.whole

    def interrupted(self, row):
        if row == 20:
            raise KeyboardInterrupt
        return real(self, row)

    monkeypatch.setattr(FileImages, "whole", interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_images(files, folder=folder, reporter=quiet)
    assert [path.suffix for path in folder.iterdir()] == [".lock"]


@pytest.fixture
def photos_with_broken(photos) -> list[Path]:
    photos[3].write_bytes(photos[3].read_bytes()[:60])
    photos[12].write_text("words")
    return photos


def test_a_cache_stores_the_digests_of_its_files(photos_with_broken, folder, quiet):
    files = FileImages(photos_with_broken, 24)
    for _ in range(2):  # building, then from the cache
        opened = open_images(files, folder=folder, on_broken="skip", reporter=quiet)
        kept = [photos_with_broken[row] for row in opened.kept]
        assert opened.digests == [hashlib.sha256(path.read_bytes()).digest() for path in kept]


@pytest.mark.parametrize("use_cache", [True, False])
def test_broken_files_are_skipped_only_on_request_and_reported(photos_with_broken, folder, reporter, use_cache):
    files = FileImages(photos_with_broken, 24)
    for _ in range(2):  # building, then from the cache
        opened = open_images(files, cache=use_cache, folder=folder, on_broken="skip", reporter=reporter)
        assert opened.kept.tolist() == [row for row in range(25) if row not in (3, 12)]
        assert set(opened.broken) == {3, 12}
        assert str(photos_with_broken[3]) in opened.broken[3]
        assert image_bytes(opened.images) == image_bytes(files.take(opened.kept))
        assert "skipping 2 of 25 images that cannot be read" in messages(reporter)
    if use_cache:
        with pytest.raises(DataError, match=r"2 of 25 images cannot be read:\n.*03\.jpg.*\n.*12\.jpg.*\nFix"):
            open_images(files, folder=folder, on_broken="stop", reporter=reporter)
    else:
        with pytest.raises(DataError, match=r"03\.jpg: cannot be read"):
            open_images(files, cache=False, on_broken="stop").images.read(np.arange(25))


def test_a_file_that_has_become_readable_is_no_longer_skipped(photos, folder, quiet, monkeypatch):
    files, real = FileImages(photos, 24), FileImages.whole

    def forbidden(self, row):
        if row == 7:
            raise DataError("07.png: cannot be read (Permission denied).")
        return real(self, row)

    monkeypatch.setattr(FileImages, "whole", forbidden)
    assert 7 in open_images(files, folder=folder, on_broken="skip", reporter=quiet).broken
    monkeypatch.undo()
    assert open_images(files, folder=folder, on_broken="skip", reporter=quiet).broken == {}


def test_an_error_is_raised_if_no_file_is_readable(tmp_path, folder, quiet):
    (tmp_path / "a.png").write_text("words")
    with pytest.raises(DataError, match="none of the 1 images can be read"):
        open_images(FileImages([tmp_path / "a.png"], 8), folder=folder, on_broken="skip", reporter=quiet)
