"""A study in tables and sentences: the plan, how far it is, and what came out."""

from __future__ import annotations

import csv
import io
import math
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

from nearkin._common.files import atomic_write
from nearkin._common.progress import format_duration
from nearkin.bench.aggregate import Aggregate, aggregate
from nearkin.bench.estimates import Estimate
from nearkin.bench.results import Result
from nearkin.bench.summary import summarize
from nearkin.bench.tournament import Tournament, run_tournament
from nearkin.bench.trials import StudyFolder
from nearkin.errors import DataError
from nearkin.report.study_tables import Grid, markdown, rich_table, standings_grid, write_files


def plan_grid(folder: StudyFolder, estimate: Estimate, *, full: bool) -> Grid:
    """A line per trial, or per experiment with its sums."""
    keep = folder.study.keep_models
    if full:
        every = tuple(
            (t.experiment, t.method, str(t.seed), str(t.part), format_duration(estimate.seconds(t)), t.id)
            for t in folder.trials
        )
        return Grid(
            f"Trials of '{folder.study.name}'", ("experiment", "method", "seed", "fold", "time", "id"), every, names=2
        )
    sums: dict[str, list[float]] = {}
    for t in folder.trials:
        count = sums.setdefault(t.experiment, [0, 0.0, 0.0])
        count[0] += 1
        count[1] += estimate.seconds(t)
        count[2] += estimate.bytes(t, keep_models=keep)
    methods = len(folder.study.names)
    rows = tuple(
        (
            name,
            str(methods),
            str(round(n / methods)),
            f"{n:.0f}",
            format_duration(s / n),
            format_duration(s),
            megabytes(b),
        )
        for name, (n, s, b) in sums.items()
    )
    head = ("experiment", "methods", "draws", "trials", "each", "together", "disk")
    return Grid(f"Plan of '{folder.study.name}' (--full lists every trial)", head, rows)


def plan_totals(folder: StudyFolder, estimate: Estimate, *, workers: int) -> str:
    """The whole, in a few lines: what, how judged, how long, how much."""
    done = folder.outcomes()
    left = [trial for trial in folder.trials if trial.id not in done]
    seconds = sum(estimate.seconds(trial) for trial in left)
    disk = sum(estimate.bytes(trial, keep_models=folder.study.keep_models) for trial in folder.trials)
    basis = (
        f"scaled by {estimate.learned_from} finished trials"
        if estimate.learned_from
        else "a rough guess from the networks' arithmetic; finished trials will correct it"
    )
    labels = "; ".join(dict.fromkeys(trial.label for trial in folder.trials))
    models = f"{folder.study.protocol.parts} models each, " if folder.study.protocol.parts > 1 else ""
    return (
        f"{len(folder.trials)} trials ({models}{len(done)} done), protocol {folder.study.protocol.name}: {labels}\n"
        f"about {format_duration(seconds / workers)} with {workers} at a time, {megabytes(disk)} of disk ({basis})"
    )


def status_grid(folder: StudyFolder) -> Grid:
    outcomes, running = folder.outcomes(), folder.running()
    counts: dict[str, Counter[str]] = {}
    for trial in folder.trials:
        outcome = outcomes.get(trial.id)
        state = outcome.status if outcome else "running" if trial.id in running else "left"
        counts.setdefault(trial.experiment, Counter())[state] += 1
    states = ("done", "failed", "running", "left")
    rows = tuple((name, *(str(count[state]) for state in states)) for name, count in counts.items())
    return Grid(f"'{folder.study.name}'", ("experiment", *states), rows)


def status_lines(folder: StudyFolder) -> str:
    """Failures with their reasons, and the time that is left. What is done can be told when the data are gone."""
    outcomes = folder.outcomes()
    lines = [
        f"FAILED {trial}: {outcomes[trial.id].reason}"
        for trial in folder.trials
        if trial.id in outcomes and outcomes[trial.id].status == "failed"
    ]
    left = [trial for trial in folder.trials if trial.id not in outcomes]
    if not left:
        return "\n".join([*lines, f"finished: {len(outcomes)} trials, {len(lines)} of them failed"])
    at_a_time = max(1, len(folder.running()))
    done = f"{len(outcomes)} of {len(folder.trials)} done"
    try:
        estimate = Estimate(folder.trials, outcomes)
    except DataError as error:
        return "\n".join([*lines, f"{done}; the rest cannot be run: {error}"])
    seconds = sum(estimate.seconds(trial) for trial in left) / at_a_time
    return "\n".join([*lines, f"{done}; about {format_duration(seconds)} with {at_a_time} at a time"])


# --- what came out ---------------------------------------------------------------------------------------------------


def outcome_grid(folder: StudyFolder, found: dict[tuple[str, str], Aggregate], order: list[str]) -> Grid:
    """Entrants by experiments: the mean over draws, and its sample deviation where there are several."""
    experiments = list(dict.fromkeys(trial.experiment for trial in folder.trials))
    rows = []
    for method in order:
        shown = [found[name, method].short() if (name, method) in found else "-" for name in experiments]
        rows.append((method, *shown))
    # What all experiments share is said once, above the table, and leaves room in it.
    datasets = {trial.dataset for trial in folder.trials}
    on, heads = "", experiments
    if len(datasets) == 1:
        on = f" on {min(datasets)}"
        heads = [name.removeprefix(f"{min(datasets)} ") for name in experiments]
    title = f"{folder.study.metric} in percent{on}, mean ± sample deviation"
    return Grid(title, ("method", *heads), tuple(rows))


def available_results(folder: StudyFolder) -> list[Result]:
    """Results of the methods that have a value somewhere.

    One that failed everywhere has withdrawn: it is listed among the failures, and the others are still ranked.
    """
    results = folder.results()
    there = {result.method for result in results if result.value is not None}
    return [result for result in results if result.method in there]


def run_study_tournament(folder: StudyFolder) -> Tournament | None:
    """The tournament of those that have a value somewhere; None with fewer than two of them."""
    results = available_results(folder)
    return run_tournament(results) if len({result.method for result in results}) > 1 else None


def failure_line(folder: StudyFolder) -> str:
    """How many trials failed and where to read why; empty if none did."""
    failed = [outcome for outcome in folder.outcomes().values() if outcome.status == "failed"]
    see = f"nearkin bench status {shlex.quote(str(folder.path))}"
    return f"{len(failed)} trials failed and are left out of every rank: {see}" if failed else ""


def in_order(folder: StudyFolder, tournament: Tournament | None) -> list[str]:
    """Entrants by mean rank, then those that are not ranked."""
    ranked = [s.method for s in tournament.standings] if tournament else []
    return [*ranked, *(name for name in folder.study.names if name not in ranked)]


def outcome_parts(folder: StudyFolder) -> list[Any]:
    """For the terminal: numbers, ranks, and in words what is settled."""
    tournament, found = run_study_tournament(folder), aggregate(folder)
    order = in_order(folder, tournament)
    parts: list[Any] = [rich_table(outcome_grid(folder, found, order))]
    if tournament is not None:
        parts += [rich_table(standings_grid(tournament)), summarize(tournament)]
    if failures := failure_line(folder):
        parts.append(failures)
    return [*parts, *(f"protocol: {label}" for label in dict.fromkeys(trial.label for trial in folder.trials))]


def write_outcome(folder: StudyFolder) -> list[Path]:
    """results.csv, numbers.md and the tournament's files into the folder of the study."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("experiment", "method", "seed", "value", "reason"))
    for r in folder.results():
        writer.writerow((r.experiment, r.method, r.seed, "" if r.value is None else r.value, r.reason or ""))
    tournament, found = run_study_tournament(folder), aggregate(folder)
    order = in_order(folder, tournament)
    labels = "\n".join(f"- {label}" for label in dict.fromkeys(trial.label for trial in folder.trials))
    numbers = f"# {folder.study.name}\n\n{labels}\n\n{markdown(outcome_grid(folder, found, order))}\n"
    written = []
    for name, text in (("results.csv", out.getvalue()), ("numbers.md", numbers)):
        atomic_write(folder.path / name, text)
        written.append(folder.path / name)
    if tournament is not None:
        write_files(tournament, folder.path / "tournament")
        written.append(folder.path / "tournament")
    return written


def megabytes(count: float) -> str:
    """
    >>> megabytes(2_300_000), megabytes(5e9)
    ('2 MB', '5.0 GB')
    """
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{math.ceil(count / 1e6 - 0.5)} MB"
