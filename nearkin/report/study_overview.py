"""A study as tables and text: its plan, its progress and its results."""

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nearkin._common.progress import format_duration
from nearkin._common.words import agreeing, counted
from nearkin.bench.aggregate import aggregate, available_results, baseline_differences, baseline_scores, known_means
from nearkin.bench.estimates import Estimate
from nearkin.bench.results import COLUMNS, VALIDATION_COLUMN
from nearkin.bench.study import Trial
from nearkin.bench.summary import summarize
from nearkin.bench.tournament import Tournament, run_tournament
from nearkin.bench.trials import StudyFolder
from nearkin.errors import DataError
from nearkin.report.baselines import compare_study, study_lines, unchanged_line
from nearkin.report.tables import Grid, csv_text, latex, markdown, write_texts
from nearkin.report.tournament import standings_grid, write_files


def plan_grid(folder: StudyFolder, estimate: Estimate, *, full: bool) -> Grid:
    def time(trials: Sequence[Trial], share: float = 1.0) -> str:
        return format_duration(share * sum(map(estimate.seconds, trials))) if estimate.is_known else "?"

    if full:
        rows = [(t.experiment, t.method, str(t.seed), str(t.part), time([t]), t.id) for t in folder.trials]
        head: tuple[str, ...] = ("experiment", "method", "seed", "fold", "time", "id")
        return Grid(f"Trials of '{folder.study.name}'", head, rows, names=2)
    methods = len(folder.study.method_names)
    totals = []
    for name in folder.experiments:
        trials = [trial for trial in folder.trials if trial.experiment == name]
        disk = sum(estimate.bytes(trial, keep_models=folder.study.keep_models) for trial in trials)
        counts = (methods, round(len(trials) / methods), len(trials))
        totals.append((name, *map(str, counts), time(trials, 1 / len(trials)), time(trials), format_size(disk)))
    head = ("experiment", "methods", "replicates", "trials", "time per trial", "total time", "disk")
    return Grid(f"Plan of '{folder.study.name}' (--full lists every trial)", head, totals)


def plan_totals(folder: StudyFolder, estimate: Estimate, *, workers: int) -> str:
    """Summarize the plan: trials, protocol, time and disk space."""
    done, protocol = folder.outcomes(), folder.study.protocol
    disk = sum(estimate.bytes(trial, keep_models=folder.study.keep_models) for trial in folder.trials)
    models = f"{protocol.models_per_seed} models per seed, " if protocol.models_per_seed > 1 else ""
    trials = f"{counted(len(folder.trials), 'trial')} ({models}{len(done)} done)"
    time = _time_left([trial for trial in folder.trials if trial.id not in done], estimate, workers)
    labels = "; ".join(folder.labels)
    return f"{trials}, protocol {protocol.name}: {labels}\n{time}; {format_size(disk)} of disk"


def _time_left(trials: Sequence[Trial], estimate: Estimate, workers: int) -> str:
    if not estimate.is_known:
        return "time unknown until the first trial has finished (bench run; then repeat this, or see bench status)"
    count = estimate.calibration_trials
    basis = f"measured on {counted(count, 'finished trial')}" if count else "from operation counts"
    duration = format_duration(sum(map(estimate.seconds, trials)) / workers)
    return f"about {duration} with {workers} at a time, {basis}"


def status_grid(folder: StudyFolder) -> Grid:
    """Build the table of progress: trials by experiment and state."""
    outcomes, running = folder.outcomes(), folder.running()
    states = ("done", "failed", "running", "left")
    counts = {name: dict.fromkeys(states, 0) for name in folder.experiments}
    for trial in folder.trials:
        outcome = outcomes.get(trial.id)
        counts[trial.experiment][outcome.status if outcome else "running" if trial.id in running else "left"] += 1
    rows = [(name, *map(str, count.values())) for name, count in counts.items()]
    return Grid(f"'{folder.study.name}'", ("experiment", *states), rows)


def status_lines(folder: StudyFolder) -> str:
    """Summarize progress: failed trials with their reasons, and the time left. Works without the data."""
    outcomes = folder.outcomes()
    lines = [f"FAILED {trial}: {o.reason}" for trial, o in folder.finished() if o.status == "failed"]
    remaining = [trial for trial in folder.trials if trial.id not in outcomes]
    if not remaining:
        return "\n".join([*lines, f"finished: {counted(len(outcomes), 'trial')}, {len(lines)} of them failed"])
    try:
        left = _time_left(remaining, Estimate(folder.trials, outcomes), max(1, len(folder.running())))
    except DataError as error:
        left = f"the rest cannot run: {error}"
    return "\n".join([*lines, f"{len(outcomes)} of {len(folder.trials)} done; {left}"])


def results_grid(folder: StudyFolder, methods: list[str]) -> Grid:
    experiments = folder.experiments
    cells = {cell: result.short() for cell, result in aggregate(folder).items()}
    rows = [(method, *(cells.get((name, method), "-") for name in experiments)) for method in methods]
    for name, scores in baseline_scores(folder).items():
        rows.append((f"({name})", *(f"{scores[e]:.1f}" if e in scores else "-" for e in experiments)))
    # A dataset that all experiments share goes into the title, to keep the columns narrow.
    dataset = folder.trials[0].dataset if len({trial.dataset for trial in folder.trials}) == 1 else ""
    title = f"{folder.study.metric} in percent{f' on {dataset}' if dataset else ''}, mean ± sample standard deviation"
    heads = [name.removeprefix(f"{dataset} ") if dataset else name for name in experiments]
    return Grid(f"{title}; (baselines without training)", ("method", *heads), rows)


def rank_methods(folder: StudyFolder) -> tuple[Tournament | None, list[str]]:
    """Run the tournament of the methods that have any value, None with fewer than two; and order all methods by it."""
    results = available_results(folder)
    tournament = run_tournament(results) if len({result.method for result in results}) > 1 else None
    ranked = [s.method for s in tournament.standings] if tournament else []
    return tournament, [*ranked, *(name for name in folder.study.method_names if name not in ranked)]


def failure_line(folder: StudyFolder) -> str:
    """Report how many trials failed and how to see why; empty if none did."""
    failed = [outcome for outcome in folder.outcomes().values() if outcome.status == "failed"]
    see = f"nearkin bench status {shlex.quote(str(folder.path))}"
    return f"{agreeing(len(failed), 'trials failed and are not ranked')}; for the reasons: {see}" if failed else ""


def terminal_report(folder: StudyFolder) -> list[Any]:
    tournament, methods = rank_methods(folder)
    parts: list[Any] = [results_grid(folder, methods)]
    if tournament is not None:
        parts += [standings_grid(tournament), summarize(tournament)]
    means = known_means(aggregate(folder), methods)
    sentence, _ = compare_study(folder.study.metric, means, baseline_scores(folder))
    if sentence:
        parts += [sentence, *study_lines(methods[0], baseline_differences(folder, methods[0]))]
    unchanged = unchanged_line([o.epoch for o in folder.outcomes().values() if o.status == "done"])
    parts += filter(None, (unchanged, failure_line(folder)))
    return [*parts, *(f"protocol: {label}" for label in folder.labels)]


def write_report_files(folder: StudyFolder) -> list[Path]:
    """Write results.csv, numbers.md, numbers.tex, the tournament and, for a paper's study, its table and figures."""
    tournament, methods = rank_methods(folder)
    labels = "\n".join(f"- {label}" for label in folder.labels)
    grid = results_grid(folder, methods)
    numbers = f"# {folder.study.name}\n\n{labels}\n\n{markdown(grid)}\n"
    texts = {"results.csv": results_csv(folder), "numbers.md": numbers, "numbers.tex": latex(grid)}
    written = write_texts(texts, folder.path)
    if tournament is not None:
        write_files(tournament, folder.path / "tournament")
        written.append(folder.path / "tournament")
    if folder.study.paper:
        from nearkin.report import paper_figures, paper_tables

        written += [*paper_tables.write_paper_tables(folder), *paper_figures.write_paper_figures(folder)]
    return written


def results_csv(folder: StudyFolder) -> str:
    """Return one line per trial: the value it is ranked by, R@1 on its validation classes, and every metric."""
    finished = folder.finished()
    metrics = list(dict.fromkeys(name for _, o in finished for name in o.test or {}))
    lines = []
    for t, o in finished:
        values = [o.val, *((o.test or {}).get(name) for name in metrics)]
        percents = [None if value is None else 100 * value for value in values]
        lines.append((t.experiment, t.method, t.replicate, o.percent(folder.study.metric), o.reason, *percents))
    return csv_text((*COLUMNS, VALIDATION_COLUMN, *metrics), lines)


def format_size(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{math.ceil(size / 1e6 - 0.5)} MB"
