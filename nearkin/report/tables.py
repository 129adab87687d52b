"""Tables and headlines of runs and tournaments: terminal, Markdown, LaTeX, CSV, and files."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearkin._common.files import atomic_write
from nearkin.bench.summary import summarize
from nearkin.bench.tournament import Pair, Tournament
from nearkin.errors import DataError
from nearkin.report.html import writing

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from nearkin.report.page import Report
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


def result_grid(report: Report) -> Grid:
    """Tabulate the baselines of the first run and the trained model of every run."""
    results = [summary["result"] for summary in report.summaries]
    test = results[0]["test"]
    if test is None:
        val_rows = [(name, percent(result["val_R@1"])) for name, result in zip(report.names, results, strict=True)]
        return Grid("Validation classes, percent; the test classes are sealed", ("run", "R@1"), val_rows)
    models = [(model, metrics) for model, metrics in test.items() if model != "trained"]
    models += [(name, result["test"]["trained"]) for name, result in zip(report.names, results, strict=True)]
    rows = []
    for name, metrics in models:
        ranges = [(percent(value["mean"]), *map(percent, value["interval"])) for value in metrics.values()]
        rows.append((name, *(f"{mean} ({low} to {high})" for mean, low, high in ranges)))
    classes = results[0]["protocol"]["classes"]["test"]
    title = f"{classes} classes never seen in training, percent, with the 95 percent interval over classes"
    return Grid(title, ("model", *test["trained"]), rows)


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
    with writing("tables", folder, " Choose another folder with --tables."):
        return write_texts(texts, folder)


def result_table(run: Run) -> RichTable:
    """Return the test metrics of a run in percent, each with its 95 % interval over classes.

    Args:
        run: A finished run that was evaluated on its test classes.

    Returns:
        A table of the baselines and the trained model.
    """
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    result = run.result
    assert result is not None, "only a finished run has a table"
    table = RichTable(
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
        title=f"Results on {result['protocol']['classes']['test']} classes never seen in training, percent",
        title_style="bold",
        title_justify="left",
        caption="small: 95 % interval over classes",
        caption_justify="left",
    )
    models = result["test"]
    table.add_column("", no_wrap=True)
    for metric in next(iter(models.values())):
        table.add_column(metric, justify="right", min_width=9, no_wrap=True)
    for model, metrics in models.items():
        style = "bold green" if model == "trained" else ""
        cells = []
        for value in metrics.values():
            low, high = value["interval"]
            cells.append(Text(f"{100 * value['mean']:.1f}\n", style) + Text(f"{100 * low:.1f}-{100 * high:.1f}", "dim"))
        table.add_row(Text(model, style), *cells)
    return table


def headline(run: Run | dict[str, Any]) -> str:
    """Summarize in one sentence what training gained, and claim no more than the paired interval supports.

    Args:
        run: A finished run, or its result.

    Returns:
        The sentence.
    """
    result = run if isinstance(run, dict) else run.result
    assert result is not None
    epoch, recall = result["protocol"]["epoch"], result["val_R@1"]
    if result["test"] is None and recall is None:
        reason = "there are no validation classes, and the test classes are sealed"
        return f"Trained to epoch {epoch}, not evaluated: {reason}."
    if result["test"] is None:
        share = f"{100 * recall:.1f}"
        return (
            f"Validation R@1 {share}: the nearest neighbour of {share} % of the validation images has the same class "
            f"(epoch {epoch}, selected by this metric). The test classes are still sealed."
        )
    gain = result["gain"]
    baseline = gain["over"]
    trained, start = (100 * result["test"][name]["R@1"]["mean"] for name in ("trained", baseline))
    low, high = (100 * bound for bound in gain["interval"])
    advice = ""
    if low > 0:
        change = f"gain {low:.1f} to {high:.1f} points"
    elif high < 0:
        change = f"loss {-high:.1f} to {-low:.1f} points"
        advice = " Training made it worse: do not use this model."
    else:
        change = f"difference {low:+.1f} to {high:+.1f} points, not significant"
    if not epoch:
        advice += " No epoch improved on the initial weights on the validation classes, so these are used."
    return (
        f"R@1 {trained:.1f}: the nearest neighbour of {trained:.1f} % of the test images has the same class "
        f"({baseline}: {start:.1f}; {change}).{advice}"
    )


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
    return Grid(f"Ranks over {count} experiment{'s' * (count != 1)}, 1 is best", head, rows)


def pairs_grid(tournament: Tournament) -> Grid:
    """Build the table of pairs."""
    rows = []
    for p in tournament.pairs:
        record = f"{p.wins}-{p.losses}" + (f"-{p.ties}" if p.ties else "")
        seeds = "-" if p.more_seeds is None else f"{p.more_seeds} seeds"
        more = "" if p.significant else seeds if p.more_experiments is None else str(p.more_experiments)
        p_values = ("<0.001" if value < 0.001 else _format(value, "3f") for value in (p.p_holm, p.p_nemenyi))
        probabilities = (_format(p.ahead), _format(p.next_win))
        rows.append((p.first, p.second, record, _format(p.difference, "3g"), *p_values, *probabilities, more))
    head = ("first", "second", "won-lost", "diff", "Holm p", "Nemenyi", "ahead", "next", "more")
    title = "Pairs, better mean rank first; more: further experiments needed for significance"
    return Grid(title, head, rows, names=2)


def _format(value: float, spec: str = "2f") -> str:
    return "-" if math.isnan(value) else f"{value:.{spec}}"


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
    from nearkin.report.study_figures import write_critical_difference

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
    with writing("tables", folder, " Choose another folder with --out.", DataError):
        return [*write_texts(texts, folder), *write_critical_difference(tournament, folder)]
