"""The terminal report of `nearkin data check`."""

from collections import Counter

from rich.text import Text

from nearkin._common.words import agreeing, counted, printable
from nearkin.data.check import LEVELS, Report

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def render(report: Report, *, cases: int = 3) -> Text:
    """Render a report for the terminal: each finding with a few cases and what to do."""
    text = Text()
    text.append(
        f"{printable(report.source)}: {counted(report.images, 'image')} of {counted(report.classes, 'class')}", "bold"
    )
    for part, count in report.parts.items():
        text.append(f"\n  {part:<8}{count['images']:>9,} images {count['classes']:>7,} classes")
    text.append(
        f"\n  in {printable(report.root)}" + (f", fingerprint {report.fingerprint}" if report.fingerprint else "")
    )
    for finding in report.findings:
        text.append(f"\n\n{finding.level:<8}", _STYLES[finding.level]).append(
            agreeing(len(finding.cases), finding.title)
        )
        for case in finding.cases[:cases]:
            text.append(f"\n        {printable(case)}", "dim")
        if len(finding.cases) > cases:
            text.append(f"\n        and {len(finding.cases) - cases:,} more", "dim")
        text.append(f"\n        {finding.advice}")
    count = Counter(finding.level for finding in report.findings)
    levels = [f"{counted(count[k], 'kind')} of {k}" for k in LEVELS if count[k]]
    verdict = " Training would accept this data" + ("." if report.ok else ", but its scores would be wrong.")
    if report.refused:
        verdict = " Training would refuse this data."
    return text.append(f"\n\n{', '.join(levels) or 'No problems found'}.{verdict}")
