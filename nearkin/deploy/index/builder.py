"""`nearkin index`: bring an index up to date with a folder or a table, embedding only what is new or has changed.

Each embedded batch goes to the journal at once (and to the store, where there is one), so that a process that is killed
goes on where it stopped. At the end the kept and the new vectors are written as one new state.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nearkin._common.progress import Reporter
from nearkin.data.benchmarks import BENCHMARKS
from nearkin.data.listing import Listing, list_image_files, list_table, part_name
from nearkin.data.loading import map_in_threads
from nearkin.data.reading import read_image
from nearkin.data.sources import detect_source
from nearkin.data.table import PARTS
from nearkin.deploy.index import files
from nearkin.deploy.index.index import Index
from nearkin.deploy.index.journal import Journal
from nearkin.deploy.index.provenance import Embeds, FileStamp, check_model, model_info
from nearkin.deploy.index.search import Label, Vectors, check_vectors
from nearkin.deploy.stores import Store
from nearkin.errors import ConfigError, DataError

BATCH = 128  # images embedded, then journalled, at a time


@dataclass(frozen=True)
class Found:
    """Files to index: names relative to `root` (or whole paths outside it), each with its label or None.

    unopened: folders that could not be looked into.
    """

    root: Path
    labels: dict[str, Label] = field(repr=False)
    notes: tuple[str, ...] = ()
    unopened: tuple[Path, ...] = ()


@dataclass
class Summary:
    """What an update did. broken: names and reasons of files that could not be embedded; gone: items without a file."""

    embedded: int = 0
    unchanged: int = 0
    relabelled: int = 0
    resumed: int = 0
    pruned: int = 0
    gone: int = 0
    broken: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        parts = [f"{self.embedded:,} embedded", f"{self.unchanged:,} unchanged"]
        parts += [f"{self.resumed:,} taken over from the interrupted run"] if self.resumed else []
        parts += [f"{self.relabelled:,} with another label"] if self.relabelled else []
        parts += [f"{self.pruned:,} removed"] if self.pruned else []
        lines = [", ".join(parts), *self.notes]
        if self.broken:
            lines.append(f"{len(self.broken):,} could not be read:")
            lines += [f"  {reason}" for reason in list(self.broken.values())[:10]]
            lines += [f"  and {len(self.broken) - 10:,} more"] if len(self.broken) > 10 else []
        if self.gone:
            lines.append(f"{self.gone:,} items are no longer listed; --prune removes them.")
        return lines


# --- what there is to index ------------------------------------------------------------------------------------------


def find_images(source: Path, *, path_column: str | None = None, label_column: str | None = None) -> Found:
    """The images of a folder (class folders or flat), of a table, or of a benchmark's official layout.

    Of a folder every image is taken, whatever lies where.
    """
    kind = detect_source(source)
    for flag, column in (("--data.path-column", path_column), ("--data.label-column", label_column)):
        if column is not None and kind != "table":
            raise ConfigError(f"{flag}: is for tables, and {source} is none.")
    if kind == "table":
        return _found(list_table(source, path_column=path_column, label_column=label_column, fewest=1))
    if kind in BENCHMARKS:
        return _found(BENCHMARKS[kind].list(source))
    if not source.is_dir():
        raise DataError(f"{source}: there is no such folder or table. Give a folder of images, or a .csv file.")
    unopened: list[Path] = []
    below = list_image_files(source, [], unopened)
    if not below:
        raise DataError(f"{source}: no images below it. Give a folder with image files, or one folder per class.")
    places = {str(path.relative_to(source)): path.relative_to(source).parts for path in below}
    folders = {parts[0] for parts in places.values() if len(parts) > 1}
    # Below train/ and test/ the classes lie one step deeper. An image that lies in no class folder has no label.
    step = 1 if len(folders) >= 2 and all(part_name(folder) in PARTS for folder in folders) else 0
    labels: dict[str, Label] = {name: parts[step] if len(parts) > step + 1 else None for name, parts in places.items()}
    return Found(source, labels, _unopened(unopened), tuple(unopened))


def _found(listing: Listing) -> Found:
    labels: dict[str, Label] = {}
    twice = 0
    for path, code in zip(listing.paths, listing.labels.tolist(), strict=True):
        name, label = listing.shown(path), listing.class_names[code]
        twice += name in labels
        if labels.setdefault(name, label) != label:
            raise DataError(
                f"{listing.root}: {name!r} is listed as {labels[name]!r} and as {label!r}. Keep one of them."
            )
    notes = _unopened(listing.unopened)
    if listing.missing:
        notes += (f"{len(listing.missing):,} listed files are not there, first {listing.missing[0]}",)
    if twice:
        notes += (f"{twice:,} rows name a file that was listed before; each file is indexed once",)
    return Found(listing.root, labels, notes, listing.unopened)


def _unopened(folders: Sequence[Path]) -> tuple[str, ...]:
    return (f"{len(folders):,} folders cannot be opened, first {folders[0]}",) if folders else ()


# --- bringing up to date ---------------------------------------------------------------------------------------------


def update_index(
    model: Embeds,
    found: Found,
    out: Path,
    *,
    run: Path | None = None,
    prune: bool = False,
    batch: int = BATCH,
    store: Store | None = None,
    reporter: Reporter,
) -> tuple[Index, Summary]:
    """Embed what is new or changed, and write the index. To be called inside `files.lock_index(out)`.

    The order of the items is that of the listing, then of items that are no longer listed. So the result does not
    depend on how often the work was interrupted.
    """
    mark = model_info(model, run)
    old = _open(out, mark.fingerprint, found)
    journal = Journal(out, mark.fingerprint, model.embed([]).shape[1])
    known = _Known(old, journal)
    done = Summary(notes=found.notes)
    fresh, stamps, gone = _sort_out(found, known, done, reporter)
    if store is not None:
        _catch_up(old, journal, found, store, reporter)
    elif old is not None and old.store is not None:
        done.notes += (f"{old.store} is not brought up to date; give --store to do so",)
    todo = [name for name in found.labels if name not in fresh and name not in done.broken]
    _embed(model, found, todo, stamps, journal, done, batch, store, reporter)

    known = _Known(old, journal)
    labels = {name: label for name, label in found.labels.items() if name in known and name not in gone}
    rest = {} if old is None else {n: label for n, label in zip(old.ids, old.labels, strict=True) if n not in labels}
    done.relabelled = _relabel(old, labels, fresh, known, store)
    if prune:
        # What lies in a folder that cannot be opened now may well be there.
        unseen = [n for n in rest if any((found.root / n).is_relative_to(folder) for folder in found.unopened)]
        labels |= {name: rest.pop(name) for name in unseen}
        done.notes += (f"{len(unseen):,} items in folders that cannot be opened are kept",) if unseen else ()
        done.pruned = len(rest)
        if store is not None and rest:
            store.remove(list(rest))
    else:
        done.gone = len(rest)
        labels |= rest
    if not labels:
        journal.remove()
        raise DataError(f"{found.root}: none of its {len(found.labels):,} images could be read.")
    names = list(labels)
    # The stamp of a file that cannot be read stays the one of its vector, so that it is tried again.
    marks = [known.stamp(name) if name in done.broken else stamps.get(name, known.stamp(name)) for name in names]
    root = found.root.resolve()
    index = Index(known.vectors(names), names, list(labels.values()), model=model, mark=mark, root=root, stamps=marks)
    index.store = None if store is None else store.name
    if old is not None:
        done.notes += _carry_over(old, index)
    index.write(out)
    journal.remove()
    if store is not None and (held := store.count()) != len(index):
        others = "empty it and index again to be rid of the others"
        done.notes += (f"{store.name} holds {held:,} items, the index {len(index):,}; {others}",)
    return index, done


def _relabel(old: Index | None, labels: dict[str, Label], fresh: set[str], known: _Known, store: Store | None) -> int:
    """How many items have another label than before; the store is told of those that were not written to it anyway."""
    if old is None:
        return 0
    moved = [name for name, label in labels.items() if name in old and old.labels[old.row_of(name)] != label]
    if store is not None:
        changed = [name for name in moved if name in fresh]
        _write(store, changed, known.vectors(changed), [labels[name] for name in changed])
    return len(moved)


def _carry_over(old: Index, new: Index) -> tuple[str, ...]:
    """Keep what was worked out for the items; where they have changed, say so. A graph is of no use then."""
    new.threshold, new.rerank = old.threshold, old.rerank
    if old.ids == new.ids and old.labels == new.labels and np.array_equal(old.vectors, new.vectors):
        new.graph = old.graph
        return ()
    kept = {"--calibrate": old.threshold, "--choose-rerank": old.rerank}
    aged = " ".join(flag for flag, value in kept.items() if value is not None)
    notes = (f"the items have changed; what was worked out for them is kept, and made anew by: {aged}",) if aged else ()
    return notes + (("the items have changed; the graph is dropped, and made anew by: --hnsw",) if old.graph else ())


class _Known:
    """What has a vector already: in the index, or in the journal, which is newer."""

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
        width = self.old.dim if self.old is not None else next(iter(self.journalled.values()))[0].vectors.shape[1]
        out = np.empty((len(names), width), np.float32)
        for n, name in enumerate(names):
            if name in self.journalled:
                record, row = self.journalled[name]
                out[n] = record.vectors[row]
            else:
                assert self.old is not None
                out[n] = self.old.vectors[self.old.row_of(name)]
        return out


def _open(out: Path, fingerprint: str, found: Found) -> Index | None:
    if not (out / "manifest.json").exists():
        files.sweep(out, None)
        return None
    old = Index.load(out)
    check_model(old.mark, fingerprint, str(out))
    if old.root is None or (old.root != found.root.resolve() and old.root.exists()):
        held = old.root or "ready vectors"
        raise DataError(f"{out}: holds an index of {held}, not of {found.root}. Choose another folder with -o.")
    return old


def _sort_out(
    found: Found, known: _Known, done: Summary, reporter: Reporter
) -> tuple[set[str], dict[str, FileStamp], set[str]]:
    """Which files need no embedding, what marks the files as they are now, and which are listed but not there.

    The content is read where the time has changed.
    """
    names = list(found.labels)

    def look(name: str) -> tuple[FileStamp | None, bool, OSError | None]:
        before = known.stamp(name)
        try:
            state = os.stat(found.root / name)
            if before is not None and (before.size, before.mtime_ns) == (state.st_size, state.st_mtime_ns):
                return before, True, None
            now = stamp_of(found.root / name)
            return now, before is not None and (before.size, before.sha256) == (now.size, now.sha256), None
        except OSError as error:
            return None, False, error

    fresh: set[str] = set()
    stamps: dict[str, FileStamp] = {}
    gone: set[str] = set()
    looks: list[tuple[FileStamp | None, bool, OSError | None]] = []
    with reporter.track("looking at the files", len(names), unit="file") as bar:
        for part in map_in_threads(look, names):
            looks += part
            bar.advance(len(part))
    for name, (stamp, same, error) in zip(names, looks, strict=True):
        if error is not None:
            done.broken[name] = f"{name}: cannot be read ({error.strerror})."
            if isinstance(error, FileNotFoundError):  # a link that leads nowhere
                gone.add(name)
        elif stamp is not None:
            stamps[name] = stamp
        if same:
            fresh.add(name)
    done.resumed = sum(name in known.journalled for name in fresh)
    done.unchanged = len(fresh) - done.resumed
    return fresh, stamps, gone


def stamp_of(path: Path) -> FileStamp:
    """What a file is known by; its state is taken before its content, so that a later change shows."""
    state = os.stat(path)
    with open(path, "rb") as file:
        return FileStamp(state.st_size, state.st_mtime_ns, hashlib.file_digest(file, "sha256").hexdigest())


# --- embedding -------------------------------------------------------------------------------------------------------


def _embed(
    model: Embeds,
    found: Found,
    todo: Sequence[str],
    stamps: dict[str, FileStamp],
    journal: Journal,
    done: Summary,
    batch: int,
    store: Store | None,
    reporter: Reporter,
) -> None:
    try:
        with reporter.track("embedding", len(todo), unit="img") as bar:
            for names in _batches(todo, batch):
                good, vectors, broken = embed_files(model, [found.root / name for name in names])
                done.broken |= {names[place]: reason for place, reason in broken.items()}
                kept = [names[place] for place in good]
                if kept:
                    if store is not None:
                        _write(store, kept, vectors, [found.labels[name] for name in kept])
                    journal.append(kept, [stamps[name] for name in kept], vectors)
                done.embedded += len(kept)
                bar.advance(len(names))
    except KeyboardInterrupt:
        left = len(todo) - bar.done
        raise KeyboardInterrupt(f"stopped with {left:,} of {len(todo):,} images left to embed") from None


def embed_files(model: Embeds, paths: Sequence[Path]) -> tuple[list[int], Vectors, dict[int, str]]:
    """Vectors of the files that can be embedded, their places, and the reasons of the others."""
    places = list(range(len(paths)))
    broken: dict[int, str] = {}
    try:
        vectors = model.embed(paths)
    except DataError as error:
        # One of them cannot be read. Look at each, and embed the others.
        side, channels = max(model.image_shape[1:]), model.image_shape[0]

        def look(place: int) -> str:
            try:
                read_image(paths[place], side, channels=channels)
            except DataError as error:
                return str(error)
            return ""

        reasons = (reason for part in map_in_threads(look, places) for reason in part)
        broken = {place: reason for place, reason in enumerate(reasons) if reason}
        if not broken:
            raise error from None
        places = [place for place in places if place not in broken]
        vectors = model.embed([paths[place] for place in places])
    given = vectors.numpy()
    finite = np.isfinite(given).all(axis=1)
    for n in np.flatnonzero(~finite).tolist():
        broken[places[n]] = f"{paths[places[n]]}: the model gives NaN or infinity for it."
    kept = [place for place, good in zip(places, finite.tolist(), strict=True) if good]
    return kept, check_vectors(given[finite], None, "the model's vectors"), dict(sorted(broken.items()))


def _batches(names: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), size):
        yield names[start : start + size]


# --- the store beside it ---------------------------------------------------------------------------------------------


def _write(store: Store, names: Sequence[str], vectors: Vectors, labels: Sequence[Label]) -> None:
    if names:
        store.write(names, vectors, [{"label": label} for label in labels])


def _catch_up(old: Index | None, journal: Journal, found: Found, store: Store, reporter: Reporter) -> None:
    """Write to the store what it may lack: an index that it did not have, and what an interrupted run had embedded."""
    for record in journal.records:
        listed = [n for n, name in enumerate(record.ids) if name in found.labels]
        names = [record.ids[n] for n in listed]
        _write(store, names, record.vectors[listed], [found.labels[name] for name in names])
    if old is None or old.store == store.name:
        return
    with reporter.track("writing to the store", len(old), unit="item") as bar:
        for start in range(0, len(old), 1000):
            rows = slice(start, start + 1000)
            _write(store, old.ids[rows], np.asarray(old.vectors[rows]), old.labels[rows])
            bar.advance(len(old.ids[rows]))
