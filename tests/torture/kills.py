"""Kill commands inside their work and repeat them: nothing may be lost, and the results must equal those of an
undisturbed run bit for bit, except for times.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from helpers.studies import small_study, write_features

from torture import kill_points
from torture.table import Row

MAX_SECONDS = 300.0  # for one attempt
TIMES = {"seconds", "time", "img_s", "images_per_second", "events_size", "mtime", "command", "commit"}


@dataclass(frozen=True)
class Scenario:
    """What is killed: a function that is called in a folder of its own, with its process about to die."""

    name: str
    work: Callable[[], object]
    kills: int  # at least this many
    workers: bool = False  # it starts processes, which take their own orders
    slow: bool = False  # to start


# --- inputs ----------------------------------------------------------------------------------------------------------


def make_inputs(folder: Path) -> None:
    """Write images, features, a study and a trained run for the scenarios."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for c in range(8):
        colours = rng.uniform(0, 255, (2, 3))
        stripes = (np.arange(24) // (2 + c % 3) % 2)[:, None] if c % 2 else (np.arange(24) // (2 + c % 3) % 2)[None, :]
        (folder / f"photos/class {c}").mkdir(parents=True)
        for i in range(10):
            pixels = np.where(stripes[..., None] > 0, *colours) + rng.normal(0, 40, (24, 24, 3))
            Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(folder / f"photos/class {c}/{i}.png")
    features = write_features(folder / "clouds.npz", classes=20, samples_per_class=8)
    change = {"data": {"split": "half"}, "train": {"epochs": 3, "batch_size": 32}}
    study = small_study(features, sizes=(8,), change=change)
    (folder / "study.toml").write_text(study.to_toml())


def train(*flags: str) -> None:
    from nearkin.cli import main

    data = ["--data", "../inputs/photos", "--data.image-size", "16", "--data.val-fraction", "0.25"]
    model = ["--model.width", "4", "--model.dim", "8", "--device", "cpu", "--quiet"]
    steps = ["--train.batch-size", "16", "--train.samples-per-class", "2", "--train.checkpoint-minutes", "1e-9"]
    main(["train", "from_scratch", *data, *model, *steps, *flags])


def finished_run() -> str:
    """The run that `make_run` has trained."""
    return str(next(Path("../inputs/runs").iterdir()))


def build_image_cache() -> None:
    from nearkin.data.cache import open_images
    from nearkin.data.images import FileImages

    paths = sorted(Path("../inputs/photos").rglob("*.png"))
    open_images(FileImages(paths, 16, workers=1), folder=Path("cache/images"))


def command(*argv: str) -> Callable[[], object]:
    def run() -> None:
        from nearkin.cli import main

        main([finished_run() if word == "RUN" else word for word in argv])

    return run


FEATURES = ("--data", "../inputs/clouds.npz", "--model.dim", "8", "--train.epochs", "3", "--train.batch-size", "32")
SCENARIOS = [
    Scenario("train", lambda: train("--train.epochs", "3"), 22),
    Scenario(
        "frozen features",
        lambda: train("--train.epochs", "1", "--freeze", "backbone", "--model.head-init", "whitened"),
        16,
    ),
    Scenario("image cache", build_image_cache, 16),
    Scenario("index", command("index", "RUN", "../inputs/photos", "-o", "photos.index"), 20),
    Scenario("export", command("export", "RUN", "--to", "torch", "-o", "model.pt2", "--quiet"), 8, slow=True),
    Scenario("report", command("report", "RUN", "-o", "page.html", "--json", "page.json", "--tables", "tables"), 12),
    Scenario(
        "study, two workers",
        command("bench", "run", "../inputs/study.toml", "--out", "study", "--workers", "2", "--device", "cpu"),
        8,
        workers=True,
        slow=True,
    ),
    Scenario(
        "tune, two workers",
        command(
            *("tune", "features_default", *FEATURES, "--losses", "proxy_anchor", "npair", "--trials", "4"),
            *("--no-prune", "--workers", "2", "--device", "cpu", "--out", "tuned"),
        ),
        8,
        workers=True,
        slow=True,
    ),
]


def make_index(root: Path) -> Path:
    """Index the images, for the server."""
    index = Scenario("inputs", command("index", "RUN", "../inputs/photos", "-o", "../inputs/photos.index"), 0)
    run_to_the_end(index, root, [])
    return root / "inputs/photos.index"


# --- running and killing ---------------------------------------------------------------------------------------------


IMPORTED = (
    *(
        "torch._dynamo",
        "torch.export",
        "torchvision.io",
        "numba",
        "optuna",
        "scipy.stats",
        "sklearn.cluster",
        "PIL.Image",
    ),
    *(f"nearkin.cli.{name}" for name in ("train", "index", "export", "report", "bench", "tune")),
    *("nearkin.training.loop", "nearkin.bench.trials", "nearkin.bench.tune", "nearkin.metrics._count_numba"),
    *("nearkin.deploy.export", "nearkin.deploy.index.builder", "nearkin.report.page"),
)
PRELOADED = ["torture.forked_worker", "torch._dynamo", "optuna", "nearkin.bench.tune", "nearkin.bench.trials"]
PRELOADED += ["nearkin.training.loop", "nearkin.metrics._count_numba", "sklearn.cluster"]
_helpers: set[int] = set()  # processes of `multiprocessing` that are not workers


def warm_up(root: Path) -> None:
    """Import what the commands need, so that children do not; more, smaller units of work have more points to die."""
    os.environ |= {
        "NEARKIN_CACHE": str(root / "work" / "cache"),
        kill_points.VARIABLE: f"{root / 'orders'}{os.pathsep}{root / 'work'}",
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in filter(None, sys.path)),
    }
    multiprocessing.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()
    for name in IMPORTED:
        importlib.import_module(name)
    from nearkin.bench import executor
    from nearkin.deploy.index.builder import update_index
    from nearkin.models import frozen

    executor.POLL_INTERVAL = 0.1
    frozen._CHUNK = 8
    update_index.__kwdefaults__["batch_size"] = 8
    _helpers.update(_marked_processes(root / "orders"))


def _use_fork_server() -> None:
    """Let commands start their workers from the fork server of this script, which is not a child of theirs."""
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
    context = multiprocessing.get_context("forkserver")
    multiprocessing.get_context = lambda method=None: context  # type: ignore[assignment]
    main: Any = sys.modules["__main__"]
    main.__spec__ = main.__file__ = None  # workers are not to import this script


def attempt(scenario: Scenario, folder: Path, orders: Path) -> int:
    """Run it in a forked process. Returns its exit code; negative: the signal that ended it."""
    return wait_for(start(scenario, folder, orders), scenario.name)


def start(scenario: Scenario, folder: Path, orders: Path) -> int:
    """Start it in a forked process. Returns the process id."""
    pid = os.fork()
    if pid == 0:
        _run_child(scenario, folder, orders)
    return pid


def wait_for(pid: int, name: str) -> int:
    """Wait for a process of `start`. Returns its exit code."""
    deadline = time.monotonic() + MAX_SECONDS
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"{name}: still running after {MAX_SECONDS:g} s")


def _run_child(scenario: Scenario, folder: Path, orders: Path) -> None:
    code = 70
    try:
        _use_fork_server()
        os.chdir(folder)
        log = os.open(orders / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        save_count = kill_points.install(orders, folder)
        try:
            scenario.work()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        save_count()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait_for_workers(orders: Path) -> None:
    """Wait until no process with these orders is left: the workers of a killed command stop by themselves."""
    deadline = time.monotonic() + MAX_SECONDS
    while time.monotonic() < deadline:
        if _marked_processes(orders) <= _helpers:
            return
        time.sleep(0.1)
    raise AssertionError("workers of a killed command are still running")


def _marked_processes(orders: Path) -> set[int]:
    marker = f"{kill_points.VARIABLE}={orders}".encode()
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # of another user, or it has ended
            if marker in (path / "environ").read_bytes() and b") Z " not in (path / "stat").read_bytes():
                found.add(int(path.name))
    return found


def clean_folders(root: Path) -> tuple[Path, Path]:
    """Return empty folders to work in and for orders. The paths are always the same, as files contain them."""
    folders = root / "work", root / "orders"
    for path in folders:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
    return folders


def run_to_the_end(scenario: Scenario, root: Path, points: list[int]) -> tuple[dict[str, str], int, list[int], str]:
    """Repeat it until it ends by itself. Returns the digests of its files, kills, points passed, and its output."""
    folder, orders = clean_folders(root)
    kill_points.write_orders(orders, points)
    for _ in range(len(points) + 1):
        code = attempt(scenario, folder, orders)
        if scenario.workers and code:
            wait_for_workers(orders)
        if code != -signal.SIGKILL:
            break
    log = (orders / "log").read_text(errors="replace")
    assert code == 0, f"{scenario.name}: exit code {code}\n{log[-3000:]}"
    if scenario.workers:
        wait_for_workers(orders)
    return digests(folder), kill_points.kills(orders), kill_points.counts(orders), log


def torture(scenario: Scenario, root: Path, rng: random.Random, kills: int | None = None) -> Row:
    """Kill a scenario until the required number of kills is reached."""
    expected, _, passed, log = run_to_the_end(scenario, root, [])
    most = max(passed)
    needed, done, chains, lost = scenario.kills if kills is None else kills, 0, 0, 0
    tracebacks = log.count("Traceback")
    while done < needed:
        # Mostly early points: what a repeated command has left to do is short.
        points = [max(1, round(most * rng.random() ** 2)) for _ in range(min(5, needed - done))]
        found, killed, _, log = run_to_the_end(scenario, root, points)
        done, chains, tracebacks = done + killed, chains + 1, tracebacks + log.count("Traceback")
        if found != expected:
            names = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
            print(f"{scenario.name}: {', '.join(names)} differ after kills at {points}\n{log[-1500:]}", file=sys.stderr)
            shutil.copytree(root / "work", root / f"different {scenario.name} {chains}", dirs_exist_ok=True)
            lost += 1
    what = f"{chains} runs compared, {len(expected)} files each, {most} points per process"
    return Row(f"kill -9: {scenario.name}", done, done if not lost else 0, lost, tracebacks, what)


# --- comparing -------------------------------------------------------------------------------------------------------


def digests(folder: Path) -> dict[str, str]:
    """Return a digest of every file below a folder, without times, logs and locks."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and path.name not in {"lock", "env.json"} and path.suffix != ".lock" and "locks/" not in name:
            try:
                found[name] = hashlib.sha256(_content(path)).hexdigest()
            except Exception as error:  # a damaged file differs
                found[name] = f"{type(error).__name__}: {error}"
    return found


def _content(path: Path) -> bytes:
    if path.name in {"search.journal", "results.csv"}:
        return _search(path) if path.suffix == ".journal" else path.read_bytes()
    if path.suffix == ".json":
        return json.dumps(_without_times(json.loads(path.read_text())), sort_keys=True).encode()
    if path.suffix == ".jsonl":
        return json.dumps([_without_times(json.loads(line)) for line in path.read_text().splitlines()]).encode()
    if path.suffix == ".pt":
        return _checkpoint(path)
    if path.suffix == ".npz":
        import numpy as np

        with np.load(path) as arrays:
            return b"".join(name.encode() + arrays[name].tobytes() for name in sorted(arrays))
    if path.suffix == ".html":
        return re.sub(rb"[0-9.]+ (s|min|h)\b|20[0-9-]{8}[T ][0-9:.+]*", b"", path.read_bytes())
    return path.read_bytes()


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_times(item) for key, item in value.items() if key not in TIMES}
    return [_without_times(item) for item in value] if isinstance(value, list) else value


def _checkpoint(path: Path) -> bytes:
    import torch

    buffer = io.StringIO()

    def write(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            buffer.write(hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                if key not in TIMES:
                    buffer.write(f"{key}:")
                    write(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                write(item)
        else:
            buffer.write(f"{value!r} ")

    write(torch.load(path, weights_only=True))
    return buffer.getvalue().encode()


def _search(path: Path) -> bytes:
    """The trials of a search: settings and values, without times."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    storage = JournalStorage(JournalFileBackend(str(path)))
    return repr(
        sorted(
            (study.study_name, trial.number, trial.state.name, sorted(trial.params.items()), trial.values)
            for study in optuna.get_all_study_summaries(storage)
            for trial in optuna.load_study(study_name=study.study_name, storage=storage).trials
        )
    ).encode()
