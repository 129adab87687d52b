"""The field's four benchmarks: counts, files, download addresses, terms, and readers of their official layouts.

Each is split by class. The archives of CUB and Cars also contain a classification split, in which every class is on
both sides. It is never used here, because its scores say nothing about unseen classes.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearkin._common.registry import Registry
from nearkin.data.listing import Counts, Listing, encode_labels, list_folder
from nearkin.errors import DataError, did_you_mean, import_extra


def read_cub(root: Path) -> Listing:
    """List CUB: images.txt and image_class_labels.txt joined by image number, and bounding_boxes.txt if present."""
    label_file, name_file, box_file = (root / f"{n}.txt" for n in ("image_class_labels", "classes", "bounding_boxes"))
    files, classes = _numbered(root / "images.txt"), _numbered(label_file)
    names = tuple(name for _, name in sorted((_to_int(k, name_file), v) for k, v in _numbered(name_file).items()))
    unlabelled = sorted(files.keys() ^ classes.keys())
    if unlabelled:
        raise DataError(f"{root}: image {unlabelled[0]} is only in one of images.txt and image_class_labels.txt.")
    boxes = None
    if box_file.is_file():
        by_image = _numbered(box_file)
        try:
            rows = np.array([by_image.get(image, "").split() for image in files], np.float64)
            boxes = np.round(rows.reshape(len(files), 4)).astype(np.int64)
        except ValueError:
            raise DataError(f"{box_file}: expected x, y, width and height for every image.") from None
    labels = np.array([_to_int(classes[image], label_file) - 1 for image in files], np.int64)
    paths = tuple(root / "images" / name for name in files.values())
    return Listing("cub", root, paths, labels, names, _first_half(labels, len(names), label_file), boxes=boxes)


def read_cars(root: Path) -> Listing:
    """List Cars196: cars_annos.mat with car_ims/, or one folder per class, perhaps below train/ and test/."""
    file = root / "cars_annos.mat"
    if not file.is_file():
        if (root / "car_ims").is_dir():
            raise DataError(f"{file}: is missing (car_ims is present). Download it with: nearkin data get cars.")
        listing = list_folder(root)
        class_names, labels = np.unique([path.parent.name for path in listing.paths], return_inverse=True)
        listing = replace(listing, labels=labels.astype(np.int64), class_names=tuple(class_names.tolist()))
        listing = listing.take(np.argsort(labels, kind="stable"))
        return replace(listing, part=_first_half(listing.labels, len(class_names), root))
    matlab = import_extra("scipy.io", extra="bench")
    try:
        stored = matlab.loadmat(file, squeeze_me=True, struct_as_record=True)
        rows, names = np.atleast_1d(stored["annotations"]), np.atleast_1d(stored["class_names"])
        paths = tuple(root / str(path) for path in rows["relative_im_path"])
        labels = rows["class"].astype(np.int64) - 1
        corners = np.stack([rows[f"bbox_{c}"].astype(np.int64) for c in ("x1", "y1", "x2", "y2")], axis=1)
    except Exception as error:  # the reader may raise any exception on any other file
        raise DataError(f"{file}: not the official annotation file ({error}).") from None
    # The file counts pixels from 1 and includes both corners.
    boxes = np.concatenate([corners[:, :2] - 1, corners[:, 2:] - corners[:, :2] + 1], axis=1)
    part = _first_half(labels, len(names), file)
    return Listing("cars", root, paths, labels, tuple(str(name) for name in names), part, boxes=boxes)


def read_sop(root: Path) -> Listing:
    """List SOP: Ebay_train.txt and Ebay_test.txt with a header line and image_id, class_id, super_class_id, path."""
    rows: list[tuple[str, str, str]] = []  # class id, path, part
    for part, file in (("train", root / "Ebay_train.txt"), ("test", root / "Ebay_test.txt")):
        words = _rows(file, "image_id class_id super_class_id path", skip=1)
        rows += [(str(_to_int(class_id, file)), path, part) for _, class_id, _, path in words]
    labels, names = encode_labels([class_id for class_id, _, _ in rows])
    paths = tuple(root / path for _, path, _ in rows)
    groups = np.array([path.partition("/")[0].removesuffix("_final") for _, path, _ in rows])
    return Listing("sop", root, paths, labels, names, np.array([part for *_, part in rows]), groups)


def read_inshop(root: Path) -> Listing:
    """List In-Shop: Eval/list_eval_partition.txt with a count, a header, and image_name, item_id, evaluation_status."""
    file = next(p for p in (root / "Eval" / "list_eval_partition.txt", root / "list_eval_partition.txt") if p.exists())
    form = "image_name item_id train|query|gallery"
    rows = _rows(file, form, skip=2)
    for row in rows:
        if row[2] not in ("train", "query", "gallery"):
            raise DataError(f"{file}: expected '{form}', got '{' '.join(row)}'.")
    labels, names = encode_labels([item for _, item, _ in rows])
    image_root = root / "Img" if (root / "Img").is_dir() else root  # depends on the archive
    paths = tuple(image_root / name for name, _, _ in rows)
    groups = np.array(["/".join(Path(name).parts[1:-2]) for name, _, _ in rows])  # WOMEN/Dresses
    return Listing("inshop", root, paths, labels, names, np.array([part for *_, part in rows]), groups)


def _first_half(labels: NDArray[np.int64], num_classes: int, file: Path) -> NDArray[np.str_]:
    """The papers' split: the first half of the classes is for training, the rest for testing."""
    invalid = labels[(labels < 0) | (labels >= num_classes)]
    if len(invalid):
        raise DataError(f"{file}: class {invalid[0] + 1} is outside 1 to {num_classes}.")
    return np.where(labels < num_classes // 2, "train", "test")


def _rows(file: Path, form: str, *, skip: int = 0) -> list[list[str]]:
    """The words of each line after a header. The last may contain spaces."""
    try:
        lines = [line.rstrip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()][skip:]
    except FileNotFoundError:
        raise DataError(f"{file}: is missing. Unpack the archive again.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read ({error}).") from None
    num_words = len(form.split())
    rows = [line.split(maxsplit=num_words - 1) for line in lines]
    for line, row in zip(lines, rows, strict=True):
        if len(row) != num_words:
            raise DataError(f"{file}: expected '{form}', got '{line}'.")
    return rows


def _numbered(file: Path) -> dict[str, str]:
    return {row[0]: row[1] for row in _rows(file, "number value")}


def _to_int(word: str, file: Path) -> int:
    try:
        return int(word)
    except ValueError:
        raise DataError(f"{file}: expected an integer, got '{word}'.") from None


CLOSED_SET_REASON = (
    "it has images of the same classes on both sides, so it measures recognition of known classes, "
    "not retrieval of unseen ones"
)


@dataclass(frozen=True)
class Archive:
    name: str  # file name
    creates: str  # what unpacking it creates, relative to --root
    urls: Sequence[str] = ()  # addresses, tried in order; empty if it can only be requested by hand
    # detects damage, not forgery; independent public loaders have pinned these values for years
    md5: str | None = None
    extract_to: str = "."  # folder, relative to --root, to which it is unpacked or copied


@dataclass(frozen=True)
class Benchmark:
    name: str  # name in recipes and commands
    title: str  # name in the literature
    parts: Mapping[str, Counts]  # official numbers of images and classes of each part
    folder: str  # folder that its archive creates
    marker_files: Sequence[str]  # files in that folder that identify the layout; any one of them suffices
    archives: tuple[Archive, ...]  # files to download
    homepage: str  # where people find it
    terms: str  # terms of use
    read_layout: Callable[[Path], Listing] = field(repr=False)  # lists the files and labels of an unpacked folder
    # whether the form with one folder per class, as others redistribute it, is read as well
    allow_class_folders: bool = False
    image_folder: str = "."  # folder of the images in that folder, for messages

    @property
    def total(self) -> Counts:
        """Numbers of images and classes of all parts."""
        train, *others = self.parts.values()
        # Query and gallery have the same classes, which count once.
        return Counts(sum(c.images for c in self.parts.values()), train.classes + max(c.classes for c in others))

    def find(self, root: Path) -> Path | None:
        folder = self.marked_folder(root)
        if folder is None and self.allow_class_folders:
            candidates = (root / self.folder, root)
            return next((p for p in candidates if p.is_dir() and any(f.is_dir() for f in p.iterdir())), None)
        return folder

    def marked_folder(self, root: Path) -> Path | None:
        folders = (root, root / self.folder)
        return next((f for f in folders if any((f / name).exists() for name in self.marker_files)), None)

    def list(self, root: Path | None, *, allow_missing: bool = False) -> Listing:
        if root is None:
            get = f"nearkin data get {self.name}"
            raise DataError(f"{self.name}: give its folder with --data.root DIR, or download it: {get}.")
        folder = self.find(root)
        if folder is None:
            expected = " or ".join(str(p / self.marker_files[0]) for p in (root, root / self.folder))
            raise DataError(
                f"{self.name}: {self.title} not found. Expected {expected}.\n"
                f"Download it with: nearkin data get {self.name} --root {root}"
            )
        listing = replace(self.read_layout(folder), source=self.name).without_missing()
        mismatch = self.count_mismatch(listing, folder)
        if mismatch and not allow_missing:
            raise DataError(f"{mismatch}\nUnpack the archive again, or ignore missing files with --data.allow-missing.")
        return replace(listing, notes=(*listing.notes, mismatch)) if mismatch else listing

    def count_mismatch(self, listing: Listing, folder: Path) -> str:
        """Describe how the files on disk differ from the official counts."""
        actual = listing.count_parts()
        if actual == dict(self.parts):
            return ""
        folder = folder / self.image_folder
        if listing.missing:
            path = replace(listing, root=folder).shown(listing.missing[0])
            return (
                f"{self.name}: expected {self.total.images:,} images under {folder}, "
                f"found {sum(c.images for c in actual.values()):,} (first missing: {path})."
            )
        part = next(p for p in [*self.parts, *actual] if self.parts.get(p) != actual.get(p))
        expected, found = (counts.get(part, Counts(0, 0)) for counts in (self.parts, actual))
        return (
            f"{self.name}: expected {expected.images:,} {part} images of {expected.classes:,} classes under {folder}, "
            f"found {found.images:,} of {found.classes:,}."
        )


BENCHMARKS: Registry[Benchmark] = Registry("benchmark")
for _name, _read in {"cub": read_cub, "cars": read_cars, "sop": read_sop, "inshop": read_inshop}.items():
    _settings = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))[_name]
    _settings["parts"] = {part: Counts(*counts) for part, counts in _settings["parts"].items()}
    _settings["archives"] = tuple(Archive(**archive) for archive in _settings["archives"])
    BENCHMARKS.add(_name, Benchmark(name=_name, read_layout=_read, **_settings))


def require_target(target: str) -> None:
    """Refuse what is neither a benchmark's name nor an existing path."""
    if target in BENCHMARKS or (target != "glyphs" and Path(target).exists()):
        return
    hint = did_you_mean(target, BENCHMARKS)
    hint = hint or f" Available benchmarks: {', '.join(BENCHMARKS)}; or give a folder or a .csv."
    reason = "is generated by nearkin and needs no check." if target == "glyphs" else "no such benchmark or path."
    raise DataError(f"{target}: {reason}{hint}")
