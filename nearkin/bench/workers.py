"""Worker processes of `nearkin bench run`, with progress and the time left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from nearkin._common.processes import interrupt_after
from nearkin._common.progress import Reporter, format_duration
from nearkin.bench.estimates import Estimate
from nearkin.bench.machine import threads_for, worker_device
from nearkin.bench.study import Trial
from nearkin.bench.trials import Outcome, StudyFolder, work
from nearkin.errors import RunError

POLL_INTERVAL = 0.5  # seconds between checks for new outcomes
MAX_RESTARTS = 20  # of killed workers, per command


def run_workers(
    folder: StudyFolder, runs: Path, estimate: Estimate, *, workers: int, device: str, reporter: Reporter
) -> None:
    """Run the remaining trials of a study in worker processes; return when every trial has an outcome.

    A killed worker is replaced. When this process dies, its workers see their standard input close, write a checkpoint
    and stop.
    """
    monitor = ProgressMonitor(folder, estimate, reporter)
    if not monitor.remaining:
        return
    count = min(workers, len(monitor.remaining))
    started = [_start(folder, runs, worker_device(device, index), workers) for index in range(count)]
    restarts = 0
    try:
        while monitor.remaining:
            time.sleep(POLL_INTERVAL)
            monitor.update()
            for index, worker in enumerate(started):
                code = worker.process.poll()
                if code is None or not monitor.remaining:
                    continue
                if code >= 0:
                    monitor.update()
                    if code == 0 or not monitor.remaining:
                        continue
                    raise RunError(f"A worker stopped (exit code {code}): {_error_message(worker)}")
                restarts += 1
                if restarts > MAX_RESTARTS:
                    raise RunError(
                        f"Workers were killed {restarts} times (last by signal {-code}). If memory runs out, use fewer "
                        "--workers. Finished trials are kept; run the same command again to resume."
                    )
                reporter.info(f"a worker was killed (signal {-code}); restarting it to resume its trial")
                worker.stderr.close()
                started[index] = _start(folder, runs, worker_device(device, index), workers)
    except KeyboardInterrupt:
        done = len(folder.trials) - len(monitor.remaining)
        raise KeyboardInterrupt(f"stopped with {done} of {len(folder.trials)} trials done") from None
    finally:
        for worker in started:
            _stop(worker)


def run_worker(folder: StudyFolder, runs: Path, device: str, *, detached: bool = False) -> None:
    """Run trials in this process, as a worker."""
    # A shell ignores SIGINT in background jobs; a worker must receive it to stop with a checkpoint.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not detached:
        interrupt_after(_wait_for_parent)
    work(folder, runs, device=device, reporter=Reporter(quiet=True))


class ProgressMonitor:
    """Reports outcomes of a study as they appear, with the time left.
    Attributes:
        remaining: Trial id -> trial, for trials without an outcome.
    """

    def __init__(self, folder: StudyFolder, estimate: Estimate, reporter: Reporter) -> None:
        self.folder, self.estimate, self.reporter = folder, estimate, reporter
        self.start = time.monotonic()
        self.remaining: dict[str, Trial] = {t.id: t for t in folder.trials if folder.outcome(t) is None}
        self.finished_estimate = 0.0  # estimated seconds of the trials finished since the start
        done = len(folder.trials) - len(self.remaining)
        if done:
            reporter.info(f"{done} of {len(folder.trials)} trials already complete")

    def update(self) -> None:
        """Report the trials that finished since the last call."""
        for trial in list(self.remaining.values()):
            outcome = self.folder.outcome(trial)
            if outcome is not None:
                del self.remaining[trial.id]
                self.finished_estimate += self.estimate.seconds(trial)
                self.reporter.info(self._line(trial, outcome))

    def _line(self, trial: Trial, outcome: Outcome) -> str:
        total = len(self.folder.trials)
        metric = self.folder.study.metric
        result = (
            f"{metric} {100 * outcome.test[metric]:.1f}" if outcome.test is not None else f"FAILED: {outcome.reason}"
        )
        done = total - len(self.remaining)
        return f"{done:>4}/{total}  {trial}  {result}  {outcome.seconds:.0f} s  {self._time_left()}"

    def _time_left(self) -> str:
        remaining = sum(self.estimate.seconds(trial) for trial in self.remaining.values())
        pace = (time.monotonic() - self.start) / max(self.finished_estimate, 1e-9)
        return f"{format_duration(remaining * pace)} left"


@dataclass(frozen=True)
class Worker:
    """A worker process and the file that collects its standard error."""

    process: subprocess.Popen[bytes]
    stderr: IO[bytes]


def _start(folder: StudyFolder, runs: Path, device: str, workers: int) -> Worker:
    environment = {"OMP_NUM_THREADS": str(threads_for(workers)), **os.environ} if workers > 1 else dict(os.environ)
    command = [sys.executable, "-m", "nearkin", "bench", "work", str(folder.path), "--runs", str(runs)]
    stderr = tempfile.TemporaryFile()  # noqa: SIM115 (an unread pipe would fill up and block the worker)
    process = subprocess.Popen(
        [*command, "--device", device],
        stdin=subprocess.PIPE,  # stays open as long as this process lives
        stderr=stderr,
        stdout=subprocess.DEVNULL,
        env=environment,
        # Ctrl-C reaches only this process, which then stops the workers one by one.
        start_new_session=True,
        creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # the same on Windows
    )
    return Worker(process, stderr)


def _stop(worker: Worker) -> None:
    """Ask a worker to write its checkpoint and exit; kill it after a minute."""
    process = worker.process
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    worker.stderr.close()


def _error_message(worker: Worker) -> str:
    """Return the error that ended a worker, which may have several lines, without the warnings before it."""
    worker.stderr.seek(0)
    text = worker.stderr.read().decode(errors="replace").strip()
    _, prefix, error = f"\n{text}".rpartition("\nnearkin: ")
    return error if prefix else text.rpartition("\n")[2] or "no error message."


def _wait_for_parent() -> None:
    # Returns when the parent closes the pipe or dies. Not through sys.stdin: a thread that waits in its buffer makes
    # Python abort when the worker exits first, and an ordinary error would look like a kill.
    while os.read(0, 1):
        pass
