"""On-disk format of an index. A crash at any moment leaves either the old state or the new one.

    manifest.json           names the files below with their SHA-256, the model that made the vectors, the threshold
    vectors-<sha>.npy       float32 [N, D], one row per item
    items-<sha>.json        ids, labels and file stamps
    hnsw-<sha>.faiss        HNSW graph for approximate search, if one was built
    journal                 batches embedded so far, while `nearkin index` runs
    lock                    locked while the folder is being written

File names contain a hash of the content, so new files never overwrite those in use. They are written first; renaming
the manifest into place then commits the new state, and files that it no longer names are deleted. The format is plain
arrays and JSON: nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from nearkin._common.files import atomic_write, file_lock, is_temporary, remove_leftovers, replace_file, temporary_path
from nearkin.deploy.index.manifest import RESTORE_HINT, Manifest, StoredFile
from nearkin.errors import DataError

T = TypeVar("T")
_MAX_RETRIES = 10  # reads of a missing file before it is reported missing
_BLOCK_BYTES = 1 << 24  # hashed at a time
# Only files with these names are ever deleted.
_DATA_FILE = re.compile(r"(vectors-[0-9a-f]{16}\.npy|items-[0-9a-f]{16}\.json|hnsw-[0-9a-f]{16}\.faiss)")


# --- reading ---------------------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of an index folder."""
    path = folder / "manifest.json"
    try:
        return Manifest.from_json(path.read_text(encoding="utf-8"), path)
    except UnicodeDecodeError:
        raise DataError(f"{path}: damaged (not UTF-8 text). {RESTORE_HINT}") from None
    except (FileNotFoundError, NotADirectoryError):
        if (folder / "journal").exists():
            raise DataError(
                f"{folder}: indexing was interrupted. Run the same `nearkin index` command again to resume."
            ) from None
        raise DataError(f"{folder}: no index found. Create one with: nearkin index RUN FOLDER -o DIR.") from None
    except OSError as error:
        raise DataError(f"{path}: cannot read ({error.strerror}).") from None


def read_consistent(folder: Path, read: Callable[[Manifest], T]) -> T:
    """Call `read(manifest)`, and retry if another process commits a new state meanwhile."""
    retries = 0
    while True:
        manifest = read_manifest(folder)
        try:
            return read(manifest)
        except FileNotFoundError as error:
            if read_manifest(folder) == manifest:
                # A writer may have replaced this state and restored it in between, so one retry is not conclusive.
                retries += 1
                if retries < _MAX_RETRIES:
                    time.sleep(0.02)
                    continue
                raise DataError(f"{folder}: {error.filename or 'a file'} is missing. {RESTORE_HINT}") from None


def verify_file(folder: Path, stored: StoredFile) -> Path:
    """Check size and hash of a data file. Returns its path."""
    path = folder / stored.name
    if not _DATA_FILE.fullmatch(stored.name):
        raise DataError(f"{folder}: the manifest names an unexpected file ({stored.name!r}).")
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            while size == stored.bytes and (block := file.read(_BLOCK_BYTES)):
                digest.update(block)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(f"{path}: cannot read ({error.strerror}).") from None
    if size != stored.bytes:
        raise DataError(f"{path}: damaged ({size:,} bytes, expected {stored.bytes:,}). {RESTORE_HINT}")
    if digest.hexdigest() != stored.sha256:
        raise DataError(f"{path}: damaged (checksum mismatch). {RESTORE_HINT}")
    return path


def read_vectors(folder: Path, manifest: Manifest) -> NDArray[np.float32]:
    """Open the vectors. Returns float32 [N, D], memory-mapped."""
    path = verify_file(folder, manifest.files["vectors"])
    # Copy-on-write because torch warns about read-only memory; nothing writes to it, so pages stay shared.
    empty = manifest.items == 0  # which cannot be mapped
    try:
        vectors: NDArray[np.float32] = np.load(path, mmap_mode=None if empty else "c", allow_pickle=False)
    except ValueError as error:
        raise DataError(f"{path}: cannot read as a numeric array ({error}).") from None
    if vectors.dtype != np.float32 or vectors.shape != (manifest.items, manifest.dim):
        raise DataError(
            f"{path}: expected float32 [{manifest.items}, {manifest.dim}] as in the manifest, "
            f"got {vectors.dtype} {list(vectors.shape)}."
        )
    return vectors


def read_items(folder: Path, manifest: Manifest) -> dict[str, list[Any]]:
    """Read ids, labels and file stamps."""
    path = verify_file(folder, manifest.files["items"])
    columns: dict[str, list[Any]] = json.loads(path.read_text(encoding="ascii"))
    if any(len(column) != manifest.items for column in columns.values()):
        raise DataError(f"{path}: expected {manifest.items:,} items as in the manifest.")
    return columns


# --- writing ---------------------------------------------------------------------------------------------------------


def write_vectors(folder: Path, shape: tuple[int, int], blocks: Iterable[NDArray[np.float32]]) -> StoredFile:
    """Write blocks of rows as one .npy file.

    Uses plain writes rather than a memory map: a full disk raises an error there, and kills the process under a map.
    """

    def chunks() -> Iterator[bytes | memoryview]:
        buffer = io.BytesIO()
        header = {"descr": np.lib.format.dtype_to_descr(np.dtype("<f4")), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(buffer, header)
        yield buffer.getvalue()
        rows = 0
        for block in blocks:
            rows += len(block)
            yield np.ascontiguousarray(block, "<f4").data.cast("B") if block.size else b""
        assert rows == shape[0]

    return write_file(folder, "vectors", ".npy", chunks())


def write_items(folder: Path, columns: dict[str, list[Any]]) -> StoredFile:
    """Write ids, labels and file stamps. Returns the entry for the manifest."""
    # ASCII because file names need not be valid UTF-8; JSON escapes preserve them.
    return write_file(folder, "items", ".json", [json.dumps(columns, ensure_ascii=True).encode("ascii")])


def write_file(folder: Path, stem: str, suffix: str, chunks: Iterable[bytes | memoryview]) -> StoredFile:
    """Write a data file durably, named by the hash of its content. Returns the entry for the manifest."""
    digest = hashlib.sha256()
    size = 0
    try:
        with temporary_path(folder / stem) as temporary:
            with open(temporary, "wb") as file:
                for chunk in chunks:
                    digest.update(chunk)
                    file.write(chunk)
                    size += len(chunk)
                file.flush()
                os.fsync(file.fileno())
            stored = StoredFile(f"{stem}-{digest.hexdigest()[:16]}{suffix}", size, digest.hexdigest())
            if not _is_intact(folder, stored):  # Windows does not replace a file that is in use
                replace_file(temporary, folder / stored.name)
    except OSError as error:
        raise write_error(folder, error) from None
    return stored


def _is_intact(folder: Path, stored: StoredFile) -> bool:
    """Return whether the folder has this file already."""
    try:
        verify_file(folder, stored)
    except (FileNotFoundError, DataError):
        return False
    return True


def commit(folder: Path, manifest: Manifest) -> None:
    """Replace the state of the folder, and delete the files of the previous state."""
    try:
        _fsync_folder(folder)  # the data files must be on disk before the manifest that names them
        atomic_write(folder / "manifest.json", manifest.to_json())
        _fsync_folder(folder)
    except OSError as error:
        raise write_error(folder, error) from None
    remove_stale_files(folder, manifest)


def remove_stale_files(folder: Path, manifest: Manifest | None) -> None:
    """Delete data files that the manifest does not name."""
    current = {stored.name for stored in manifest.files.values()} if manifest is not None else set()
    for path in folder.iterdir():
        if _DATA_FILE.fullmatch(path.name) and path.name not in current:
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
    """Lock an index folder for writing while the block runs; the folder is created if needed.

    The operating system releases the lock of a killed process.
    """
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            names = {path.name for path in folder.iterdir() if not is_temporary(path)}
            others = sorted(name for name in names - {"lock"} if not _DATA_FILE.fullmatch(name))
            if others and not names & {"manifest.json", "journal"}:
                raise DataError(f"{folder}: contains other files ({others[0]}). Use a separate folder for the index.")
            if "manifest.json" in names:
                read_manifest(folder)  # never overwrite that of another program or nearkin version
            locked = stack.enter_context(file_lock(folder / "lock"))
        except OSError as error:  # including file systems without locks, such as some network drives
            raise write_error(folder, error) from None
        if not locked:
            raise DataError(f"{folder}: another process is writing this index. Wait for it to finish, or stop it.")
        remove_leftovers(folder)
        yield


def write_error(folder: Path, error: OSError) -> DataError:
    """Turn a failed write into a `DataError` for the user."""
    state = "The previous index is intact." if (folder / "manifest.json").exists() else "No partial index was left."
    reason = error.strerror or str(error)
    return DataError(f"{folder}: cannot write the index ({reason}). {state} Free up space, or choose another folder.")
