"""Whether the machine is busy; memory that is kept between steps."""

from __future__ import annotations

import os
import platform
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


FAULTS = """
import ctypes, resource, sys
from nearkin._common.processes import keep_freed_memory, return_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(100 << 20)
    ctypes.memset(block, 1, 100 << 20)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
keep_freed_memory()
first, second = faults(), faults()
return_freed_memory()
print(first, second, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
@pytest.mark.parametrize("setting", [{}, {"MALLOC_MMAP_MAX_": "65536"}])
def test_freed_memory_is_kept_until_it_is_returned_unless_the_user_decided(setting):
    """Counted in page faults: a block that comes from the system again has to be mapped page by page."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env=os.environ | setting, capture_output=True, text=True, check=True
    )
    first, second, third = map(int, done.stdout.split())
    assert min(first, third) > 40  # 25,600 small pages, or 50 large ones
    assert (second < 20) == (not setting)
