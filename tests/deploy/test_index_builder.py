# ruff: noqa: F811  (fixtures)
"""`nearkin index`: incremental updates, resuming after a kill, broken files, pruning."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.indexing import index, photos, run, same  # noqa: F401  (fixtures)
from helpers.limits import max_file_size
from helpers.paths import ROOT, SHARED
from helpers.small_runs import make_run
from PIL import Image

import nearkin as nk
from nearkin._common.progress import Reporter
from nearkin.cli import index as index_command
from nearkin.cli import search as search_command
from nearkin.deploy.index import builder, storage
from nearkin.deploy.index.items import FileStamp
from nearkin.deploy.index.sources import find_images, training_classes
from nearkin.deploy.index.storage import Journal
from nearkin.errors import ConfigError, DataError, UserError

# --- listing ---------------------------------------------------------------------------------------------------------


def test_class_folders_give_labels(index, photos):
    built, output = index(photos)
    assert len(built) == 20
    assert built.ids[:2] == ["class 0/00.png", "class 0/01.png"]
    assert built.labels == [id.partition("/")[0] for id in built.ids]
    assert "20 embedded, 0 unchanged" in output
    assert "20 items of 5 classes, 16 dimensions" in output
    assert built.path_of(built.ids[3]).is_file()
    assert not (photos.parent / "index" / "journal").exists()
    model = nk.load(built.model_info.run)
    np.testing.assert_allclose(built.vectors, model.embed([photos / id for id in built.ids]).numpy(), atol=1e-6)


def test_a_flat_folder_has_no_labels(index, photos):
    built, output = index(photos / "class 0")
    assert built.labels == [None] * 4
    assert "4 items without labels" in output


def test_loose_images_and_one_class_folder(index, photos, tmp_path):
    shutil.copytree(photos / "class 1", tmp_path / "mixed" / "one")
    assert index(tmp_path / "mixed", out="a")[0].labels == ["one"] * 4
    shutil.copy(photos / "class 2" / "00.png", tmp_path / "mixed" / "loose.png")
    built, _ = index(tmp_path / "mixed", out="b")
    assert dict(zip(built.ids, built.labels, strict=True))["loose.png"] is None
    assert len(built) == 5


def test_every_image_below_train_and_test_is_indexed(photos, tmp_path):
    """As in training, classes are below the parts; an image outside class folders has no label."""
    root = tmp_path / "parts"
    for name in ("train/x/0.png", "test/y/0.png", "train/0.png", "test/1.png", "top.png"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(photos / "class 0" / "00.png", root / name)
    assert find_images(root).labels == {
        "top.png": None,
        "train/0.png": None,
        "test/1.png": None,
        "train/x/0.png": "x",
        "test/y/0.png": "y",
    }
    shutil.rmtree(root / "train" / "x")
    shutil.rmtree(root / "test" / "y")
    assert list(find_images(root).labels.values()) == [None] * 3


def test_a_table_of_one_class(photos, tmp_path):
    (tmp_path / "list.csv").write_text("path,label\nphotos/class 0/00.png,a\nphotos/class 0/01.png,a\n")
    assert list(find_images(tmp_path / "list.csv").labels.values()) == ["a", "a"]


def test_a_table_with_repeated_and_missing_rows(index, photos, tmp_path):
    rows = ["path,label", "photos/class 0/00.png,a", "photos/class 1/00.png,b", "photos/class 0/00.png,a", "no.png,a"]
    (tmp_path / "list.csv").write_text("\n".join(rows))
    built, output = index(tmp_path / "list.csv")
    assert dict(zip(built.ids, built.labels, strict=True)) == {
        "photos/class 0/00.png": "a",
        "photos/class 1/00.png": "b",
    }
    assert "1 listed file does not exist" in output
    assert "1 repeated row" in output
    (tmp_path / "list.csv").write_text("\n".join([*rows, "photos/class 0/00.png,b"]))
    with pytest.raises(DataError, match="has two labels, 'a' and 'b'"):
        index(tmp_path / "list.csv")


def test_custom_column_names(index, photos, tmp_path):
    (tmp_path / "list.csv").write_text("photo,species\nphotos/class 0/00.png,a\nphotos/class 1/00.png,b\n")
    with pytest.raises(DataError, match=r"--data\.path-column"):
        index(tmp_path / "list.csv")
    built, _ = index(tmp_path / "list.csv", "--data.path-column", "photo", "--data.label-column", "species")
    assert built.labels == ["a", "b"]


def test_empty_and_missing_folders(index, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="the folder is empty"):
        index(tmp_path / "empty")
    with pytest.raises(DataError, match="no such file or folder"):
        index(tmp_path / "nowhere")
    with pytest.raises(DataError, match="no such file"):
        index(tmp_path / "nowhere.csv")


def test_odd_file_names(index, photos, tmp_path):
    odd = ["line\nbreak.png", "鳥 🐦.png", os.fsdecode(b"\xff\xfe.png"), "[red]not markup.png", "-o.png"]
    folder = tmp_path / "odd"
    folder.mkdir()
    for name, c in zip(odd, range(5), strict=True):
        shutil.copy(photos / f"class {c}" / "00.png", folder / name)
    (folder / os.fsdecode(b"broken \xff.png")).write_bytes(b"not an image")
    built, output = index(folder)
    assert sorted(built.ids) == sorted(odd)
    assert "broken \\udcff.png: cannot be read" in output
    search_command.run([str(tmp_path / "index"), "-k", "5", "--item", odd[0]])


def test_one_image(index, photos, tmp_path, capsys):
    (tmp_path / "one").mkdir()
    shutil.copy(photos / "class 0" / "00.png", tmp_path / "one")
    built, _ = index(tmp_path / "one")
    assert len(built) == 1
    assert built.search(tmp_path / "one" / "00.png", 10)[0].id == "00.png"
    search_command.run([str(tmp_path / "index"), "--item", "00.png"])
    assert "no results: the index has no other item" in capsys.readouterr().out


# --- updates ---------------------------------------------------------------------------------------------------------


def test_only_new_and_changed_images_are_embedded(index, photos):
    before, _ = index(photos)
    _, output = index(photos)
    assert "0 embedded, 20 unchanged" in output
    shutil.copy(photos / "class 4" / "03.png", photos / "class 0" / "00.png")  # changed
    shutil.copy(photos / "class 4" / "02.png", photos / "class 0" / "99.png")  # new
    os.utime(photos / "class 1" / "00.png", ns=(1, 1))  # new time, same content
    after, output = index(photos)
    assert "2 embedded, 19 unchanged" in output
    rows = {id: row for row, id in enumerate(after.ids)}
    assert after.ids == sorted(after.ids)
    np.testing.assert_allclose(
        after.vectors[rows["class 0/00.png"]], before.vectors[before.row_of("class 4/03.png")], atol=1e-6
    )
    for id in before.ids:
        if id != "class 0/00.png":
            np.testing.assert_array_equal(after.vectors[rows[id]], before.vectors[before.row_of(id)])
    assert "0 embedded, 21 unchanged" in index(photos)[1]


def test_missing_files_are_kept_until_pruned(index, photos):
    index(photos)
    (photos / "class 2" / "01.png").unlink()
    built, output = index(photos)
    assert len(built) == 20
    assert "1 item is no longer listed; remove with --prune" in output
    built, output = index(photos, "--prune")
    assert len(built) == 19
    assert "1 removed" in output
    assert "class 2/01.png" not in built
    (photos / "class 3" / "00.png").unlink()
    (photos / "class 3" / "00.png").symlink_to("nowhere")
    built, output = index(photos)
    assert "class 3/00.png" in built
    assert "class 3/00.png: cannot read (No such file or directory)" in output
    built, output = index(photos, "--prune")
    assert "class 3/00.png" not in built


def test_prune_keeps_items_in_folders_that_cannot_be_opened(index, photos, monkeypatch):
    """An unreachable mount must not lose its vectors. (scandir is patched, because root may open any folder.)"""
    index(photos)
    (photos / "class 2" / "01.png").unlink()
    real = os.scandir

    def scandir(path="."):
        if os.fspath(path).endswith("class 1"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    built, output = index(photos, "--prune")
    assert len(built) == 19
    assert "1 removed" in output
    assert "1 folder cannot be opened" in output
    assert "kept 4 items in folders that cannot be opened" in output


def test_a_changed_label_needs_no_embedding(index, photos, tmp_path):
    (tmp_path / "list.csv").write_text("path,label\nphotos/class 0/00.png,a\nphotos/class 1/00.png,b\n")
    index(tmp_path / "list.csv")
    (tmp_path / "list.csv").write_text("path,label\nphotos/class 0/00.png,a\nphotos/class 1/00.png,c\n")
    built, output = index(tmp_path / "list.csv")
    assert built.labels == ["a", "c"]
    assert "0 embedded, 2 unchanged, 1 relabelled" in output


def test_broken_files_are_reported_and_skipped(index, photos):
    (photos / "class 0" / "00.png").write_bytes(b"not an image")
    (photos / "class 0" / "01.png").write_bytes((photos / "class 0" / "01.png").read_bytes()[:300])
    (photos / "class 1" / "02.png").unlink()
    (photos / "class 1" / "02.png").symlink_to(photos / "nowhere.png")
    built, output = index(photos)
    assert len(built) == 17
    assert "17 embedded" in output
    assert "3 could not be read:" in output
    assert "class 0/00.png" in output
    assert "No such file" in output
    Image.new("RGB", (24, 24), "red").save(photos / "class 0" / "00.png")  # fixed
    built, output = index(photos)
    assert "1 embedded, 17 unchanged" in output
    (photos / "class 3" / "00.png").write_bytes(b"broken")
    built, output = index(photos)
    assert "class 3/00.png" in built  # with its previous vector
    assert "1 embedded" not in output
    assert "3 could not be read" in index(photos)[1]  # and is retried


def test_progress_is_reported(run, photos, tmp_path):
    tracked: list[str] = []

    class RecordingReporter(Reporter):
        def track(self, label: str, total: int, unit: str = "it"):
            tracked.append(f"{label} {total}")
            return super().track(label, total, unit)

    out = tmp_path / "index"
    with storage.lock_index(out):
        builder.update_index(nk.load(run), find_images(photos), out, reporter=RecordingReporter(quiet=True))
    assert tracked == ["checking files 20", "embedding 20"]
    training_classes(nk.Run(run), RecordingReporter(quiet=True))
    assert tracked[2:] == ["hashing the training images 120"]


def test_a_folder_without_readable_images(index, tmp_path):
    (tmp_path / "bad").mkdir()
    for i in range(3):
        (tmp_path / "bad" / f"{i}.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match="none of the 3 images could be read"):
        index(tmp_path / "bad")


def test_a_moved_folder_is_recognised(index, photos, tmp_path):
    index(photos)
    shutil.copytree(photos, tmp_path / "copy")
    with pytest.raises(DataError, match="Choose another folder with -o"):
        index(tmp_path / "copy")
    photos.rename(tmp_path / "moved")
    built, output = index(tmp_path / "moved")
    assert "0 embedded, 20 unchanged" in output
    assert built.path_of(built.ids[0]).is_file()


def test_a_different_run_is_rejected(index, photos, tmp_path, photo_folder):
    index(photos)
    other = make_run(tmp_path, photo_folder, seed=3)
    with pytest.raises(DataError, match="built with a different model"):
        index_command.run([str(other.path), str(photos), "-o", str(tmp_path / "index"), "--quiet"])
    assert len(nk.Index.load(tmp_path / "index")) == 20


def test_a_run_trained_on_boxes_is_rejected(photo_folder, photos, tmp_path):
    run = make_run(tmp_path, photo_folder, name="boxes")
    recipe = replace(run.recipe, data=replace(run.recipe.data, crop_to_boxes=True))
    (run.path / "recipe.toml").write_text(recipe.to_toml())
    with pytest.raises(ConfigError, match="cropped to boxes"):
        index_command.run([str(run.path), str(photos), "-o", str(tmp_path / "index")])
    index_command.run([str(run.path), str(photos), "-o", str(tmp_path / "index"), "--already-cropped", "--quiet"])
    assert len(nk.Index.load(tmp_path / "index")) == 20


def test_a_run_on_features_is_rejected(photos, tmp_path):
    from nearkin.models.embedder import Embedder

    recipe = nk.recipes.features_default()
    run = nk.Run.create(tmp_path, "features", replace(recipe, data=replace(recipe.data, root=tmp_path / "f.npz")))
    model = Embedder(recipe.model, (32, 1, 1))
    run.save("best.pt", {"model": model.state_dict(), "image_shape": [32, 1, 1]})
    with pytest.raises(ConfigError, match="takes precomputed features, not images"):
        index_command.run([str(run.path), str(photos), "-o", str(tmp_path / "index")])


# --- interruptions ---------------------------------------------------------------------------------------------------


def start(run: Path, photos: Path, out: Path) -> subprocess.Popen:
    """Start the command in a child process, with small batches."""
    code = "import sys; from nearkin.cli.index import run; run(sys.argv[1:])"
    flags = ["--quiet", "--batch-size", "4", "--device", "cpu"]
    command = [sys.executable, "-c", code, str(run), str(photos), "-o", str(out), *flags]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_killed_run_resumes(index, run, photos, tmp_path):
    """Kill a process while it embeds 300 links to the photos, then run the command again."""
    many = tmp_path / "many"
    sources = sorted(photos.rglob("*.png"))
    for i in range(300):
        folder = many / f"class {i % 5}"
        folder.mkdir(parents=True, exist_ok=True)
        os.link(sources[i % 20], folder / f"{i:04d}.png")
    out = tmp_path / "killed"
    process = start(run, many, out)
    journal = out / "journal"
    deadline = time.monotonic() + 120
    while not (journal.exists() and journal.stat().st_size > 6_000):
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert journal.exists(), "it ended before it could be killed"
    with pytest.raises(DataError, match="indexing was interrupted"):
        nk.Index.load(out)
    with open(journal, "ab") as file:  # a truncated record
        file.write(b"\0\0\0\0\0\0\1\0cut")
    again, output = index(many, "--batch-size", "4", out="killed")
    embedded, resumed = int(output.split(" embedded")[0].replace(",", "")), int(output.split(" resumed")[0].split()[-1])
    assert embedded + resumed == 300
    assert resumed >= 20
    whole, _ = index(many, "--batch-size", "4", out="whole")
    assert same(again, whole)


def test_the_journal_drops_damaged_records_and_protects_those_of_another_model(tmp_path):
    rng = np.random.default_rng(0)
    stamp = FileStamp(1, 2, "3")
    journal = Journal(tmp_path, "model a", 4)
    sizes = []
    for n in range(3):
        journal.append([f"{n} {i}" for i in range(5)], [stamp] * 5, rng.normal(size=(5, 4)).astype(np.float32))
        sizes.append(journal.path.stat().st_size)
    whole = journal.path.read_bytes()
    for cut in range(sizes[1], sizes[2], 7):
        journal.path.write_bytes(whole[:cut])
        again = Journal(tmp_path, "model a", 4)
        assert list(again.entries) == list(journal.entries)[:10]
        for name, (stamp, vector) in again.entries.items():
            assert stamp == journal.entries[name][0]
            np.testing.assert_array_equal(vector, journal.entries[name][1])
        assert journal.path.stat().st_size == sizes[1]
    damaged = bytearray(whole)
    damaged[sizes[0] + 40] ^= 1
    journal.path.write_bytes(damaged)
    assert len(Journal(tmp_path, "model a", 4).entries) == 5
    journal.path.write_bytes(whole)
    assert len(Journal(tmp_path, "model a", 4).entries) == 15
    with pytest.raises(DataError, match="contains the unfinished index of a different model"):
        Journal(tmp_path, "model b", 4)
    assert journal.path.read_bytes() == whole
    journal.path.write_bytes(whole[: whole.index(b"\n") + 1])  # without records
    assert Journal(tmp_path, "model b", 4).entries == {}


def test_ctrl_c_reports_how_much_is_left(index, photos, monkeypatch):
    real, calls = builder.embed_files, []

    def interrupted(model, paths):
        calls.append(len(paths))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(model, paths)

    monkeypatch.setattr(builder, "embed_files", interrupted)
    with pytest.raises(KeyboardInterrupt, match="stopped with 12 of 20 images left to embed"):
        index(photos, "--batch-size", "4")
    monkeypatch.setattr(builder, "embed_files", real)
    _, output = index(photos, "--batch-size", "4")
    assert "12 embedded, 0 unchanged, 8 resumed" in output


@pytest.mark.slow
def test_a_full_disk_keeps_the_old_index_and_the_journal(run, index, photos, tmp_path):
    before, _ = index(photos)
    for c in range(5):
        for i in range(20):
            shutil.copy(photos / f"class {c}" / "00.png", photos / f"class {c}" / f"new {i}.png")
    with max_file_size(9_000):
        process = start(run, photos, tmp_path / "index")
    _, output = process.communicate(timeout=120)
    assert "cannot write the index (File too large). The previous index is intact. The same command resumes" in output
    assert same(nk.Index.load(tmp_path / "index"), before)
    built, output = index(photos)
    assert len(built) == 120
    assert "resumed from the interrupted run" in output


@pytest.mark.parametrize("resumable", [False, True])
def test_the_error_of_a_full_disk_says_what_is_left(tmp_path, resumable):
    journal = Journal(tmp_path, "model", 4)
    if not resumable:
        journal.remove()
    resumes = " The same command resumes from its journal." if resumable else ""
    message = rf"No space left on device\). There is no index yet.{resumes} Free up space"
    with pytest.raises(DataError, match=message), storage.write_errors(tmp_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_system_without_locks(index, photos, monkeypatch):
    """The error must not blame another process."""
    fcntl = pytest.importorskip("fcntl", reason="needs POSIX locks")

    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(DataError, match="cannot write the index \\(No locks available\\)"):
        index(photos)


def test_a_second_process_is_rejected(index, photos, tmp_path):
    with storage.lock_index(tmp_path / "index"), pytest.raises(DataError, match="another process is writing"):
        index(photos)


# --- layouts and usage errors ----------------------------------------------------------------------------------------


def test_official_layouts_are_recognised():
    if not (SHARED / "data" / "CUB_200_2011").exists():
        pytest.skip("needs CUB_200_2011")
    found = find_images(SHARED / "data" / "CUB_200_2011")
    assert len(found.labels) == 11788
    assert len(set(found.labels.values())) == 200


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "missing argument: a run folder"),
        (["."], "missing argument: a folder of images or a .csv file"),
        (["nowhere", ".", "-o", "x"], "nowhere: no such file or folder. Expected a run folder"),
        ([".", ".", "-o", "x"], "not a run folder"),
        ([".", ".", "-o", "x", "--prun"], "Did you mean '--prune'"),
        ([".", ".", "-o", "x", "--batch-size", "0"], "--batch-size: expected at least 1"),
    ],
)
def test_usage_errors(flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        index_command.run(flags)
