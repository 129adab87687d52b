"""Every example runs, on little data."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers.paths import ROOT
from helpers.studies import write_features

import nearkin as nk

EXAMPLES = ROOT / "examples"
TESTED = {
    "accelerate_loop",
    "bound_optimizer",
    "compare_losses",
    "distributed",
    "hf_trainer",
    "lightning_loop",
    "multi_label",
    "own_loss",
    "own_model_and_data",
    "photos_end_to_end",
    "plain_loop",
    "serving",
}

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


def test_own_model_and_data(tmp_path):
    output = run("own_model_and_data", "--epochs", 2, "--classes", 20, cwd=tmp_path)
    assert "R@1" in output
    assert "data:image/webp" in (tmp_path / "own" / "report.html").read_text()
    assert output.count("  stripes ") == 3
    assert (tmp_path / "own" / "model.pt2").exists()


def test_multi_label(tmp_path):
    """Words of the names of birds, or where their features are missing, clouds of two words each."""
    birds = ROOT.parent / "shared" / "data" / "cub_efficientnet_lite0_224.npz"
    if birds.exists():
        with np.load(birds) as arrays:
            features, paths = arrays["features"], arrays["paths"].tolist()
        tags = [path.split("/")[0].partition(".")[2].replace("_", " ").lower() for path in paths]
    else:
        rng = np.random.default_rng(0)
        words = np.array([(a, b) for a in range(8) for b in range(8, 16)])[rng.integers(0, 64, 1200)]
        centres = rng.normal(size=(16, 40))
        noise = rng.normal(size=(1200, 40)) * np.where(np.arange(40) < 20, 0.5, 3)
        features, tags = centres[words].sum(1) + noise, [f"w{a} w{b}" for a, b in words]
    np.savez(tmp_path / "tagged.npz", features=features, tags=np.array(tags))
    *_, raw, trained = run(
        "multi_label", "tagged.npz", "--dim", 128 if birds.exists() else 24, cwd=tmp_path
    ).splitlines()
    assert float(trained.partition("MAP@R ")[2].split()[0]) > float(raw.partition("MAP@R ")[2].split()[0]) + 2


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


def plain_norms() -> str:
    """The training of the examples below in one process, by hand."""
    torch.manual_seed(0)
    images, labels = torch.randn(24, 16), torch.arange(6).repeat_interleave(4)
    network = torch.nn.Linear(16, 8)
    objective = nk.Objective("proxy_anchor", num_classes=6, dim=8)
    optimizer = torch.optim.SGD([*network.parameters(), *objective.parameters()], lr=0.01)
    sampler = nk.samplers.BalancedSampler(labels, batch_size=12, samples_per_class=4, seed=0)
    for epoch in range(2):
        for rows in sampler.epoch(epoch):
            optimizer.zero_grad()
            objective(network(images[rows]), labels[rows]).backward()
            optimizer.step()
    return f"weight {network.weight.norm():.5f} proxies {objective.proxies.norm():.5f}"


@pytest.mark.parametrize("name", ["accelerate_loop", "hf_trainer", "lightning_loop"])
def test_loops_of_other_frameworks_in_two_processes_train_as_one(tmp_path, name):
    pytest.importorskip({"hf_trainer": "transformers"}.get(name, name.removesuffix("_loop")))
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    line = run(name, cwd=tmp_path, launcher=launcher).splitlines()[-1]
    words = line.split()
    assert f"weight {float(words[1]):.5f} proxies {float(words[3]):.5f}" == plain_norms()


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
