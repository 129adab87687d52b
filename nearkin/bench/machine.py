"""The share of this machine that each of several workers gets: cores, and GPUs in round-robin order."""

from __future__ import annotations


def default_workers(workers: int, device: str) -> int:
    """Return the number of training runs at a time.

    Example:
        >>> default_workers(3, "cpu")
        3
    """
    if workers:
        return workers
    if device in ("auto", "cuda") and _num_gpus():
        return _num_gpus()
    return _num_cores() if device in ("auto", "cpu") else 1  # a single named device runs one at a time


def threads_for(workers: int) -> int:
    """Return the number of threads per worker when `workers` share this machine's cores."""
    return max(1, _num_cores() // workers)


def worker_device(device: str, worker: int) -> str:
    """Return the device of a worker."""
    if device not in ("auto", "cuda"):
        return device
    count = _num_gpus()
    return f"cuda:{worker % count}" if count else device


def _num_cores() -> int:
    from nearkin.data.loading import available_cores

    return available_cores()


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()
