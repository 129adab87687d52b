"""A full disk is named as such, with what is needed, whichever layer notices it first; nothing stored is lost."""

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.limits import small_disk

import nearkin as nk
from nearkin import cli
from nearkin._common.files import atomic_file, atomic_write, full_disk
from nearkin.errors import DataError, RunError
from nearkin.models.frozen import FrozenFeatures
from nearkin.training.run import Run


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("save", [lambda file: file.write(bytes(100_000)), lambda file: torch.save([1], file)])
def test_libraries_hide_it_behind_their_own_errors(tmp_path, save):
    with pytest.raises((OSError, RuntimeError)) as caught, open("/dev/full", "wb") as file:
        save(file)
    error = full_disk(caught.value, tmp_path / "last.pt", 12_300_000)
    assert error.strerror == f"No space left on {tmp_path}: needs ~13 MB"
    assert error.filename == str(tmp_path / "last.pt")
    assert full_disk(PermissionError(13, "Permission denied"), tmp_path) is None


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", 2_000_000) as folder:
        yield folder


def test_a_file_that_does_not_fit(disk):
    atomic_write(disk / "file", b"old")
    with pytest.raises(OSError, match=rf"No space left on {disk}: needs ~4 MB"):
        atomic_write(disk / "file", bytes(3_500_000))
    message = f"No space left on {disk}: needs ~8 MB"
    with pytest.raises(OSError, match=message), atomic_file(disk / "x", size=8_000_000) as temporary:
        torch.save(torch.zeros(2_000_000), temporary)  # by torch's own writer
    assert [path.name for path in disk.iterdir()] == ["file"]
    assert (disk / "file").read_bytes() == b"old"


def test_a_checkpoint_and_a_log_that_do_not_fit(disk, tiny_recipe):
    run = Run.create(disk, "run", tiny_recipe)
    with pytest.raises(RunError, match=rf"\(No space left on {run.path}: needs ~8 MB\). Fix that and run the same"):
        run.save("last.pt", {"model": torch.zeros(2_000_000)})
    run.save("last.pt", {"model": torch.zeros(9)})
    before = (run.path / "last.pt").read_bytes()
    with pytest.raises(RunError, match=rf"\(No space left on {run.path}: needs ~8 MB\). The previous one is intact"):
        run.save("last.pt", {"model": {"head": [torch.zeros(2_000_000)]}})
    assert (run.path / "last.pt").read_bytes() == before
    with open(disk / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    with pytest.raises(RunError, match=f"No space left on {run.path}"):
        run.log(text="x" * 10_000)


def test_features_that_do_not_fit(disk, tiny_recipe, photo_folder, quiet, monkeypatch):
    from nearkin.data import sources
    from nearkin.training import factory

    table = sources.load(tiny_recipe.data, quiet)
    monkeypatch.setenv("NEARKIN_CACHE", str(disk))
    model = factory.make_model(tiny_recipe, table, quiet)
    features = FrozenFeatures(model, table, reporter=quiet)
    atomic_write(disk / "filler", bytes(1_998_000))
    with pytest.raises(DataError, match=rf"No space left on {disk}/features: needs ~1 MB"):
        features.add_to(table)


def test_training_is_refused_before_its_first_step(disk, tiny_recipe, quiet):
    atomic_write(disk / "filler", bytes(1_900_000))
    recipe = replace(tiny_recipe, model=replace(tiny_recipe.model, width=16))
    with pytest.raises(RunError, match=rf"No space left on {disk}/.*: needs ~\d+ MB for checkpoints, 0 MB are free"):
        nk.fit(recipe, disk, reporter=quiet)


def test_the_command_says_so_in_one_line(disk, capsys, monkeypatch):
    monkeypatch.setattr("nearkin.cli.losses.run", lambda argv: atomic_write(disk / "x", bytes(5_000_000)))
    with pytest.raises(SystemExit) as stopped:
        cli.main(["losses"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"nearkin: {disk / 'x'}: No space left on {disk}: needs ~5 MB.\n"
