"""Results over replicates: mean, sample standard deviation and interval over seeds and folds, and paired differences.

The standard deviation over replicates measures how much one training run differs from the next; the interval over
classes how much another choice of test classes would change the score. More seeds do not shrink the second.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nearkin.bench.results import Result
from nearkin.bench.trials import StudyFolder
from nearkin.errors import DataError, did_you_mean
from nearkin.metrics.bootstrap import Difference
from nearkin.metrics.scores import Scores, compare


def available_results(folder: StudyFolder, **only: str | None) -> list[Result]:
    """Results of the methods that have any value: one that failed everywhere would prevent ranking the others."""
    results = folder.results(**only)
    methods = {result.method for result in results if result.value is not None}
    return [result for result in results if result.method in methods]


@dataclass(frozen=True)
class Aggregate:
    """The score of one method in one experiment over its replicates, in percent."""

    values: tuple[float, ...]  # one score per finished replicate
    low: float  # lower end of the 95 % interval of the mean over test classes, averaged over replicates; NaN if unknown
    high: float  # upper end of that interval
    failed: int

    @property
    def mean(self) -> float:
        """Mean over replicates; NaN if all failed."""
        return float(np.mean(self.values)) if self.values else math.nan

    @property
    def std(self) -> float:
        """Sample standard deviation; NaN for a single replicate."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else math.nan

    def short(self) -> str:
        if not self.values:
            return f"{self.failed} failed"
        spread = f" ± {self.std:.1f}" if len(self.values) > 1 else ""
        return f"{self.mean:.1f}{spread}{f' ({self.failed} failed)' if self.failed else ''}"


def aggregate(folder: StudyFolder) -> dict[tuple[str, str], Aggregate]:
    """(experiment, method) -> outcomes of a study over seeds and folds; cells without any outcome yet are absent."""
    metric = folder.study.metric
    scores: dict[tuple[str, str], list[list[float]]] = {}  # score, low, high
    failed: Counter[tuple[str, str]] = Counter()
    for trial, outcome in folder.finished():
        cell = (trial.experiment, trial.method)
        rows = scores.setdefault(cell, [])
        if outcome.test is None:
            failed[cell] += 1
        else:
            assert outcome.intervals is not None
            rows.append([100 * value for value in (outcome.test[metric], *outcome.intervals[metric])])
    aggregates = {}
    for cell, rows in scores.items():
        low, high = np.mean([row[1:] for row in rows], axis=0).tolist() if rows else (math.nan, math.nan)
        aggregates[cell] = Aggregate(tuple(row[0] for row in rows), low, high, failed[cell])
    return aggregates


def known_means(cells: Mapping[tuple[str, str], Aggregate], methods: Sequence[str]) -> dict[str, dict[str, float]]:
    """Method -> experiment -> mean; without cells in which every replicate failed."""
    return {m: {e: c.mean for (e, method), c in cells.items() if method == m and c.values} for m in methods}


def baseline_scores(folder: StudyFolder) -> dict[str, dict[str, float]]:
    """Baseline -> experiment -> score in percent, the mean over all trials."""
    values: dict[str, dict[str, list[float]]] = {}
    for trial, outcome in folder.finished():
        for name, scores in (outcome.baselines or {}).items():
            values.setdefault(name, {}).setdefault(trial.experiment, []).append(100 * scores[folder.study.metric])
    return {name: {e: float(np.mean(v)) for e, v in scores.items()} for name, scores in values.items()}


def baseline_differences(folder: StudyFolder, method: str) -> dict[str, dict[str, list[float]]]:
    """Baseline -> metric -> difference of a method and the ends of its interval, averaged over its trials."""
    found = [o.differences for trial, o in folder.finished() if trial.method == method and o.differences]
    return {
        name: {metric: np.mean([differences[name][metric] for differences in found], axis=0).tolist() for metric in m}
        for name, m in (found[0] if found else {}).items()
    }


def paired_difference(folder: StudyFolder, first: str, second: str, experiment: str | None = None) -> Difference:
    """Second minus first on the same test queries, averaged over the seeds and folds that both have, by classes."""
    known = folder.study.method_names
    for name in (first, second):
        if name not in known:
            raise DataError(f"The study has no method '{name}'.{did_you_mean(name, known)}")
    metric = folder.study.metric
    runs: dict[str, dict[tuple[str, int], Path]] = {first: {}, second: {}}
    for trial, outcome in folder.finished():
        if trial.method in runs and experiment in (None, trial.experiment) and outcome.run is not None:
            runs[trial.method][trial.experiment, trial.replicate] = Path(outcome.run)
    common = sorted(runs[first].keys() & runs[second].keys())
    if not common:
        raise DataError(f"{first} and {second} have no finished trial with the same experiment, seed and fold.")
    scores = [[Scores.load(runs[name][key] / "per_query.npz") for key in common] for name in (first, second)]
    labels = scores[0][0].labels
    if any(not np.array_equal(one.labels, labels) for both in scores for one in both):
        raise DataError("The trials were evaluated on different test classes, so queries cannot be averaged over them.")
    means = [Scores({metric: np.mean([s.per_query[metric] for s in one], axis=0)}, labels) for one in scores]
    return compare(means[0], means[1], metric)
