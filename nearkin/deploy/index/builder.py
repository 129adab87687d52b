"""Update an index from a folder or table, embedding only new and changed images.

Each embedded batch is appended to the journal (and written to the store, if any), so that a killed process can resume.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nearkin._common.progress import Reporter
from nearkin._common.words import agreeing, counted
from nearkin.data.loading import map_in_threads, map_with_progress
from nearkin.data.reading import open_file, read_image
from nearkin.deploy.index.index import Index
from nearkin.deploy.index.items import EmbeddingModel, FileStamp, check_model, get_model_info
from nearkin.deploy.index.search import Label, Vectors, check_vectors
from nearkin.deploy.index.sources import ImageList
from nearkin.deploy.index.storage import Journal
from nearkin.deploy.stores import Store
from nearkin.errors import DataError

BATCH_SIZE = 128
_STORE_BATCH = 1000  # items read from the index at a time to fill a store
_MAX_ERRORS_SHOWN = 10


@dataclass
class UpdateSummary:
    embedded: int = 0  # images embedded
    unchanged: int = 0  # images whose vectors were reused
    relabelled: int = 0  # items whose label changed
    resumed: int = 0  # images taken from the journal of an interrupted run
    pruned: int = 0  # items removed because their files are gone
    gone: int = 0  # items kept although their files are gone
    broken: dict[str, str] = field(default_factory=dict)  # error message by name, for images that could not be embedded
    notes: list[str] = field(default_factory=list)  # messages for the user

    def lines(self) -> list[str]:
        parts = [f"{self.embedded:,} embedded", f"{self.unchanged:,} unchanged"]
        parts += [f"{self.resumed:,} resumed from the interrupted run"] if self.resumed else []
        parts += [f"{self.relabelled:,} relabelled"] if self.relabelled else []
        parts += [f"{self.pruned:,} removed"] if self.pruned else []
        lines = [", ".join(parts), *self.notes]
        if self.broken:
            lines.append(f"{len(self.broken):,} could not be read:")
            lines += [f"  {reason}" for reason in list(self.broken.values())[:_MAX_ERRORS_SHOWN]]
        if len(self.broken) > _MAX_ERRORS_SHOWN:
            lines.append(f"  and {len(self.broken) - _MAX_ERRORS_SHOWN:,} more")
        if self.gone:
            lines.append(f"{agreeing(self.gone, 'items are no longer listed')}; remove with --prune.")
        return lines


def update_index(
    model: EmbeddingModel,
    images: ImageList,
    out: Path,
    *,
    run: Path | None = None,
    prune: bool = False,
    batch_size: int = BATCH_SIZE,
    store: Store | None = None,
    reporter: Reporter,
) -> tuple[Index, UpdateSummary]:
    """Embed new and changed images and write the index, in an order that no interruption changes, under its lock."""
    model_info = get_model_info(model, run)
    old = _open_existing(out, model_info.fingerprint, images)
    journal = Journal(out, model_info.fingerprint, model.embed([]).shape[1])
    summary = UpdateSummary(notes=list(images.notes))
    update = _Update(model, images, old, journal, store, reporter, summary)
    unchanged = update.find_unchanged()
    update.fill_store()
    update.embed([name for name in images.labels if name not in unchanged and name not in summary.broken], batch_size)
    labels = update.labels(unchanged, prune)
    if not labels:
        journal.remove()
        raise DataError(f"{images.root}: none of the {len(images.labels):,} images could be read.")
    index = Index(
        update.vectors(list(labels)),
        list(labels),
        list(labels.values()),
        model=model,
        model_info=model_info,
        root=images.root.resolve(),
        stamps=[update.stamps.get(name, update.stamp(name)) for name in labels],
    )
    index.store = None if store is None else store.name
    if old is not None:
        summary.notes += _carry_over(old, index)
    index.write(out)
    journal.remove()
    if store is not None and (count := store.count()) != len(index):
        summary.notes.append(
            f"{store.name} holds {count:,} items, the index {len(index):,}; "
            "empty the store and index again to remove the others"
        )
    return index, summary


def _open_existing(out: Path, fingerprint: str, images: ImageList) -> Index | None:
    if not (out / "manifest.json").exists():
        return None
    old = Index.load(out)
    check_model(old.model_info, fingerprint, str(out))
    if old.root is None or (old.root != images.root.resolve() and old.root.exists()):
        content = old.root or "precomputed vectors"
        raise DataError(f"{out}: contains an index of {content}, not of {images.root}. Choose another folder with -o.")
    return old


def _carry_over(old: Index, new: Index) -> list[str]:
    """Copy threshold and re-ranking, and the graph if no item changed; return notes on what is outdated."""
    new.threshold, new.rerank = old.threshold, old.rerank
    if old.ids == new.ids and old.labels == new.labels and np.array_equal(old.vectors, new.vectors):
        new.graph = old.graph
        return []
    settings = {"--calibrate": old.threshold, "--choose-rerank": old.rerank}
    outdated = " ".join(flag for flag, value in settings.items() if value is not None)
    notes = [f"items changed; previous settings were kept, update them with: {outdated}"] if outdated else []
    return notes + (["items changed; the graph was dropped, rebuild it with: --hnsw"] if old.graph else [])


@dataclass
class _Update:
    """The state of an update. An image has a vector if it is in the journal, or else in the old index."""

    model: EmbeddingModel
    images: ImageList
    old: Index | None
    journal: Journal
    store: Store | None
    reporter: Reporter
    summary: UpdateSummary
    stamps: dict[str, FileStamp] = field(default_factory=dict)  # of the files as they are now
    missing: set[str] = field(default_factory=set)  # listed files that do not exist

    def stamp(self, name: str) -> FileStamp | None:
        """Return the stamp of the file that an image's vector was computed from."""
        if name in self.journal.entries:
            return self.journal.entries[name][0]
        return None if self.old is None or name not in self.old else self.old.stamps[self.old.row_of(name)]

    def vectors(self, names: Sequence[str]) -> Vectors:
        """Return the vectors [N, D] of images that have one."""
        dim = self.old.dim if self.old is not None else len(next(iter(self.journal.entries.values()))[1])
        out = np.empty((len(names), dim), np.float32)
        for n, name in enumerate(names):
            if name in self.journal.entries:
                out[n] = self.journal.entries[name][1]
            else:
                assert self.old is not None
                out[n] = self.old.vectors[self.old.row_of(name)]
        return out

    def find_unchanged(self) -> set[str]:
        """Find the images that need no embedding, and record the current stamp of every file."""
        names = list(self.images.labels)
        found = list(map_with_progress(self._read_stamp, names, self.reporter, "checking files", unit="file"))
        unchanged = set()
        for name, stamp in zip(names, found, strict=True):
            if isinstance(stamp, OSError):
                self.summary.broken[name] = f"{name}: cannot read ({stamp.strerror})."
                if isinstance(stamp, FileNotFoundError):  # a broken symbolic link
                    self.missing.add(name)
                continue
            self.stamps[name] = stamp
            previous = self.stamp(name)
            if previous is not None and previous.sha256 == stamp.sha256:
                unchanged.add(name)
        self.summary.resumed = len(unchanged & self.journal.entries.keys())
        self.summary.unchanged = len(unchanged) - self.summary.resumed
        return unchanged

    def _read_stamp(self, name: str) -> FileStamp | OSError:
        previous = self.stamp(name)
        try:
            stat = os.stat(self.images.root / name)
            if previous is not None and (previous.size, previous.mtime_ns) == (stat.st_size, stat.st_mtime_ns):
                return previous
            with open_file(self.images.root / name) as file:
                return FileStamp(stat.st_size, stat.st_mtime_ns, hashlib.file_digest(file, "sha256").hexdigest())
        except OSError as error:
            return error

    def embed(self, todo: Sequence[str], batch_size: int) -> None:
        try:
            with self.reporter.track("embedding", len(todo), unit="img") as bar:
                for start in range(0, len(todo), batch_size):
                    batch = todo[start : start + batch_size]
                    readable, vectors, broken = embed_files(self.model, [self.images.root / name for name in batch])
                    for n, reason in broken.items():
                        self.summary.broken[batch[n]] = reason
                        del self.stamps[batch[n]]  # it keeps that of its vector, so that it is retried next time
                    names = [batch[n] for n in readable]
                    if names:
                        self._write_to_store(names, vectors, [self.images.labels[name] for name in names])
                        self.journal.append(names, [self.stamps[name] for name in names], vectors)
                    self.summary.embedded += len(names)
                    bar.advance(len(batch))
        except KeyboardInterrupt:
            left = len(todo) - bar.done
            raise KeyboardInterrupt(f"stopped with {left:,} of {len(todo):,} images left to embed") from None

    def labels(self, unchanged: set[str], prune: bool) -> dict[str, Label]:
        """Return the items of the new index with their labels, and bring the store up to date with them."""
        old_labels = {} if self.old is None else dict(zip(self.old.ids, self.old.labels, strict=True))
        labels = {
            name: label
            for name, label in self.images.labels.items()
            if (name in self.journal.entries or name in old_labels) and name not in self.missing
        }
        relabelled = [name for name, label in labels.items() if old_labels.get(name, label) != label]
        self.summary.relabelled = len(relabelled)
        names = [name for name in relabelled if name in unchanged]  # the others were written when embedded
        if names:
            self._write_to_store(names, self.vectors(names), [labels[name] for name in names])
        unlisted = {name: label for name, label in old_labels.items() if name not in labels}
        if not prune:
            self.summary.gone = len(unlisted)
            return labels | unlisted
        # Files in a folder that cannot be opened right now may still exist.
        folders = self.images.unreadable_folders
        hidden = [name for name in unlisted if any((self.images.root / name).is_relative_to(f) for f in folders)]
        kept = {name: unlisted.pop(name) for name in hidden}
        if kept:
            self.summary.notes.append(f"kept {counted(len(kept), 'item')} in folders that cannot be opened")
        self.summary.pruned = len(unlisted)
        if self.store is not None and unlisted:
            self.store.remove(list(unlisted))
        return labels | kept

    def fill_store(self) -> None:
        """Write to the store what it may lack: the journal of an interrupted run, and an index built without it."""
        if self.store is None:
            if self.old is not None and self.old.store is not None:
                self.summary.notes.append(f"{self.old.store} was not updated; pass --store to update it")
            return
        labels = {name: self.images.labels[name] for name in self.journal.entries if name in self.images.labels}
        if self.old is not None and self.old.store != self.store.name:
            labels = dict(zip(self.old.ids, self.old.labels, strict=True)) | labels
        names = list(labels)
        with self.reporter.track("writing to the store", len(names), unit="item") as bar:
            for start in range(0, len(names), _STORE_BATCH):
                batch = names[start : start + _STORE_BATCH]
                self._write_to_store(batch, self.vectors(batch), [labels[name] for name in batch])
                bar.advance(len(batch))

    def _write_to_store(self, names: Sequence[str], vectors: Vectors, labels: Sequence[Label]) -> None:
        if self.store is not None:
            self.store.write(names, vectors, labels)


def embed_files(model: EmbeddingModel, paths: Sequence[Path]) -> tuple[list[int], Vectors, dict[int, str]]:
    """Embed image files. Returns which were embedded, their vectors, and error messages of the others."""

    def check(path: Path) -> str:
        try:
            read_image(path, max(model.image_shape[1:], default=256))
        except DataError as error:
            return str(error)
        return ""

    indices = list(range(len(paths)))
    broken: dict[int, str] = {}
    try:
        embedded = model.embed(paths)
    except DataError as error:
        # At least one file is broken: find out which, and embed the rest.
        reasons = (reason for part in map_in_threads(check, paths) for reason in part)
        broken = {n: reason for n, reason in enumerate(reasons) if reason}
        if not broken:
            raise error from None
        indices = [n for n in indices if n not in broken]
        embedded = model.embed([paths[n] for n in indices])
    vectors = embedded.numpy()
    finite = np.isfinite(vectors).all(axis=1)
    for n in np.flatnonzero(~finite).tolist():
        broken[indices[n]] = f"{paths[indices[n]]}: the model returns NaN or infinity."
    indices = [n for n in indices if n not in broken]
    return indices, check_vectors(vectors[finite], None, "the model's vectors"), dict(sorted(broken.items()))
