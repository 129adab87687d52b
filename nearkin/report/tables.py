"""The results of runs as a table for a paper, in Markdown and LaTeX."""

from __future__ import annotations

from pathlib import Path

from nearkin.errors import RunError
from nearkin.report.page import Report, percent
from nearkin.report.study_tables import Grid, latex, markdown, write_texts


def result_grid(report: Report) -> Grid:
    """Tabulate the baselines of the first run and the trained model of every run."""
    results = [summary["result"] for summary in report.summaries]
    test = results[0]["test"]
    if test is None:
        val_rows = [(name, percent(result["val_R@1"])) for name, result in zip(report.names, results, strict=True)]
        return Grid("Validation classes, percent; the test classes are sealed", ("run", "R@1"), tuple(val_rows))
    models = [(model, metrics) for model, metrics in test.items() if model != "trained"]
    models += [(name, result["test"]["trained"]) for name, result in zip(report.names, results, strict=True)]
    rows = []
    for name, metrics in models:
        cells = [
            f"{percent(value['mean'])} ({percent(value['interval'][0])} to {percent(value['interval'][1])})"
            for value in metrics.values()
        ]
        rows.append((name, *cells))
    classes = results[0]["protocol"]["classes"]["test"]
    title = f"{classes} classes never seen in training, percent, with the 95 percent interval over classes"
    return Grid(title, ("model", *test["trained"]), tuple(rows))


def write_tables(report: Report, folder: Path) -> list[Path]:
    """Write the results as numbers.md and numbers.tex.

    Args:
        report: The contents of a page.
        folder: Where to write; created if missing.

    Returns:
        The written files.

    Raises:
        RunError: The folder cannot be written.
    """
    grid = result_grid(report)
    texts = {"numbers.md": f"{grid.title}\n\n{markdown(grid)}", "numbers.tex": latex(grid)}
    try:
        return write_texts(texts, folder)
    except OSError as error:
        raise RunError(
            f"{folder}: cannot write the tables ({error.strerror}). Choose another folder with --tables."
        ) from None
