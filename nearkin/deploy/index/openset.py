"""When nothing in the index is like the query: a threshold with a stated chance of being wrong.

A query is *known* when its nearest item is more similar than the threshold. A *false accept* is a query of a class that
the index does not hold and that is called known. The threshold is set on queries whose answer is known, to a stated
rate of false accepts, and both rates are given with intervals over classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin.deploy.index.search import Floats, Ints, Vectors, blocks, unit_rows
from nearkin.errors import ConfigError, DataError
from nearkin.metrics.bootstrap import bootstrap, percentiles

DRAWS = 1000


@dataclass(frozen=True)
class Threshold:
    """value: a query is known when its nearest item's cosine is above it.

    false_accept: the rate that was asked for; false_accept_range: the rate on classes that did not set the threshold
    (95 % of the draws). accepted: the share of queries of known classes that are called known, with its interval.
    """

    value: float
    false_accept: float
    false_accept_range: tuple[float, float] | None  # None with one class: nothing varies
    accepted: float
    accepted_range: tuple[float, float] | None
    known: int  # queries of classes in the index
    unknown: int  # queries of classes held out
    classes: int  # of the unknown queries

    def accepts(self, similarity: float) -> bool:
        return similarity > self.value

    def __str__(self) -> str:
        lines = [
            f"known above {self.value:.4f}: passed by at most {self.false_accept:.2%} of {self.unknown:,} unknown "
            f"queries of {self.classes:,} classes{_reach(self.false_accept_range, ' on other classes')} and by "
            f"{self.accepted:.1%} of {self.known:,} known ones{_reach(self.accepted_range)}"
        ]
        if self.unknown * self.false_accept < 1:
            lines.append(f"{self.unknown:,} unknown queries are too few for that rate; the threshold is their highest.")
        return "\n".join(lines)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Threshold:
        """What `dataclasses.asdict` made, also by way of JSON, which has lists for tuples."""
        ranges = {name: values[name] and tuple(values[name]) for name in ("false_accept_range", "accepted_range")}
        return cls(**{**values, **ranges})


def _reach(interval: tuple[float, float] | None, what: str = "") -> str:
    return "" if interval is None else f" ({interval[0]:.2%} to {interval[1]:.2%}{what})"


def check_rate(false_accept: float, name: str = "false_accept") -> None:
    if not 0 <= false_accept < 1:
        raise ConfigError(f"{name}: expected a share from 0 to below 1, for example 0.01; got {false_accept}.")


def calibrate(
    query_sims_known: Any,
    query_sims_unknown: Any,
    false_accept: float = 0.01,
    *,
    known_classes: Sequence[Any] | None = None,
    unknown_classes: Sequence[Any] | None = None,
    seed: int = 0,
) -> Threshold:
    """The lowest threshold that at most this share of the unknown queries pass.

    query_sims_known: [N] similarity to the nearest item of queries whose class is in the index.
    query_sims_unknown: [M] the same of queries whose class is not.
    known_classes, unknown_classes: the class of each, so that intervals are over classes; without them every query
    counts as a class of its own, and the intervals are too narrow if queries come in kinds.

    The range of the false-accept rate comes from drawing classes with replacement: the threshold is set on those drawn
    and the rate measured on those not drawn, so it says what to expect of classes that had no part in it.

    >>> calibrate([0.9, 0.8], [0.1, 0.2, 0.3, 0.4], false_accept=0.25).value
    0.3
    """
    check_rate(false_accept)
    known, unknown = _similarities(query_sims_known, "known"), _similarities(query_sims_unknown, "unknown")
    known_codes, unknown_codes = _codes(known_classes, len(known)), _codes(unknown_classes, len(unknown))
    value = _value(unknown, false_accept)
    accepted = (known > value).astype(np.float64)
    drawn = bootstrap(accepted[None], known_codes, draws=DRAWS, seed=seed)[:, 0]
    several = len(np.unique(known_codes)) > 1
    return Threshold(
        value=value,
        false_accept=false_accept,
        false_accept_range=_elsewhere(unknown, unknown_codes, false_accept, seed),
        accepted=float(accepted.mean()),
        accepted_range=percentiles(drawn, 0.95) if several else None,
        known=len(known),
        unknown=len(unknown),
        classes=len(np.unique(unknown_codes)),
    )


def leave_class_out(vectors: Vectors, labels: Sequence[Any], queries: Ints) -> tuple[Floats, Floats]:
    """For each query row, the cosine of its nearest other item, and of its nearest item of another class.

    The first is what the query sees (NaN where its class has no other item: then it is not known), the second what it
    would see were its class not in the index (NaN where there is no other class). Every item is compared; one whose
    label is None is of another class than any query.
    """
    _, codes = np.unique(np.array([str(label) for label in labels]), return_inverse=True)
    codes[[label is None for label in labels]] = codes.max(initial=-1) + 1  # a class may be called "None"
    known, unknown = np.full(len(queries), -np.inf), np.full(len(queries), -np.inf)
    asking = unit_rows(vectors[queries])
    for start, block in blocks(vectors):
        units = unit_rows(block)
        for part in np.array_split(np.arange(len(queries)), max(1, len(queries) // 256)):
            cosines = asking[part] @ units.T
            foreign = codes[queries[part]][:, None] != codes[start : start + len(block)][None, :]
            itself = queries[part][:, None] == np.arange(start, start + len(block))[None, :]
            unknown[part] = np.maximum(unknown[part], np.where(foreign, cosines, -np.inf).max(axis=1))
            known[part] = np.maximum(known[part], np.where(itself, -np.inf, cosines).max(axis=1))
    known[np.bincount(codes)[codes[queries]] == 1] = np.nan
    return known, np.where(np.isfinite(unknown), unknown, np.nan)


def calibrate_items(
    vectors: Vectors, labels: Sequence[Any], queries: Ints, false_accept: float = 0.01, *, most: int = 2000
) -> Threshold:
    """A threshold from labelled items that ask each other; `queries` are rows of classes that were not trained on.

    As known, each query asks all other items. As unknown, it asks all items of other classes, those without a label
    among them: to take one of its own class for another only raises the threshold. What is estimated is
    the chance that an image of a class missing from this index passes for one that is there, if missing classes are
    like those that asked here, and the pictures are taken alike. A draw of `most` queries is asked.
    """
    if len(queries) > most:
        queries = np.sort(np.random.default_rng(0).choice(queries, most, replace=False))
    known, unknown = leave_class_out(vectors, labels, queries)
    names = np.array([str(labels[row]) for row in queries])
    inside, foreign = ~np.isnan(known), ~np.isnan(unknown)
    if len(np.unique(names[foreign])) < 2 or not inside.any():
        raise DataError(
            "calibrate: needs labelled items of at least two classes that were not trained on, one of them with two "
            f"images; got {len(np.unique(names))} such classes."
        )
    return calibrate(
        known[inside],
        unknown[foreign],
        false_accept,
        known_classes=names[inside].tolist(),
        unknown_classes=names[foreign].tolist(),
    )


def _value(unknown: Floats, false_accept: float) -> float:
    """The similarity that at most the given share lie above: one of them, so that ties with it are refused."""
    allowed = math.floor(false_accept * len(unknown) + 1e-9)  # 0.07 * 100 is a hair under 7
    return float(np.sort(unknown)[::-1][allowed])


def _elsewhere(unknown: Floats, codes: Ints, false_accept: float, seed: int) -> tuple[float, float] | None:
    classes = np.unique(codes)
    if len(classes) < 2:
        return None
    members = [np.flatnonzero(codes == c) for c in classes]
    rng = np.random.default_rng(seed)
    rates = []
    for _ in range(DRAWS):
        drawn = rng.integers(0, len(classes), len(classes))
        left = np.setdiff1d(np.arange(len(classes)), drawn)
        if len(left):
            value = _value(unknown[np.concatenate([members[c] for c in drawn])], false_accept)
            rates.append(float((unknown[np.concatenate([members[c] for c in left])] > value).mean()))
    return percentiles(np.array(rates), 0.95)


def _similarities(values: Any, what: str) -> Floats:
    given: NDArray[Any] = np.asarray(values, np.float64)
    if given.ndim != 1 or not len(given):
        raise DataError(f"{what} similarities: expected one number per query, got shape {list(given.shape)}.")
    if not np.isfinite(given).all():
        raise DataError(
            f"{what} similarities: NaN or infinity among them (first: {int(np.argmax(~np.isfinite(given)))})."
        )
    return given


def _codes(classes: Sequence[Any] | None, count: int) -> Ints:
    if classes is None:
        return np.arange(count)
    if len(classes) != count:
        raise DataError(f"classes: {len(classes)} for {count} similarities; expected one each.")
    return np.asarray(np.unique([str(name) for name in classes], return_inverse=True)[1])
