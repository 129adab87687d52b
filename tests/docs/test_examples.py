"""Every example runs, on little data."""

import os
import subprocess
import sys

import numpy as np
import pytest
from helpers.paths import ROOT
from helpers.studies import write_features

EXAMPLES = ROOT / "examples"
TESTED = {"bound_optimizer", "compare_losses", "distributed", "own_loss", "photos_end_to_end", "plain_loop", "serving"}

pytestmark = pytest.mark.slow


def run(name: str, *args, cwd, launcher=(sys.executable,)) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    process = subprocess.run(
        [*launcher, str(EXAMPLES / f"{name}.py"), *map(str, args)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == TESTED


def test_plain_loop(tmp_path):
    lines = run("plain_loop", "--epochs", 2, "--classes", 24, cwd=tmp_path).splitlines()
    recalls = [float(line.partition("classes ")[2].split()[0]) for line in lines]
    assert len(recalls) == 2
    assert recalls[-1] > 15  # 4 at random


def test_bound_optimizer(tmp_path):
    output = run("bound_optimizer", "--rounds", 3, "--classes", 8, "--figure", "bounds.png", cwd=tmp_path)
    values = [float(line.partition("cross-entropy ")[2].partition(",")[0]) for line in output.splitlines()]
    assert values[-1] < values[0]
    assert (tmp_path / "bounds.png").stat().st_size > 10_000


def test_own_loss(tmp_path):
    output = run("own_loss", cwd=tmp_path)
    assert "step 60" in output
    assert "R@1 100" in output


def test_compare_losses(tmp_path):
    features = write_features(tmp_path / "clouds.npz")
    output = run("compare_losses", features, "--dim", 8, "--losses", "norm_softmax", "triplet", cwd=tmp_path)
    assert output.count("R@1") == 2
    assert "triplet vs norm_softmax:" in output


def test_distributed_gives_the_gradient_of_one_process(tmp_path):
    single = run("distributed", cwd=tmp_path)
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    both = run("distributed", cwd=tmp_path, launcher=launcher)
    assert "rank 1: rows 12 to 24" in both

    def norm(output: str) -> float:
        return float(output.partition("gradient norm ")[2].split()[0])

    assert norm(both) == pytest.approx(norm(single), rel=1e-5)


def test_photos_end_to_end(tmp_path, photo_folder):
    pytest.importorskip("onnxruntime", reason="needs nearkin[export]")
    output = run("photos_end_to_end", photo_folder, "--recipe", "from_scratch", "--epochs", 1, cwd=tmp_path)
    assert "R@1 on unseen classes" in output
    assert (tmp_path / "end_to_end" / "report.html").exists()
    assert (tmp_path / "end_to_end" / "model.onnx").exists()
    assert output.count("\n        ") == 5  # five neighbours


def test_serving(tmp_path, server, served):
    image = tmp_path / "query.png"
    from PIL import Image

    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(image)
    output = run("serving", server.url, image, cwd=tmp_path)
    assert output.startswith("query.png: ")
    assert len(output.splitlines()) == 8
