"""Workers of a search: processes of this machine, or jobs of a SLURM cluster."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from nearkin._common.progress import Reporter
from nearkin.bench.machine import device_of, threads_for
from nearkin.errors import ConfigError, ProcessLostError, UserError, import_extra

if TYPE_CHECKING:
    from nearkin.bench.tune import Search

STOPPED = 130  # exit code of a worker that Ctrl-C ended


@dataclass(frozen=True)
class Slurm:
    """What a job of the cluster asks for."""

    partition: str | None = None
    """By default the cluster's own."""
    hours: float = 24.0
    """Longest time of a job; one that is ended goes on when it is queued again."""
    gpus: int = 1
    """GPUs of a job; 0 trains on its cores."""
    cores: int = 8
    """Cores of a job."""
    memory_gb: int = 32
    """Memory of a job."""


@dataclass(frozen=True)
class Worker:
    """`work` as something that can be sent to another process."""

    search: Search
    device: str = "auto"
    quiet: bool = False
    threads: int = 0  # of torch; 0 leaves them as they are

    def __call__(self) -> None:
        from nearkin.bench.tune import work

        if self.threads:
            import torch

            torch.set_num_threads(self.threads)
        work(self.search, device=self.device, reporter=Reporter(quiet=self.quiet))

    def checkpoint(self) -> Any:
        """What submitit queues again when a job's time is up or its place is taken: the search knows how far it is."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def run_local(search: Search, workers: int, *, device: str = "auto", quiet: bool = False) -> None:
    """Run the search in this process, or in several that share the machine's cores and GPUs."""
    if workers == 1:
        Worker(search, device, quiet)()
        return
    spawn = multiprocessing.get_context("spawn")
    threads = threads_for(workers)
    processes = [
        spawn.Process(target=_child, args=(Worker(search, device_of(device, k), quiet, threads),))
        for k in range(workers)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    except KeyboardInterrupt:
        for process in processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGINT)  # and it writes its checkpoint
        for process in processes:
            if process.pid is not None:
                process.join()
        raise KeyboardInterrupt("stopped") from None
    ended = [process.exitcode or 0 for process in processes]
    if all(code == STOPPED for code in ended):
        raise KeyboardInterrupt("stopped")
    if all(ended):  # one that is left runs what the others dropped
        raise ProcessLostError(
            f"tune: all {workers} workers ended early (exit codes {', '.join(map(str, ended))}). "
            "The same command goes on where they stopped."
        )
    if any(ended) and not quiet:
        print(f"{sum(map(bool, ended))} of {workers} workers ended early; the others ran their trials", file=sys.stderr)


def _child(worker: Worker) -> None:
    os.setsid()  # Ctrl-C goes to the command alone, which passes it on once: a second would cut the checkpoint off
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes what it starts in the background deaf
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    try:
        worker()
    except UserError as error:
        print(f"nearkin: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(STOPPED)


def _stop_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGINT)


def submit(
    search: Search, workers: int, slurm: Slurm, *, cluster: Literal["slurm", "local"] = "slurm", device: str = "auto"
) -> list[str]:
    """Queue workers as jobs and return their numbers; "local" runs them here, as submitit would, to their end."""
    submitit: Any = import_extra("submitit", "bench")
    try:
        executor = submitit.AutoExecutor(folder=search.out / "jobs", cluster=cluster)
    except RuntimeError as error:
        raise ConfigError(f"--launch slurm: there is no SLURM on this machine ({error}).") from None
    where = {"slurm_partition": slurm.partition} if slurm.partition else {}
    executor.update_parameters(
        name="nearkin-tune",
        timeout_min=max(1, round(60 * slurm.hours)),
        gpus_per_node=slurm.gpus if cluster == "slurm" else 0,
        cpus_per_task=slurm.cores,
        mem_gb=slurm.memory_gb,
        **where,
    )
    worker = Worker(replace(search, out=search.out.resolve()), device)
    with executor.batch() if cluster == "slurm" else nullcontext():  # one array of jobs
        jobs = [executor.submit(worker) for _ in range(workers)]
    if cluster == "local":
        failed = [job.exception() for job in jobs if job.exception()]
        if failed:
            raise ProcessLostError(f"--launch local: a job failed, {search.out / 'jobs'} has more:\n{failed[0]}")
    numbers = [job.job_id for job in jobs]
    del jobs
    gc.collect()  # local jobs refer to themselves, and stumble if they are still there when Python ends
    return numbers
