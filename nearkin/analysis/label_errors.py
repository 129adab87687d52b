"""Label errors: each row is compared with the mean of the *other* rows of its class, and with those of other classes.

A row never supports its own label: the whitening within classes is fitted without it too. See docs/label-errors.md.
"""

import csv
import io
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin._common.files import atomic_write
from nearkin.errors import ConfigError, DataError
from nearkin.metrics._problem import Progress, as_labels, encode, parse_bytes
from nearkin.metrics._vectors import as_matrix
from nearkin.ops.geometry import unit

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SHRINKAGES = (0.1, 0.3, 0.5, 0.7, 0.9)  # of the within-class covariance towards a multiple of the identity
TEMPERATURES = tuple(float(t) for t in np.geomspace(2.0, 200.0, 16))
_TUNING_ROWS = 2000  # rows used to choose shrinkage and temperature
_CHUNK = 8192  # rows converted to float64 at a time


@dataclass(frozen=True)
class LabelErrors:
    """The result of `find_label_errors`, row by row.

    Attributes:
        score: [N] log odds that the label is wrong; NaN for singletons, whose class has no other rows.
        probability: [N] the same as a probability. Calibrated for random label errors; see docs/label-errors.md.
        suggested: [N] the most similar class other than the label.
        order: [N] rows, most probable errors first; singletons last.
        labels: [N] the given labels.
        error_rate: Estimated fraction of wrong labels; 0.5 means that these embeddings do not separate the classes.
    """

    score: Floats
    probability: Floats
    suggested: NDArray[Any]
    order: Ints
    labels: NDArray[Any]
    error_rate: float

    def __len__(self) -> int:
        return len(self.order)

    @property
    def rank(self) -> Ints:
        """[N] rank of each row in the order, from 1."""
        out = np.empty(len(self.order), dtype=np.int64)
        out[self.order] = np.arange(1, len(self.order) + 1)
        return out

    def expected(self, top: int) -> float:
        """Return the expected number of wrong labels among the first `top` rows."""
        return float(np.nansum(self.probability[self.order[:top]]))

    def to_csv(
        self,
        path: str | os.PathLike[str] | None,
        *,
        paths: Sequence[Any] | None = None,
        class_names: Sequence[str] | Mapping[Any, str] | None = None,
        top: int | None = None,
    ) -> bytes:
        """Write the rows to a CSV file, most probable errors first, and return its content.

        Args:
            path: The file to write, if any.
            paths: [N] image files, for a column `path`.
            class_names: Names by label: a mapping, or a sequence indexed by integer labels.
            top: Number of rows; all when omitted.
        """
        if paths is not None and len(paths) != len(self):
            raise DataError(f"paths: {len(paths)} for {len(self)} rows. Give one path per row, in the same order.")
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(
            ["rank", "row", *([] if paths is None else ["path"]), "label", "suggested", "score", "probability"]
        )
        for rank, row in enumerate(self.order[:top].tolist(), start=1):
            file_name = [] if paths is None else [str(paths[row])]
            names = [_class_name(label[row], class_names) for label in (self.labels, self.suggested)]
            numbers = [f"{value[row]:.4f}" for value in (self.score, self.probability)]
            writer.writerow([rank, row, *map(_escape_formula, file_name + names), *numbers])
        content = text.getvalue().encode("utf-8", "replace")  # file names may not be valid Unicode
        if path is not None:
            atomic_write(Path(path), content)
        return content


def _class_name(label: Any, names: Sequence[str] | Mapping[Any, str] | None) -> str:
    label = label.item() if isinstance(label, np.generic) else label
    if names is None:
        return str(label)
    try:
        if not isinstance(names, Mapping) and label < 0:  # would index the sequence from its end
            raise IndexError
        return str(names[label])
    except (IndexError, KeyError, TypeError):
        raise DataError(f"class_names: no name for label {label!r}. Give a name for every label.") from None


# Includes the full-width forms that some spreadsheets treat alike, and the whitespace that they skip.
_FORMULA_PREFIXES = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")


def _escape_formula(cell: str) -> str:
    """Prevent spreadsheets from evaluating a cell as a formula."""
    return f"'{cell}" if cell.lstrip(" ").startswith(_FORMULA_PREFIXES) else cell


def find_label_errors(
    emb: Any, labels: Any, *, folds: int = 5, seed: int = 0, memory: str | int = "1GB", progress: Progress | None = None
) -> LabelErrors:
    """Rank the rows by the probability that their label is wrong.

    Args:
        emb: [N, D] features or embeddings. For a network trained on these labels use out-of-fold embeddings (each row
            from a network that was not trained on it), as networks memorise wrong labels.
        labels: [N] integers or strings, at least two classes.
        folds: Number of folds; the whitening applied to a fold is fitted on the others.
        seed: Of the assignment to folds.
        memory: Maximum extra memory beside copies of the vectors, for example "1GB".
        progress: Called with the fraction done.

    Returns:
        Scores, probabilities and suggested classes.

    Raises:
        DataError: One class only, or only singletons.
    """
    if folds < 2:
        raise ConfigError(f"folds: expected at least 2, got {folds}.")
    x = as_matrix(emb, "embeddings").float()
    given = as_labels(labels, len(x), "labels", "embeddings")
    codes, _, classes = encode(given, None, "labels")
    if len(classes) < 2:
        raise DataError("labels: all rows are of one class. Finding label errors needs at least two.")
    scorable = np.bincount(codes)[codes] > 1
    if not scorable.any():
        raise DataError("labels: every class has one row. A label is compared with other rows of its class.")
    x = unit(x)
    x -= x.mean(0)
    y = torch.as_tensor(codes, device=x.device)
    fold = torch.as_tensor(np.random.default_rng(seed).permutation(len(x)) % folds, device=x.device)
    step = max(1, min(4096, parse_bytes(memory) // 2 // (16 * len(classes))))
    data = _FoldedData(x, y, len(classes), fold, folds, step)
    every = torch.arange(len(x), device=x.device)
    exact_sums, count = _class_sums(data, every)
    sums, within = exact_sums.float(), _within_class_covariance(data)
    shrinkage, temperature = _choose_hyperparameters(data, sums, count, within)
    log_odds, suggested, done = np.empty(len(x)), np.empty(len(x), dtype=np.int64), 0
    for rows, sim in _similarities(data, every, sums, within, shrinkage):
        index, own = rows.cpu().numpy(), y[rows, None]
        suggested[index] = sim.scatter(1, own, -math.inf).argmax(1).cpu().numpy()
        log_odds[index] = _log_odds(sim, own, temperature)
        done += len(rows)
        if progress:
            progress(done / len(x))
    log_odds[~scorable] = math.nan
    # At least half a row: at 0 all scores would be equal.
    error_rate = max(_fit_error_rate(log_odds[scorable], len(classes)), 0.5 / len(x))
    score = log_odds + math.log(error_rate / (1 - error_rate) / (len(classes) - 1))
    probability = 1 / (1 + np.exp(-score))
    order = np.argsort(-score, kind="stable")  # NaN goes last
    return LabelErrors(score, probability, classes[suggested], order, given, float(probability[scorable].mean()))


class _FoldedData(NamedTuple):
    x: Tensor  # [N, D] centred unit vectors
    y: Tensor  # [N] class codes
    classes: int
    fold: Tensor  # [N]
    folds: int
    step: int  # rows whose similarities to all classes, with temporaries, fit the budget


def _class_sums(data: _FoldedData, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Sums [C, D] in float64 and counts [C] of some rows."""
    sums = torch.zeros(data.classes, data.x.shape[1], dtype=torch.float64, device=data.x.device)
    for chunk in torch.split(rows, _CHUNK):
        sums.index_add_(0, data.y[chunk], data.x[chunk].double())
    return sums, torch.bincount(data.y[rows], minlength=data.classes)


def _within_class_covariance(data: _FoldedData) -> Tensor:
    """[folds, D, D] within-class covariance of the rows outside each fold, scaled to a mean variance of 1."""
    dim = data.x.shape[1]
    scatter = torch.zeros(data.folds, dim, dim, dtype=torch.float64, device=data.x.device)
    for f in range(data.folds):
        for rows in torch.split(torch.nonzero(data.fold == f).flatten(), _CHUNK):
            part = data.x[rows].double()
            scatter[f].addmm_(part.T, part)
    total = scatter.sum(0)
    for f in range(data.folds):
        within = total - scatter[f]
        total_variance = float(within.diagonal().mean())
        sums, count = _class_sums(data, torch.nonzero(data.fold != f).flatten())
        means = sums / count.clamp(min=1).sqrt()[:, None]
        within.addmm_(means.T, means, alpha=-1)
        variance = float(within.diagonal().mean())
        # If no class has two different rows, the spread within classes is unknown: use the identity.
        known = variance > 1e-9 * total_variance
        scatter[f] = within / variance if known else torch.eye(dim, dtype=torch.float64, device=within.device)
    return scatter


def _similarities(
    data: _FoldedData, chosen: Tensor, sums: Tensor, within: Tensor, shrinkage: float
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the chosen rows by fold, and their cosines [n, C] to the whitened class means without the row itself."""

    def whiten(x: Tensor) -> Tensor:
        whitened: Tensor = torch.linalg.solve_triangular(whitener, x.T, upper=False)
        return whitened.T

    for f in range(data.folds):
        shrunk = within[f] * (1 - shrinkage)
        shrunk.diagonal().add_(shrinkage)
        whitener = torch.linalg.cholesky(shrunk).float()
        means = whiten(sums)
        for rows in torch.split(chosen[data.fold[chosen] == f], data.step):
            z, y = whiten(data.x[rows]), data.y[rows]
            unit_z = unit(z)
            sim = unit_z @ unit(means).T
            sim[torch.arange(len(rows), device=sim.device), y] = (unit_z * unit(means[y] - z)).sum(1)
            yield rows, sim


def _log_odds(sim: Tensor, own: Tensor, temperature: float) -> Floats:
    """[n] log((1 - p) / p) of the own class, exact also where p rounds to 0 or 1."""
    logits = sim * temperature
    own_logit = logits.gather(1, own).squeeze(1)
    log_odds = logits.scatter_(1, own, -math.inf).logsumexp(1) - own_logit
    return np.asarray(log_odds.double().cpu().numpy())


def _choose_hyperparameters(data: _FoldedData, sums: Tensor, count: Tensor, within: Tensor) -> tuple[float, float]:
    """The shrinkage and temperature that maximise the out-of-fold likelihood of a sample of the labels."""
    sample = torch.nonzero(count[data.y] > 1).flatten()
    sample = sample[:: max(1, len(sample) // _TUNING_ROWS)]
    best, chosen = -math.inf, (SHRINKAGES[-1], TEMPERATURES[0])
    for shrinkage in SHRINKAGES:
        parts = [
            [_log_odds(sim, data.y[rows, None], temperature) for temperature in TEMPERATURES]
            for rows, sim in _similarities(data, sample, sums, within, shrinkage)
        ]
        for temperature, odds in zip(TEMPERATURES, zip(*parts, strict=True), strict=True):
            log_odds = np.concatenate(odds)
            error_rate = _fit_error_rate(log_odds, data.classes)
            log_likelihood = float(np.log(_label_probability(log_odds, error_rate, data.classes)).mean())
            if log_likelihood > best:
                best, chosen = log_likelihood, (shrinkage, temperature)
    return chosen


def _label_probability(log_odds: Floats, error_rate: float, classes: int) -> Floats:
    p, rest = 1 / (1 + np.exp(log_odds)), 1 / (1 + np.exp(-log_odds))
    return np.asarray((1 - error_rate) * p + error_rate * rest / (classes - 1))


def _fit_error_rate(log_odds: Floats, classes: int) -> float:
    """The maximum-likelihood error rate, at most one half, by bisection."""
    gain = _label_probability(log_odds, 1.0, classes) - _label_probability(log_odds, 0.0, classes)

    def slope(rate: float) -> float:
        return float((gain / _label_probability(log_odds, rate, classes)).mean())

    low, high = 1e-9, 0.5  # the slope decreases throughout: the log likelihood is concave in the rate
    if slope(low) <= 0:
        return 0.0
    if slope(high) >= 0:
        return high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
    return (low + high) / 2
