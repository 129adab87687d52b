"""The table of numbers for a paper: Markdown and LaTeX."""

from __future__ import annotations

from pathlib import Path

from nearkin.errors import RunError
from nearkin.report.page import Report, percent
from nearkin.report.study_tables import Grid, latex, markdown


def headline_grid(report: Report) -> Grid:
    """The yardsticks of the first run, then the trained model of every run: mean and 95 % interval, percent."""
    first = report.stories[0]["result"]["test"]
    if first is None:
        rows = [
            (name, percent(told["result"]["val_R@1"])) for name, told in zip(report.names, report.stories, strict=True)
        ]
        return Grid("Validation classes, percent; the test classes are sealed", ("run", "R@1"), tuple(rows))
    rivals = [(model, metrics) for model, metrics in first.items() if model != "trained"]
    trained = [told["result"]["test"]["trained"] for told in report.stories]
    rows = []
    for name, metrics in [*rivals, *zip(report.names, trained, strict=True)]:
        cells = [
            f"{percent(value['mean'])} ({percent(value['interval'][0])} to {percent(value['interval'][1])})"
            for value in metrics.values()
        ]
        rows.append((name, *cells))
    classes = report.stories[0]["result"]["protocol"]["classes"]["test"]
    title = f"{classes} classes never seen in training, percent, with the 95 percent interval over classes"
    return Grid(title, ("model", *trained[0]), tuple(rows))


def write_tables(report: Report, folder: Path) -> list[Path]:
    """numbers.md and numbers.tex; returns what was written."""
    grid = headline_grid(report)
    texts = {"numbers.md": f"{grid.title}\n\n{markdown(grid)}", "numbers.tex": latex(grid)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{folder}: cannot be written ({error.strerror}). Give another folder with --tables.") from None
    return [folder / name for name in texts]
