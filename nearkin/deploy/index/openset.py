"""Open-set recognition: a similarity threshold with a stated false-accept rate.

A query is *known* if the similarity of its nearest item exceeds the threshold. A *false accept* is a query of a class
missing from the index that is called known.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin.deploy.index.search import Floats, Ints, Vectors, blocks, normalize_rows
from nearkin.errors import ConfigError, DataError
from nearkin.metrics.bootstrap import bootstrap, percentiles

BOOTSTRAP_SAMPLES = 1000
MAX_QUERIES = 2000  # a random sample of the items
Interval = tuple[float, float]


@dataclass(frozen=True)
class Threshold:
    value: float  # a query is known if the cosine of its nearest item is above this
    false_accept: float  # target false-accept rate
    # 95 % interval of the rate on classes that did not set the threshold; None for one class
    false_accept_interval: Interval | None
    true_accept: float  # fraction of the queries of known classes that are called known
    true_accept_interval: Interval | None  # its 95 % interval; None for one class
    known_queries: int  # number of queries of classes in the index
    unknown_queries: int  # number of queries of held-out classes
    unknown_classes: int  # number of classes of those
    half_rate: float = 0.0  # the false-accept rate at which half of the known queries are called known

    def accepts(self, similarity: float) -> bool:
        return similarity > self.value

    def __str__(self) -> str:
        lines = [
            f"threshold: an image is known if its highest similarity is above {self.value:.4f}",
            f"  false accepts: at most {self.false_accept:.2%} of {self.unknown_queries:,} queries of "
            f"{self.unknown_classes:,} unknown classes"
            f"{_format_interval(self.false_accept_interval, ' on other classes')}",
            f"  true accepts: {self.true_accept:.1%} of {self.known_queries:,} queries of known classes"
            f"{_format_interval(self.true_accept_interval)}",
        ]
        if self.true_accept < 0.5:
            half = f"about half with --false-accept-rate {max(self.half_rate, 0.01):.2f}"
            lines.append(f"  {1 - self.true_accept:.0%} of the known queries would be called unknown; {half}")
        if self.unknown_queries * self.false_accept < 1:
            too_few = f"{self.unknown_queries:,} unknown queries are too few for this rate"
            lines.append(f"{too_few}; the threshold is their highest similarity.")
        return "\n".join(lines)


def _format_interval(interval: Interval | None, suffix: str = "") -> str:
    return "" if interval is None else f" ({interval[0]:.2%} to {interval[1]:.2%}{suffix})"


def check_rate(false_accept: float, name: str = "false_accept") -> None:
    if not 0 <= false_accept < 1:
        raise ConfigError(f"{name}: expected a fraction from 0 to below 1, for example 0.01; got {false_accept}.")


def calibrate(
    query_sims_known: Any,
    query_sims_unknown: Any,
    false_accept: float = 0.01,
    *,
    known_classes: Sequence[Any] | None = None,
    unknown_classes: Sequence[Any] | None = None,
) -> Threshold:
    """Find the lowest threshold that accepts at most the given fraction of the unknown queries.

    The interval of the false-accept rate comes from a bootstrap over classes: the threshold is set on the sampled
    classes and the rate measured on the others, so it predicts the rate on classes that took no part in calibration.
    """
    check_rate(false_accept)
    known, unknown = _as_similarities(query_sims_known, "known"), _as_similarities(query_sims_unknown, "unknown")
    known_codes, unknown_codes = _class_codes(known_classes, len(known)), _class_codes(unknown_classes, len(unknown))
    value = _threshold_value(unknown, false_accept)
    accepted = (known > value).astype(np.float64)
    samples = bootstrap(accepted[None], known_codes, draws=BOOTSTRAP_SAMPLES)[:, 0]
    return Threshold(
        value=value,
        false_accept=false_accept,
        false_accept_interval=_false_accept_interval(unknown, unknown_codes, false_accept),
        true_accept=float(accepted.mean()),
        true_accept_interval=percentiles(samples, 0.95) if len(np.unique(known_codes)) > 1 else None,
        known_queries=len(known),
        unknown_queries=len(unknown),
        unknown_classes=len(np.unique(unknown_codes)),
        half_rate=math.ceil(100 * float((unknown > np.median(known)).mean())) / 100,
    )


def leave_class_out(vectors: Vectors, labels: Sequence[Any], queries: Ints) -> tuple[Floats, Floats]:
    """Compute each query's highest cosine with its class in the index, and with its class removed."""
    _, codes = np.unique(np.array([str(label) for label in labels]), return_inverse=True)
    codes[[label is None for label in labels]] = codes.max(initial=-1) + 1  # apart from a class named "None"
    known, unknown = np.full(len(queries), -np.inf), np.full(len(queries), -np.inf)
    query_units = normalize_rows(vectors[queries])
    for start, block in blocks(vectors):
        units = normalize_rows(block)
        for part in np.array_split(np.arange(len(queries)), max(1, len(queries) // 256)):
            cosines = query_units[part] @ units.T
            other_class = codes[queries[part]][:, None] != codes[start : start + len(block)][None, :]
            is_self = queries[part][:, None] == np.arange(start, start + len(block))[None, :]
            unknown[part] = np.maximum(unknown[part], np.where(other_class, cosines, -np.inf).max(axis=1))
            known[part] = np.maximum(known[part], np.where(is_self, -np.inf, cosines).max(axis=1))
    known[np.bincount(codes)[codes[queries]] == 1] = np.nan
    return known, np.where(np.isfinite(unknown), unknown, np.nan)


def calibrate_items(vectors: Vectors, labels: Sequence[Any], queries: Ints, false_accept: float = 0.01) -> Threshold:
    """Calibrate with labelled items as queries: known among all others, unknown among those of other or no class."""
    if len(queries) > MAX_QUERIES:
        queries = np.sort(np.random.default_rng(0).choice(queries, MAX_QUERIES, replace=False))
    known, unknown = leave_class_out(vectors, labels, queries)
    names = np.array([str(labels[row]) for row in queries])
    has_known, has_unknown = ~np.isnan(known), ~np.isnan(unknown)
    if len(np.unique(names[has_unknown])) < 2 or not has_known.any():
        raise DataError(
            "calibrate: needs labelled items of at least two classes that were not trained on, one of them with two "
            f"images; got {len(np.unique(names))} such classes."
        )
    return calibrate(
        known[has_known],
        unknown[has_unknown],
        false_accept,
        known_classes=names[has_known].tolist(),
        unknown_classes=names[has_unknown].tolist(),
    )


def _threshold_value(unknown: Floats, false_accept: float) -> float:
    """Return the lowest of the similarities that at most the given fraction exceed; ties with it are rejected."""
    allowed = math.floor(false_accept * len(unknown) + 1e-9)  # 0.07 * 100 is slightly below 7
    return float(np.sort(unknown)[::-1][allowed])


def _false_accept_interval(unknown: Floats, codes: Ints, false_accept: float) -> Interval | None:
    """Bootstrap over classes: set the threshold on the sampled classes, measure the rate on the others."""
    classes = np.unique(codes)
    if len(classes) < 2:
        return None
    members = [np.flatnonzero(codes == c) for c in classes]
    rng = np.random.default_rng(0)
    rates = []
    for _ in range(BOOTSTRAP_SAMPLES):
        sampled = rng.integers(0, len(classes), len(classes))
        held_out = np.setdiff1d(np.arange(len(classes)), sampled)
        if len(held_out):
            value = _threshold_value(unknown[np.concatenate([members[c] for c in sampled])], false_accept)
            rates.append(float((unknown[np.concatenate([members[c] for c in held_out])] > value).mean()))
    return percentiles(np.array(rates), 0.95)


def _as_similarities(values: Any, what: str) -> Floats:
    sims: NDArray[Any] = np.asarray(values, np.float64)
    if sims.ndim != 1 or not len(sims):
        raise DataError(f"{what} similarities: expected one number per query, got shape {list(sims.shape)}.")
    if not np.isfinite(sims).all():
        raise DataError(f"{what} similarities: NaN or infinity, first at index {int(np.argmax(~np.isfinite(sims)))}.")
    return sims


def _class_codes(classes: Sequence[Any] | None, count: int) -> Ints:
    if classes is None:
        return np.arange(count)
    if len(classes) != count:
        raise DataError(f"classes: expected one per similarity, got {len(classes)} for {count}.")
    return np.asarray(np.unique([str(name) for name in classes], return_inverse=True)[1])
