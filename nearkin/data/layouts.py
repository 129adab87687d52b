"""Readers for the official layouts of CUB, Cars196, SOP and In-Shop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearkin.data.listing import Listing, list_folder
from nearkin.errors import DataError, import_extra


def read_cub(root: Path) -> Listing:
    """List CUB: images.txt and image_class_labels.txt joined by image number, and bounding_boxes.txt if present."""
    files = dict(_pairs(root / "images.txt"))
    classes = dict(_pairs(root / "image_class_labels.txt"))
    names = [name for _, name in sorted((_to_int(k, root / "classes.txt"), v) for k, v in _pairs(root / "classes.txt"))]
    unlabelled = sorted(files.keys() ^ classes.keys())
    if unlabelled:
        raise DataError(f"{root}: image {unlabelled[0]} is only in one of images.txt and image_class_labels.txt.")
    labels = np.array([_to_int(classes[image], root / "image_class_labels.txt") - 1 for image in files], np.int64)
    _check_range(labels, len(names), root / "image_class_labels.txt")
    boxes = None
    if (root / "bounding_boxes.txt").is_file():
        by_image = dict(_pairs(root / "bounding_boxes.txt"))
        boxes = _box_array([by_image.get(image, "").split() for image in files], root / "bounding_boxes.txt")
    return Listing(
        source="cub",
        root=root,
        paths=tuple(root / "images" / name for name in files.values()),
        labels=labels,
        class_names=tuple(names),
        part=first_half(labels, len(names)),
        boxes=boxes,
    )


def read_cars(root: Path) -> Listing:
    """List Cars196: cars_annos.mat with the images of car_ims/, or one folder per class in the order of their names.

    The class folders may be split into train/ and test/ (the classification split); the folders of one class are then
    merged.
    """
    if not (root / "cars_annos.mat").is_file():
        if (root / "car_ims").is_dir():
            raise DataError(
                f"{root / 'cars_annos.mat'}: is missing (car_ims is present). Download it with: nearkin data get cars."
            )
        listing = _list_by_parent_folder(root)
        return replace(listing, part=first_half(listing.labels, len(listing.class_names)))
    matlab = import_extra("scipy.io", extra="bench")
    try:
        stored = matlab.loadmat(root / "cars_annos.mat", squeeze_me=True, struct_as_record=True)
        rows, names = np.atleast_1d(stored["annotations"]), np.atleast_1d(stored["class_names"])
        paths = tuple(root / str(path) for path in rows["relative_im_path"])
        labels = rows["class"].astype(np.int64) - 1
        corners = np.stack([rows[f"bbox_{c}"].astype(np.int64) for c in ("x1", "y1", "x2", "y2")], axis=1)
    except Exception as error:  # the reader may raise any exception on any other file
        raise DataError(f"{root / 'cars_annos.mat'}: not the official annotation file ({error}).") from None
    _check_range(labels, len(names), root / "cars_annos.mat")
    return Listing(
        source="cars",
        root=root,
        paths=paths,
        labels=labels,
        class_names=tuple(str(name) for name in names),
        part=first_half(labels, len(names)),
        # The file counts pixels from 1 and includes both corners.
        boxes=np.concatenate([corners[:, :2] - 1, corners[:, 2:] - corners[:, :2] + 1], axis=1),
    )


def read_sop(root: Path) -> Listing:
    """List SOP: Ebay_train.txt and Ebay_test.txt with a header line and image_id, class_id, super_class_id, path."""
    rows: list[tuple[int, str, str]] = []  # class id, path, part
    for part, file in (("train", root / "Ebay_train.txt"), ("test", root / "Ebay_test.txt")):
        for line in _lines(file)[1:]:
            words = line.split(maxsplit=3)
            if len(words) != 4:
                raise DataError(f"{file}: expected 'image_id class_id super_class_id path', got '{line}'.")
            rows.append((_to_int(words[1], file), words[3], part))
    class_ids, labels = np.unique(np.array([class_id for class_id, _, _ in rows], np.int64), return_inverse=True)
    return Listing(
        source="sop",
        root=root,
        paths=tuple(root / path for _, path, _ in rows),
        labels=labels.astype(np.int64),
        class_names=tuple(str(class_id) for class_id in class_ids),
        part=np.array([part for *_, part in rows]),
        groups=np.array([path.partition("/")[0].removesuffix("_final") for _, path, _ in rows]),
    )


def read_inshop(root: Path) -> Listing:
    """List In-Shop: Eval/list_eval_partition.txt with a count, a header, and image_name, item_id, evaluation_status."""
    file = next(p for p in (root / "Eval" / "list_eval_partition.txt", root / "list_eval_partition.txt") if p.exists())
    rows = []
    for line in _lines(file)[2:]:
        words = line.split()
        if len(words) != 3 or words[2] not in ("train", "query", "gallery"):
            raise DataError(f"{file}: expected 'image_name item_id train|query|gallery', got '{line}'.")
        rows.append(words)
    items = sorted({item for _, item, _ in rows})
    label_of = {item: c for c, item in enumerate(items)}
    image_root = root / "Img" if (root / "Img").is_dir() else root  # depends on the archive
    return Listing(
        source="inshop",
        root=root,
        paths=tuple(image_root / name for name, _, _ in rows),
        labels=np.array([label_of[item] for _, item, _ in rows], np.int64),
        class_names=tuple(items),
        part=np.array([part for *_, part in rows]),
        groups=np.array(["/".join(Path(name).parts[1:-2]) for name, _, _ in rows]),  # WOMEN/Dresses
    )


def first_half(labels: NDArray[np.int64], num_classes: int) -> NDArray[np.str_]:
    """The papers' split: the first half of the classes is for training, the rest for testing."""
    return np.where(labels < num_classes // 2, "train", "test")


def _list_by_parent_folder(root: Path) -> Listing:
    listing = list_folder(root)
    folders = [path.parent.name for path in listing.paths]
    class_names = sorted(set(folders))
    label_of = {name: c for c, name in enumerate(class_names)}
    labels = np.array([label_of[name] for name in folders], np.int64)
    order = np.argsort(labels, kind="stable")
    return replace(replace(listing, labels=labels, class_names=tuple(class_names)).take(order), part=None)


def _lines(file: Path) -> list[str]:
    try:
        return [line.rstrip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except FileNotFoundError:
        raise DataError(f"{file}: is missing. Unpack the archive again.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read ({error}).") from None


def _pairs(file: Path) -> list[tuple[str, str]]:
    """Lines "number value"."""
    pairs = [line.split(maxsplit=1) for line in _lines(file)]
    for pair in pairs:
        if len(pair) != 2:
            raise DataError(f"{file}: expected a number and a value, got '{' '.join(pair)}'.")
    return [(number, value) for number, value in pairs]


def _to_int(word: str, file: Path) -> int:
    try:
        return int(word)
    except ValueError:
        raise DataError(f"{file}: expected an integer, got '{word}'.") from None


def _check_range(labels: NDArray[np.int64], num_classes: int, file: Path) -> None:
    invalid = labels[(labels < 0) | (labels >= num_classes)]
    if len(invalid):
        raise DataError(f"{file}: class {invalid[0] + 1} is outside 1 to {num_classes}.")


def _box_array(rows: list[list[str]], file: Path) -> NDArray[np.int64]:
    try:
        return np.round(np.array(rows, np.float64).reshape(len(rows), 4)).astype(np.int64)
    except ValueError:
        raise DataError(f"{file}: expected x, y, width and height for every image.") from None
