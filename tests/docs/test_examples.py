"""Every example runs, in small form."""

import os
import subprocess
import sys

import numpy as np
import pytest
from helpers.paths import ROOT
from helpers.studies import write_features

EXAMPLES = ROOT / "examples"
TESTED = {"compare_losses", "distributed", "own_loss", "photos_end_to_end", "plain_loop", "serving"}

pytestmark = pytest.mark.slow


def run(name: str, *args, cwd, launcher=(sys.executable,)) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(
        [*launcher, str(EXAMPLES / f"{name}.py"), *map(str, args)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_none_is_forgotten():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == TESTED


def test_plain_loop(tmp_path):
    lines = run("plain_loop", "--epochs", 2, "--classes", 24, cwd=tmp_path).splitlines()
    recalls = [float(line.partition("kinds ")[2].split()[0]) for line in lines]
    assert len(recalls) == 2
    assert recalls[-1] > 15  # chance is 4


def test_own_loss(tmp_path):
    said = run("own_loss", cwd=tmp_path)
    assert "step 60" in said
    assert "R@1 100" in said


def test_compare_losses(tmp_path):
    features = write_features(tmp_path / "clouds.npz")
    said = run("compare_losses", features, "--dim", 8, "--losses", "norm_softmax", "triplet", cwd=tmp_path)
    assert said.count("R@1") == 2
    assert "triplet less norm_softmax:" in said


def test_distributed_gives_the_gradient_of_one_process(tmp_path):
    alone = run("distributed", cwd=tmp_path)
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    both = run("distributed", cwd=tmp_path, launcher=launcher)
    assert "rank 1: rows 12 to 24" in both

    def norm(said: str) -> float:
        return float(said.partition("gradient norm ")[2].split()[0])

    assert norm(both) == pytest.approx(norm(alone), rel=1e-5)


def test_photos_end_to_end(tmp_path, photo_folder):
    pytest.importorskip("onnxruntime", reason="needs nearkin[export]")
    said = run("photos_end_to_end", photo_folder, "--recipe", "from_scratch", "--epochs", 1, cwd=tmp_path)
    assert "R@1 on classes never seen" in said
    assert (tmp_path / "end_to_end" / "report.html").exists()
    assert (tmp_path / "end_to_end" / "model.onnx").exists()
    assert said.count("\n        ") == 5  # five neighbours


def test_serving(tmp_path, server, served):
    picture = tmp_path / "asked.png"
    from PIL import Image

    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(picture)
    said = run("serving", server.url, picture, cwd=tmp_path)
    assert said.startswith("asked.png: ")
    assert len(said.splitlines()) == 8
