"""Integer codes: vectors that are small integers times a factor, whose similarities are computed exactly."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MAX_CODE_SQUARE = 2.0**16  # of integer codes: products of three such numbers are exact, and distinct cosines differ
_CHUNK = 4096  # rows converted at a time, to keep float64 copies small


@dataclass(frozen=True)
class Codes:
    """Vectors that are small integers times a factor, such as binary codes: a rounded key gives the exact similarity.

    With the integer a = rint((key + offset) * root_i * root_j) the items of query i are ordered by a|a| / weight_j.
    Cosine: a is the dot product of the integers, weight the square of their norm. Euclidean: a is minus the squared
    distance, and weight is 1.
    """

    root: NDArray[np.float64]  # [N]
    weight: NDArray[np.float64]  # [N]
    offset: float


def integer_codes(
    sets: list[Tensor], scales: list[tuple[Tensor, Tensor]], cosine: bool, scale: float, middle: float
) -> list[Codes | None]:
    """Return the codes of each set, or None if some vector is not a factor (Euclidean: one for all) times integers."""
    units = [_units(x[:16]) for x in sets]  # most sets need no more than this to be ruled out
    if all(bool(_squares(x[:16], unit).isfinite().all()) for x, unit in zip(sets, units, strict=True)):
        units = [torch.cat([_units(part) for part in torch.split(x, _CHUNK)]) for x in sets]
        if not cosine:
            smallest = min(float(unit.min()) for unit in units)
            units = [torch.full_like(unit, smallest) for unit in units]
        parts = [
            zip(torch.split(x, _CHUNK), torch.split(unit, _CHUNK), strict=True)
            for x, unit in zip(sets, units, strict=True)
        ]
        squares = [torch.cat([_squares(*part) for part in pairs]).cpu().numpy() for pairs in parts]
        if all(np.isfinite(square).all() for square in squares):
            if cosine:
                weights = [np.maximum(square, 1.0) for square in squares]
                return [Codes(np.sqrt(weight) / scale, weight, scale**2 + 2 * middle) for weight in weights]
            root = np.sqrt(2.0) / (smallest * float(scales[0][0][0])) / scale
            return [Codes(np.full(len(x), root), np.ones(len(x)), 2 * middle) for x in sets]
    return [None for _ in sets]


def _units(x: Tensor) -> Tensor:
    """[n] the factor of each row: 1 if it holds integers, otherwise its smallest absolute value except 0."""
    x = x.double()
    smallest = torch.where(x == 0, torch.inf, x.abs()).amin(1)
    return torch.where((x == x.round()).all(1), 1.0, smallest)


def _squares(x: Tensor, unit: Tensor) -> Tensor:
    """[n] the squared norm of the integers x / unit; infinite if they are not integers, or not small."""
    x, unit = x.double(), unit[:, None]
    whole = (x / unit).round()
    square = whole.square().sum(1)
    return torch.where((whole * unit == x).all(1) & (square <= _MAX_CODE_SQUARE), square, torch.inf)
