"""Killed commands and workers: no trial is lost or run twice, and the results equal those of an undisturbed study."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.studies import small_study, write_features

from nearkin.bench.trials import StudyFolder
from nearkin.training.run import Run

pytestmark = pytest.mark.slow

EPOCHS = 30


@pytest.fixture
def study_file(tmp_path):
    features = write_features(tmp_path / "clouds.npz", classes=40, samples_per_class=20)
    change = {"data": {"split": "half"}, "train": {"epochs": EPOCHS, "batch_size": 32}}
    study = small_study(features, losses=("norm_softmax", "triplet", "proxy_anchor"), sizes=(8,), change=change)
    (tmp_path / "s.toml").write_text(study.to_toml())
    return tmp_path / "s.toml"


def start(study: Path, out: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "nearkin", "bench", "run", str(study), "--out", out, "--runs", f"{out}/runs"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, "--workers", "2", "--device", "cpu"],
        cwd=study.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def workers_of(process: subprocess.Popen) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    pids = [int(pid) for pid in children.read_text().split()] if children.exists() else []
    # Without the resource tracker that multiprocessing starts.
    return [pid for pid in pids if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def wait_for(condition, seconds: float = 90.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError("timed out")


def wait_for_end(pids: list[int]) -> None:
    wait_for(lambda: not any(alive(pid) for pid in pids))


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc to find the workers")
def test_killing_workers_and_the_command_changes_no_result(study_file):
    folder = study_file.parent
    process = start(study_file, "undisturbed")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output

    rng = random.Random(0)
    process = start(study_file, "killed")
    killed = folder / "killed"
    for victim in ("worker", "command", "worker"):
        wait_for(lambda: (killed / "study.toml").exists() and StudyFolder.open(killed).running())
        time.sleep(rng.uniform(0.0, 0.5))
        pids = workers_of(process)
        if victim == "worker":
            os.kill(rng.choice(pids), signal.SIGKILL)
        else:
            process.kill()
            process.communicate(timeout=60)
            wait_for_end(pids)  # workers stop with their parent
            process = start(study_file, "killed")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output

    assert (killed / "results.csv").read_text() == (folder / "undisturbed" / "results.csv").read_text()
    study = StudyFolder.open(killed)
    assert len(study.outcomes()) == len(study.trials) == 6
    runs = [Run(path) for path in (killed / "runs").iterdir()]
    assert len(runs) == 6  # no trial has two runs
    for run in runs:
        epochs = [event["epoch"] for event in run.events() if event["event"] == "epoch"]
        assert epochs == list(range(EPOCHS + 1))  # every epoch exactly once
        assert sum(event["event"] == "holdout_opened" for event in run.events()) == 1
        assert run.result["test"] is not None
    for outcome in study.outcomes().values():
        expected_run = folder / "undisturbed" / "runs" / Path(outcome.run).name
        actual, expected = (
            json.loads((path / "result.json").read_text()) for path in (Path(outcome.run), expected_run)
        )
        assert actual["test"] == expected["test"]


def test_ctrl_c_stops_the_workers_and_prints_how_to_resume(study_file):
    process = start(study_file, "study")
    folder = study_file.parent / "study"
    wait_for(lambda: (folder / "study.toml").exists() and StudyFolder.open(folder).running())
    pids = workers_of(process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "of 6 trials done; the checkpoint is saved. To resume:" in output
    assert not any(alive(pid) for pid in pids)
