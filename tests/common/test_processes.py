"""Whether the machine is busy."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from nearkin._common.processes import other_processes_run


@pytest.mark.skipif(not Path("/proc/loadavg").exists(), reason="without /proc the load average takes a minute")
def test_a_busy_process_is_seen():
    competitor = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        deadline = time.monotonic() + 20
        while not other_processes_run():
            assert time.monotonic() < deadline
    finally:
        competitor.kill()
        competitor.wait()


@pytest.mark.parametrize(("running", "busy"), [(1, False), (2, True), (9, True)])
def test_only_tasks_that_run_beside_us_count(tmp_path, running, busy):
    file = tmp_path / "loadavg"
    file.write_text(f"1.52 1.28 0.65 {running}/345 1234\n", encoding="ascii")
    assert other_processes_run(str(file)) is busy
