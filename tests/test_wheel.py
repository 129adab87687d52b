"""The built wheel in clean environments: what works with each extra alone, and what a missing one says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from helpers.plugins import write_loss

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow

CORE = """
import numpy as np, torch, nearkin as nk
emb = torch.randn(8, 4, requires_grad=True)
labels = torch.arange(4).repeat_interleave(2)
nk.losses.multi_similarity(nk.pair_up(emb, labels)).backward()
nk.Objective("proxy_anchor", num_classes=4, dim=4)(emb, labels).backward()
assert emb.grad.abs().sum() > 0
print(nk.score(np.eye(4)[[0, 0, 1, 1]], [0, 0, 1, 1], ks=(1,))["R@1"])
"""


class Environment:
    """A virtual environment outside the repository."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")

    def run(self, command: str, *args: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment in its folder, with an empty cache."""
        cache = str(self.folder / "cache")
        settings = {"NEARKIN_CACHE": cache, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "PYTHONPATH": ""}
        piped = {"capture_output": True, "text": True, "encoding": "utf-8"}
        return subprocess.run([self.bin / command, *args], cwd=self.folder, env=os.environ | settings, **piped)

    def check(self, command: str, *args: str | Path) -> str:
        """Run a command that must succeed, and return its output."""
        done = self.run(command, *args)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def uv() -> str:
    found = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if found is None:
        pytest.skip("uv is not installed")
    return found


@pytest.fixture(scope="module")
def dist(uv: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run_or_skip(uv, "build", "--quiet", "--out-dir", str(folder), str(ROOT))
    return folder


def run_or_skip(*command: str) -> None:
    """Run a command that may have to download packages, and skip the test if it cannot."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    except subprocess.TimeoutExpired:
        pytest.skip("the packages cannot be downloaded within ten minutes")
    if done.returncode and not any(word in done.stderr.lower() for word in ("fetch", "download", "network", "connect")):
        pytest.fail(done.stderr)
    if done.returncode:
        pytest.skip(f"the packages cannot be downloaded: {done.stderr.strip()[-200:]}")


def install(uv: str, dist: Path, folder: Path, extra: str) -> Environment:
    """Install the wheel with one extra, or "" for none, and the dependencies that make test uses."""
    environment = Environment(folder)
    run_or_skip(uv, "venv", "--quiet", "--python", sys.executable, str(folder / "venv"))
    wheel = next(dist.glob("*.whl")).as_uri()
    target = ["--python", str(folder / "venv"), "--constraint", str(ROOT / "constraints.txt")]
    run_or_skip(uv, "pip", "install", "--quiet", *target, f"nearkin{extra} @ {wheel}")
    return environment


@pytest.fixture(scope="module")
def core(uv: str, dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return install(uv, dist, tmp_path_factory.mktemp("core"), "")


@pytest.fixture(scope="module")
def images(uv: str, dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return install(uv, dist, tmp_path_factory.mktemp("images"), "[images]")


def test_the_wheel_contains_the_package_and_nothing_else(dist):
    names = zipfile.ZipFile(next(dist.glob("*.whl"))).namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"nearkin"}
    packed = {name for name in names if name.startswith("nearkin/")}
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "nearkin").rglob("*") if path.is_file()}
    assert packed == {name for name in files if "__pycache__" not in name}
    assert {"nearkin/py.typed", "nearkin/bench/papers.toml", "nearkin/report/templates/page.html"} <= packed
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        assert {"LICENSE", "pyproject.toml", "README.md"} <= {Path(name).name for name in archive.getnames()}


def test_the_core_has_losses_metrics_and_the_doctor(core):
    assert core.check("python", "-I", "-c", CORE) == "1.0\n"
    assert "nearkin train" in core.check("nearkin", "--help")
    assert "proxy_anchor" in core.check("nearkin", "losses")
    doctor = core.check("nearkin", "doctor")
    for extra in ("images", "bench", "serve", "export", "stores", "tensorboard", "wandb"):
        assert f"missing: pip install 'nearkin[{extra}]'" in doctor
    assert "installed:" not in doctor


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("demo", "images"),
        ("train", "images"),
        ("train --data .", "images"),
        ("report runs/x", "images"),
        ("index . . -o x.index", "images"),
        ("search . x.png", "images"),
        ("data check .", "images"),
        ("index . . -o x.index --store qdrant://localhost/x", "stores"),
        ("serve .", "serve"),
        ("export . --to onnx -o x.onnx", "export"),
        ("bench run tiny", "bench"),
        ("tune", "bench"),
        ("tournament papers", "bench"),
        ("report --study studies/x", "bench"),
    ],
)
def test_a_command_without_its_extra_says_the_one_line_that_installs_it(core, command, extra):
    (core.folder / "x.png").touch()  # a wrong path is refused first
    done = core.run("nearkin", *command.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(f"is not installed. Run: pip install 'nearkin[{extra}]'\n")
    assert len(done.stderr.splitlines()) == 1


def test_images_alone_trains_reports_and_searches(images, photo_folder):
    doctor = images.check("nearkin", "doctor")
    assert "images: train, report, search  installed:" in doctor
    assert "missing: pip install 'nearkin[serve]'" in doctor
    small = ("--train.epochs", "1", "--model.width", "4")  # otherwise as `nearkin demo`
    images.check("nearkin", "train", "glyphs_small", *small, "--quiet", "--runs", "glyphs")
    glyphs = next((images.folder / "glyphs").glob("glyphs-*"))
    page = Path(images.check("nearkin", "report", glyphs, "--quiet").strip())
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    table = images.check("nearkin", "train", "--data", photo_folder, "--train.epochs", "1", "--runs", "photos")
    assert "never seen in training" in table
    run = next((images.folder / "photos").glob("folder-*"))
    images.check("nearkin", "index", run, photo_folder, "-o", "photos.index", "--quiet")
    query = next(photo_folder.rglob("*.png"))
    assert query.parent.name in images.check("nearkin", "search", "photos.index", query, "-k", "3")


PLUGIN = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "packaged-loss"
version = "1.0"

[project.entry-points."nearkin.plugins"]
mine = "packaged_loss"
"""


def test_training_and_a_study_with_two_workers_use_the_loss_of_an_installed_package(uv, dist, images, tmp_path):
    write_loss(tmp_path, "packaged_loss")
    (tmp_path / "pyproject.toml").write_text(PLUGIN)
    target = ["--python", str(images.folder / "venv"), "--constraint", str(ROOT / "constraints.txt")]
    wheel = next(dist.glob("*.whl")).as_uri()
    run_or_skip(uv, "pip", "install", "--quiet", *target, f"nearkin[bench] @ {wheel}", str(tmp_path))
    small = ("--train.epochs", "1", "--model.width", "4", "--data.max-classes", "12", "--data.max-per-class", "8")
    images.check("nearkin", "train", "glyphs_small", "--loss", "packaged_loss", *small, "--runs", "own")
    run = next((images.folder / "own").glob("glyphs-packaged_loss-*"))
    assert tomllib.loads((run / "recipe.toml").read_text())["loss"]["name"] == "packaged_loss"
    write_loss(images.folder, "file_loss")
    study = ("bench", "run", "tiny", "--losses", "file_loss", "packaged_loss", "--workers", "2")
    table = images.check("nearkin", *study, "--import", "file_loss.py", "--rehearse", "--sizes", "8", "--seeds", "0")
    assert "file_loss" in table
    assert "packaged_loss" in table
