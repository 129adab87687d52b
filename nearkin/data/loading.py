"""Work done ahead in threads: pictures are read and augmented while the model is busy with the batch before.

Threads and not processes: decoders and torch's scaling let go of Python's lock, so two threads decode as fast as two
processes, without copying batches between them and without a second import of torch. What a thread does depends on
nothing but the row, so that the number of threads changes no pixel.
"""

from __future__ import annotations

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

_PER_TASK = 8  # items that one thread takes at a time: enough to hide the cost of handing them over


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_in_threads(work: Callable[[T], R], items: Sequence[T], *, workers: int = 0) -> Iterator[list[R]]:
    """work(item) of all items in order, a few at a time; 0 workers means one per core."""
    parts = [items[start : start + _PER_TASK] for start in range(0, len(items), _PER_TASK)]
    if len(parts) <= 1:  # not worth a thread
        yield from ([work(item) for item in part] for part in parts)
        return

    def do(part: Sequence[T]) -> list[R]:
        return [work(item) for item in part]

    yield from prefetch(([partial(do, part)] for part in parts), workers=workers, keep=64)


def prefetch(jobs: Iterable[Sequence[Callable[[], R]]], *, workers: int = 0, keep: int = 2) -> Iterator[R]:
    """Run jobs in threads, each made of steps that may run side by side; yield each job's first result, in order.

    At most `keep` jobs are under way beyond the one that is waited for, so that memory stays bounded. An error in a
    step is raised when its job's turn comes.
    """
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(workers or available_cores(), "nearkin-loading", initializer=_stay_in_one_thread)
    under_way: deque[list[Future[R]]] = deque()
    try:
        for job in jobs:
            under_way.append([pool.submit(step) for step in job])
            if len(under_way) > keep:
                yield _results(under_way.popleft())
        while under_way:
            yield _results(under_way.popleft())
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(threads)  # the initializer also lowered what threads made later would start with


def _results(futures: list[Future[R]]) -> R:
    results = [future.result() for future in futures]
    return results[0]


def _stay_in_one_thread() -> None:
    # Each of our threads scaling an image with a thread per core would leave the cores fighting over tiny pieces.
    torch.set_num_threads(1)


def empty_batch(*shape: int) -> Tensor:
    """Bytes [B, C, H, W] for threads to fill, colours side by side: as decoders give them and convolutions like them.

    Under inference_mode an ordinary tensor could be written by the asking thread only.
    """
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=torch.uint8, memory_format=torch.channels_last)
