"""`torchrun -m nearkin train` with two processes ends where one process ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import nearkin as nk
from nearkin.config.recipe import ComponentConfig
from nearkin.data import sources
from nearkin.data.samplers import make_sampler
from nearkin.data.splits import make_split
from nearkin.training import run_key
from nearkin.training.evaluation import evaluate
from nearkin.training.run import Run

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def per_query(run: Run) -> dict:
    with np.load(run.path / "per_query.npz") as stored:
        return {name: stored[name] for name in stored.files if stored[name].dtype == np.float64}


@pytest.mark.slow
@pytest.mark.parametrize(("epochs", "freeze_norm"), [(1, "statistics"), (2, "none")])
def test_two_processes_end_where_one_does(tiny_recipe, tmp_path, quiet, epochs, freeze_norm):
    """Batches of 9 for two processes: shares of 4 and 5."""
    recipe = replace(
        tiny_recipe,
        data=replace(tiny_recipe.data, augment="light"),
        model=replace(tiny_recipe.model, freeze_norm=freeze_norm, dropout=0.0),
        loss=ComponentConfig("multi_similarity"),
        miner=ComponentConfig("multi_similarity", {"epsilon": 0.1}),
        memory=16,
        train=replace(tiny_recipe.train, epochs=epochs, batch_size=9, samples_per_class=3, optimizer="sgd", lr=0.05),
    )
    alone = nk.fit(recipe, tmp_path / "alone", reporter=quiet)
    file = tmp_path / "recipe.toml"
    file.write_text(recipe.to_toml())
    command = [*TORCHRUN, "-m", "nearkin", "train", str(file), "--runs", str(tmp_path / "both"), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.count("classes never seen in training") == 1  # one process talks
    together = Run(tmp_path / "both" / alone.path.name)
    ours, theirs = (torch.load(r.path / "last.pt", weights_only=True) for r in (alone, together))
    for name, value in ours["model"].items():
        torch.testing.assert_close(theirs["model"][name], value, rtol=1e-4, atol=1e-5)
    for name, value in ours["objective"].items():
        torch.testing.assert_close(theirs["objective"][name], value, rtol=1e-4, atol=1e-5)
    for name, values in per_query(alone).items():
        np.testing.assert_allclose(per_query(together)[name], values, atol=1e-6, err_msg=name)
    seen = [event["epoch"] for event in together.events() if event["event"] == "epoch"]
    assert seen == list(range(epochs + 1))  # 0 is the start
    assert (alone.result["processes"], together.result["processes"]) == ([1], [2])
    assert json.loads((together.path / "env.json").read_text())["processes"] == 2


SLOW_DISK = """
import sys, time
from pathlib import Path
from nearkin.cli import main
from nearkin.models.weights import fingerprint
from nearkin.training import loop
from nearkin.training.distributed import rank
from nearkin.training.run import Run

evaluate_epoch, save = loop.evaluate_epoch, Run.save

def recording(session, **kwargs):
    with open(Path(sys.argv[2]).with_name(f"evaluated-{rank()}"), "a") as file:
        print(fingerprint(session.state.ema_model or session.state.model), file=file)
    return evaluate_epoch(session, **kwargs)

def slowly(run, name, *args, **kwargs):
    if run.is_writer and name == "best.pt":
        time.sleep(2)
    save(run, name, *args, **kwargs)

loop.evaluate_epoch, Run.save = recording, slowly
main()
"""


@pytest.mark.slow
def test_all_processes_evaluate_one_network(tiny_recipe, tmp_path, quiet):
    """Also where each has counted other images, a running mean is kept, and the disk is slow to take best.pt."""
    recipe = replace(
        tiny_recipe,
        data=replace(tiny_recipe.data, val_fraction=0.0),  # every epoch writes best.pt
        train=replace(tiny_recipe.train, epochs=2, ema=0.9, sync_batchnorm=False),
    )
    file, program = tmp_path / "recipe.toml", tmp_path / "program.py"
    file.write_text(recipe.to_toml())
    program.write_text(SLOW_DISK)
    command = [*TORCHRUN, str(program), "train", str(file), "--runs", str(tmp_path / "runs"), "--device", "cpu"]
    ours = os.environ | {"PYTHONPATH": str(Path(nk.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=ours)
    assert done.returncode == 0, done.stderr[-6000:]
    evaluated = [(tmp_path / f"evaluated-{number}").read_text().split() for number in range(2)]
    assert evaluated[0] == evaluated[1]
    assert len(evaluated[0]) == 3  # the start and two epochs
    [folder] = (tmp_path / "runs").iterdir()
    run = Run(folder)
    table = sources.load(recipe.data, quiet)
    assert folder.name == run_key(recipe, f"{table.fingerprint}-2-processes")  # one process gives other numbers
    _, holdout = make_split(table, recipe.data)
    for name, values in evaluate(run.embedder(), holdout.open()).per_query.items():
        np.testing.assert_allclose(per_query(run)[name], values, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_the_image_to_blame_is_named_whichever_process_had_it(tmp_path):
    features = np.random.default_rng(0).normal(size=(120, 6)).astype(np.float32)
    features[37] = 3e38  # finite as stored, not when it is squared
    np.savez(tmp_path / "f.npz", features=features, labels=np.arange(120) % 12)

    def is_with_the_second(seed: int) -> bool:  # row 37 is the 20th of the classes that train, the first six
        sampler = make_sampler(np.arange(60) % 6, batch_size=20, samples_per_class=0, seed=seed, rank=1, world_size=2)
        return 19 in np.concatenate(sampler.epoch(0))

    recipe = nk.recipes.features_default()
    recipe = replace(
        recipe,
        data=replace(recipe.data, root=tmp_path / "f.npz", split="half", val_fraction=0.0),
        model=replace(recipe.model, dim=4, head_init="random", norm="layer"),
        train=replace(recipe.train, epochs=1, batch_size=20, samples_per_class=0),
        seed=next(seed for seed in range(20) if is_with_the_second(seed)),
    )
    file = tmp_path / "recipe.toml"
    file.write_text(recipe.to_toml())
    command = [*TORCHRUN, "-m", "nearkin", "train", str(file), "--runs", str(tmp_path / "runs"), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert "the embeddings became NaN or infinite at epoch 1" in done.stderr
    [folder] = (tmp_path / "runs").iterdir()
    assert Run(folder).failed["files"] == ["row 37"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_no_thread_of_the_group_is_left(tmp_path):
    """One that is left may abort the process while Python ends. An optimizer imports what used to keep the group."""
    program = tmp_path / "program.py"
    program.write_text("""
from pathlib import Path
import torch
from nearkin.training.distributed import any_rank, process_group

def threads():
    return [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]

with process_group("cpu"):
    any_rank(True)
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    torch.optim.SGD([weight], lr=0.1).step()
    import torch.distributed.nn.functional
    assert any("gloo" in name for name in threads()), threads()
assert not any("gloo" in name for name in threads()), threads()
""")
    done = subprocess.run([*TORCHRUN, str(program)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]


HANGS = """
import os, signal, sys, time
from pathlib import Path
from nearkin.cli import main
from nearkin.training import loop
from nearkin.training.distributed import rank

train_epoch, folder = loop.train_epoch, Path(__file__).parent

def stopping(session, epoch, sigint_received):
    def flag():
        if epoch == 1 and rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return sigint_received()
    train_epoch(session, epoch, flag)

loop.train_epoch = stopping
(folder / f"ready-{os.environ['RANK']}").touch()
while len(list(folder.glob("ready-*"))) < 2:  # the timeout is shorter than an import may take
    time.sleep(0.01)
main()
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
def test_a_process_that_hangs_ends_the_others_and_one_process_resumes(tiny_recipe, tmp_path, capsys):
    recipe = replace(tiny_recipe, train=replace(tiny_recipe.train, rank_timeout_minutes=0.1))
    file, program = tmp_path / "recipe.toml", tmp_path / "program.py"
    file.write_text(recipe.to_toml())
    program.write_text(HANGS)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        ours = {"MASTER_PORT": str(probe.getsockname()[1]), "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}
    ours |= {"LOCAL_WORLD_SIZE": "2", "PYTHONPATH": str(Path(nk.__file__).parents[1])}
    command = [sys.executable, str(program), "train", str(file), "--runs", str(tmp_path / "runs"), "--device", "cpu"]
    ranks = [
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | ours | {"RANK": str(number)})
        for number in range(2)
    ]
    try:
        began = time.monotonic()
        _, said = ranks[0].communicate(timeout=120)
        assert ranks[0].returncode == 2
        assert "process 0 of 2: another process died or did not respond for 6 s" in said
        assert "Run the same command again to resume from the last checkpoint." in said
        assert "Traceback" not in said
        assert ranks[1].poll() is None
        assert time.monotonic() - began >= 6
    finally:
        ranks[1].kill()
        ranks[1].communicate()
    run = nk.fit(recipe, tmp_path / "runs")
    said = capsys.readouterr().err
    assert "resuming" in said
    assert "number of processes: 2 before, 1 now" in said
    assert run.result["processes"] == [2, 1]
