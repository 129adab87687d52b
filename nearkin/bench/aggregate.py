"""What repeats say: mean, sample deviation and interval over seeds and folds, and differences paired by query.

Two sources of chance are kept apart. The deviation over draws (seeds, folds) tells how much one training differs from
the next; the interval over classes tells how much another choice of test classes would. The second is usually larger,
and seeds do not make it smaller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nearkin.bench.trials import StudyFolder
from nearkin.errors import DataError, did_you_mean
from nearkin.metrics.bootstrap import Difference
from nearkin.metrics.scores import Scores, compare


@dataclass(frozen=True)
class Aggregate:
    """One method in one experiment, over its draws; in percent."""

    values: tuple[float, ...]
    low: float
    high: float
    """95 % interval of the mean over test classes, averaged over draws; NaN where it is not known."""
    failed: int

    @property
    def mean(self) -> float:
        return float(np.mean(self.values)) if self.values else math.nan

    @property
    def std(self) -> float:
        """Sample deviation; NaN for a single draw."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else math.nan

    def short(self) -> str:
        """
        >>> Aggregate((60.0, 62.0), 55.0, 67.0, failed=0).short(), Aggregate((), math.nan, math.nan, failed=2).short()
        ('61.0 ± 1.4', '2 failed')
        """
        if not self.values:
            return f"{self.failed} failed"
        spread = f" ± {self.std:.1f}" if len(self.values) > 1 else ""
        return f"{self.mean:.1f}{spread}{f' ({self.failed} failed)' if self.failed else ''}"


def aggregate(folder: StudyFolder) -> dict[tuple[str, str], Aggregate]:
    """(experiment, method) -> what its draws gave; those of which nothing is done yet are absent."""
    outcomes, metric = folder.outcomes(), folder.study.metric
    values: dict[tuple[str, str], list[float]] = {}
    bounds: dict[tuple[str, str], list[list[float]]] = {}
    failed: dict[tuple[str, str], int] = {}
    for trial in folder.trials:
        outcome = outcomes.get(trial.id)
        if outcome is None:
            continue
        place = (trial.experiment, trial.method)
        values.setdefault(place, [])
        if outcome.test is None:
            failed[place] = failed.get(place, 0) + 1
        else:
            assert outcome.intervals is not None
            values[place].append(100 * outcome.test[metric])
            bounds.setdefault(place, []).append([100 * bound for bound in outcome.intervals[metric]])
    found = {}
    for place, given in values.items():
        low, high = np.mean(bounds[place], axis=0).tolist() if place in bounds else (math.nan, math.nan)
        found[place] = Aggregate(tuple(given), low, high, failed.get(place, 0))
    return found


def paired_difference(folder: StudyFolder, first: str, second: str, experiment: str | None = None) -> Difference:
    """How much better the second method is on the same test queries, paired by seed, fold and query.

    Values of a query are averaged over the draws that both have; the interval is over classes.
    """
    known = folder.study.names
    for name in (first, second):
        if name not in known:
            raise DataError(f"The study has no method '{name}'.{did_you_mean(name, known)}")
    outcomes, metric = folder.outcomes(), folder.study.metric
    runs: dict[str, dict[tuple[str, int], Path]] = {first: {}, second: {}}
    for trial in folder.trials:
        outcome = outcomes.get(trial.id)
        wanted = trial.method in runs and experiment in (None, trial.experiment)
        if wanted and outcome is not None and outcome.run is not None:
            runs[trial.method][trial.experiment, trial.draw] = Path(outcome.run)
    common = sorted(runs[first].keys() & runs[second].keys())
    if not common:
        raise DataError(f"{first} and {second} have no draw in common that is done.")
    means = [_mean_scores([runs[name][draw] for draw in common], metric) for name in (first, second)]
    return compare(means[0], means[1], metric)


def _mean_scores(paths: list[Path], metric: str) -> Scores:
    scores = [Scores.load(path / "per_query.npz") for path in paths]
    if any(not np.array_equal(other.labels, scores[0].labels) for other in scores):
        raise DataError("The draws were judged on different test classes, so queries cannot be averaged over them.")
    return Scores({metric: np.mean([s.per_query[metric] for s in scores], axis=0)}, scores[0].labels)
