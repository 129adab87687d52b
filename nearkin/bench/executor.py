"""Workers of studies and searches: how they take trials, their processes on this machine, jobs of a SLURM cluster.

There is no queue and no coordinator: a worker runs every trial that it can lock. The lock is released when its process
dies, so another worker resumes the trial of a killed one, in the same run folder, from its checkpoint.
"""

import functools
import gc
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Literal, TypeVar

from nearkin import errors
from nearkin._common.processes import ignore_terminal_interrupts, interrupt_after
from nearkin._common.progress import Reporter, format_duration
from nearkin._common.words import counted

POLL_INTERVAL = 0.5  # seconds between checks of trials that other workers run, and of worker processes
REPORT_INTERVAL = 2.0  # minimum seconds between lines about short trials
STOP_SECONDS = 60.0  # for a worker to write its checkpoint
MAX_RESTARTS = 20  # of killed workers, per command
FAILED, INTERRUPTED = 2, 130  # exit codes of a worker: by an error, which it has sent, and by Ctrl-C

T = TypeVar("T")
Cluster = Literal["slurm", "local"]


def work(
    unfinished: Callable[[], list[T]],
    claim: Callable[[T], AbstractContextManager[bool]],
    run: Callable[[T], str | None],
    *,
    total: int,
    cost: Callable[[T], float],
    device: str,
    reporter: Reporter,
) -> int:
    """Run every trial that can be claimed until none is unfinished; `run` returns None for one that cannot run now."""
    from nearkin.training.device import choose_device

    choose_device(device)  # fail here rather than in every trial
    count, waiting, start, last_report = 0, False, time.monotonic(), 0.0
    remaining = unfinished()
    initial_cost = sum(map(cost, remaining))
    while remaining:
        message = None
        for trial in remaining:
            with claim(trial) as claimed:
                message = run(trial) if claimed else None
            if message is not None:
                break
        else:  # wait for the trials of other workers, in case one of them dies
            if not waiting:
                reporter.info(f"waiting for {counted(len(remaining), 'trial')} of other workers")
            time.sleep(POLL_INTERVAL)
        count, waiting = count + (message is not None), message is None
        remaining, now = unfinished(), time.monotonic()
        if message and (now - last_report >= REPORT_INTERVAL or not remaining or "FAILED" in message):
            last_report = now
            left = sum(map(cost, remaining))
            duration = format_duration(left * (now - start) / max(initial_cost - left, 1e-9))
            reporter.info(f"trial {total - len(remaining)}/{total}  {message}  {duration} left")
    return count


def failure_reason(error: Exception, folder: Path, log: str) -> str:
    """Return why a trial failed, in one line; write the traceback of an unexpected error to a log in `folder`."""
    if isinstance(error, errors.DataError | errors.RunError | errors.MissingExtraError | OSError):
        raise error  # no data, no disk space, no package: every trial would fail
    message = " ".join(str(error).splitlines()[:1])
    if isinstance(error, errors.TrainingFailedError | errors.ConfigError):
        return message
    (folder / log).write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    return f"{type(error).__name__}: {message} (see {log})"


def delete_checkpoints(run: Path, *, keep_best: bool) -> None:
    """Delete the checkpoints of a finished trial: those of hundreds of trials would fill a disk."""
    for name in ("last.pt", "previous.pt", *(() if keep_best else ("best.pt", "vectors.npz"))):
        (run / name).unlink(missing_ok=True)


def default_workers(workers: int, device: str) -> int:
    """Return the number of workers: 0 means one per GPU, or one per core; a single named device runs one at a time."""
    if workers < 0:
        raise errors.ConfigError(f"--workers: expected 0 or more, got {workers}.")
    return workers or _num_gpus(device) or (threads_for(1) if device in ("auto", "cpu") else 1)


def threads_for(workers: int) -> int:
    """Return the number of threads per worker when `workers` share this machine's cores."""
    from nearkin.data.loading import available_cores

    return max(1, available_cores() // workers)


def _num_gpus(device: str) -> int:
    """Return the number of GPUs that a device without a number stands for."""
    import torch

    return torch.cuda.device_count() if device in ("auto", "cuda") else 0


@dataclass(frozen=True)
class _Worker:
    process: SpawnProcess
    pipe: Connection  # the worker sends its error; it stops when this end is closed
    device: str


def run_workers(
    task: Callable[..., object],
    workers: int,
    unfinished: Callable[[], int],
    total: int,
    device: str,
    reporter: Reporter,
) -> None:
    """Run `task(device=..., reporter=...)` in worker processes, until no trial is unfinished.

    A killed worker is replaced; an error in one stops all. When this process dies, its workers see their pipe close,
    write a checkpoint and stop. Not a process pool: those give up when a worker is killed.
    """
    if workers > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads_for(workers)))  # workers inherit it
    running: list[_Worker] = []
    restarts, gpus = 0, _num_gpus(device)
    try:
        for index in range(min(workers, unfinished())):
            running.append(_start(task, f"cuda:{index % gpus}" if gpus else device, reporter.quiet))
        while running:
            time.sleep(POLL_INTERVAL)
            for worker in list(running):
                code = worker.process.exitcode
                if code is None:
                    continue
                running.remove(worker)
                if code == FAILED:
                    raise errors.RunError(f"A worker stopped: {worker.pipe.recv()}")
                worker.pipe.close()
                if code == INTERRUPTED:
                    raise KeyboardInterrupt
                if code == 0 or not unfinished():
                    continue
                if code > 0:
                    raise errors.RunError(f"A worker stopped (exit code {code}); its error is above.")
                restarts += 1
                if restarts > MAX_RESTARTS:
                    raise errors.RunError(
                        f"Workers were killed {restarts} times (last by signal {-code}). If memory runs out, use fewer "
                        "--workers. Finished trials are kept; run the same command again to resume."
                    )
                reporter.info(f"a worker was killed (signal {-code}); restarting it to resume its trial")
                running.append(_start(task, worker.device, reporter.quiet))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped with {total - unfinished()} of {total} trials done") from None
    finally:
        for worker in running:
            worker.pipe.close()  # every worker writes its checkpoint, then exits
        for worker in running:
            worker.process.join(STOP_SECONDS)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()


def _start(task: Callable[..., object], device: str, quiet: bool) -> _Worker:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_run_child, args=(functools.partial(task, device=device), theirs, quiet))
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited, until the worker can handle an interrupt
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, handler)
    theirs.close()
    return _Worker(process, ours, device)


def _run_child(task: Callable[..., object], pipe: Connection, quiet: bool) -> None:
    # Ctrl-C reaches only the parent, which forwards it once: a second one would interrupt the checkpoint.
    ignore_terminal_interrupts()
    stop_after(pipe.recv)  # until the parent closes its end or dies
    try:
        task(reporter=Reporter(quiet=quiet))
    except (errors.UserError, OSError) as error:
        with suppress(OSError):  # nobody reads it any more
            pipe.send(str(error))
        sys.exit(FAILED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def stop_after(wait: Callable[[], object] | None) -> None:
    """Interrupt this worker once `wait` returns in a thread; it then writes its checkpoint and exits."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores SIGINT in background jobs
    if wait is not None:
        interrupt_after(wait)


@dataclass(frozen=True)
class Slurm:
    """Resources of a cluster job."""

    partition: str | None = None  # Partition; the default is the cluster's.
    hours: float = 24.0  # Time limit of a job; one that reaches it is requeued and resumes.
    gpus: int = 1  # GPUs per job; 0 trains on CPU.
    cores: int = 8  # CPU cores per job.
    memory_gb: int = 32  # Memory per job, in GB.


@dataclass(frozen=True)
class ClusterJob:
    """A task that submitit requeues unchanged on timeout or preemption: its progress is stored with the trials."""

    task: Callable[[], object]

    def __call__(self) -> None:
        self.task()

    def checkpoint(self) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def submit(task: Callable[[], object], workers: int, slurm: Slurm, folder: Path, *, cluster: Cluster) -> list[str]:
    """Submit workers as jobs, with their logs in `folder`; wait for local ones. Returns the ids of the jobs."""
    submitit: Any = errors.import_extra("submitit", extra="bench")
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
    except RuntimeError as error:
        raise errors.ConfigError(f"--launch slurm: SLURM not found on this machine ({error}).") from None
    executor.update_parameters(
        name="nearkin-tune",
        timeout_min=max(1, round(60 * slurm.hours)),
        gpus_per_node=slurm.gpus if cluster == "slurm" else 0,
        cpus_per_task=slurm.cores,
        mem_gb=slurm.memory_gb,
        **({"slurm_partition": slurm.partition} if slurm.partition else {}),
    )
    with executor.batch() if cluster == "slurm" else nullcontext():  # one job array
        jobs = [executor.submit(ClusterJob(task)) for _ in range(workers)]
    lost = [job.exception() for job in jobs if job.exception()] if cluster == "local" else []
    if lost:
        raise errors.ProcessLostError(f"--launch local: a job failed (logs: {folder}):\n{lost[0]}")
    ids = [job.job_id for job in jobs]
    del jobs
    gc.collect()  # local jobs are reference cycles, and raise if they are collected at interpreter exit
    return ids
