"""Files shared between processes: atomic writes, locks, and NaN in JSON."""

import errno
import hashlib
import json
import math
import os
import platform
import re
import shutil
import threading
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nearkin._common.processes import is_alive

# What np.load raises for a damaged .npy or .npz file.
NPZ_ERRORS = (OSError, ValueError, KeyError, EOFError, NotImplementedError, SyntaxError, zipfile.BadZipFile, zlib.error)
# NAME.<machine>-<process id>-<thread id>.tmp
_TEMPORARY = re.compile(r".+\.(?P<machine>[0-9a-f]{8})-(?P<pid>[0-9]+)-[0-9]+\.tmp")
_CHECKSUM = b"nearkin-sha256:"  # in front of the checksum at the end of a file
_FOREIGN_AGE = 24 * 3600.0  # seconds after which a temporary file of another machine is taken for abandoned
_FULL_DISK = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}  # no quota left counts as well
_REPLACE_SECONDS = 5.0  # how long Windows may refuse to replace a file that another program is reading


def atomic_write(target: Path, content: str | bytes) -> None:
    """Replace a file in one step, so that a crash leaves the old content or the new, never a part."""
    data = content.encode() if isinstance(content, str) else content
    with atomic_file(target, size=len(data)) as temporary:
        temporary.write_bytes(data)


@contextmanager
def atomic_file(target: Path, *, keep: Path | None = None, size: int = 0) -> Iterator[Path]:
    """Replace a file in one step when the block ends; if it raises, the old file stays.

    Deletes what killed processes left in its folder. A full disk is an OSError that says how much is needed: `size`,
    the expected number of bytes, if it is known.
    """
    remove_leftovers(target.parent)
    with temporary_path(target, size) as temporary:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        if keep is not None and target.exists():
            replace_file(target, keep)
        replace_file(temporary, target)


def append_checksum(path: Path) -> None:
    """Append the SHA-256 of a file to it. Readers of zip files, such as torch.load, ignore bytes at the end."""
    with open(path, "rb+") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
        file.write(_CHECKSUM + digest)


def verify_checksum(path: Path, *, required: bool) -> None:
    """Raise ValueError if a file has changed since `append_checksum`, or if it has no checksum and one is required."""
    with open(path, "rb") as file:
        size = max(0, os.fstat(file.fileno()).st_size - len(_CHECKSUM) - hashlib.sha256().digest_size)
        file.seek(size)
        checksum = file.read()
        if not required and not checksum.startswith(_CHECKSUM):
            return
        file.seek(0)
        digest = hashlib.sha256()
        while block := file.read(min(size - file.tell(), 1 << 20)):
            digest.update(block)
    if checksum != _CHECKSUM + digest.digest():
        raise ValueError("damaged: it does not match its checksum")


@contextmanager
def temporary_path(target: Path, size: int = 0) -> Iterator[Path]:
    """Reserve a name next to `target`, deleted when the block ends unless it was moved; errors name `target`."""
    temporary = target.with_name(f"{target.name}.{_machine()}-{os.getpid()}-{threading.get_native_id()}.tmp")
    try:
        yield temporary
    except (OSError, RuntimeError) as error:
        if full := full_disk(error, target, size):
            raise full from error
        ours = (None, temporary, str(temporary))
        if not isinstance(error, OSError) or error.errno is None or error.filename not in ours:
            raise
        raise OSError(error.errno, error.strerror, str(target)) from error
    finally:
        with suppress(OSError):
            _remove(temporary)


def full_disk(error: BaseException | None, target: Path, size: int = 0) -> OSError | None:
    """Return an error that says which disk is full and what `target` needs, or None if it is not about that."""
    # torch's own writer says only that it failed, in words that depend on where.
    is_torch = any(word in str(error) for word in ("PytorchStreamWriter", "inline_container", "iostream error"))
    failed_write = is_torch and shutil.disk_usage(target.parent).free < max(size, 2**20)
    while not failed_write and error is not None and getattr(error, "errno", None) not in _FULL_DISK:
        error = error.__cause__ or error.__context__
    needs = f": needs ~{max(1, math.ceil(size / 1e6)):,} MB" if size else ""
    return OSError(errno.ENOSPC, f"No space left on {target.parent}{needs}", str(target)) if error else None


def replace_file(source: Path, target: Path) -> None:
    """Rename a file over another; on Windows wait for programs that have the other one open."""
    deadline = time.monotonic() + (_REPLACE_SECONDS if os.name == "nt" else 0.0)
    while True:
        try:
            os.replace(source, target)
            return
        except PermissionError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(0.05)


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files and folders of killed processes, never those of a process that is alive."""
    with suppress(OSError):
        for found in filter(None, map(_TEMPORARY.fullmatch, os.listdir(folder))):
            path = folder / found[0]
            with suppress(OSError):
                is_local, age = found["machine"] == _machine(), time.time() - path.stat().st_mtime
                if not is_alive(int(found["pid"])) if is_local else age > _FOREIGN_AGE:
                    _remove(path)


def is_temporary(path: Path) -> bool:
    return _TEMPORARY.fullmatch(path.name) is not None


def _machine() -> str:
    return f"{zlib.crc32(platform.node().encode()):08x}"


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def file_lock(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Lock a file until the block ends; the operating system releases the lock of a killed process."""
    from filelock import lock_descriptor, unlock_descriptor

    with open(path, "ab") as file:
        acquired = lock_descriptor(file.fileno(), blocking=wait)
        try:
            yield acquired
        finally:
            if acquired:
                unlock_descriptor(file.fileno())


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock on this file, which need not be writable."""
    from filelock import lock_descriptor

    # A network drive locks only files that are open for writing.
    with open(path, "rb+" if os.access(path, os.W_OK) else "rb") as file:
        return not lock_descriptor(file.fileno(), blocking=False)


def read_json(path: Path) -> Any:
    """Parse a JSON file. Raises OSError or ValueError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def nan_to_none(value: Any) -> Any:
    """Replace NaN and infinity by None, which JSON can hold, in nested dicts, lists and tuples."""
    if isinstance(value, dict):
        return {key: nan_to_none(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [nan_to_none(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def none_to_nan(value: Any) -> Any:
    """Undo `nan_to_none`, for data in which only numbers can be None. Returns the same values with NaN for None."""
    if isinstance(value, dict):
        return {key: none_to_nan(v) for key, v in value.items()}
    if isinstance(value, list):
        return [none_to_nan(v) for v in value]
    return math.nan if value is None else value
