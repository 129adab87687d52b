"""The field's four benchmarks in their official layouts: what each holds, where it comes from, how it is read.

Each is split by class: the classes that train are never those that judge. The archives of CUB and Cars also bring a
split for classification, in which every class is on both sides; it is never used here, because a number obtained with
it says nothing about classes that were not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from nearkin._common.registry import Registry
from nearkin.data.listing import Listing, list_folder
from nearkin.errors import DataError, import_extra

CLOSED_SET = (
    "it puts images of the same classes on both sides, so it measures recognition of known classes, "
    "not retrieval of unseen ones"
)


@dataclass(frozen=True)
class Counts:
    images: int
    classes: int


@dataclass(frozen=True)
class Archive:
    """A file to download: tried from `urls` in order, then checked.

    sha256: None where no trustworthy one is published; `nearkin data get` then prints the one it got.
    md5: finds damage, not forgery; these have been pinned by independent public loaders for years.
    """

    name: str
    makes: str  # what is there, below --root, once it has been unpacked
    urls: tuple[str, ...] = ()
    sha256: str | None = None
    md5: str | None = None
    into: str = "."  # the folder below --root in which it is unpacked, or to which it is moved


@dataclass(frozen=True)
class Benchmark:
    """A benchmark as data: counts of each part, files, and the function that lists it."""

    name: str
    title: str
    parts: Mapping[str, Counts]
    folder: str  # the name under which its archive unpacks
    needs: tuple[str, ...]  # files below that folder by which the layout is known; the first one that is found
    images: str  # the folder below in which its images lie, for messages
    archives: tuple[Archive, ...]
    page: str  # where people find it
    terms: str
    read: Callable[[Path], Listing] = field(repr=False)
    class_folders: bool = False  # whether one folder per class, as others hand it on, is read as well

    @property
    def total(self) -> Counts:
        # Query and gallery show the same classes, so their classes count once.
        judged = [c.classes for part, c in self.parts.items() if part != "train"]
        train = self.parts["train"].classes if "train" in self.parts else 0
        return Counts(sum(c.images for c in self.parts.values()), train + max(judged, default=0))

    def find(self, root: Path) -> Path | None:
        """The folder that holds the official files: `root` itself, or the one its archive made below it."""
        places = (root, root / self.folder)
        for place in places:
            if any((place / name).exists() for name in self.needs):
                return place
        if self.class_folders:
            return next((p for p in reversed(places) if p.is_dir() and any(f.is_dir() for f in p.iterdir())), None)
        return None

    def list(self, root: Path | None, *, allow_missing: bool = False) -> Listing:
        """All rows with their official part, checked against the counts that the papers state."""
        if root is None:
            raise DataError(
                f"{self.name}: say where it lies with --data.root DIR, or get it: nearkin data get {self.name}."
            )
        place = self.find(root)
        if place is None:
            looked = " or ".join(str(p / self.needs[0]) for p in (root, root / self.folder))
            raise DataError(
                f"{self.name}: there is no {self.title} here; looked for {looked}.\n"
                f"Get it with: nearkin data get {self.name} --root {root}"
            )
        listing = replace(self.read(place), source=self.name).without_missing()
        problem = self.mismatch(listing, place)
        if problem and not allow_missing:
            raise DataError(f"{problem}\nUnpack the archive again, or pass --data.allow-missing to go on without them.")
        return replace(listing, notes=(*listing.notes, problem)) if problem else listing

    def mismatch(self, listing: Listing, place: Path) -> str:
        """How the rows on the disk differ from the counts of the papers, or an empty text."""
        found = count_parts(listing)
        if found == dict(self.parts):
            return ""
        expected, total = self.total, sum(c.images for c in found.values())
        where = place / self.images
        if listing.missing:
            first = listing.missing[0]
            shown = first.relative_to(where) if first.is_relative_to(where) else first
            return (
                f"{self.name}: expected {expected.images:,} images under {where}, found {total:,} "
                f"(first missing: {shown})."
            )
        part = next(p for p in [*self.parts, *found] if self.parts.get(p) != found.get(p))
        nothing = Counts(0, 0)
        wanted, got = self.parts.get(part, nothing), found.get(part, nothing)
        return (
            f"{self.name}: expected {wanted.images:,} {part} images of {wanted.classes:,} classes under {where}, "
            f"found {got.images:,} of {got.classes:,}."
        )


def count_parts(listing: Listing) -> dict[str, Counts]:
    """Images and classes of each part that occurs."""
    assert listing.part is not None
    found = {}
    for part in np.unique(listing.part):
        labels = listing.labels[listing.part == part]
        found[str(part)] = Counts(len(labels), len(np.unique(labels)))
    return found


# --- the layouts -----------------------------------------------------------------------------------------------------


def read_cub(root: Path) -> Listing:
    """images.txt and image_class_labels.txt joined by image number; bounding_boxes.txt where it is there."""
    files = dict(_pairs(root / "images.txt"))
    classes = dict(_pairs(root / "image_class_labels.txt"))
    names = [name for _, name in sorted((_number(k, root / "classes.txt"), v) for k, v in _pairs(root / "classes.txt"))]
    unlabelled = sorted(files.keys() ^ classes.keys())
    if unlabelled:
        raise DataError(f"{root}: image {unlabelled[0]} is in only one of images.txt and image_class_labels.txt.")
    labels = np.array([_number(classes[image], root / "image_class_labels.txt") - 1 for image in files], np.int64)
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
    """cars_annos.mat with the images of car_ims/; or one folder per class, in the order of their names.

    The class-folder form may itself be split into train/ and test/ (the split for classification): the folders of
    one class are put together again.
    """
    if not (root / "cars_annos.mat").is_file():
        if (root / "car_ims").is_dir():
            raise DataError(
                f"{root / 'cars_annos.mat'}: is missing beside car_ims. Get it with: nearkin data get cars."
            )
        listing = _by_holding_folder(root)
        return replace(listing, part=first_half(listing.labels, len(listing.class_names)))
    matlab = import_extra("scipy.io", extra="bench")
    try:
        stored = matlab.loadmat(root / "cars_annos.mat", squeeze_me=True, struct_as_record=True)
        rows, names = np.atleast_1d(stored["annotations"]), np.atleast_1d(stored["class_names"])
        paths = tuple(root / str(path) for path in rows["relative_im_path"])
        labels = rows["class"].astype(np.int64) - 1
        corners = np.stack([rows[f"bbox_{c}"].astype(np.int64) for c in ("x1", "y1", "x2", "y2")], axis=1)
    except Exception as error:  # the reader raises anything at all on a file of another kind
        raise DataError(f"{root / 'cars_annos.mat'}: is not the official annotation file ({error}).") from None
    _check_range(labels, len(names), root / "cars_annos.mat")
    return Listing(
        source="cars",
        root=root,
        paths=paths,
        labels=labels,
        class_names=tuple(str(name) for name in names),
        part=first_half(labels, len(names)),
        # The file counts pixels from 1 and both corners belong to the box.
        boxes=np.concatenate([corners[:, :2] - 1, corners[:, 2:] - corners[:, :2] + 1], axis=1),
    )


def read_sop(root: Path) -> Listing:
    """Ebay_train.txt and Ebay_test.txt: image_id class_id super_class_id path, below one line of header."""
    rows: list[tuple[int, str, str]] = []  # class number, path, part
    for part, file in (("train", root / "Ebay_train.txt"), ("test", root / "Ebay_test.txt")):
        for line in _lines(file)[1:]:
            words = line.split(maxsplit=3)
            if len(words) != 4:
                raise DataError(f"{file}: expected 'image_id class_id super_class_id path', got '{line}'.")
            rows.append((_number(words[1], file), words[3], part))
    numbers, labels = np.unique(np.array([number for number, _, _ in rows], np.int64), return_inverse=True)
    return Listing(
        source="sop",
        root=root,
        paths=tuple(root / path for _, path, _ in rows),
        labels=labels.astype(np.int64),
        class_names=tuple(str(number) for number in numbers),
        part=np.array([part for *_, part in rows]),
        groups=np.array([path.partition("/")[0].removesuffix("_final") for _, path, _ in rows]),
    )


def read_inshop(root: Path) -> Listing:
    """Eval/list_eval_partition.txt: image_name item_id evaluation_status, below a count and a header."""
    file = next(p for p in (root / "Eval" / "list_eval_partition.txt", root / "list_eval_partition.txt") if p.exists())
    rows = []
    for line in _lines(file)[2:]:
        words = line.split()
        if len(words) != 3 or words[2] not in ("train", "query", "gallery"):
            raise DataError(f"{file}: expected 'image_name item_id train|query|gallery', got '{line}'.")
        rows.append(words)
    items = sorted({item for _, item, _ in rows})
    number = {item: c for c, item in enumerate(items)}
    above = root / "Img" if (root / "Img").is_dir() else root  # its archives unpack either way
    return Listing(
        source="inshop",
        root=root,
        paths=tuple(above / name for name, _, _ in rows),
        labels=np.array([number[item] for _, item, _ in rows], np.int64),
        class_names=tuple(items),
        part=np.array([part for *_, part in rows]),
        groups=np.array(["/".join(Path(name).parts[1:-2]) for name, _, _ in rows]),  # WOMEN/Dresses
    )


def first_half(labels: NDArray[np.int64], num_classes: int) -> NDArray[np.str_]:
    """The papers' split: the first half of the classes trains, the rest judges."""
    return np.where(labels < num_classes // 2, "train", "test")


def _by_holding_folder(root: Path) -> Listing:
    listing = list_folder(root)
    holders = [path.parent.name for path in listing.paths]
    names = sorted(set(holders))
    number = {name: c for c, name in enumerate(names)}
    labels = np.array([number[name] for name in holders], np.int64)
    order = np.argsort(labels, kind="stable")
    return replace(replace(listing, labels=labels, class_names=tuple(names)).take(order), part=None)


def _lines(file: Path) -> list[str]:
    try:
        return [line.rstrip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except FileNotFoundError:
        raise DataError(f"{file}: is missing. Unpack the archive again.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read ({error}).") from None


def _pairs(file: Path) -> list[tuple[str, str]]:
    """Lines "number rest"."""
    pairs = [line.split(maxsplit=1) for line in _lines(file)]
    for pair in pairs:
        if len(pair) != 2:
            raise DataError(f"{file}: expected a number and a value, got '{' '.join(pair)}'.")
    return [(number, rest) for number, rest in pairs]


def _number(word: str, file: Path) -> int:
    try:
        return int(word)
    except ValueError:
        raise DataError(f"{file}: expected a whole number, got '{word}'.") from None


def _check_range(labels: NDArray[np.int64], num_classes: int, file: Path) -> None:
    bad = labels[(labels < 0) | (labels >= num_classes)]
    if len(bad):
        raise DataError(f"{file}: class {bad[0] + 1} is outside 1 to {num_classes}.")


def _box_array(rows: list[list[str]], file: Path) -> NDArray[np.int64]:
    try:
        return np.round(np.array(rows, np.float64).reshape(len(rows), 4)).astype(np.int64)
    except ValueError:
        raise DataError(f"{file}: expected x, y, width and height for every image.") from None


# --- the registry ----------------------------------------------------------------------------------------------------

BENCHMARKS: Registry[Benchmark] = Registry("benchmark")


def _add(benchmark: Benchmark) -> None:
    BENCHMARKS.add(benchmark.name, replace(benchmark, parts=MappingProxyType(dict(benchmark.parts))))


_add(
    Benchmark(
        name="cub",
        title="CUB-200-2011",
        parts={"train": Counts(5_864, 100), "test": Counts(5_924, 100)},
        folder="CUB_200_2011",
        needs=("image_class_labels.txt",),  # an images.txt may lie in anybody's folder
        images="images",
        archives=(
            Archive(
                "CUB_200_2011.tgz",
                makes="CUB_200_2011",
                urls=("https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz",),
                md5="97eceeb196236b17998738112f37df78",
            ),
        ),
        page="https://data.caltech.edu/records/65de6-vp158",
        terms="for research, not for sale; the photos belong to their photographers",
        read=read_cub,
    )
)
_add(
    Benchmark(
        name="cars",
        title="Cars196",
        parts={"train": Counts(8_054, 98), "test": Counts(8_131, 98)},
        folder="cars196",
        needs=("cars_annos.mat",),
        images=".",
        class_folders=True,
        # Both addresses have been reported dead since 2023; they are named because they are the official ones.
        archives=(
            Archive(
                "car_ims.tgz",
                makes="cars196/car_ims",
                urls=(
                    "http://ai.stanford.edu/~jkrause/car196/car_ims.tgz",
                    "http://imagenet.stanford.edu/internal/car196/car_ims.tgz",
                ),
                md5="d5c8f0aa497503f355e17dc7886c3f14",
                into="cars196",
            ),
            Archive(
                "cars_annos.mat",
                makes="cars196/cars_annos.mat",
                urls=(
                    "http://ai.stanford.edu/~jkrause/car196/cars_annos.mat",
                    "http://imagenet.stanford.edu/internal/car196/cars_annos.mat",
                ),
                md5="b407c6086d669747186bd1d764ff9dbc",
                into="cars196",
            ),
        ),
        page="https://ai.stanford.edu/~jkrause/cars/car_dataset.html",
        terms="for research only",
        read=read_cars,
    )
)
_add(
    Benchmark(
        name="sop",
        title="Stanford Online Products",
        parts={"train": Counts(59_551, 11_318), "test": Counts(60_502, 11_316)},
        folder="Stanford_Online_Products",
        needs=("Ebay_train.txt",),
        images=".",
        archives=(
            Archive(
                "Stanford_Online_Products.zip",
                makes="Stanford_Online_Products",
                urls=(
                    "http://ftp.cs.stanford.edu/cs/cvgl/Stanford_Online_Products.zip",
                    "ftp://cs.stanford.edu/cs/cvgl/Stanford_Online_Products.zip",
                ),
                md5="7f73d41a2f44250d4779881525aea32e",
            ),
        ),
        page="https://cvgl.stanford.edu/projects/lifted_struct/",
        terms="for research; the photos belong to their sellers",
        read=read_sop,
    )
)
_add(
    Benchmark(
        name="inshop",
        title="In-Shop Clothes Retrieval",
        parts={"train": Counts(25_882, 3_997), "query": Counts(14_218, 3_985), "gallery": Counts(12_612, 3_985)},
        folder="inshop",
        needs=("Eval/list_eval_partition.txt", "list_eval_partition.txt"),
        images=".",
        # Handed out by its authors from a shared drive on request: there is no address to download from.
        archives=(
            Archive("img.zip", makes="inshop/img", into="inshop"),
            Archive("list_eval_partition.txt", makes="inshop/Eval/list_eval_partition.txt", into="inshop/Eval"),
        ),
        page="https://mmlab.ie.cuhk.edu.hk/projects/DeepFashion/InShopRetrieval.html",
        terms="for research only, on request from its authors",
        read=read_inshop,
    )
)
