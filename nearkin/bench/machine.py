"""What each of several workers gets of this machine: cores, and GPUs in turn."""

from __future__ import annotations


def default_workers(asked: int, device: str) -> int:
    """How many trainings at a time: as asked; for 0 one per GPU where training is on GPUs, else one per core.

    >>> default_workers(3, "cpu")
    3
    """
    if asked:
        return asked
    if device in ("auto", "cuda") and _gpus():
        return _gpus()
    return _cores() if device in ("auto", "cpu") else 1  # else one device that is named


def threads_for(workers: int) -> int:
    """Cores of each of so many workers."""
    return max(1, _cores() // workers)


def device_of(device: str, worker: int) -> str:
    """The device of a worker by its number: GPUs are dealt in turn, anything else is what was asked for."""
    if device not in ("auto", "cuda"):
        return device
    count = _gpus()
    return f"cuda:{worker % count}" if count else device


def _cores() -> int:
    from nearkin.data.loading import available_cores

    return available_cores()  # of a job with 4 of 64 cores: 4


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()
