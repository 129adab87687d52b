"""An index on the disk survives kills, full disks and flipped bytes, or says that it did not."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
from helpers.indexing import random_index, same

import nearkin as nk
from nearkin.deploy.index import files
from nearkin.errors import DataError, UserError

Index = nk.Index


def test_what_is_saved_is_what_is_loaded(tmp_path):
    index = random_index(30)
    index.calibrate(0.1)
    index.save(tmp_path / "deep" / "index")
    again = Index.load(tmp_path / "deep" / "index")
    assert same(index, again)
    assert again.threshold == index.threshold
    assert isinstance(again.vectors, np.memmap)
    again.remove(["item 4"])
    again.save(tmp_path / "deep" / "index")  # over the file that it is mapped from
    assert same(Index.load(tmp_path / "deep" / "index"), again)
    assert len(list((tmp_path / "deep" / "index").iterdir())) == 4  # manifest, vectors, items, lock: the old are gone


def test_every_flipped_byte_is_noticed(tmp_path):
    index = random_index(5, 3)
    index.save(tmp_path / "index")
    rng = random.Random(0)
    for path in [*sorted((tmp_path / "index").glob("*-*")), tmp_path / "index" / "manifest.json"]:
        whole = path.read_bytes()
        for at in sorted(rng.sample(range(len(whole)), 25)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(DataError):
                Index.load(tmp_path / "index")
        path.write_bytes(whole[:-3])
        with pytest.raises(DataError, match="damaged"):
            Index.load(tmp_path / "index")
        path.write_bytes(whole)
        assert same(Index.load(tmp_path / "index"), index)


def test_a_missing_file_and_another_version_are_named(tmp_path):
    folder = tmp_path / "index"
    with pytest.raises(DataError, match="there is no index here"):
        Index.load(folder)
    random_index().save(folder)
    [vectors] = folder.glob("vectors-*")
    vectors.rename(tmp_path / "away")
    with pytest.raises(DataError, match="is missing"):
        Index.load(folder)
    (tmp_path / "away").rename(vectors)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "version": 99}))
    with pytest.raises(DataError, match="newer nearkin"):
        Index.load(folder)
    (folder / "manifest.json").write_text("[]")
    with pytest.raises(DataError, match="not the manifest"):
        Index.load(folder)


def test_nothing_is_unpickled(tmp_path):
    index = random_index()
    index.save(tmp_path / "index")
    manifest = files.read_manifest(tmp_path / "index")
    bad = tmp_path / "bad.npy"
    np.save(bad, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    stored = files.write_file(tmp_path / "index", "vectors", ".npy", [bad.read_bytes()])
    files.commit(tmp_path / "index", replace(manifest, files={**manifest.files, "vectors": stored}))
    with pytest.raises(DataError, match="cannot be read"):
        Index.load(tmp_path / "index")


def test_other_peoples_files_are_left_alone(tmp_path):
    (tmp_path / "items-of-mine.txt").write_text("mine")
    with pytest.raises(DataError, match="holds other files"):
        random_index().save(tmp_path)
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "manifest.json").write_text('{"name": "an app"}')
    with pytest.raises(DataError, match="not the manifest of a nearkin index"):
        random_index().save(tmp_path / "app")
    random_index().save(tmp_path / "index")
    (tmp_path / "index" / "items-notes.json").write_text("mine")
    random_index(7).save(tmp_path / "index")
    assert (tmp_path / "index" / "items-notes.json").read_text() == "mine"


def test_two_writers_do_not_meet(tmp_path):
    with files.lock_index(tmp_path / "index"), pytest.raises(DataError, match="another process is writing"):
        random_index().save(tmp_path / "index")


def test_a_kill_at_any_moment_leaves_one_of_the_states(tmp_path):
    """A child writes two states in turn until it is killed; readers meanwhile see one of them too."""
    states = [random_index(400, 32, seed) for seed in (0, 1)]
    folder = tmp_path / "index"
    states[0].save(folder)
    rng = random.Random(0)
    seen = set()
    for turn in range(25):
        child = os.fork()
        if child == 0:
            try:
                while True:
                    # On a busy machine a child may come to write only its first.
                    for state in (states[1 - turn % 2], states[turn % 2]):
                        state.save(folder)
            finally:
                os._exit(1)
        time.sleep(rng.uniform(0.001, 0.03))
        for _ in range(3):
            now = Index.load(folder)
            assert any(same(now, state) for state in states)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = Index.load(folder)
        seen |= {n for n, state in enumerate(states) if same(found, state)}
        assert any(same(found, state) for state in states)
    assert seen == {0, 1}
    states[0].save(folder)
    assert len(list(folder.iterdir())) == 4  # leftovers of the killed are swept


def in_a_child(work) -> str:
    """What `work` raised, as text, from a process of its own."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work()
            said = "nothing"
        except UserError as error:
            said = f"{type(error).__name__}: {error}"
        except BaseException as error:
            said = f"crashed: {error!r}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


def test_a_full_disk_leaves_the_old_index(tmp_path):
    small, large = random_index(10), random_index(5000, 32)
    small.save(tmp_path / "index")

    def save_with_little_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        large.save(tmp_path / "index")

    said = in_a_child(save_with_little_room)
    assert said.startswith("DataError: ")
    assert "cannot write the index (File too large). What was there is kept. Make room" in said
    assert same(Index.load(tmp_path / "index"), small)
    assert not list((tmp_path / "index").glob("*.part"))


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot write the index"):
        random_index().save(tmp_path / "file" / "index")


def test_copies_of_a_folder_can_be_moved(tmp_path):
    index = random_index()
    index.save(tmp_path / "index")
    shutil.copytree(tmp_path / "index", tmp_path / "copy")
    shutil.rmtree(tmp_path / "index")
    assert same(Index.load(tmp_path / "copy"), index)
