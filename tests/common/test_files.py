"""Atomic writes and locks, with processes that are killed."""

import math
import os
import subprocess
import sys
import time

import pytest
from helpers.limits import leftover_of_a_killed_process, max_file_size, start_writer
from helpers.studies import small_study, write_features

from nearkin._common.files import atomic_file, atomic_write, file_lock, is_locked, nan_to_none, remove_leftovers


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_when_the_block_ends(tmp_path):
    target = tmp_path / "é.txt"
    atomic_write(target, "first\nä")
    with atomic_file(target, keep=tmp_path / "previous.txt") as temporary:
        temporary.write_text("second", encoding="utf-8")
        assert target.read_bytes() == "first\nä".encode()
    assert target.read_bytes() == b"second"
    assert names(tmp_path) == ["previous.txt", "é.txt"]


def test_an_error_keeps_the_old_file(tmp_path):
    target = tmp_path / "file"
    atomic_write(target, b"old")
    keep = tmp_path / "previous"
    with pytest.raises(TypeError), atomic_file(target, keep=keep) as temporary, open(temporary, "wb") as file:
        file.write("not bytes")
    assert names(tmp_path) == ["file"]
    assert target.read_bytes() == b"old"


def test_errors_name_the_file_and_not_the_temporary_one(tmp_path):
    with pytest.raises(FileNotFoundError) as missing:
        atomic_write(tmp_path / "nowhere" / "file", "x")
    assert str(missing.value) == f"[Errno 2] No such file or directory: '{tmp_path}/nowhere/file'"
    with max_file_size(1000), pytest.raises(OSError) as full:
        atomic_write(tmp_path / "file", b"x" * 2000)
    assert (full.value.strerror, full.value.filename) == ("File too large", str(tmp_path / "file"))
    assert names(tmp_path) == []


def test_leftovers_of_killed_processes_are_removed_and_others_are_not(tmp_path):
    atomic_write(tmp_path / "target", b"old")
    leftover = leftover_of_a_killed_process(tmp_path / "target")
    foreign = leftover.with_name(f"other.00000000-{leftover.name.split('-')[-2]}-1.tmp")  # may be alive elsewhere
    user_file = tmp_path / "notes.tmp"
    for path in (foreign, user_file):
        path.write_bytes(b"")
    writer = start_writer(tmp_path / "target")
    try:
        writing = tmp_path / writer.stdout.readline().rstrip("\n")
        remove_leftovers(tmp_path)
        assert set(tmp_path.iterdir()) == {tmp_path / "target", foreign, user_file, writing}
        yesterday = time.time() - 25 * 3600
        os.utime(foreign, (yesterday, yesterday))
    finally:
        writer.communicate()  # closes its input: it finishes the file
    assert (tmp_path / "target").read_bytes() == b"half"
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["notes.tmp", "target"]
    remove_leftovers(tmp_path / "nowhere")


def test_the_next_write_to_a_folder_removes_leftovers(tmp_path):
    """Such as a report that was killed: nobody else cleans up a folder of the user."""
    leftover_of_a_killed_process(tmp_path / "page.html")
    atomic_write(tmp_path / "page.html", b"new")
    assert names(tmp_path) == ["page.html"]


def begin_run(folder, photo_folder):
    from nearkin.config import Recipe
    from nearkin.training import Run

    with Run.create(folder.parent, folder.name, Recipe()).lock():
        pass


def begin_study(folder, photo_folder):
    from nearkin.bench.trials import StudyFolder

    StudyFolder.begin(folder, small_study(write_features(folder.parent / "clouds.npz")))


def begin_index(folder, photo_folder):
    from nearkin.deploy.index.storage import lock_index

    with lock_index(folder):
        pass


def begin_image_cache(folder, photo_folder):
    from nearkin.data.cache import open_images
    from nearkin.data.images import FileImages

    open_images(FileImages(sorted(photo_folder.rglob("*.png"))[:3], 16), folder=folder)


@pytest.mark.parametrize("begin", [begin_run, begin_study, begin_index, begin_image_cache])
def test_the_owner_of_a_folder_removes_leftovers_when_it_starts(begin, tmp_path, photo_folder):
    folder = tmp_path / "owned"
    folder.mkdir()
    leftover = leftover_of_a_killed_process(folder / "manifest.json")
    begin(folder, photo_folder)
    assert not leftover.exists()


def test_a_killed_process_releases_its_lock(tmp_path):
    code = f"""
import sys
from pathlib import Path
from nearkin._common.files import file_lock
with file_lock(Path({str(tmp_path / "lock")!r})) as acquired:
    print(acquired, flush=True)
    sys.stdin.read()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "True\n"
        assert is_locked(tmp_path / "lock")
        with file_lock(tmp_path / "lock") as acquired:
            assert not acquired
    finally:
        process.kill()
        process.communicate()
    assert not is_locked(tmp_path / "lock")
    with file_lock(tmp_path / "lock", wait=True) as acquired:
        assert acquired
        assert is_locked(tmp_path / "lock")


def test_whether_a_read_only_file_is_locked(tmp_path):
    lock = tmp_path / "lock"
    with file_lock(lock):
        lock.chmod(0o400)
        assert is_locked(lock)
    assert not is_locked(lock)
    lock.chmod(0o600)


def test_nan_becomes_null_in_json():
    assert nan_to_none({"interval": (0.5, math.nan)}) == {"interval": [0.5, None]}
