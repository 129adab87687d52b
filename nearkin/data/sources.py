"""Data sources: `load(recipe.data)` returns the images and labels of a recipe as one `Table`."""

import functools
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin._common.progress import Reporter
from nearkin._common.words import agreeing, counted
from nearkin.config.recipe import DataConfig
from nearkin.data import glyphs
from nearkin.data.benchmarks import BENCHMARKS
from nearkin.data.cache import Opened, open_images
from nearkin.data.images import FileImages, NoImages, Rows, file_digest
from nearkin.data.listing import (
    COLUMNS,
    TABLE_SUFFIXES,
    Listing,
    encode_labels,
    list_folder,
    list_table,
    metadata_files,
    parse_parts,
)
from nearkin.data.loading import map_with_progress
from nearkin.data.splits import check_parts, merge_shared_parts
from nearkin.data.table import Table
from nearkin.data.transforms import AUGMENTS
from nearkin.errors import ConfigError, DataError, UserError, did_you_mean

SOURCES = ("glyphs", *BENCHMARKS, "folder", "table", "features")
OWN = "own"  # the source of data that were passed in Python
FEATURE_SUFFIXES = {".npz", ".npy"}
# Accepted names of each array in an .npz, ours first.
_ARRAYS = {"features": ("features", "embeddings"), "labels": ("labels",), "part": COLUMNS["part"]}


def load(data: DataConfig, reporter: Reporter | None = None) -> Table:
    """Load the images and labels of a recipe.

    Args:
        data: The data section of a recipe.
        reporter: Reports what is loaded and what is skipped; by default nothing does.

    Returns:
        All images, not yet split.

    Raises:
        DataError: If the source is incomplete or unreadable.
    """
    reporter = reporter or Reporter(quiet=True)
    for name, given, sources in (
        ("crop_to_boxes", data.crop_to_boxes, ("table", *BENCHMARKS)),
        ("path_column", data.path_column, ("table",)),
        ("label_column", data.label_column, ("table",)),
    ):
        if given and data.source not in sources:
            raise ConfigError(f"data.{name}: a source of type {data.source} does not use it. Remove it.")
    if data.source == "glyphs":
        reporter.info("data: glyphs, drawn from matplotlib's fonts")
        return _load_glyphs(data.max_classes, data.max_per_class)
    if data.source == "features":
        table = load_features(_root(data, "an .npz file of features and labels with --data FILE"))
        assert table.features is not None
        shape = f"{len(table):,} features of {table.features.shape[1]:,} dimensions, {table.num_classes:,} classes"
        reporter.info(f"data: {shape}, from {data.root}")
        return restrict_table(table, data, reporter)
    return open_listing(list_source(data), data, reporter)


def open_listing(listing: Listing, data: DataConfig, reporter: Reporter, *, channels: int = 3) -> Table:
    """Report what a listing has, and open its images as a table."""
    counts = f"{counted(len(listing), 'image')} of {counted(len(listing.class_names), 'class')}"
    reporter.info(f"data: {data.source}, {counts} from {listing.root}")
    notes = listing.notes + _report_merge(len(listing.shared_classes), len(listing.class_names), reporter)
    check_parts(listing, data)
    return make_table(replace(listing, notes=notes), data, reporter, channels=channels)


def restrict_table(table: Table, data: DataConfig, reporter: Reporter) -> Table:
    """Merge the parts of a table if they share their classes, and take the subset that the settings name."""
    part, shared = merge_shared_parts(table.labels, table.part)
    table = replace(table, part=part, notes=table.notes + _report_merge(len(shared), table.num_classes, reporter))
    return _subset_table(table, data)


def _report_merge(shared: int, classes: int, reporter: Reporter) -> tuple[str, ...]:
    """Report that parts which share classes were merged. Returns this as a note for the result, if there were any."""
    if not shared:
        return ()
    found = f"{shared:,} of {classes:,} classes are in several of training, validation and test, as for a classifier"
    reporter.info(f"data: {found}; these parts are merged and split by class: held-out classes must be unseen")
    return (f"{found}; these parts were merged",)


def list_source(data: DataConfig) -> Listing:
    """List the files and labels of a source without decoding any image."""
    if data.source in BENCHMARKS:
        listing = BENCHMARKS[data.source].list(data.root, allow_missing=data.allow_missing)
    elif data.source == "folder":
        listing = list_folder(_root(data, "a folder of class folders with --data FOLDER"))
    elif data.source == "table":
        root = _root(data, "a .csv or .parquet file with --data FILE")
        listing = list_table(root, path_column=data.path_column, label_column=data.label_column)
        refuse_missing(listing, data, str(root), "the folder of the table")
    elif data.source == OWN:
        raise DataError(
            "data.source: own means data that were passed in Python, which a recipe cannot load.\n"
            "Pass them again: nk.fit(recipe, data=...), or nearkin.report.write_page(run, data=...) for a report."
        )
    else:
        hint = did_you_mean(data.source, SOURCES) or f" Available sources: {', '.join(SOURCES)}."
        raise UserError(f"data.source: no source named '{data.source}'.{hint}")
    return restrict_listing(listing, data)


def refuse_missing(listing: Listing, data: DataConfig, name: str, folder: str) -> None:
    """Refuse a listing of files that do not exist; their paths are relative to this folder."""
    if listing.missing and not data.allow_missing:
        total = len(listing) + len(listing.missing)
        raise DataError(
            f"{name}: {len(listing.missing):,} of {total:,} listed files do not exist, first {listing.missing[0]}.\n"
            f"Paths are relative to {folder}; --data.allow-missing ignores missing files."
        )


def restrict_listing(listing: Listing, data: DataConfig) -> Listing:
    """Merge the parts of a listing if they share their classes, and take the subset that the settings name."""
    if data.crop_to_boxes and listing.boxes is None:
        raise DataError(f"{listing.source}: has no boxes to crop to. Remove --data.crop_to_boxes.")
    part, shared = merge_shared_parts(listing.labels, listing.part)
    names = tuple(listing.class_names[label] for label in shared)
    listing = replace(listing, part=part, shared_classes=names, boxes=listing.boxes if data.crop_to_boxes else None)
    rows = _subset_rows(listing.labels, listing.part, data)
    return listing if rows is None else listing.take(rows).without_empty_classes()


def _subset_rows(labels: NDArray[np.int64], part: NDArray[np.str_] | None, data: DataConfig) -> Rows | None:
    """Return the rows that max_classes and max_per_class leave; None if neither is set."""
    if data.max_classes is None and data.max_per_class is None:
        return None
    classes = np.unique(labels)
    wanted = min(data.max_classes or len(classes), len(classes))
    classes = classes[np.linspace(0, len(classes) - 1, wanted).round().astype(np.int64)]
    parts = np.zeros(len(labels), np.int64) if part is None else np.unique(part, return_inverse=True)[1]
    groups = labels * (parts.max(initial=0) + 1) + parts
    order = np.argsort(groups, kind="stable")
    _, starts, counts = np.unique(groups[order], return_index=True, return_counts=True)
    rank = np.empty(len(labels), np.int64)
    rank[order] = np.arange(len(labels)) - np.repeat(starts, counts)
    return np.flatnonzero(np.isin(labels, classes) & (rank < (data.max_per_class or len(labels))))


@functools.lru_cache(maxsize=4)  # rehearsals load the same one for every trial
def _load_glyphs(max_classes: int | None, max_per_class: int | None) -> Table:
    return _subset_table(glyphs.load(), DataConfig(max_classes=max_classes, max_per_class=max_per_class))


def _subset_table(table: Table, data: DataConfig) -> Table:
    rows = _subset_rows(table.labels, table.part, data)
    if rows is None:
        return table
    subset = table.take(rows)
    subset = subset.of_classes(np.unique(subset.labels))
    # A full table of its own: the fingerprint names caches and runs.
    return replace(subset, rows=None, fingerprint=f"{table.fingerprint}-{len(rows)}")


def _root(data: DataConfig, expected: str) -> Path:
    if data.root is None:
        raise DataError(f"data.root: missing. Give {expected}.")
    return data.root


def detect_source(path: Path) -> str:
    """Detect the type of source at a path: by its suffix, a benchmark's official files, or a metadata.csv."""
    if path.suffix.lower() in TABLE_SUFFIXES and not path.is_dir():
        return "table"
    if path.suffix.lower() in FEATURE_SUFFIXES and not path.is_dir():
        return "features"
    for name, benchmark in BENCHMARKS.items():
        if benchmark.marked_folder(path):
            return name
    return "table" if path.is_dir() and metadata_files(path) else "folder"


def make_table(listing: Listing, data: DataConfig, reporter: Reporter, *, channels: int = 3) -> Table:
    """Open the listed images as a table, without classes that have no images."""
    if listing.unopened and not data.skip_broken:
        folders = counted(len(listing.unopened), "folder")
        raise DataError(
            f"{listing.root}: {folders} cannot be opened, first {listing.unopened[0]}.\n"
            f"Fix their permissions, or skip them with --data.skip-broken."
        )
    loose = [listing.shown(path) for path in listing.unlabelled]
    for what, names in (("folders without images", listing.empty), ("images outside any class folder", loose)):
        if names:
            reporter.info(f"data: ignoring {agreeing(len(names), what)}: {', '.join(names[:3])}")
    opened = images_of(listing, data, reporter, channels=channels)
    notes = listing.notes
    if listing.missing and not notes:
        notes += (f"{counted(len(listing.missing), 'listed file')} did not exist",)
    if opened.broken:
        notes += (agreeing(len(opened.broken), "images could not be read and were skipped"),)
        listing = listing.take(opened.kept)
    digests = opened.digests or map_with_progress(file_digest, listing.paths, reporter, "reading the files")
    listing = replace(listing.without_empty_classes(), notes=notes)
    content = fingerprint(digests, listing.labels, listing.class_names, listing.part, listing.boxes)
    return listing.to_table(opened.images, content)


def images_of(listing: Listing, data: DataConfig, reporter: Reporter, *, channels: int = 3) -> Opened:
    """Open image files as a store, at the size that the recipe's augmentation crops from."""
    side = AUGMENTS[data.augment].stored_side(data.image_size)
    boxes = None if listing.boxes is None else listing.boxes.astype(np.float64)
    return open_images(
        FileImages(listing.paths, side, boxes=boxes, channels=channels, workers=data.num_workers),
        cache=data.cache,
        limit_gb=data.max_cache_gb,
        on_broken="skip" if data.skip_broken else "stop",
        reporter=reporter,
    )


def fingerprint(
    contents: Iterable[bytes],
    labels: NDArray[Any],
    class_names: Sequence[str],
    part: NDArray[np.str_] | None = None,
    boxes: NDArray[np.int64] | None = None,
) -> str:
    """Hash everything about the data that can change a score. Returns 16 hexadecimal digits."""
    digest = hashlib.sha256(repr(tuple(class_names)).encode())
    digest.update(np.ascontiguousarray(labels, np.int64).tobytes())
    digest.update(b"" if part is None else "\n".join(part.tolist()).encode())
    digest.update(b"" if boxes is None else np.ascontiguousarray(boxes, np.int64).tobytes())
    for content in contents:
        digest.update(content)
    return digest.hexdigest()[:16]


def load_features(path: Path, labels: Path | None = None) -> Table:
    """Load precomputed features of any modality.

    Args:
        path: An .npz with `features` [N, D] and `labels` [N] (integers or text), optionally `part` or `split` [N]; or
            an .npy.
        labels: For an .npy: an .npy or a text file with one label per line; by default NAME.labels.npy or
            NAME.labels.txt in the same folder.

    Returns:
        A table without images.

    Raises:
        DataError: If the file cannot be read or is malformed.
    """
    arrays = _feature_arrays(path, labels)
    features = arrays["features"]
    if features.ndim != 2 or features.dtype.kind not in "fiu":
        raise DataError(f"{path}: features are {features.dtype} {list(features.shape)}, expected numeric [N, D].")
    columns = {key: _to_strings(arrays[key], key, len(features), path) for key in ("labels", "part") if key in arrays}
    if "" in columns["labels"]:
        raise DataError(f"{path}: row {columns['labels'].index('')} has no label. Fill it in or remove the row.")
    with np.errstate(over="ignore"):
        vectors = np.ascontiguousarray(features, np.float32)
    if len(invalid := np.flatnonzero(~np.isfinite(vectors).all(axis=1))):
        raise DataError(f"{path}: NaN or infinity in {counted(len(invalid), 'feature')}, first in row {invalid[0]}.")
    class_labels, class_names = encode_labels(columns["labels"])
    part = parse_parts(columns["part"], path) if "part" in columns else None
    return Table(
        source=path.stem,
        labels=class_labels,
        class_names=class_names,
        images=NoImages(path.name, len(vectors)),
        fingerprint=fingerprint([vectors.tobytes()], class_labels, class_names, part),
        part=part,
        features=vectors,
    )


def _to_strings(values: NDArray[Any], key: str, count: int, path: Path) -> list[str]:
    """Convert an array of numbers, text or bytes to one string per row; NaN becomes an empty string."""
    if values.shape != (count,):
        raise DataError(f"{path}: {key} have shape {list(values.shape)}, expected one for each of {count} features.")
    try:
        values = np.char.decode(values, "utf-8") if values.dtype.kind == "S" else values
    except UnicodeDecodeError:
        raise DataError(f"{path}: {key} are bytes that are not UTF-8. Save them as text.") from None
    return ["" if value != value else str(value) for value in values.tolist()]


def _feature_arrays(path: Path, labels: Path | None) -> dict[str, NDArray[Any]]:
    try:
        if path.suffix.lower() == ".npz":
            # Opened here: np.load does not close a file that proves broken.
            with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
                arrays = {
                    key: stored[next(name for name in names if name in stored.files)]
                    for key, names in _ARRAYS.items()
                    if set(names) & set(stored.files)
                }
        else:
            defaults = [path.with_suffix(f".labels{suffix}") for suffix in (".npy", ".txt")]
            labels = labels or next((p for p in defaults if p.exists()), None)
            if labels is None:
                raise DataError(f"{path}: labels not found. Expected {defaults[0]} or {defaults[1].name}.")
            lines = None if labels.suffix == ".npy" else labels.read_text(encoding="utf-8").splitlines()
            arrays = {
                "features": np.load(path, allow_pickle=False),
                "labels": np.load(labels, allow_pickle=False) if lines is None else np.array(lines),
            }
    except FileNotFoundError as error:
        raise DataError(f"{error.filename}: no such file.") from None
    except DataError:
        raise
    except Exception as error:  # unzipping, parsing the header and reading the array raise different exceptions
        raise DataError(f"{path}: cannot be read as features ({str(error).splitlines()[0]}).") from None
    for key in ("features", "labels"):
        if key not in arrays:
            raise DataError(f"{path}: no array named '{key}'. Save it with np.savez(path, features=..., labels=...).")
    return arrays
