"""`nearkin tune` with several workers: each trial runs exactly once despite kills, with a journal and PostgreSQL."""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.searches import QUIET, small_recipe, trials_of, write_vectors

import nearkin as nk
from nearkin.bench import executor, tune
from nearkin.bench.executor import ClusterJob, Slurm, submit
from nearkin.cli import main
from nearkin.config.recipe import Recipe
from nearkin.errors import RunError
from nearkin.training.run import Run


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vectors(tmp_path_factory.mktemp("features") / "features.npz")


@pytest.fixture
def recipe(features: Path) -> Recipe:
    return small_recipe(features)


def worker(search: tune.Search, log: Path) -> None:
    """Run a worker that logs the start of each training run."""
    import nearkin.training.loop

    fit = nearkin.training.loop.fit

    def logging_fit(recipe, *args, **kwargs):
        name = f"{recipe.loss.name} {sorted(recipe.loss.settings.items())} {recipe.train.lr} {recipe.train.class_lr}"
        with open(log, "a") as file:
            file.write(f"{os.getpid()} {name}\n")
        return fit(recipe, *args, **kwargs)

    nearkin.training.loop.fit = logging_fit
    executor.POLL_INTERVAL = 0.05
    tune.work(search, device="cpu", reporter=QUIET)


@pytest.fixture(scope="module")
def processes():
    """A context whose processes have everything imported, so that kills hit the work and not the start."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "optuna", "nearkin.bench.tune", "nearkin.training.loop", "torch._dynamo"])
    return context


def started(log: Path) -> list[tuple[int, str]]:
    """Return process id and trial of every training run that started."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [(int(pid), name) for pid, name in (line.split(" ", 1) for line in lines)]


def kill_repeatedly(context, search: tune.Search, log: Path, *, workers: int, kills: int) -> None:
    """Keep workers running, kill one after another during their work, then let the last ones finish."""
    rng = random.Random(0)
    running: list = []
    for left in range(kills, -1, -1):
        while len(running) < workers:
            running.append(context.Process(target=worker, args=(search, log)))
            running[-1].start()
        if left:
            known = len(started(log))
            end = time.monotonic() + 60
            while len(started(log)) == known and time.monotonic() < end:
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.15))
            last = started(log)[-1][0]
            victim = next((process for process in running if process.pid == last), running[0])
            running.remove(victim)
            os.kill(victim.pid, signal.SIGKILL)
            victim.join()
    for process in running:
        process.join(120)
        assert process.exitcode == 0


def check_exactly_once(search: tune.Search, log: Path, *, kills: int) -> None:
    counts = Counter(name for _, name in started(log))
    for loss in search.losses:
        trials = trials_of(search, loss)
        assert len(trials) == search.trials
        assert all(trial.state.is_finished() for trial in trials)
    assert len(counts) == search.total  # every trial has different settings
    assert len(list((search.out / "runs").iterdir())) == search.total
    # A run starts again only if a kill interrupted it or the record of its result; some were interrupted.
    assert 0 < sum(counts.values()) - search.total <= kills
    # Written by one process at a time: every epoch once and in order.
    for folder in (search.out / "runs").iterdir():
        epochs = [event["epoch"] for event in Run(folder).events() if event["event"] == "epoch"]
        assert epochs == list(range(len(epochs)))  # 0 is the start


@pytest.mark.slow
def test_killed_worker_finds_the_same_as_an_undisturbed_one(recipe, tmp_path, processes):
    longer = replace(recipe, train=replace(recipe.train, epochs=12))
    undisturbed = tune.plan(longer, tmp_path / "undisturbed", trials=9, reporter=QUIET)
    tune.work(undisturbed, device="cpu", reporter=QUIET)
    killed = tune.plan(longer, tmp_path / "killed", trials=9, reporter=QUIET)
    kill_repeatedly(processes, killed, tmp_path / "log", workers=1, kills=6)
    check_exactly_once(killed, tmp_path / "log", kills=6)
    assert tune.standings(killed) == tune.standings(undisturbed)


@pytest.mark.slow
def test_two_workers_share_a_journal_despite_kills(recipe, tmp_path, processes):
    longer = replace(recipe, train=replace(recipe.train, epochs=12))
    search = tune.plan(longer, tmp_path / "out", losses=("proxy_anchor", "npair"), trials=7, reporter=QUIET)
    kill_repeatedly(processes, search, tmp_path / "log", workers=2, kills=5)
    check_exactly_once(search, tmp_path / "log", kills=5)


@pytest.mark.slow
def test_two_workers_share_postgresql_despite_kills(recipe, tmp_path, processes, postgres_url):
    longer = replace(recipe, train=replace(recipe.train, epochs=12))
    kwargs = {"losses": ("proxy_anchor", "npair"), "trials": 5, "storage": postgres_url, "reporter": QUIET}
    search = tune.plan(longer, tmp_path / "out", **kwargs)
    assert tune.plan(longer, tmp_path / "elsewhere", **kwargs).name == search.name  # another machine joins
    kill_repeatedly(processes, search, tmp_path / "log", workers=2, kills=4)
    check_exactly_once(search, tmp_path / "log", kills=4)
    standings = tune.standings(search)
    best = Recipe.from_toml(tune.write_recipes(search, standings)[standings[0].loss])
    again = nk.fit(best, tmp_path / "again", final=False, reporter=QUIET, device="cpu")
    assert again.result["val_MAP@R"] == standings[0].best


@pytest.mark.slow
def test_database_password_is_not_printed(features, tmp_path, postgres_url, capsys):
    secret = postgres_url.replace("nearkin@", "nearkin:hush@").replace("postgresql:", "postgresql+psycopg:")
    argv = [
        "tune",
        "features_default",
        "--data",
        str(features),
        "--model.dim",
        "8",
        "--train.epochs",
        "1",
        "--trials=2",
    ]
    main([*argv, "--device", "cpu", "--out", str(tmp_path), "--storage", secret])
    out, err = capsys.readouterr()
    assert "to add another machine, run there:\n  nearkin tune features_default" in err
    assert "hush" not in out + err
    assert "2 done" in out


@pytest.mark.slow
def test_workers_of_one_command_share_the_trials(features, tmp_path, capfd):
    argv = ["tune", "features_default", "--data", str(features), "--model.dim", "8", "--train.epochs", "1"]
    main([*argv, "--trials", "6", "--device", "cpu", "--workers", "2", "--out", str(tmp_path)])
    out, _ = capfd.readouterr()
    assert "6 done" in out
    assert len(list((tmp_path / "runs").iterdir())) == 6


@pytest.mark.slow
def test_sigint_to_the_command_stops_its_workers(features, tmp_path):
    command = [sys.executable, "-m", "nearkin", "tune", "features_default", "--data", str(features), "--model.dim=8"]
    command += ["--train.epochs", "2000", "--trials", "2", "--device", "cpu", "--workers", "2", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 90
    while len(list(tmp_path.glob("runs/*/last.pt"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)  # also waits for the workers, which share the pipe
    assert process.returncode == 130
    assert "stopped with 0 of 2 trials done; the checkpoint is saved. To resume:" in stderr
    assert "Traceback" not in stderr


@pytest.mark.slow
def test_jobs_run_with_submitit(recipe, tmp_path):
    pytest.importorskip("submitit", reason="needs nearkin[bench]")
    search = tune.plan(recipe, tmp_path, trials=3, reporter=QUIET)
    task = functools.partial(tune.work, search, device="cpu")
    slurm = Slurm(hours=0.1, gpus=0, cores=1, memory_gb=1)
    jobs = submit(task, 1, slurm, tmp_path / "jobs", cluster="local")
    assert len(jobs) == 1
    assert ClusterJob(task).checkpoint().function == ClusterJob(task)  # requeued unchanged on timeout
    (standing,) = tune.standings(search)
    assert (standing.done + standing.pruned, standing.left) == (3, 0)


@pytest.mark.slow
def test_worker_stops_when_it_loses_the_database_and_the_next_resumes(recipe, tmp_path, postgres_url, monkeypatch):
    import psycopg

    search = tune.plan(recipe, tmp_path, trials=2, storage=postgres_url, reporter=QUIET)
    suggest_settings = tune._suggest_settings

    def disconnect(*args):
        with psycopg.connect(postgres_url) as database:
            others = "datname = current_database() AND pid <> pg_backend_pid()"
            database.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}")
        return suggest_settings(*args)

    with monkeypatch.context() as patched:
        patched.setattr(tune, "_suggest_settings", disconnect)
        with pytest.raises(RunError, match="the connection was lost"):
            tune.work(search, device="cpu", reporter=QUIET)
    assert [s.left for s in tune.standings(search)] == [2]  # without its lock it records nothing
    tune.work(search, device="cpu", reporter=QUIET)
    assert [s.done for s in tune.standings(search)] == [2]
