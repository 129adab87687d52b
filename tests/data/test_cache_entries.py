"""`nearkin cache list|prune`: what the cache holds is shown with its size, age and origin, and deleted as told."""

import os
import time

import numpy as np
import pytest

from nearkin import cli
from nearkin._common.files import file_lock
from nearkin._common.progress import Reporter
from nearkin.data import cache
from nearkin.data.cache_entries import CacheEntry, choose_entries, list_entries
from nearkin.data.images import FileImages

DAY = 86400


@pytest.fixture
def filled(tmp_path, monkeypatch, photo_folder):
    """A cache of images that were used today, and of features that were used 40 days ago."""
    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path))
    open_cache(photo_folder)
    (tmp_path / "features").mkdir()
    for suffix, content in {"f32": bytes(300_000), "crc": b"1234", "lock": b"", "txt": b"birds, resnet50"}.items():
        path = tmp_path / "features" / f"0123.{suffix}"
        path.write_bytes(content)
        os.utime(path, (time.time() - 40 * DAY,) * 2)
    return tmp_path


def open_cache(photos):
    cache.open_images(FileImages(sorted(photos.rglob("*.png")), 16), reporter=Reporter(quiet=True))


def run(capsys, *args: str) -> str:
    cli.main(["cache", *args])
    return capsys.readouterr().out


def test_entries_have_size_age_and_origin(filled, capsys, photo_folder):
    features, images = list_entries(filled)  # the least recently used first
    assert (features.kind, features.purpose) == ("features", "birds, resnet50")
    assert 300_000 <= features.size < 330_000
    assert features.last_used == pytest.approx(time.time() - 40 * DAY, abs=60)
    assert images.kind == "images"
    assert images.purpose == f"120 images at 16 pixels, {photo_folder}"
    assert images.last_used == pytest.approx(time.time(), abs=60)
    printed = run(capsys, "list")
    assert "40 days ago" in printed
    assert "today" in printed
    assert "birds, resnet50" in printed
    assert f"in {filled}" in printed.splitlines()[-1]


def test_using_a_cache_makes_it_the_youngest(filled, photo_folder):
    for path in (filled / "images").iterdir():
        os.utime(path, (time.time() - 50 * DAY,) * 2)
    assert list_entries(filled)[0].kind == "images"
    open_cache(photo_folder)
    assert list_entries(filled)[0].kind == "features"


def test_a_dry_run_deletes_nothing_and_a_real_one_what_it_showed(filled, capsys):
    before = sorted(filled.rglob("*"))
    shown = run(capsys, "prune", "--older-than", "30", "--dry-run")
    assert "birds, resnet50" in shown
    assert "would be deleted" in shown
    assert "images at 16 pixels" not in shown
    assert sorted(filled.rglob("*")) == before
    assert "MB deleted, " in run(capsys, "prune", "--older-than", "30")
    assert list((filled / "features").iterdir()) == []
    assert [entry.kind for entry in list_entries(filled)] == ["images"]
    run(capsys, "prune", "--older-than", "0")
    assert list_entries(filled) == []
    assert run(capsys, "prune", "--older-than", "0") == f"0.0 MB deleted, 0.0 MB left in {filled}\n"


def test_what_a_process_is_writing_stays(filled, capsys):
    with file_lock(filled / "features" / "0123.lock"):
        assert "in use, not deleted: features, birds, resnet50" in run(capsys, "prune", "--max-gb", "0")
    assert [entry.kind for entry in list_entries(filled)] == ["features"]


def test_the_least_recently_used_go_until_the_rest_fits():
    sizes = np.array([5, 1, 4, 2])
    entries = [CacheEntry("images", str(i), int(size), float(i), ()) for i, size in enumerate(sizes)]
    for limit in range(13):
        chosen = choose_entries(entries, max_age_days=None, max_bytes=limit)
        fewest = next(n for n in range(5) if sizes[n:].sum() <= limit)
        assert [entry.purpose for entry in chosen] == [str(i) for i in range(fewest)]
