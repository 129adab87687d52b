"""Features of a frozen backbone, computed once and cached on disk, so that a head trains in seconds per epoch."""

import hashlib
import json
import os
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin._common.files import file_lock, full_disk
from nearkin._common.progress import Reporter
from nearkin.data import reading
from nearkin.data.cache_entries import cache_dir, mark_used
from nearkin.data.images import Rows
from nearkin.data.table import Table
from nearkin.errors import DataError
from nearkin.models.backbones import JoinedBackbone, joined_names
from nearkin.models.embedder import Embedder
from nearkin.models.weights import fingerprint

_BATCH_SIZE = 64  # small, so that progress is steady with slow networks too
_MAX_MAPS = 8e9  # bytes of feature maps held in memory
_SAVE_SECONDS = 5.0  # between writes to the cache: what a kill loses


class FrozenFeatures:
    """Disk cache of the pooled features of one data source and one backbone, filled on demand.

    There is one file for each network of the backbone and each view of the images. Its name is a hash of everything
    that can change a feature: the data, the weights, the preprocessing. Each row has a checksum, so that an interrupted
    run resumes and a damaged row is recomputed. Folds, seeds, losses, embedding sizes and joined backbones share the
    files; features of the test classes are computed only when these are opened.

    Args:
        model: The model whose backbone computes the features.
        table: The whole data source.
        on_disk: False computes the features without caching them.
        reporter: Shows the progress.
    """

    def __init__(self, model: Embedder, table: Table, *, on_disk: bool = True, reporter: Reporter) -> None:
        self.model = model
        self.files = [
            [
                _RowFile(model, table, on_disk, reporter, width, network=i, mirrored=view == 1)
                for view in range(model.model.views)
            ]
            for i, width in enumerate(model.widths)
        ]

    def add_to(self, part: Table) -> Table:
        """Return the same rows with `features`, computed where the cache lacks them."""
        networks = []
        for files in self.files:
            views = [file.rows(part) for file in files]
            networks.append(torch.from_numpy(views[0] if len(views) == 1 else (views[0] + views[1]) / 2))
        return replace(part, features=self.model.join(networks).numpy())


class StemMaps:
    """Disk cache of the inputs of the trained stages of a backbone (`model.freeze` stages), in half precision.

    Args:
        model: The model whose stem computes them.
        table: The whole data source.
        on_disk: False computes them without caching them.
        reporter: Shows the progress.
    """

    def __init__(self, model: Embedder, table: Table, *, on_disk: bool = True, reporter: Reporter) -> None:
        assert model.cut is not None
        width, views = model.cut.size, range(model.model.views)
        self.files = [_RowFile(model, table, on_disk, reporter, width, mirrored=view == 1, stem=True) for view in views]

    def add_to(self, part: Table) -> Table:
        """Return the same rows with the maps of each view of the image as `features`."""
        size = len(part) * len(self.files) * self.files[0].row_bytes
        if size > _MAX_MAPS:
            raise DataError(
                f"{part.source}: training the last stages would hold {size / 1e9:.1f} GB of feature maps in memory "
                f"(limit {_MAX_MAPS / 1e9:.0f} GB). Use fewer --model.tuned-stages, or --freeze backbone or none."
            )
        return replace(part, features=np.concatenate([file.rows(part) for file in self.files], axis=1))


class _RowFile:
    """A row for each image of a source: features of a network or maps of its stem, of one of two views."""

    def __init__(
        self,
        model: Embedder,
        table: Table,
        on_disk: bool,
        reporter: Reporter,
        width: int,
        *,
        network: int = 0,
        mirrored: bool = False,
        stem: bool = False,
    ) -> None:
        self.model, self.reporter, self.source = model, reporter, table.source
        self.total, self.width, self.network, self.mirrored, self.stem = len(table), width, network, mirrored, stem
        self.dtype = np.dtype(np.float16 if stem else np.float32)
        self.row_bytes = width * self.dtype.itemsize
        self.name, key = _name_and_key(model, table, network, mirrored, stem)
        self.path = cache_dir() / "features" / f"{key}.f{8 * self.dtype.itemsize}" if on_disk else None

    def rows(self, part: Table) -> NDArray[Any]:
        """Return the rows [N, width] of a part of the source, from the file where it has them."""
        out = np.empty((len(part), self.width), self.dtype)
        if self.path is None:
            self._compute(part, np.arange(len(part)), out)
            return out
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # A second process waits here, then finds the rows in the cache.
            with file_lock(self.path.with_suffix(".lock"), wait=True):
                mark_used(self.path, f"{self.source}, {self.name} at {self.model.image_shape[-1]} pixels")
                missing = self._read(part.row_numbers, out)
                if len(missing):
                    what = f"{'feature maps' if self.stem else 'features'} of {self.name}"
                    what += ", mirrored" if self.mirrored else ""
                    size = f"{1e-6 * self.row_bytes * self.total:,.1f} MB"
                    self.reporter.info(
                        f"{what}: {len(missing):,} images to process; cache: up to {size} in {self.path}"
                    )
                    self._compute(part, missing, out)
        except OSError as error:
            error = full_disk(error, self.path, self.row_bytes * self.total) or error
            raise DataError(
                f"{self.path}: cannot cache the features ({error.strerror or error}); cached ones stay valid.\n"
                "Free some space, set NEARKIN_CACHE to another folder, or use --data.no-cache."
            ) from None
        return out

    def _read(self, rows: Rows, features: NDArray[Any]) -> Rows:
        """Read cached rows into `features`; return the positions of those that are missing or damaged."""
        assert self.path is not None
        size, checksum_file = self.row_bytes, self.path.with_suffix(".crc")
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
                features[position] = raw.view(self.dtype)
            else:
                missing.append(position)
        return np.array(missing, np.int64)

    def _compute(self, part: Table, positions: Rows, features: NDArray[Any]) -> None:
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
                for batch in self.model.stream(self._compute_batch, images, _BATCH_SIZE):
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

    def _compute_batch(self, images: Tensor) -> Tensor:
        images = images.flip(-1) if self.mirrored else images
        return self.model.stem_maps(images) if self.stem else self.model.network_features(images, self.network)


def _write(path: Path, rows: Rows, features: NDArray[Any]) -> None:
    """Write the features, then their checksums: a row counts as written once its checksum matches."""
    size = features.shape[1] * features.itemsize
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


def _name_and_key(model: Embedder, table: Table, network: int, mirrored: bool, stem: bool) -> tuple[str, str]:
    """Return the name of a network, and the hash of what its features depend on."""
    assert model.backbone is not None
    name, backbone = model.model.backbone, model.backbone
    norm = [model.mean.flatten().tolist(), model.std.flatten().tolist(), model.bgr]
    if isinstance(backbone, JoinedBackbone):
        name, backbone = joined_names(name)[network], backbone.parts[network]
        pixel_norm = backbone.pixel_norm
        assert pixel_norm is not None
        norm = [*torch.tensor([pixel_norm.mean, pixel_norm.std]).tolist(), pixel_norm.bgr]
    content = {
        "data": table.fingerprint,
        "stored": list(table.images.shape),
        "reading": reading.VERSION,
        "augment": model.augment,
        "backbone": [name, fingerprint(backbone)],
        "pixels": norm,
        "pool": [model.model.pool, model.model.gem_p, model.model.feature_levels],
        "input": list(model.image_shape),
        **({"mirrored": True} if mirrored else {}),
        **({"tuned_stages": model.model.tuned_stages} if stem else {}),
        **model.own_dict(),
    }
    return name, hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:20]
