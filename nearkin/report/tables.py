"""Tables for the terminal, in Markdown, LaTeX and CSV; results of runs."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearkin._common.files import atomic_write

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from nearkin.training.run import Run

_LATEX = str.maketrans(
    {c: f"\\{c}" for c in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
)


@dataclass(frozen=True)
class Grid:
    """A table of text."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 1  # number of leading columns that are names (left-aligned); the others are numbers
    caption: str = ""  # below the table in a terminal
    bold: int | None = 0  # the row in bold in a terminal: the leader


def rich_table(grid: Grid) -> RichTable:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    table = RichTable(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, title_style="bold", title_justify="left")
    table.title, table.caption, table.caption_justify = grid.title, grid.caption or None, "left"
    for column, name in enumerate(grid.head):
        table.add_column(name, justify="left" if column < grid.names else "right", no_wrap=column >= grid.names)
    for index, row in enumerate(grid.rows):
        style = "bold" if index == grid.bold and grid.names == 1 else ""
        # Text, not markup: a method may be called [a]. The second line of a cell, an interval, is dim.
        parts = (cell.partition("\n") for cell in row)
        table.add_row(*(Text(first, style) + Text(line + rest, "dim") for first, line, rest in parts))
    return table


def markdown(grid: Grid) -> str:
    escapes = str.maketrans({c: f"\\{c}" for c in "\\|_"})
    rule = ["---" if column < grid.names else "--:" for column in range(len(grid.head))]
    head, *rows = [[cell.translate(escapes) for cell in row] for row in (grid.head, *grid.rows)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, rule, *rows))


def latex(grid: Grid) -> str:
    """Convert a table to a LaTeX tabular with booktabs rules."""
    columns = "l" * grid.names + "r" * (len(grid.head) - grid.names)
    lines = [" & ".join(cell.translate(_LATEX) for cell in row) + r" \\" for row in (grid.head, *grid.rows)]
    # LaTeX would read a bracket at the start of a row as an argument of the line break before it.
    head, *rows = [f"{{}}{line}" if line.startswith("[") else line for line in lines]
    start = [f"% {grid.title}. Needs \\usepackage{{booktabs}}.", rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
    return "\n".join([*start, head, r"\midrule", *rows, r"\bottomrule", r"\end{tabular}", ""])


def csv_text(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format rows as CSV; None and NaN become empty cells."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    for row in rows:
        writer.writerow(["" if cell is None or cell != cell else cell for cell in row])  # NaN != NaN
    return out.getvalue()


def write_texts(texts: Mapping[str, str], folder: Path) -> list[Path]:
    """Write texts by file name into a folder, which is created."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        atomic_write(folder / name, text)
    return [folder / name for name in texts]


def percent(value: float | None, spec: str = ".1f") -> str:
    """Format a fraction in percent, a missing one as a dash."""
    return "-" if value is None or math.isnan(value) else f"{100 * value:{spec}}"


def metric_rows(models: Mapping[str, Mapping[str, Any]], cell: str) -> list[tuple[str, ...]]:
    """Return a row for each model: its name, and in percent the mean of each metric and the ends of its interval."""
    return [
        (name, *(cell.format(percent(m["mean"]), *map(percent, m["interval"])) for m in metrics.values()))
        for name, metrics in models.items()
    ]


def result_table(run: Run) -> RichTable:
    """Return the test metrics of a run in percent, each with its 95 % interval over classes.

    Args:
        run: A finished run that was evaluated on its test classes.

    Returns:
        A table of the baselines and the trained model.
    """
    result = run.result
    assert result is not None, "only a finished run has a table"
    models = dict(result["test"])
    models["trained" if result["protocol"]["epoch"] else "trained\nepoch 0"] = models.pop("trained")
    rows = metric_rows(models, "{}\n{}-{}")
    title = f"Results on {result['protocol']['classes']['test']} classes never seen in training, percent"
    caption = "second line: 95 % interval over classes"
    return rich_table(Grid(title, ("", *result["test"]["trained"]), rows, caption=caption, bold=len(rows) - 1))
