"""`Listing`: what a source says it holds, before any image is decoded; and the listings of folders and tables.

A folder of class folders, a CSV or Parquet file, and a Hugging Face-style folder with metadata.csv all end here.
The four benchmarks in their official layouts are in benchmarks.py.
"""

from __future__ import annotations

import csv
import importlib
import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin.data.table import PARTS
from nearkin.errors import DataError, MissingExtraError, did_you_mean

IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
TABLE_SUFFIXES = {".csv", ".tsv", ".parquet"}
# The names under which a column or folder may go, the first being ours.
COLUMNS = {
    "path": ("path", "file_name", "filename", "file", "image", "image_path", "filepath"),
    "label": ("label", "class", "class_name", "category", "target"),
    "part": ("part", "split", "subset", "evaluation_status"),
    "group": ("group", "super_class"),
    **{side: (side,) for side in "xywh"},
}
PART_WORDS = {"training": "train", "valid": "val", "validation": "val", "dev": "val", "testing": "test"}


@dataclass(frozen=True)
class Listing:
    """Files with labels, as a source lists them. Row i is `paths[i]` of class `class_names[labels[i]]`.

    root: what a reader of a message needs to find the files; paths are shown relative to it.
    part, groups, boxes: as in `Table`.
    empty: classes that the source names and that hold no image.
    loose: images that lie in no class folder, and so have no label.
    ignored: files that lie among the images and are none by their name.
    unopened: folders that could not be opened.
    missing: files that the source lists and that are not on the disk; never among `paths`.
    notes: what a reader of the numbers must know.
    """

    source: str
    root: Path
    paths: tuple[Path, ...] = field(repr=False)
    labels: NDArray[np.int64] = field(repr=False)
    class_names: tuple[str, ...] = field(repr=False)
    part: NDArray[np.str_] | None = field(default=None, repr=False)
    groups: NDArray[np.str_] | None = field(default=None, repr=False)
    boxes: NDArray[np.int64] | None = field(default=None, repr=False)
    empty: tuple[str, ...] = ()
    loose: tuple[Path, ...] = ()
    ignored: tuple[Path, ...] = ()
    unopened: tuple[Path, ...] = ()
    missing: tuple[Path, ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.paths)

    def shown(self, path: Path) -> str:
        """The path as a message shows it."""
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else str(path)

    def take(self, rows: NDArray[np.int64]) -> Listing:
        return replace(
            self,
            paths=tuple(self.paths[r] for r in rows),
            labels=self.labels[rows],
            part=None if self.part is None else self.part[rows],
            groups=None if self.groups is None else self.groups[rows],
            boxes=None if self.boxes is None else self.boxes[rows],
        )

    def without_missing(self) -> Listing:
        """The rows whose file is there (a link that leads nowhere is there, and broken); the others in `missing`."""
        there = np.fromiter((os.path.lexists(path) for path in self.paths), bool, len(self.paths))
        gone = tuple(self.paths[r] for r in np.flatnonzero(~there))
        return replace(self.take(np.flatnonzero(there)), missing=gone) if gone else self


def number_classes(names: Sequence[str]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Labels and class names of rows that name their class; classes in order, whole numbers by their value.

    >>> number_classes(["10", "9", "10"])
    (array([1, 0, 1]), ('9', '10'))
    """
    known = set(names)
    numeric = all(name.isascii() and name.isdigit() for name in known)
    order = sorted(known, key=_by_value) if numeric else sorted(known)
    number = {name: c for c, name in enumerate(order)}
    return np.array([number[name] for name in names], np.int64), tuple(order)


def _by_value(digits: str) -> tuple[int, str, str]:
    """Sorts like int(digits), also where that is too long for Python; "01" and "1" by their letters."""
    value = digits.lstrip("0")
    return len(value), value, digits


# --- folders ---------------------------------------------------------------------------------------------------------


def list_folder(root: Path) -> Listing:
    """Images of `root/CLASS/...`, one class per folder; or of `root/train/CLASS/...` beside `root/test/CLASS/...`."""
    if not root.is_dir():
        raise DataError(f"{root}: there is no such folder. Give a folder that holds one folder of images per class.")
    try:
        folders, tops = _folders_in(root), [root]
        # A folder that holds only train/ and test/ has its classes one step deeper; two classes "train" and "test"
        # would be nonsense.
        if len(folders) >= 2 and all(part_name(f.name) in PARTS for f in folders):
            folders.sort(key=lambda top: PARTS.index(part_name(top.name)))
            tops += folders
            classes = [(f, part_name(top.name)) for top in folders for f in _folders_in(top)]
        else:
            classes = [(f, "") for f in folders]
        loose = [p for top in tops for p in sorted(top.iterdir()) if _is_image_name(p) and not p.is_dir()]
    except OSError as error:
        raise DataError(f"{root}: cannot be opened ({error.strerror}). Check its permissions.") from None

    rows: list[tuple[Path, str, str]] = []
    empty: list[str] = []
    ignored, unopened = list[Path](), list[Path]()
    for folder, part in classes:
        images = list_image_files(folder, ignored, unopened)
        rows += [(path, folder.name, part) for path in images]
        if not images:
            empty.append(folder.name)
    labels, names = number_classes([name for _, name, _ in rows])
    if len(names) < 2:
        raise DataError(f"{root}: found images in {len(names)} class folders, need at least 6: {root}/CLASS/IMAGE.jpg.")
    return Listing(
        source=root.resolve().name,
        root=root,
        paths=tuple(path for path, _, _ in rows),
        labels=labels,
        class_names=names,
        part=np.array([part for *_, part in rows]) if rows[0][2] else None,
        empty=tuple(name for name in empty if name not in names),
        loose=tuple(loose),
        ignored=tuple(ignored),
        unopened=tuple(unopened),
    )


def part_name(word: str) -> str:
    """A part as we name it: "Validation" is "val"; what is none of ours stays as it is, in lower case."""
    word = word.strip().lower()
    return PART_WORDS.get(word, word)


def _folders_in(root: Path) -> list[Path]:
    return sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith((".", "__MACOSX")))


def _is_image_name(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".")


def list_image_files(folder: Path, ignored: list[Path], unopened: list[Path]) -> list[Path]:
    """Image files below a folder, links followed; a link that leads nowhere is listed too, so that it is named."""
    found: list[Path] = []
    seen: set[str] = set()
    for top, below, files in os.walk(
        folder, followlinks=True, onerror=lambda error: unopened.append(Path(error.filename))
    ):
        real = os.path.realpath(top)
        if real in seen:  # a link to a folder above would go round for ever
            below.clear()
            continue
        seen.add(real)
        below[:] = sorted(name for name in below if not name.startswith("."))
        paths = [Path(top) / name for name in sorted(files)]
        found += [path for path in paths if _is_image_name(path)]
        ignored += [path for path in paths if not _is_image_name(path) and not path.name.startswith(".")]
    return found


# --- tables ----------------------------------------------------------------------------------------------------------


def list_table(
    path: Path, *, path_column: str | None = None, label_column: str | None = None, fewest: int = 2
) -> Listing:
    """Rows of a CSV, TSV or Parquet file, or of a folder with metadata.csv (also one each in train/ and test/).

    Columns: path and label, and where they exist part (or split), group, and x, y, w, h of a box in pixels. Paths
    are relative to the file that lists them. fewest: classes that there must be; to learn from, two.
    """
    if path.is_dir():
        files = metadata_files(path)
        if not files:
            raise DataError(
                f"{path}: holds no metadata.csv. Give one with columns file_name and label, or a .csv file."
            )
    elif path.is_file():
        files = [path]
    else:
        raise DataError(f"{path}: there is no such file. Give a .csv or .parquet file with columns path and label.")

    columns: dict[str, list[str]] = {}
    paths: list[Path] = []
    for file in files:
        rows = _read_columns(file, {"path": path_column, "label": label_column})
        paths += [file.parent / value for value in rows["path"]]
        # Hugging Face names the part by the folder in which metadata.csv lies.
        if "part" not in rows and part_name(file.parent.name) in PARTS and path.is_dir():
            rows["part"] = [part_name(file.parent.name)] * len(rows["path"])
        if columns and set(columns) != set(rows):
            differing = ", ".join(sorted(set(columns) ^ set(rows)))
            raise DataError(f"{file}: its columns differ from those of {files[0]} ({differing}).")
        for name, values in rows.items():
            columns.setdefault(name, []).extend(values)

    labels, names = number_classes(columns["label"])
    if len(names) < fewest:
        raise DataError(
            f"{path}: names {len(names)} classes, need at least {fewest}. Is the label column the right one?"
        )
    listing = Listing(
        source=path.resolve().stem,
        root=path if path.is_dir() else path.parent,
        paths=tuple(paths),
        labels=labels,
        class_names=names,
        part=known_parts(columns["part"], path) if "part" in columns else None,
        groups=np.array(columns["group"]) if "group" in columns else None,
        boxes=_boxes(columns, path) if all(side in columns for side in "xywh") else None,
    )
    return listing.without_missing()


def metadata_files(root: Path) -> list[Path]:
    """The metadata.csv of a Hugging Face-style folder: its own, or one in each of its part folders."""
    if (root / "metadata.csv").is_file():
        return [root / "metadata.csv"]
    return sorted(p for p in root.glob("*/metadata.csv") if part_name(p.parent.name) in PARTS)


def _read_columns(file: Path, chosen: dict[str, str | None]) -> dict[str, list[str]]:
    """The columns we know, under our names, as text; path and label must be there and filled.

    One column is added: "row", the number under which people find each row in their file.
    """
    is_parquet = file.suffix.lower() == ".parquet"
    table, numbers = _read_parquet(file) if is_parquet else _read_csv(file)
    found = {"row": numbers}
    plain = {name.strip().lower(): name for name in table}
    for ours, known in COLUMNS.items():
        wanted = chosen.get(ours)
        name = wanted if wanted is not None else next((plain[k] for k in known if k in plain), None)
        if name is not None and name in table:
            found[ours] = _parquet_words(table[name], name, file) if is_parquet else table[name]
        elif wanted is not None or ours in ("path", "label"):
            hint = did_you_mean(wanted or ours, table)
            raise DataError(
                f"{file}: no column named '{wanted or ours}'; it has {', '.join(table)}.{hint}\n"
                f"Name yours with --data.path-column and --data.label-column."
            )
    for ours in ("path", "label"):
        for row, value in zip(numbers, found[ours], strict=True):
            if not value:
                raise DataError(f"{file}: row {row} has no {ours}. Fill it in or remove the row.")
    if not found["path"]:
        raise DataError(f"{file}: has a header and no rows.")
    return found


def _read_csv(file: Path) -> tuple[dict[str, list[str]], list[str]]:
    """The columns by name, and the number of each row in the file."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{file}: cannot be opened ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise DataError(f"{file}: is not UTF-8 text. Save it as CSV in UTF-8.") from None
    header = text.lstrip("\r\n").partition("\n")[0]
    separator = max(",;\t", key=header.count)  # Excel writes ';' where ',' is the decimal point
    rows: list[tuple[int, list[str]]] = []
    number = 0
    try:
        # Strict, because a quote that is never closed would otherwise swallow the rows below it.
        for number, row in enumerate(csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True), 1):
            if row:
                rows.append((number, row))
    except csv.Error as error:
        raise DataError(f"{file}: row {number + 1} cannot be read ({error}). Is a quote never closed?") from None
    if not rows:
        raise DataError(f"{file}: is empty. The first line names the columns: path,label.")
    (_, names), *rows = rows
    for number, row in rows:
        if len(row) != len(names):
            raise DataError(f"{file}: row {number} has {len(row)} values, the header names {len(names)}.")
    columns = {name.strip(): [row[i].strip() for _, row in rows] for i, name in enumerate(names)}
    return columns, [str(number) for number, _ in rows]


def _read_parquet(file: Path) -> tuple[dict[str, Any], list[str]]:
    """The columns by name as pandas has them, and the number of each row."""
    try:
        frame = importlib.import_module("pandas").read_parquet(file)
    except ImportError:  # pandas itself, or the pyarrow or fastparquet that it reads with
        raise MissingExtraError(f"{file}: Parquet needs pandas and pyarrow. Run: pip install pandas pyarrow") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read as Parquet ({str(error).splitlines()[0]}).") from None
    return {str(name): frame[name] for name in frame.columns}, [str(row) for row in range(1, len(frame) + 1)]


def _parquet_words(column: Any, name: str, file: Path) -> list[str]:
    is_scalar = importlib.import_module("pandas").api.types.is_scalar
    words = []
    for row, (value, gap) in enumerate(zip(column.tolist(), column.isna().tolist(), strict=True), start=1):
        if not is_scalar(value):
            kind = type(value).__name__
            raise DataError(f"{file}: column '{name}' holds a {kind} in row {row}, expected one word or number.")
        words.append("" if gap else str(value))
    return words


def known_parts(words: Iterable[str], path: Path) -> NDArray[np.str_]:
    """Parts as we name them; a word that is none of them is refused, so that no official split is lost by a typo."""
    parts = [part_name(word) for word in words]
    unknown = sorted(set(parts) - set(PARTS))
    if unknown:
        raise DataError(f"{path}: part '{unknown[0]}' is none of {', '.join(PARTS)}.")
    return np.array(parts)


def _boxes(columns: dict[str, list[str]], path: Path) -> NDArray[np.int64]:
    try:
        boxes = np.array([[float(v) for v in columns[side]] for side in "xywh"]).T
    except ValueError as error:
        raise DataError(f"{path}: a box is not a number ({error}). x, y, w and h are pixels.") from None
    proper = (boxes >= [0, 0, 1, 1]) & (boxes < 2**31)  # NaN is neither
    bad = np.flatnonzero(~proper.all(axis=1))
    if len(bad):
        first, row = boxes[bad[0]].tolist(), columns["row"][bad[0]]
        raise DataError(f"{path}: row {row} has no proper box: {first} for x, y, w, h.")
    return np.round(boxes).astype(np.int64)
