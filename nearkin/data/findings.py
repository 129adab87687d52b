"""Findings of the data check: their catalogue, the report and its JSON form."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from nearkin.data.image_info import HUGE_PIXELS
from nearkin.errors import DataError

Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")

_SKIP = "or skip them in training: --data.skip-broken."
_NO_ANSWER = "a query without another image of its class has no correct answer."
_ONE_OF_EACH = "Remove one of each pair: the model must not be tested on an image that it was trained on."
_RIGHT_LABEL = "Keep the correct label and remove the other: one of the two must be wrong."
_EASIER = "Remove one of each pair: duplicates make retrieval look easier than it is."

# Title (after the number of cases) and advice of each kind of finding, by level and importance.
_ERRORS = {
    "counts": ("differences from the official benchmark", "Unpack the archive again."),
    "missing": ("listed files are missing", "Restore them, or ignore them: --data.allow-missing."),
    "class_overlap": (
        "classes are in more than one of training, validation and test",
        "Assign each class to one part, or split by class: --data.split by_class.",
    ),
    "split": ("reasons why the classes cannot be split", "Add images or classes; the message says how many."),
    "unopened": ("folders cannot be opened", "Fix their permissions."),
    "unreadable": ("images cannot be decoded", f"Fix or remove them, {_SKIP}"),
    "no_permission": ("images cannot be read (permission denied)", f"Run chmod +r on them, {_SKIP}"),
    "broken_link": ("symbolic links are broken", f"Fix or remove them, {_SKIP}"),
    "too_many_pixels": ("images are too large to decode safely", f"Downscale them, {_SKIP}"),
    "exact_across_parts": ("pairs of identical images are in different parts", _ONE_OF_EACH),
    "exact_across_labels": ("pairs of identical images have different labels", _RIGHT_LABEL),
}
_WARNINGS = {
    "shared_classes": (
        "classes are in several of training, validation and test, as for a classifier",
        "No action needed: training merges the parts and splits by class, so that the test classes are unseen.",
    ),
    "label_typo": (
        "groups of class names differ only in case, spacing or Unicode form",
        "Merge them if they are one class: as two classes, each counts as an error for the other.",
    ),
    "single_image": ("classes have a single image", f"Add images or remove the classes: {_NO_ANSWER}"),
    "empty_class": ("classes have no images", "Add images or remove the folders; training ignores them."),
    "unanswerable": (
        "query classes are not in the gallery",
        f"Add them to the gallery or remove the queries: {_NO_ANSWER}",
    ),
    "loose": ("images are outside any class folder", "Move each into the folder of its class; training ignores them."),
    "listed_twice": ("files are listed more than once", "Remove the extra rows."),
    "huge": (
        f"images have more than {HUGE_PIXELS / 1e6:.0f} million pixels",
        "Downscale them: they slow down every read and are shrunk anyway.",
    ),
    "near_across_parts": ("pairs of near-duplicate images are in different parts", f"Look at them. {_ONE_OF_EACH}"),
    "near_across_labels": ("pairs of near-duplicate images have different labels", f"Look at them. {_RIGHT_LABEL}"),
}
_NOTES = {
    "ignored": (
        "files among the images have no image suffix",
        "Ignore this if they are not images; images end in .jpg, .png, .webp, .bmp, .gif or .tif.",
    ),
    "not_rgb": (
        "images are not plain RGB",
        "No action needed: they are converted when read. Make sure that this alone does not distinguish a class.",
    ),
    "turned": (
        "images are stored rotated (EXIF)",
        "No action needed: they are rotated when read. Other tools may show them sideways.",
    ),
    "link": ("files are reached through a symbolic link", "No action needed: they are followed."),
    "exact_within_class": ("pairs of identical images are in the same class", _EASIER),
    "near_within_class": ("pairs of near-duplicate images are in the same class", _EASIER),
}
# Errors that do not stop training, though its scores would be wrong. It refuses all others, as does the check.
_ACCEPTED = ("exact_across_parts", "exact_across_labels")
CATALOGUE: dict[Level, dict[str, tuple[str, str]]] = {"error": _ERRORS, "warning": _WARNINGS, "note": _NOTES}


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


def printable(text: str) -> str:
    """Escape bytes of file names that are not UTF-8, for example as \\udce9, which JSON decodes to the same name."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
