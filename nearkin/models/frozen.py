"""Features of a frozen backbone, computed once and kept on disk, so that training a head takes seconds per epoch."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearkin._common.files import file_lock
from nearkin._common.progress import Reporter
from nearkin.data import reading
from nearkin.data.glyphs import cache_dir
from nearkin.data.images import Rows
from nearkin.data.table import Table
from nearkin.errors import DataError
from nearkin.models.embedder import Embedder
from nearkin.models.weights import fingerprint

_CHUNK = 1024  # images whose features are computed before they are written


class FrozenFeatures:
    """Pooled features of one source's images by one backbone, filled row by row as parts of the source are asked for.

    The file's name is a hash of all that could change a feature: the data, the weights, the preprocessing. Rows are
    written once, each with a checksum, so that a killed run goes on where it was and a damaged row is made again.
    Folds, seeds, losses and sizes all share the one file; test rows are filled only when the test classes are opened.
    """

    def __init__(self, model: Embedder, table: Table, *, on_disk: bool = True, reporter: Reporter) -> None:
        self.model, self.total, self.width, self.reporter = model, len(table), model.num_features, reporter
        self.path = cache_dir() / "features" / f"{_key(model, table)}.f32" if on_disk else None

    def add_to(self, part: Table) -> Table:
        """These rows of the source with their features beside the images."""
        features = np.empty((len(part), self.width), np.float32)
        if self.path is None:
            self._compute(part, np.arange(len(part)), features, None)
            return replace(part, features=features)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with file_lock(
                self.path.with_suffix(".lock"), wait=True
            ):  # a second process waits, and finds the rows done
                missing = self._read(part.row_numbers, features)
                if len(missing):
                    self._compute(part, missing, features, self.path)
        except OSError as error:
            raise DataError(
                f"{self.path}: cannot keep the features ({error.strerror or error}); what was written stays good.\n"
                "Make room, set NEARKIN_CACHE to another folder, or go without: --data.no-cache."
            ) from None
        return replace(part, features=features)

    def _read(self, rows: Rows, features: NDArray[np.float32]) -> Rows:
        """Fill what is stored; returns the places of what is not, or is damaged."""
        assert self.path is not None
        size, sums = 4 * self.width, self.path.with_suffix(".crc")
        if not self.path.exists() or not sums.exists():
            return np.arange(len(rows))
        stored = np.zeros(self.total, np.uint32)
        found = np.fromfile(sums, np.uint32)[: self.total]
        stored[: len(found)] = found
        whole = np.memmap(self.path, np.uint8, mode="r") if self.path.stat().st_size else np.empty(0, np.uint8)
        missing = []
        for place, row in enumerate(rows.tolist()):
            raw = whole[row * size : (row + 1) * size]
            if stored[row] and len(raw) == size and _checksum(raw) == stored[row]:
                features[place] = raw.view(np.float32)
            else:
                missing.append(place)
        return np.array(missing, np.int64)

    def _compute(self, part: Table, places: Rows, features: NDArray[np.float32], path: Path | None) -> None:
        with self.reporter.track("features", len(places), unit="img") as bar:
            for start in range(0, len(places), _CHUNK):
                chunk = places[start : start + _CHUNK]
                features[chunk] = self.model.embed_features(part.images.take(chunk)).numpy()
                bad = chunk[~np.isfinite(features[chunk]).all(axis=1)]
                if len(bad):
                    named = part.paths[bad[0]] if part.paths else f"row {part.row_numbers[bad[0]]}"
                    raise DataError(
                        f"{named}: the backbone's features are not finite. Check its weights, or the image."
                    )
                if path is not None:
                    _write(path, part.row_numbers[chunk], features[chunk])
                bar.advance(len(chunk))


def _write(path: Path, rows: Rows, features: NDArray[np.float32]) -> None:
    """Features first, then their checksums: a row is done when its checksum is there and right."""
    size = features.shape[1] * 4
    for target, width, values in (
        (path, size, [row.tobytes() for row in features]),
        (path.with_suffix(".crc"), 4, [_checksum(row.view(np.uint8)).to_bytes(4, "little") for row in features]),
    ):
        descriptor = os.open(target, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            for row, value in zip(rows.tolist(), values, strict=True):
                if os.pwrite(descriptor, value, row * width) != width:
                    raise OSError(28, "No space left on device")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _checksum(raw: NDArray[np.uint8]) -> int:
    return zlib.crc32(np.ascontiguousarray(raw).data) or 1  # 0 stands for "not there"


def _key(model: Embedder, table: Table) -> str:
    assert model.backbone is not None
    described = {
        "data": table.fingerprint,
        "stored": list(table.images.shape),
        "reading": reading.VERSION,
        "augment": model.augment,
        "backbone": [model.model.backbone, fingerprint(model.backbone)],
        "pixels": [model.mean.flatten().tolist(), model.std.flatten().tolist(), model.bgr],
        "pool": [model.model.pool, model.model.gem_p, model.model.feature_levels],
        "input": list(model.image_shape),
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:20]
