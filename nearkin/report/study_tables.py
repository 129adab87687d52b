"""A tournament as tables: terminal, Markdown, LaTeX, CSV, and files."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from nearkin._common.files import atomic_write
from nearkin.bench.summary import summarize
from nearkin.bench.tournament import Pair, Tournament
from nearkin.errors import DataError

if TYPE_CHECKING:
    from rich.table import Table as RichTable

_LATEX = str.maketrans(
    {c: f"\\{c}" for c in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
)


@dataclass(frozen=True)
class Grid:
    """A table of text."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    names: int = 1  # number of leading columns that are names (left-aligned); the others are numbers


def standings_grid(tournament: Tournament) -> Grid:
    """Build the table of standings."""
    level = f"{100 * (1 - tournament.alpha):g} %"
    gaps = any(s.ranked < s.experiments or s.failed for s in tournament.standings)
    head = ("method", "total", "mean", "std", "1st", "2nd", "3rd", f"{level} of mean", *(("ranked", "failed") * gaps))
    rows = []
    for s in tournament.standings:
        counts = (f"{s.ranked}/{s.experiments}", str(s.failed)) if gaps else ()
        interval = "-" if math.isnan(s.low) else f"{s.low:.2f}-{s.high:.2f}"
        rows.append((s.method, f"{s.total:g}", _format(s.mean), _format(s.std), *map(str, s.medals), interval, *counts))
    count = len(tournament.table.experiments)
    return Grid(f"Ranks over {count} experiment{'s' * (count != 1)}, 1 is best", head, tuple(rows))


def pairs_grid(tournament: Tournament) -> Grid:
    """Build the table of pairs."""
    rows = []
    for p in tournament.pairs:
        record = f"{p.wins}-{p.losses}" + (f"-{p.ties}" if p.ties else "")
        seeds = "-" if p.more_seeds is None else f"{p.more_seeds} seeds"
        more = "" if p.significant else seeds if p.more_experiments is None else str(p.more_experiments)
        probabilities = (_format(p.ahead), _format(p.next_win))
        rows.append(
            (
                p.first,
                p.second,
                record,
                _format(p.difference, "3g"),
                _format_p(p.p_holm),
                _format_p(p.p_nemenyi),
                *probabilities,
                more,
            )
        )
    head = ("first", "second", "won-lost", "diff", "Holm p", "Nemenyi", "ahead", "next", "more")
    title = "Pairs, better mean rank first; more: further experiments needed for significance"
    return Grid(title, head, tuple(rows), names=2)


def rich_table(grid: Grid) -> RichTable:
    """Convert a table for the terminal."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    table = RichTable(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, title_style="bold", title_justify="left")
    table.title = grid.title
    for column, name in enumerate(grid.head):
        table.add_column(name, justify="left" if column < grid.names else "right", no_wrap=column >= grid.names)
    for index, row in enumerate(grid.rows):
        # Text, not markup: a method may be called [a].
        table.add_row(*(Text(cell, "bold" if index == 0 and grid.names == 1 else "") for cell in row))
    return table


def markdown(grid: Grid) -> str:
    """Convert a table to Markdown."""
    rule = ["---" if column < grid.names else "--:" for column in range(len(grid.head))]
    lines = [[_escape(cell) for cell in row] for row in (grid.head, *grid.rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (lines[0], rule, *lines[1:])) + "\n"


def latex(grid: Grid) -> str:
    """Convert a table to a LaTeX tabular with booktabs rules."""
    columns = "l" * grid.names + "r" * (len(grid.head) - grid.names)
    lines = [" & ".join(cell.translate(_LATEX) for cell in row) + r" \\" for row in (grid.head, *grid.rows)]
    # LaTeX would read a bracket at the start of a row as an argument of the line break before it.
    lines = [f"{{}}{line}" if line.startswith("[") else line for line in lines]
    body = "\n".join(lines[1:])
    return (
        f"% {grid.title}. Needs \\usepackage{{booktabs}}.\n\\begin{{tabular}}{{{columns}}}\n\\toprule\n"
        f"{lines[0]}\n\\midrule\n{body}\n\\bottomrule\n\\end{{tabular}}\n"
    )


def standings_csv(tournament: Tournament) -> str:
    """Return the standings as CSV, in full precision."""
    head = ("method", "total", "mean", "std", "first", "second", "third", "low", "high")
    rows = [
        (s.method, s.total, s.mean, s.std, *s.medals, s.low, s.high, s.ranked, s.experiments, s.failed)
        for s in tournament.standings
    ]
    return csv_text((*head, "ranked", "experiments", "failed"), rows)


def pairs_csv(tournament: Tournament) -> str:
    """Return the pairs as CSV, in full precision."""
    return csv_text([field.name for field in fields(Pair)], [astuple(pair) for pair in tournament.pairs])


def ranks_csv(tournament: Tournament) -> str:
    """Return the rank of every method in every experiment as CSV; empty where it failed."""
    table = tournament.table
    rows = zip(table.experiments, tournament.ranks.tolist(), strict=True)
    return csv_text(["experiment", *table.methods], [[name, *ranks] for name, ranks in rows])


def write_files(tournament: Tournament, folder: Path) -> list[Path]:
    """Write tables, summary and diagram into a folder; existing files are replaced."""
    standings, pairs = standings_grid(tournament), pairs_grid(tournament)
    summary = summarize(tournament, most=len(tournament.pairs))
    page = f"# Tournament\n\n{markdown(standings)}\n```text\n{summary}\n```\n\n{markdown(pairs)}"
    texts = {
        "tournament.md": page,
        "standings.csv": standings_csv(tournament),
        "pairs.csv": pairs_csv(tournament),
        "ranks.csv": ranks_csv(tournament),
        "standings.tex": latex(standings),
        "pairs.tex": latex(pairs),
    }
    try:
        written = write_texts(texts, folder)
    except OSError as error:
        raise DataError(f"{folder}: cannot be written ({error.strerror}). Choose another folder with --out.") from None
    if tournament.friedman is not None:
        from nearkin.report.critical_difference import draw_critical_difference

        for suffix in (".png", ".svg"):
            written.append(draw_critical_difference(tournament, folder / f"critical_difference{suffix}"))
    return written


def write_texts(texts: Mapping[str, str], folder: Path) -> list[Path]:
    """Write texts by file name into a folder, which is created."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        atomic_write(folder / name, text)
    return [folder / name for name in texts]


# --- cells -----------------------------------------------------------------------------------------------------------


def csv_text(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format rows as CSV; None and NaN become empty cells."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    for row in rows:
        writer.writerow(["" if cell is None or cell != cell else cell for cell in row])  # NaN != NaN
    return out.getvalue()


def _format(value: float, spec: str = "2f") -> str:
    return "-" if math.isnan(value) else f"{value:.{spec}}"


def _format_p(value: float) -> str:
    if math.isnan(value):
        return "-"
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def _escape(cell: str) -> str:
    return cell.replace("\\", "\\\\").replace("|", "\\|").replace("_", "\\_")
