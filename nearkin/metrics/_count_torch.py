"""The torch backend, for any device and without a compiler: a float64 product per block of queries."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from nearkin.metrics._problem import PartialRanking, Progress, RankingProblem, Thresholds, thresholds
from nearkin.metrics._vectors import GalleryMatrix, Ints, exact_distance

_MAX_LOOP = 16  # relevant items per query up to which comparing with each in turn beats sorting the row


def count_torch(problem: RankingProblem, budget: int, progress: Progress | None) -> Iterator[PartialRanking]:
    """Count the items above every relevant item, one block of queries at a time."""
    device = problem.query.x.device
    gallery = GalleryMatrix(problem.gallery, problem.order, torch.float64, budget // 2)
    _, error_bound = problem.query.error_bounds(problem.gallery)
    size = problem.class_start[1:] - problem.class_start[:-1]
    # Queries of equally large classes go together: their thresholds then fill a rectangle.
    queue = np.argsort(size[problem.codes], kind="stable")
    # Bytes per cell: the key, a sorted copy, and temporaries of the comparison.
    step = max(1, min(1024, budget // 2 // (len(problem.gallery) * 32)))
    for a in range(0, len(queue), step):
        queries = queue[a : a + step]
        index = torch.as_tensor(queries, device=device)
        yield _count_block(problem, queries, gallery.keys(problem.query.query_matrix(index)), error_bound[index])
        if progress:
            progress(min(1.0, (a + step) / len(queue)))


def _count_block(problem: RankingProblem, queries: Ints, keys: Tensor, error_bound: Tensor) -> PartialRanking:
    device = keys.device
    row, position = problem.relevant_pairs(queries)
    cells = (torch.as_tensor(row, device=device), torch.as_tensor(position, device=device))
    t = thresholds(problem, queries, row, position, keys[cells].cpu().numpy(), error_bound.cpu().numpy())
    # Items that must not be counted (the relevant ones, the query itself, its group) become infinitely far.
    keys[cells] = -torch.inf
    if problem.single_set:
        keys.masked_fill_(torch.as_tensor(problem.order[None, :] == queries[:, None], device=device), -torch.inf)
    if problem.groups is not None:
        same = problem.groups[1][None, :] == problem.groups[0][queries][:, None]
        keys.masked_fill_(torch.as_tensor(same, device=device), -torch.inf)
    max_groups = int(t.counts.max(initial=0))
    above = np.zeros(len(t.key), dtype=np.int64)
    tied = np.zeros(len(t.key), dtype=np.int64)
    if max_groups:
        r = np.repeat(np.arange(len(queries)), t.counts)
        slot = np.arange(len(r)) - (np.cumsum(t.counts) - t.counts)[r]
        # Nearest first, so that the padding comes last.
        padded = torch.full((len(queries), max_groups), -torch.inf, dtype=torch.float64)
        padded[r, slot] = torch.as_tensor(t.key)
        certain, possible = _count_above(keys, padded.to(device), 2 * error_bound)
        above = certain[r, slot]
        ambiguous = np.nonzero(possible[r, slot] > above)[0]
        _break_ties(problem, queries, keys, t, r, ambiguous, 2 * error_bound, above, tied)
    return t.result(queries, above, tied)


def _count_above(keys: Tensor, threshold: Tensor, margin: Tensor) -> tuple[Ints, Ints]:
    """[rows, slots] how many keys certainly exceed each threshold, and how many possibly do."""
    low, high = threshold - margin[:, None], threshold + margin[:, None]
    if threshold.shape[1] <= _MAX_LOOP:
        certain = torch.stack([(keys > high[:, k, None]).sum(1) for k in range(threshold.shape[1])], dim=1)
        possible = torch.stack([(keys >= low[:, k, None]).sum(1) for k in range(threshold.shape[1])], dim=1)
    else:
        # On a CPU NumPy sorts several times faster than torch.
        on_cpu = keys.device.type == "cpu"
        ascending = torch.from_numpy(np.sort(keys.numpy(), axis=1)) if on_cpu else keys.sort(dim=1).values
        certain = keys.shape[1] - torch.searchsorted(ascending, high, right=True)
        possible = keys.shape[1] - torch.searchsorted(ascending, low, right=False)
    return certain.cpu().numpy(), possible.cpu().numpy()


def _break_ties(
    problem: RankingProblem,
    queries: Ints,
    keys: Tensor,
    t: Thresholds,
    r: Ints,
    ambiguous: Ints,
    margin: Tensor,
    above: Ints,
    tied: Ints,
) -> None:
    """Compare every key too close to its threshold by exact distance; add to `above` and `tied` in place."""
    step = max(1, 10**7 // keys.shape[1])
    for a in range(0, len(ambiguous), step):
        group = ambiguous[a : a + step]
        row = torch.as_tensor(r[group], device=keys.device)
        gap = keys[row] - torch.as_tensor(t.key[group], device=keys.device)[:, None]
        which, position = (gap.abs() <= margin[row, None]).nonzero().cpu().numpy().T
        group = group[which]
        i, j, sample = queries[r[group]], problem.order[position], problem.order[t.sample[group]]
        same = problem.gallery.row_id[j] == problem.gallery.row_id[sample]
        np.add.at(tied, group[same], 1)
        group, i, j, sample = group[~same], i[~same], j[~same], sample[~same]
        if len(group):
            relevant_distance = exact_distance(problem.query, problem.gallery, i, sample)
            other_distance = exact_distance(problem.query, problem.gallery, i, j)
            np.add.at(above, group[other_distance < relevant_distance], 1)
            np.add.at(tied, group[other_distance == relevant_distance], 1)
