"""Data validation: problems that would make a score wrong or a run fail, each with a fix, found before training."""

import json
import math
import re
import tomllib
import unicodedata
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nearkin._common.progress import Reporter
from nearkin._common.words import printable
from nearkin.config.recipe import DataConfig
from nearkin.data.benchmarks import BENCHMARKS, require_target
from nearkin.data.image_info import HUGE_PIXELS, ImageInfo, confirm_pairs, inspect_image, is_flat, near_pairs
from nearkin.data.images import NoImages
from nearkin.data.listing import Listing
from nearkin.data.sources import detect_source, fingerprint, list_source, load_features
from nearkin.data.splits import held_out_parts, make_split, merge_shared_parts
from nearkin.errors import DataError

Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")
# Errors that do not stop training, though its scores would be wrong. It refuses all others, as does the check.
_ACCEPTED = ("exact_across_parts", "exact_across_labels")
_WORDS = tomllib.loads(Path(__file__).with_name("findings.toml").read_text(encoding="utf-8"))
# Title and advice of each kind of finding, by level and importance.
CATALOGUE: dict[Level, dict[str, tuple[str, str]]] = {
    level: {kind: (w["title"].format(huge_pixels=HUGE_PIXELS / 1e6), w["advice"]) for kind, w in _WORDS[level].items()}
    for level in LEVELS
}
Cases = dict[str, Iterable[str]]  # instances of each kind of finding


@dataclass(frozen=True)
class Finding:
    kind: str  # a key of `CATALOGUE[level]`
    level: Level  # how bad it is
    title: str  # what it is; reads after the number of cases
    advice: str  # what to do
    cases: tuple[str, ...] = field(repr=False)  # every instance


@dataclass(frozen=True)
class Report:
    source: str  # name of the source
    root: str  # its folder
    images: int
    classes: int
    parts: dict[str, dict[str, int]]  # numbers of images and classes of each part; empty if the source has no parts
    # that of the table, so that a result can be matched to it; None if some files cannot be read
    fingerprint: str | None
    findings: tuple[Finding, ...]  # most severe first

    @property
    def ok(self) -> bool:
        """Whether there is no error: nothing that would make a score wrong or stop a run."""
        return not any(finding.level == "error" for finding in self.findings)

    @property
    def refused(self) -> bool:
        """Whether `nearkin train`, with default settings, would refuse the data."""
        return any(finding.level == "error" and finding.kind not in _ACCEPTED for finding in self.findings)

    def find(self, kind: str) -> Finding | None:
        return next((finding for finding in self.findings if finding.kind == kind), None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, including every case."""
        findings = [asdict(finding) | {"count": len(finding.cases)} for finding in self.findings]
        return asdict(self) | {"ok": self.ok, "findings": findings}


def write_json(report: Report, file: Path) -> None:
    text = json.dumps(report.to_dict(), indent=2, ensure_ascii=False)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(printable(text) + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(f"{file}: cannot be written ({error.strerror}). Choose another file for --json.") from None


def check_target(target: str, root: Path, reporter: Reporter | None = None) -> Report:
    """Check a benchmark, a folder, a table or a feature file.

    Args:
        target: Name of a benchmark, or a path.
        root: Folder of the benchmark; unused for a path.
        reporter: Shows the progress; by default nothing does.

    Returns:
        The findings.

    Raises:
        DataError: If the target does not exist or cannot be listed.
    """
    reporter = reporter or Reporter(quiet=True)
    require_target(target)
    if target in BENCHMARKS:
        return check(BENCHMARKS[target].list(root, allow_missing=True), reporter)
    path = Path(target)
    source = detect_source(path)
    if source != "features":
        return check(list_source(DataConfig(source=source, root=path, allow_missing=True)), reporter)
    table = load_features(path)
    assert table.features is not None
    rows = tuple(Path(f"row {r}") for r in range(len(table)))
    part, shared = merge_shared_parts(table.labels, table.part)
    names = tuple(table.class_names[label] for label in shared)
    listing = Listing(table.source, Path(), rows, table.labels, table.class_names, part, shared_classes=names)
    infos = [ImageInfo(digest=vector.tobytes()) for vector in table.features]
    return _report(listing, table.fingerprint, _check_exact_duplicates(listing, infos))


def check(listing: Listing, reporter: Reporter) -> Report:
    """Read every file of a listing once and report all problems."""
    infos = []
    with reporter.track(f"checking {listing.source}", len(listing), unit="img") as bar, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns about unusual metadata, one line per file
        for path in listing.paths:
            infos.append(inspect_image(path))
            bar.advance()
    cases = _check_files(listing, infos) | _check_exact_duplicates(listing, infos)
    cases |= _check_near_duplicates(listing, infos)
    content = None
    if not any(info.error for info in infos):  # that of the table that training loads, without boxes
        present = listing.without_empty_classes()
        content = fingerprint((info.digest for info in infos), present.labels, present.class_names, listing.part)
    return _report(listing, content, cases)


def _report(listing: Listing, content_fingerprint: str | None, cases: Cases) -> Report:
    cases = _check_listing(listing) | cases
    findings = (
        Finding(kind, level, *words, tuple(cases.get(kind, ())))
        for level, kinds in CATALOGUE.items()
        for kind, words in kinds.items()
    )
    return Report(
        source=listing.source,
        root=str(listing.root),
        images=len(listing),
        classes=len(listing.class_names),
        parts={part: asdict(counts) for part, counts in listing.count_parts().items()},
        fingerprint=content_fingerprint,
        findings=tuple(finding for finding in findings if finding.cases),
    )


def _check_listing(listing: Listing) -> Cases:
    names = listing.class_names
    class_sizes = np.bincount(listing.labels, minlength=len(names))
    part = np.array("") if listing.part is None else listing.part
    query, gallery = (listing.labels[np.broadcast_to(part == name, len(listing))] for name in ("query", "gallery"))
    by_normalized: dict[str, list[str]] = defaultdict(list)
    for name in names:
        by_normalized[normalize_class_name(name)].append(name)
    return {
        "counts": listing.notes,
        "missing": map(listing.shown, listing.missing),
        "class_overlap": _overlapping_classes(listing),
        "shared_classes": listing.shared_classes,
        "split": _split_problems(listing),
        "unopened": map(listing.shown, listing.unopened),
        "label_typo": (" = ".join(map(repr, group)) for group in by_normalized.values() if len(group) > 1),
        "single_image": (names[c] for c in np.flatnonzero(class_sizes == 1)),
        "empty_class": [*listing.empty, *(names[c] for c in np.flatnonzero(class_sizes == 0))],
        "unanswerable": (names[c] for c in np.setdiff1d(query, gallery) if len(gallery)),
        "loose": map(listing.shown, listing.unlabelled),
        "listed_twice": (listing.shown(path) for path, count in Counter(listing.paths).items() if count > 1),
        "ignored": map(listing.shown, listing.ignored),
    }


def _split_problems(listing: Listing) -> list[str]:
    """Why training could not split the classes; overlapping ones are a finding of their own."""
    present = listing.without_empty_classes()
    if _overlapping_classes(listing) or not len(present):
        return []
    try:
        make_split(present.to_table(NoImages(listing.source, len(present)), ""), DataConfig())
    except DataError as error:
        return [" ".join(str(error).removeprefix(f"{listing.source}: ").split())]
    return []


def _overlapping_classes(listing: Listing) -> list[str]:
    if listing.part is None:
        return []
    overlaps = [np.intersect1d(listing.labels[a], listing.labels[b]) for _, a, b in held_out_parts(listing.part)]
    return [listing.class_names[c] for c in np.union1d(*overlaps)]


def normalize_class_name(name: str) -> str:
    """Normalize case, spacing and Unicode form, so that spellings of one class compare equal."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    return re.sub(r"[\s_\-\u200b]+", " ", folded).strip()


def _check_files(listing: Listing, infos: Sequence[ImageInfo]) -> Cases:
    def cases(matches: Callable[[ImageInfo], bool], detail: Callable[[ImageInfo], str] = lambda _: "") -> list[str]:
        rows = ((path, info) for path, info in zip(listing.paths, infos, strict=True) if matches(info))
        return [f"{listing.shown(path)}: {detail(info)}".removesuffix(": ") for path, info in rows]

    def errors(kind: str) -> list[str]:
        return cases(lambda info: info.error == kind, lambda info: info.reason)

    return {
        **{kind: errors(kind) for kind in ("unreadable", "no_permission", "broken_link", "too_many_pixels")},
        "huge": cases(lambda info: math.prod(info.size) > HUGE_PIXELS, lambda info: "{} x {}".format(*info.size)),
        "not_rgb": cases(lambda info: not info.error and info.mode != "RGB", lambda info: info.mode),
        "turned": cases(lambda info: info.rotated),
        "link": cases(lambda info: info.is_link and not info.error),
    }


def _check_exact_duplicates(listing: Listing, infos: Sequence[ImageInfo]) -> Cases:
    """One pair per extra copy: with the first copy of the same part and class, else with the first copy of all."""
    pairs = []
    for rows in _rows_by_content(infos).values():
        first_of: dict[tuple[str, int], int] = {}
        for row in rows:
            key = ("" if listing.part is None else str(listing.part[row]), int(listing.labels[row]))
            if row != rows[0]:
                pairs.append((first_of.get(key, rows[0]), row))
            first_of.setdefault(key, row)
    return _sort_pairs(listing, pairs, "exact")


def _check_near_duplicates(listing: Listing, infos: Sequence[ImageInfo]) -> Cases:
    """Pairs of files that look the same but differ in their bytes."""
    rows = np.array([rows[0] for rows in _rows_by_content(infos).values()], np.int64)
    thumbs = np.array([infos[row].thumb for row in rows]).reshape(-1, 16, 16)
    rows, thumbs = rows[~is_flat(thumbs)], thumbs[~is_flat(thumbs)]
    pairs = confirm_pairs(near_pairs(np.array([infos[row].hash for row in rows], np.uint64)), thumbs)
    return _sort_pairs(listing, [(int(a), int(b)) for a, b in rows[pairs]], "near")


def _rows_by_content(infos: Sequence[ImageInfo]) -> dict[bytes, list[int]]:
    by_content: dict[bytes, list[int]] = defaultdict(list)
    for row, info in enumerate(infos):
        if not info.error:
            by_content[info.digest].append(row)
    return by_content


def _sort_pairs(listing: Listing, pairs: list[tuple[int, int]], similarity: str) -> Cases:
    """Duplicates by the harm they do: to the test, to the labels, or only to the difficulty of the task."""
    part, labels = listing.part, listing.labels

    def shown(row: int) -> str:
        return listing.shown(listing.paths[row]) + ("" if part is None else f" ({part[row]})")

    across_parts = [(a, b) for a, b in pairs if part is not None and part[a] != part[b]]
    within_part = sorted(set(pairs) - set(across_parts))
    kinds = {
        "across_parts": across_parts,
        "across_labels": [(a, b) for a, b in within_part if labels[a] != labels[b]],
        "within_class": [(a, b) for a, b in within_part if labels[a] == labels[b]],
    }
    return {f"{similarity}_{kind}": [f"{shown(a)} = {shown(b)}" for a, b in found] for kind, found in kinds.items()}
