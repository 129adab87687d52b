"""What an index is on the disk, written so that no crash can leave a half-truth.

    manifest.json           names the files below with their SHA-256, the model that made the vectors, the threshold
    vectors-<sha>.npy       float32 [N, D], one row per item
    items-<sha>.json        ids, labels, and what is known of each file
    hnsw-<sha>.faiss        the graph for approximate search, where one was made
    journal                 while `nearkin index` is at work: what it has embedded so far
    lock                    held while the folder is written

Files are named by their content, so new ones never overwrite those in use. They are written first, the manifest is
renamed into place last, and that one rename is the moment at which the new state holds. What the manifest no longer
names is then removed. Everything is numbers and JSON: nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from nearkin._common.files import file_lock
from nearkin.errors import DataError

FORMAT, VERSION = "nearkin index", 1
T = TypeVar("T")
_TRIES = 10  # looks at a file that is missing before it is called missing
_BLOCK = 1 << 24  # bytes hashed or written at a time
# Names that are ours to remove; anything else in the folder is somebody's.
_OURS = re.compile(r"(vectors-[0-9a-f]{16}\.npy|items-[0-9a-f]{16}\.json|hnsw-[0-9a-f]{16}\.faiss)")
_ASIDE = re.compile(r"(vectors|items|hnsw|manifest)-[0-9]+\.part")


@dataclass(frozen=True)
class StoredFile:
    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class ModelInfo:
    """Which model made the vectors: a hash of its weights, and where it was found."""

    fingerprint: str
    image_shape: tuple[int, ...]
    run: str | None = None


@dataclass(frozen=True)
class Manifest:
    """The state of an index. root: the folder that the items' names are relative to, where they are files."""

    items: int
    dim: int
    files: dict[str, StoredFile] = field(default_factory=dict)
    model: ModelInfo | None = None
    root: str | None = None
    threshold: dict[str, Any] | None = None
    rerank: dict[str, Any] | None = None
    graph: dict[str, Any] | None = None
    store: str | None = None

    def to_json(self) -> str:
        body = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return json.dumps({**body, "sha256": _digest_of(body)}, indent=1)

    @classmethod
    def from_json(cls, text: str, where: Path) -> Manifest:
        try:
            body = json.loads(text)
            if not isinstance(body, dict) or body.get("format") != FORMAT:
                raise DataError(f"{where}: is not the manifest of a nearkin index.")
            if body["version"] > VERSION:
                raise DataError(
                    f"{where}: was written by a newer nearkin (format {body['version']}, this one reads {VERSION}). "
                    "Upgrade nearkin."
                )
            if body.pop("sha256") != _digest_of(body):
                raise ValueError("its checksum does not fit")
            del body["format"], body["version"]
            body["files"] = {kind: StoredFile(**given) for kind, given in body["files"].items()}
            model = body["model"]
            if model is not None:
                body["model"] = ModelInfo(**{**model, "image_shape": tuple(model["image_shape"])})
            return cls(**body)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{where}: is damaged ({error}). Restore it, or index again into another folder.") from None


def _digest_of(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


# --- reading ---------------------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> Manifest:
    path = folder / "manifest.json"
    try:
        return Manifest.from_json(path.read_text(encoding="utf-8"), path)
    except UnicodeDecodeError:
        raise DataError(f"{path}: is damaged (not text). Restore it, or index again into another folder.") from None
    except (FileNotFoundError, NotADirectoryError):
        if (folder / "journal").exists():
            raise DataError(
                f"{folder}: indexing was stopped before its end. Run the same `nearkin index` command to go on."
            ) from None
        raise DataError(f"{folder}: there is no index here. Make one with: nearkin index RUN FOLDER -o DIR.") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from None


def consistently(folder: Path, read: Callable[[Manifest], T]) -> T:
    """read(manifest), tried again when a writer has put a newer state in place meanwhile."""
    unchanged = 0
    while True:
        manifest = read_manifest(folder)
        try:
            return read(manifest)
        except FileNotFoundError as error:
            if read_manifest(folder) == manifest:
                # The very same state may have been replaced and put back meanwhile: one look does not tell.
                unchanged += 1
                if unchanged < _TRIES:
                    time.sleep(0.02)
                    continue
                name = error.filename or "a file"
                raise DataError(
                    f"{folder}: {name} is missing. Restore it, or index again into another folder."
                ) from None


def checked(folder: Path, stored: StoredFile) -> Path:
    """The path of a file whose bytes are what was written; FileNotFoundError when it is gone."""
    path = folder / stored.name
    if not _OURS.fullmatch(stored.name):
        raise DataError(f"{folder}: the manifest names a file of another kind ({stored.name!r}).")
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            while size == stored.bytes and (block := file.read(_BLOCK)):
                digest.update(block)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from None
    if size != stored.bytes or digest.hexdigest() != stored.sha256:
        what = f"{size:,} bytes where {stored.bytes:,} were written" if size != stored.bytes else "its checksum differs"
        raise DataError(f"{path}: is damaged ({what}). Restore it, or index again into another folder.")
    return path


def read_vectors(folder: Path, manifest: Manifest) -> NDArray[np.float32]:
    """The vectors [N, D], memory-mapped."""
    path = checked(folder, manifest.files["vectors"])
    # Copy-on-write: torch asks for memory it could write to; nothing here does, so pages stay shared.
    empty = manifest.items == 0  # nothing can be mapped then
    try:
        vectors: NDArray[np.float32] = np.load(path, mmap_mode=None if empty else "c", allow_pickle=False)
    except ValueError as error:
        raise DataError(f"{path}: cannot be read as an array of numbers ({error}).") from None
    if vectors.dtype != np.float32 or vectors.shape != (manifest.items, manifest.dim):
        raise DataError(
            f"{path}: holds {vectors.dtype} {list(vectors.shape)}, the manifest names float32 "
            f"[{manifest.items}, {manifest.dim}]."
        )
    return vectors


def read_items(folder: Path, manifest: Manifest) -> dict[str, list[Any]]:
    path = checked(folder, manifest.files["items"])
    columns: dict[str, list[Any]] = json.loads(path.read_text(encoding="ascii"))
    if any(len(column) != manifest.items for column in columns.values()):
        raise DataError(f"{path}: does not hold {manifest.items:,} items as the manifest says.")
    return columns


# --- writing ---------------------------------------------------------------------------------------------------------


def write_vectors(folder: Path, shape: tuple[int, int], blocks: Iterable[NDArray[np.float32]]) -> StoredFile:
    """Rows block by block as one .npy file. Plain writes: a full disk is an error there, and a crash under a map."""

    def chunks() -> Iterator[bytes | memoryview]:
        header = io.BytesIO()
        described = {"descr": np.lib.format.dtype_to_descr(np.dtype("<f4")), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(header, described)
        yield header.getvalue()
        rows = 0
        for block in blocks:
            rows += len(block)
            yield np.ascontiguousarray(block, "<f4").data.cast("B") if block.size else b""
        assert rows == shape[0]

    return write_file(folder, "vectors", ".npy", chunks())


def write_items(folder: Path, columns: dict[str, list[Any]]) -> StoredFile:
    # ASCII: names of files need not be valid UTF-8, and JSON's escapes keep them as they are.
    return write_file(folder, "items", ".json", [json.dumps(columns, ensure_ascii=True).encode("ascii")])


def write_file(folder: Path, kind: str, suffix: str, chunks: Iterable[bytes | memoryview]) -> StoredFile:
    """Write a file aside, make sure it is on the disk, and name it by its content."""
    aside = folder / f"{kind}-{os.getpid()}.part"
    digest = hashlib.sha256()
    size = 0
    try:
        with open(aside, "wb") as file:
            for chunk in chunks:
                digest.update(chunk)
                file.write(chunk)
                size += len(chunk)
            file.flush()
            os.fsync(file.fileno())
        stored = StoredFile(f"{kind}-{digest.hexdigest()[:16]}{suffix}", size, digest.hexdigest())
        aside.replace(folder / stored.name)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise cannot_write(folder, error) from None
    return stored


def commit(folder: Path, manifest: Manifest) -> None:
    """Make this the state of the folder, and remove what belonged to the one before."""
    aside = folder / f"manifest-{os.getpid()}.part"
    try:
        with open(aside, "w", encoding="utf-8") as file:
            file.write(manifest.to_json())
            file.flush()
            os.fsync(file.fileno())
        sync_folder(folder)  # the new files' names must not be lost when the manifest's is kept
        aside.replace(folder / "manifest.json")
        sync_folder(folder)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise cannot_write(folder, error) from None
    sweep(folder, manifest)


def sweep(folder: Path, manifest: Manifest | None) -> None:
    """Remove files that no state names: those of the state before, and leftovers of a process that was killed."""
    kept = {stored.name for stored in manifest.files.values()} if manifest is not None else set()
    for path in folder.iterdir():
        if (_OURS.fullmatch(path.name) and path.name not in kept) or _ASIDE.fullmatch(path.name):
            path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def lock_index(folder: Path) -> Iterator[None]:
    """Hold the folder for this process, made if it is not there; a killed process lets go by itself."""
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            names = {path.name for path in folder.iterdir()}
            others = sorted(n for n in names - {"lock"} if not _OURS.fullmatch(n) and not _ASIDE.fullmatch(n))
            if others and not names & {"manifest.json", "journal"}:
                raise DataError(f"{folder}: holds other files ({others[0]}). Give an index a folder of its own.")
            if "manifest.json" in names:
                read_manifest(folder)  # that of another program, or of a newer nearkin, is not overwritten
            ours = stack.enter_context(file_lock(folder / "lock"))
        except OSError as error:  # also where there are no locks, as on some network drives
            raise cannot_write(folder, error) from None
        if not ours:
            raise DataError(f"{folder}: another process is writing this index. Wait for it, or stop it.")
        yield


def cannot_write(folder: Path, error: OSError) -> DataError:
    kept = "What was there is kept." if (folder / "manifest.json").exists() else "Nothing is left half-written."
    reason = error.strerror or str(error)
    return DataError(f"{folder}: cannot write the index ({reason}). {kept} Make room, or choose another folder.")
