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

T = TypeVar("T")
R = TypeVar("R")

_CHUNK_SIZE = 8  # items per task: enough to hide the cost of submitting it


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_in_threads(work: Callable[[T], R], items: Sequence[T], *, workers: int = 0) -> Iterator[list[R]]:
    """Apply a function to all items in threads and yield the results in order, in chunks."""
    chunks = [items[start : start + _CHUNK_SIZE] for start in range(0, len(items), _CHUNK_SIZE)]
    if len(chunks) <= 1:  # not worth a thread
        yield from ([work(item) for item in chunk] for chunk in chunks)
        return

    def run(chunk: Sequence[T]) -> list[R]:
        return [work(item) for item in chunk]

    yield from prefetch(([partial(run, chunk)] for chunk in chunks), workers=workers, depth=64)


def prefetch(jobs: Iterable[Sequence[Callable[[], R]]], *, workers: int = 0, depth: int = 2) -> Iterator[R]:
    """Run jobs ahead of their use in threads."""
    num_threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(workers or available_cores(), "nearkin-loading", initializer=_use_one_torch_thread)
    pending: deque[list[Future[R]]] = deque()
    try:
        for tasks in jobs:
            pending.append([pool.submit(task) for task in tasks])
            if len(pending) > depth:
                yield _first_result(pending.popleft())
        while pending:
            yield _first_result(pending.popleft())
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(num_threads)  # the initializer also lowered the default for threads created later


def _first_result(futures: list[Future[R]]) -> R:
    results = [future.result() for future in futures]
    return results[0]


def _use_one_torch_thread() -> None:
    # If each of our threads resized images with one torch thread per core, the cores would be oversubscribed.
    torch.set_num_threads(1)


def empty_batch(*shape: int) -> Tensor:
    """Allocate a uint8 batch in channels-last layout, as decoders produce it and convolutions prefer it."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=torch.uint8, memory_format=torch.channels_last)
