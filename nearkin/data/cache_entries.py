"""What is in nearkin's cache folder: images, features and glyphs, with size, age and purpose; and its pruning."""

import os
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nearkin._common.files import is_locked, is_temporary, remove_leftovers

KINDS = ("images", "features")  # the folders of the cache


def cache_dir() -> Path:
    """Return nearkin's cache folder: $NEARKIN_CACHE, or nearkin/ in the user's cache folder."""
    if folder := os.environ.get("NEARKIN_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nearkin"


def mark_used(path: Path, purpose: str) -> None:
    """Record in NAME.txt what a cache file is for; the time of that file is the last use. Errors are ignored."""
    with suppress(OSError):
        path.with_suffix(".txt").write_text(purpose, encoding="utf-8", errors="backslashreplace")


@dataclass(frozen=True)
class CacheEntry:
    kind: str  # "images", "features" or "glyphs"
    purpose: str  # what it was made for
    size: int  # bytes on the disk
    last_used: float  # seconds since the epoch
    files: tuple[Path, ...]

    @property
    def in_use(self) -> bool:
        """Whether a process is writing to it."""
        return any(path.suffix == ".lock" and is_locked(path) for path in self.files)

    def delete(self) -> None:
        """Delete its files. A process that has mapped them into memory keeps its data; others build them again."""
        for path in self.files:
            path.unlink(missing_ok=True)


def list_entries(folder: Path) -> list[CacheEntry]:
    """List the entries of a cache folder, the least recently used first."""
    groups: dict[tuple[str, str], list[Path]] = defaultdict(list)
    for kind in KINDS:
        for path in (folder / kind).glob("*.*"):
            if not is_temporary(path):
                groups[kind, path.name.partition(".")[0]].append(path)
    for path in folder.glob("glyphs-*.npz"):
        groups["glyphs", path.stem].append(path)
    entries = []
    for (kind, _), files in groups.items():
        purpose = "the built-in glyphs" if kind == "glyphs" else "unknown: written by an earlier version"
        size, last_used = 0, 0.0
        for path in sorted(files):
            with suppress(OSError):  # deleted meanwhile
                status = path.stat()
                # Features of rows that were never computed are holes in the file.
                size += status.st_blocks * 512 if hasattr(status, "st_blocks") else status.st_size
                last_used = max(last_used, status.st_mtime)
                if path.suffix == ".txt":
                    purpose = path.read_text(encoding="utf-8")
        entries.append(CacheEntry(kind, purpose, size, last_used, tuple(sorted(files))))
    return sorted((entry for entry in entries if entry.size), key=lambda entry: entry.last_used)


def choose_entries(
    entries: Sequence[CacheEntry], *, max_age_days: float | None, max_bytes: float | None
) -> list[CacheEntry]:
    """Choose what to delete: what was not used for so many days, then the least recently used beyond the size."""
    oldest = 0.0 if max_age_days is None else time.time() - max_age_days * 86400
    chosen = []
    left = sum(entry.size for entry in entries)
    for entry in entries:
        if entry.last_used < oldest or (max_bytes is not None and left > max_bytes):
            chosen.append(entry)
            left -= entry.size
    return chosen


def remove_temporary(folder: Path) -> None:
    for path in (folder, *(folder / kind for kind in KINDS)):
        remove_leftovers(path)
