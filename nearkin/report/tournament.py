"""A tournament as tables, files and a critical-difference diagram."""

import math
from dataclasses import astuple, fields
from functools import partial
from pathlib import Path
from typing import Any

from nearkin._common.words import counted
from nearkin.bench.summary import format_p, summarize
from nearkin.bench.tournament import Pair, Tournament
from nearkin.errors import DataError, import_extra
from nearkin.report.html import writing
from nearkin.report.print_figures import COLOURS, SUFFIXES, save_figure
from nearkin.report.tables import Grid, csv_text, latex, markdown, write_texts

INK, FAINT = "#222222", "#666666"


def standings_grid(tournament: Tournament) -> Grid:
    gaps = any(s.ranked < s.experiments or s.failed for s in tournament.standings)
    head = ("method", "total", "mean", "std", "1st", "2nd", "3rd", f"{100 * (1 - tournament.alpha):g} % of mean")
    rows = []
    for s in tournament.standings:
        counts = (f"{s.ranked}/{s.experiments}", str(s.failed)) if gaps else ()
        interval = "-" if math.isnan(s.low) else f"{s.low:.2f}-{s.high:.2f}"
        rows.append((s.method, f"{s.total:g}", _format(s.mean), _format(s.std), *map(str, s.medals), interval, *counts))
    count = len(tournament.table.experiments)
    return Grid(f"Ranks over {counted(count, 'experiment')}, 1 is best", head + ("ranked", "failed") * gaps, rows)


def pairs_grid(tournament: Tournament) -> Grid:
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
        (*astuple(s)[:4], *s.medals, s.low, s.high, s.ranked, s.experiments, s.failed) for s in tournament.standings
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
    texts = {"tournament.md": page, "standings.csv": standings_csv(tournament), "pairs.csv": pairs_csv(tournament)}
    texts |= {"ranks.csv": ranks_csv(tournament), "standings.tex": latex(standings), "pairs.tex": latex(pairs)}
    with writing("tables", folder, " Choose another folder with --out.", DataError):
        return [*write_texts(texts, folder), *write_critical_difference(tournament, folder)]


def write_critical_difference(tournament: Tournament, folder: Path) -> list[Path]:
    """Write the diagram, if there is one, as .png and .svg."""
    paths = [folder / f"critical_difference{suffix}" for suffix in SUFFIXES]
    return [] if tournament.friedman is None else [draw_critical_difference(tournament, path) for path in paths]


def draw_critical_difference(tournament: Tournament, path: Path, *, dpi: int = 150) -> Path:
    """Draw the critical-difference diagram: mean ranks on an axis, bars over methods without a significant difference.

    Args:
        tournament: The tournament.
        path: A .png or .svg file.
        dpi: Resolution of a .png file.

    Returns:
        The path.

    Raises:
        DataError: Fewer than two complete experiments, or another file type.
    """
    if tournament.friedman is None:
        raise DataError("The diagram needs at least two experiments in which every method has a value.")
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(f"{path}: expected a .png or .svg file, got '{path.suffix}'.")
    rows = math.ceil(len(tournament.complete_ranks) / 2) + len(tournament.groups) + 2
    draw = partial(_draw_ranks, tournament=tournament)
    save_figure(draw, [path], size=(6.5, 0.26 * rows), dpi=dpi, bbox_inches="tight", pad_inches=0.12)
    return path


def _draw_ranks(figure: Any, tournament: Tournament) -> None:
    figure.set_layout_engine("none")
    axes = figure.add_axes((0, 0, 1, 1))  # names extend beyond it: the saved area is that of all that is drawn
    axes.grid(visible=False)
    axes.spines.top.set_visible(True)
    test, critical, ranks = tournament.friedman, tournament.critical, dict(tournament.complete_ranks)
    assert test is not None
    k = len(ranks)
    pandas = import_extra("pandas", extra="bench")
    # The bars are those of the tournament: 1 joins two methods, 0 separates them.
    joined = [[float(a == b or any({a, b} <= set(g) for g in tournament.groups)) for b in ranks] for a in ranks]
    import_extra("scikit_posthocs", extra="bench").critical_difference_diagram(
        ranks,
        pandas.DataFrame(joined, index=list(ranks), columns=list(ranks)),
        ax=axes,
        label_fmt_left="{label}  {rank:.2f}",
        label_fmt_right="{rank:.2f}  {label}",
        marker_props={"color": INK, "s": 18, "clip_on": False},
        elbow_props={"color": INK, "linewidth": 0.7, "clip_on": False},
        crossbar_props={"color": COLOURS[0], "linewidth": 4.0, "solid_capstyle": "round", "clip_on": False},
        text_h_margin=0.015 * (k - 1),
    )
    axes.set_xlim(1, k)
    axes.set_xticks(range(1, k + 1, 1 + k // 15))
    # The length of the critical difference, above the axis; one longer than the axis is cut off and labelled so.
    length = min(critical, k - 1)
    label = f"critical difference {critical:.2f}" + (", longer than the axis" if length < critical else "")
    axes.errorbar(1 + length / 2, 1.6, xerr=length / 2, color=COLOURS[1], linewidth=1.6, capsize=4, clip_on=False)
    axes.text(1, 1.9, label, color=COLOURS[1], va="bottom", fontsize=9)
    caption = (
        f"Mean ranks over {test.experiments} experiments, 1 is best (Friedman {format_p(test.p_value)}). "
        f"Bars join methods without a significant difference (Nemenyi, {tournament.alpha:g})."
    )
    axes.text(0.5, -0.03, caption, ha="center", va="top", color=FAINT, fontsize=8.5, transform=axes.transAxes)
