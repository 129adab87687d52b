"""What the embeddings of an epoch look like, and what is wrong with them: `diagnose` and `alarms`.

    seen = diagnose(emb, labels)           Diagnosis: plain numbers; seen.to_dict() goes into events.jsonl
    for alarm in alarms([first, seen]):    empty for a healthy run
        print(alarm)

`diagnose` looks at a sample of the rows, drawn class by class so that it holds positive pairs, in float64 and without
gradient. Each definition is given with the field of `Diagnosis` that holds it. "Similarity" is the cosine, "distance"
the Euclidean distance of unit vectors, a pair is positive when its two rows are of one class; entropies are in nats.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearkin.analysis import information
from nearkin.analysis.hardness import hubness
from nearkin.errors import ConfigError, DataError
from nearkin.ops.geometry import ZERO_LENGTH, distances, gram, unit
from nearkin.ops.pairs import Pairs, as_batch, pair_up

SAMPLE = 1000  # rows; docs/diagnostics.md has the time
PER_CLASS = 8  # rows of a class that the sample takes before it takes fewer classes
BINS = 40  # of the similarity histograms, evenly over [-1, 1]
NEIGHBOURS = 10  # the k of hubness
SIGMA = 0.1  # temperature of the neighbour classifier behind tightness, contrastive and information_bound


@dataclass(frozen=True)
class Diagnosis:
    """The panel of one epoch. NaN where the sample cannot say (no positive pairs, one class, no finite rows).

    rows, classes        of the sample; rows with NaN or infinity are left out of it, and so are classes of one row
    dim                  of the embeddings
    non_finite           rows with NaN or infinity among all that were given
    blank                rows of the sample whose length is 0
    norm_mean, norm_std  lengths of the raw embeddings of the sample

    tightness            -mean over anchors of log sum over their positives of exp(similarity / 0.1), and
    contrastive          mean over anchors of log sum over all others of the same: the two parts of `snca` (Boudiaf et
                         al. 2020, table 2). Their sum is the cross entropy of the soft nearest-neighbour classifier
    feature_entropy      H(Z) = D times the mean log distance over pairs, up to a constant (Boudiaf et al. 2020, eq. 6,
                         with log distance instead of its square: nearkin.analysis.information says why)
    conditional_entropy  H(Z|Y), the same within classes, each weighted by its rows
    information          I(Z;Y) = H(Z) - H(Z|Y), the generative view
    information_bound    H(Y) - (tightness + contrastive) <= I(Z;Y), the discriminative view; below 0 it says nothing

    alignment            mean squared distance of positive pairs (Wang and Isola 2020, alpha = 2): 0 is best, 2 chance
    uniformity           log of the mean of exp(-2 squared distance) over all pairs (the same, t = 2): 0 when all rows
                         are alike, about -4 + 4 / D when spread evenly
    effective_rank       exp of the entropy of the spectrum of the covariance of the unit vectors, centred, each
                         eigenvalue as a share of their sum (Roy and Vetterli 2007, on variances): how many directions
                         are in use. 1 when there is no spread at all. No more than rows - 1

    positive_mean        mean similarity of positive pairs
    negative_mean        mean similarity of negative pairs
    separation           chance that a positive pair is more similar than a negative pair (area under the ROC curve)
    positive_histogram   counts of positive pairs by similarity, in 40 even bins over [-1, 1]
    negative_histogram   the same of negative pairs
    active_negatives     share of (anchor, negative) nearer than the anchor's farthest positive
    active_positives     share of (anchor, positive) farther than the anchor's nearest negative: what the
                         multi-similarity miner keeps at epsilon = 0 (Wang et al. 2019)
    hubness              skewness of how often a row is among the 10 nearest of others (Radovanović et al. 2010)
    """

    rows: int
    classes: int
    dim: int
    non_finite: int
    blank: int
    norm_mean: float = math.nan
    norm_std: float = math.nan
    tightness: float = math.nan
    contrastive: float = math.nan
    feature_entropy: float = math.nan
    conditional_entropy: float = math.nan
    information: float = math.nan
    information_bound: float = math.nan
    alignment: float = math.nan
    uniformity: float = math.nan
    effective_rank: float = math.nan
    positive_mean: float = math.nan
    negative_mean: float = math.nan
    separation: float = math.nan
    positive_histogram: tuple[int, ...] = (0,) * BINS
    negative_histogram: tuple[int, ...] = (0,) * BINS
    active_negatives: float = math.nan
    active_positives: float = math.nan
    hubness: float = math.nan

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists for JSON, which has no NaN: None stands for it."""
        values: dict[str, Any] = dataclasses.asdict(self)
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                values[name] = None
            elif isinstance(value, tuple):
                values[name] = list(value)
        return values

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Diagnosis:
        """What `to_dict` gave, read back from events.jsonl. Fields of a later version are left out."""
        known = [field.name for field in dataclasses.fields(Diagnosis)]
        if missing := [name for name in known if name not in values]:
            raise DataError(f"not a diagnosis: {', '.join(missing[:3])} missing. Give what Diagnosis.to_dict() wrote.")
        read: dict[str, Any] = {name: math.nan if values[name] is None else values[name] for name in known}
        return Diagnosis(**{**read, **{k: tuple(v) for k, v in read.items() if isinstance(v, list)}})


@torch.no_grad()
def diagnose(emb: Tensor, labels: Tensor | Sequence[int], *, sample: int = SAMPLE, seed: int = 0) -> Diagnosis:
    """Look at (a sample of) the raw embeddings of an epoch.

    emb      [N, D] of any float dtype, as the network gives them: unit vectors have lost their lengths
    labels   [N] integers
    sample   most rows to look at; the time grows with its square
    seed     which rows; the same seed takes the same rows of the same labels

    >>> seen = diagnose(torch.eye(4), torch.tensor([0, 0, 1, 1]))
    >>> seen.rows, round(seen.alignment, 6), round(seen.effective_rank, 6), seen.negative_mean
    (4, 2.0, 3.0, 0.0)
    """
    if sample < 2 * PER_CLASS:
        raise ConfigError(f"sample: expected at least {2 * PER_CLASS} rows, got {sample}.")
    emb, labels = as_batch(emb, labels)
    finite = torch.isfinite(emb.sum(1))
    if not bool(finite.all()):
        finite = torch.isfinite(emb).all(1)  # a sum may overflow where its terms do not
        emb, labels = emb[finite], labels[finite]
    non_finite = len(finite) - len(emb)
    if not len(emb):
        return Diagnosis(rows=0, classes=0, dim=emb.shape[1], non_finite=non_finite, blank=0)
    chosen = _draw(labels, sample, seed)
    # On the CPU in float64: log distances of near-coincident points drown in the rounding of float32.
    emb, labels = emb[chosen].cpu().double(), labels[chosen].cpu()
    norms = torch.linalg.vector_norm(emb, dim=1)
    pairs = pair_up(emb, labels)
    upper = torch.ones_like(pairs.pos).triu_(1)
    positive, negative = pairs.sim[pairs.pos & upper], pairs.sim[pairs.neg & upper]
    parts = information.snca_parts(pairs, SIGMA) if len(positive) else (math.nan, math.nan)
    tightness, contrastive = (float(part) for part in parts)
    f = unit(emb)
    centred = f - f.mean(0)
    square = centred.square().sum(1)
    distance = distances(gram(centred), square, square)
    entropy, conditional = _entropies(distance, pairs.pos, emb.shape[1])
    active_negatives, active_positives = _active(pairs)
    return Diagnosis(
        rows=len(emb),
        classes=len(torch.unique(labels)),
        dim=emb.shape[1],
        non_finite=non_finite,
        blank=int((norms <= ZERO_LENGTH).sum()),
        norm_mean=float(norms.mean()),
        norm_std=float(norms.std(correction=0)),
        tightness=tightness,
        contrastive=contrastive,
        feature_entropy=entropy,
        conditional_entropy=conditional,
        information=entropy - conditional,
        information_bound=information.mutual_information_bound(labels, tightness + contrastive),
        alignment=_mean(distance[pairs.pos & upper].square()),
        uniformity=_mean(distance[upper].square().mul_(-2).exp_(), log=True),
        effective_rank=effective_rank(f),
        positive_mean=_mean(positive),
        negative_mean=_mean(negative),
        separation=_separation(positive, negative),
        positive_histogram=_histogram(positive),
        negative_histogram=_histogram(negative),
        active_negatives=active_negatives,
        active_positives=active_positives,
        hubness=_hubness(pairs.sim),
    )


def effective_rank(rows: Tensor) -> float:
    """exp of the entropy of the spectrum of the covariance of the rows [N, D]; 1 when they are all the same.

    >>> round(effective_rank(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])), 6)
    2.0
    """
    x = rows.double() - rows.double().mean(0)
    total = float(x.square().sum())
    if total <= len(x) * (16 * torch.finfo(torch.float64).eps) ** 2:  # nothing but the rounding of the mean
        return 1.0
    # The covariance and the products of the rows share their spectrum; the smaller one is cheaper.
    share = torch.linalg.eigvalsh(x.T @ x if x.shape[1] <= len(x) else x @ x.T).clamp(min=0) / total
    return math.exp(-float(torch.special.xlogy(share, share).sum()))


# --- the parts of the panel -------------------------------------------------------------------------------------------


def _draw(labels: Tensor, sample: int, seed: int) -> Tensor:
    """Rows for the sample: some of every class, or of fewer classes where there would be too few of each.

    Taken at random over all rows, a sample of many small classes would hold no positive pair.
    """
    _, code, count = torch.unique(labels.cpu(), return_inverse=True, return_counts=True)
    usable = count > 1 if bool((count > 1).any()) else count > 0
    g = torch.Generator().manual_seed(seed)
    quota = max(PER_CLASS, sample // int(usable.sum()))
    if len(labels) <= sample:
        quota = sample
    shuffled = torch.randperm(len(code), generator=g)
    # Rows class by class, the classes in random order too; `place` counts within the class.
    rank = torch.randperm(len(count), generator=g)[code[shuffled]]
    order = torch.argsort(rank, stable=True)
    rows = shuffled[order]
    size = torch.bincount(rank, minlength=len(count))
    place = torch.arange(len(rows)) - (size.cumsum(0) - size)[rank[order]]
    rows = rows[usable[code[rows]] & (place < quota)]
    taken = torch.bincount(code[rows], minlength=len(count))
    # A class is taken whole or not at all, so that none is cut down to one row.
    new = torch.ones(len(rows), dtype=torch.bool)
    new[1:] = code[rows[1:]] != code[rows[:-1]]
    fits = taken[code[rows[new]]].cumsum(0) <= sample
    return rows[fits.repeat_interleave(taken[code[rows[new]]])].sort().values


def _entropies(distance: Tensor, pos: Tensor, dim: int) -> tuple[float, float]:
    """H(Z) and H(Z|Y) as in nearkin.analysis.information, from the distances made already."""
    n = len(distance)
    logs = distance.clamp(min=1e-12).log_().fill_diagonal_(0.0)
    within = (logs * pos).sum(1) / pos.sum(1)  # of every row's class; NaN for a row alone in its class
    return (dim * float(logs.sum()) / (n * (n - 1)) if n > 1 else math.nan), dim * float(within.mean())


def _active(pairs: Pairs) -> tuple[float, float]:
    positives, negatives = int(pairs.pos.sum()), int(pairs.neg.sum())
    if not positives or not negatives:
        return math.nan, math.nan
    farthest = pairs.sim.masked_fill(~pairs.pos, math.inf).amin(1, keepdim=True)
    nearest = pairs.sim.masked_fill(~pairs.neg, -math.inf).amax(1, keepdim=True)
    pushed = int(((pairs.sim > farthest) & pairs.neg).sum())
    pulled = int(((pairs.sim < nearest) & pairs.pos).sum())
    return pushed / negatives, pulled / positives


def _separation(positive: Tensor, negative: Tensor) -> float:
    if not len(positive) or not len(negative):
        return math.nan
    ranked = np.sort(negative.numpy())  # several times as fast as torch's sort
    below = np.searchsorted(ranked, positive.numpy()) + np.searchsorted(ranked, positive.numpy(), side="right")
    return float(below.mean()) / (2 * len(ranked))


def _hubness(sim: Tensor) -> float:
    if len(sim) < 3:
        return math.nan
    nearest = sim.clone().fill_diagonal_(-math.inf).topk(min(NEIGHBOURS, len(sim) - 1)).indices
    return hubness(nearest.numpy(), len(sim))


def _histogram(values: Tensor) -> tuple[int, ...]:
    # Rounding may leave a cosine just outside [-1, 1].
    counts = torch.histc(values.clamp(-1, 1), BINS, -1, 1)
    return tuple(int(c) for c in counts.tolist())


def _mean(values: Tensor, *, log: bool = False) -> float:
    if not len(values):
        return math.nan
    return math.log(float(values.mean())) if log else float(values.mean())


# --- alarms -----------------------------------------------------------------------------------------------------------

# Set between what 25 healthy and 11 broken runs on the glyphs showed: docs/diagnostics.md has the figures.
ALIKE = 0.995  # mean similarity of negative pairs
TOO_LONG = 200.0  # times the length at the start
A_LINE = 1.5  # directions in use
FALLEN = 0.1  # directions in use, as a share of those at the start
NO_CONTRAST = 0.55  # separation; 0.5 is chance


@dataclass(frozen=True)
class Alarm:
    """Something wrong with a run: what was seen, with its number, and what to change."""

    name: str
    seen: str
    cure: str

    def __str__(self) -> str:
        return f"{self.name}: {self.seen}. {self.cure}"


def alarms(history: Sequence[Diagnosis]) -> list[Alarm]:
    """What is wrong at the last of the diagnoses; nothing for a healthy run.

    history   oldest first. The first is the start, the network as it was before training: it is compared with and, but
              for values that are not finite, never accused.
    """
    if not history:
        return []
    start, now = history[0], history[-1]
    found = []
    if now.non_finite:
        found.append(
            Alarm(
                "not finite",
                f"{now.non_finite:,} embeddings hold NaN or infinity",
                "Lower the learning rate, clip gradients, or turn mixed precision off.",
            )
        )
    if len(history) < 2:
        return found
    if now.blank * 2 > now.rows:
        found.append(
            Alarm(
                "dead",
                f"{now.blank:,} of {now.rows:,} embeddings are zero",
                "The network has died: lower the learning rate and start again.",
            )
        )
    if now.negative_mean > ALIKE:
        found.append(
            Alarm(
                "collapse",
                f"all embeddings are alike: negative pairs have a mean similarity of {now.negative_mean:.4f}",
                "Check that the loss pushes negatives (its margin), take easier pairs (miner semihard, not hard), or "
                "lower the learning rate.",
            )
        )
    if now.norm_mean > TOO_LONG * start.norm_mean > 0:
        found.append(
            Alarm(
                "exploding norms",
                f"embeddings are {now.norm_mean:,.0f} long, {now.norm_mean / start.norm_mean:,.0f} times the start",
                "Lower the learning rate, or raise the weight decay.",
            )
        )
    if len(history) < 3:  # what may pass in the first epoch is looked at twice
        return found
    last = history[-2:]
    if all(seen.effective_rank < _least_rank(start, seen) for seen in last):
        found.append(
            Alarm(
                "dimensional collapse",
                f"{now.effective_rank:.1f} of {now.dim} directions in use ({start.effective_rank:.1f} at the start)",
                "Lower the learning rate, or take a loss that spreads (multi_similarity, proxy_anchor).",
            )
        )
    if all(seen.separation < NO_CONTRAST for seen in last):
        found.append(
            Alarm(
                "no contrast",
                f"positive pairs are as far apart as negative ones (separation {now.separation:.2f}, chance is 0.50)",
                "Nothing is being learnt: check that labels match images, then the margin and the learning rate.",
            )
        )
    return found


def _least_rank(start: Diagnosis, seen: Diagnosis) -> float:
    """Fewer directions than this are a collapse. C classes need no more than C - 1, so few classes excuse few."""
    room = min(seen.dim, seen.classes - 1)
    return max(A_LINE, min(FALLEN * start.effective_rank, 0.3 * room)) if room >= 8 else 0.0
