"""The HTML page of a study, and its figures for a paper."""

import base64
import math
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nearkin._common.files import nan_to_none
from nearkin._common.progress import format_duration
from nearkin._common.version import __version__
from nearkin._common.words import joined
from nearkin.bench import aggregate
from nearkin.bench.aggregate import Aggregate, baseline_differences, baseline_scores, paired_difference
from nearkin.bench.papers import Published, published
from nearkin.bench.statistics import holm
from nearkin.bench.summary import summarize
from nearkin.bench.tournament import Tournament
from nearkin.bench.trials import StudyFolder
from nearkin.errors import DataError, RunError
from nearkin.metrics.bootstrap import Difference
from nearkin.report.baselines import compare_study, study_lines, unchanged_line
from nearkin.report.html import render_template, write_html
from nearkin.report.print_figures import COLOURS, WIDTH, Lines, draw_over, group_lines, write_drawings
from nearkin.report.study_overview import rank_methods
from nearkin.report.svg_charts import Series, line_chart
from nearkin.report.tournament import draw_critical_difference, write_critical_difference

MAX_LINES = 4  # methods per chart of the page: more would not be distinguishable on a screen


@dataclass(frozen=True)
class StudyReport:
    """The contents of a study's page before rendering."""

    name: str
    metric: str
    protocol_labels: list[str]
    experiments: list[str]
    methods: list[str]  # names of the methods, best mean rank first
    cells: dict[tuple[str, str], Aggregate]  # results by (experiment, method)
    published: dict[tuple[str, str], list[Published]]  # published values by (experiment, method)
    tournament: Tournament | None  # the ranking, or None with fewer than two methods to rank
    baselines: dict[str, dict[str, float]]  # scores without training by baseline and experiment
    baseline_lines: list[str]  # how the leader compares with every baseline, in words
    # the leader against each other method on the same test queries, as (method, difference, p after Holm's correction)
    leader_comparisons: list[tuple[str, Difference, float]]
    failures: list[dict[str, Any]]
    trials: list[dict[str, Any]]
    remaining: int
    toml: str
    setups: dict[str, tuple[str, str, int]]  # experiment -> (dataset, network, embedding size)

    def mean(self, experiment: str, method: str) -> float:
        cell = self.cells.get((experiment, method))
        return math.nan if cell is None else cell.mean

    @property
    def means(self) -> dict[str, dict[str, float]]:
        """Method -> experiment -> mean, best mean rank first; without those that have no value."""
        return aggregate.known_means(self.cells, self.methods)

    def to_dict(self) -> dict[str, Any]:
        cells = [
            {"experiment": e, "method": m, "mean": c.mean, "std": c.std, "interval": [c.low, c.high]}
            | {"values": list(c.values), "failed": c.failed}
            | {"published": [[p.source, p.percent] for p in self.published.get((e, m), [])]}
            for (e, m), c in self.cells.items()
        ]
        plain: dict[str, Any] = {
            "nearkin": __version__,
            **{key: getattr(self, key) for key in ("name", "metric", "protocol_labels")},
            "cells": cells,
            "standings": [vars(standing) for standing in self.tournament.standings] if self.tournament else [],
            "pairs": [vars(pair) for pair in self.tournament.pairs] if self.tournament else [],
            **{key: getattr(self, key) for key in ("baselines", "baseline_lines")},
            "leader_comparisons": [{"method": m, **vars(gap), "p_holm": p} for m, gap, p in self.leader_comparisons],
            **{key: getattr(self, key) for key in ("failures", "trials", "remaining")},
        }
        return nan_to_none(plain)  # type: ignore[no-any-return]


def build_study_report(path: str | Path) -> StudyReport:
    """Collect the contents of a study's page from its finished trials.

    Args:
        path: Folder of the study.

    Returns:
        The contents.

    Raises:
        RunError: No trial is finished.
    """
    folder = StudyFolder.open(path)
    if not folder.finished():
        raise RunError(f"{folder.path}: no trial of this study is finished. Run it: nearkin bench run {folder.path}.")
    tournament, methods = rank_methods(folder)
    setups = {t.experiment: (t.dataset, t.backbone, t.size) for t in folder.trials}
    trials, failures = _finished_trials(folder)
    sources = {t.dataset: t.recipe.data.source for t in folder.trials}
    losses = {t.method: t.recipe.loss.name for t in folder.trials}
    # Without the folders of this machine: pages are shared.
    datasets = tuple(replace(d, root=d.root and Path(d.root.name)) for d in folder.study.datasets)
    return StudyReport(
        name=folder.study.name,
        metric=folder.study.metric,
        protocol_labels=folder.labels,
        experiments=list(setups),
        methods=methods,
        cells=aggregate.aggregate(folder),
        published={
            (experiment, method): values
            for experiment, (dataset, network, size) in setups.items()
            for method in methods
            if (values := published(dataset=sources[dataset], network=network, dim=size, loss=losses[method], own=True))
        },
        tournament=tournament,
        baselines=baseline_scores(folder),
        baseline_lines=study_lines(methods[0], baseline_differences(folder, methods[0])),
        leader_comparisons=compare_leader(folder, tournament),
        failures=failures,
        trials=trials,
        remaining=len(folder.trials) - len(trials),
        toml=replace(folder.study, datasets=datasets).to_toml(),
        setups=setups,
    )


def _finished_trials(folder: StudyFolder) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the finished trials, and the failed ones among them with their reasons."""
    trials, failures = [], []
    for trial, outcome in folder.finished():
        row = {"experiment": trial.experiment, "method": trial.method, "seed": trial.seed, "fold": trial.part}
        if outcome.status == "failed":
            failures.append({**row, "reason": outcome.reason})
        cost = {"value": outcome.percent(folder.study.metric), "epoch": outcome.epoch, "seconds": outcome.seconds}
        trials.append({**row, **cost, "run": Path(outcome.run).name if outcome.run else None})
    return trials, failures


def compare_leader(folder: StudyFolder, tournament: Tournament | None) -> list[tuple[str, Difference, float]]:
    """Compare the leader with the others on the same test queries: sensitive, but about these experiments only."""
    if tournament is None:
        return []
    leader, *others = [standing.method for standing in tournament.standings]
    try:
        differences = [paired_difference(folder, other, leader) for other in others]
    except DataError:
        return []
    adjusted = holm(np.array([difference.p_value for difference in differences]))[0].tolist()
    return list(zip(others, differences, adjusted, strict=True))


def write_study_page(report: StudyReport, out: Path) -> Path:
    """Render the page of a study and write it.

    Args:
        report: The contents.
        out: File to write.

    Returns:
        `out`.
    """
    return write_html(render_study(report), out)


def render_study(report: StudyReport) -> str:
    means = {e: [scores[e] for scores in report.means.values() if e in scores] for e in report.experiments}
    values = {
        "report": report,
        "headline": headline(report),
        "best": {name: max(known, default=math.nan) for name, known in means.items()},
        "worst": {name: min(known, default=math.nan) for name, known in means.items()},
        "diagram": diagram(report.tournament),
        "charts": charts(report),
        "pair_matrix": pair_matrix(report.tournament) if report.tournament else [],
        "summary_lines": summarize(report.tournament, most=10).splitlines() if report.tournament else [],
        "total_time": format_duration(sum(trial["seconds"] for trial in report.trials)),
    }
    return render_template("study.html", "study.js", ["page.css", "study.css"], values)


def headline(report: StudyReport) -> str:
    """Say which method leads, over which others significantly, and whether any beats the baselines."""
    against_baselines, any_beats = compare_study(report.metric, report.means, report.baselines)
    if len(report.methods) == 1:
        ranks = "Only one method: nothing to rank."
    elif report.tournament is None:
        known = f"{sum(map(bool, report.means.values()))} of {len(report.methods)} methods have a value"
        ranks = f"{known}{' so far' if report.remaining else ''}: nothing to rank."
    else:
        ranks = _rank_sentence(report, report.tournament)
    sentences = (ranks, against_baselines) if any_beats else (against_baselines, ranks)
    return " ".join(filter(None, (*sentences, unchanged_line([trial["epoch"] for trial in report.trials]))))


def _rank_sentence(report: StudyReport, tournament: Tournament) -> str:
    leader, *others = tournament.standings
    tied = [s.method for s in others if math.isclose(s.mean, leader.mean)]
    if tied:
        return f"{joined([leader.method, *tied])} share the best mean rank."
    pairs = [pair for pair in tournament.pairs if leader.method in (pair.first, pair.second)]
    beaten = sum(pair.significant and pair.leader == leader.method for pair in pairs)
    if not report.leader_comparisons:
        return f"{leader.method} has the best mean rank; its lead is significant over {_of_others(beaten, len(pairs))}."
    ahead = sum(gap.difference > 0 and p < tournament.alpha for _, gap, p in report.leader_comparisons)
    return (
        f"{leader.method} has the best mean rank. On the same test queries its lead is significant over "
        f"{_of_others(ahead, len(pairs))}; across experiments, over {_of_others(beaten, len(pairs))}."
    )


def _of_others(count: int, others: int) -> str:
    """Name a number of other methods.

    Example:
        >>> _of_others(0, 2), _of_others(1, 2), _of_others(2, 2), _of_others(1, 1)
        ('none of the 2 other methods', '1 of the 2 other methods', 'both other methods', 'the other method')
    """
    if others == 1:
        return "the other method" if count else "no other method"
    if count == others:
        return "both other methods" if others == 2 else f"all {others} other methods"
    return f"{count or 'none'} of the {others} other methods"


def diagram(tournament: Tournament | None) -> str | None:
    if tournament is None or tournament.friedman is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        svg = draw_critical_difference(tournament, Path(folder) / "diagram.svg").read_bytes()
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()


def charts(report: StudyReport) -> list[tuple[str, str]]:
    """Draw the metric of the leading methods by embedding size, for every dataset and network."""
    drawn = {}
    for panel, lines in _by_setting(report, 2, MAX_LINES).items():
        title = f"{report.metric} by embedding size: {panel}"
        series = [Series(method, list(line), list(line.values())) for method, line in lines.items()]
        drawn[title] = line_chart(series, title, x_name="size", logarithmic=True)
    return [(title, svg) for title, svg in drawn.items() if svg]


def pair_matrix(tournament: Tournament) -> list[list[dict[str, Any] | None]]:
    """Compare every method (row) with every other (column), in the order of the ranks."""
    cells: dict[tuple[str, str], dict[str, Any]] = {}
    for pair in tournament.pairs:
        for row, column, wins, losses, ahead in (
            (pair.first, pair.second, pair.wins, pair.losses, pair.ahead),
            (pair.second, pair.first, pair.losses, pair.wins, 1 - pair.ahead),
        ):
            css_class = "" if not pair.significant else "better" if pair.leader == row else "worse"
            title = f"{row} vs. {column}: {wins} wins, {losses} losses, {pair.ties} ties; Holm p = {pair.p_holm:.3g}"
            shown = None if math.isnan(ahead) else ahead
            cells[row, column] = {"ahead": shown, "css_class": css_class, "title": title}
    ranked = [standing.method for standing in tournament.standings]
    return [[cells.get((row, column)) for column in ranked] for row in ranked]


def write_study_figures(report: StudyReport, folder: Path) -> list[Path]:
    y_label = f"{report.metric}, %"
    drawings = {
        "losses": partial(_draw_losses, report=report),
        "sizes": partial(draw_over, groups=_by_setting(report, 2), x_label="embedding size", y_label=y_label),
        "networks": partial(draw_over, groups=_by_setting(report, 1), x_label="network", y_label=y_label),
    }
    written = write_drawings(drawings, folder)
    return written + ([] if report.tournament is None else write_critical_difference(report.tournament, folder))


def _draw_losses(figure: Any, report: StudyReport) -> bool:
    """A row per method with its experiments as dots and their mean as a tick. Not bars: those must start at 0."""
    rows = [(method, list(scores.values())) for method, scores in report.means.items() if scores]
    figure.set_size_inches(WIDTH, 0.8 + 0.2 * len(rows))
    axes = figure.add_subplot()
    for y, (_, values) in enumerate(rows):
        axes.plot(values, [y] * len(values), "o", color=COLOURS[0], markersize=3.5)
        axes.plot([np.mean(values)], [y], "|", color=COLOURS[1], markersize=11, markeredgewidth=2.2)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(f"{report.metric}, % (dots: experiments, tick: mean)")
    return bool(rows)


def _by_setting(report: StudyReport, field: int, methods: int | None = None) -> Lines:
    """Lines of the methods over the networks (field 1) or sizes (2); a panel for each setting of the rest."""
    points = []
    for experiment, setup in sorted(report.setups.items(), key=lambda item: item[1][2]):  # by size
        panel = ", ".join(str(s) for i, s in enumerate(setup) if i != field and s != "none")
        points += [(panel, m, setup[field], report.mean(experiment, m)) for m in report.methods[:methods]]
    return group_lines(points)
