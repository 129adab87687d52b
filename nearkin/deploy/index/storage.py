"""The folder of an index (files: docs/architecture.md). A crash at any moment leaves the old state or the new one.

Data files are named by their content, so they never overwrite those in use; renaming the manifest commits a new state.
"""

import base64
import hashlib
import io
import json
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from nearkin._common.files import atomic_file, atomic_write, file_lock, is_temporary, remove_leftovers
from nearkin.deploy.index.items import FileStamp
from nearkin.deploy.index.search import Vectors
from nearkin.errors import DataError

T = TypeVar("T")
State = dict[str, Any]
FORMAT, VERSION = "nearkin index", 3
_MANIFEST, _JOURNAL = "manifest.json", "journal"
_SUFFIXES = {"vectors": ".npy", "hnsw": ".faiss"}
_DATA_FILE = re.compile(r"(vectors-[0-9a-f]{16}\.npy|hnsw-[0-9a-f]{16}\.faiss)")  # only these are ever deleted
_RESTORE_HINT = "Restore it, or index again into another folder."
_MAX_READS = 50  # before a file that stays missing is reported


def read_state(folder: Path) -> State:
    path = folder / _MANIFEST
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        if (folder / _JOURNAL).exists():
            raise DataError(f"{folder}: indexing was interrupted. Run the same command again to resume.") from None
        raise DataError(f"{folder}: no index found. Create one with: nearkin index RUN FOLDER -o DIR.") from None
    except OSError as error:
        raise DataError(f"{path}: cannot read ({error.strerror}).") from None
    try:
        state = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: damaged ({error}). {_RESTORE_HINT}") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise DataError(f"{path}: not the manifest of a nearkin index.")
    version = state.get("version", 0)
    if version != VERSION:
        is_newer = isinstance(version, int) and version > VERSION
        age, fix = ("a newer", "Upgrade nearkin") if is_newer else ("an older", "Index again into another folder")
        raise DataError(f"{path}: written by {age} nearkin (format {version}, this version reads {VERSION}). {fix}.")
    if content != _with_checksum(content.partition(b"\n")[2]):
        raise DataError(f"{path}: damaged (checksum mismatch). {_RESTORE_HINT}")
    for key, kind in {"files": dict, "ids": list, "labels": list, "stamps": list}.items():
        if not isinstance(state.get(key), kind):
            raise DataError(f"{path}: not a valid index ({key} is not a {kind.__name__}). {_RESTORE_HINT}")
    return state


def _with_checksum(rest: bytes) -> bytes:
    """Complete a JSON object by its first line: the hash of the rest."""
    return b'{"sha256": "%s",\n' % hashlib.sha256(rest).hexdigest().encode() + rest


def read_consistent(folder: Path, read: Callable[[State], T]) -> T:
    """Call `read(state)`, again if another process replaces the state and deletes its files meanwhile."""
    missing = None
    for _ in range(_MAX_READS):
        try:
            return read(read_state(folder))
        except FileNotFoundError as error:
            missing = error.filename
            time.sleep(0.02)
        except OSError as error:
            raise DataError(f"{error.filename}: cannot read ({error.strerror}).") from None
    raise DataError(f"{folder}: {missing} is missing. {_RESTORE_HINT}")


def find_file(folder: Path, state: State, role: str) -> Path:
    sha256 = str(state["files"].get(role))
    if not re.fullmatch("[0-9a-f]{64}", sha256):  # it becomes part of a file name
        raise DataError(f"{folder / _MANIFEST}: not a valid index (files.{role}). {_RESTORE_HINT}")
    path = _data_path(folder, role, sha256)
    if not _is_intact(path, sha256):
        raise DataError(f"{path}: damaged (checksum mismatch). {_RESTORE_HINT}")
    return path


def _data_path(folder: Path, role: str, sha256: str) -> Path:
    return folder / f"{role}-{sha256[:16]}{_SUFFIXES[role]}"


def _is_intact(path: Path, sha256: str) -> bool:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == sha256


def read_vectors(folder: Path, state: State) -> Vectors:
    """Open the vectors. Returns float32 [N, D], memory-mapped."""
    path = find_file(folder, state, "vectors")
    try:
        # Copy-on-write because torch warns about read-only memory; nothing writes to it, so pages stay shared. An empty
        # array cannot be mapped.
        vectors = np.load(path, mmap_mode="c" if state["ids"] else None, allow_pickle=False)
    except ValueError as error:
        raise DataError(f"{path}: cannot read as a numeric array ({error}).") from None
    if vectors.dtype != np.float32 or vectors.ndim != 2 or len(vectors) != len(state["ids"]):
        shape = f"{vectors.dtype} {list(vectors.shape)}"
        raise DataError(f"{path}: expected one float32 vector for each of {len(state['ids'])} items, got {shape}.")
    return vectors  # type: ignore[no-any-return]


def write_vectors(folder: Path, vectors: Vectors) -> str:
    """Write vectors as an .npy file. Returns its hash."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(vectors))
    # Plain writes, not a memory map, under which a full disk would kill the process.
    return write_file(folder, "vectors", header.getvalue(), vectors.reshape(-1).view(np.uint8).data)


def write_file(folder: Path, role: str, *chunks: bytes | memoryview) -> str:
    """Write a data file durably. Returns the hash of its content."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    path = _data_path(folder, role, digest.hexdigest())
    if not (path.exists() and _is_intact(path, digest.hexdigest())):
        with atomic_file(path) as temporary, open(temporary, "wb") as file:
            file.writelines(chunks)
    return digest.hexdigest()


def commit(folder: Path, state: State) -> None:
    """Replace the state of the folder, and delete the files of the previous state."""
    values = {"format": FORMAT, "version": VERSION, **state}
    # ASCII because file names need not be valid UTF-8; JSON escapes preserve them.
    lines = ",\n".join(f'"{name}": {json.dumps(value)}' for name, value in values.items())
    _fsync_folder(folder)  # the data files must be on disk before the manifest that names them
    atomic_write(folder / _MANIFEST, _with_checksum(f"{lines}}}\n".encode("ascii")))
    _fsync_folder(folder)
    current = {_data_path(folder, role, sha256) for role, sha256 in state["files"].items()}
    for path in folder.iterdir():
        if _DATA_FILE.fullmatch(path.name) and path not in current:
            with suppress(PermissionError):  # Windows does not delete a file that is in use
                path.unlink(missing_ok=True)


def _fsync_folder(folder: Path) -> None:
    if os.name == "nt":  # where folders cannot be opened
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def lock_index(folder: Path) -> Iterator[None]:
    """Lock an index folder, created if needed; the operating system releases the lock of a killed process."""
    with ExitStack() as stack:
        with write_errors(folder):  # including file systems without locks, such as some network drives
            folder.mkdir(parents=True, exist_ok=True)
            names = {path.name for path in folder.iterdir() if not is_temporary(path)}
            others = sorted(name for name in names - {"lock"} if not _DATA_FILE.fullmatch(name))
            if others and not names & {_MANIFEST, _JOURNAL}:
                raise DataError(f"{folder}: contains other files ({others[0]}). Use a separate folder for the index.")
            if _MANIFEST in names:
                read_state(folder)  # never overwrite that of another program or nearkin version
            locked = stack.enter_context(file_lock(folder / "lock"))
        if not locked:
            raise DataError(f"{folder}: another process is writing this index. Wait for it to finish, or stop it.")
        remove_leftovers(folder)
        yield


@contextmanager
def write_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        state = "The previous index is intact." if (folder / _MANIFEST).exists() else "There is no index yet."
        state += " The same command resumes from its journal." if (folder / _JOURNAL).exists() else ""
        raise DataError(
            f"{folder}: cannot write the index ({error.strerror or error}). {state} "
            "Free up space, or choose another folder."
        ) from None


class Journal:
    """Batches embedded so far, as lines of a CRC-32 and JSON; opening it recovers those of a killed process."""

    def __init__(self, folder: Path, fingerprint: str, dim: int) -> None:
        self.folder, self.path = folder, folder / _JOURNAL
        self.entries: dict[str, tuple[FileStamp, Vectors]] = {}  # stamp and vector [D] by image name
        header = _journal_line({"format": "nearkin journal", "version": 2, "model": fingerprint, "dim": dim})
        with write_errors(folder):
            end = self._recover(header) if self.path.exists() else 0
            if end == 0:
                atomic_write(self.path, header)
            elif end < self.path.stat().st_size:
                os.truncate(self.path, end)

    def append(self, names: Sequence[str], stamps: Sequence[FileStamp], vectors: Vectors) -> None:
        encoded = base64.b64encode(np.asarray(vectors, "<f4").tobytes()).decode()
        with write_errors(self.folder), open(self.path, "ab") as file:
            file.write(_journal_line([names, stamps, encoded]))
            file.flush()
            os.fsync(file.fileno())
        self.entries |= zip(names, zip(stamps, vectors, strict=True), strict=True)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def _recover(self, header: bytes) -> int:
        """Read the intact lines of an earlier process, and return the offset at which they end (0: none)."""
        with open(self.path, "rb") as file:
            first = file.readline()
            if first != header:
                if _is_intact_line(first) and file.read(1):  # may be hours of work
                    raise DataError(
                        f"{self.folder}: contains the unfinished index of a different model. Choose another folder "
                        f"with -o, or delete {self.path}."
                    )
                return 0
            end = len(first)
            for line in takewhile(_is_intact_line, file):  # what follows a damaged line is dropped
                names, stamps, encoded = json.loads(line.partition(b" ")[2])
                vectors = np.frombuffer(base64.b64decode(encoded), "<f4").reshape(len(names), -1)
                rows = zip((FileStamp(*stamp) for stamp in stamps), vectors, strict=True)
                self.entries |= zip(names, rows, strict=True)
                end += len(line)
        return end


def _journal_line(value: Any) -> bytes:
    body = json.dumps(value).encode("ascii") + b"\n"
    return b"%08x %s" % (zlib.crc32(body), body)


def _is_intact_line(line: bytes) -> bool:
    checksum, _, body = line.partition(b" ")
    return checksum == b"%08x" % zlib.crc32(body)
