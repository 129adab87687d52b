"""List the images to index: of a folder, a table or a benchmark dataset."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nearkin._common.words import agreeing, counted
from nearkin.data.benchmarks import BENCHMARKS
from nearkin.data.listing import Listing, describe_other_files, list_image_files, list_table, part_name
from nearkin.data.sources import detect_source
from nearkin.data.table import PARTS
from nearkin.deploy.index.search import Label
from nearkin.errors import ConfigError, DataError


@dataclass(frozen=True)
class ImageList:
    root: Path  # the folder that names are relative to
    # label (or None) by image name; names outside `root` are absolute paths
    labels: dict[str, Label] = field(repr=False)
    notes: tuple[str, ...] = ()  # messages for the user
    unreadable_folders: tuple[Path, ...] = ()  # folders that could not be opened


def find_images(source: Path, *, path_column: str | None = None, label_column: str | None = None) -> ImageList:
    """List the images of a folder (with class folders or flat), a table, or a benchmark in its official layout."""
    source_type = detect_source(source)
    for flag, column in (("--data.path-column", path_column), ("--data.label-column", label_column)):
        if column is not None and source_type != "table":
            raise ConfigError(f"{flag}: only applies to tables; {source} is not a table.")
    if source_type == "table":
        return _from_listing(list_table(source, path_column=path_column, label_column=label_column, fewest=1))
    if source_type in BENCHMARKS:
        return _from_listing(BENCHMARKS[source_type].list(source))
    if not source.is_dir():
        raise DataError(f"{source}: no such folder or table. Expected a folder of images or a .csv file.")
    unreadable: list[Path] = []
    paths = list_image_files(source, [], unreadable)
    if not paths:
        raise DataError(f"{source}: {describe_other_files(source)}. Expected image files, or one folder per class.")
    parts_by_name = {path.relative_to(source).as_posix(): path.relative_to(source).parts for path in paths}
    folders = {parts[0] for parts in parts_by_name.values() if len(parts) > 1}
    # Below train/ and test/, class folders are one level deeper. An image outside class folders has no label.
    depth = 1 if len(folders) >= 2 and all(part_name(folder) in PARTS for folder in folders) else 0
    labels: dict[str, Label] = {
        name: parts[depth] if len(parts) > depth + 1 else None for name, parts in parts_by_name.items()
    }
    return ImageList(source, labels, _unreadable_note(unreadable), tuple(unreadable))


def _from_listing(listing: Listing) -> ImageList:
    labels: dict[str, Label] = {}
    duplicates = 0
    for path, code in zip(listing.paths, listing.labels.tolist(), strict=True):
        name, label = listing.shown(path), listing.class_names[code]
        duplicates += name in labels
        if labels.setdefault(name, label) != label:
            raise DataError(f"{listing.root}: {name!r} has two labels, {labels[name]!r} and {label!r}. Remove one row.")
    notes = _unreadable_note(listing.unopened)
    if listing.missing:
        notes += (f"{agreeing(len(listing.missing), 'listed files do not exist')} (first: {listing.missing[0]})",)
    if duplicates:
        notes += (f"{counted(duplicates, 'repeated row')}; each file is indexed once",)
    return ImageList(listing.root, labels, notes, listing.unopened)


def _unreadable_note(folders: Sequence[Path]) -> tuple[str, ...]:
    return (f"{counted(len(folders), 'folder')} cannot be opened (first: {folders[0]})",) if folders else ()
