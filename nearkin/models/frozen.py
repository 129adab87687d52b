"""Features of a frozen backbone, computed once and cached on disk, so that a head trains in seconds per epoch."""

import hashlib
import json
import os
import time
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nearkin._common.files import file_lock, full_disk
from nearkin._common.progress import Reporter
from nearkin.data import reading
from nearkin.data.cache_entries import cache_dir, mark_used
from nearkin.data.images import Rows
from nearkin.data.table import Table
from nearkin.errors import DataError
from nearkin.models.embedder import Embedder
from nearkin.models.weights import fingerprint

_BATCH_SIZE = 64  # small, so that progress is steady with slow networks too
_SAVE_SECONDS = 5.0  # between writes to the cache: what a kill loses


class FrozenFeatures:
    """Disk cache of the pooled features of one data source and one backbone, filled on demand.

    The file name is a hash of everything that can change a feature: the data, the weights, the preprocessing. Each row
    has a checksum, so that an interrupted run resumes and a damaged row is recomputed. Folds, seeds, losses and
    embedding sizes share one file; features of the test classes are computed only when these are opened.

    Args:
        model: The model whose backbone computes the features.
        table: The whole data source.
        on_disk: False computes the features without caching them.
        views: 1 for the image; 2 for the mean of the features of the image and of its mirror image.
        reporter: Shows the progress.
    """

    def __init__(self, model: Embedder, table: Table, reporter: Reporter, on_disk: bool = True, views: int = 1) -> None:
        self.model, self.total, self.width, self.reporter = model, len(table), model.num_features, reporter
        self.views, self.source = views, table.source
        self.path = cache_dir() / "features" / f"{_key(model, table, views)}.f32" if on_disk else None

    def add_to(self, part: Table) -> Table:
        """Return the same rows with `features`, computed where the cache lacks them."""
        features = np.empty((len(part), self.width), np.float32)
        if self.path is None:
            self._compute(part, np.arange(len(part)), features)
            return replace(part, features=features)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # A second process waits here, then finds the rows in the cache.
            with file_lock(self.path.with_suffix(".lock"), wait=True):
                name, side = self.model.model.backbone, self.model.image_shape[-1]
                mark_used(self.path, f"{self.source}, {name} at {side} pixels")
                missing = self._read(part.row_numbers, features)
                if len(missing):
                    where = f"up to {4e-6 * self.width * self.total:,.1f} MB in {self.path}"
                    self.reporter.info(f"features: {len(missing):,} images to process; cache: {where}")
                    self._compute(part, missing, features)
        except OSError as error:
            error = full_disk(error, self.path, 4 * self.width * self.total) or error
            raise DataError(
                f"{self.path}: cannot cache the features ({error.strerror or error}); cached ones stay valid.\n"
                "Free some space, set NEARKIN_CACHE to another folder, or use --data.no-cache."
            ) from None
        return replace(part, features=features)

    def _read(self, rows: Rows, features: NDArray[np.float32]) -> Rows:
        """Read cached rows into `features`; return the positions of those that are missing or damaged."""
        assert self.path is not None
        size, checksum_file = 4 * self.width, self.path.with_suffix(".crc")
        if not self.path.exists() or not checksum_file.exists():
            return np.arange(len(rows))
        checksums = np.zeros(self.total, np.uint32)
        written = np.fromfile(checksum_file, np.uint32)[: self.total]
        checksums[: len(written)] = written
        cached = np.memmap(self.path, np.uint8, mode="r") if self.path.stat().st_size else np.empty(0, np.uint8)
        missing = []
        for position, row in enumerate(rows.tolist()):
            raw = cached[row * size : (row + 1) * size]
            if checksums[row] and len(raw) == size and _checksum(raw) == checksums[row]:
                features[position] = raw.view(np.float32)
            else:
                missing.append(position)
        return np.array(missing, np.int64)

    def _compute(self, part: Table, positions: Rows, features: NDArray[np.float32]) -> None:
        """Compute the features at these positions of `part`, and write them to the cache if there is one."""
        images = part.images.take(positions)
        done, saved, saved_at = 0, 0, time.monotonic()

        def save() -> None:
            nonlocal saved, saved_at
            if self.path is not None and done > saved:
                chunk = positions[saved:done]
                _write(self.path, part.row_numbers[chunk], features[chunk])
                saved, saved_at = done, time.monotonic()

        with self.reporter.track("features", len(positions), unit="img") as bar:
            try:
                for batch in self.model.stream(self._features_of, images, _BATCH_SIZE):
                    chunk = positions[done : done + len(batch)]
                    features[chunk] = batch.numpy()
                    bad = chunk[~np.isfinite(features[chunk]).all(axis=1)]
                    if len(bad):
                        name = part.paths[bad[0]] if part.paths else f"row {part.row_numbers[bad[0]]}"
                        reason = "the backbone's features are not finite. Check its weights, or the image."
                        raise DataError(f"{name}: {reason}")
                    done += len(batch)
                    bar.advance(len(batch))
                    if time.monotonic() - saved_at >= _SAVE_SECONDS:
                        save()
            finally:
                save()

    def _features_of(self, images: Tensor) -> Tensor:
        features = self.model.features(images)
        return features if self.views == 1 else (features + self.model.features(images.flip(-1))) / 2


def _write(path: Path, rows: Rows, features: NDArray[np.float32]) -> None:
    """Write the features, then their checksums: a row counts as written once its checksum matches."""
    size = features.shape[1] * 4
    for target, width, values in (
        (path, size, [row.tobytes() for row in features]),
        (path.with_suffix(".crc"), 4, [_checksum(row.view(np.uint8)).to_bytes(4, "little") for row in features]),
    ):
        target.touch()
        with open(target, "rb+") as file:
            for row, value in zip(rows.tolist(), values, strict=True):
                file.seek(row * width)
                file.write(value)
            file.flush()
            os.fsync(file.fileno())


def _checksum(raw: NDArray[np.uint8]) -> int:
    return zlib.crc32(np.ascontiguousarray(raw).data) or 1  # 0 means "not written"


def _key(model: Embedder, table: Table, views: int) -> str:
    assert model.backbone is not None
    content = {
        "data": table.fingerprint,
        "stored": list(table.images.shape),
        "reading": reading.VERSION,
        "augment": model.augment,
        "backbone": [model.model.backbone, fingerprint(model.backbone)],
        "pixels": [model.mean.flatten().tolist(), model.std.flatten().tolist(), model.bgr],
        "pool": [model.model.pool, model.model.gem_p, model.model.feature_levels],
        "input": list(model.image_shape),
        **({} if views == 1 else {"views": views}),
        **model.own_dict(),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:20]
