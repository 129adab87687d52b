"""Vectors and labels as the ranking engine wants them, and the exact similarity that settles close calls.

One geometry serves both similarities. With z the unit vectors (cosine) or the raw vectors (Euclidean), m the mean of
the gallery's z and delta = z - m, the key of a pair is

    w_ij = delta_i . delta_j + b_i + b_j,        b = -|delta|^2 / 2        so that        w_ij = -|z_i - z_j|^2 / 2

which is the cosine minus one, or minus half the squared distance. Subtracting the mean changes no order, and keeps
the rounding error in proportion to how far apart the vectors really are: a model that has nearly collapsed is ranked
as sharply as any other. (A zero vector has cosine 0 with everything, so its b is lower by one half. In the end a
constant is taken off all b, which changes no order either.)

The key comes from a matrix product, so it is known only to within an error bound, `Points.slack`. Whatever lies closer
than the bound is settled by `exact_distance`: computed with twice the precision of float64 in a fixed order, then
rounded to one float64. Two gallery items tie for a query when that number is the same for both. The block size, the
number of threads and the library that multiplied cannot change it.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.errors import ConfigError, DataError, did_you_mean

SIMILARITIES = ("cosine", "euclidean")
U32, U64 = 2.0**-24, 2.0**-53  # half a unit in the last place
ZERO_NORM = 1e-12  # at or below it a vector has no direction: its cosine with everything is 0
SNAP = 2.0**80  # exact cosine distances are rounded to multiples of 2^-80 (see exact_distance)
_SPLIT = 134217729.0  # 2^27 + 1: cuts a float64 into two halves whose products are exact
_CHUNK = 4096  # rows prepared at a time, so that float64 copies stay small

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


# ---------------------------------------------------------------------------------------------- what the user gave


def check_similarity(name: str) -> str:
    if name not in SIMILARITIES:
        hint = did_you_mean(name, SIMILARITIES) or " There are: cosine, euclidean."
        raise ConfigError(f"similarity: no similarity named {name!r}.{hint}")
    return name


def as_matrix(values: Any, what: str) -> Tensor:
    """A finite, contiguous [N, D] float32 or float64 tensor on its own device, or a DataError that says why not."""
    try:
        x = values.detach() if isinstance(values, Tensor) else _as_tensor(np.asarray(values))
    except (TypeError, ValueError) as error:
        raise DataError(f"{what}: cannot be read as a matrix of numbers ({error}).") from None
    shape = tuple(x.shape)
    if x.ndim != 2:
        cure = "One vector? Add an axis: x[None]." if x.ndim == 1 else "Flatten it to one row per item."
        raise DataError(f"{what}: expected one row per item, [N, D]; got shape {shape}. {cure}")
    if 0 in shape:
        raise DataError(f"{what}: nothing to rank, got shape {shape}.")
    if x.is_complex():
        raise DataError(f"{what}: expected real numbers, got {x.dtype}.")
    if x.device.type == "mps":
        x = x.cpu()  # no float64 there
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    elif x.dtype not in (torch.float32, torch.float64):
        x = x.double()
    x = x.contiguous()
    # A sum needs no mask as large as x; only when it is not finite (or overflows) do we look for the row to name.
    if not bool(torch.isfinite(x.sum())):
        bad = (~torch.isfinite(x)).any(1).nonzero()
        if len(bad):
            kind = "NaN" if bool(torch.isnan(x).any()) else "infinite values"
            raise DataError(
                f"{what}: {kind} in {len(bad)} of {len(x)} rows (first: row {int(bad[0])}). "
                "Nothing ranks against them; find out why the model gave them, or drop those rows."
            )
    return x


def _as_tensor(values: NDArray[Any]) -> Tensor:
    """Any array of numbers, copied only where torch must have it so: it knows no negative strides or foreign bytes."""
    if any(stride < 0 for stride in values.strides) or not values.dtype.isnative:
        values = values.astype(values.dtype.newbyteorder("="), order="C")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writ")  # nor do we write to it
        return torch.as_tensor(values)


def as_labels(values: Any, length: int, what: str, of: str) -> NDArray[Any]:
    """Labels as a 1-D array of integers or strings, exact for any integer size."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    given = np.asarray(values)
    if given.dtype.kind == "f" and isinstance(values, list | tuple) and all(isinstance(v, int) for v in values):
        given = np.array(values, dtype=object)  # integers too large or too mixed for one machine type
    if given.dtype == object:
        kinds = {type(v) for v in given.ravel().tolist()}
        if kinds <= {str, np.str_}:
            given = given.astype(np.str_)
        elif all(issubclass(k, int | np.integer) for k in kinds):
            given = np.array([int(v) for v in given.ravel()], dtype=object).reshape(given.shape)
        else:
            names = ", ".join(sorted(k.__name__ for k in kinds))
            raise DataError(f"{what}: expected integers or strings, got {names}.")
    elif given.dtype.kind not in "iubUS":
        cure = "Give whole numbers, for example labels.astype(int): as floats, large ids run together."
        raise DataError(f"{what}: expected integers or strings, got {given.dtype}. {cure}")
    if given.dtype.kind == "S":  # bytes, as some files hold their names; the same names as text elsewhere are the same
        try:
            given = np.char.decode(given, "utf-8")
        except UnicodeDecodeError:
            raise DataError(f"{what}: byte strings that are not UTF-8. Decode them first.") from None
    if given.ndim != 1:
        raise DataError(f"{what}: expected one label per row, [N]; got shape {given.shape}.")
    if len(given) != length:
        raise DataError(f"{what}: {len(given)} labels for {length} rows of {of}.")
    return given


def encode(first: NDArray[Any], second: NDArray[Any] | None, what: str) -> tuple[Ints, Ints, NDArray[Any]]:
    """Both label arrays as codes into one sorted array of distinct labels.

    Distinct labels are matched as Python objects: NumPy would join int64 and uint64 as float64 and confuse large ids.
    """
    names, codes = np.unique(first, return_inverse=True)
    codes = codes.astype(np.int64)
    if second is None:
        return codes, codes, names
    if (first.dtype.kind in "US") != (second.dtype.kind in "US"):
        raise DataError(
            f"{what}: the query has {first.dtype} labels and the gallery {second.dtype}; nothing can match."
        )
    others, other_codes = np.unique(second, return_inverse=True)
    place = {name: i for i, name in enumerate(names.tolist())}
    extra = [name for name in others.tolist() if name not in place]
    place |= {name: len(names) + i for i, name in enumerate(extra)}
    to_code = np.array([place[name] for name in others.tolist()], dtype=np.int64)
    everything = list(place)
    joined = np.array(everything) if isinstance(everything[0], str | bytes) else np.array(everything, dtype=object)
    if joined.dtype == object and all(-(2**63) <= int(v) < 2**63 for v in everything):
        joined = joined.astype(np.int64)
    return codes, to_code[other_codes], joined


def identical_rows(sets: list[Tensor], blanks: list[Tensor]) -> list[Ints]:
    """A number per row of each set, the same for rows equal element by element (and for all rows marked blank).

    Rows are hashed by integer arithmetic on their bits, which cannot depend on how a library orders a sum, and rows of
    equal hash are compared in full.
    """
    width = sets[0].shape[1]
    factors = np.random.default_rng(0).integers(1, 2**63, width, dtype=np.uint64) | np.uint64(1)
    parts = []
    for x in sets:
        for a in range(0, len(x), _CHUNK):
            bits = (x[a : a + _CHUNK] + 0.0).cpu().numpy()  # -0.0 and 0.0 are the same number
            words: NDArray[Any] = bits.view(np.uint32 if bits.dtype == np.float32 else np.uint64)
            parts.append((words * factors).sum(1, dtype=np.uint64))
    hashes, dead = np.concatenate(parts), np.concatenate([b.cpu().numpy() for b in blanks])
    hashes[dead] = 0
    first = len(sets[0])
    order = np.argsort(hashes, kind="stable")
    new = np.ones(len(order), dtype=bool)
    for k in np.nonzero(hashes[order][1:] == hashes[order][:-1])[0] + 1:
        i, j = int(order[k]), int(order[k - 1])
        x, y = (sets[0][r] if r < first else sets[1][r - first] for r in (i, j))
        new[k] = not ((dead[i] and dead[j]) or torch.equal(x, y))
    group = np.empty(len(order), dtype=np.int64)
    group[order] = np.cumsum(new) - 1
    return np.split(group, np.cumsum([len(x) for x in sets])[:-1])


# ---------------------------------------------------------------------------------------------------- the geometry


@dataclass(frozen=True)
class Points:
    """One set of vectors, ready to be multiplied against another of the same geometry."""

    x: Tensor  # [N, D] as given
    shrink: Tensor  # [N] factor that makes z from x (1 / norm, or 1), float64
    power: Tensor  # [N] power of two that brings x near 1, so that exact sums neither overflow nor vanish
    centre: Tensor  # [D] the mean that is subtracted, float64
    scale: float  # power of two that brings delta near 1
    bias: Tensor  # [N] b, of the scaled delta, float64
    reach: Tensor  # [N] |delta|, scaled, float64
    cosine: bool
    group: Ints  # [N] the same number for identical rows

    def __len__(self) -> int:
        return len(self.x)

    def delta(self, rows: slice | Tensor) -> Tensor:
        """The scaled delta of some rows, in float64."""
        return (self.x[rows].double() * self.shrink[rows, None] - self.centre) * self.scale

    def slack(self, others: Points) -> tuple[Tensor, Tensor]:
        """Bounds on the error of a key, per row, from a float32 and from a float64 product with `others`.

        A dot product of d terms is off by at most d units of rounding times the product of the lengths, in whatever
        order it is summed. The rest is the rounding of what goes in: norms, deltas, biases, and of the exact distance.
        """
        d = self.x.shape[1]
        size = self.reach * others.reach.max() + self.bias.abs() + others.bias.abs().max()
        # The biases had a constant taken off: before that they were up to the square of the reach, or one half more.
        double = 6 * (d + 16) * U64 * (size + (self.reach + others.reach.max()) ** 2)
        if self.cosine:
            double = double + 8 * U64 * self.scale * (self.reach + others.reach.max()) + self.scale**2 * 2.0**-60
        return 1.05 * (d + 16) * U32 * size + double + 1e-30, double + 1e-200

    def left(self, rows: slice | Tensor) -> Tensor:
        """[n, D + 2] float64 whose product with `right().T` of another set is the key."""
        bias = self.bias[rows, None]
        return torch.cat([self.delta(rows), bias, torch.ones_like(bias)], dim=1)

    def right(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """[n, D + 2] of the given rows; see left."""
        n, d = len(rows), self.x.shape[1]
        out = torch.empty((n, d + 2), dtype=dtype, device=self.x.device)
        for a in range(0, n, _CHUNK):
            out[a : a + _CHUNK, :d] = self.delta(rows[a : a + _CHUNK])
        out[:, d] = 1.0
        out[:, d + 1] = self.bias[rows]
        return out


class Columns:
    """The gallery's side of the product in a given order: kept whole if that fits `budget`, else made anew by block."""

    def __init__(self, points: Points, order: Ints, dtype: torch.dtype, budget: int) -> None:
        self._points, self._dtype = points, dtype
        self._order = torch.as_tensor(order, device=points.x.device)
        whole = len(order) * (points.x.shape[1] + 2) * dtype.itemsize
        self._kept = points.right(self._order, dtype) if whole <= budget else None

    def __len__(self) -> int:
        return len(self._order)

    def block(self, a: int, b: int) -> Tensor:
        return self._points.right(self._order[a:b], self._dtype) if self._kept is None else self._kept[a:b]

    def keys(self, left: Tensor) -> Tensor:
        """All keys of some queries, [n, G]."""
        if self._kept is not None:
            return left @ self._kept.T
        out = torch.empty((len(left), len(self)), dtype=self._dtype, device=left.device)
        for a in range(0, len(self), _CHUNK):
            out[:, a : a + _CHUNK] = left @ self.block(a, a + _CHUNK).T
        return out


def prepare(first: Tensor, second: Tensor | None, similarity: str) -> tuple[Points, Points]:
    """The query and gallery points of one geometry (the same object twice when there is one set)."""
    cosine = similarity == "cosine"
    sets = [first] if second is None else [first, second]
    powers, shrinks, blanks = [], [], []
    for x in sets:
        power, shrink, blank = _lengths(x) if cosine else _common_power(x, sets)
        powers.append(power)
        shrinks.append(shrink)
        blanks.append(blank)
    centre = _mean(sets[-1], shrinks[-1])
    reaches = [_reach(x, shrink, centre) for x, shrink in zip(sets, shrinks, strict=True)]
    longest = max(float(r.max()) for r in reaches)
    scale = 2.0 ** -np.frexp(longest)[1] if longest > 0 else 1.0
    groups = identical_rows(sets, blanks)
    biases = [
        -((reach * scale) ** 2) / 2 - blank.double() * (scale**2 / 2)
        for reach, blank in zip(reaches, blanks, strict=True)
    ]
    # A constant added to every key changes no order; small biases keep the error bound small.
    middle = (biases[-1].max() + biases[-1].min()) / 2
    made = [
        Points(x, shrink, power, centre, scale, bias - middle, reach * scale, cosine, group)
        for x, shrink, power, bias, reach, group in zip(sets, shrinks, powers, biases, reaches, groups, strict=True)
    ]
    return made[0], made[-1]


def _lengths(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    power = torch.empty(len(x), dtype=torch.float64, device=x.device)
    shrink = torch.empty_like(power)
    for a in range(0, len(x), _CHUNK):
        part = x[a : a + _CHUNK]
        _, exponent = torch.frexp(part.abs().amax(1).double())
        # Below 2^-60 the vector counts as zero whatever its direction.
        two = torch.ldexp(torch.ones_like(power[a : a + _CHUNK]), -exponent.clamp(min=-60))
        norm = (part.double() * two[:, None]).square().sum(1).sqrt()
        power[a : a + _CHUNK] = two
        shrink[a : a + _CHUNK] = torch.where(norm / two > ZERO_NORM, two / norm, 0.0)
    return power, shrink, shrink == 0


def _common_power(x: Tensor, sets: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    largest = max(float(s.abs().max()) for s in sets)
    two = float(np.ldexp(1.0, -int(np.frexp(largest)[1]))) if largest > 0 else 1.0
    ones = torch.ones(len(x), dtype=torch.float64, device=x.device)
    return ones * two, ones * two, torch.zeros(len(x), dtype=torch.bool, device=x.device)


def _mean(x: Tensor, shrink: Tensor) -> Tensor:
    total = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
    for a in range(0, len(x), _CHUNK):
        total += x[a : a + _CHUNK].double().T @ shrink[a : a + _CHUNK]
    return total / len(x)


def _reach(x: Tensor, shrink: Tensor, centre: Tensor) -> Tensor:
    parts = [
        (x[a : a + _CHUNK].double() * shrink[a : a + _CHUNK, None] - centre).square().sum(1).sqrt()
        for a in range(0, len(x), _CHUNK)
    ]
    return torch.cat(parts)


# ------------------------------------------------------------------------------------------- the exact similarity


def exact_distance(query: Points, gallery: Points, i: Ints, j: Ints) -> Floats:
    """The distance of pairs (i, j), as if computed exactly and then rounded to float64: 1 - cosine, or |x - y|^2.

    Sums are carried as two float64 numbers with their rounding errors kept (Ogita, Rump and Oishi 2005), about 30
    digits. Pairs that are equal in mathematics then come out equal, also for binary or quantised codes, where a plain
    float64 sum in another order differs in its last bit. Near 0 a cosine distance has few true digits left, so it is
    rounded to a multiple of 2^-80, about 8e-25: parallel vectors get exactly 0. The value is the same for (j, i).
    Identical rows give identical values by construction, and are computed once.
    """
    pair = query.group[i] * (int(gallery.group.max()) + 1) + gallery.group[j]
    _, index, inverse = np.unique(pair, return_index=True, return_inverse=True)
    out = np.empty(len(index))
    for a in range(0, len(index), 8192):
        at = index[a : a + 8192]
        out[a : a + 8192] = _exact(query, gallery, i[at], j[at])
    return out[inverse]


def _exact(query: Points, gallery: Points, i: Ints, j: Ints) -> Floats:
    x = _columns(query, i)
    y = _columns(gallery, j)
    zero = np.zeros(len(i))
    if not query.cosine:
        s, c = zero, zero
        for a, b in zip(x, y, strict=True):
            d, e = _two_sum(a, -b)
            p, q = _two_product(d, d)
            s, r = _two_sum(s, p)
            c = c + ((q + 2.0 * d * e) + r)
        # The power of two was common to all vectors: undoing it is exact and changes no order, so it is left in.
        return np.asarray(s + c)
    xy, xx, yy = [(zero, zero)] * 3
    for a, b in zip(x, y, strict=True):
        xy, xx, yy = _add_product(xy, a, b), _add_product(xx, a, a), _add_product(yy, b, b)
    return exact_cosine_distance(xy, xx, yy, blank=(query.shrink[i].cpu() == 0) | (gallery.shrink[j].cpu() == 0))


def exact_cosine_distance(xy: Any, xx: Any, yy: Any, blank: Any) -> Floats:
    """1 - xy / sqrt(xx * yy) for sums held as pairs of float64."""
    blank = np.asarray(blank)
    one = np.where(blank, 1.0, 0.0)  # keeps the division below defined; the result is overwritten
    xx0, yy0 = xx[0] + one, yy[0] + one
    p, e = _two_product(xx0, yy0)
    e = e + (xx0 * yy[1] + xx[1] * yy0)
    root = np.sqrt(p)
    f, g = _two_product(root, root)
    low = (((p - f) - g) + e) / (2.0 * root)
    q = xy[0] / root
    f, g = _two_product(q, root)
    rest = (((xy[0] - f) - g) + xy[1] - q * low) / root
    d, e = _two_sum(np.ones_like(q), -q)
    distance = np.rint((d + (e - rest)) * SNAP) / SNAP
    return np.where(blank, 1.0, distance)


def _columns(points: Points, rows: Ints) -> Floats:
    at = torch.as_tensor(rows, device=points.x.device)
    scaled = points.x[at].double() * points.power[at, None]
    return np.ascontiguousarray(scaled.cpu().numpy().T)


def _two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def _two_product(a: Any, b: Any) -> tuple[Any, Any]:
    p = a * b
    t = _SPLIT * a
    a1 = t - (t - a)
    a2 = a - a1
    t = _SPLIT * b
    b1 = t - (t - b)
    b2 = b - b1
    return p, a2 * b2 - (((p - a1 * b1) - a2 * b1) - a1 * b2)


def _add_product(total: tuple[Any, Any], a: Any, b: Any) -> tuple[Any, Any]:
    p, e = _two_product(a, b)
    s, r = _two_sum(total[0], p)
    return s, total[1] + (e + r)
