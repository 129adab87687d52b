"""`Listing`: the files and labels of a folder, a CSV or Parquet file, or a benchmark, before any image is decoded."""

import csv
import importlib
import io
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from nearkin._common.words import counted
from nearkin.data.table import PARTS, Table
from nearkin.errors import DataError, MissingExtraError, did_you_mean

Columns = dict[str, list[str]]  # the columns of a table as text, by our names
IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
TABLE_SUFFIXES = {".csv", ".tsv", ".parquet"}
# Accepted names of each column, ours first.
COLUMNS = {
    "path": ("path", "file_name", "filename", "file", "image", "image_path", "filepath"),
    "label": ("label", "class", "class_name", "category", "target"),
    "part": ("part", "split", "subset", "evaluation_status"),
    "group": ("group", "super_class"),
    **{side: (side,) for side in "xywh"},
}
PART_ALIASES = {"training": "train", "valid": "val", "validation": "val", "dev": "val", "testing": "test"}


@dataclass(frozen=True)
class Counts:
    images: int
    classes: int


@dataclass(frozen=True)
class Listing:
    """Files with labels, as a source lists them. Row i is `paths[i]` of class `class_names[labels[i]]`."""

    source: str  # name of the source
    root: Path  # messages show paths relative to this folder
    paths: tuple[Path, ...] = field(repr=False)  # the image files
    labels: NDArray[np.int64] = field(repr=False)  # int64 [N], indices into class_names
    class_names: tuple[str, ...] = field(repr=False)  # [C]
    part: NDArray[np.str_] | None = field(default=None, repr=False)  # as in `Table`
    groups: NDArray[np.str_] | None = field(default=None, repr=False)  # as in `Table`
    boxes: NDArray[np.int64] | None = field(default=None, repr=False)  # as in `Table`
    empty: tuple[str, ...] = ()  # classes that the source names but that have no images
    unlabelled: tuple[Path, ...] = ()  # images outside any class folder
    ignored: tuple[Path, ...] = ()  # files among the images without an image suffix
    unopened: tuple[Path, ...] = ()  # folders that could not be opened
    # files that the source lists but that do not exist; never in `paths`
    missing: tuple[Path, ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = ()  # what readers of the scores must know
    # classes that were in several parts, which have therefore been merged
    shared_classes: tuple[str, ...] = field(default=(), repr=False)

    def __len__(self) -> int:
        return len(self.paths)

    def shown(self, path: Path) -> str:
        """Return a path as messages show it: relative to `root` if possible."""
        return path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else str(path)

    def take(self, rows: NDArray[np.int64]) -> Self:
        """Return a listing of these rows; labels and class names stay the same."""
        columns = ((name, getattr(self, name)) for name in ("labels", "part", "groups", "boxes"))
        selected = {name: column[rows] for name, column in columns if column is not None}
        return replace(self, paths=tuple(self.paths[r] for r in rows), **selected)

    def without_missing(self) -> Self:
        """Return the rows whose file exists (even as a broken link), with the others in `missing`."""
        exists = np.fromiter((os.path.lexists(path) for path in self.paths), bool, len(self.paths))
        missing = tuple(self.paths[r] for r in np.flatnonzero(~exists))
        return replace(self.take(np.flatnonzero(exists)), missing=missing) if missing else self

    def without_empty_classes(self) -> Self:
        """Return the same rows, relabelled without the classes that have none."""
        present, labels = np.unique(self.labels, return_inverse=True)
        return replace(self, labels=labels.astype(np.int64), class_names=tuple(self.class_names[c] for c in present))

    def to_table(self, images: Any, fingerprint: str) -> Table:
        columns = ("source", "labels", "class_names", "paths", "part", "groups", "boxes", "notes")
        return Table(images=images, fingerprint=fingerprint, **{name: getattr(self, name) for name in columns})

    def count_parts(self) -> dict[str, Counts]:
        """Count the images and classes of each part; empty if the source has no parts."""
        labels_of = {} if self.part is None else {part: self.labels[self.part == part] for part in PARTS}
        return {part: Counts(len(labels), len(np.unique(labels))) for part, labels in labels_of.items() if len(labels)}


def encode_labels(names: Sequence[str]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Convert class names to labels; names that are all numbers are sorted as such."""
    distinct = set(names)
    numeric = all(name.isascii() and name.isdigit() for name in distinct)
    class_names = sorted(distinct)  # "01" before "1"
    if numeric:  # like int(name), which Python refuses to compute for very long ones
        class_names.sort(key=lambda name: (len(name.lstrip("0")), name.lstrip("0")))
    label_of = {name: c for c, name in enumerate(class_names)}
    return np.array([label_of[name] for name in names], np.int64), tuple(class_names)


def part_name(word: str) -> str:
    """Return our name of a part: "Validation" is "val". An unknown one is returned in lower case."""
    word = word.strip().lower()
    return PART_ALIASES.get(word, word)


def parse_parts(words: Iterable[str], path: Path | str) -> NDArray[np.str_]:
    """Convert a column of parts to our names. Unknown parts are an error, so that a typo does not drop a split."""
    parts = [part_name(word) for word in words]
    unknown = sorted(set(parts) - set(PARTS))
    if unknown:
        raise DataError(f"{path}: unknown part '{unknown[0]}'. Expected one of {', '.join(PARTS)}.")
    return np.array(parts)


def list_folder(root: Path) -> Listing:
    """List the images of `root/CLASS/...`, or of `root/train/CLASS/...` and `root/test/CLASS/...`."""
    if not root.is_dir():
        raise DataError(f"{root}: no such folder. Expected a folder with one folder of images per class.")
    try:
        folders, tops = _subfolders(root), [root]
        # If all folders are named like parts (train/, test/), the classes are one level deeper.
        if all(part_name(f.name) in PARTS for f in folders) and any(map(_subfolders, folders)):
            folders.sort(key=lambda top: PARTS.index(part_name(top.name)))
            tops += folders
            classes = [(f, part_name(top.name)) for top in folders for f in _subfolders(top)]
        else:
            classes = [(f, "") for f in folders]
        unlabelled = [p for top in tops for p in sorted(top.iterdir()) if _has_image_suffix(p) and not p.is_dir()]
    except OSError as error:
        raise DataError(f"{root}: cannot be opened ({error.strerror}). Check its permissions.") from None
    rows: list[tuple[Path, str, str]] = []  # path, class, part
    ignored, unopened = list[Path](), list[Path]()
    for folder, part in classes:
        rows += [(path, folder.name, part) for path in list_image_files(folder, ignored, unopened)]
    labels, names = encode_labels([name for _, name, _ in rows])
    if len(names) < 2:
        found = f"found images in {counted(len(names), 'class folder')}, need at least 6"
        raise DataError(f"{root}: {found if rows else describe_other_files(root)}. Expected {root}/CLASS/IMAGE.jpg.")
    return Listing(
        source=root.resolve().name,
        root=root,
        paths=tuple(path for path, _, _ in rows),
        labels=labels,
        class_names=names,
        part=np.array([part for *_, part in rows]) if rows[0][2] else None,
        empty=tuple(folder.name for folder, _ in classes if folder.name not in names),
        unlabelled=tuple(unlabelled),
        ignored=tuple(ignored),
        unopened=tuple(unopened),
    )


def describe_other_files(root: Path) -> str:
    """Say what a folder without class folders of images contains instead."""
    others: list[Path] = []
    loose = list_image_files(root, others, [])
    if loose:
        return f"found {counted(len(loose), 'image')}, but no class folders"
    suffixes = Counter(path.suffix.lower() for path in others).most_common(3)
    kinds = " and ".join(counted(count, f"{suffix or 'other'} file") for suffix, count in suffixes)
    return f"found {kinds}, no images" if kinds else "the folder is empty"


def _subfolders(root: Path) -> list[Path]:
    return sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith((".", "__MACOSX")))


def _has_image_suffix(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".")


def list_image_files(folder: Path, ignored: list[Path], unopened: list[Path]) -> list[Path]:
    """List the image files below a folder, following links. Broken links are listed too, so that they are reported."""
    images: list[Path] = []
    # A link back to the folder or to one around it would loop, or list the images of other classes.
    visited = {os.path.realpath(parent) for parent in (*folder.absolute().parents, *folder.resolve().parents)}
    walk = os.walk(folder, followlinks=True, onerror=lambda error: unopened.append(Path(error.filename)))
    for top, subfolders, files in walk:
        real = os.path.realpath(top)
        if real in visited:
            subfolders.clear()
            continue
        visited.add(real)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for path in (Path(top) / name for name in sorted(files) if not name.startswith(".")):
            (images if _has_image_suffix(path) else ignored).append(path)
    return images


def list_table(path: Path, path_column: str | None = None, label_column: str | None = None, fewest: int = 2) -> Listing:
    """List the rows of a CSV, TSV or Parquet file, or of a folder with metadata.csv (or one per part)."""
    files = metadata_files(path) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path}: contains no metadata.csv. Add one (columns file_name and label), or give a .csv.")
    if not files[0].is_file():
        raise DataError(f"{path}: no such file. Expected a .csv or .parquet file with columns path and label.")
    columns: dict[str, list[str]] = {}
    paths: list[Path] = []
    for file in files:
        table, row_numbers = _read_parquet(file) if file.suffix.lower() == ".parquet" else _read_csv(file)
        rows = text_columns(table, {"path": path_column, "label": label_column}, str(file), row_numbers)
        if not rows["path"]:
            raise DataError(f"{file}: has a header but no rows.")
        paths += [file.parent / value for value in rows["path"]]
        # In a Hugging Face-style folder, the folder of metadata.csv names the part.
        if "part" not in rows and part_name(file.parent.name) in PARTS and path.is_dir():
            rows["part"] = [part_name(file.parent.name)] * len(rows["path"])
        if columns and set(columns) != set(rows):
            differing = ", ".join(sorted(set(columns) ^ set(rows)))
            raise DataError(f"{file}: its columns differ from those of {files[0]} ({differing}).")
        for name, values in rows.items():
            columns.setdefault(name, []).extend(values)
    root = path if path.is_dir() else path.parent
    return list_columns(columns, paths, path.resolve().stem, root, str(path), fewest).without_missing()


def list_columns(columns: Columns, paths: list[Path], source: str, root: Path, name: str, fewest: int = 2) -> Listing:
    """List the rows of a table whose columns have our names; errors call it `name`."""
    labels, names = encode_labels(columns["label"])
    if len(names) < fewest:
        found = counted(len(names), "class")
        raise DataError(f"{name}: found {found}, need at least {fewest}. Is the label column correct?")
    return Listing(
        source=source,
        root=root,
        paths=tuple(paths),
        labels=labels,
        class_names=names,
        part=parse_parts(columns["part"], name) if "part" in columns else None,
        groups=np.array(columns["group"]) if "group" in columns else None,
        boxes=_boxes(columns, name) if all(side in columns for side in "xywh") else None,
    )


def metadata_files(root: Path) -> list[Path]:
    """Find the metadata.csv of a Hugging Face-style folder."""
    if (root / "metadata.csv").is_file():
        return [root / "metadata.csv"]
    return sorted(p for p in root.glob("*/metadata.csv") if part_name(p.parent.name) in PARTS)


def text_columns(
    table: Mapping[str, Sequence[Any]], chosen: dict[str, str | None], name: str, row_numbers: list[str]
) -> Columns:
    """Return the known columns of a table under our names, as text, and "row", the number of each row."""
    columns = {"row": row_numbers}
    for column, found in find_columns(table, chosen, name).items():
        for number, value in enumerate(table[found], start=1):
            if not isinstance(value, str) and hasattr(value, "__len__"):
                what = f"a {type(value).__name__} in row {number}"
                raise DataError(f"{name}: column '{found}' contains {what}, expected text or a number.")
        columns[column] = ["" if is_missing(value) else str(value) for value in table[found]]
    for column in ("path", "label"):
        if "" in columns[column]:
            row = row_numbers[columns[column].index("")]
            raise DataError(f"{name}: row {row} has no {column}. Fill it in or remove the row.")
    return columns


def find_columns(names: Iterable[str], chosen: dict[str, str | None], table: str) -> dict[str, str]:
    """Find the columns that we know among those of a table, by their usual names or as chosen."""
    names = list(names)
    by_lower_name = {name.strip().lower(): name for name in names}
    columns: dict[str, str] = {}
    for column, aliases in COLUMNS.items():
        choice = chosen.get(column)
        found = choice if choice is not None else next((by_lower_name[a] for a in aliases if a in by_lower_name), None)
        if found is not None and found in names:
            columns[column] = found
        elif choice is not None or column in ("path", "label"):
            raise DataError(
                f"{table}: no column named '{choice or column}'. Columns: {', '.join(names)}."
                f"{did_you_mean(choice or column, names)}\n"
                f"Choose columns with --data.path-column and --data.label-column."
            )
    return columns


def _read_csv(file: Path) -> tuple[dict[str, list[str]], list[str]]:
    """The columns by name, and the number of each row in the file."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{file}: cannot be opened ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise DataError(f"{file}: not UTF-8 text. Save it as UTF-8 CSV.") from None
    header = text.lstrip("\r\n").partition("\n")[0]
    separator = max(",;\t", key=header.count)  # Excel writes ';' in locales where ',' is the decimal point
    rows: list[tuple[int, list[str]]] = []
    number = 0
    try:
        # Strict, because an unclosed quote would otherwise swallow the rows below it.
        for number, row in enumerate(csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True), 1):
            if row:
                rows.append((number, row))
    except csv.Error as error:
        raise DataError(f"{file}: row {number + 1} cannot be read ({error}). Is there an unclosed quote?") from None
    if not rows:
        raise DataError(f"{file}: is empty. The first line must name the columns: path,label.")
    (_, names), *rows = rows
    for number, row in rows:
        if len(row) != len(names):
            raise DataError(f"{file}: row {number} has {len(row)} values, but the header has {len(names)}.")
    columns = {name.strip(): [row[i].strip() for _, row in rows] for i, name in enumerate(names)}
    return columns, [str(number) for number, _ in rows]


def _read_parquet(file: Path) -> tuple[dict[str, list[Any]], list[str]]:
    """The columns by name, and the number of each row."""
    try:
        frame = importlib.import_module("pandas").read_parquet(file)
    except ImportError:  # pandas itself, or its Parquet engine
        raise MissingExtraError(f"{file}: Parquet needs pandas and pyarrow. Run: pip install pandas pyarrow") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read as Parquet ({str(error).splitlines()[0]}).") from None
    return {str(name): frame[name].tolist() for name in frame.columns}, [str(n) for n in range(1, len(frame) + 1)]


def is_missing(value: Any) -> bool:
    """Return whether a cell or a label is empty: None, NaN, or pandas's NA or NaT."""
    is_scalar = not hasattr(value, "__len__")  # the comparison of an array has no single value
    return value is None or type(value).__name__ in ("NAType", "NaTType") or (is_scalar and bool(value != value))


def _boxes(columns: dict[str, list[str]], path: str) -> NDArray[np.int64]:
    try:
        boxes = np.array([[float(v) for v in columns[side]] for side in "xywh"]).T
    except ValueError as error:
        raise DataError(f"{path}: a box is not numeric ({error}). x, y, w and h are in pixels.") from None
    valid = (boxes >= [0, 0, 1, 1]) & (boxes < 2**31)  # False for NaN
    invalid = np.flatnonzero(~valid.all(axis=1))
    if len(invalid):
        box, row = boxes[invalid[0]].tolist(), columns["row"][invalid[0]]
        raise DataError(f"{path}: row {row} has an invalid box: {box} for x, y, w, h.")
    return np.round(boxes).astype(np.int64)
