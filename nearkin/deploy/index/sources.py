"""The images to index, and the classes a run was trained on, which must not calibrate a threshold or a re-ranking."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from nearkin._common.progress import Reporter
from nearkin._common.words import agreeing, counted
from nearkin.config.recipe import DataConfig
from nearkin.data.benchmarks import BENCHMARKS
from nearkin.data.images import NoImages, file_digest
from nearkin.data.listing import Listing, describe_other_files, list_image_files, list_table, part_name
from nearkin.data.loading import map_with_progress
from nearkin.data.sources import detect_source, fingerprint, images_of, list_source
from nearkin.data.splits import make_split
from nearkin.data.table import PARTS, Table
from nearkin.deploy.index.index import Index
from nearkin.deploy.index.search import Label
from nearkin.errors import ConfigError, DataError, UserError
from nearkin.training.run import Run


@dataclass(frozen=True)
class ImageList:
    root: Path  # the folder that names are relative to
    # label (or None) by image name; names outside `root` are absolute paths
    labels: Mapping[str, Label] = field(repr=False)
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
    names = [path.relative_to(source) for path in paths]
    folders = {name.parts[0] for name in names if len(name.parts) > 1}
    # Below train/ and test/, class folders are one level deeper. An image outside class folders has no label.
    depth = 1 if len(folders) >= 2 and all(part_name(folder) in PARTS for folder in folders) else 0
    labels = {name.as_posix(): name.parts[depth] if len(name.parts) > depth + 1 else None for name in names}
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


@dataclass(frozen=True)
class TrainingClasses:
    names: frozenset[str] = frozenset()  # class names
    digests: frozenset[str] = frozenset()  # SHA-256 of every training image, in hexadecimal

    def labels_in(self, index: Index) -> set[Label]:
        """Find the labels of which the name or an image was trained on; too many of them are harmless."""
        stamped = zip(index.labels, index.stamps, strict=True)
        seen: set[Label] = {label for label, stamp in stamped if stamp is not None and stamp.sha256 in self.digests}
        return (seen | {label for label in index.labels if label in self.names}) - {None}


def training_classes(run: Run, reporter: Reporter) -> TrainingClasses:
    """Determine the training classes of a run, with advice in the error if that fails."""
    try:
        return read_training_classes(run, reporter)
    except (UserError, OSError) as error:
        raise ConfigError(
            f"{run.path}: cannot determine its training classes ({str(error).splitlines()[0]})\n"
            "Restore its data, or pass --assume-unseen if it was trained on none of the indexed classes."
        ) from None


def read_training_classes(run: Run, reporter: Reporter) -> TrainingClasses:
    data = run.recipe.data
    if data.source == "glyphs":
        return TrainingClasses()  # generated, not files
    table = list_training_data(data, reporter)
    digests = list(map_with_progress(file_digest, table.paths, reporter, "hashing the training images"))
    current = fingerprint(digests, table.labels, table.class_names, table.part, table.boxes)
    recorded = ((run.result or {}).get("protocol") or {}).get("fingerprint", current)
    if recorded != current:  # other classes would be split differently by the same seed
        raise DataError(f"{data.root or table.source}: has changed since the run was trained.")
    names = frozenset(make_split(table, data)[0].train.class_names)
    # Splits are by class, so every image of a training class is a training image.
    trained = [table.class_names[label] in names for label in table.labels]
    return TrainingClasses(names, frozenset(d.hex() for d, used in zip(digests, trained, strict=True) if used))


def list_training_data(data: DataConfig, reporter: Reporter) -> Table:
    """List the images of a recipe's source without reading pixels, minus the broken files that training skips."""
    listing = list_source(data)
    if data.skip_broken:
        listing = listing.take(images_of(listing, replace(data, cache=False), reporter).kept)
    return listing.without_empty_classes().to_table(NoImages(listing.source, len(listing)), fingerprint="")
