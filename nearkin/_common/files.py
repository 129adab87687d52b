"""Files that processes share: a crash leaves the old one or the new one, never a part; one process holds a lock."""

from __future__ import annotations

import fcntl
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def atomic_write(target: Path, content: str | bytes) -> None:
    """Write beside the target, under a name that no other writer takes, then rename over it."""
    aside = target.with_name(f"{target.name}.{os.getpid()}-{threading.get_native_id()}.tmp")
    try:
        with open(aside, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def file_lock(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Whether this lock file is ours, until the block ends; with `wait` it will be.

    The kernel lets go of it with the process, however that ends, so a killed one leaves nothing behind.
    """
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def nan_to_none(value: Any) -> Any:
    """For JSON, which has no NaN: None stands for it, in whatever lists and dicts hold.

    >>> nan_to_none({"interval": (0.5, math.nan)})
    {'interval': [0.5, None]}
    """
    if isinstance(value, dict):
        return {key: nan_to_none(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [nan_to_none(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def none_to_nan(value: Any) -> Any:
    """What `nan_to_none` was given, where nothing but numbers can be missing."""
    if isinstance(value, dict):
        return {key: none_to_nan(each) for key, each in value.items()}
    if isinstance(value, list):
        return [none_to_nan(each) for each in value]
    return math.nan if value is None else value
