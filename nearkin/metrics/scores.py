"""Evaluate embeddings: every retrieval metric at once, stored per query, with intervals and comparisons."""

import io
import json
import math
import os
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin._common.files import NPZ_ERRORS, atomic_write
from nearkin.errors import ConfigError, DataError, UnknownNameError, did_you_mean
from nearkin.metrics._problem import Progress, make_problem, parse_bytes
from nearkin.metrics._vectors import Floats
from nearkin.metrics.bootstrap import Difference, bootstrap, mean, paired_difference, percentiles
from nearkin.metrics.ranking import Ranking, assemble, count_hits, count_singletons_and_ties, data_notes
from nearkin.metrics.retrieval import evaluate_metric, metric_bounds

DRAWS = 2000


class Scores:
    """Metrics of a ranking: `scores["R@1"]` is a mean in [0, 1], `scores.per_query["R@1"]` the values behind it.

    Args:
        per_query: Values [Q] by metric; NaN for excluded queries.
        labels: [Q] labels of the queries.
        ks: The k of the listed metrics.
        singletons: How queries without relevant items are scored; see `score`.
        similarity: "cosine" or "euclidean".
        notes: Remarks on the data.

    Example:
        >>> scores = score([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]], ["a", "a", "b", "b"], ks=(1,))
        >>> scores["R@1"], scores["MAP@R"]
        (1.0, 1.0)
    """

    def __init__(
        self,
        per_query: Mapping[str, Floats],
        labels: NDArray[Any],
        *,
        ks: Sequence[int] = (),
        singletons: str = "auto",
        similarity: str = "cosine",
        notes: Sequence[str] = (),
    ) -> None:
        self.per_query = per_query
        self.labels = labels
        self.ks = tuple(int(k) for k in ks)
        self.singletons = singletons
        self.similarity = similarity
        self.notes = list(notes)
        self.classes, self.codes = np.unique(labels, return_inverse=True)
        self._bootstrapped: dict[str, Floats] = {}

    @staticmethod
    def of(ranking: Ranking, *, ks: Sequence[int] = (1, 2, 4, 8), singletons: str = "auto") -> "Scores":
        """Compute the scores of an existing ranking, with ks and singletons as in `score`."""
        values = _Values(dict.fromkeys(_metric_names(ks, singletons)), ranking, singletons)
        notes = [*ranking.notes, *_singleton_notes(values, ranking.total == 0, ks, singletons)]
        labels = ranking.classes[ranking.codes]
        return Scores(values, labels, ks=ks, singletons=singletons, similarity=ranking.similarity, notes=notes)

    def __getitem__(self, name: str) -> float:
        return mean(self.per_query[name])

    def __contains__(self, name: object) -> bool:
        return name in self.per_query

    def __iter__(self) -> Iterator[str]:
        return iter(self.per_query)

    def __len__(self) -> int:
        """The number of queries."""
        return len(self.labels)

    def __repr__(self) -> str:
        return f"Scores({', '.join(f'{name} {100 * self[name]:.2f}' for name in self.shown())}; {len(self):,} queries)"

    def shown(self) -> list[str]:
        """Return the names of the metrics in a table: recall at every k, and one of each other type."""
        top = [f"nDCG@{max(self.ks)}"] if self.ks else []
        names = [f"R@{k}" for k in self.ks] + ["RP", "MAP@R", *top, "MRR"]
        return [name for name in names if name in self.per_query]

    def means(self) -> dict[str, float]:
        """Return the mean of every listed metric by name."""
        return {name: self[name] for name in self.per_query}

    def interval(self, name: str, level: float = 0.95) -> tuple[float, float]:
        """Compute a confidence interval of the mean, by a cluster bootstrap over classes; NaN with a single class."""
        return self._intervals([name], level)[0]

    def bounds(self, name: str) -> tuple[float, float]:
        """Compute the lowest and highest mean over all orders of tied items; the ranking must be available."""
        ranking = getattr(self.per_query, "ranking", None)
        if ranking is None:
            raise ConfigError(
                "bounds: the ranking is not available: these scores were loaded, or the ranking exceeded `memory`. "
                "Score the embeddings again, if need be with a larger memory=."
            )
        low, high = metric_bounds(ranking, name, self.singletons)
        return mean(low), mean(high)

    def table(self, level: float = 0.95, metrics: Sequence[str] = ()) -> str:
        """Format means in percent with their intervals as plain text, followed by the notes; by default `shown()`."""
        names = list(metrics) or self.shown()
        lines = [f"{'metric':<10}{'mean %':>8}   {100 * level:g} % interval"]
        for name, (low, high) in zip(names, self._intervals(names, level), strict=True):
            interval = "-" if math.isnan(low) else f"{100 * low:.2f} to {100 * high:.2f}"
            lines.append(f"{name:<10}{100 * self[name]:>8.2f}   {interval}")
        classes = f"{len(self.classes):,} {'class' if len(self.classes) == 1 else 'classes'}"
        lines.append(f"{len(self):,} queries of {classes}, {self.similarity}")
        return "\n".join([*lines, *(f"Note: {note}" for note in self.notes)])

    def _intervals(self, names: list[str], level: float) -> list[tuple[float, float]]:
        if len(self.classes) < 2:
            return [(math.nan, math.nan)] * len(names)
        new = [name for name in names if name not in self._bootstrapped]
        if new:
            means = bootstrap(np.stack([self.per_query[name] for name in new]), self.codes, draws=DRAWS)
            self._bootstrapped |= dict(zip(new, means.T, strict=True))
        return [percentiles(self._bootstrapped[name], level) for name in names]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save one float64 array per metric, the labels and the settings to an .npz file."""
        about = {name: getattr(self, name) for name in ("ks", "singletons", "similarity", "notes")}
        labels = self.labels
        if labels.dtype == object:  # integers too large for int64
            labels, about["big"] = labels.astype(np.str_), True
        arrays: dict[str, Any] = {"labels": labels, "about": json.dumps(about), **self.per_query}
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)
        atomic_write(Path(path), buffer.getvalue())

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Scores":
        """Load scores written by `save`, without the ranking behind them. Nothing is unpickled."""
        arrays = _read_npz(path)
        if "about" not in arrays or "labels" not in arrays:
            raise DataError(
                f"{path}: not a file of saved scores (no arrays 'about' and 'labels'). Use a file written by save()."
            )
        labels = arrays.pop("labels")
        try:
            about = json.loads(str(arrays.pop("about")))
            if about.pop("big", False):
                labels = np.array([int(v) for v in labels], dtype=object)
            if "lone" in about:  # the former name of the setting and of its values
                old = about.pop("lone")
                about["singletons"] = {"drop": "exclude", "keep": "zero"}.get(old, old)
            return Scores(_Values(arrays), labels, **about)
        except (AttributeError, TypeError, ValueError) as error:
            raise DataError(f"{path}: saved scores with damaged settings ({error}).") from None


class _Values(UserDict[str, Any]):
    """Values by metric. With a ranking, any metric by name is computed on first use; None stands for one to come."""

    def __init__(self, values: Mapping[str, Any], ranking: Ranking | None = None, singletons: str = "auto") -> None:
        super().__init__(values)
        self.ranking, self._singletons = ranking, singletons

    def __getitem__(self, name: str) -> Floats:
        if self.data.get(name) is None:
            if self.ranking is None:
                hint = did_you_mean(name, self.data) or f" Available: {', '.join(self.data)}."
                fix = "The ranking was not stored; other k need ks= when scoring, or a larger memory=."
                raise UnknownNameError(f"No metric named '{name}' in these scores.{hint} {fix}")
            self.data[name] = evaluate_metric(self.ranking, name, self._singletons)
        values: Floats = self.data[name]
        return values


def score(
    query: Any,
    labels: Any,
    gallery: Any = None,
    gallery_labels: Any = None,
    *,
    ks: Sequence[int] = (1, 2, 4, 8),
    singletons: str = "auto",
    similarity: str = "cosine",
    groups: Any = None,
    gallery_groups: Any = None,
    memory: str | int = "1GB",
    backend: str = "auto",
    progress: Progress | None = None,
    verbose: bool | None = None,
) -> Scores:
    """Rank and evaluate: `score(emb, labels)` or `score(query, labels, gallery, gallery_labels)`.

    The arguments that are not explained here are those of `rank`.

    Args:
        query: [Q, D] array or tensor.
        labels: [Q] integers or strings; or bool [Q, T], where items that share a label are relevant.
        gallery: [G, D]; the query itself when omitted.
        gallery_labels: [G], or bool [G, T].
        ks: The k of the listed R@k, P@k, MAP@k and nDCG@k; any other k by name as long as the ranking fits `memory`.
        singletons: "exclude" excludes queries without relevant items, "zero" scores them 0, "auto" counts them as
            misses in R@k and P@k and excludes them from the metrics that divide by R.
        similarity: "cosine" or "euclidean".

    Returns:
        The scores.

    Example:
        >>> round(score([[1.0, 0.0], [0.9, 0.1], [0.8, 0.1]], [5, 5, 7])["R@1"], 4)
        0.3333
    """
    names = _metric_names(ks, singletons)
    problem = make_problem(query, labels, gallery, gallery_labels, similarity, groups, gallery_groups)
    budget = parse_bytes(memory)
    parts = count_hits(problem, budget, backend, progress, verbose)
    if 100 * problem.max_pairs <= budget:
        ranking = assemble(problem, list(parts))
        notes = tuple(data_notes(problem, *count_singletons_and_ties(ranking)))
        return Scores.of(replace(ranking, notes=notes), ks=ks, singletons=singletons)
    # Few but huge classes: the ranking would not fit, so each part is evaluated and discarded.
    values = {name: np.empty(len(problem.query)) for name in names}
    is_singleton, tied = np.zeros(len(problem.query), dtype=bool), 0
    for part in parts:
        ranking, index = assemble(problem, [part]), np.sort(part.queries)
        is_singleton[index] = ranking.total == 0
        tied += count_singletons_and_ties(ranking)[1]
        for name in names:
            values[name][index] = evaluate_metric(ranking, name, singletons)
    found = list(data_notes(problem, int(is_singleton.sum()), tied))
    found += _singleton_notes(values, is_singleton, ks, singletons)
    labels = problem.classes[problem.codes]
    return Scores(_Values(values), labels, ks=ks, singletons=singletons, similarity=similarity, notes=found)


def score_levels(
    query: Any, labels: Any, gallery: Any = None, gallery_labels: Any = None, **options: Any
) -> list[Scores]:
    """Score every level of a hierarchy of labels, such as species, genus and family.

    Args:
        query: [Q, D] array or tensor.
        labels: [Q, L] integers or strings, a column per level.
        gallery: [G, D]; the query itself when omitted.
        gallery_labels: [G, L].
        **options: As in `score`.

    Returns:
        The scores of each level, in the order of the columns.
    """
    first, second = np.asarray(labels), None if gallery_labels is None else np.asarray(gallery_labels)
    for name, levels in (("labels", first), ("gallery_labels", first if second is None else second)):
        if levels.ndim != 2 or levels.shape[1] != first.shape[1] or levels.dtype == bool:
            raise DataError(f"{name}: expected a column per level, [N, L]; got {levels.dtype} of shape {levels.shape}.")
    others = [None] * first.shape[1] if second is None else second.T
    return [score(query, own, gallery, other, **options) for own, other in zip(first.T, others, strict=True)]


def _metric_names(ks: Sequence[int], singletons: str) -> list[str]:
    if not all(isinstance(k, int | np.integer) and k >= 1 for k in ks):
        raise ConfigError(f"ks: expected integers of at least 1, got {tuple(ks)}.")
    if singletons not in ("auto", "exclude", "zero"):
        raise ConfigError(f"singletons: expected 'auto', 'exclude' or 'zero', got {singletons!r}.")
    return [f"{metric}@{k}" for metric in ("R", "P", "MAP", "nDCG") for k in ks] + ["RP", "MAP@R", "MAP", "MRR"]


def _singleton_notes(
    values: Mapping[str, Floats], is_singleton: NDArray[np.bool_], ks: Sequence[int], singletons: str
) -> Iterator[str]:
    if not is_singleton.any():
        return
    rule = {
        "auto": "R@k and P@k count them as misses, the other metrics exclude them",
        "exclude": "All metrics exclude them",
        "zero": "All metrics score them 0",
    }[singletons]
    both = [
        f"{name} {100 * mean(np.where(is_singleton, 0.0, values[name])):.2f} with them, "
        f"{100 * mean(values[name][~is_singleton]):.2f} without"
        for name in [*(f"R@{k}" for k in ks[:1]), "MAP@R"]
    ]
    yield f"{rule} (singletons='{singletons}'). {'; '.join(both)}."


def compare(
    first: Scores, second: Scores, name: str, *, level: float = 0.95, draws: int = DRAWS, seed: int = 0
) -> Difference:
    """Compare two models on the same queries, clustered by class.

    Args:
        first: Scores of the first model.
        second: Scores of the second model, on the same queries in the same order.
        name: The metric.
        level: Of the interval.
        draws: Number of bootstrap samples.
        seed: Of the random number generators.

    Returns:
        The difference (second minus first) with its interval and p-value.
    """
    if len(first) != len(second) or not np.array_equal(first.labels, second.labels):
        raise DataError(
            f"compare: the scores are of different queries ({len(first):,} and {len(second):,}, or other labels). "
            "Score both models on the same items in the same order."
        )
    values = first.per_query[name], second.per_query[name]
    return paired_difference(name, *values, first.codes, level=level, draws=draws, seed=seed)


def score_file(path: str | os.PathLike[str], *, ks: Sequence[int] = (1, 2, 4, 8), **options: Any) -> Scores:
    """Score the embeddings in an .npz file.

    Args:
        path: File with `embeddings` or `features` [N, D] and `labels` [N].
        ks: As in `score`.
        **options: As in `score`.

    Returns:
        The scores.

    Raises:
        DataError: The file cannot be read, or lacks one of the arrays.
    """
    arrays = _read_npz(path)
    emb = arrays.get("embeddings", arrays.get("features"))
    for name, array in (("'embeddings' or 'features'", emb), ("'labels'", arrays.get("labels"))):
        if array is None:
            raise DataError(f"{path}: no array named {name}; it contains {', '.join(arrays) or 'no arrays'}.")
    return score(emb, arrays["labels"], ks=ks, **options)


def _read_npz(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:  # np.load itself does not close a file that proves broken
            arrays = np.load(file, allow_pickle=False)
            if isinstance(arrays, np.lib.npyio.NpzFile):
                return {key: arrays[key] for key in arrays.files}
    except FileNotFoundError:
        raise DataError(f"{path}: no such file.") from None
    except NPZ_ERRORS as error:
        raise DataError(f"{path}: cannot be read as .npz without pickling ({error}).") from None
    raise DataError(f"{path}: a single array, expected several. Save them with np.savez(path, ...).")
