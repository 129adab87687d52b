"""`nearkin cache list|prune`: what the cache holds, and how to delete it."""

import time
from dataclasses import dataclass

from nearkin.cli._arguments import parse, run_action, show
from nearkin.data.cache_entries import CacheEntry, cache_dir, choose_entries, list_entries, remove_temporary
from nearkin.errors import ConfigError
from nearkin.report.tables import Grid


@dataclass(frozen=True)
class CacheListArgs:
    """List what the cache holds: decoded images and features, with their size, last use and origin.

    The folder is ~/.cache/nearkin, or the one that the environment variable NEARKIN_CACHE names.
    """


@dataclass(frozen=True)
class CachePruneArgs:
    """Delete cached images and features. They are computed again when they are needed; runs and results are not here.

    nearkin cache prune --older-than 30 --dry-run   (what would be deleted)

    nearkin cache prune --max-gb 10                 (the least recently used, until 10 GB are left)
    """

    older_than: float | None = None  # Delete what was not used for this many days; 0 deletes everything.
    max_gb: float | None = None  # Delete the least recently used until at most this many gigabytes are left.
    dry_run: bool = False  # Only show what would be deleted.


def run(argv: list[str]) -> None:
    actions = {"list": cache_list, "prune": cache_prune}
    run_action("cache", actions, argv, "usage: nearkin cache list | prune   (see --help of each)")


def cache_list(argv: list[str]) -> None:
    parse(CacheListArgs, argv, "nearkin cache list")
    entries = list_entries(cache_dir())
    _show(entries)
    print(f"{_size(entries)} in {cache_dir()}")


def cache_prune(argv: list[str]) -> None:
    args = parse(CachePruneArgs, argv, "nearkin cache prune")
    if args.older_than is None and args.max_gb is None:
        raise ConfigError("nearkin cache prune: what to delete? Give --older-than DAYS or --max-gb GB.")
    for flag, value in (("--older-than", args.older_than), ("--max-gb", args.max_gb)):
        if value is not None and not value >= 0:
            raise ConfigError(f"{flag}: expected 0 or above, got {value:g}.")
    folder = cache_dir()
    entries = list_entries(folder)
    max_bytes = None if args.max_gb is None else args.max_gb * 1e9
    chosen = choose_entries(entries, max_age_days=args.older_than, max_bytes=max_bytes)
    busy = [entry for entry in chosen if entry.in_use]
    chosen = [entry for entry in chosen if entry not in busy]
    _show(chosen)
    if not args.dry_run:
        remove_temporary(folder)
        for entry in chosen:
            entry.delete()
    for entry in busy:
        print(f"in use, not deleted: {entry.kind}, {entry.purpose}")
    left = [entry for entry in entries if entry not in chosen]
    verb = "would be deleted" if args.dry_run else "deleted"
    print(f"{_size(chosen)} {verb}, {_size(left)} {'would be ' if args.dry_run else ''}left in {folder}")


def _show(entries: list[CacheEntry]) -> None:
    rows = []
    for entry in entries:
        days = round((time.time() - entry.last_used) / 86400)
        ago = {0: "today", 1: "yesterday"}.get(days, f"{days} days ago")
        rows.append((entry.kind, entry.purpose, ago, _size([entry])))
    if rows:
        show(Grid("", ("kind", "made for", "last used", "size"), rows, names=3))


def _size(entries: list[CacheEntry]) -> str:
    size = sum(entry.size for entry in entries)
    return f"{size / 1e9:,.2f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
