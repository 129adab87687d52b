"""Find the indexed classes that a run was trained on. They must not calibrate a threshold or select a re-ranking."""

from dataclasses import dataclass, replace

from nearkin._common.progress import Reporter
from nearkin.config.recipe import DataConfig
from nearkin.data.images import NoImages, file_digest
from nearkin.data.loading import map_with_progress
from nearkin.data.sources import fingerprint, images_of, list_source
from nearkin.data.splits import make_split
from nearkin.data.table import Table
from nearkin.deploy.index.index import Index
from nearkin.deploy.index.search import Label
from nearkin.errors import ConfigError, DataError, UserError
from nearkin.training.run import Run


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
