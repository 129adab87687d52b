"""Small random indexes, and fixtures for `nearkin index`: a run, a folder of photos, the command."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import nearkin as nk
from helpers.small_runs import make_run
from nearkin.cli import index as index_command


def names(count: int, prefix: str = "item") -> list[str]:
    return [f"{prefix} {i}" for i in range(count)]


def random_index(count: int = 20, dim: int = 6, seed: int = 0) -> nk.Index:
    rng = np.random.default_rng(seed)
    return nk.Index(rng.normal(size=(count, dim)), names(count), (np.arange(count) % 4).tolist())


def same(a: nk.Index, b: nk.Index) -> bool:
    return a.ids == b.ids and a.labels == b.labels and np.array_equal(a.vectors, b.vectors)


@pytest.fixture(scope="module")
def run(photo_folder, tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs"), photo_folder).path


@pytest.fixture
def photos(photo_folder, tmp_path) -> Path:
    """A folder of five classes with four images each, which tests may change."""
    for c in range(5):
        (tmp_path / "photos" / f"class {c}").mkdir(parents=True)
        for i in range(4):
            shutil.copy(photo_folder / f"class {c}" / f"{i:02d}.png", tmp_path / "photos" / f"class {c}")
    return tmp_path / "photos"


@pytest.fixture
def index(run, tmp_path, capsys):
    """Run the command on a folder; returns the index and the output."""

    def call(source, *flags: str, out: str = "index"):
        index_command.run([str(run), str(source), "-o", str(tmp_path / out), "--quiet", "--device", "cpu", *flags])
        return nk.Index.load(tmp_path / out), capsys.readouterr().out

    return call
