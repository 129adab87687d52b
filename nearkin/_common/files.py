"""Files shared between processes: atomic writes, locks, and NaN in JSON."""

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
    """Replace a file in one step, so that a crash leaves the old content or the new, never a part.

    Args:
        target: The file; its folder must exist.
        content: Bytes, or text to be encoded as UTF-8.
    """
    temporary = target.with_name(f"{target.name}.{os.getpid()}-{threading.get_native_id()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def file_lock(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Lock a file until the block ends.

    The kernel releases the lock when the process ends, so a killed process leaves no stale lock.

    Args:
        path: The lock file; created if missing.
        wait: Block until the lock is free.

    Yields:
        Whether the lock was acquired; always True with `wait`.
    """
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def nan_to_none(value: Any) -> Any:
    """Replace NaN and infinity by None, which JSON can hold, in nested dicts, lists and tuples.

    Args:
        value: Nested plain values.

    Returns:
        The same values; tuples become lists.

    Example:
        >>> nan_to_none({"interval": (0.5, math.nan)})
        {'interval': [0.5, None]}
    """
    if isinstance(value, dict):
        return {key: nan_to_none(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [nan_to_none(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def none_to_nan(value: Any) -> Any:
    """Undo `nan_to_none`, for data in which only numbers can be None.

    Args:
        value: Nested plain values, as read from JSON.

    Returns:
        The same values with NaN for None.
    """
    if isinstance(value, dict):
        return {key: none_to_nan(v) for key, v in value.items()}
    if isinstance(value, list):
        return [none_to_nan(v) for v in value]
    return math.nan if value is None else value
