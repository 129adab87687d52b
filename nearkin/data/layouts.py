"""Readers for the official layouts of CUB, Cars196, SOP and In-Shop."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearkin.data.listing import Listing, encode_labels, list_folder
from nearkin.errors import DataError, import_extra


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
