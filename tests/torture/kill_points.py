"""Kill this process with SIGKILL at the n-th point inside its work: an opened, renamed, flushed or locked file, or a
step of a progress bar (`sys.audit("nearkin.step")`).

The points are events of Python's audit hooks, so the package is tested as it is and pays nothing for them. A folder of
orders says where to die. Every process takes at most one order; an order is carried out at most once.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

VARIABLE = "NEARKIN_TORTURE"  # folder of orders, and the folder that is watched, for forked_worker.py
PATH_EVENTS = {"open", "os.rename", "os.remove", "os.truncate", "os.mkdir"}
OTHER_EVENTS = {"fcntl.flock", "nearkin.step", "os.fsync"}


def write_orders(folder: Path, points: list[int]) -> None:
    """Order one kill per number: at that point of a process."""
    for number, point in enumerate(points):
        (folder / f"{number:04d}.order").write_text(str(point))


def install(orders: Path, root: Path) -> Callable[[], None]:
    """Count the points in this process, those about files only below `root`; die at the one of an order, if any.

    Returns a function that saves the count, to be called at the end.
    """
    point = _take_order(orders)
    passed = 0

    def pass_point() -> None:
        nonlocal passed
        passed += 1
        if passed == point:
            fd = os.open(orders / f"{os.getpid()}.killed", os.O_CREAT)
            os.close(fd)
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in OTHER_EVENTS or (event in PATH_EVENTS and _writes(event, args) and _is_below(args[0], prefix)):
            pass_point()

    prefix = f"{root}{os.sep}"
    fsync = os.fsync  # not an audit event

    def counted_fsync(fd: int) -> None:
        pass_point()
        fsync(fd)

    os.fsync = counted_fsync  # type: ignore[assignment]

    def save_count() -> None:
        with open(orders / "counts", "a") as file:
            file.write(f"{passed}\n")

    sys.addaudithook(hook)
    return save_count


def counts(orders: Path) -> list[int]:
    """Return the number of points of every process that ended by itself."""
    with suppress(FileNotFoundError):
        return [int(line) for line in (orders / "counts").read_text().split()]
    return []


def kills(orders: Path) -> int:
    """Return the number of kills."""
    return len(list(orders.glob("*.killed")))


def _take_order(orders: Path) -> int:
    for order in sorted(orders.glob("*.order")):
        taken = order.with_suffix(f".taken-{os.getpid()}")
        with suppress(FileNotFoundError):  # another process took it
            order.rename(taken)
            return int(taken.read_text())
    return 0


def _writes(event: str, args: tuple[Any, ...]) -> bool:
    return event != "open" or bool(args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _is_below(path: Any, prefix: str) -> bool:
    return not isinstance(path, int) and os.path.abspath(os.fsdecode(path)).startswith(prefix)
