"""`nearkin tune` by several workers: each trial exactly once, whoever is killed, over a journal and over PostgreSQL."""

from __future__ import annotations

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
from nearkin.bench import tune
from nearkin.bench.launch import Slurm, Worker, submit
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


def worker(search: tune.Search, diary: Path) -> None:
    """A worker that notes in a diary when each training begins."""
    import nearkin.training.loop

    fit = nearkin.training.loop.fit

    def noting(recipe, *given, **asked):
        name = f"{recipe.loss.name} {sorted(recipe.loss.settings.items())} {recipe.train.lr} {recipe.train.class_lr}"
        with open(diary, "a") as file:
            file.write(f"{os.getpid()} {name}\n")
        return fit(recipe, *given, **asked)

    nearkin.training.loop.fit = noting
    tune.POLL = 0.05
    tune.work(search, device="cpu", reporter=QUIET)


@pytest.fixture(scope="module")
def processes():
    """Processes that have all imports behind them, so that kills hit the work and not the start."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "optuna", "nearkin.bench.tune", "nearkin.training.loop", "torch._dynamo"])
    return context


def begun(diary: Path) -> list[tuple[int, str]]:
    """Process and trial of every training that was begun."""
    lines = diary.read_text().splitlines() if diary.exists() else []
    return [(int(pid), name) for pid, name in (line.split(" ", 1) for line in lines)]


def kill_repeatedly(context, search: tune.Search, diary: Path, *, workers: int, kills: int) -> None:
    """Keep workers going, kill one after another within their work, then let the last finish."""
    draw = random.Random(0)
    running: list = []
    for left in range(kills, -1, -1):
        while len(running) < workers:
            running.append(context.Process(target=worker, args=(search, diary)))
            running[-1].start()
        if left:
            known = len(begun(diary))
            end = time.monotonic() + 60
            while len(begun(diary)) == known and time.monotonic() < end:
                time.sleep(0.01)
            time.sleep(draw.uniform(0, 0.15))
            last = begun(diary)[-1][0]
            victim = next((process for process in running if process.pid == last), running[0])
            running.remove(victim)
            os.kill(victim.pid, signal.SIGKILL)
            victim.join()
    for process in running:
        process.join(120)
        assert process.exitcode == 0


def check_exactly_once(search: tune.Search, diary: Path, *, kills: int) -> None:
    times = Counter(name for _, name in begun(diary))
    for loss in search.losses:
        trials = trials_of(search, loss)
        assert len(trials) == search.trials
        assert all(trial.state.is_finished() for trial in trials)
    assert len(times) == search.total  # every trial its own settings
    assert len(list((search.out / "runs").iterdir())) == search.total
    # A training is begun again only where a kill cut it, or cut the note of how it ended; and some were cut.
    assert 0 < sum(times.values()) - search.total <= kills
    # Written by one process at a time: every epoch once and in its order.
    for folder in (search.out / "runs").iterdir():
        epochs = [event["epoch"] for event in Run(folder).events() if event["event"] == "epoch"]
        assert epochs == list(range(1, len(epochs) + 1))


@pytest.mark.slow
def test_one_worker_killed_again_and_again_finds_what_an_undisturbed_one_finds(recipe, tmp_path, processes):
    longer = replace(recipe, train=replace(recipe.train, epochs=12))
    asked = {"trials": 9, "reporter": QUIET}
    calm = tune.plan(longer, tmp_path / "calm", **asked)
    tune.work(calm, device="cpu", reporter=QUIET)
    killed = tune.plan(longer, tmp_path / "killed", **asked)
    kill_repeatedly(processes, killed, tmp_path / "diary", workers=1, kills=6)
    check_exactly_once(killed, tmp_path / "diary", kills=6)
    assert tune.standings(killed) == tune.standings(calm)


@pytest.mark.slow
def test_two_workers_share_a_journal_whoever_is_killed(recipe, tmp_path, processes):
    longer = replace(recipe, train=replace(recipe.train, epochs=12))
    search = tune.plan(longer, tmp_path / "out", losses=("proxy_anchor", "npair"), trials=7, reporter=QUIET)
    kill_repeatedly(processes, search, tmp_path / "diary", workers=2, kills=5)
    check_exactly_once(search, tmp_path / "diary", kills=5)


@pytest.mark.slow
def test_two_workers_share_a_postgresql_whoever_is_killed(recipe, tmp_path, processes, postgres_url):
    longer = replace(recipe, train=replace(recipe.train, epochs=12))
    asked = {"losses": ("proxy_anchor", "npair"), "trials": 5, "storage": postgres_url, "reporter": QUIET}
    search = tune.plan(longer, tmp_path / "out", **asked)
    assert tune.plan(longer, tmp_path / "elsewhere", **asked).name == search.name  # another machine joins
    kill_repeatedly(processes, search, tmp_path / "diary", workers=2, kills=4)
    check_exactly_once(search, tmp_path / "diary", kills=4)
    found = tune.standings(search)
    best = Recipe.from_toml(tune.write_recipes(search, found)[found[0].loss])
    again = nk.fit(best, tmp_path / "again", final=False, reporter=QUIET, device="cpu")
    assert again.result["val_R@1"] == found[0].best


@pytest.mark.slow
def test_a_database_command_is_printed_without_its_password(features, tmp_path, postgres_url, capsys):
    secret = postgres_url.replace("nearkin@", "nearkin:hush@").replace("postgresql:", "postgresql+psycopg:")
    asked = [
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
    main([*asked, "--device", "cpu", "--out", str(tmp_path), "--storage", secret])
    out, err = capsys.readouterr()
    assert "on each further machine:\n  nearkin tune features_default" in err
    assert "hush" not in out + err
    assert "2 done" in out


@pytest.mark.slow
def test_workers_of_one_command_share_the_work(features, tmp_path, capfd):
    asked = ["tune", "features_default", "--data", str(features), "--model.dim", "8", "--train.epochs", "1"]
    main([*asked, "--trials", "6", "--device", "cpu", "--workers", "2", "--out", str(tmp_path)])
    out, _ = capfd.readouterr()
    assert "6 done" in out
    assert len(list((tmp_path / "runs").iterdir())) == 6


@pytest.mark.slow
def test_a_signal_to_the_command_alone_stops_its_workers(features, tmp_path):
    command = [sys.executable, "-m", "nearkin", "tune", "features_default", "--data", str(features), "--model.dim=8"]
    command += ["--train.epochs", "2000", "--trials", "2", "--device", "cpu", "--workers", "2", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    end = time.monotonic() + 90
    while len(list(tmp_path.glob("runs/*/last.pt"))) < 2:
        assert time.monotonic() < end
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)  # which also waits for the workers: they hold the other end
    assert process.returncode == 130
    assert "stopped; the checkpoint is saved. To resume:" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_jobs_run_as_submitit_runs_them(recipe, tmp_path):
    pytest.importorskip("submitit", reason="needs nearkin[bench]")
    search = tune.plan(recipe, tmp_path, trials=3, reporter=QUIET)
    jobs = submit(search, 1, Slurm(hours=0.1, gpus=0, cores=1, memory_gb=1), cluster="local", device="cpu")
    assert len(jobs) == 1
    assert Worker(search).checkpoint().function == Worker(search)  # whose time is up is queued again as it is
    (found,) = tune.standings(search)
    assert (found.done + found.pruned, found.left) == (3, 0)


@pytest.mark.slow
def test_a_worker_that_lost_its_database_stops_and_the_next_goes_on(recipe, tmp_path, postgres_url, monkeypatch):
    import psycopg

    search = tune.plan(recipe, tmp_path, trials=2, storage=postgres_url, reporter=QUIET)
    decide = tune._decide

    def cut_off(*given):
        with psycopg.connect(postgres_url) as database:
            others = "datname = current_database() AND pid <> pg_backend_pid()"
            database.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}")
        return decide(*given)

    with monkeypatch.context() as patched:
        patched.setattr(tune, "_decide", cut_off)
        with pytest.raises(RunError, match="the connection was lost"):
            tune.work(search, device="cpu", reporter=QUIET)
    assert [s.left for s in tune.standings(search)] == [2]  # without its claim it writes nothing down
    tune.work(search, device="cpu", reporter=QUIET)
    assert [s.done for s in tune.standings(search)] == [2]
