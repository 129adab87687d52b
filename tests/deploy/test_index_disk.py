"""An index on disk survives kills and full disks, and damage is detected."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time

import numpy as np
import pytest
from helpers.indexing import random_index, same
from helpers.limits import max_file_size

import nearkin as nk
from nearkin.deploy.index import storage
from nearkin.errors import DataError

Index = nk.Index


def test_save_and_load(tmp_path):
    index = random_index(30)
    index.calibrate(0.1)
    index.save(tmp_path / "deep" / "index")
    again = Index.load(tmp_path / "deep" / "index")
    assert same(index, again)
    assert again.threshold == index.threshold
    assert isinstance(again.vectors, np.memmap)
    again.remove(["item 4"])
    again.save(tmp_path / "deep" / "index")  # overwrites the file it is mapped from
    assert same(Index.load(tmp_path / "deep" / "index"), again)
    assert len(list((tmp_path / "deep" / "index").iterdir())) == 3  # manifest, vectors, lock


def test_every_flipped_byte_is_detected(tmp_path):
    index = random_index(5, 3)
    index.save(tmp_path / "index")
    rng = random.Random(0)
    for path in [*sorted((tmp_path / "index").glob("*-*")), tmp_path / "index" / "manifest.json"]:
        whole = path.read_bytes()
        for n in rng.choices(range(len(whole)), k=100):
            path.write_bytes(whole[:n] + bytes([whole[n] ^ 1 << rng.randrange(8)]) + whole[n + 1 :])
            with pytest.raises(DataError):
                Index.load(tmp_path / "index")
        path.write_bytes(whole[:-3])
        with pytest.raises(DataError, match="damaged"):
            Index.load(tmp_path / "index")
        path.write_bytes(whole)
        assert same(Index.load(tmp_path / "index"), index)


@pytest.mark.parametrize(
    "forged",
    [
        {"ids": None},
        {"ids": ["a", "b"]},
        {"ids": ["item 0"] * 5},
        {"ids": [1, 2, 3, 4, 5]},
        {"labels": "abcde"},
        {"labels": ["a"]},
        {"labels": [1.5] * 5},
        {"stamps": [None]},
        {"stamps": [[1]] * 5},
        {"stamps": [7] * 5},
        {"files": {}},
        {"files": {"vectors": "../../../../etc/x" * 4}},
        {"model": "mine"},
        {"model": {"weights": "x"}},
        {"model": {"fingerprint": 3}},
        {"root": 3},
        {"threshold": [1]},
        {"threshold": {"value": "high"}},
        {"rerank": ["magic", {}]},
        {"rerank": "expansion"},
        {"rerank": ["expansion", {"k": "many"}]},
        {"graph": {"m": 3}},
        {"root": None, "model": ...},
    ],
    ids=str,
)
def test_a_forged_manifest_with_the_right_checksum_is_rejected(tmp_path, forged):
    random_index(5, 3).save(tmp_path / "index")
    state = storage.read_state(tmp_path / "index")
    storage.commit(tmp_path / "index", {k: v for k, v in (state | forged).items() if v is not ...})
    with pytest.raises(DataError, match=r"not a valid index|expected one float32 vector"):
        Index.load(tmp_path / "index")


@pytest.mark.parametrize("vectors", [np.zeros((5, 3)), np.zeros(5, np.float32), np.zeros((4, 3), np.float32)])
def test_forged_vectors_with_the_right_checksum_are_rejected(tmp_path, vectors):
    random_index(5, 3).save(tmp_path / "index")
    state = storage.read_state(tmp_path / "index")
    sha256 = storage.write_vectors(tmp_path / "index", vectors)
    storage.commit(tmp_path / "index", {**state, "files": {"vectors": sha256}})
    with pytest.raises(DataError, match="expected one float32 vector for each of 5 items"):
        Index.load(tmp_path / "index")


def test_missing_files_and_other_versions(tmp_path):
    folder = tmp_path / "index"
    with pytest.raises(DataError, match="no index found"):
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
    (folder / "manifest.json").write_text(json.dumps({**manifest, "version": "x"}))
    with pytest.raises(DataError, match=r"older nearkin \(format x, "):
        Index.load(folder)
    (folder / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"damaged \(maximum recursion"):
        Index.load(folder)
    (folder / "manifest.json").write_text(json.dumps({**manifest, "version": 2}))
    with pytest.raises(DataError, match=r"older nearkin \(format 2, this version reads 3\)\. Index again"):
        Index.load(folder)
    (folder / "manifest.json").write_text("[]")
    with pytest.raises(DataError, match="not the manifest"):
        Index.load(folder)


def test_nothing_is_unpickled(tmp_path):
    index = random_index()
    index.save(tmp_path / "index")
    state = storage.read_state(tmp_path / "index")
    bad = tmp_path / "bad.npy"
    np.save(bad, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    sha256 = storage.write_file(tmp_path / "index", "vectors", bad.read_bytes())
    storage.commit(tmp_path / "index", {**state, "files": {"vectors": sha256}})
    with pytest.raises(DataError, match="cannot read as a numeric array"):
        Index.load(tmp_path / "index")


def test_foreign_files_are_not_touched(tmp_path):
    (tmp_path / "items-of-mine.txt").write_text("mine")
    with pytest.raises(DataError, match="contains other files"):
        random_index().save(tmp_path)
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "manifest.json").write_text('{"name": "an app"}')
    with pytest.raises(DataError, match="not the manifest of a nearkin index"):
        random_index().save(tmp_path / "app")
    random_index().save(tmp_path / "index")
    (tmp_path / "index" / "items-notes.json").write_text("mine")
    random_index(7).save(tmp_path / "index")
    assert (tmp_path / "index" / "items-notes.json").read_text() == "mine"


def test_only_one_writer_at_a_time(tmp_path):
    with storage.lock_index(tmp_path / "index"), pytest.raises(DataError, match="another process is writing"):
        random_index().save(tmp_path / "index")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_kill_at_any_moment_leaves_a_complete_state(tmp_path):
    """A child process alternates between two states until it is killed; readers always see one of them."""
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
                    # On a busy machine a child may have time for only one.
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
    assert len(list(folder.iterdir())) == 3  # temporary files of killed processes are deleted


def test_a_full_disk_keeps_the_old_index(tmp_path):
    small, large = random_index(10), random_index(5000, 32)
    small.save(tmp_path / "index")
    message = r"cannot write the index \(File too large\). The previous index is intact. Free up space"
    with max_file_size(100_000), pytest.raises(DataError, match=message):
        large.save(tmp_path / "index")
    assert same(Index.load(tmp_path / "index"), small)
    assert not list((tmp_path / "index").glob("*.tmp"))


def test_an_unwritable_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot write the index"):
        random_index().save(tmp_path / "file" / "index")


def test_the_folder_can_be_moved(tmp_path):
    index = random_index()
    index.save(tmp_path / "index")
    shutil.copytree(tmp_path / "index", tmp_path / "copy")
    shutil.rmtree(tmp_path / "index")
    assert same(Index.load(tmp_path / "copy"), index)
