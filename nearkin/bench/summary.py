"""A tournament in plain English: which differences are settled, which are not, and what would settle them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nearkin.bench.results import Table
from nearkin.bench.tournament import Pair, Tournament

SHOWN = 12  # unsettled pairs that are spelled out


def summarize(judged: Tournament, *, most: int = SHOWN) -> str:
    """The whole verdict, a sentence a line; of the pairs that are not settled, the `most` nearest to it."""
    lines = [_held(judged), *notes(judged.table), _friedman(judged), *_settled(judged)]
    left = sorted((p for p in judged.pairs if not p.significant), key=lambda p: p.p_holm)
    lines += [f"  {sentence(pair, judged)}" for pair in left[:most]]
    if len(left) > most:
        lines.append(f"  ... and {len(left) - most} more pairs that are not settled.")
    return "\n".join(lines)


def sentence(pair: Pair, judged: Tournament) -> str:
    """One pair, in one sentence."""
    met = pair.wins + pair.losses + pair.ties
    if not met:
        return f"{pair.first} and {pair.second} never met: there is no experiment in which both have a value."
    if pair.significant:
        return f"{pair.leader} is better than {pair.trailer}: Holm {format_p(pair.p_holm)}."
    cannot = f"{pair.first} and {pair.second} cannot be told apart: Holm {format_p(pair.p_holm)}"
    if met == 1:
        return f"{cannot}; they met once, which says nothing of how much it varies."
    ways = []
    if pair.more_experiments is not None:
        ways.append(f"{pair.more_experiments} more {_plural('experiment', pair.more_experiments)}")
    if pair.more_seeds is not None:
        ways.append(f"{pair.more_seeds} more {_plural('seed', pair.more_seeds)} for each experiment")
    if not ways:
        return f"{cannot}; no number of {judged.unit}s within reach would settle it."
    return f"{cannot}; about {' or '.join(ways)} would settle it."


def notes(table: Table) -> list[str]:
    """What failed or was never run, and what that leaves of the table."""
    lines, total = [], len(table.experiments)
    for j, method in enumerate(table.methods):
        failed = [result for result in table.failures if result.method == method]
        missing = [name for i, name in enumerate(table.experiments) if math.isnan(table.means[i, j])]
        never = [name for name in missing if not any(result.experiment == name for result in failed)]
        if failed:
            runs = len(failed) + sum(len(seeds) for (_, name), seeds in table.runs.items() if name == method)
            where = f"{failed[0].experiment}, seed {failed[0].seed}: {failed[0].reason}".rstrip(".")
            lines.append(f"{method}: {len(failed)} of {runs} runs failed (first: {where}).")
        if never:
            lines.append(f"{method}: never run in {len(never)} of {total} experiments (first: {never[0]}).")
        if missing:
            lines.append(f"{method} is not ranked in {len(missing)} of {total} experiments.")
    count = int(table.complete.sum())
    if count < total:
        lines.append(f"{count} of {total} experiments have a value of every method{_withdrawal(table, count)}.")
    return lines


def format_p(p: float) -> str:
    """A p-value as it is read aloud.

    >>> format_p(0.3123), format_p(0.00012), format_p(1.0)
    ('p = 0.31', 'p < 0.001', 'p = 1')
    """
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def _held(judged: Tournament) -> str:
    table = judged.table
    experiments, seeds = len(table.experiments), table.seeds
    return (
        f"{len(table.methods)} methods in {experiments} {_plural('experiment', experiments)}, "
        f"{'one run' if seeds <= 1 else f'up to {seeds} seeds'} each."
    )


def _withdrawal(table: Table, count: int) -> str:
    """Whose leaving would make most experiments complete."""
    gains = {name: int(table.without(name).complete.sum()) - count for name in table.methods}
    name = max(gains, key=lambda method: gains[method])
    return f"; without {name} it would be {count + gains[name]}" if gains[name] and len(gains) > 2 else ""


def _friedman(judged: Tournament) -> str:
    test = judged.friedman
    if test is None:
        return "Friedman's test is not held: it needs two experiments or more with a value of every method."
    over = f" over these {test.experiments}" if test.experiments < len(judged.table.experiments) else ""
    figures = f"Friedman{over} chi-squared {test.chi_squared:.1f}, {format_p(test.p_value)} by shuffled ranks"
    if test.p_value < judged.alpha:
        return f"The methods differ ({figures}). Critical difference of mean ranks: {judged.critical:.2f}."
    return f"The methods as a whole cannot be told apart ({figures}); take single pairs with care."


def _settled(judged: Tournament) -> list[str]:
    """Who is better than whom, an method a line."""
    done = [pair for pair in judged.pairs if pair.significant]
    over = "experiments" if judged.unit == "experiment" else "runs of the same seed"
    lines = [
        f"{len(done)} of {len(judged.pairs)} pairs are settled at {judged.alpha:g} "
        f"(Wilcoxon signed-rank tests over {over}, Holm-corrected)."
    ]
    if judged.unit == "run":
        lines.append("Pairs are compared run by run: what is settled holds for these experiments, not for others.")
    names = [standing.method for standing in judged.standings]
    for name in names:
        beaten = [pair.trailer for pair in done if pair.leader == name]
        if beaten:
            whom = "all others" if len(beaten) == len(names) - 1 > 1 else _list(sorted(beaten, key=names.index))
            lines.append(f"  {name} is better than {whom}.")
    if len(done) < len(judged.pairs):
        lines.append("Not settled:")
    return lines


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"
