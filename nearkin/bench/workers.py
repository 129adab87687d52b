"""Starting workers and watching them: `nearkin bench run` with its progress and the time left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from nearkin._common.progress import Reporter, format_duration
from nearkin.bench.estimates import Estimate
from nearkin.bench.machine import device_of, threads_for
from nearkin.bench.study import Trial
from nearkin.bench.trials import Outcome, StudyFolder, work
from nearkin.errors import RunError

LOOK = 0.5  # seconds between looks at what is done
RESTARTS = 20  # of workers that were killed, over a whole run


def run(folder: StudyFolder, runs: Path, estimate: Estimate, *, workers: int, device: str, reporter: Reporter) -> None:
    """Run what is left of a study in so many processes; returns when every trial has an outcome.

    A worker that is killed is replaced. When this process dies, its workers see their input end, write a checkpoint
    and stop.
    """
    watch = Watch(folder, estimate, workers, reporter)
    if not watch.left:
        return
    count = min(workers, len(watch.left))
    started = [_start(folder, runs, device_of(device, number), workers) for number in range(count)]
    restarts = 0
    try:
        while watch.left:
            time.sleep(LOOK)
            watch.look()
            for at, worker in enumerate(started):
                code = worker.process.poll()
                if code is None or not watch.left:
                    continue
                if code >= 0:
                    watch.look()
                    if code == 0 or not watch.left:
                        continue
                    raise RunError(f"A worker stopped (exit code {code}): {_last_words(worker)}")
                restarts += 1
                if restarts > RESTARTS:
                    raise RunError(
                        f"Workers were killed {restarts} times (last by signal {-code}). If the memory runs out, "
                        "use fewer --workers. What is done is kept; the same command goes on."
                    )
                reporter.info(f"a worker was killed (signal {-code}); its trial is taken up again")
                worker.said.close()
                started[at] = _start(folder, runs, device_of(device, at), workers)
    except KeyboardInterrupt:
        done = len(folder.trials) - len(watch.left)
        raise KeyboardInterrupt(f"stopped with {done} of {len(folder.trials)} trials done") from None
    finally:
        for worker in started:
            _stop(worker)


def serve_as_worker(folder: StudyFolder, runs: Path, device: str, *, detached: bool = False) -> None:
    """What a started worker does; unless detached it stops, as by Ctrl-C, when the one that started it is gone."""
    # A shell makes what it starts in the background deaf to SIGINT; a worker must hear it, to stop with a checkpoint.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not detached:
        threading.Thread(target=_stop_with_parent, daemon=True).start()
    work(folder, runs, device=device, reporter=Reporter(quiet=True))


class Watch:
    """What is done of a study, said as it happens, with the time that the rest will take."""

    def __init__(self, folder: StudyFolder, estimate: Estimate, workers: int, reporter: Reporter) -> None:
        self.folder, self.estimate, self.workers, self.reporter = folder, estimate, workers, reporter
        self.began = time.monotonic()
        self.left: dict[str, Trial] = {t.id: t for t in folder.trials if folder.outcome(t) is None}
        self.first = len(self.left)
        self.spent = 0.0  # what the trials done in this sitting had been estimated at
        if self.first < len(folder.trials):
            reporter.info(f"{len(folder.trials) - self.first} of {len(folder.trials)} trials are done already")

    def look(self) -> None:
        for trial in list(self.left.values()):
            outcome = self.folder.outcome(trial)
            if outcome is not None:
                del self.left[trial.id]
                self.spent += self.estimate.seconds(trial)
                self.reporter.info(self._line(trial, outcome))

    def _line(self, trial: Trial, outcome: Outcome) -> str:
        total = len(self.folder.trials)
        metric = self.folder.study.metric
        found = (
            f"{metric} {100 * outcome.test[metric]:.1f}" if outcome.test is not None else f"FAILED: {outcome.reason}"
        )
        return f"{total - len(self.left):>4}/{total}  {trial}  {found}  {outcome.seconds:.0f} s  {self._time_left()}"

    def _time_left(self) -> str:
        ahead = sum(self.estimate.seconds(trial) for trial in self.left.values())
        pace = (time.monotonic() - self.began) / max(self.spent, 1e-9)
        return f"{format_duration(ahead * pace)} left"


@dataclass(frozen=True)
class Worker:
    """A process that was started, and what it writes to its error output."""

    process: subprocess.Popen[bytes]
    said: IO[bytes]


def _start(folder: StudyFolder, runs: Path, device: str, workers: int) -> Worker:
    environment = {"OMP_NUM_THREADS": str(threads_for(workers)), **os.environ} if workers > 1 else dict(os.environ)
    command = [sys.executable, "-m", "nearkin", "bench", "work", str(folder.path), "--runs", str(runs)]
    said = tempfile.TemporaryFile()  # noqa: SIM115 (a pipe that nobody reads would fill up and stop the worker)
    process = subprocess.Popen(
        [*command, "--device", device],
        stdin=subprocess.PIPE,  # held open for as long as this process lives
        stderr=said,
        stdout=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # Ctrl-C goes to this process alone, which then stops them one by one
    )
    return Worker(process, said)


def _stop(worker: Worker) -> None:
    """Ask a worker to write its checkpoint and end; do not wait for ever."""
    process = worker.process
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
    assert process.stdin is not None
    process.stdin.close()
    worker.said.close()


def _last_words(worker: Worker) -> str:
    """The error that ended a worker, which may have several lines, without the warnings before it."""
    worker.said.seek(0)
    text = worker.said.read().decode(errors="replace").strip()
    _, named, error = f"\n{text}".rpartition("\nnearkin: ")
    return error if named else text.rpartition("\n")[2] or "it said nothing."


def _stop_with_parent() -> None:
    # Ends when the other side is closed, by its will or by its death. Not through sys.stdin: a thread that waits in its
    # buffer makes Python abort when the worker ends first, and an error of its own would look like a kill.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGINT)
