"""A full disk, and the temporary files of processes that were killed."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def max_file_size(size: int) -> Iterator[None]:
    """Let writes past this size fail, as on a full disk, in this process and in those it starts."""
    resource = pytest.importorskip("resource", reason="needs limits on the size of files")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """Mount a disk of this many bytes on a folder; skips where that is not permitted."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(["mount", *options], capture_output=True).returncode:
        pytest.skip("needs the permission to mount a disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def start_writer(target: Path) -> subprocess.Popen:
    """Start a process that is in the middle of replacing a file."""
    code = f"""
import sys
from pathlib import Path
from nearkin._common.files import atomic_file
with atomic_file(Path({str(target)!r})) as temporary:
    temporary.write_bytes(b"half")
    print(temporary, flush=True)
    sys.stdin.read()
"""
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def leftover_of_a_killed_process(target: Path) -> Path:
    """Return the temporary file of a process that was killed while it replaced `target`."""
    writer = start_writer(target)
    leftover = Path(writer.stdout.readline().rstrip("\n"))
    writer.kill()
    writer.communicate()
    assert leftover.read_bytes() == b"half"
    return leftover
