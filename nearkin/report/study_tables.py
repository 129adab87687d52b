"""A tournament as tables: for the terminal, Markdown, LaTeX and CSV; and all of it as files."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

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
    """Rows of text below a head; the first `names` columns are names, the others numbers."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    names: int = 1


def standings_grid(judged: Tournament) -> Grid:
    """The standings, rounded for people; where runs failed, also how many experiments stand behind each row."""
    level = f"{100 * (1 - judged.alpha):g} %"
    gaps = any(s.ranked < s.experiments or s.failed for s in judged.standings)
    head = ("method", "total", "mean", "std", "1st", "2nd", "3rd", f"{level} of mean", *(("ranked", "failed") * gaps))
    rows = []
    for s in judged.standings:
        behind = (f"{s.ranked}/{s.experiments}", str(s.failed)) if gaps else ()
        interval = "-" if math.isnan(s.low) else f"{s.low:.2f}-{s.high:.2f}"
        rows.append((s.method, f"{s.total:g}", _short(s.mean), _short(s.std), *map(str, s.medals), interval, *behind))
    count = len(judged.table.experiments)
    return Grid(f"Ranks over {count} experiment{'s' * (count != 1)}, 1 is best", head, tuple(rows))


def pairs_grid(judged: Tournament) -> Grid:
    """Every pair, rounded for people. `more`: about how many more experiments, else seeds, would settle it."""
    rows = []
    for p in judged.pairs:
        record = f"{p.wins}-{p.losses}" + (f"-{p.ties}" if p.ties else "")
        seeds = "-" if p.more_seeds is None else f"{p.more_seeds} seeds"
        more = "" if p.significant else seeds if p.more_experiments is None else str(p.more_experiments)
        chances = (_short(p.ahead), _short(p.next_win))
        rows.append(
            (p.first, p.second, record, _short(p.difference, "3g"), _p(p.p_holm), _p(p.p_nemenyi), *chances, more)
        )
    head = ("first", "second", "won-lost", "diff", "Holm p", "Nemenyi", "ahead", "next", "more")
    title = "Pairs, the better mean rank first; more: experiments that would settle it"
    return Grid(title, head, tuple(rows), names=2)


def rich_table(grid: Grid) -> RichTable:
    """For the terminal."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    table = RichTable(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, title_style="bold", title_justify="left")
    table.title = grid.title
    for at, name in enumerate(grid.head):
        table.add_column(name, justify="left" if at < grid.names else "right", no_wrap=at >= grid.names)
    for number, row in enumerate(grid.rows):
        # Text, not markup: an method may be called [a].
        table.add_row(*(Text(cell, "bold" if number == 0 and grid.names == 1 else "") for cell in row))
    return table


def markdown(grid: Grid) -> str:
    """A Markdown table."""
    rule = ["---" if at < grid.names else "--:" for at in range(len(grid.head))]
    lines = [[_escape(cell) for cell in row] for row in (grid.head, *grid.rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (lines[0], rule, *lines[1:])) + "\n"


def latex(grid: Grid) -> str:
    """A LaTeX tabular with the rules of booktabs."""
    columns = "l" * grid.names + "r" * (len(grid.head) - grid.names)
    lines = [" & ".join(cell.translate(_LATEX) for cell in row) + r" \\" for row in (grid.head, *grid.rows)]
    # A row that begins with a bracket would be read as an argument of the line break before it.
    lines = [f"{{}}{line}" if line.startswith("[") else line for line in lines]
    body = "\n".join(lines[1:])
    return (
        f"% {grid.title}. Needs \\usepackage{{booktabs}}.\n\\begin{{tabular}}{{{columns}}}\n\\toprule\n"
        f"{lines[0]}\n\\midrule\n{body}\n\\bottomrule\n\\end{{tabular}}\n"
    )


def standings_csv(judged: Tournament) -> str:
    """The standings in full precision."""
    head = ("method", "total", "mean", "std", "first", "second", "third", "low", "high")
    rows = [
        (s.method, s.total, s.mean, s.std, *s.medals, s.low, s.high, s.ranked, s.experiments, s.failed)
        for s in judged.standings
    ]
    return _csv((*head, "ranked", "experiments", "failed"), rows)


def pairs_csv(judged: Tournament) -> str:
    """The pairs in full precision."""
    return _csv([field.name for field in fields(Pair)], [astuple(pair) for pair in judged.pairs])


def ranks_csv(judged: Tournament) -> str:
    """The rank of every method in every experiment; empty where it failed."""
    table = judged.table
    rows = zip(table.experiments, judged.ranks.tolist(), strict=True)
    return _csv(["experiment", *table.methods], [[name, *ranks] for name, ranks in rows])


def write_files(judged: Tournament, folder: Path) -> list[Path]:
    """Tables, verdict and diagram into a folder; returns what was written. Files of the same names are replaced."""
    standing, pairs = standings_grid(judged), pairs_grid(judged)
    said = summarize(judged, most=len(judged.pairs))
    page = f"# Tournament\n\n{markdown(standing)}\n```text\n{said}\n```\n\n{markdown(pairs)}"
    texts = {
        "tournament.md": page,
        "standings.csv": standings_csv(judged),
        "pairs.csv": pairs_csv(judged),
        "ranks.csv": ranks_csv(judged),
        "standings.tex": latex(standing),
        "pairs.tex": latex(pairs),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(f"{folder}: cannot be written: {error.strerror}. Give another folder with --out.") from None
    written = [folder / name for name in texts]
    if judged.friedman is not None:
        from nearkin.report.critical_difference import draw_critical_difference

        for suffix in (".png", ".svg"):
            written.append(draw_critical_difference(judged, folder / f"critical_difference{suffix}"))
    return written


# --- cells -----------------------------------------------------------------------------------------------------------


def _csv(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    for row in rows:
        writer.writerow(["" if cell is None or cell != cell else cell for cell in row])  # NaN is not itself
    return out.getvalue()


def _short(value: float, form: str = "2f") -> str:
    return "-" if math.isnan(value) else f"{value:.{form}}"


def _p(value: float) -> str:
    if math.isnan(value):
        return "-"
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def _escape(cell: str) -> str:
    return cell.replace("\\", "\\\\").replace("|", "\\|").replace("_", "\\_")
