"""Retrieval by brute force and exact fractions: what the fast engine is held against. Slow, plain, independent."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np


def nearness(x, y, similarity):
    """A fraction that orders items y as the similarity to x does; nothing is rounded."""
    x, y = [Fraction(float(v)) for v in x], [Fraction(float(v)) for v in y]
    if similarity == "euclidean":
        return -sum((a - b) ** 2 for a, b in zip(x, y, strict=True))
    dot = sum(a * b for a, b in zip(x, y, strict=True))
    length = sum(b * b for b in y)
    if length == 0 or not any(x):
        return Fraction(0)
    return (1 if dot > 0 else -1) * dot * dot / length  # the query's own length is common to all


def lists(query, q_labels, gallery=None, g_labels=None, similarity="cosine", groups=None, g_groups=None):
    """Per query: what is ranked, as (nearness, is relevant), nearest first."""
    alone = gallery is None
    if alone:
        gallery, g_labels, g_groups = query, q_labels, groups
    out = []
    for i, x in enumerate(query):
        items = [
            (nearness(x, y, similarity), bool(g_labels[j] == q_labels[i]))
            for j, y in enumerate(gallery)
            if not (alone and i == j) and not (groups is not None and groups[i] == g_groups[j])
        ]
        out.append(sorted(items, key=lambda item: -item[0]))
    return out


def tie_groups(items):
    """(above, relevant, size) of every group of equal nearness that holds a relevant item."""
    out, above = [], 0
    for _, group in itertools.groupby(items, key=lambda item: item[0]):
        flags = [relevant for _, relevant in group]
        if any(flags):
            out.append((above, sum(flags), len(flags)))
        above += len(flags)
    return out


def orders(items):
    """Every order of relevance flags that the ties allow (with repeats, all equally likely)."""
    blocks = [[flag for _, flag in g] for _, g in itertools.groupby(items, key=lambda item: item[0])]
    for choice in itertools.product(*(itertools.permutations(b) for b in blocks)):
        yield [flag for block in choice for flag in block]


def metric(name, flags):
    """The metric of one strict ranking, straight from its definition."""
    total = sum(flags)
    kind, _, rest = name.partition("@")
    if kind == "MRR":
        return 1 / (flags.index(True) + 1)
    if name == "RP":
        return sum(flags[:total]) / total
    if name == "MAP":
        return precision_sum(flags, len(flags)) / total
    if name == "MAP@R":
        return precision_sum(flags, total) / total
    k = int(rest.partition("/")[0])
    hits = sum(flags[:k])
    if kind == "R":
        return float(hits > 0)
    if kind == "P":
        return hits / k
    if kind == "nDCG":
        gain = sum(1 / math.log2(i + 2) for i, flag in enumerate(flags[:k]) if flag)
        return gain / sum(1 / math.log2(i + 2) for i in range(min(k, total)))
    below = {"": min(k, total), "k": k, "R": total, "hits": hits}[rest.partition("/")[2]]
    return precision_sum(flags, k) / below if below else 0.0


def precision_sum(flags, k):
    return sum(sum(flags[: i + 1]) / (i + 1) for i in range(min(k, len(flags))) if flags[i])


def clustered(n, dim, samples_per_class, noise, seed=0):
    """Float32 vectors around class centres, and their labels."""
    rng = np.random.default_rng(seed)
    labels = np.arange(n) // samples_per_class
    centres = rng.standard_normal((labels.max() + 1, dim))
    return (centres[labels] + noise * rng.standard_normal((n, dim))).astype(np.float32), labels
