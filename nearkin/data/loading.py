"""Threaded loading: images are read and augmented while the model processes the previous batch.

Threads, because decoders and torch's interpolation release the GIL: as fast as processes, without copying batches.
The work depends only on the row, so the number of threads does not affect the pixels.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from nearkin._common.progress import Reporter

T = TypeVar("T")
R = TypeVar("R")

_CHUNK_SIZE = 8  # items per task: enough to hide the cost of submitting it


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_in_threads(work: Callable[[T], R], items: Sequence[T], *, workers: int = 0) -> Iterator[list[R]]:
    """Apply a function to all items in threads and yield the results in order, in chunks."""

    def run(chunk: Sequence[T]) -> list[R]:
        return [work(item) for item in chunk]

    chunks = [items[start : start + _CHUNK_SIZE] for start in range(0, len(items), _CHUNK_SIZE)]
    if len(chunks) <= 1:  # not worth a thread
        return map(run, chunks)
    return prefetch(([partial(run, chunk)] for chunk in chunks), workers=workers, depth=64)


def map_with_progress(
    work: Callable[[T], R], items: Sequence[T], reporter: Reporter, label: str, *, unit: str = "img", workers: int = 0
) -> Iterator[R]:
    """Apply a function to all items in threads and yield the results in order, while a progress bar is shown."""
    with reporter.track(label, len(items), unit=unit) as bar:
        for chunk in map_in_threads(work, items, workers=workers):
            yield from chunk
            bar.advance(len(chunk))


def prefetch(jobs: Iterable[Sequence[Callable[[], R]]], *, workers: int = 0, depth: int = 2) -> Iterator[R]:
    """Run jobs ahead of their use in threads."""
    num_threads = torch.get_num_threads()
    # If each of our threads resized images with one torch thread per core, the cores would be oversubscribed.
    pool = ThreadPoolExecutor(workers or available_cores(), "nearkin-loading", torch.set_num_threads, (1,))
    pending: deque[list[Future[R]]] = deque()
    try:
        for tasks in jobs:
            pending.append([pool.submit(task) for task in tasks])
            if len(pending) > depth:
                first, *_ = [future.result() for future in pending.popleft()]
                yield first
        while pending:
            first, *_ = [future.result() for future in pending.popleft()]
            yield first
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(num_threads)  # the initializer also lowered the default for threads created later


def empty_batch(*shape: int) -> Tensor:
    """Allocate a uint8 batch in channels-last layout, as decoders produce it and convolutions prefer it."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=torch.uint8, memory_format=torch.channels_last)
