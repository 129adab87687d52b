"""Workers of a search: processes on this machine, or jobs of a SLURM cluster."""

from __future__ import annotations

import gc
import multiprocessing
import signal
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from nearkin._common.processes import ignore_terminal_interrupts, interrupt_after
from nearkin._common.progress import Reporter
from nearkin.bench.machine import threads_for, worker_device
from nearkin.errors import ConfigError, ProcessLostError, UserError, import_extra

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from nearkin.bench.tune import Search

INTERRUPTED = 130  # exit code of a worker stopped by Ctrl-C


@dataclass(frozen=True)
class Slurm:
    """Resources of a cluster job."""

    partition: str | None = None
    """Partition; the default is the cluster's."""
    hours: float = 24.0
    """Time limit of a job; one that reaches it is requeued and resumes."""
    gpus: int = 1
    """GPUs per job; 0 trains on CPU."""
    cores: int = 8
    """CPU cores per job."""
    memory_gb: int = 32
    """Memory per job, in GB."""


@dataclass(frozen=True)
class Worker:
    """`tune.work` as a picklable callable for another process."""

    search: Search
    device: str = "auto"  # device to train on
    quiet: bool = False  # report nothing
    threads: int = 0  # threads of torch; 0 keeps the default

    def __call__(self) -> None:
        from nearkin.bench.tune import work

        if self.threads:
            import torch

            torch.set_num_threads(self.threads)
        work(self.search, device=self.device, reporter=Reporter(quiet=self.quiet))

    def checkpoint(self) -> Any:
        """Return what submitit requeues on timeout or preemption: the same worker, since the search stores progress."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def run_local(search: Search, workers: int, *, device: str = "auto", quiet: bool = False) -> None:
    """Run a search in this process, or in several that share this machine's cores and GPUs."""
    if workers == 1:
        Worker(search, device, quiet)()
        return
    spawn = multiprocessing.get_context("spawn")
    threads = threads_for(workers)
    stop_receiver, stop_sender = spawn.Pipe(duplex=False)
    processes = [
        spawn.Process(target=_run_child, args=(Worker(search, worker_device(device, k), quiet, threads), stop_receiver))
        for k in range(workers)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    except KeyboardInterrupt:
        stop_sender.close()  # every worker writes its checkpoint, then exits
        for process in processes:
            if process.pid is not None:
                process.join()
        raise KeyboardInterrupt("stopped") from None
    codes = [process.exitcode or 0 for process in processes]
    if all(code == INTERRUPTED for code in codes):
        raise KeyboardInterrupt("stopped")
    if all(codes):  # a single surviving worker runs the trials of the others
        raise ProcessLostError(
            f"tune: all {workers} workers failed (exit codes {', '.join(map(str, codes))}). "
            "Run the same command again to resume."
        )
    if any(codes) and not quiet:
        failed = sum(map(bool, codes))
        print(f"{failed} of {workers} workers failed; the others completed their trials", file=sys.stderr)


def _run_child(worker: Worker, stop: Connection) -> None:
    # Ctrl-C reaches only the parent, which forwards it once: a second one would interrupt the checkpoint.
    ignore_terminal_interrupts()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores SIGINT in background jobs
    interrupt_after(stop.recv)  # until the parent closes its end or dies
    try:
        worker()
    except UserError as error:
        print(f"nearkin: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def submit(
    search: Search, workers: int, slurm: Slurm, *, cluster: Literal["slurm", "local"] = "slurm", device: str = "auto"
) -> list[str]:
    """Submit workers as jobs."""
    submitit: Any = import_extra("submitit", extra="bench")
    try:
        executor = submitit.AutoExecutor(folder=search.out / "jobs", cluster=cluster)
    except RuntimeError as error:
        raise ConfigError(f"--launch slurm: SLURM not found on this machine ({error}).") from None
    partition = {"slurm_partition": slurm.partition} if slurm.partition else {}
    executor.update_parameters(
        name="nearkin-tune",
        timeout_min=max(1, round(60 * slurm.hours)),
        gpus_per_node=slurm.gpus if cluster == "slurm" else 0,
        cpus_per_task=slurm.cores,
        mem_gb=slurm.memory_gb,
        **partition,
    )
    worker = Worker(replace(search, out=search.out.resolve()), device)
    with executor.batch() if cluster == "slurm" else nullcontext():  # one job array
        jobs = [executor.submit(worker) for _ in range(workers)]
    if cluster == "local":
        errors = [job.exception() for job in jobs if job.exception()]
        if errors:
            raise ProcessLostError(f"--launch local: a job failed (logs: {search.out / 'jobs'}):\n{errors[0]}")
    ids = [job.job_id for job in jobs]
    del jobs
    gc.collect()  # local jobs are reference cycles, and raise if they are collected at interpreter exit
    return ids
