"""The path for any device and without a compiler: a float64 product, block by block of queries.

float64 leaves next to nothing to settle, and is not touched by reduced-precision modes of the hardware.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from nearkin.metrics._problem import Part, Progress, RankingProblem, Thresholds, before, thresholds
from nearkin.metrics._vectors import Columns, Ints, exact_distance

_LOOP_UP_TO = 16  # relevant items per query up to which comparing with each in turn beats sorting the row


def count_torch(task: RankingProblem, budget: int, progress: Progress | None) -> Iterator[Part]:
    """Count block by block of queries with a float64 product, which leaves next to nothing to settle."""
    device = task.query.x.device
    columns = Columns(task.gallery, task.order, torch.float64, budget // 2)
    _, slack = task.query.slack(task.gallery)
    size = task.class_start[1:] - task.class_start[:-1]
    # Queries of equally large classes together: their thresholds fill a rectangle.
    queue = np.argsort(size[task.codes], kind="stable")
    # Per cell: the key, a sorted copy, and what comparing them needs.
    step = max(1, min(1024, budget // 2 // (len(task.gallery) * 32)))
    for a in range(0, len(queue), step):
        queries = queue[a : a + step]
        at = torch.as_tensor(queries, device=device)
        yield _count_block(task, queries, columns.keys(task.query.left(at)), slack[at])
        if progress:
            progress(min(1.0, (a + step) / len(queue)))


def _count_block(task: RankingProblem, queries: Ints, keys: Tensor, slack: Tensor) -> Part:
    device = keys.device
    row, position = task.relevant(queries)
    at = (torch.as_tensor(row, device=device), torch.as_tensor(position, device=device))
    t = thresholds(task, queries, row, position, keys[at].cpu().numpy(), slack.cpu().numpy())
    # What must not be counted becomes infinitely far: the relevant items, the query itself, its group.
    keys[at] = -torch.inf
    if task.alone:
        keys.masked_fill_(torch.as_tensor(task.order[None, :] == queries[:, None], device=device), -torch.inf)
    if task.group is not None and task.order_group is not None:
        same = task.order_group[None, :] == task.group[queries][:, None]
        keys.masked_fill_(torch.as_tensor(same, device=device), -torch.inf)
    most = int(t.counts.max(initial=0))
    above = np.zeros(len(t.key), dtype=np.int64)
    tied = np.zeros(len(t.key), dtype=np.int64)
    if most:
        r = np.repeat(np.arange(len(queries)), t.counts)
        slot = np.arange(len(r)) - (np.cumsum(t.counts) - t.counts)[r]
        edges = torch.full((len(queries), most), -torch.inf, dtype=torch.float64)  # nearest first, so padding goes last
        edges[r, slot] = torch.as_tensor(t.key)
        edges = edges.to(device)
        surely, perhaps = _count_above(keys, edges, 2 * slack)
        above = surely[r, slot]
        doubt = np.nonzero(perhaps[r, slot] > above)[0]
        _settle(task, queries, keys, t, r, doubt, 2 * slack, above, tied)
    return Part(queries, t.counts, above=above + before(t), relevant=t.relevant, size=t.relevant + tied)


def _count_above(keys: Tensor, edges: Tensor, margin: Tensor) -> tuple[Ints, Ints]:
    """[rows, slots] how many keys lie above each edge for certain, and how many may."""
    low, high = edges - margin[:, None], edges + margin[:, None]
    if edges.shape[1] <= _LOOP_UP_TO:
        surely = torch.stack([(keys > high[:, k, None]).sum(1) for k in range(edges.shape[1])], dim=1)
        perhaps = torch.stack([(keys >= low[:, k, None]).sum(1) for k in range(edges.shape[1])], dim=1)
    else:
        ascending = _sorted(keys)
        surely = keys.shape[1] - torch.searchsorted(ascending, high, right=True)
        perhaps = keys.shape[1] - torch.searchsorted(ascending, low, right=False)
    return surely.cpu().numpy(), perhaps.cpu().numpy()


def _sorted(keys: Tensor) -> Tensor:
    """Each row in ascending order. On a CPU NumPy sorts several times faster than torch."""
    if keys.device.type == "cpu":
        return torch.from_numpy(np.sort(keys.numpy(), axis=1))
    return keys.sort(dim=1).values


def _settle(
    task: RankingProblem,
    queries: Ints,
    keys: Tensor,
    t: Thresholds,
    r: Ints,
    doubt: Ints,
    margin: Tensor,
    above: Ints,
    tied: Ints,
) -> None:
    """Decide by the exact distance every key too near to an edge; add to above and tied."""
    step = max(1, 10**7 // keys.shape[1])
    for a in range(0, len(doubt), step):
        edge = doubt[a : a + step]
        row = torch.as_tensor(r[edge], device=keys.device)
        gap = keys[row] - torch.as_tensor(t.key[edge], device=keys.device)[:, None]
        which, position = (gap.abs() <= margin[row, None]).nonzero().cpu().numpy().T
        edge = edge[which]
        i, j, sample = queries[r[edge]], task.order[position], task.order[t.sample[edge]]
        same = task.gallery.group[j] == task.gallery.group[sample]
        np.add.at(tied, edge[same], 1)
        edge, i, j, sample = edge[~same], i[~same], j[~same], sample[~same]
        if len(edge):
            ours = exact_distance(task.query, task.gallery, i, sample)
            theirs = exact_distance(task.query, task.gallery, i, j)
            np.add.at(above, edge[theirs < ours], 1)
            np.add.at(tied, edge[theirs == ours], 1)
