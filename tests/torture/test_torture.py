"""A small share of `make torture`, and proofs that it notices what it looks for."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import ROOT

from torture import kill_points, mutations
from torture.table import Row, markdown

posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@posix
@pytest.mark.slow
def test_a_share_of_the_attacks_is_survived():
    command = [sys.executable, "-m", "torture", "files", "kills", "--share", "0.03"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    done = subprocess.run(command, cwd=ROOT / "tests", env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed") > 25
    assert "FAILED" not in done.stdout


@posix
def test_a_process_dies_at_the_ordered_point_and_only_there(tmp_path):
    (tmp_path / "orders").mkdir()
    (tmp_path / "work").mkdir()
    kill_points.write_orders(tmp_path / "orders", [3])
    code = """
import sys
from pathlib import Path
from torture import kill_points
root = Path(sys.argv[1])
save_count = kill_points.install(root / "orders", root / "work")
for name in "abcd":
    (root / name).write_bytes(b"not counted: elsewhere")
    (root / "work" / name).write_bytes(name.encode())
save_count()
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    assert subprocess.run(command, env=environment).returncode == -9
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == ["a", "b"]
    assert kill_points.kills(tmp_path / "orders") == 1
    assert subprocess.run(command, env=environment).returncode == 0  # the order has been carried out
    assert kill_points.counts(tmp_path / "orders") == [4]


@posix
def test_unnoticed_damage_tracebacks_crashes_and_hangs_are_counted(tmp_path, monkeypatch):
    from nearkin.errors import DataError

    monkeypatch.setattr(mutations, "CASE_SECONDS", 1)
    path = tmp_path / "file"
    path.write_bytes(b"0")
    actions = {b"e": "error", b"t": "traceback", b"c": "crash", b"h": "hang"}

    def read() -> bytes:
        match actions.get(data := path.read_bytes()):
            case "error":
                raise DataError("damaged")
            case "traceback":
                raise KeyError("missing")
            case "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                while True:
                    pass
        return data

    target = mutations.Target("file", path, read, same=True)
    cases = iter([b"0", b"e", b"t", b"c", b"h", b"1", b"0"])
    row = mutations.attack_file(target, 7, 0, lambda data, rng: next(cases))
    assert row == Row("damaged file", 7, 3, 1, 3, "1 rejected, 3 read")
    assert not row.passed
    assert "| all | 7 | 3 | 1 | 3 | |" in markdown([row])


def test_mutations_depend_on_the_seed_only():
    data = bytes(range(256))
    for mutation in (mutations.mutate, mutations.mutate_text, mutations.flip_one_bit):
        first, second = ([mutation(data, random.Random(seed)) for seed in range(20)] for _ in range(2))
        assert first == second
        assert len(set(first)) > 10
    flipped = int.from_bytes(mutations.flip_one_bit(data, random.Random(0))) ^ int.from_bytes(data)
    assert flipped.bit_count() == 1


def test_every_format_is_damaged():
    """So that a format added to the docs is not forgotten: the page names what is attacked."""
    page = (Path(ROOT) / "docs" / "reliability.md").read_text(encoding="utf-8")
    for name in ("best.pt", "model.safetensors", "vectors.npy", "manifest.json", "recipe.toml", "result.json", "CSV"):
        assert f"damaged {name}" in page
