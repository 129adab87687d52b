"""Data validation: problems that would make a score wrong or a run fail, each with a fix, found before training."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nearkin._common.progress import Reporter
from nearkin.config.recipe import DataConfig
from nearkin.data.benchmarks import BENCHMARKS
from nearkin.data.image_info import HUGE_PIXELS, ImageInfo, inspect_images
from nearkin.data.listing import Listing
from nearkin.data.perceptual_hash import confirm_pairs, is_flat, near_pairs
from nearkin.data.sources import detect_source, fingerprint, list_source, load_features
from nearkin.data.splits import EVAL_PARTS
from nearkin.data.table import PARTS, Table
from nearkin.errors import DataError, did_you_mean

Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")
Cases = Mapping[str, Iterable[str]]  # instances of each kind of finding

_SKIP = "or skip them in training: --data.skip-broken."
_NO_ANSWER = "a query without another image of its class has no correct answer."
_ONE_OF_EACH = "Remove one of each pair: the model must not be tested on an image that it was trained on."
_RIGHT_LABEL = "Keep the correct label and remove the other: one of the two must be wrong."
_EASIER = "Remove one of each pair: duplicates make retrieval look easier than it is."

# Level, title (after the number of cases) and advice of each kind of finding, by importance within a level.
CATALOGUE: dict[str, tuple[Level, str, str]] = {
    "counts": ("error", "differences from the official benchmark", "Unpack the archive again."),
    "missing": ("error", "listed files are missing", "Restore them, or ignore them: --data.allow-missing."),
    "class_overlap": (
        *("error", "classes are in more than one of training, validation and test"),
        "Assign each class to one part, or split by class: --data.split by_class.",
    ),
    "unopened": ("error", "folders cannot be opened", "Fix their permissions."),
    "label_typo": (
        *("warning", "class names differ only in case, spacing or Unicode form"),
        "Merge them if they are one class: as two classes, each counts as an error for the other.",
    ),
    "single_image": ("warning", "classes have a single image", f"Add images or remove the classes: {_NO_ANSWER}"),
    "empty_class": ("warning", "classes have no images", "Add images or remove the folders; training ignores them."),
    "unanswerable": (
        *("warning", "query classes are not in the gallery"),
        f"Add them to the gallery or remove the queries: {_NO_ANSWER}",
    ),
    "loose": (
        *("warning", "images are outside any class folder"),
        "Move each into the folder of its class; training ignores them.",
    ),
    "listed_twice": ("warning", "files are listed more than once", "Remove the extra rows."),
    "ignored": (
        *("note", "files among the images have no image suffix"),
        "Ignore this if they are not images; images end in .jpg, .png, .webp, .bmp, .gif or .tif.",
    ),
    "unreadable": ("error", "images cannot be decoded", f"Fix or remove them, {_SKIP}"),
    "no_permission": ("error", "images cannot be read without permission", f"Run chmod +r on them, {_SKIP}"),
    "broken_link": ("error", "symbolic links are broken", f"Fix or remove them, {_SKIP}"),
    "too_many_pixels": ("error", "images are too large to decode safely", f"Downscale them, {_SKIP}"),
    "huge": (
        *("warning", f"images have more than {HUGE_PIXELS / 1e6:.0f} million pixels"),
        "Downscale them: they slow down every read and are shrunk anyway.",
    ),
    "not_rgb": (
        *("note", "images are not plain RGB"),
        "No action needed: they are converted when read. Make sure that this alone does not distinguish a class.",
    ),
    "turned": (
        *("note", "images are stored rotated (EXIF)"),
        "No action needed: they are rotated when read. Other tools may show them sideways.",
    ),
    "link": ("note", "files are symbolic links", "No action needed: they are followed."),
    "exact_across_parts": ("error", "pairs of identical images are in different parts", _ONE_OF_EACH),
    "exact_across_labels": ("error", "pairs of identical images have different labels", _RIGHT_LABEL),
    "exact_within_class": ("note", "pairs of identical images are in the same class", _EASIER),
    "near_across_parts": (
        *("warning", "pairs of near-duplicate images are in different parts"),
        f"Look at them. {_ONE_OF_EACH}",
    ),
    "near_across_labels": (
        *("warning", "pairs of near-duplicate images have different labels"),
        f"Look at them. {_RIGHT_LABEL}",
    ),
    "near_within_class": ("note", "pairs of near-duplicate images are in the same class", _EASIER),
}


@dataclass(frozen=True)
class Finding:
    """One kind of problem.

    Attributes:
        kind: A key of `CATALOGUE`.
        level: How bad it is.
        title: What it is; reads after the number of cases.
        advice: What to do.
        cases: Every instance.
    """

    kind: str
    level: Level
    title: str
    advice: str
    cases: tuple[str, ...] = field(repr=False)


@dataclass(frozen=True)
class Report:
    """Result of a check.

    Attributes:
        source: Name of the source.
        root: Its folder.
        images: Number of images.
        classes: Number of classes.
        parts: Numbers of images and classes of each part; empty if the source has no parts.
        fingerprint: That of the table, so that a result can be matched to it; None if some files cannot be read.
        findings: Most severe first.
    """

    source: str
    root: str
    images: int
    classes: int
    parts: dict[str, dict[str, int]]
    fingerprint: str | None
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether there is no error: nothing that would make a score wrong or stop a run."""
        return not any(finding.level == "error" for finding in self.findings)

    def find(self, kind: str) -> Finding | None:
        """Return the finding of this kind, or None."""
        return next((finding for finding in self.findings if finding.kind == kind), None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, including every case."""
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
    """Check a benchmark, a folder, a table or a feature file.

    Args:
        target: Name of a benchmark, or a path.
        root: Folder of the benchmark; unused for a path.
        reporter: Shows the progress.

    Returns:
        The findings.

    Raises:
        DataError: If the target does not exist or cannot be listed.
    """
    if target in BENCHMARKS:
        return check(BENCHMARKS[target].list(root, allow_missing=True), reporter)
    path = Path(target)
    if target == "glyphs" or not path.exists():
        hint = did_you_mean(target, BENCHMARKS)
        hint = hint or f" Available benchmarks: {', '.join(BENCHMARKS)}; or give a folder or a .csv."
        reason = "is generated by nearkin and needs no check." if target == "glyphs" else "no such benchmark or path."
        raise DataError(f"{target}: {reason}{hint}")
    source = detect_source(path)
    if source == "features":
        return check_features(load_features(path))
    return check(list_source(DataConfig(source=source, root=path, allow_missing=True)), reporter)


def check_features(table: Table) -> Report:
    """Check precomputed features: classes, names, parts and duplicate vectors.

    Args:
        table: A table of features.

    Returns:
        The findings.
    """
    assert table.features is not None
    rows = tuple(Path(f"row {r}") for r in range(len(table)))
    listing = Listing(table.source, Path(), rows, table.labels, table.class_names, table.part)
    infos = [ImageInfo(digest=vector.tobytes()) for vector in table.features]
    return _report(listing, {**_check_listing(listing), **_check_exact_duplicates(listing, infos)}, table.fingerprint)


def check(listing: Listing, reporter: Reporter) -> Report:
    """Read every file of a listing once and report all problems.

    Args:
        listing: The files and their labels.
        reporter: Shows the progress.

    Returns:
        The findings.
    """
    infos = inspect_images(listing.paths, reporter, listing.source)
    cases = {
        **_check_listing(listing),
        **_check_files(listing, infos),
        **_check_exact_duplicates(listing, infos),
        **_check_near_duplicates(listing, infos),
    }
    all_readable = not any(info.error for info in infos)
    return _report(listing, cases, _table_fingerprint(listing, infos) if all_readable else None)


def write_json(report: Report, file: Path) -> None:
    """Write a report as JSON.

    Args:
        report: The report.
        file: Where to; missing folders are created.

    Raises:
        DataError: If the file cannot be written.
    """
    text = json.dumps(report.to_dict(), indent=2, ensure_ascii=False)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(printable(text) + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(f"{file}: cannot be written ({error.strerror}). Choose another file for --json.") from None


def printable(text: str) -> str:
    """Escape the bytes of file names that are not UTF-8, for example as \\udce9, which JSON decodes to the same name.

    Args:
        text: Text that may contain surrogates.

    Returns:
        Text that can be encoded as UTF-8.
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _report(listing: Listing, cases: Cases, content_fingerprint: str | None) -> Report:
    instances = {kind: tuple(cases.get(kind, ())) for kind in CATALOGUE}
    findings = [Finding(kind, *CATALOGUE[kind], found) for kind, found in instances.items() if found]
    return Report(
        source=listing.source,
        root=str(listing.root),
        images=len(listing),
        classes=len(listing.class_names),
        parts=_part_counts(listing),
        fingerprint=content_fingerprint,
        findings=tuple(sorted(findings, key=lambda finding: LEVELS.index(finding.level))),  # stable
    )


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


def _table_fingerprint(listing: Listing, infos: Sequence[ImageInfo]) -> str:
    """The fingerprint of the table that training loads, without boxes."""
    present, labels = np.unique(listing.labels, return_inverse=True)
    names = tuple(listing.class_names[c] for c in present)
    return fingerprint((info.digest for info in infos), labels, names, listing.part)


# --- classes and parts -----------------------------------------------------------------------------------------------


def _check_listing(listing: Listing) -> Cases:
    names = listing.class_names
    class_sizes = np.bincount(listing.labels, minlength=len(names))
    by_normalized: dict[str, list[str]] = defaultdict(list)
    for name in names:
        by_normalized[normalize_class_name(name)].append(name)
    return {
        "counts": listing.notes,
        "missing": map(listing.shown, listing.missing),
        "class_overlap": _overlapping_classes(listing),
        "unopened": map(listing.shown, listing.unopened),
        "label_typo": (" = ".join(map(repr, group)) for group in by_normalized.values() if len(group) > 1),
        "single_image": (names[c] for c in np.flatnonzero(class_sizes == 1)),
        "empty_class": [*listing.empty, *(names[c] for c in np.flatnonzero(class_sizes == 0))],
        "unanswerable": _classes_without_gallery(listing),
        "loose": map(listing.shown, listing.unlabelled),
        "listed_twice": (listing.shown(path) for path, count in Counter(listing.paths).items() if count > 1),
        "ignored": map(listing.shown, listing.ignored),
    }


def _overlapping_classes(listing: Listing) -> list[str]:
    if listing.part is None:
        return []
    test = np.isin(listing.part, EVAL_PARTS)
    val = listing.part == "val"
    train = ~test & ~val
    overlap: set[int] = set()
    for a, b in ((train, test), (train, val), (val, test)):
        overlap |= set(np.intersect1d(listing.labels[a], listing.labels[b]).tolist())
    return [listing.class_names[c] for c in sorted(overlap)]


def _classes_without_gallery(listing: Listing) -> list[str]:
    if listing.part is None or not (listing.part == "gallery").any():
        return []
    query, gallery = (listing.labels[listing.part == part] for part in ("query", "gallery"))
    return [listing.class_names[c] for c in np.setdiff1d(query, gallery)]


def normalize_class_name(name: str) -> str:
    """Normalize case, spacing and Unicode form, so that spellings of one class compare equal.

    Args:
        name: A class name.

    Returns:
        The normalized name.

    Example:
        >>> normalize_class_name("Blue  Jay") == normalize_class_name("blue_jay ")
        True
        >>> normalize_class_name("A1") == normalize_class_name("A 1")
        False
    """
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    return re.sub(r"[\s_\-\u200b]+", " ", folded).strip()


# --- files -----------------------------------------------------------------------------------------------------------


def _check_files(listing: Listing, infos: Sequence[ImageInfo]) -> Cases:
    def cases(matches: Callable[[ImageInfo], bool], detail: Callable[[ImageInfo], str] = lambda _: "") -> list[str]:
        rows = ((path, info) for path, info in zip(listing.paths, infos, strict=True) if matches(info))
        return [f"{listing.shown(path)}: {detail(info)}".removesuffix(": ") for path, info in rows]

    def errors(kind: str) -> list[str]:
        return cases(lambda info: info.error == kind, lambda info: info.reason)

    return {
        **{kind: errors(kind) for kind in ("unreadable", "no_permission", "broken_link", "too_many_pixels")},
        "huge": cases(
            lambda info: not info.error and info.pixels > HUGE_PIXELS, lambda info: f"{info.width} x {info.height}"
        ),
        "not_rgb": cases(lambda info: not info.error and info.mode != "RGB", lambda info: info.mode),
        "turned": cases(lambda info: info.rotated),
        "link": cases(lambda info: info.is_link and not info.error),
    }


# --- duplicates ------------------------------------------------------------------------------------------------------


def _check_exact_duplicates(listing: Listing, infos: Sequence[ImageInfo]) -> Cases:
    groups = [rows for rows in _rows_by_content(infos).values() if len(rows) > 1]
    return _sort_pairs(listing, [pair for rows in groups for pair in _duplicate_pairs(listing, rows)], "exact")


def _check_near_duplicates(listing: Listing, infos: Sequence[ImageInfo]) -> Cases:
    distinct = [rows[0] for rows in _rows_by_content(infos).values()]
    return _sort_pairs(listing, _near_duplicates(infos, distinct), "near")


def _rows_by_content(infos: Sequence[ImageInfo]) -> dict[bytes, list[int]]:
    by_content: dict[bytes, list[int]] = defaultdict(list)
    for row, info in enumerate(infos):
        if info.digest and not info.error:
            by_content[info.digest].append(row)
    return by_content


def _sort_pairs(listing: Listing, pairs: list[tuple[int, int]], similarity: str) -> Cases:
    """Duplicates by the harm they do: to the test, to the labels, or only to the difficulty of the task."""
    part, labels = listing.part, listing.labels
    across_parts = [(a, b) for a, b in pairs if part is not None and part[a] != part[b]]
    within_part = sorted(set(pairs) - set(across_parts))
    return {
        f"{similarity}_across_parts": [_format_pair(listing, p) for p in across_parts],
        f"{similarity}_across_labels": [_format_pair(listing, p) for p in within_part if labels[p[0]] != labels[p[1]]],
        f"{similarity}_within_class": [_format_pair(listing, p) for p in within_part if labels[p[0]] == labels[p[1]]],
    }


def _duplicate_pairs(listing: Listing, rows: list[int]) -> list[tuple[int, int]]:
    """One pair per extra copy: with the first copy of the same part and class, else with the first copy of all."""
    first_of: dict[tuple[str, int], int] = {}
    pairs = []
    for row in rows:
        key = ("" if listing.part is None else str(listing.part[row]), int(listing.labels[row]))
        if key in first_of:
            pairs.append((first_of[key], row))
        elif first_of:
            pairs.append((rows[0], row))
        first_of.setdefault(key, row)
    return pairs


def _near_duplicates(infos: Sequence[ImageInfo], rows: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of files that look the same but differ in their bytes."""
    candidates = np.array(rows, np.int64)
    if len(candidates) < 2:
        return []
    thumbs = np.stack([_thumb(infos[r]) for r in rows])
    structured = np.flatnonzero(~is_flat(thumbs))
    hashes = np.array([infos[r].hash for r in candidates[structured]], np.uint64)
    pairs = confirm_pairs(near_pairs(hashes), thumbs[structured])
    return [(int(a), int(b)) for a, b in candidates[structured][pairs]]


def _thumb(info: ImageInfo) -> NDArray[np.uint8]:
    assert info.thumb is not None
    return info.thumb


def _format_pair(listing: Listing, pair: tuple[int, int]) -> str:
    texts = []
    for row in pair:
        part = "" if listing.part is None else f" ({listing.part[row]})"
        texts.append(f"{listing.shown(listing.paths[row])}{part}")
    return " = ".join(texts)
