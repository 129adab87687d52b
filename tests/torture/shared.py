"""Several processes on the same files, strict permissions: the results are those of one process with the usual ones."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torture import kill_points, kills
from torture.kills import Scenario
from torture.table import Row

NOBODY = 65534


def attack_together(root: Path, name: str, processes: int, rng: random.Random, *, killed: int = 1) -> Row:
    """Start the same command several times at once, kill some of them, and repeat it."""
    scenario = next(scenario for scenario in kills.SCENARIOS if scenario.name == name)
    expected, _, passed, _ = kills.run_to_the_end(scenario, root, [])
    folder, orders = kills.clean_folders(root)
    # Early points: processes that share the work pass fewer of them.
    kill_points.write_orders(orders, [rng.randint(1, max(1, max(passed) // processes)) for _ in range(killed)])
    pids = [kills.start(scenario, folder, orders) for _ in range(processes)]
    codes = [kills.wait_for(pid, name) for pid in pids]
    kills.wait_for_workers(orders)
    log = (orders / "log").read_text(errors="replace")
    died = codes.count(-9)
    if died:  # its user repeats it, which also removes the temporary file it may have left behind
        kills.attempt(scenario, folder, orders)
    ended = sum(code in (0, -9) for code in codes)
    lost = int(kills.digests(folder) != expected)
    remark = f"{processes - died} ended, {died} were killed"
    return Row(f"{processes} processes at once: {name}", processes, ended - lost, lost, log.count("Traceback"), remark)


def attack_permissions(root: Path) -> list[Row]:
    """Train with umask 077; index a folder as a user who may not read one of its images, and not write elsewhere."""
    train = next(scenario for scenario in kills.SCENARIOS if scenario.name == "train")
    expected, *_ = kills.run_to_the_end(train, root, [])
    found, _, _, log = kills.run_to_the_end(_with(train, lambda: os.umask(0o077)), root, [])
    same = int(found == expected)
    rows = [Row("umask 077: train", 1, same, 1 - same, log.count("Traceback"), "the same files")]

    photos = root / "inputs" / "unreadable"
    shutil.copytree(root / "inputs" / "photos", photos)
    (photos / "class 0" / "0.png").chmod(0)
    root.chmod(0o755)
    argv = ("index", "RUN", "../inputs/unreadable", "-o")
    for where, expected_code, message in (
        ("photos.index", 0, "class 0/0.png"),
        ("../inputs/no.index", 2, "cannot write the index"),
    ):
        folder, orders = kills.clean_folders(root)
        for path in (folder, orders):
            path.chmod(0o777)
        scenario = _with(Scenario("index", kills.command(*argv, where), 0), lambda: _become_nobody(root))
        code = kills.attempt(scenario, folder, orders)
        log = (orders / "log").read_text(errors="replace")
        fine = int(code == expected_code and message in log)
        what = "an image that may not be read" if expected_code == 0 else "a folder that may not be written"
        rows.append(Row(f"permissions: index, {what}", 1, fine, 1 - fine, log.count("Traceback"), f"exit code {code}"))
    shutil.rmtree(photos)
    return rows


def _with(scenario: Scenario, before: Callable[[], object]) -> Scenario:
    def work() -> None:
        before()
        scenario.work()

    return replace(scenario, work=work)


def _become_nobody(root: Path) -> None:
    if os.geteuid() == 0:  # who may read and write everything
        # Import all that the command needs: nobody may not be able to read the installation of Python.
        kills.command("index", "RUN", "../inputs/photos", "-o", str(root / "warm.index"))()
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
