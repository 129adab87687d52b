"""The field's four benchmarks: counts, files, download addresses and terms. Each is split by class.

The archives of CUB and Cars also contain a classification split, in which every class is on both sides. It is never
used here, because its scores say nothing about unseen classes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from nearkin._common.registry import Registry
from nearkin.data.layouts import read_cars, read_cub, read_inshop, read_sop
from nearkin.data.listing import Counts, Listing
from nearkin.errors import DataError, did_you_mean

CLOSED_SET_REASON = (
    "it has images of the same classes on both sides, so it measures recognition of known classes, "
    "not retrieval of unseen ones"
)


@dataclass(frozen=True)
class Archive:
    name: str  # file name
    creates: str  # what unpacking it creates, relative to --root
    urls: tuple[str, ...] = ()  # addresses, tried in order; empty if it can only be requested by hand
    sha256: str | None = None  # none if no trustworthy one is published; `nearkin data get` then prints the one it got
    md5: str | None = None  # detects damage, not forgery; independent public loaders have pinned these values for years
    extract_to: str = "."  # folder, relative to --root, to which it is unpacked or copied


@dataclass(frozen=True)
class Benchmark:
    """A benchmark in its official layout."""

    name: str  # name in recipes and commands
    title: str  # name in the literature
    parts: Mapping[str, Counts]  # official numbers of images and classes of each part
    folder: str  # folder that its archive creates
    marker_files: tuple[str, ...]  # files in that folder that identify the layout; any one of them suffices
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
        """Find the folder with the files that identify the layout."""
        folders = (root, root / self.folder)
        return next((f for f in folders if any((f / name).exists() for name in self.marker_files)), None)

    def list(self, root: Path | None, *, allow_missing: bool = False) -> Listing:
        """List all images with their official part."""
        if root is None:
            raise DataError(
                f"{self.name}: give its folder with --data.root DIR, or download it: nearkin data get {self.name}."
            )
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
            path = listing.missing[0]
            path = path.relative_to(folder) if path.is_relative_to(folder) else path
            return (
                f"{self.name}: expected {self.total.images:,} images under {folder}, "
                f"found {sum(c.images for c in actual.values()):,} (first missing: {path})."
            )
        part = next(p for p in [*self.parts, *actual] if self.parts.get(p) != actual.get(p))
        zero = Counts(0, 0)
        expected, found = self.parts.get(part, zero), actual.get(part, zero)
        return (
            f"{self.name}: expected {expected.images:,} {part} images of {expected.classes:,} classes under {folder}, "
            f"found {found.images:,} of {found.classes:,}."
        )


# --- the registry ----------------------------------------------------------------------------------------------------

BENCHMARKS: Registry[Benchmark] = Registry("benchmark")
BENCHMARKS.add(
    "cub",
    Benchmark(
        name="cub",
        title="CUB-200-2011",
        parts={"train": Counts(5_864, 100), "test": Counts(5_924, 100)},
        folder="CUB_200_2011",
        marker_files=("image_class_labels.txt",),  # images.txt is too common a name
        image_folder="images",
        archives=(
            Archive(
                "CUB_200_2011.tgz",
                creates="CUB_200_2011",
                urls=("https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz",),
                md5="97eceeb196236b17998738112f37df78",
            ),
        ),
        homepage="https://data.caltech.edu/records/65de6-vp158",
        terms="for research, not for sale; the photos belong to their photographers",
        read_layout=read_cub,
    ),
)


def _cars_archive(name: str, creates: str, md5: str) -> Archive:
    # Both addresses have been reported dead since 2023; they are listed because they are the official ones.
    servers = ("http://ai.stanford.edu/~jkrause/car196", "http://imagenet.stanford.edu/internal/car196")
    return Archive(name, creates, tuple(f"{server}/{name}" for server in servers), md5=md5, extract_to="cars196")


BENCHMARKS.add(
    "cars",
    Benchmark(
        name="cars",
        title="Cars196",
        parts={"train": Counts(8_054, 98), "test": Counts(8_131, 98)},
        folder="cars196",
        marker_files=("cars_annos.mat",),
        allow_class_folders=True,
        archives=(
            _cars_archive("car_ims.tgz", "cars196/car_ims", "d5c8f0aa497503f355e17dc7886c3f14"),
            _cars_archive("cars_annos.mat", "cars196/cars_annos.mat", "b407c6086d669747186bd1d764ff9dbc"),
        ),
        homepage="https://ai.stanford.edu/~jkrause/cars/car_dataset.html",
        terms="for research only",
        read_layout=read_cars,
    ),
)
BENCHMARKS.add(
    "sop",
    Benchmark(
        name="sop",
        title="Stanford Online Products",
        parts={"train": Counts(59_551, 11_318), "test": Counts(60_502, 11_316)},
        folder="Stanford_Online_Products",
        marker_files=("Ebay_train.txt",),
        archives=(
            Archive(
                "Stanford_Online_Products.zip",
                creates="Stanford_Online_Products",
                urls=(
                    "http://ftp.cs.stanford.edu/cs/cvgl/Stanford_Online_Products.zip",
                    "ftp://cs.stanford.edu/cs/cvgl/Stanford_Online_Products.zip",
                ),
                md5="7f73d41a2f44250d4779881525aea32e",
            ),
        ),
        homepage="https://cvgl.stanford.edu/projects/lifted_struct/",
        terms="for research; the photos belong to their sellers",
        read_layout=read_sop,
    ),
)
BENCHMARKS.add(
    "inshop",
    Benchmark(
        name="inshop",
        title="In-Shop Clothes Retrieval",
        parts={"train": Counts(25_882, 3_997), "query": Counts(14_218, 3_985), "gallery": Counts(12_612, 3_985)},
        folder="inshop",
        marker_files=("Eval/list_eval_partition.txt", "list_eval_partition.txt"),
        # The authors share it on request; there is no address to download from.
        archives=(
            Archive("img.zip", creates="inshop/img", extract_to="inshop"),
            Archive("list_eval_partition.txt", creates="inshop/Eval/list_eval_partition.txt", extract_to="inshop/Eval"),
        ),
        homepage="https://mmlab.ie.cuhk.edu.hk/projects/DeepFashion/InShopRetrieval.html",
        terms="for research only, on request from its authors",
        read_layout=read_inshop,
    ),
)


def require_target(target: str) -> None:
    """Refuse what is neither a benchmark's name nor an existing path."""
    if target in BENCHMARKS or (target != "glyphs" and Path(target).exists()):
        return
    hint = did_you_mean(target, BENCHMARKS)
    hint = hint or f" Available benchmarks: {', '.join(BENCHMARKS)}; or give a folder or a .csv."
    reason = "is generated by nearkin and needs no check." if target == "glyphs" else "no such benchmark or path."
    raise DataError(f"{target}: {reason}{hint}")
