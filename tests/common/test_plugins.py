"""Plugins: a user's own file or installed package is found by name, in worker processes too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.plugins import LOSS, write_loss

from nearkin._common import plugins
from nearkin._common.registry import Registry
from nearkin.config import ComponentConfig
from nearkin.errors import ConfigError, UnknownNameError
from nearkin.losses import LOSSES, MINERS
from nearkin.training import recipes
from nearkin.training._run_key import run_key


@pytest.fixture(autouse=True)
def no_plugins_left(monkeypatch):
    """Remove what a test registers, and the environment variable."""
    monkeypatch.setenv(plugins.VARIABLE, "")
    modules, losses, miners = set(sys.modules), set(LOSSES), set(MINERS)
    yield
    for name in set(sys.modules) - modules:
        del sys.modules[name]
    for registry, names in ((LOSSES, losses), (MINERS, miners)):
        for name in set(registry) - names:
            del registry[name]


def test_a_file_is_imported_when_its_name_is_needed(tmp_path):
    plugins.add_plugin_files([str(write_loss(tmp_path, "first_own"))])
    assert "first_own" not in list(LOSSES)  # nothing is imported before
    assert LOSSES["triplet"].name == "triplet"
    assert "first_own" not in list(LOSSES)
    assert LOSSES["first_own"].settings == {"margin": 0.5}
    assert LOSSES.get("second_own") is None
    with pytest.raises(UnknownNameError, match=r"Did you mean 'first_own'\? Your own: --import FILE\.py\.$"):
        LOSSES["first_owm"]


def test_a_plugin_may_look_up_names_while_it_is_imported(tmp_path):
    file = write_loss(tmp_path, "third_own")
    file.write_text("from nearkin.losses import LOSSES\nassert 'fourth_own' not in LOSSES\n" + file.read_text())
    plugins.add_plugin_files([str(file)])
    assert "third_own" in LOSSES


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "import nosuchpackage",
            r"own\.py: cannot be imported \(ModuleNotFoundError: .*nosuchpackage'\)\.",
        ),
        ("1 +", r"own\.py: cannot be imported \(SyntaxError: "),
        (LOSS.replace("NAME", "triplet").replace("MARGIN", "0.5"), r"named 'triplet' is already registered\)\.$"),
    ],
)
def test_a_file_that_cannot_be_imported_is_named(tmp_path, source, message):
    file = tmp_path / "own.py"
    file.write_text(source)
    plugins.add_plugin_files([str(file)])
    for _ in range(2):  # not only the first time
        with pytest.raises(ConfigError, match=message):
            LOSSES["nosuch"]


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--import nosuch\.py: no such file\."):
        plugins.add_plugin_files(["nosuch.py"])
    (tmp_path / "own.txt").touch()
    plugins.add_plugin_files([str(tmp_path / "own.txt")])
    with pytest.raises(ConfigError, match=r"own\.txt: not a Python file\."):
        Registry("loss")["x"]


def test_another_source_is_another_run(tmp_path, monkeypatch):
    recipe = recipes.glyphs_small()
    keys = set()
    for folder, margin in (("a", 0.5), ("b", 0.5), ("c", 0.25)):
        (tmp_path / folder).mkdir()
        file = write_loss(tmp_path / folder, "fifth_own", margin)
        monkeypatch.setenv(plugins.VARIABLE, str(file))
        LOSSES.data.pop("fifth_own", None)
        own = recipe.__class__(**{**vars(recipe), "loss": ComponentConfig("fifth_own", {"margin": 0.3})})
        keys.add(run_key(own, "x"))
    assert len(keys) == 2  # the folder does not matter, the code does


def install(folder: Path, name: str) -> None:
    """Lay out a package with an entry point, as an installer does."""
    write_loss(folder, name)
    meta = folder / f"{name}-1.0.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (meta / "entry_points.txt").write_text(f"[{plugins.GROUP}]\nmine = {name}\n")


def nearkin(*args: str, cwd: Path, path: str = "") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([path, *sys.path]), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "nearkin", *args]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)


@pytest.mark.slow
def test_commands_find_a_file_and_an_installed_package(tmp_path):
    (tmp_path / "site").mkdir()
    install(tmp_path / "site", "packaged_loss")
    write_loss(tmp_path, "file_loss")
    done = nearkin("losses", "--import", "file_loss.py", cwd=tmp_path, path=str(tmp_path / "site"))
    assert done.returncode == 0, done.stderr
    assert "file_loss" in done.stdout
    assert "packaged_loss" in done.stdout
    done = nearkin("losses", "packaged_los", cwd=tmp_path, path=str(tmp_path / "site"))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "Did you mean 'packaged_loss'?" in done.stderr
    for args in (("--import", "nosuch.py", "losses"), ("losses", "--import"), ("--import=file_loss.py",)):
        assert nearkin(*args, cwd=tmp_path).returncode == 2
