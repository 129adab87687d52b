"""Diagnostics of the embeddings of an epoch, and alarms for what is wrong with them.

"Similarity" is the cosine, "distance" the Euclidean distance of unit vectors; entropies are in nats.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearkin._common.files import nan_to_none, none_to_nan
from nearkin.analysis import information
from nearkin.analysis.hardness import hubness
from nearkin.errors import ConfigError, DataError
from nearkin.ops.geometry import ZERO_LENGTH, distances, gram, unit, where_float64_exists
from nearkin.ops.pairs import Pairs, as_batch, pair_up

SAMPLE = 1000  # rows; docs/diagnostics.md has the time
PER_CLASS = 8  # rows per class that the sample takes before it takes fewer classes
BINS = 40  # of the similarity histograms, evenly over [-1, 1]
NEIGHBOURS = 10  # the k of hubness
SIGMA = 0.1  # temperature of the neighbour classifier behind tightness, contrastive and information_bound


@dataclass(frozen=True)
class Diagnosis:
    """Statistics of the embeddings of one epoch. NaN where undefined (no positive pairs, one class, no finite rows).

    Attributes:
        rows: Rows of the sample, without those that contain NaN or infinity and without singleton classes.
        classes: Classes of the sample.
        dim: Dimensions of the embeddings.
        non_finite: Rows with NaN or infinity among all rows.
        blank: Rows of the sample that are zero vectors.
        norm_mean: Mean norm of the raw embeddings of the sample.
        norm_std: Standard deviation of the norms.
        tightness: -mean over anchors of log sum over their positives of exp(similarity / 0.1).
        contrastive: Mean over anchors of log sum over all others of exp(similarity / 0.1); the sum of both is `snca`.
        feature_entropy: H(Z) = D times the mean log distance of pairs; relative: only its changes mean something.
        conditional_entropy: H(Z|Y), the same within classes, each weighted by its rows.
        label_entropy: H(Y), the most that embeddings can say about the class.
        information: I(Z;Y) between 0 and H(Y), estimated from nearest neighbours (Ross 2014).
        information_bound: H(Y) - (tightness + contrastive) <= I(Z;Y), the discriminative view; vacuous below 0.
        alignment: Mean squared distance of positive pairs (Wang and Isola 2020, alpha = 2): 0 is best, 2 is chance.
        uniformity: Log of the mean of exp(-2 squared distance) over all pairs: 0 when all rows are identical, about
            -4 + 4 / D when spread evenly.
        effective_rank: Number of directions in use, from 1 to rows - 1; see `effective_rank`.
        positive_mean: Mean similarity of positive pairs.
        negative_mean: Mean similarity of negative pairs.
        separation: Probability that a positive pair is more similar than a negative pair (area under the ROC curve).
        positive_histogram: Counts of positive pairs by similarity, in 40 even bins over [-1, 1].
        negative_histogram: The same for negative pairs.
        active_negatives: Fraction of (anchor, negative) nearer than the anchor's farthest positive.
        active_positives: Fraction of (anchor, positive) farther than the anchor's nearest negative.
        hubness: Skewness of how often a row is among the 10 nearest of others (Radovanović et al. 2010).
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
    label_entropy: float = math.nan
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
        """Convert to plain numbers and lists for JSON, with None for NaN."""
        plain: dict[str, Any] = nan_to_none(dataclasses.asdict(self))
        return plain

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "Diagnosis":
        """Read the output of `to_dict` back, for example from events.jsonl."""
        known = [field.name for field in dataclasses.fields(Diagnosis)]
        if missing := ", ".join([name for name in known if name not in values][:3]):
            raise DataError(f"not a diagnosis: {missing} missing. Use the output of Diagnosis.to_dict().")
        read: dict[str, Any] = none_to_nan({name: values[name] for name in known})
        histograms = {name: tuple(value) for name, value in read.items() if isinstance(value, list)}
        return Diagnosis(**{**read, **histograms})


@torch.no_grad()
def diagnose(emb: Tensor, labels: Tensor | Sequence[int], *, sample: int = SAMPLE, seed: int = 0) -> Diagnosis:
    """Compute statistics of (a sample of) the raw embeddings of an epoch.

    Args:
        emb: [N, D] of any float dtype, as the network outputs them: normalising would discard the norms.
        labels: [N] integers.
        sample: Maximum number of rows; the time grows with its square.
        seed: Selects the rows; the same seed and labels give the same rows.

    Returns:
        The statistics.
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
    rows = _draw_sample(labels, sample, seed)
    # On the CPU in float64: float32 rounding would dominate the log distances of nearly coincident points.
    emb, labels = emb[rows].cpu().double(), labels[rows].cpu()
    norms = torch.linalg.vector_norm(emb, dim=1)
    pairs = pair_up(emb, labels)
    upper = torch.ones_like(pairs.pos).triu_(1)
    positive, negative = pairs.sim[pairs.pos & upper], pairs.sim[pairs.neg & upper]
    parts = information.snca_parts(pairs, SIGMA) if len(positive) else (math.nan, math.nan)
    tightness, contrastive = map(float, parts)
    unit_emb = unit(emb)
    centred = unit_emb - unit_emb.mean(0)
    sq_norm = centred.square().sum(1)
    distance = distances(gram(centred), sq_norm, sq_norm)
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
        label_entropy=information.label_entropy(labels),
        information=information.neighbour_information(
            *information.count_neighbours(distance, labels[:, None] == labels, torch.arange(len(emb)), k=3), labels
        ),
        information_bound=information.mutual_information_bound(labels, tightness + contrastive),
        alignment=float(distance[pairs.pos & upper].square().mean()),
        uniformity=math.log(float(distance[upper].square().mul_(-2).exp_().mean())),
        effective_rank=effective_rank(unit_emb),
        positive_mean=float(positive.mean()),
        negative_mean=float(negative.mean()),
        separation=_separation(positive, negative),
        positive_histogram=_histogram(positive),
        negative_histogram=_histogram(negative),
        active_negatives=active_negatives,
        active_positives=active_positives,
        hubness=_hubness(pairs.sim),
    )


def effective_rank(rows: Tensor) -> float:
    """Compute the exponential of the entropy of the normalised covariance spectrum.

    Args:
        rows: [N, D].

    Returns:
        The number of directions in use; 1 when all rows are identical.
    """
    x = where_float64_exists(rows).double()
    x = x - x.mean(0)
    total = float(x.square().sum())
    if total <= len(x) * (16 * torch.finfo(torch.float64).eps) ** 2:  # only rounding of the mean
        return 1.0
    # The covariance and the Gram matrix share their spectrum; the smaller one is cheaper.
    share = torch.linalg.eigvalsh(x.T @ x if x.shape[1] <= len(x) else x @ x.T).clamp(min=0) / total
    return math.exp(-float(torch.special.xlogy(share, share).sum()))


def _draw_sample(labels: Tensor, sample: int, seed: int) -> Tensor:
    """Draw rows of every class, or of fewer: a uniform sample of many small classes would contain no positive pair."""
    _, code, count = torch.unique(labels.cpu(), return_inverse=True, return_counts=True)
    usable = count > 1 if bool((count > 1).any()) else count > 0
    g = torch.Generator().manual_seed(seed)
    quota = sample if len(labels) <= sample else max(PER_CLASS, sample // int(usable.sum()))
    shuffled = torch.randperm(len(code), generator=g)
    # Rows class by class, with the classes in random order; `position` counts within the class.
    rank = torch.randperm(len(count), generator=g)[code[shuffled]]
    order = torch.argsort(rank, stable=True)
    rows = shuffled[order]
    size = torch.bincount(rank, minlength=len(count))
    position = torch.arange(len(rows)) - (size.cumsum(0) - size)[rank[order]]
    rows = rows[usable[code[rows]] & (position < quota)]
    taken = torch.bincount(code[rows], minlength=len(count))
    # A class enters with all its rows or not at all, so that none is reduced to one row.
    new = torch.ones(len(rows), dtype=torch.bool)
    new[1:] = code[rows[1:]] != code[rows[:-1]]
    fits = taken[code[rows[new]]].cumsum(0) <= sample
    return rows[fits.repeat_interleave(taken[code[rows[new]]])].sort().values


def _entropies(distance: Tensor, pos: Tensor, dim: int) -> tuple[float, float]:
    """H(Z) and H(Z|Y) as in nearkin.analysis.information, from precomputed distances."""
    n = len(distance)
    logs = distance.clamp(min=1e-12).log_().fill_diagonal_(0.0)
    within = (logs * pos).sum(1) / pos.sum(1)  # per row, over its class; NaN for singletons
    return (dim * float(logs.sum()) / (n * (n - 1)) if n > 1 else math.nan), dim * float(within.mean())


def _active(pairs: Pairs) -> tuple[float, float]:
    positives, negatives = int(pairs.pos.sum()), int(pairs.neg.sum())
    if not positives or not negatives:
        return math.nan, math.nan
    farthest = pairs.sim.masked_fill(~pairs.pos, math.inf).amin(1, keepdim=True)
    nearest = pairs.sim.masked_fill(~pairs.neg, -math.inf).amax(1, keepdim=True)
    active_negatives = int(((pairs.sim > farthest) & pairs.neg).sum())
    active_positives = int(((pairs.sim < nearest) & pairs.pos).sum())
    return active_negatives / negatives, active_positives / positives


def _separation(positive: Tensor, negative: Tensor) -> float:
    if not len(positive) or not len(negative):
        return math.nan
    ranked = np.sort(negative.numpy())  # several times faster than torch.sort
    below = np.searchsorted(ranked, positive.numpy()) + np.searchsorted(ranked, positive.numpy(), side="right")
    return float(below.mean()) / (2 * len(ranked))


def _hubness(sim: Tensor) -> float:
    if len(sim) < 3:
        return math.nan
    nearest = sim.clone().fill_diagonal_(-math.inf).topk(min(NEIGHBOURS, len(sim) - 1)).indices
    return hubness(nearest.numpy(), len(sim))


def _histogram(values: Tensor) -> tuple[int, ...]:
    # Rounding may put a cosine just outside [-1, 1].
    counts = torch.histc(values.clamp(-1, 1), BINS, -1, 1)
    return tuple(int(c) for c in counts.tolist())


# Chosen between the values of 25 healthy and 11 broken runs on the glyphs; docs/diagnostics.md has the figures.
MAX_NEGATIVE_SIMILARITY = 0.995  # mean over negative pairs
MAX_NORM_GROWTH = 200.0  # relative to the start
MIN_RANK = 1.5  # directions in use
MIN_RANK_SHARE = 0.1  # directions in use, relative to the start
MIN_SEPARATION = 0.55  # 0.5 is chance

_FIXES = {
    "not finite": "Lower the learning rate, clip gradients, or disable mixed precision.",
    "dead": "The network has died: lower the learning rate and start again.",
    "collapse": "Check that the loss pushes negatives (its margin), use easier pairs (miner semihard, not hard), or "
    "lower the learning rate.",
    "exploding norms": "Lower the learning rate, or raise the weight decay.",
    "dimensional collapse": "Lower the learning rate, or use a loss that spreads embeddings (multi_similarity, "
    "proxy_anchor).",
    "no contrast": "Nothing is being learned: check that labels match images, then the margin and the learning rate.",
}


@dataclass(frozen=True)
class Alarm:
    """A problem of a run.

    Attributes:
        name: Type of the problem.
        observation: What was observed, with its value.
        fix: What to change.
    """

    name: str
    observation: str
    fix: str

    def __str__(self) -> str:
        return f"{self.name}: {self.observation}. {self.fix}"


def alarms(history: Sequence[Diagnosis]) -> list[Alarm]:
    """Check the last diagnosis of a run for known problems.

    Args:
        history: Diagnoses, oldest first. The first one, of the untrained network, serves as reference and raises no
            alarm except for values that are not finite.

    Returns:
        The problems found; empty for a healthy run.
    """
    if not history:
        return []
    start, now, last_two = history[0], history[-1], history[-2:]
    observed: dict[str, str] = {}
    if now.non_finite:
        observed["not finite"] = f"{now.non_finite:,} embeddings contain NaN or infinity"
    if len(history) > 1 and now.blank * 2 > now.rows:
        observed["dead"] = f"{now.blank:,} of {now.rows:,} embeddings are zero"
    if len(history) > 1 and now.negative_mean > MAX_NEGATIVE_SIMILARITY:
        similarity = f"negative pairs have a mean similarity of {now.negative_mean:.4f}"
        observed["collapse"] = f"all embeddings are alike: {similarity}"
    if len(history) > 1 and now.norm_mean > MAX_NORM_GROWTH * start.norm_mean > 0:
        growth = f"{now.norm_mean / start.norm_mean:,.0f} times that at the start"
        observed["exploding norms"] = f"embeddings have a mean norm of {now.norm_mean:,.0f}, {growth}"
    # The last two may occur in a healthy first epoch, so they must persist for two.
    if len(history) > 2 and all(epoch.effective_rank < _min_rank(start, epoch) for epoch in last_two):
        directions = f"{now.effective_rank:.1f} of {now.dim} directions in use"
        observed["dimensional collapse"] = f"{directions} ({start.effective_rank:.1f} at the start)"
    if len(history) > 2 and all(epoch.separation < MIN_SEPARATION for epoch in last_two):
        value = f"(separation {now.separation:.2f}, chance is 0.50)"
        observed["no contrast"] = f"positive pairs are as far apart as negative ones {value}"
    return [Alarm(name, observation, _FIXES[name]) for name, observation in observed.items()]


def _min_rank(start: Diagnosis, epoch: Diagnosis) -> float:
    """The rank below which embeddings count as collapsed. C classes need at most C - 1 directions."""
    available = min(epoch.dim, epoch.classes - 1)
    return max(MIN_RANK, min(MIN_RANK_SHARE * start.effective_rank, 0.3 * available)) if available >= 8 else 0.0
