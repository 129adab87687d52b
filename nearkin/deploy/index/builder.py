"""Update an index from a folder or table, embedding only new and changed images.

Each embedded batch is appended to the journal (and written to the store, if any), so that a killed process can resume.
At the end, reused and new vectors are committed together as one new state.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nearkin._common.progress import Reporter
from nearkin.data.loading import map_in_threads
from nearkin.data.reading import read_image
from nearkin.deploy.index import files
from nearkin.deploy.index.index import Index
from nearkin.deploy.index.journal import Journal
from nearkin.deploy.index.provenance import EmbeddingModel, FileStamp, check_model, get_model_info
from nearkin.deploy.index.search import Label, Vectors, check_vectors
from nearkin.deploy.index.sources import ImageList
from nearkin.deploy.stores import Store
from nearkin.errors import DataError

BATCH_SIZE = 128
_MAX_ERRORS_SHOWN = 10


@dataclass
class UpdateSummary:
    """What an update did."""

    embedded: int = 0  # images embedded
    unchanged: int = 0  # images whose vectors were reused
    relabelled: int = 0  # items whose label changed
    resumed: int = 0  # images taken from the journal of an interrupted run
    pruned: int = 0  # items removed because their files are gone
    gone: int = 0  # items kept although their files are gone
    broken: dict[str, str] = field(default_factory=dict)  # error message by name, for images that could not be embedded
    notes: tuple[str, ...] = ()  # messages for the user

    def lines(self) -> list[str]:
        """Return the summary as lines for the terminal."""
        parts = [f"{self.embedded:,} embedded", f"{self.unchanged:,} unchanged"]
        parts += [f"{self.resumed:,} resumed from the interrupted run"] if self.resumed else []
        parts += [f"{self.relabelled:,} relabelled"] if self.relabelled else []
        parts += [f"{self.pruned:,} removed"] if self.pruned else []
        lines = [", ".join(parts), *self.notes]
        if self.broken:
            lines.append(f"{len(self.broken):,} could not be read:")
            lines += [f"  {reason}" for reason in list(self.broken.values())[:_MAX_ERRORS_SHOWN]]
            more = len(self.broken) - _MAX_ERRORS_SHOWN
            lines += [f"  and {more:,} more"] if more > 0 else []
        if self.gone:
            lines.append(f"{self.gone:,} items are no longer listed; --prune removes them.")
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
    """Embed new and changed images and write the index. Call inside `files.lock_index(out)`.

    Items are ordered as listed, followed by items that are no longer listed, so the result does not depend on
    interruptions.

    Args:
        model: Embeds the images.
        images: What to index.
        out: The index folder.
        run: The run folder of the model, recorded in the index.
        prune: Remove items that are no longer listed.
        batch_size: Images embedded, then journalled, at a time.
        store: External store to keep in sync.
        reporter: Shows progress.

    Returns:
        The index and what was done.
    """
    model_info = get_model_info(model, run)
    old = _open_existing(out, model_info.fingerprint, images)
    journal = Journal(out, model_info.fingerprint, model.embed([]).shape[1])
    summary = UpdateSummary(notes=images.notes)
    unchanged, stamps, missing = _find_unchanged(images, _Embedded(old, journal), summary, reporter)
    if store is not None:
        _sync_store(old, journal, images, store, reporter)
    elif old is not None and old.store is not None:
        summary.notes += (f"{old.store} was not updated; pass --store to update it",)
    todo = [name for name in images.labels if name not in unchanged and name not in summary.broken]
    _embed(model, images, todo, stamps, journal, summary, batch_size, store, reporter)

    embedded = _Embedded(old, journal)
    labels = {name: label for name, label in images.labels.items() if name in embedded and name not in missing}
    summary.relabelled = _update_labels(old, labels, unchanged, embedded, store)
    labels |= _unlisted_items(old, labels, images, prune, store, summary)
    if not labels:
        journal.remove()
        raise DataError(f"{images.root}: none of the {len(images.labels):,} images could be read.")
    names = list(labels)
    # An unreadable file keeps the stamp of its vector, so that it is retried next time.
    new_stamps = [
        embedded.stamp(name) if name in summary.broken else stamps.get(name, embedded.stamp(name)) for name in names
    ]
    index = Index(
        embedded.vectors(names),
        names,
        list(labels.values()),
        model=model,
        model_info=model_info,
        root=images.root.resolve(),
        stamps=new_stamps,
    )
    index.store = None if store is None else store.name
    if old is not None:
        summary.notes += _carry_over(old, index)
    index.write(out)
    journal.remove()
    if store is not None and (count := store.count()) != len(index):
        summary.notes += (
            f"{store.name} holds {count:,} items, the index {len(index):,}; "
            "empty the store and index again to remove the others",
        )
    return index, summary


def _unlisted_items(
    old: Index | None,
    labels: dict[str, Label],
    images: ImageList,
    prune: bool,
    store: Store | None,
    summary: UpdateSummary,
) -> dict[str, Label]:
    """Return the old items to keep although they are no longer listed; with `prune`, remove the others."""
    if old is None:
        return {}
    unlisted = {name: label for name, label in zip(old.ids, old.labels, strict=True) if name not in labels}
    if not prune:
        summary.gone = len(unlisted)
        return unlisted
    # Files in a folder that cannot be opened right now may still exist.
    hidden = [n for n in unlisted if any((images.root / n).is_relative_to(f) for f in images.unreadable_folders)]
    kept = {name: unlisted.pop(name) for name in hidden}
    summary.notes += (f"kept {len(kept):,} items in folders that cannot be opened",) if kept else ()
    summary.pruned = len(unlisted)
    if store is not None and unlisted:
        store.remove(list(unlisted))
    return kept


def _update_labels(
    old: Index | None, labels: dict[str, Label], unchanged: set[str], embedded: _Embedded, store: Store | None
) -> int:
    """Count items whose label changed, and update those in the store that are not rewritten anyway."""
    if old is None:
        return 0
    relabelled = [name for name, label in labels.items() if name in old and old.labels[old.row_of(name)] != label]
    if store is not None:
        names = [name for name in relabelled if name in unchanged]
        _write_to_store(store, names, embedded.vectors(names), [labels[name] for name in names])
    return len(relabelled)


def _carry_over(old: Index, new: Index) -> tuple[str, ...]:
    """Copy threshold and re-ranking, and the graph if no item changed; return notes on what is outdated."""
    new.threshold, new.rerank = old.threshold, old.rerank
    if old.ids == new.ids and old.labels == new.labels and np.array_equal(old.vectors, new.vectors):
        new.graph = old.graph
        return ()
    settings = {"--calibrate": old.threshold, "--choose-rerank": old.rerank}
    outdated = " ".join(flag for flag, value in settings.items() if value is not None)
    notes = (f"items changed; previous settings were kept, update them with: {outdated}",) if outdated else ()
    return notes + (("items changed; the graph was dropped, rebuild it with: --hnsw",) if old.graph else ())


class _Embedded:
    """Images that have a vector: in the journal, or else in the existing index."""

    def __init__(self, old: Index | None, journal: Journal) -> None:
        self.old = old
        self.journalled = {name: (record, row) for record in journal.records for row, name in enumerate(record.ids)}

    def __contains__(self, name: str) -> bool:
        return name in self.journalled or (self.old is not None and name in self.old)

    def stamp(self, name: str) -> FileStamp | None:
        if name in self.journalled:
            record, row = self.journalled[name]
            return record.stamps[row]
        return None if self.old is None or name not in self.old else self.old.stamps[self.old.row_of(name)]

    def vectors(self, names: Sequence[str]) -> Vectors:
        dim = self.old.dim if self.old is not None else next(iter(self.journalled.values()))[0].vectors.shape[1]
        out = np.empty((len(names), dim), np.float32)
        for n, name in enumerate(names):
            if name in self.journalled:
                record, row = self.journalled[name]
                out[n] = record.vectors[row]
            else:
                assert self.old is not None
                out[n] = self.old.vectors[self.old.row_of(name)]
        return out


def _open_existing(out: Path, fingerprint: str, images: ImageList) -> Index | None:
    if not (out / "manifest.json").exists():
        files.remove_stale_files(out, None)
        return None
    old = Index.load(out)
    check_model(old.model_info, fingerprint, str(out))
    if old.root is None or (old.root != images.root.resolve() and old.root.exists()):
        content = old.root or "precomputed vectors"
        raise DataError(f"{out}: contains an index of {content}, not of {images.root}. Choose another folder with -o.")
    return old


# --- finding changes -------------------------------------------------------------------------------------------------


def _find_unchanged(
    images: ImageList, embedded: _Embedded, summary: UpdateSummary, reporter: Reporter
) -> tuple[set[str], dict[str, FileStamp], set[str]]:
    """Return the images that need no embedding, the current stamp of each image, and the listed but missing files."""
    names = list(images.labels)

    def check(name: str) -> tuple[FileStamp | None, bool, OSError | None]:
        previous = embedded.stamp(name)
        try:
            stat = os.stat(images.root / name)
            if previous is not None and (previous.size, previous.mtime_ns) == (stat.st_size, stat.st_mtime_ns):
                return previous, True, None
            current = stamp_file(images.root / name)
            same = previous is not None and (previous.size, previous.sha256) == (current.size, current.sha256)
            return current, same, None
        except OSError as error:
            return None, False, error

    unchanged: set[str] = set()
    stamps: dict[str, FileStamp] = {}
    missing: set[str] = set()
    checks: list[tuple[FileStamp | None, bool, OSError | None]] = []
    with reporter.track("checking files", len(names), unit="file") as bar:
        for part in map_in_threads(check, names):
            checks += part
            bar.advance(len(part))
    for name, (stamp, same, error) in zip(names, checks, strict=True):
        if error is not None:
            summary.broken[name] = f"{name}: cannot read ({error.strerror})."
            if isinstance(error, FileNotFoundError):  # a broken symbolic link
                missing.add(name)
        elif stamp is not None:
            stamps[name] = stamp
        if same:
            unchanged.add(name)
    summary.resumed = sum(name in embedded.journalled for name in unchanged)
    summary.unchanged = len(unchanged) - summary.resumed
    return unchanged, stamps, missing


def stamp_file(path: Path) -> FileStamp:
    """Compute the stamp of a file."""
    stat = os.stat(path)
    with open(path, "rb") as file:
        return FileStamp(stat.st_size, stat.st_mtime_ns, hashlib.file_digest(file, "sha256").hexdigest())


# --- embedding -------------------------------------------------------------------------------------------------------


def _embed(
    model: EmbeddingModel,
    images: ImageList,
    todo: Sequence[str],
    stamps: dict[str, FileStamp],
    journal: Journal,
    summary: UpdateSummary,
    batch_size: int,
    store: Store | None,
    reporter: Reporter,
) -> None:
    try:
        with reporter.track("embedding", len(todo), unit="img") as bar:
            for start in range(0, len(todo), batch_size):
                batch = todo[start : start + batch_size]
                readable, vectors, broken = embed_files(model, [images.root / name for name in batch])
                summary.broken |= {batch[n]: reason for n, reason in broken.items()}
                names = [batch[n] for n in readable]
                if names:
                    if store is not None:
                        _write_to_store(store, names, vectors, [images.labels[name] for name in names])
                    journal.append(names, [stamps[name] for name in names], vectors)
                summary.embedded += len(names)
                bar.advance(len(batch))
    except KeyboardInterrupt:
        left = len(todo) - bar.done
        raise KeyboardInterrupt(f"stopped with {left:,} of {len(todo):,} images left to embed") from None


def embed_files(model: EmbeddingModel, paths: Sequence[Path]) -> tuple[list[int], Vectors, dict[int, str]]:
    """Embed image files, skipping those that cannot be embedded."""
    indices = list(range(len(paths)))
    broken: dict[int, str] = {}
    try:
        embedded = model.embed(paths)
    except DataError as error:
        # At least one file is broken: find out which, and embed the rest.
        broken = _find_broken(model, paths)
        if not broken:
            raise error from None
        indices = [n for n in indices if n not in broken]
        embedded = model.embed([paths[n] for n in indices])
    vectors = embedded.numpy()
    finite = np.isfinite(vectors).all(axis=1)
    for n in np.flatnonzero(~finite).tolist():
        broken[indices[n]] = f"{paths[indices[n]]}: the model returns NaN or infinity."
    indices = [n for n, valid in zip(indices, finite.tolist(), strict=True) if valid]
    return indices, check_vectors(vectors[finite], None, "the model's vectors"), dict(sorted(broken.items()))


def _find_broken(model: EmbeddingModel, paths: Sequence[Path]) -> dict[int, str]:
    """Return an error message by index for every file that cannot be read."""
    side, channels = max(model.image_shape[1:]), model.image_shape[0]

    def check(path: Path) -> str:
        try:
            read_image(path, side, channels=channels)
        except DataError as error:
            return str(error)
        return ""

    reasons = (reason for part in map_in_threads(check, paths) for reason in part)
    return {n: reason for n, reason in enumerate(reasons) if reason}


# --- external store --------------------------------------------------------------------------------------------------


def _write_to_store(store: Store, names: Sequence[str], vectors: Vectors, labels: Sequence[Label]) -> None:
    if names:
        store.write(names, vectors, [{"label": label} for label in labels])


def _sync_store(old: Index | None, journal: Journal, images: ImageList, store: Store, reporter: Reporter) -> None:
    """Write to the store what it may lack: the journal of an interrupted run, and an index built without it."""
    for record in journal.records:
        listed = [n for n, name in enumerate(record.ids) if name in images.labels]
        names = [record.ids[n] for n in listed]
        _write_to_store(store, names, record.vectors[listed], [images.labels[name] for name in names])
    if old is None or old.store == store.name:
        return
    with reporter.track("writing to the store", len(old), unit="item") as bar:
        for start in range(0, len(old), 1000):
            rows = slice(start, start + 1000)
            _write_to_store(store, old.ids[rows], np.asarray(old.vectors[rows]), old.labels[rows])
            bar.advance(len(old.ids[rows]))
