"""Rows whose label is probably wrong, and rows that are copies of each other, found in embeddings.

    found = find_label_errors(emb, labels)           ranked, with a suggested class and a chance for every row
    found.to_csv("suspects.csv", paths=paths, class_names=names, top=100)
    find_duplicates(emb, labels)                 pairs of equal or nearly equal rows, with and without equal labels

A row is compared with the mean of the *other* rows of its class and with the means of all other classes, by cosine,
after the features were whitened within classes (directions in which the members of a class differ count less). A
temperature turns the cosines into chances p of the C classes. A label is taken to be right, or else, with chance e,
any of the other classes blindly:

    chance of a label y = (1 - e) p(y) + e (1 - p(y)) / (C - 1)        chance that it is wrong = second term / sum

The share e of wrong labels, the temperature and the strength of the whitening are those that make the labels at hand
most likely. The whitening that judges a row is made without it (in folds) and so is the mean of its class: a row
cannot vouch for itself.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin._common.files import atomic_write
from nearkin.errors import ConfigError, DataError
from nearkin.metrics._problem import Progress, parse_bytes
from nearkin.metrics._vectors import as_labels, as_matrix, encode, identical_rows
from nearkin.ops.geometry import unit

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SHRINKAGES = (0.1, 0.3, 0.5, 0.7, 0.9)  # of the within-class covariance towards a multiple of the identity
TEMPERATURES = tuple(float(t) for t in np.geomspace(2.0, 200.0, 16))
_TRIED_ROWS = 2000  # rows on which the two above are chosen
_CHUNK = 8192  # rows or pairs turned into float64 at a time


@dataclass(frozen=True)
class LabelErrors:
    """What `find_label_errors` found, row by row.

    score        [N] log odds that the label is wrong; NaN for the only row of its class, which nothing can judge
    probability  [N] the same as a chance. Right on average for labels that are wrong blindly; see docs/label-errors.md
    suggested    [N] the class, other than its own, that the row is most like
    order        [N] rows, most suspect first; those that cannot be judged come last
    labels       [N] as given
    share        the estimated share of wrong labels; 0.5 says that these embeddings do not tell the classes apart
    """

    score: Floats
    probability: Floats
    suggested: NDArray[Any]
    order: Ints
    labels: NDArray[Any]
    share: float

    def __len__(self) -> int:
        return len(self.order)

    @property
    def rank(self) -> Ints:
        """[N] the place of each row in the order, from 1."""
        out = np.empty(len(self.order), dtype=np.int64)
        out[self.order] = np.arange(1, len(self.order) + 1)
        return out

    def expected(self, top: int) -> float:
        """How many wrong labels are to be expected among the first `top` rows."""
        return float(np.nansum(self.probability[self.order[:top]]))

    def to_csv(
        self,
        path: str | os.PathLike[str],
        *,
        paths: Sequence[Any] | None = None,
        class_names: Sequence[str] | Mapping[Any, str] | None = None,
        top: int | None = None,
    ) -> None:
        """Write the first `top` rows (all, when left out), most suspect first.

        paths         [N] the files of the rows, for a column `path`
        class_names   of the labels, as a mapping, or as a sequence that integer labels point into
        """
        if paths is not None and len(paths) != len(self):
            raise DataError(f"paths: {len(paths)} for {len(self)} rows. Give one per row, in the order of the rows.")
        head = ["rank", "row", *(["path"] if paths is not None else []), "label", "suggested", "score", "probability"]
        lines: list[list[Any]] = []
        for place, row in enumerate(self.order[:top].tolist(), start=1):
            file_name = [] if paths is None else [str(paths[row])]
            names = [_name(kind[row], class_names) for kind in (self.labels, self.suggested)]
            chance = [f"{value[row]:.4f}" for value in (self.score, self.probability)]
            lines.append([place, row, *map(_plain_text, file_name + names), *chance])
        text = io.StringIO(newline="")
        csv.writer(text).writerows([head, *lines])
        atomic_write(Path(path), text.getvalue().encode("utf-8", "replace"))  # a file name need not be valid Unicode


def _name(label: Any, names: Sequence[str] | Mapping[Any, str] | None) -> str:
    label = label.item() if isinstance(label, np.generic) else label
    if names is None:
        return str(label)
    try:
        if not isinstance(names, Mapping) and label < 0:  # a sequence would count from its end
            raise IndexError
        return str(names[label])
    except (IndexError, KeyError, TypeError):
        raise DataError(f"class_names: no name for label {label!r}. Give a name for every label.") from None


# Also the wide forms, which some spreadsheets read alike, and what they skip before looking.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")


def _plain_text(cell: str) -> str:
    """A cell that no spreadsheet takes for a formula.

    >>> _plain_text("=1+1"), _plain_text("Least Tern")
    ("'=1+1", 'Least Tern')
    """
    return f"'{cell}" if cell.lstrip(" ").startswith(_FORMULA) else cell


def find_label_errors(
    emb: Any,
    labels: Any,
    *,
    folds: int = 5,
    seed: int = 0,
    memory: str | int = "1GB",
    progress: Progress | None = None,
) -> LabelErrors:
    """Rank the rows by how likely their label is wrong.

    emb        [N, D] features or embeddings. Of a network that was trained on these labels take out-of-fold embeddings
               (each row from a network that did not train on it): it has learnt its wrong labels by heart
    labels     [N] integers or strings, at least two classes
    folds      parts of the rows for which the whitening is made without them
    memory     most extra memory beside copies of the vectors
    progress   called now and then with the fraction done

    >>> x = np.concatenate([np.tile([1.0, 0.0], (5, 1)), np.tile([0.0, 1.0], (5, 1))])
    >>> x += 0.1 * np.random.default_rng(0).standard_normal(x.shape)
    >>> found = find_label_errors(x, ["cat"] * 4 + ["dog"] * 6)
    >>> int(found.order[0]), str(found.suggested[4])
    (4, 'cat')
    """
    if folds < 2:
        raise ConfigError(f"folds: expected at least 2, got {folds}.")
    x = as_matrix(emb, "embeddings").float()
    given = as_labels(labels, len(x), "labels", "embeddings")
    codes, _, classes = encode(given, None, "labels")
    if len(classes) < 2:
        raise DataError("labels: all rows are of one class; a wrong label needs another class it could belong to.")
    judged = np.bincount(codes)[codes] > 1
    if not judged.any():
        raise DataError("labels: every class has one row; a label is judged by the other rows of its class.")
    x = unit(x)
    x -= x.mean(0)
    y = torch.as_tensor(codes, device=x.device)
    fold = torch.as_tensor(np.random.default_rng(seed).permutation(len(x)) % folds, device=x.device)
    rows = _Rows(x, y, len(classes), fold, folds, parse_bytes(memory))
    against, rival = _judge(rows, progress)
    against[~judged] = math.nan
    # Never 0, which would leave nothing to rank by: half a row.
    wrong = max(_share_of_wrong(against[judged], len(classes)), 0.5 / len(x))
    score = against + math.log(wrong / (1 - wrong) / (len(classes) - 1))
    probability = 1 / (1 + np.exp(-score))
    order = np.argsort(-score, kind="stable")  # NaN goes last
    return LabelErrors(score, probability, classes[rival], order, given, float(probability[judged].mean()))


# --- the chances of the classes ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rows:
    x: Tensor  # [N, D] unit vectors less their mean
    y: Tensor  # [N] class codes
    classes: int
    fold: Tensor  # [N]
    folds: int
    budget: int  # bytes

    @property
    def step(self) -> int:
        """Rows whose similarities to all classes, and what is made of them, fit the budget."""
        return max(1, min(4096, self.budget // 2 // (16 * self.classes)))


def _judge(rows: _Rows, progress: Progress | None) -> tuple[Floats, Ints]:
    """[N] log odds that each row is of another class than its own, and the class most like it among the others."""
    exact_sums, count = _class_sums(rows, torch.arange(len(rows.x), device=rows.x.device))
    sums = exact_sums.float()
    within = _within_class(rows)
    shrinkage, temperature = _choose(rows, sums, count, within)
    against = np.empty(len(rows.x))
    rival = np.empty(len(rows.x), dtype=np.int64)
    for f in range(rows.folds):
        whitener = _whitener(within[f], shrinkage)
        means = _solve(whitener, sums)
        for at in _pieces(torch.nonzero(rows.fold == f).flatten(), rows.step):
            sim = _similarities(rows, at, whitener, means)
            here, mine = at.cpu().numpy(), rows.y[at, None]
            rival[here] = sim.scatter(1, mine, -math.inf).argmax(1).cpu().numpy()
            against[here] = _log_odds(sim, mine, temperature)
        if progress:
            progress((f + 1) / rows.folds)
    return against, rival


def _pieces(at: Tensor, step: int) -> Iterator[Tensor]:
    return (at[a : a + step] for a in range(0, len(at), step))


def _class_sums(rows: _Rows, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Sums [C, D] in float64 and counts [C] of some rows."""
    sums = torch.zeros(rows.classes, rows.x.shape[1], dtype=torch.float64, device=rows.x.device)
    for at in _pieces(chosen, _CHUNK):
        sums.index_add_(0, rows.y[at], rows.x[at].double())
    return sums, torch.bincount(rows.y[chosen], minlength=rows.classes)


def _within_class(rows: _Rows) -> Tensor:
    """[folds, D, D] within-class covariance of the rows outside each fold, scaled to a mean variance of 1."""
    dim = rows.x.shape[1]
    scatter = torch.zeros(rows.folds, dim, dim, dtype=torch.float64, device=rows.x.device)
    for f in range(rows.folds):
        for at in _pieces(torch.nonzero(rows.fold == f).flatten(), _CHUNK):
            part = rows.x[at].double()
            scatter[f].addmm_(part.T, part)
    everything = scatter.sum(0)
    for f in range(rows.folds):
        within = everything - scatter[f]
        size = float(within.diagonal().mean())
        sums, count = _class_sums(rows, torch.nonzero(rows.fold != f).flatten())
        means = sums / count.clamp(min=1).sqrt()[:, None]
        within.addmm_(means.T, means, alpha=-1)
        spread = float(within.diagonal().mean())
        # Where no class has two different rows, no direction is known to matter less than another.
        known = spread > 1e-9 * size
        scatter[f] = within / spread if known else torch.eye(dim, dtype=torch.float64, device=within.device)
    return scatter


def _whitener(within: Tensor, shrinkage: float) -> Tensor:
    mixed = within * (1 - shrinkage)
    mixed.diagonal().add_(shrinkage)
    lower: Tensor = torch.linalg.cholesky(mixed)
    return lower.float()


def _solve(whitener: Tensor, x: Tensor) -> Tensor:
    solved: Tensor = torch.linalg.solve_triangular(whitener, x.T, upper=False)
    return solved.T


def _similarities(rows: _Rows, at: Tensor, whitener: Tensor, means: Tensor) -> Tensor:
    """[n, C] cosines of some rows to the whitened means, that of the own class without the row itself."""
    z, y = _solve(whitener, rows.x[at]), rows.y[at]
    f = unit(z)
    sim = f @ unit(means).T
    sim[torch.arange(len(at), device=sim.device), y] = (f * unit(means[y] - z)).sum(1)
    return sim


def _log_odds(sim: Tensor, mine: Tensor, temperature: float) -> Floats:
    """[n] log((1 - p) / p) of the own class, exact also where p rounds to 0 or 1."""
    logits = sim * temperature
    own = logits.gather(1, mine).squeeze(1)
    against = logits.scatter_(1, mine, -math.inf).logsumexp(1) - own
    return np.asarray(against.double().cpu().numpy())


def _choose(rows: _Rows, sums: Tensor, count: Tensor, within: Tensor) -> tuple[float, float]:
    """The shrinkage and the temperature under which some rows' labels are most likely, each row judged without it."""
    picked = torch.nonzero(count[rows.y] > 1).flatten()
    picked = picked[:: max(1, len(picked) // _TRIED_ROWS)]
    best, chosen = -math.inf, (SHRINKAGES[-1], TEMPERATURES[0])
    for shrinkage in SHRINKAGES:
        found: list[list[Floats]] = [[] for _ in TEMPERATURES]
        for f in range(rows.folds):
            at = picked[rows.fold[picked] == f]
            if not len(at):
                continue
            whitener = _whitener(within[f], shrinkage)
            means = _solve(whitener, sums)
            for part in _pieces(at, rows.step):
                sim = _similarities(rows, part, whitener, means)
                for i, temperature in enumerate(TEMPERATURES):
                    found[i].append(_log_odds(sim, rows.y[part, None], temperature))
        for i, temperature in enumerate(TEMPERATURES if found[0] else ()):
            against = np.concatenate(found[i])
            likely = float(
                np.log(_chance_of_label(against, _share_of_wrong(against, rows.classes), rows.classes)).mean()
            )
            if likely > best:
                best, chosen = likely, (shrinkage, temperature)
    return chosen


def _chance_of_label(against: Floats, wrong: float, classes: int) -> Floats:
    p, rest = 1 / (1 + np.exp(against)), 1 / (1 + np.exp(-against))
    return np.asarray((1 - wrong) * p + wrong * rest / (classes - 1))


def _share_of_wrong(against: Floats, classes: int) -> float:
    """The share of wrong labels, at most a half, that makes labels of these log odds most likely."""
    gain = _chance_of_label(against, 1.0, classes) - _chance_of_label(against, 0.0, classes)

    def slope(share: float) -> float:
        return float((gain / _chance_of_label(against, share, classes)).mean())

    low, high = 1e-9, 0.5  # the slope falls all the way: the likelihood is concave in the share
    if slope(low) <= 0:
        return 0.0
    if slope(high) >= 0:
        return high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
    return (low + high) / 2


# --- copies -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Duplicate:
    """Two rows that are the same, or nearly."""

    first: int
    second: int
    similarity: float  # cosine
    exact: bool  # equal in every number
    same_label: bool


def find_duplicates(
    emb: Any,
    labels: Any,
    *,
    threshold: float = 0.96,
    most: int = 10_000,
    memory: str | int = "1GB",
    progress: Progress | None = None,
) -> list[Duplicate]:
    """All pairs of rows at least as similar as the threshold: those of different labels first, then the most similar.

    Take features of a network that was not trained on these classes: training pulls the images of a class together
    until they pass for copies. On ImageNet features of CUB, 0.96 finds the copies and no two shots of one bird.

    most   pairs to return; more are refused, as the threshold then says "same class" instead of "same image"

    >>> find_duplicates([[1.0, 0.0], [1.0, 0.001], [0.0, 1.0], [1.0, 0.0]], ["owl", "gull", "gull", "owl"])[-1]
    Duplicate(first=0, second=3, similarity=1.0, exact=True, same_label=True)
    """
    if not -1 <= threshold <= 1:
        raise ConfigError(f"threshold: expected a cosine from -1 to 1, got {threshold}.")
    x = as_matrix(emb, "embeddings")
    codes, _, _ = encode(as_labels(labels, len(x), "labels", "embeddings"), None, "labels")
    f = unit(x.float())
    (group,) = identical_rows([x], [torch.zeros(len(x), dtype=torch.bool)])
    step = max(1, min(2048, parse_bytes(memory) // (8 * len(x))))
    found: list[Duplicate] = []
    for a in range(0, len(x), step):
        sim = f[a : a + step] @ f[a:].T
        # float32 is off by less than this; whatever it may have missed is looked at again in float64.
        near = torch.nonzero((sim >= threshold - 1e-5).triu_(1)) + a
        for part in _pieces(near, _CHUNK):
            left, right = (unit(x[part[:, side]].double()) for side in (0, 1))
            value = (left * right).sum(1).clamp(-1, 1)
            for i, j, s in zip(*part.T.tolist(), value.tolist(), strict=True):
                exact = bool(group[i] == group[j]) and s != 0
                if exact or s >= threshold:
                    found.append(Duplicate(i, j, 1.0 if exact else s, exact, bool(codes[i] == codes[j])))
            if len(found) > most:
                raise DataError(
                    f"threshold: more than {most:,} pairs are as similar as {threshold}. Raise it, or take features "
                    "of a network that was not trained on these classes."
                )
        if progress:
            progress(min(1.0, (a + step) / len(x)))
    return sorted(found, key=lambda d: (d.same_label, -d.similarity, d.first, d.second))
