"""Retrieval metrics by brute force with exact fractions: a slow, independent reference for the ranking engine."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np


def nearness(x, y, similarity):
    """Return a number that ranks items y as their similarity to x does: an exact fraction, for Euclidean distances
    rounded once to float64, as ties are defined.
    """
    x, y = [Fraction(float(v)) for v in x], [Fraction(float(v)) for v in y]
    if similarity == "euclidean":
        return -float(sum((a - b) ** 2 for a, b in zip(x, y, strict=True)))
    dot = sum(a * b for a, b in zip(x, y, strict=True))
    length = sum(b * b for b in y)
    if length == 0 or not any(x):
        return Fraction(0)
    return (1 if dot > 0 else -1) * dot * dot / length  # the norm of the query is the same for all items


def lists(query, q_labels, gallery=None, g_labels=None, similarity="cosine", groups=None, gallery_groups=None):
    """Return the ranked items of each query as (nearness, is relevant), nearest first."""
    self_search = gallery is None
    if self_search:
        gallery, g_labels, gallery_groups = query, q_labels, groups
    out = []
    for i, x in enumerate(query):
        items = [
            (nearness(x, y, similarity), bool(g_labels[j] == q_labels[i]))
            for j, y in enumerate(gallery)
            if not (self_search and i == j) and not (groups is not None and groups[i] == gallery_groups[j])
        ]
        out.append(sorted(items, key=lambda item: -item[0]))
    return out


def integer_nearness(x, similarity):
    """Return numbers [N, N] that rank each row of integer vectors as `nearness` does, as Python integers."""
    x = np.asarray(x).astype(np.int64)
    dot = (x @ x.T).astype(object)
    square = np.diag(dot)
    if similarity == "euclidean":
        return 2 * dot - square[:, None] - square[None, :]
    common = math.lcm(*(int(s) for s in square if s))
    return dot * abs(dot) * np.array([common // int(s) if s else 0 for s in square], dtype=object)


def tie_groups_of_matrix(near, labels):
    """Return `tie_groups` of every query of a single set, given the nearness [N, N]."""
    return [
        tie_groups(
            sorted(((v, bool(labels[i] == labels[j])) for j, v in enumerate(row) if j != i), key=lambda p: -p[0])
        )
        for i, row in enumerate(near.tolist())
    ]


def tie_groups(items):
    """Return (items above, relevant, size) of every tie group with a relevant item."""
    out, above = [], 0
    for _, group in itertools.groupby(items, key=lambda item: item[0]):
        flags = [relevant for _, relevant in group]
        if any(flags):
            out.append((above, sum(flags), len(flags)))
        above += len(flags)
    return out


def orders(items):
    """Yield every order of the relevance flags that the ties allow, with repeats, all equally likely."""
    blocks = [[flag for _, flag in g] for _, g in itertools.groupby(items, key=lambda item: item[0])]
    for choice in itertools.product(*(itertools.permutations(b) for b in blocks)):
        yield [flag for block in choice for flag in block]


def metric(name, flags):
    """Compute a metric of one ranking without ties from its definition."""
    total = sum(flags)
    base, _, rest = name.partition("@")
    if base == "MRR":
        return 1 / (flags.index(True) + 1)
    if name == "RP":
        return sum(flags[:total]) / total
    if name == "MAP":
        return precision_sum(flags, len(flags)) / total
    if name == "MAP@R":
        return precision_sum(flags, total) / total
    k = int(rest.partition("/")[0])
    hits = sum(flags[:k])
    if base == "R":
        return float(hits > 0)
    if base == "P":
        return hits / k
    if base == "nDCG":
        gain = sum(1 / math.log2(i + 2) for i, flag in enumerate(flags[:k]) if flag)
        return gain / sum(1 / math.log2(i + 2) for i in range(min(k, total)))
    denominator = {"": min(k, total), "k": k, "R": total, "hits": hits}[rest.partition("/")[2]]
    return precision_sum(flags, k) / denominator if denominator else 0.0


def precision_sum(flags, k):
    """Sum the precision at each relevant item among the first k."""
    return sum(sum(flags[: i + 1]) / (i + 1) for i in range(min(k, len(flags))) if flags[i])


def clustered(n, dim, samples_per_class, noise, seed=0):
    """Return float32 vectors around class centres, and their labels."""
    rng = np.random.default_rng(seed)
    labels = np.arange(n) // samples_per_class
    centres = rng.standard_normal((labels.max() + 1, dim))
    return (centres[labels] + noise * rng.standard_normal((n, dim))).astype(np.float32), labels
