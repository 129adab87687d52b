"""Where a recipe's images come from: `load(recipe.data)` returns one `Table`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin._common.progress import Reporter
from nearkin.config.recipe import DataConfig
from nearkin.data import glyphs
from nearkin.data.benchmarks import BENCHMARKS
from nearkin.data.cache import Opened, open_images
from nearkin.data.images import FileImages, file_digest
from nearkin.data.listing import (
    TABLE_SUFFIXES,
    Listing,
    known_parts,
    list_folder,
    list_table,
    metadata_files,
    number_classes,
)
from nearkin.data.table import NoImages, Table
from nearkin.data.transforms import AUGMENTS
from nearkin.errors import DataError, UserError, did_you_mean

SOURCES = ("glyphs", *BENCHMARKS, "folder", "table", "features")
FEATURE_SUFFIXES = {".npz", ".npy"}


def load(data: DataConfig, reporter: Reporter) -> Table:
    """The images and labels that a recipe names."""
    if data.source == "glyphs":
        reporter.info("data: glyphs, drawn from matplotlib's fonts")
        return glyphs.load()
    if data.source == "features":
        if data.root is None:
            raise DataError("data.root: an .npz file of features and labels is needed. Give it with --data FILE.")
        table = load_features(data.root)
        assert table.features is not None
        shape = f"{len(table):,} features of {table.features.shape[1]:,} numbers, {table.num_classes:,} classes"
        reporter.info(f"data: {shape}, from {data.root}")
        return table
    listing = list_source(data)
    counted = f"{len(listing):,} images of {len(listing.class_names):,} classes"
    reporter.info(f"data: {data.source}, {counted} from {listing.root}")
    return table_of(listing, data, reporter)


def list_source(data: DataConfig) -> Listing:
    """What the source lists, without decoding anything."""
    if data.source in BENCHMARKS:
        return BENCHMARKS[data.source].list(data.root, allow_missing=data.allow_missing)
    if data.source == "folder":
        if data.root is None:
            raise DataError("data.root: a folder of class folders is needed. Give it with --data FOLDER.")
        return list_folder(data.root)
    if data.source == "table":
        if data.root is None:
            raise DataError("data.root: a .csv or .parquet file is needed. Give it with --data FILE.")
        listing = list_table(data.root, path_column=data.path_column, label_column=data.label_column)
        if listing.missing and not data.allow_missing:
            total = len(listing) + len(listing.missing)
            raise DataError(
                f"{data.root}: {len(listing.missing):,} of {total:,} files it lists are not there, first "
                f"{listing.missing[0]}.\n"
                f"Paths are relative to the folder of the file; --data.allow-missing goes on without them."
            )
        return listing
    hint = did_you_mean(data.source, SOURCES) or f" There are: {', '.join(SOURCES)}."
    raise UserError(f"data.source: no source named '{data.source}'.{hint}")


def detect_source(path: Path) -> str:
    """The source that fits what lies at a path, for `--data PATH`.

    A benchmark is known by its official files, a table by its suffix or its metadata.csv; all else is a folder.
    """
    if path.suffix.lower() in TABLE_SUFFIXES and not path.is_dir():
        return "table"
    if path.suffix.lower() in FEATURE_SUFFIXES and not path.is_dir():
        return "features"
    for name, benchmark in BENCHMARKS.items():
        if any((place / file).exists() for place in (path, path / benchmark.folder) for file in benchmark.needs):
            return name
    return "table" if path.is_dir() and metadata_files(path) else "folder"


def table_of(listing: Listing, data: DataConfig, reporter: Reporter) -> Table:
    """The listed images as a table, read as `data` asks; what cannot be read stops it or is left out, and named."""
    if data.crop_to_boxes and listing.boxes is None:
        raise DataError(f"{listing.source}: has no boxes to cut to. Leave out --data.crop_to_boxes.")
    if listing.unopened and not data.skip_broken:
        raise DataError(
            f"{listing.root}: {len(listing.unopened)} folders cannot be opened, first {listing.unopened[0]}.\n"
            f"Change their permissions, or leave them out with --data.skip-broken."
        )
    if listing.empty:
        shown = ", ".join(listing.empty[:3])
        reporter.info(f"data: {len(listing.empty)} folders hold no image and are left out: {shown}")
    if listing.loose:
        shown = ", ".join(map(listing.shown, listing.loose[:3]))
        reporter.info(f"data: {len(listing.loose)} images lie in no class folder and are left out: {shown}")
    boxes = listing.boxes if data.crop_to_boxes else None
    opened = images_of(listing.paths, data, reporter, boxes)
    notes = listing.notes
    if listing.missing and not notes:
        notes += (f"{len(listing.missing):,} listed files were not there",)
    if opened.broken:
        notes += (f"{len(opened.broken):,} images could not be read and were left out",)
        listing = listing.take(opened.kept)
        boxes = None if boxes is None else boxes[opened.kept]
    digests = file_digests(listing.paths) if opened.digests is None else opened.digests
    present, labels = np.unique(listing.labels, return_inverse=True)
    names_kept = tuple(listing.class_names[c] for c in present)
    return Table(
        source=listing.source,
        labels=labels.astype(np.int64),
        class_names=names_kept,
        images=opened.images,
        fingerprint=fingerprint(digests, labels, names_kept, listing.part, boxes),
        paths=listing.paths,
        part=listing.part,
        groups=listing.groups,
        boxes=boxes,
        notes=notes,
    )


def images_of(paths: Sequence[Path], data: DataConfig, reporter: Reporter, boxes: NDArray[np.int64] | None) -> Opened:
    """The store that holds these files' pixels, at the size from which the recipe's augmentation is cut."""
    side = AUGMENTS[data.augment].stored_side(data.image_size)
    return open_images(
        FileImages(paths, side, boxes=None if boxes is None else boxes.astype(np.float64), workers=data.num_workers),
        cache=data.cache,
        limit_gb=data.max_cache_gb,
        on_broken="skip" if data.skip_broken else "stop",
        reporter=reporter,
    )


def file_digests(paths: Iterable[Path]) -> list[bytes]:
    return [file_digest(path) for path in paths]


def fingerprint(
    contents: Iterable[bytes],
    labels: NDArray[Any],
    class_names: Sequence[str],
    part: NDArray[np.str_] | None = None,
    boxes: NDArray[np.int64] | None = None,
) -> str:
    """A hash of all that can change a number: contents in their order, labels, classes, parts and boxes."""
    whole = hashlib.sha256(repr(tuple(class_names)).encode())
    whole.update(np.ascontiguousarray(labels, np.int64).tobytes())
    whole.update(b"" if part is None else "\n".join(part.tolist()).encode())
    whole.update(b"" if boxes is None else np.ascontiguousarray(boxes, np.int64).tobytes())
    for content in contents:
        whole.update(content)
    return whole.hexdigest()[:16]


def load_features(path: Path, labels: Path | None = None) -> Table:
    """Ready vectors of any modality: an .npz with `features` [N, D] and `labels` [N], or an .npy and its labels.

    labels: for an .npy, a second .npy or a text file with one label per line; by default NAME.labels.npy or
    NAME.labels.txt beside it. Labels may be numbers or text. An array `part` in the .npz is taken as the rows' part.
    """
    arrays = _feature_arrays(path, labels)
    features = arrays["features"]
    if features.ndim != 2 or features.dtype.kind not in "fiu":
        raise DataError(f"{path}: features are {features.dtype} {list(features.shape)}, expected numbers [N, D].")
    words = {key: _words(arrays[key], key, len(features), path) for key in ("labels", "part") if key in arrays}
    if "" in words["labels"]:
        raise DataError(f"{path}: row {words['labels'].index('')} has no label. Fill it in or remove the row.")
    with np.errstate(over="ignore"):
        vectors = np.ascontiguousarray(features, np.float32)
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(bad):
        raise DataError(f"{path}: {len(bad)} features hold NaN or infinity, first row {bad[0]}.")
    numbers, names = number_classes(words["labels"])
    part = known_parts(words["part"], path) if "part" in words else None
    return Table(
        source=path.stem,
        labels=numbers,
        class_names=names,
        images=NoImages(path.name, len(vectors)),
        fingerprint=fingerprint([vectors.tobytes()], numbers, names, part),
        part=part,
        features=vectors,
    )


def _words(given: NDArray[Any], key: str, count: int, path: Path) -> list[str]:
    """One word per row out of an array of numbers, text or bytes; NaN is an empty one."""
    if given.shape != (count,):
        raise DataError(f"{path}: {count} features and {key} of shape {list(given.shape)}; expected one each.")
    try:
        given = np.char.decode(given, "utf-8") if given.dtype.kind == "S" else given
    except UnicodeDecodeError:
        raise DataError(f"{path}: {key} are bytes that are not UTF-8. Save them as text.") from None
    return ["" if value != value else str(value) for value in given.tolist()]


def _feature_arrays(path: Path, labels: Path | None) -> dict[str, NDArray[Any]]:
    try:
        if path.suffix.lower() == ".npz":
            with np.load(path, allow_pickle=False) as stored:
                arrays = {
                    key: stored[key] for key in stored.files if key in ("features", "embeddings", "labels", "part")
                }
            if "embeddings" in arrays:
                arrays.setdefault("features", arrays["embeddings"])
        else:
            beside = [path.with_suffix(f".labels{suffix}") for suffix in (".npy", ".txt")]
            labels = labels or next((p for p in beside if p.exists()), None)
            if labels is None:
                raise DataError(f"{path}: its labels are needed as well; looked for {beside[0]} and {beside[1].name}.")
            lines = None if labels.suffix == ".npy" else labels.read_text(encoding="utf-8").splitlines()
            arrays = {
                "features": np.load(path, allow_pickle=False),
                "labels": np.load(labels, allow_pickle=False) if lines is None else np.array(lines),
            }
    except FileNotFoundError as error:
        raise DataError(f"{error.filename}: no such file.") from None
    except DataError:
        raise
    except Exception as error:  # a damaged archive fails in the unzipper, the header parser or the array reader
        raise DataError(f"{path}: cannot be read as features ({str(error).splitlines()[0]}).") from None
    for key in ("features", "labels"):
        if key not in arrays:
            raise DataError(f"{path}: no array named '{key}'. Save with np.savez(path, features=..., labels=...).")
    return arrays
