"""What `nearkin index` has embedded so far, appended batch by batch, so that a kill at any moment costs one batch.

    first line      JSON: format, version, fingerprint of the model, dim
    records         8 bytes: length of a JSON text, 4 bytes: CRC-32 of all that follows in the record,
                    the JSON (ids, stamps), then float32 vectors [n, dim]

A record that is cut or damaged, and everything after it, is dropped when the journal is opened again.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nearkin.deploy.index.files import cannot_write
from nearkin.deploy.index.provenance import FileStamp
from nearkin.deploy.index.search import Vectors
from nearkin.errors import DataError

_MOST_JSON = 1 << 30


@dataclass(frozen=True)
class Record:
    """One batch of embedded files."""

    ids: list[str]
    stamps: list[FileStamp]
    vectors: Vectors


class Journal:
    """The journal of an index folder; opening it keeps what an earlier process wrote with the same model.

    One of another model is refused.
    """

    def __init__(self, folder: Path, fingerprint: str, dim: int) -> None:
        self.folder, self.dim = folder, dim
        self.path = folder / "journal"
        self._head = json.dumps({"format": "nearkin journal", "version": 1, "model": fingerprint, "dim": dim}) + "\n"
        self.records: list[Record] = []
        end = self._recover()
        try:
            if end == 0:
                self.path.write_text(self._head, encoding="ascii")
            elif end < self.path.stat().st_size:
                os.truncate(self.path, end)
        except OSError as error:
            raise cannot_write(folder, error) from None

    def append(self, ids: Sequence[str], stamps: Sequence[FileStamp], vectors: Vectors) -> None:
        """Add one batch; when this returns, it is on the disk."""
        about = json.dumps({"ids": list(ids), "stamps": [[s.size, s.mtime_ns, s.sha256] for s in stamps]}).encode(
            "ascii"
        )
        body = about + np.ascontiguousarray(vectors, "<f4").tobytes()
        before = self.path.stat().st_size
        try:
            with open(self.path, "ab") as file:
                file.write(len(about).to_bytes(8) + zlib.crc32(body).to_bytes(4) + body)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            os.truncate(self.path, before)
            raise cannot_write(self.folder, error) from None
        self.records.append(Record(list(ids), list(stamps), np.array(vectors, np.float32)))

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def _recover(self) -> int:
        """Read the whole records of an earlier process; the place at which the first bad one starts, 0 for none."""
        if not self.path.exists() or self.path.stat().st_size == 0:
            return 0
        data = np.memmap(self.path, np.uint8, mode="r")
        head = self._head.encode("ascii")
        if data[: len(head)].tobytes() != head:
            self._refuse_another_model(data)
            return 0
        end = len(head)
        for record, after in self._read(data, end):
            self.records.append(record)
            end = after
        return end

    def _refuse_another_model(self, data: np.memmap[tuple[int], np.dtype[np.uint8]]) -> None:
        """Hours of embedding may stand here; a journal that is damaged or empty is of no use to anybody."""
        head, _, records = data.tobytes().partition(b"\n")
        try:
            about = json.loads(head)
        except ValueError:
            return
        if records and isinstance(about, dict) and about.get("format") == "nearkin journal":
            raise DataError(
                f"{self.folder}: holds the unfinished index of another model. Choose another folder with -o, or remove "
                f"{self.path}."
            )

    def _read(self, data: np.memmap[tuple[int], np.dtype[np.uint8]], at: int) -> Iterator[tuple[Record, int]]:
        while at + 12 <= len(data):
            length = int.from_bytes(data[at : at + 8].tobytes())
            if length > min(_MOST_JSON, len(data) - at - 12):
                return
            try:
                about = json.loads(data[at + 12 : at + 12 + length].tobytes())
                end = at + 12 + length + 4 * self.dim * len(about["ids"])
                body = data[at + 12 : end]
                if end > len(data) or zlib.crc32(body.data) != int.from_bytes(data[at + 8 : at + 12].tobytes()):
                    return
                stamps = [FileStamp(*stamp) for stamp in about["stamps"]]
            except (ValueError, KeyError, TypeError):
                return
            vectors = np.frombuffer(body[length:].tobytes(), "<f4").reshape(-1, self.dim)
            yield Record(about["ids"], stamps, vectors.astype(np.float32)), end
            at = end
