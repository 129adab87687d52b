"""Measure a set of embeddings: every retrieval metric at once, kept per query, with intervals and comparisons.

`score` gives Scores. What each metric means is said in retrieval.py, how intervals are made in bootstrap.py,
clustering metrics are in clustering.py.
"""

from __future__ import annotations

import io
import json
import math
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin._common.files import atomic_write
from nearkin.errors import ConfigError, DataError, UnknownNameError, did_you_mean
from nearkin.metrics._problem import Progress, as_bytes, make_problem
from nearkin.metrics.bootstrap import Difference, bootstrap, mean, paired_difference, percentiles
from nearkin.metrics.ranking import Ranking, assemble, count_hits, describe, tally
from nearkin.metrics.retrieval import evaluate_metric, metric_bounds

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
DRAWS = 2000


class Scores:
    """Metrics of a ranking: `scores["R@1"]` is a mean in [0, 1], `scores.per_query["R@1"]` the values behind it.

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
        lone: str = "auto",
        similarity: str = "cosine",
        notes: Sequence[str] = (),
    ) -> None:
        self.per_query = per_query
        self.labels = labels
        self.ks = tuple(int(k) for k in ks)
        self.lone = lone
        self.similarity = similarity
        self.notes = list(notes)
        self.classes, self.codes = np.unique(labels, return_inverse=True)
        self._drawn: dict[str, Floats] = {}

    @staticmethod
    def of(ranking: Ranking, *, ks: Sequence[int] = (1, 2, 4, 8), lone: str = "auto") -> Scores:
        """The scores of a ranking made earlier with `rank`; settings as for `score`."""
        values = _Lazy(ranking, _names(ks, lone), lone)
        notes = [*ranking.notes, *_about_lone(values, ranking.total == 0, ks, lone)]
        labels = ranking.classes[ranking.codes]
        return Scores(values, labels, ks=ks, lone=lone, similarity=ranking.similarity, notes=notes)

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
        """The metrics a table shows: recall at every k, and one of each other kind."""
        top = [f"nDCG@{max(self.ks)}"] if self.ks else []
        names = [f"R@{k}" for k in self.ks] + ["RP", "MAP@R", *top, "MRR"]
        return [name for name in names if name in self.per_query]

    def means(self) -> dict[str, float]:
        return {name: self[name] for name in self.per_query}

    def interval(self, name: str, level: float = 0.95) -> tuple[float, float]:
        """Where the mean may lie if other classes of the same kind had been drawn (cluster bootstrap over classes)."""
        return self._intervals([name], level)[0]

    def bounds(self, name: str) -> tuple[float, float]:
        """The lowest and highest mean over all orders of tied items. Needs the ranking, so not after `load`."""
        if not isinstance(self.per_query, _Lazy):
            raise ConfigError(
                "bounds: the ranking was not kept: these scores were loaded, or its pairs exceed `memory`. "
                "Score the embeddings again, with a larger memory= if it must be."
            )
        low, high = metric_bounds(self.per_query.ranking, name, self.lone)
        return mean(low), mean(high)

    def table(self, level: float = 0.95) -> str:
        """Means in percent with their intervals, as plain text."""
        names = self.shown()
        lines = [f"{'metric':<10}{'mean %':>8}   {100 * level:g} % interval"]
        for name, (low, high) in zip(names, self._intervals(names, level), strict=True):
            reach = "-" if math.isnan(low) else f"{100 * low:.2f} to {100 * high:.2f}"
            lines.append(f"{name:<10}{100 * self[name]:>8.2f}   {reach}")
        count_hits = len(self.classes)
        lines.append(
            f"{len(self):,} queries of {count_hits:,} {'class' if count_hits == 1 else 'classes'}, {self.similarity}"
        )
        return "\n".join([*lines, *(f"Note: {note}" for note in self.notes)])

    def _intervals(self, names: list[str], level: float) -> list[tuple[float, float]]:
        if len(self.classes) < 2:
            return [(math.nan, math.nan)] * len(names)
        new = [name for name in names if name not in self._drawn]
        if new:
            drawn = bootstrap(np.stack([self.per_query[name] for name in new]), self.codes, draws=DRAWS)
            self._drawn |= dict(zip(new, drawn.T, strict=True))
        return [percentiles(self._drawn[name], level) for name in names]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one float64 array per metric, the labels and a description to an .npz file."""
        target = Path(path)
        about: dict[str, Any] = {"ks": self.ks, "lone": self.lone, "similarity": self.similarity, "notes": self.notes}
        labels = self.labels
        if labels.dtype == object:  # integers too large for int64
            labels, about["big"] = labels.astype(np.str_), True
        arrays: dict[str, Any] = {"labels": labels, "about": json.dumps(about), **self.per_query}
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)
        atomic_write(target, buffer.getvalue())

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Scores:
        """Read what `save` wrote. Nothing is unpickled."""
        arrays = _read_npz(path)
        if "about" not in arrays or "labels" not in arrays:
            raise DataError(
                f"{path}: not saved scores (no 'about' and 'labels' inside). Give a file that save() wrote."
            )
        labels = arrays.pop("labels")
        try:
            about = json.loads(str(arrays.pop("about")))
            if about.pop("big", False):
                labels = np.array([int(v) for v in labels], dtype=object)
            return Scores(_Known(arrays), labels, **about)
        except (AttributeError, TypeError, ValueError) as error:
            raise DataError(f"{path}: saved scores with a damaged description ({error}).") from None


class _Known(Mapping[str, Floats]):
    """Values that were computed earlier; a name that was not says so."""

    def __init__(self, values: dict[str, Floats]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> Floats:
        if name not in self._values:
            hint = did_you_mean(name, self._values) or f" There are: {', '.join(self._values)}."
            cure = "The ranking behind them was not kept; other k need ks= when scoring, or a larger memory=."
            raise UnknownNameError(f"No metric named '{name}' in these scores.{hint} {cure}")
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class _Lazy(Mapping[str, Floats]):
    """Values computed from a ranking when first asked for; any metric by name, the listed ones when walked over."""

    def __init__(self, ranking: Ranking, names: list[str], lone: str) -> None:
        self.ranking = ranking
        self._names = names
        self._lone = lone
        self._values: dict[str, Floats] = {}

    def __getitem__(self, name: str) -> Floats:
        if name not in self._values:
            self._values[name] = evaluate_metric(self.ranking, name, self._lone)
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names or name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._names, *self._values]))

    def __len__(self) -> int:
        return len(dict.fromkeys([*self._names, *self._values]))


def score(
    query: Any,
    labels: Any,
    gallery: Any = None,
    gallery_labels: Any = None,
    *,
    ks: Sequence[int] = (1, 2, 4, 8),
    lone: str = "auto",
    similarity: str = "cosine",
    groups: Any = None,
    g_groups: Any = None,
    memory: str | int = "1GB",
    path: str = "auto",
    progress: Progress | None = None,
    verbose: bool | None = None,
) -> Scores:
    """Rank and measure: `score(emb, labels)`, or `score(query, labels, gallery, labels)`. Arguments as for `rank`.

    ks    the k of R@k, P@k, MAP@k and nDCG@k that are listed; any other can still be asked for by name, as long as
          the ranking fits `memory` (few but huge classes may not).
    lone  what a query counts that has no relevant item (its class has one image): "auto" counts it as a miss in R@k
          and P@k and leaves it out of the metrics that divide by R, "drop" leaves it out of all, "keep" scores it 0.

    >>> round(score([[1.0, 0.0], [0.9, 0.1], [0.8, 0.1]], [5, 5, 7])["R@1"], 4)
    0.3333
    """
    names = _names(ks, lone)
    task = make_problem(query, labels, gallery, gallery_labels, similarity, groups, g_groups)
    budget = as_bytes(memory)
    parts = count_hits(task, budget, path, progress, verbose)
    if 100 * task.pairs <= budget:
        ranking = assemble(task, list(parts))
        notes = tuple(describe(task, *tally(ranking)))
        return Scores.of(replace(ranking, notes=notes), ks=ks, lone=lone)
    # Few but huge classes: the ranking would not fit, so each part is measured and forgotten.
    values = {name: np.empty(len(task.query)) for name in names}
    without, tied = np.zeros(len(task.query), dtype=bool), 0
    for part in parts:
        ranking, at = assemble(task, [part]), np.sort(part.queries)
        without[at] = ranking.total == 0
        tied += tally(ranking)[1]
        for name in names:
            values[name][at] = evaluate_metric(ranking, name, lone)
    return Scores(
        _Known(values),
        task.classes[task.codes],
        ks=ks,
        lone=lone,
        similarity=similarity,
        notes=[*describe(task, int(without.sum()), tied), *_about_lone(values, without, ks, lone)],
    )


def _names(ks: Sequence[int], lone: str) -> list[str]:
    if not all(isinstance(k, int | np.integer) and k >= 1 for k in ks):
        raise ConfigError(f"ks: expected whole numbers from 1, got {tuple(ks)}.")
    if lone not in ("auto", "drop", "keep"):
        raise ConfigError(f"lone: expected 'auto', 'drop' or 'keep', got {lone!r}.")
    return [f"{kind}@{k}" for kind in ("R", "P", "MAP", "nDCG") for k in ks] + ["RP", "MAP@R", "MAP", "MRR"]


def _about_lone(
    values: Mapping[str, Floats], without: NDArray[np.bool_], ks: Sequence[int], lone: str
) -> Iterator[str]:
    if not without.any():
        return
    rule = {
        "auto": "R@k and P@k count them as misses, the others leave them out (lone='auto').",
        "drop": "All metrics leave them out (lone='drop').",
        "keep": "All metrics score them 0 (lone='keep').",
    }[lone]
    both = [
        f"{name} {100 * mean(np.where(without, 0.0, values[name])):.2f} with them, "
        f"{100 * mean(values[name][~without]):.2f} without"
        for name in [*(f"R@{k}" for k in ks[:1]), "MAP@R"]
    ]
    yield f"{rule} {'; '.join(both)}."


def compare(
    first: Scores, second: Scores, name: str, *, level: float = 0.95, draws: int = DRAWS, seed: int = 0
) -> Difference:
    """How much better the second model is on the same queries: difference, interval, p-value, clustered by class.

    >>> a = score([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]], ["a", "a", "b", "b"])
    >>> compare(a, a, "R@1").difference
    0.0
    """
    if len(first) != len(second) or not np.array_equal(first.labels, second.labels):
        raise DataError(
            f"compare: the scores are not of the same queries ({len(first):,} and {len(second):,}, or other labels). "
            "Score both models on the same items in the same order."
        )
    values = first.per_query[name], second.per_query[name]
    return paired_difference(name, *values, first.codes, level=level, draws=draws, seed=seed)


def score_file(path: str | os.PathLike[str], *, ks: Sequence[int] = (1, 2, 4, 8), **options: Any) -> Scores:
    """Score an .npz file that holds `features` or `embeddings` [N, D] and `labels` [N]. Options as for `score`."""
    arrays = _read_npz(path)
    holds = ", ".join(arrays) or "nothing"
    found = [key for key in ("embeddings", "features") if key in arrays]
    if not found:
        raise DataError(f"{path}: no array named 'embeddings' or 'features'; it holds {holds}.")
    if "labels" not in arrays:
        raise DataError(f"{path}: no array named 'labels'; it holds {holds}.")
    return score(arrays[found[0]], arrays["labels"], ks=ks, **options)


def _read_npz(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise DataError(f"{path}: one array, expected an .npz with several. Save with np.savez(path, ...).")
        with file:
            return {key: file[key] for key in file.files}
    except FileNotFoundError:
        raise DataError(f"{path}: no such file.") from None
    except DataError:
        raise
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: cannot be read as .npz without pickling ({error}).") from None
