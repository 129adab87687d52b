"""The guard: what could make a number wrong or a run fail, found before it is trained on, each with its cure."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nearkin._common.progress import Reporter
from nearkin.config.recipe import DataConfig
from nearkin.data.benchmarks import BENCHMARKS
from nearkin.data.image_info import HUGE, ImageInfo, inspect_images
from nearkin.data.listing import Listing
from nearkin.data.perceptual_hash import confirm, is_flat, near_pairs
from nearkin.data.sources import detect_source, fingerprint, list_source, load_features
from nearkin.data.splits import EVALUATED
from nearkin.data.table import PARTS, Table
from nearkin.errors import DataError, did_you_mean

Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One kind of trouble. `cases` names every instance; `advice` says what to do."""

    kind: str
    level: Level
    title: str
    advice: str
    cases: tuple[str, ...] = field(repr=False)


@dataclass(frozen=True)
class Report:
    """What the guard found, worst first. `ok` means: nothing that would make a number wrong or stop a run."""

    source: str
    root: str
    images: int
    classes: int
    parts: dict[str, dict[str, int]]
    fingerprint: str | None
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return not any(finding.level == "error" for finding in self.findings)

    def find(self, kind: str) -> Finding | None:
        return next((finding for finding in self.findings if finding.kind == kind), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, every case included."""
        findings = [
            {"kind": f.kind, "level": f.level, "title": f.title, "advice": f.advice}
            | {"count": len(f.cases), "cases": list(f.cases)}
            for f in self.findings
        ]
        counts = {"images": self.images, "classes": self.classes, "parts": self.parts}
        return (
            {"source": self.source, "root": self.root, "ok": self.ok, "fingerprint": self.fingerprint}
            | counts
            | {"findings": findings}
        )


def check_target(target: str, root: Path, reporter: Reporter) -> Report:
    """Check a benchmark by its name (it lies in `root`), or a folder, table or feature file by its path."""
    if target in BENCHMARKS:
        return check(BENCHMARKS[target].list(root, allow_missing=True), reporter)
    path = Path(target)
    if target == "glyphs" or not path.exists():
        hint = did_you_mean(target, BENCHMARKS) or f" There are: {', '.join(BENCHMARKS)}; or give a folder or a .csv."
        reason = "is drawn by nearkin itself and needs no check." if target == "glyphs" else "no such name or path."
        raise DataError(f"{target}: {reason}{hint}")
    source = detect_source(path)
    if source == "features":
        return check_features(load_features(path))
    return check(list_source(DataConfig(source=source, root=path, allow_missing=True)), reporter)


def check_features(table: Table) -> Report:
    """What can be said of ready features: classes, names, parts, and vectors that occur twice."""
    assert table.features is not None
    rows = tuple(Path(f"row {r}") for r in range(len(table)))
    listing = Listing(table.source, Path(), rows, table.labels, table.class_names, table.part)
    looks = [ImageInfo(digest=vector.tobytes()) for vector in table.features]
    return _report(listing, [*_about_listing(listing), *_about_copies(listing, looks, near=False)], table.fingerprint)


def check(listing: Listing, reporter: Reporter) -> Report:
    """Look at every file of a listing once and report what is off."""
    looks = inspect_images(listing.paths, reporter, listing.source)
    found = [*_about_listing(listing), *_about_files(listing, looks), *_about_copies(listing, looks, near=True)]
    whole = not any(one.trouble for one in looks)
    # The same as the table's (without boxes), so that a result can be matched to the report of its data.
    return _report(listing, found, _table_fingerprint(listing, looks) if whole else None)


def _report(listing: Listing, found: list[Finding], print_of_content: str | None) -> Report:
    return Report(
        source=listing.source,
        root=str(listing.root),
        images=len(listing),
        classes=len(listing.class_names),
        parts=_part_counts(listing),
        fingerprint=print_of_content,
        # The sort is stable: within a level they stay in the order of how much they matter.
        findings=tuple(sorted(found, key=lambda finding: LEVELS.index(finding.level))),
    )


# --- what the listing alone tells ------------------------------------------------------------------------------------


def _about_listing(listing: Listing) -> list[Finding]:
    names, labels = listing.class_names, listing.labels
    count = np.bincount(labels, minlength=len(names))
    look = _Findings()
    look.add("counts", "error", "differs from the official benchmark", "Unpack the archive again.", listing.notes)
    look.add(
        *("missing", "error", "listed files are not there"),
        "Restore them, or go on without: --data.allow-missing.",
        map(listing.shown, listing.missing),
    )
    look.add(
        *("class_overlap", "error", "classes are both trained and judged"),
        "Give each class to one part, or split by class: --data.split by_class.",
        _overlap(listing),
    )
    look.add(
        *("unopened", "error", "folders cannot be opened"),
        "Change their permissions.",
        map(listing.shown, listing.unopened),
    )
    same: dict[str, list[str]] = defaultdict(list)
    for name in names:
        same[meant(name)].append(name)
    look.add(
        *("label_typo", "warning", "class names differ only by case, spacing or unicode form"),
        "If they mean one class, put their images together: as two classes each counts against the other.",
        (" = ".join(map(repr, group)) for group in same.values() if len(group) > 1),
    )
    look.add(
        *("single_image", "warning", "classes have one image"),
        "Add images or remove them: a query without another image of its class can never be answered.",
        (names[c] for c in np.flatnonzero(count == 1)),
    )
    look.add(
        *("empty_class", "warning", "classes have no image"),
        "Add images or remove the folders; training leaves them out.",
        [*listing.empty, *(names[c] for c in np.flatnonzero(count == 0))],
    )
    look.add(
        *("unanswerable", "warning", "classes are queried and not in the gallery"),
        "Add them to the gallery or remove the queries: they can never be answered.",
        _unanswerable(listing),
    )
    look.add(
        *("loose", "warning", "images lie in no class folder"),
        "Move each into the folder of its class; training leaves them out.",
        map(listing.shown, listing.loose),
    )
    repeated = Counter(listing.paths)
    look.add(
        *("listed_twice", "warning", "files are listed more than once"),
        "Remove the extra rows.",
        (listing.shown(path) for path, times in repeated.items() if times > 1),
    )
    look.add(
        *("ignored", "note", "files among the images are not images by their name"),
        "Nothing, if they are not meant to be; images end in .jpg, .png, .webp, .bmp, .gif or .tif.",
        map(listing.shown, listing.ignored),
    )
    return look.found


def _overlap(listing: Listing) -> list[str]:
    if listing.part is None:
        return []
    judged = np.isin(listing.part, EVALUATED)
    validated = listing.part == "val"
    trained = ~judged & ~validated
    both: set[int] = set()
    for one, other in ((trained, judged), (trained, validated), (validated, judged)):
        both |= set(np.intersect1d(listing.labels[one], listing.labels[other]).tolist())
    return [listing.class_names[c] for c in sorted(both)]


def _unanswerable(listing: Listing) -> list[str]:
    if listing.part is None or not (listing.part == "gallery").any():
        return []
    asked, there = (listing.labels[listing.part == part] for part in ("query", "gallery"))
    return [listing.class_names[c] for c in np.setdiff1d(asked, there)]


def meant(name: str) -> str:
    """A class name reduced to what a person means by it.

    >>> meant("Blue  Jay") == meant("blue_jay "), meant("A1") == meant("A 1")
    (True, False)
    """
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    return re.sub(r"[\s_\-\u200b]+", " ", folded).strip()


# --- what each file tells --------------------------------------------------------------------------------------------


def _about_files(listing: Listing, looks: Sequence[ImageInfo]) -> list[Finding]:
    def cases(holds: Callable[[ImageInfo], bool], says: Callable[[ImageInfo], str]) -> list[str]:
        rows = ((path, one) for path, one in zip(listing.paths, looks, strict=True) if holds(one))
        return [f"{listing.shown(path)}: {says(one)}" if says(one) else listing.shown(path) for path, one in rows]

    def troubled(kind: str) -> list[str]:
        return cases(lambda one: one.trouble == kind, lambda one: one.reason)

    look = _Findings()
    out = "or leave them out of training: --data.skip-broken."
    look.add("unreadable", "error", "images cannot be decoded", f"Mend or remove them, {out}", troubled("unreadable"))
    look.add("no_permission", "error", "images may not be read", f"chmod +r them, {out}", troubled("no_permission"))
    look.add("broken_link", "error", "links lead nowhere", f"Mend or remove them, {out}", troubled("broken_link"))
    look.add(
        *("too_many_pixels", "error", "images are too large to decode safely"),
        f"Scale them down, {out}",
        troubled("too_many_pixels"),
    )
    look.add(
        *("huge", "warning", f"images have more than {HUGE / 1e6:.0f} million pixels"),
        "Scale them down: they slow every reading and are shrunk anyway.",
        cases(lambda one: not one.trouble and one.pixels > HUGE, lambda one: f"{one.width} x {one.height}"),
    )
    look.add(
        *("not_rgb", "note", "images are not plain RGB"),
        "Nothing: they are converted when read. Make sure that no class differs from the others by this alone.",
        cases(lambda one: not one.trouble and one.mode != "RGB", lambda one: one.mode),
    )
    look.add(
        *("turned", "note", "images are stored turned (EXIF)"),
        "Nothing: they are turned upright when read. Other tools may show them sideways.",
        cases(lambda one: one.turned, lambda one: ""),
    )
    look.add(
        *("link", "note", "files are links"),
        "Nothing: they are followed.",
        cases(lambda one: one.link and not one.trouble, lambda one: ""),
    )
    return look.found


# --- what pairs of files tell ----------------------------------------------------------------------------------------


def _about_copies(listing: Listing, looks: Sequence[ImageInfo], *, near: bool) -> list[Finding]:
    by_content: dict[bytes, list[int]] = defaultdict(list)
    for row, one in enumerate(looks):
        if one.digest and not one.trouble:
            by_content[one.digest].append(row)
    groups = [rows for rows in by_content.values() if len(rows) > 1]
    exact = [(a, b) for rows in groups for a, b in _telling_pairs(listing, rows)]
    alike = _near(looks, [rows[0] for rows in by_content.values()]) if near else []

    look = _Findings()
    _judge_pairs(look, listing, exact, "exact", "error", "are identical", "")
    _judge_pairs(look, listing, alike, "near", "warning", "look the same", "Look at them. ")
    return look.found


def _judge_pairs(
    look: _Findings, listing: Listing, pairs: list[tuple[int, int]], word: str, level: Level, how: str, first: str
) -> None:
    """Copies by what they spoil: the test, the labels, or only the ease of the task."""
    part, labels = listing.part, listing.labels
    across_parts = [(a, b) for a, b in pairs if part is not None and part[a] != part[b]]
    others = sorted(set(pairs) - set(across_parts))
    look.add(
        *(f"{word}_across_parts", level, f"pairs across parts {how}"),
        f"{first}Remove one of each: what was trained on must not be searched for.",
        (_pair(listing, p) for p in across_parts),
    )
    look.add(
        *(f"{word}_across_labels", level, f"pairs of different classes {how}"),
        f"{first}Keep the right label and remove the other: one of the two must be wrong.",
        (_pair(listing, p) for p in others if labels[p[0]] != labels[p[1]]),
    )
    look.add(
        *(f"{word}_within_class", "note", f"pairs of one class {how}"),
        "They make retrieval look easier than it is; remove one of each.",
        (_pair(listing, p) for p in others if labels[p[0]] == labels[p[1]]),
    )


def _telling_pairs(listing: Listing, rows: list[int]) -> list[tuple[int, int]]:
    """One pair per extra copy: with the first copy of the same part and class, else with the first copy of all."""
    kinds: dict[tuple[str, int], int] = {}
    pairs = []
    for row in rows:
        kind = ("" if listing.part is None else str(listing.part[row]), int(listing.labels[row]))
        if kind in kinds:
            pairs.append((kinds[kind], row))
        elif kinds:
            pairs.append((rows[0], row))
        kinds.setdefault(kind, row)
    return pairs


def _near(looks: Sequence[ImageInfo], rows: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of files that differ in their bytes and look the same."""
    some = np.array(rows, np.int64)
    if len(some) < 2:
        return []
    thumbs = np.stack([_thumb(looks[r]) for r in rows])
    shaded = np.flatnonzero(~is_flat(thumbs))
    hashes = np.array([looks[r].hash for r in some[shaded]], np.uint64)
    pairs = confirm(near_pairs(hashes), thumbs[shaded])
    return [(int(a), int(b)) for a, b in some[shaded][pairs]]


def _thumb(one: ImageInfo) -> NDArray[np.uint8]:
    assert one.thumb is not None
    return one.thumb


def _pair(listing: Listing, pair: tuple[int, int]) -> str:
    shown = []
    for row in pair:
        part = "" if listing.part is None else f" ({listing.part[row]})"
        shown.append(f"{listing.shown(listing.paths[row])}{part}")
    return " = ".join(shown)


# --- the report ------------------------------------------------------------------------------------------------------


class _Findings:
    """Collects what has at least one case."""

    def __init__(self) -> None:
        self.found: list[Finding] = []

    def add(self, kind: str, level: Level, title: str, advice: str, cases: Iterable[str]) -> None:
        if named := tuple(cases):
            self.found.append(Finding(kind, level, title, advice, named))


def _part_counts(listing: Listing) -> dict[str, dict[str, int]]:
    if listing.part is None:
        return {}
    return {
        str(part): {
            "images": int((listing.part == part).sum()),
            "classes": len(np.unique(listing.labels[listing.part == part])),
        }
        for part in PARTS
        if part in listing.part
    }


def _table_fingerprint(listing: Listing, looks: Sequence[ImageInfo]) -> str:
    present, labels = np.unique(listing.labels, return_inverse=True)
    names = tuple(listing.class_names[c] for c in present)
    return fingerprint((one.digest for one in looks), labels, names, listing.part)


def render(report: Report, *, cases: int = 3) -> Any:
    """The report for a terminal: a line per kind of trouble, a few cases of each, and what to do."""
    from rich.text import Text

    text = Text()
    text.append(f"{_printable(report.source)}: {report.images:,} images of {report.classes:,} classes", "bold")
    for part, count in report.parts.items():
        text.append(f"\n  {part:<8}{count['images']:>9,} images {count['classes']:>7,} classes")
    text.append(
        f"\n  in {_printable(report.root)}" + (f", fingerprint {report.fingerprint}" if report.fingerprint else "")
    )
    colours = {"error": "bold red", "warning": "yellow", "note": "cyan"}
    for finding in report.findings:
        text.append(f"\n\n{finding.level:<8}", colours[finding.level]).append(f"{len(finding.cases):,} {finding.title}")
        for case in finding.cases[:cases]:
            text.append(f"\n        {_printable(case)}", "dim")
        if len(finding.cases) > cases:
            text.append(f"\n        and {len(finding.cases) - cases:,} more", "dim")
        text.append(f"\n        {finding.advice}")
    count = Counter(finding.level for finding in report.findings)
    ending = ", ".join(f"{k}s of {count[k]} kind{'s'[: count[k] > 1]}" for k in LEVELS if count[k]) or "nothing is off"
    return text.append(f"\n\n{ending[0].upper()}{ending[1:]}.")


def write_json(report: Report, file: Path) -> None:
    import json

    text = json.dumps(report.to_dict(), indent=2, ensure_ascii=False)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_printable(text) + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(f"{file}: cannot be written ({error.strerror}). Give --json another place.") from None


def _printable(text: str) -> str:
    """Text with the bytes of a file name that is not UTF-8 as \\udce9, which JSON reads back as what it was."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
