"""Rows whose label is probably wrong, and rows that are copies of each other, found in embeddings.

    found = find_suspects(emb, labels)           ranked, with a suggested class and a chance for every row
    found.to_csv("suspects.csv", paths=paths, class_names=names, top=100)
    find_duplicates(emb, labels)                 pairs of equal or nearly equal rows, with and without equal labels

A row is compared with the mean of the *other* rows of its class and with the means of all other classes, by cosine,
after the features were whitened within classes (directions in which the members of a class differ count less). A
temperature turns the cosines into chances p of the classes. Then every label is taken to be either right, with the
chance p of its class, or drawn blindly from all C classes:

    chance of a label y = (1 - e) p(y) + e / C        chance that it is wrong = (e / C) / that sum

The share e of blind labels, the temperature and the strength of the whitening are those that make the labels at hand
most likely. The whitening that judges a row is made without it (in folds) and so is the mean of its class: a row
cannot vouch for itself. A second round counts rows less by their chance of being wrong, so that errors weigh less on
the means they spoil.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin._task import Progress, as_bytes
from nearkin._vectors import as_labels, as_matrix, encode, identical_rows
from nearkin.errors import ConfigError, DataError
from nearkin.vectors import unit

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SHRINKAGES = (0.1, 0.3, 0.5, 0.7, 0.9)  # of the within-class covariance towards a multiple of the identity
TEMPERATURES = tuple(float(t) for t in np.geomspace(2.0, 200.0, 16))
_TRIED_ROWS = 2000  # rows on which the two above are chosen
_LEAST_WEIGHT = 0.01  # of a suspect in the mean of its class, so that no class is left without one


@dataclass(frozen=True)
class Suspects:
    """What `find_suspects` found, row by row.

    score        [N] log odds that the label is wrong; NaN for the only row of its class, which nothing can judge
    probability  [N] the same as a chance. Right on average for labels that are wrong blindly; see docs/label-errors.md
    suggested    [N] the class, other than its own, that the row is most like
    order        [N] rows, most suspect first; those that cannot be judged come last
    labels       [N] as given
    share        the estimated share of wrong labels among all rows
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
        target = Path(path)
        aside = target.with_name(target.name + ".part")
        with open(aside, "w", newline="", encoding="utf-8") as file:
            write = csv.writer(file)
            write.writerow(head)
            for place, row in enumerate(self.order[:top].tolist(), start=1):
                names = [_name(kind[row], class_names) for kind in (self.labels, self.suggested)]
                file_name = [] if paths is None else [str(paths[row])]
                chance = [f"{value[row]:.4f}" for value in (self.score, self.probability)]
                write.writerow([place, row, *map(_plain_text, file_name + names), *chance])
        os.replace(aside, target)


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


def _plain_text(cell: str) -> str:
    """A cell that no spreadsheet takes for a formula.

    >>> _plain_text("=1+1"), _plain_text("Least Tern")
    ("'=1+1", 'Least Tern')
    """
    return f"'{cell}" if cell.lstrip(" \n").startswith(("=", "+", "-", "@", "\t", "\r", "＝", "＋", "－", "＠")) else cell


def find_suspects(
    emb: Any,
    labels: Any,
    *,
    folds: int = 5,
    rounds: int = 2,
    seed: int = 0,
    memory: str | int = "1GB",
    progress: Progress | None = None,
) -> Suspects:
    """Rank the rows by how likely their label is wrong.

    emb        [N, D] features or embeddings. Of a network that was trained on these labels take out-of-fold embeddings
               (each row from a network that did not train on it): it has learnt its wrong labels by heart
    labels     [N] integers or strings, at least two classes
    folds      parts of the rows for which the whitening is made without them
    rounds     how often means and whitening are made again with suspects counting less; 1 makes them once
    memory     most extra memory beside copies of the vectors
    progress   called now and then with the fraction done

    >>> x = np.concatenate([np.tile([1.0, 0.0], (5, 1)), np.tile([0.0, 1.0], (5, 1))])
    >>> x += 0.1 * np.random.default_rng(0).standard_normal(x.shape)
    >>> found = find_suspects(x, ["cat"] * 4 + ["dog"] * 6)
    >>> int(found.order[0]), str(found.suggested[4])
    (4, 'cat')
    """
    if folds < 2 or rounds < 1:
        raise ConfigError(f"expected folds >= 2 and rounds >= 1, got folds={folds}, rounds={rounds}.")
    x = as_matrix(emb, "embeddings").float()
    given = as_labels(labels, len(x), "labels", "embeddings")
    codes, _, classes = encode(given, None, "labels")
    if len(classes) < 2:
        raise DataError("labels: all rows are of one class; a wrong label needs another class it could belong to.")
    x = unit(x)
    x -= x.mean(0)
    y = torch.as_tensor(codes, device=x.device)
    fold = torch.as_tensor(np.random.default_rng(seed).permutation(len(x)) % folds, device=x.device)
    rows = _Rows(x, y, len(classes), fold, folds, as_bytes(memory))
    judged = np.bincount(codes)[codes] > 1
    weight = torch.ones(len(x), dtype=torch.float32, device=x.device)
    for turn in range(rounds):
        tell = (lambda part, turn=turn: progress((turn + part) / rounds)) if progress else None  # type: ignore[misc]
        own, rival = _chances(rows, weight, tell)
        own[~judged] = math.nan
        # Never 0, which would leave nothing to rank by: half a row.
        blind = max(_blind_share(own[judged], len(classes)), 0.5 / len(x))
        score = math.log(blind / len(classes) / (1 - blind)) - own
        probability = 1 / (1 + np.exp(-score))
        trust = np.clip(1 - np.nan_to_num(probability), _LEAST_WEIGHT, 1.0)
        weight = torch.as_tensor(trust, dtype=torch.float32, device=x.device)
    order = np.argsort(-score, kind="stable")  # NaN goes last
    share = float(probability[judged].mean()) if judged.any() else math.nan
    return Suspects(score, probability, classes[rival], order, given, share)


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


def _chances(rows: _Rows, weight: Tensor, tell: Progress | None) -> tuple[Floats, Ints]:
    """[N] log chance of each row's own class, and the class most like it among the others."""
    sums, count = _class_sums(rows, weight, slice(None))
    within = _within_class(rows, weight)
    shrinkage, temperature = _choose(rows, weight, sums, count, within)
    own = np.empty(len(rows.x))
    rival = np.empty(len(rows.x), dtype=np.int64)
    for f in range(rows.folds):
        whitener = _whitener(within[f], shrinkage)
        means = _solve(whitener, sums)
        for at in torch.nonzero(rows.fold == f).flatten().split(rows.step):
            sim = _similarities(rows, weight, at, whitener, means, count)
            here, mine = at.cpu().numpy(), rows.y[at, None]
            own[here] = _log_chance(sim, mine, temperature)
            rival[here] = sim.scatter_(1, mine, -math.inf).argmax(1).cpu().numpy()
        if tell:
            tell((f + 1) / rows.folds)
    return own, rival


def _class_sums(rows: _Rows, weight: Tensor, chosen: Any) -> tuple[Tensor, Tensor]:
    x, y, w = rows.x[chosen], rows.y[chosen], weight[chosen]
    sums = x.new_zeros(rows.classes, x.shape[1]).index_add_(0, y, x * w[:, None])
    return sums, w.new_zeros(rows.classes).index_add_(0, y, w)


def _within_class(rows: _Rows, weight: Tensor) -> Tensor:
    """[folds, D, D] within-class covariance of the rows outside each fold, scaled to a mean variance of 1."""
    dim = rows.x.shape[1]
    scatter = torch.zeros(rows.folds, dim, dim, dtype=torch.float64, device=rows.x.device)
    for f in range(rows.folds):
        for at in torch.nonzero(rows.fold == f).flatten().split(8192):
            part = (rows.x[at] * weight[at, None].sqrt()).double()
            scatter[f].addmm_(part.T, part)
    out = scatter.sum(0) - scatter
    for f in range(rows.folds):
        sums, count = _class_sums(rows, weight, rows.fold != f)
        part = (sums / count.clamp(min=1e-6).sqrt()[:, None]).double()
        out[f].addmm_(part.T, part, alpha=-1)
        spread = float(out[f].diagonal().mean())
        # No class has two different rows: no direction is known to matter less than another.
        out[f] = out[f] / spread if spread > 1e-12 else torch.eye(dim, dtype=torch.float64, device=out.device)
    return out


def _whitener(within: Tensor, shrinkage: float) -> Tensor:
    mixed = within * (1 - shrinkage)
    mixed.diagonal().add_(shrinkage)
    return torch.linalg.cholesky(mixed).float()


def _solve(whitener: Tensor, x: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(whitener, x.T, upper=False).T


def _similarities(
    rows: _Rows, weight: Tensor, at: Tensor, whitener: Tensor, means: Tensor, count: Tensor
) -> Tensor:
    """[n, C] cosines of some rows to the whitened means, that of the own class without the row itself."""
    z, y = _solve(whitener, rows.x[at]), rows.y[at]
    f = unit(z)
    sim = f @ unit(means).T
    # The sum less the row's share. Where nothing is left the difference is rounding: no direction at all.
    rest = means[y] - z * weight[at, None]
    rest[(count[y] - weight[at]) < _LEAST_WEIGHT / 2] = 0.0
    sim[torch.arange(len(at), device=sim.device), y] = (f * unit(rest)).sum(1)
    return sim


def _log_chance(sim: Tensor, mine: Tensor, temperature: float) -> Floats:
    logits = sim * temperature
    chance = logits.gather(1, mine).squeeze(1) - logits.logsumexp(1)
    return np.asarray(chance.double().cpu().numpy())


def _choose(rows: _Rows, weight: Tensor, sums: Tensor, count: Tensor, within: Tensor) -> tuple[float, float]:
    """The shrinkage and the temperature under which some rows' labels are most likely, each row judged without it."""
    many = count[rows.y] - weight > _LEAST_WEIGHT / 2
    picked = torch.nonzero(many).flatten()
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
            for part in at.split(rows.step):
                sim = _similarities(rows, weight, part, whitener, means, count)
                for i, temperature in enumerate(TEMPERATURES):
                    found[i].append(_log_chance(sim, rows.y[part, None], temperature))
        for i, temperature in enumerate(TEMPERATURES if found[0] else ()):
            own = np.concatenate(found[i])
            blind = _blind_share(own, rows.classes)
            likely = float(np.log((1 - blind) * np.exp(own) + blind / rows.classes).mean())
            if likely > best:
                best, chosen = likely, (shrinkage, temperature)
    return chosen


def _blind_share(own: Floats, classes: int) -> float:
    """The share of blind labels, at most a half, that makes labels of these log chances most likely."""
    chance = np.exp(own)

    def slope(e: float) -> float:
        return float(((1 / classes - chance) / ((1 - e) * chance + e / classes)).mean())

    low, high = 1e-9, 0.5  # the slope falls all the way: the likelihood is concave in e
    if not len(own) or slope(low) <= 0:
        return 0.0
    if slope(high) >= 0:
        return high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
    return (low + high) / 2
