"""Preloaded by the fork server from which workers of studies and searches start, so that they need not import torch.

Each worker takes an order of its own.
"""

from __future__ import annotations

import os
from multiprocessing import util
from pathlib import Path

from nearkin.bench import executor
from torture import kill_points


class _Marker:
    """An object that the registry of `multiprocessing` may refer to."""


MARKER = _Marker()
executor.POLL_INTERVAL = 0.1


def _begin(_: object) -> None:
    orders, root = os.environ[kill_points.VARIABLE].split(os.pathsep)
    util.Finalize(None, kill_points.install(Path(orders), Path(root)), exitpriority=0)


util.register_after_fork(MARKER, _begin)
