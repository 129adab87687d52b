"""Findings of the data check: their catalogue, the report and its JSON form."""

import json
import tomllib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from nearkin.data.image_info import HUGE_PIXELS
from nearkin.errors import DataError

Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")
# Errors that do not stop training, though its scores would be wrong. It refuses all others, as does the check.
_ACCEPTED = ("exact_across_parts", "exact_across_labels")
_WORDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
# Title and advice of each kind of finding, by level and importance.
CATALOGUE: dict[Level, dict[str, tuple[str, str]]] = {
    level: {kind: (w["title"].format(huge_pixels=HUGE_PIXELS / 1e6), w["advice"]) for kind, w in _WORDS[level].items()}
    for level in LEVELS
}


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
