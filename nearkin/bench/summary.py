"""A tournament in plain English: which differences are significant, and what it would take for the others."""

import math

import numpy as np

from nearkin._common.words import counted, joined
from nearkin.bench.results import Table
from nearkin.bench.tournament import Pair, Tournament

MAX_PAIRS = 12  # pairs without a significant difference that are listed


def summarize(tournament: Tournament, *, most: int = MAX_PAIRS) -> str:
    """Summarize a tournament, one sentence per line.

    Args:
        tournament: The tournament.
        most: Number of pairs without a significant difference to list, smallest p-value first.

    Returns:
        The text.
    """
    table = tournament.table
    runs = "one run" if table.seeds <= 1 else f"up to {table.seeds} seeds"
    lines = [f"{len(table.methods)} methods in {counted(len(table.experiments), 'experiment')}, {runs} each."]
    lines += [*notes(table), _friedman(tournament), *_significant(tournament)]
    others = sorted((p for p in tournament.pairs if not p.significant), key=lambda p: p.p_holm)
    single = [p for p in others if p.wins + p.losses + p.ties == 1]
    if len(single) > 2:  # the same sentence for each would say no more
        others = [p for p in others if p not in single]
        lines.append(f"  {len(single)} pairs have only one {tournament.unit} in common, so the variance is unknown.")
    lines += [f"  {sentence(pair, tournament)}" for pair in others[:most]]
    if len(others) > most:
        lines.append(f"  ... and {len(others) - most} more pairs.")
    return "\n".join(lines)


def sentence(pair: Pair, tournament: Tournament) -> str:
    compared = pair.wins + pair.losses + pair.ties
    if not compared:
        return f"{pair.first} vs {pair.second}: not compared, no experiment has a value for both."
    if pair.significant:
        return f"{pair.leader} is better than {pair.trailer}: Holm {format_p(pair.p_holm)}."
    result = f"{pair.first} vs {pair.second}: no significant difference, Holm {format_p(pair.p_holm)}"
    if compared == 1:
        return f"{result}; only one {tournament.unit} in common, so the variance is unknown."
    needed = []
    if pair.more_experiments is not None:
        needed.append(counted(pair.more_experiments, "more experiment"))
    if pair.more_seeds is not None:
        needed.append(f"{counted(pair.more_seeds, 'more seed')} per experiment")
    if not needed:
        return f"{result}; no feasible number of {tournament.unit}s would make it significant."
    return f"{result}; about {' or '.join(needed)} needed."


def notes(table: Table) -> list[str]:
    """Describe failed and missing runs, and how many complete experiments remain."""
    lines, total = [], len(table.experiments)
    for j, method in enumerate(table.methods):
        failed = [result for result in table.failures if result.method == method]
        missing = [name for i, name in enumerate(table.experiments) if math.isnan(table.means[i, j])]
        never_run = [name for name in missing if not any(result.experiment == name for result in failed)]
        if failed:
            runs = len(failed) + sum(len(seeds) for (_, name), seeds in table.runs.items() if name == method)
            where = f"{failed[0].experiment}, seed {failed[0].seed}: {failed[0].reason}".rstrip(".")
            lines.append(f"{method}: {len(failed)} of {runs} runs failed (first: {where}).")
        if never_run:
            lines.append(f"{method}: never run in {len(never_run)} of {total} experiments (first: {never_run[0]}).")
        if missing:
            lines.append(f"{method} is not ranked in {len(missing)} of {total} experiments.")
    complete = int(table.complete.sum())
    if complete < total:
        lines.append(
            f"{complete} of {total} experiments have a value for every method{_best_removal(table, complete)}."
        )
    return lines


def format_p(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def _best_removal(table: Table, complete: int) -> str:
    """Name the method without which most experiments would be complete."""
    known = np.isfinite(table.means)
    gains = {
        name: int(np.delete(known, j, axis=1).all(axis=1).sum()) - complete for j, name in enumerate(table.methods)
    }
    name = max(gains, key=lambda method: gains[method])
    return f"; without {name} it would be {complete + gains[name]}" if gains[name] and len(gains) > 2 else ""


def _friedman(tournament: Tournament) -> str:
    test = tournament.friedman
    if test is None:
        return "Friedman's test is skipped: it needs at least two experiments in which every method has a value."
    over = f" over {test.experiments} experiments" if test.experiments < len(tournament.table.experiments) else ""
    figures = f"Friedman{over}: chi-squared {test.chi_squared:.1f}, {format_p(test.p_value)} by permutation"
    if test.p_value < tournament.alpha:
        critical = f"Critical difference of mean ranks: {tournament.critical:.2f}."
        return f"The methods differ significantly ({figures}). {critical}"
    return f"Overall, the methods do not differ significantly ({figures}); interpret single pairs with caution."


def _significant(tournament: Tournament) -> list[str]:
    """List the significant differences, one line per better method."""
    pairs = [pair for pair in tournament.pairs if pair.significant]
    over = "experiments" if tournament.unit == "experiment" else "runs of the same seed"
    lines = [
        f"{len(pairs)} of {len(tournament.pairs)} pairs differ significantly at {tournament.alpha:g} "
        f"(Wilcoxon signed-rank tests over {over}, Holm-corrected)."
    ]
    if tournament.unit == "run":
        lines.append("Pairs are compared run by run: significance holds for these experiments, not for others.")
    names = [standing.method for standing in tournament.standings]
    for name in names:
        beaten = [pair.trailer for pair in pairs if pair.leader == name]
        if beaten:
            others = "all others" if len(beaten) == len(names) - 1 > 1 else joined(sorted(beaten, key=names.index))
            lines.append(f"  {name} is better than {others}.")
    if len(pairs) < len(tournament.pairs):
        lines.append("Not significant:")
    return lines
