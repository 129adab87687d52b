"""One self-contained HTML page for a study: who is better at what, how sure that is, and what failed."""

from __future__ import annotations

import base64
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nearkin._common.files import nan_to_none
from nearkin._common.progress import format_duration
from nearkin._common.version import __version__
from nearkin.bench.aggregate import Aggregate, aggregate, paired_difference
from nearkin.bench.papers import Published, published
from nearkin.bench.statistics import holm
from nearkin.bench.summary import summarize
from nearkin.bench.tournament import Pair, Tournament
from nearkin.bench.trials import StudyFolder
from nearkin.errors import DataError, RunError
from nearkin.metrics.bootstrap import Difference
from nearkin.report.critical_difference import draw_critical_difference
from nearkin.report.html import fill, write_html
from nearkin.report.plots import Series, line_chart
from nearkin.report.study_overview import in_order, run_study_tournament

LINES = 4  # methods on a chart: more cannot be told apart


@dataclass(frozen=True)
class StudyReport:
    """Everything the page of a study tells, before it is HTML."""

    name: str
    metric: str
    protocol_labels: list[str]
    experiments: list[str]
    methods: list[str]
    """Best mean rank first."""
    cells: dict[tuple[str, str], Aggregate]
    """By (experiment, method)."""
    published: dict[tuple[str, str], list[Published]]
    tournament: Tournament | None
    baselines: dict[str, dict[str, float]]
    """R@1 in percent of what training started from, by name and experiment: the mean over all trials there."""
    duels: list[tuple[str, Difference, float]]
    """The leader against each other method on the same test queries: (method, difference, p after Holm)."""
    failures: list[dict[str, Any]]
    trials: list[dict[str, Any]]
    left: int
    """Trials that have no outcome yet."""
    toml: str
    places: dict[str, tuple[str, str, int]]
    """Experiment -> data set, network, size."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        rows = [
            {"experiment": e, "method": n, "mean": c.mean, "std": c.std, "interval": [c.low, c.high]}
            | {"values": list(c.values), "failed": c.failed}
            | {"published": [[p.source, p.percent] for p in self.published.get((e, n), [])]}
            for (e, n), c in self.cells.items()
        ]
        ranks = [] if self.tournament is None else [vars(standing) for standing in self.tournament.standings]
        pairs = [] if self.tournament is None else [vars(pair) for pair in self.tournament.pairs]
        plain: dict[str, Any] = nan_to_none(
            {
                "nearkin": __version__,
                "name": self.name,
                "metric": self.metric,
                "protocol_labels": self.protocol_labels,
                "cells": rows,
                "standings": ranks,
                "pairs": pairs,
                "baselines": self.baselines,
                "leader_less": [{"method": name, **vars(one), "p_holm": p} for name, one, p in self.duels],
                "failures": self.failures,
                "trials": self.trials,
                "left": self.left,
            }
        )
        return plain


def build_study_report(path: str | Path) -> StudyReport:
    """Look at a study as far as it is done."""
    folder = StudyFolder.open(path)
    outcomes = folder.outcomes()
    if not outcomes:
        raise RunError(f"{folder.path}: nothing of this study is done yet. Run it: nearkin bench run {folder.path}.")
    tournament = run_study_tournament(folder)
    order = in_order(folder, tournament)
    places = {t.experiment: (t.dataset, t.backbone, t.size) for t in folder.trials}
    sources = {t.dataset: t.recipe.data.source for t in folder.trials}
    losses = {t.method: t.recipe.loss.name for t in folder.trials}
    known = {
        (experiment, method): printed
        for experiment, (dataset, network, size) in places.items()
        for method in order
        if (printed := published(dataset=sources[dataset], network=network, dim=size, loss=losses[method], own=True))
    }
    trials, failures = [], []
    for trial in folder.trials:
        outcome = outcomes.get(trial.id)
        if outcome is None:
            continue
        row = {"experiment": trial.experiment, "method": trial.method, "seed": trial.seed, "fold": trial.part}
        if outcome.status == "failed":
            failures.append({**row, "reason": outcome.reason})
        assert outcome.run is not None or outcome.test is None
        value = None if outcome.test is None else 100 * outcome.test[folder.study.metric]
        shown = {"value": value, "epoch": outcome.epoch, "seconds": outcome.seconds}
        trials.append({**row, **shown, "run": Path(outcome.run).name if outcome.run else None})
    return StudyReport(
        name=folder.study.name,
        metric=folder.study.metric,
        protocol_labels=list(dict.fromkeys(trial.label for trial in folder.trials)),
        experiments=list(places),
        methods=order,
        cells=aggregate(folder),
        published=known,
        tournament=tournament,
        baselines=baselines(folder) if folder.study.metric == "R@1" else {},
        duels=query_by_query(folder, tournament),
        failures=failures,
        trials=trials,
        left=len(folder.trials) - len(outcomes),
        toml=_shared(folder),
        places=places,
    )


def baselines(folder: StudyFolder) -> dict[str, dict[str, float]]:
    """What every method has to beat: raw pixels, the backbone as it came, the model before its first step."""
    found: dict[str, dict[str, list[float]]] = {}
    outcomes = folder.outcomes()
    for trial in folder.trials:
        known = outcomes[trial.id].yardstick if trial.id in outcomes else None
        for name, value in (known or {}).items():
            found.setdefault(name, {}).setdefault(trial.experiment, []).append(100 * value)
    return {name: {e: float(np.mean(values)) for e, values in by.items()} for name, by in found.items()}


def query_by_query(folder: StudyFolder, tournament: Tournament | None) -> list[tuple[str, Difference, float]]:
    """How far the leader is ahead of each other method on the same test queries, over all draws that both have.

    Far sharper than ranks where experiments are few, but about these experiments alone. Nothing where draws were judged
    on different classes (several data sets, or test classes drawn anew).
    """
    if tournament is None:
        return []
    first, *others = [standing.method for standing in tournament.standings]
    try:
        found = [paired_difference(folder, other, first) for other in others]
    except DataError:
        return []
    adjusted = holm(np.array([one.p_value for one in found]))[0].tolist()
    return list(zip(others, found, adjusted, strict=True))


def _shared(folder: StudyFolder) -> str:
    """The study's file without the folders of this machine: a page is shared."""
    text = folder.study.to_toml()
    for dataset in folder.study.datasets:
        if dataset.root is not None:
            text = text.replace(str(dataset.root), dataset.root.name)
    return text


def write_study_page(report: StudyReport, out: Path) -> Path:
    return write_html(render_study(report), out)


def render_study(report: StudyReport) -> str:
    """The page as text."""
    values = {
        "report": report,
        "headline": headline(report),
        "best": {name: max(_known(report, name), default=math.nan) for name in report.experiments},
        "worst": {name: min(_known(report, name), default=math.nan) for name in report.experiments},
        "diagram": diagram(report.tournament),
        "charts": charts(report),
        "matrix": win_matrix(report),
        "said": summarize(report.tournament, most=10).splitlines() if report.tournament else [],
        "total": format_duration(sum(trial["seconds"] for trial in report.trials)),
    }
    return fill("study.html", "study.js", ["page.css", "study.css"], values)


def _mean(report: StudyReport, experiment: str, method: str) -> float:
    cell = report.cells.get((experiment, method))
    return cell.mean if cell is not None and cell.values else math.nan


def _known(report: StudyReport, experiment: str) -> list[float]:
    means = [_mean(report, experiment, method) for method in report.methods]
    return [mean for mean in means if not math.isnan(mean)]


def headline(report: StudyReport) -> str:
    """The sentence the page opens with: who leads, and of whom that is certain."""
    if report.tournament is None:
        count = len(report.methods)
        if count == 1:
            return "One method alone: there is nothing to rank."
        known = sum(any(not math.isnan(_mean(report, e, name)) for e in report.experiments) for name in report.methods)
        so_far = " so far" if report.left else ""
        return f"{known or 'None'} of the {count} methods has a value{so_far}: there is nothing to rank."
    first = report.tournament.standings[0].method
    pairs = [pair for pair in report.tournament.pairs if first in (pair.first, pair.second)]
    beaten = sum(pair.significant and pair.leader == first for pair in pairs)
    others = f"{len(pairs)} other{'s' * (len(pairs) != 1)}"
    if not report.duels:
        return f"{first} has the best mean rank; it is settled that it is better than {beaten} of the {others}."
    ahead = sum(one.difference > 0 and p < report.tournament.alpha for _, one, p in report.duels)
    return (
        f"{first} has the best mean rank. On the same test queries it is certainly ahead of {ahead} of the {others}; "
        f"that this holds beyond these experiments is settled for {beaten}."
    )


def diagram(tournament: Tournament | None) -> str | None:
    """The critical-difference diagram as a data address, or None where there is none."""
    if tournament is None or tournament.friedman is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        drawn = draw_critical_difference(tournament, Path(folder) / "diagram.svg").read_bytes()
    return "data:image/svg+xml;base64," + base64.b64encode(drawn).decode()


def charts(report: StudyReport) -> list[tuple[str, str]]:
    """The metric over embedding sizes, of the leading methods, for every data set and network."""
    drawn = []
    shown = report.methods[:LINES]
    for dataset, network in dict.fromkeys(place[:2] for place in report.places.values()):
        at = {size: name for name, (d, n, size) in report.places.items() if (d, n) == (dataset, network)}
        if len(at) > 1:
            lines = [_series(report, method, [(size, at[size]) for size in sorted(at)]) for method in shown]
            title = f"{report.metric} by size: {dataset}{f', {network}' if network != 'none' else ''}"
            drawn.append((title, line_chart(lines, title, x_name="size", logarithmic=True)))
    return [(title, svg) for title, svg in drawn if svg]


def _series(report: StudyReport, method: str, points: Sequence[tuple[int, str]]) -> Series:
    values = [_mean(report, name, method) for _, name in points]
    return Series(method, [x for x, _ in points], [None if math.isnan(v) else v for v in values])


def win_matrix(report: StudyReport) -> list[list[dict[str, Any] | None]]:
    """Row against column: how often the row won, the chance that it is ahead, and whether that is settled."""
    if report.tournament is None:
        return []
    by_names = {(pair.first, pair.second): pair for pair in report.tournament.pairs}
    rows = []
    ranked = [standing.method for standing in report.tournament.standings]
    for row in ranked:
        line: list[dict[str, Any] | None] = []
        for column in ranked:
            pair = by_names.get((row, column)) or by_names.get((column, row))
            line.append(_duel(pair, row, column) if pair is not None else None)
        rows.append(line)
    return rows


def _duel(pair: Pair, row: str, column: str) -> dict[str, Any]:
    straight = pair.first == row
    wins, losses = (pair.wins, pair.losses) if straight else (pair.losses, pair.wins)
    ahead = pair.ahead if straight else 1 - pair.ahead
    kind = "" if not pair.significant else "better" if pair.leader == row else "worse"
    text = f"{row} against {column}: won {wins}, lost {losses}, equal {pair.ties}; Holm p = {pair.p_holm:.3g}"
    return {"ahead": None if math.isnan(ahead) else ahead, "kind": kind, "title": text}
