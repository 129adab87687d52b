"""Constraints on a metric: pairs that should be near, pairs that should be far, and triplets."""

from dataclasses import dataclass, field
from typing import Literal, Self

import torch
from torch import Tensor

from nearkin.errors import ConfigError, DataError
from nearkin.ops.pairs import as_labels

Draw = Literal["pairs", "triplets", "both"]
WIDTHS = {"similar": 2, "dissimilar": 2, "triplets": 3}


def _empty(width: int) -> Tensor:
    return torch.zeros(0, width, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class Constraints:
    """Constraints as row indices of the data: integer tensors or anything `torch.as_tensor` accepts.

    Attributes:
        similar: [S, 2] pairs with d(i, j) <= upper.
        dissimilar: [D, 2] pairs with d(i, j) >= lower.
        triplets: [T, 3] with d(i, j) + margin <= d(i, k).

    Example:
        >>> len(Constraints(similar=[[0, 1]], triplets=[[0, 1, 2], [1, 0, 2]]))
        3
    """

    similar: Tensor = field(default_factory=lambda: _empty(2))
    dissimilar: Tensor = field(default_factory=lambda: _empty(2))
    triplets: Tensor = field(default_factory=lambda: _empty(3))

    def __post_init__(self) -> None:
        for name, width in WIDTHS.items():
            given = torch.as_tensor(getattr(self, name))
            rows = _empty(width) if given.numel() == 0 else given
            if rows.dim() != 2 or rows.shape[1] != width or rows.is_floating_point() or rows.dtype == torch.bool:
                got = f"{given.dtype} {list(given.shape)}. Each row lists the samples of one constraint."
                raise DataError(f"{name}: expected row indices [n, {width}], got {got}")
            object.__setattr__(self, name, rows.long())

    def __len__(self) -> int:
        return len(self.similar) + len(self.dissimilar) + len(self.triplets)

    def check(self, samples: int) -> None:
        """Raise a DataError if there are no constraints, or a row index is out of range."""
        if len(self) == 0:
            raise DataError("constraints: empty, so there is nothing to learn from.")
        for name in WIDTHS:
            rows = getattr(self, name)
            if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < samples:
                given = f"row indices from {int(rows.min())} to {int(rows.max())}"
                raise DataError(f"{name}: {given}, but there are {samples:,} samples (0 to {samples - 1}).")

    def take(self, indices: Tensor) -> Self:
        """Select constraints by index."""
        s, d = len(self.similar), len(self.dissimilar)
        return type(self)(
            self.similar[indices[indices < s]],
            self.dissimilar[indices[(indices >= s) & (indices < s + d)] - s],
            self.triplets[indices[indices >= s + d] - s - d],
        )


def draw_constraints(labels: Tensor, count: int, *, draw: Draw = "both", seed: int = 0) -> Constraints:
    """Draw random constraints from labels. Anchors are uniform over samples, partners uniform among those allowed.

    Args:
        labels: [N] integers; at least two classes, one of them with two samples.
        count: Number of constraints of each type.
        draw: "pairs" (similar and dissimilar), "triplets", or "both".
        seed: Of the random number generator.

    Returns:
        The constraints.
    """
    if draw not in ("pairs", "triplets", "both"):
        raise ConfigError(f"draw: expected 'pairs', 'triplets' or 'both', got {draw!r}.")
    if count < 1:
        raise ConfigError(f"constraints: expected at least 1 of each type, got {count}.")
    code = torch.unique(as_labels(labels).cpu(), return_inverse=True)[1]
    sizes = torch.bincount(code)
    paired = (sizes[code] > 1).nonzero().flatten()  # rows with another sample of their class
    if len(paired) == 0 or len(sizes) < 2:
        raise DataError(
            f"labels: {len(sizes)} class{'es' if len(sizes) > 1 else ''} over {len(code)} samples. Constraints need at "
            "least two classes, one of them with two samples."
        )
    generator = torch.Generator().manual_seed(seed)
    order = torch.argsort(code, stable=True)
    # Of each row: its place in class order, where its class starts there, and the size of its class.
    position = torch.argsort(order)
    start, size = (sizes.cumsum(0) - sizes)[code], sizes[code]

    def random_below(limit: Tensor) -> Tensor:
        fraction = torch.rand(len(limit), generator=generator, dtype=torch.float64)
        return torch.minimum((fraction * limit).long(), limit - 1)

    def positive(i: Tensor) -> Tensor:
        step = 1 + random_below(size[i] - 1)
        return order[start[i] + (position[i] - start[i] + step) % size[i]]

    def negative(i: Tensor) -> Tensor:
        # In class order, cyclically from the end of i's own class.
        return order[(start[i] + size[i] + random_below(len(code) - size[i])) % len(code)]

    def anchors(rows: Tensor) -> Tensor:
        return rows[torch.randint(len(rows), (count,), generator=generator)]

    drawn: dict[str, Tensor] = {}
    if draw != "triplets":
        i, j = anchors(paired), anchors(torch.arange(len(code)))
        drawn["similar"] = torch.stack([i, positive(i)], 1)
        drawn["dissimilar"] = torch.stack([j, negative(j)], 1)
    if draw != "pairs":
        i = anchors(paired)
        drawn["triplets"] = torch.stack([i, positive(i), negative(i)], 1)
    return Constraints(**drawn)


def target_neighbours(x: Tensor, labels: Tensor, count: int) -> Tensor:
    """Find the nearest samples of the same class for every sample, as pairs [P, 2]."""
    parts = [_empty(2)]
    for rows in torch.split(torch.argsort(labels, stable=True), torch.bincount(labels).tolist()):
        k = min(count, len(rows) - 1)
        for a in range(0, len(rows) if k > 0 else 0, 1024):
            distance = torch.cdist(x[rows[a : a + 1024]], x[rows])
            distance[:, a:].fill_diagonal_(float("inf"))
            nearest = rows[distance.topk(k, largest=False).indices]
            parts.append(torch.stack([rows[a : a + 1024].repeat_interleave(k), nearest.flatten()], 1))
    pairs = torch.cat(parts)
    return pairs[torch.argsort(pairs[:, 0], stable=True)]
