"""`torchrun -m nearkin train` with two processes ends where one process ends."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import nearkin as nk
from nearkin.recipe import Choice
from nearkin.runs import Run


@pytest.mark.slow
def test_two_processes_end_where_one_does(tiny_recipe, tmp_path, quiet):
    """Batches of 9 for two processes: shares of 4 and 5. Batch norms count images, so their statistics stand still."""
    recipe = replace(
        tiny_recipe,
        data=replace(tiny_recipe.data, augment="light"),
        model=replace(tiny_recipe.model, freeze_norm="statistics", dropout=0.0),
        loss=Choice("multi_similarity"),
        miner=Choice("multi_similarity", {"epsilon": 0.1}),
        memory=16,
        train=replace(tiny_recipe.train, epochs=2, batch_size=9, per_class=3, optimizer="sgd", lr=0.05),
    )
    alone = nk.fit(recipe, tmp_path / "alone", reporter=quiet)
    file = tmp_path / "recipe.toml"
    file.write_text(recipe.to_toml())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "nearkin", "train", str(file), "--runs", str(tmp_path / "both"), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.count("classes never seen in training") == 1  # one process talks
    together = Run(tmp_path / "both" / alone.path.name)
    ours, theirs = (torch.load(r.path / "last.pt", weights_only=True) for r in (alone, together))
    for name, value in ours["model"].items():
        torch.testing.assert_close(theirs["model"][name], value, rtol=1e-4, atol=1e-5)
    for name, value in ours["objective"].items():
        torch.testing.assert_close(theirs["objective"][name], value, rtol=1e-4, atol=1e-5)
    assert together.result["test"]["trained"]["R@1"]["mean"] == pytest.approx(
        alone.result["test"]["trained"]["R@1"]["mean"], abs=0.03
    )
    epochs = [event["epoch"] for event in together.events() if event["event"] == "epoch"]
    assert epochs == [1, 2]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_no_thread_of_the_group_is_left(tmp_path):
    """One that is left may abort the process while Python ends. An optimizer imports what used to keep the group."""
    program = tmp_path / "program.py"
    program.write_text("""
from pathlib import Path
import torch
from nearkin.distributed import anywhere, process_group

def threads():
    return [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]

with process_group("cpu"):
    anywhere(True)
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    torch.optim.SGD([weight], lr=0.1).step()
    import torch.distributed.nn.functional
    assert any("gloo" in name for name in threads()), threads()
assert not any("gloo" in name for name in threads()), threads()
""")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
