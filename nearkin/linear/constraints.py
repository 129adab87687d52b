"""What a metric is asked for: pairs that shall be near, pairs that shall be far, and triplets in their order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from nearkin.errors import ConfigError, DataError
from nearkin.ops.pairs import as_labels

Draw = Literal["pairs", "triplets", "both"]


def _none(width: int) -> Tensor:
    return torch.zeros(0, width, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class Constraints:
    """Row numbers of the data, as integer tensors or anything `torch.as_tensor` takes.

    similar      [S, 2]  d(i, j) <= upper
    dissimilar   [D, 2]  d(i, j) >= lower
    triplets     [T, 3]  d(i, j) + margin <= d(i, k)

    >>> len(Constraints(similar=[[0, 1]], triplets=[[0, 1, 2], [1, 0, 2]]))
    3
    """

    similar: Tensor = field(default_factory=lambda: _none(2))
    dissimilar: Tensor = field(default_factory=lambda: _none(2))
    triplets: Tensor = field(default_factory=lambda: _none(3))

    def __post_init__(self) -> None:
        for name, width in (("similar", 2), ("dissimilar", 2), ("triplets", 3)):
            given = torch.as_tensor(getattr(self, name))
            rows = _none(width) if given.numel() == 0 else given
            if rows.dim() != 2 or rows.shape[1] != width or rows.is_floating_point() or rows.dtype == torch.bool:
                raise DataError(
                    f"{name}: expected row numbers [n, {width}], got {given.dtype} {list(given.shape)}. "
                    "Each line names the samples of one constraint."
                )
            object.__setattr__(self, name, rows.long())

    def __len__(self) -> int:
        return len(self.similar) + len(self.dissimilar) + len(self.triplets)

    def check(self, samples: int) -> None:
        """Raise if a row number is not among `samples`, or if there is nothing to learn from."""
        if len(self) == 0:
            raise DataError("constraints: none given, so there is nothing to learn from.")
        for name in ("similar", "dissimilar", "triplets"):
            rows = getattr(self, name)
            if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= samples):
                raise DataError(
                    f"{name}: row numbers from {int(rows.min())} to {int(rows.max())}, but there are {samples:,} "
                    f"samples (0 to {samples - 1})."
                )

    def take(self, chosen: Tensor) -> Constraints:
        """Some of them, by number: the similar come first, then the dissimilar, then the triplets."""
        s, d = len(self.similar), len(self.dissimilar)
        return Constraints(
            self.similar[chosen[chosen < s]],
            self.dissimilar[chosen[(chosen >= s) & (chosen < s + d)] - s],
            self.triplets[chosen[chosen >= s + d] - s - d],
        )


def draw_constraints(labels: Tensor, count: int, *, draw: Draw = "both", seed: int = 0) -> Constraints:
    """`count` constraints of each kind at random: classes by their share of the samples, rows alike within a class.

    labels   [N] integers; needs a class with two samples and, beside it, a second class
    draw     "pairs" (similar and dissimilar), "triplets", or "both"

    >>> drawn = draw_constraints(torch.tensor([0, 0, 1]), 4, draw="triplets")
    >>> sorted(set(map(tuple, drawn.triplets.tolist())))
    [(0, 1, 2), (1, 0, 2)]
    """
    if draw not in ("pairs", "triplets", "both"):
        raise ConfigError(f"draw: expected 'pairs', 'triplets' or 'both', got {draw!r}.")
    if count < 1:
        raise ConfigError(f"constraints: expected at least 1 of each kind, got {count}.")
    code = torch.unique(as_labels(labels).cpu(), return_inverse=True)[1]
    sizes = torch.bincount(code)
    paired = (sizes[code] > 1).nonzero().flatten()  # rows that have kin
    if len(paired) == 0 or len(sizes) < 2:
        raise DataError(
            f"labels: {len(sizes)} class{'es' if len(sizes) > 1 else ''} over {len(code)} samples. Constraints need at "
            "least two classes, one of them with two samples."
        )
    generator = torch.Generator().manual_seed(seed)
    order = torch.argsort(code, stable=True)
    start = sizes.cumsum(0) - sizes
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))

    def below(limit: Tensor) -> Tensor:
        share = torch.rand(len(limit), generator=generator, dtype=torch.float64)
        return torch.minimum((share * limit).long(), limit - 1)

    def kin(i: Tensor) -> Tensor:
        step = 1 + below(sizes[code[i]] - 1)
        return order[start[code[i]] + (place[i] - start[code[i]] + step) % sizes[code[i]]]

    def other(i: Tensor) -> Tensor:
        # The samples in class order, going round from the end of i's own class.
        return order[(start[code[i]] + sizes[code[i]] + below(len(code) - sizes[code[i]])) % len(code)]

    def anchors(rows: Tensor) -> Tensor:
        return rows[torch.randint(len(rows), (count,), generator=generator)]

    found: dict[str, Tensor] = {}
    if draw != "triplets":
        i, j = anchors(paired), anchors(torch.arange(len(code)))
        found["similar"] = torch.stack([i, kin(i)], 1)
        found["dissimilar"] = torch.stack([j, other(j)], 1)
    if draw != "pairs":
        i = anchors(paired)
        found["triplets"] = torch.stack([i, kin(i), other(i)], 1)
    return Constraints(**found)


def target_neighbours(x: Tensor, labels: Tensor, count: int) -> Tensor:
    """For every sample the `count` nearest of its own class, or all of them if the class is smaller: pairs [P, 2].

    >>> target_neighbours(torch.tensor([[0.0], [1.0], [3.0], [9.0]]), torch.tensor([0, 0, 0, 1]), 1).tolist()
    [[0, 1], [1, 0], [2, 1]]
    """
    order = torch.argsort(labels, stable=True)
    sizes = torch.unique(labels, return_counts=True)[1]
    pairs = [_none(2)]
    for rows in torch.split(order, sizes.tolist()):
        near = min(count, len(rows) - 1)
        if near < 1:
            continue
        members = x[rows]
        for a in range(0, len(rows), 1024):
            gap = torch.cdist(members[a : a + 1024], members)
            gap.fill_diagonal_(float("inf")) if a == 0 else gap[:, a:].fill_diagonal_(float("inf"))
            found = rows[gap.topk(near, largest=False).indices]
            pairs.append(torch.stack([rows[a : a + 1024].repeat_interleave(near), found.flatten()], 1))
    every = torch.cat(pairs)
    return every[torch.argsort(every[:, 0], stable=True)]
