"""Journal of embedded batches, so that `nearkin index` loses at most one batch when it is killed.

    first line      JSON: format, version, fingerprint of the model, dim
    records         8 bytes: length of the JSON, 4 bytes: CRC-32 of the rest of the record,
                    the JSON (ids, stamps), then float32 vectors [n, dim]

On reopening, the first truncated or damaged record and everything after it are dropped.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nearkin._common.files import atomic_write
from nearkin.deploy.index.files import write_error
from nearkin.deploy.index.provenance import FileStamp
from nearkin.deploy.index.search import Vectors
from nearkin.errors import DataError

_MAX_JSON_BYTES = 1 << 30
_HEADER_BYTES = 12  # of a record
Bytes = np.memmap[tuple[int], np.dtype[np.uint8]]


@dataclass(frozen=True)
class Record:
    """One batch of embedded files."""

    ids: list[str]  # item ids
    stamps: list[FileStamp]  # file stamps, one per item
    vectors: Vectors  # float32 [n, D]


class Journal:
    """The journal of an index folder. Opening it recovers the records of an earlier process."""

    def __init__(self, folder: Path, fingerprint: str, dim: int) -> None:
        self.folder, self.dim = folder, dim
        self.path = folder / "journal"
        self._header = json.dumps({"format": "nearkin journal", "version": 1, "model": fingerprint, "dim": dim}) + "\n"
        self.records: list[Record] = []
        end = self._recover()
        try:
            if end == 0:
                atomic_write(self.path, self._header)
            elif end < self.path.stat().st_size:
                os.truncate(self.path, end)
        except OSError as error:
            raise write_error(folder, error) from None

    def append(self, ids: Sequence[str], stamps: Sequence[FileStamp], vectors: Vectors) -> None:
        """Append one batch and flush it to disk."""
        info = {"ids": list(ids), "stamps": [[s.size, s.mtime_ns, s.sha256] for s in stamps]}
        encoded = json.dumps(info).encode("ascii")
        body = encoded + np.ascontiguousarray(vectors, "<f4").tobytes()
        size_before = self.path.stat().st_size
        try:
            with open(self.path, "ab") as file:
                file.write(len(encoded).to_bytes(8) + zlib.crc32(body).to_bytes(4) + body)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            os.truncate(self.path, size_before)
            raise write_error(self.folder, error) from None
        self.records.append(Record(list(ids), list(stamps), np.array(vectors, np.float32)))

    def remove(self) -> None:
        """Delete the journal."""
        self.path.unlink(missing_ok=True)

    def _recover(self) -> int:
        """Read the complete records of an earlier process, and return the offset at which they end (0: none)."""
        if not self.path.exists() or self.path.stat().st_size == 0:
            return 0
        data = np.memmap(self.path, np.uint8, mode="r")
        header = self._header.encode("ascii")
        if data[: len(header)].tobytes() != header:
            self._check_other_model(data)
            return 0
        end = len(header)
        for record, next_offset in self._read(data, end):
            self.records.append(record)
            end = next_offset
        return end

    def _check_other_model(self, data: Bytes) -> None:
        """Protect records of another model, which may be hours of work; damaged journals are dropped."""
        header, _, records = data.tobytes().partition(b"\n")
        try:
            info = json.loads(header)
        except ValueError:
            return
        if records and isinstance(info, dict) and info.get("format") == "nearkin journal":
            raise DataError(
                f"{self.folder}: contains the unfinished index of a different model. Choose another folder with -o, "
                f"or delete {self.path}."
            )

    def _read(self, data: Bytes, offset: int) -> Iterator[tuple[Record, int]]:
        while offset + _HEADER_BYTES <= len(data):
            start = offset + _HEADER_BYTES
            length = int.from_bytes(data[offset : offset + 8].tobytes())
            if length > min(_MAX_JSON_BYTES, len(data) - start):
                return
            try:
                info = json.loads(data[start : start + length].tobytes())
                end = start + length + 4 * self.dim * len(info["ids"])
                body = data[start:end]
                if end > len(data) or zlib.crc32(body.data) != int.from_bytes(data[offset + 8 : start].tobytes()):
                    return
                stamps = [FileStamp(*stamp) for stamp in info["stamps"]]
            except (ValueError, KeyError, TypeError):
                return
            vectors = np.frombuffer(body[length:].tobytes(), "<f4").reshape(-1, self.dim)
            yield Record(info["ids"], stamps, vectors.astype(np.float32)), end
            offset = end
