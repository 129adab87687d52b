"""Files that processes share: a crash leaves the old one or the new one, never a part; one process holds a lock."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_aside(target: Path, content: str | bytes) -> None:
    """Write beside the target, then rename over it."""
    aside = target.with_name(f"{target.name}.tmp")
    try:
        with open(aside, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def held(path: Path, *, wait: bool = False) -> Iterator[bool]:
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
