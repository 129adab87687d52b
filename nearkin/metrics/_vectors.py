"""Input conversion for the ranking engine, and the exact distance that resolves near-ties."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.errors import ConfigError, DataError, did_you_mean
from nearkin.metrics._codes import Codes, integer_codes
from nearkin.ops.geometry import where_float64_exists

U32, U64 = 2.0**-24, 2.0**-53  # half a unit in the last place
ZERO_NORM = 1e-12  # a vector of at most this norm counts as zero: its cosine with everything is 0
COSINE_GRID = 2.0**80  # exact cosine distances are rounded to multiples of its inverse (see exact_distance)
_SPLITTER = 134217729.0  # 2^27 + 1: splits a float64 into two halves whose products are exact
_CHUNK = 512  # rows converted at a time: their float64 copies stay in the cache, and the allocator reuses them

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Keep torch to one thread for small operations: its threads wait for each other, so one busy core holds up all."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def as_matrix(values: Any, name: str) -> Tensor:
    """Convert to a finite, contiguous [N, D] float32 or float64 tensor on the same device."""
    try:
        x = values.detach() if isinstance(values, Tensor) else _as_tensor(np.asarray(values))
    except (TypeError, ValueError) as error:
        raise DataError(f"{name}: cannot be read as a matrix of numbers ({error}).") from None
    shape = tuple(x.shape)
    if x.ndim != 2:
        fix = "For a single vector add an axis: x[None]." if x.ndim == 1 else "Flatten it to one row per item."
        raise DataError(f"{name}: expected one row per item, [N, D]; got shape {shape}. {fix}")
    if 0 in shape:
        raise DataError(f"{name}: nothing to rank, got shape {shape}.")
    if x.is_complex():
        raise DataError(f"{name}: expected real numbers, got {x.dtype}.")
    x = where_float64_exists(x)
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    elif x.dtype not in (torch.float32, torch.float64):
        x = x.double()
    x = x.contiguous()
    # The sum avoids a mask as large as x; search for the bad row only if the sum is not finite (or overflows).
    if not bool(torch.isfinite(x.sum())):
        bad = (~torch.isfinite(x)).any(1).nonzero()
        if len(bad):
            problem = "NaN" if bool(torch.isnan(x).any()) else "infinite values"
            raise DataError(
                f"{name}: {problem} in {len(bad)} of {len(x)} rows (first: row {int(bad[0])}). "
                "Such rows cannot be ranked: check the model that produced them, or drop the rows."
            )
    return x


def _as_tensor(values: NDArray[Any]) -> Tensor:
    """Convert an array, copying only what torch does not support: negative strides and foreign byte order."""
    if any(stride < 0 for stride in values.strides) or not values.dtype.isnative:
        values = values.astype(values.dtype.newbyteorder("="), order="C")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writ")  # we never write to it
        return torch.as_tensor(values)


def identical_rows(sets: list[Tensor], zero_masks: list[Tensor]) -> list[Ints]:
    """Assign an id to every row such that rows equal element by element share it.

    Rows are hashed by integer arithmetic on their bits, which cannot depend on the order in which a library sums, and
    rows of equal hash are compared in full.
    """
    width = sets[0].shape[1]
    factors = np.random.default_rng(0).integers(1, 2**63, width, dtype=np.uint64) | np.uint64(1)
    parts = []
    for x in sets:
        for a in range(0, len(x), _CHUNK):
            bits = (x[a : a + _CHUNK] + 0.0).cpu().numpy()  # turns -0.0 into 0.0
            words: NDArray[Any] = bits.view(np.uint32 if bits.dtype == np.float32 else np.uint64)
            parts.append((words * factors).sum(1, dtype=np.uint64))
    hashes, is_zero = np.concatenate(parts), np.concatenate([mask.cpu().numpy() for mask in zero_masks])
    hashes[is_zero] = 0
    order = np.argsort(hashes, kind="stable")
    new = np.ones(len(order), dtype=bool)
    same_hash = np.flatnonzero(hashes[order][1:] == hashes[order][:-1]) + 1
    for a in range(0, len(same_hash), _CHUNK):
        k = same_hash[a : a + _CHUNK]
        equal = (_rows(sets, order[k]) == _rows(sets, order[k - 1])).all(1).cpu().numpy()
        new[k] = ~(equal | (is_zero[order[k]] & is_zero[order[k - 1]]))
    row_id = np.empty(len(order), dtype=np.int64)
    row_id[order] = np.cumsum(new) - 1
    return np.split(row_id, np.cumsum([len(x) for x in sets])[:-1])


def _rows(sets: list[Tensor], index: Ints) -> Tensor:
    """Rows of one or two sets, as if the second followed the first."""
    first = len(sets[0])
    out = sets[0][torch.as_tensor(np.minimum(index, first - 1), device=sets[0].device)]
    later = np.flatnonzero(index >= first)
    if len(later):
        out[later] = sets[1][torch.as_tensor(index[later] - first, device=sets[1].device)]
    return out


@dataclass(frozen=True)
class VectorSet:
    """A set of vectors prepared for products with another set of the same geometry.

    Let z be the unit vectors (cosine) or the raw vectors (Euclidean), m the mean of the gallery's z and c = z - m. The
    key of a pair, the cosine minus one or minus half the squared distance, is

        w_ij = c_i . c_j + b_i + b_j,        b = -|c|^2 / 2        so that        w_ij = -|z_i - z_j|^2 / 2

    Subtracting the mean keeps the rounding error proportional to the spread of the vectors, so a nearly collapsed model
    is ranked as precisely as any other. (A zero vector has cosine 0 with everything, so its b is lower by one half.)
    Pairs closer than `error_bounds` are compared by `exact_distance`, and tie if that is equal, so the block size, the
    number of threads and the BLAS library cannot change the outcome.
    """

    x: Tensor  # [N, D] the input vectors
    row_scale: Tensor  # [N] float64 factor that turns x into z: 1 / norm (0 for zero vectors), or a common power of two
    pow2: Tensor  # [N] float64 power of two that brings x near 1, so that exact sums neither overflow nor underflow
    centre: Tensor  # [D] float64, the subtracted mean
    scale: float  # power of two that brings the centred vectors near 1
    bias: Tensor  # [N] float64, b of the scaled centred vectors
    norm: Tensor  # [N] float64, lengths of the scaled centred vectors
    cosine: bool  # whether the similarity is the cosine
    row_id: Ints  # [N] equal for identical rows
    codes: Codes | None  # set if all vectors of both sets are small integers times a factor

    def __len__(self) -> int:
        return len(self.x)

    def centred(self, rows: slice | Tensor) -> Tensor:
        """Return the scaled centred vectors of some rows, in float64."""
        return (self.x[rows].double() * self.row_scale[rows, None]).sub_(self.centre).mul_(self.scale)

    def error_bounds(self, others: VectorSet, part: int | None = None) -> tuple[Tensor, Tensor]:
        """Bound the error of a key per row, for a float32 and for a float64 product with `others`.

        A dot product of d terms is off by at most d units of rounding times the product of the norms, in whatever
        order it is summed. Summed in parts of `part` terms that are then added, it is off by the number of terms of a
        part and of parts. The rest covers the rounding of the inputs (norms, centred vectors, biases) and of the exact
        distance.
        """
        d = self.x.shape[1]
        depth = d if part is None or part >= d else part + -(-d // part)
        size = self.norm * others.norm.max() + self.bias.abs() + others.bias.abs().max()
        # Before the constant was subtracted, the biases were up to the square of the norm, or one half more.
        float64 = 6 * (d + 16) * U64 * (size + (self.norm + others.norm.max()) ** 2)
        if self.cosine:
            float64 = float64 + 8 * U64 * self.scale * (self.norm + others.norm.max()) + self.scale**2 * 2.0**-60
        return 1.05 * (depth + 16) * U32 * size + float64 + 1e-30, float64 + 1e-200

    def query_matrix(self, rows: slice | Tensor) -> Tensor:
        """Return [n, D + 2] float64 whose product with `gallery_matrix().T` of another set gives the keys."""
        bias = self.bias[rows, None]
        return torch.cat([self.centred(rows), bias, torch.ones_like(bias)], dim=1)

    def gallery_matrix(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return [n, D + 2] for some rows; see `query_matrix`."""
        n, d = len(rows), self.x.shape[1]
        out = torch.empty((n, d + 2), dtype=dtype, device=self.x.device)
        for a in range(0, n, _CHUNK):
            out[a : a + _CHUNK, :d] = self.centred(rows[a : a + _CHUNK])
        out[:, d] = 1.0
        out[:, d + 1] = self.bias[rows]
        return out


class GalleryMatrix:
    """The gallery side of the product, cached if it fits `budget` bytes, otherwise rebuilt block by block."""

    def __init__(self, vectors: VectorSet, order: Ints, dtype: torch.dtype, budget: int) -> None:
        self._vectors, self.dtype = vectors, dtype
        self._order = torch.as_tensor(order, device=vectors.x.device)
        size = len(order) * (vectors.x.shape[1] + 2) * dtype.itemsize
        self._cached = vectors.gallery_matrix(self._order, dtype) if size <= budget else None

    def __len__(self) -> int:
        return len(self._order)

    def block(self, a: int, b: int) -> Tensor:
        """Return rows a to b of the matrix."""
        return self._vectors.gallery_matrix(self._order[a:b], self.dtype) if self._cached is None else self._cached[a:b]

    def keys(self, queries: Tensor) -> Tensor:
        """Return the keys [n, G] of a query matrix [n, D + 2]."""
        if self._cached is not None:
            return queries @ self._cached.T
        out = torch.empty((len(queries), len(self)), dtype=self.dtype, device=queries.device)
        for a in range(0, len(self), _CHUNK):
            out[:, a : a + _CHUNK] = queries @ self.block(a, a + _CHUNK).T
        return out


def prepare(query: Tensor, gallery: Tensor | None, similarity: str) -> tuple[VectorSet, VectorSet]:
    """Build the query and gallery vectors of one geometry."""
    if similarity not in ("cosine", "euclidean"):
        hint = did_you_mean(similarity, ("cosine", "euclidean")) or " Available: cosine, euclidean."
        raise ConfigError(f"similarity: no similarity named {similarity!r}.{hint}")
    cosine = similarity == "cosine"
    sets = [query] if gallery is None else [query, gallery]
    scales = [_unit_scales(x) if cosine else _common_scale(x, sets) for x in sets]
    zero_masks = [row_scale == 0 for _, row_scale in scales]
    centre = _scaled_mean(sets[-1], scales[-1][1])
    norms = [_centred_norms(x, row_scale, centre) for x, (_, row_scale) in zip(sets, scales, strict=True)]
    largest = max(float(norm.max()) for norm in norms)
    scale = 2.0 ** -np.frexp(largest)[1] if largest > 0 else 1.0
    biases = [
        -((norm * scale) ** 2) / 2 - zero_mask.double() * (scale**2 / 2)
        for norm, zero_mask in zip(norms, zero_masks, strict=True)
    ]
    # A constant added to every key does not change the order; small biases keep the error bound small.
    middle = (biases[-1].max() + biases[-1].min()) / 2
    row_ids, codes = identical_rows(sets, zero_masks), integer_codes(sets, scales, cosine, scale, float(middle))
    prepared = [
        VectorSet(x, row_scale, pow2, centre, scale, bias - middle, norm * scale, cosine, row_id, code)
        for x, (pow2, row_scale), bias, norm, row_id, code in zip(
            sets, scales, biases, norms, row_ids, codes, strict=True
        )
    ]
    return prepared[0], prepared[-1]


def _unit_scales(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return pow2 and row_scale for the cosine; row_scale is 0 for a zero vector."""
    pow2 = torch.empty(len(x), dtype=torch.float64, device=x.device)
    row_scale = torch.empty_like(pow2)
    for a in range(0, len(x), _CHUNK):
        part = x[a : a + _CHUNK]
        _, exponent = torch.frexp(part.abs().amax(1).double())
        # Below 2^-60 the vector counts as zero in any case.
        factor = torch.ldexp(torch.ones_like(pow2[a : a + _CHUNK]), -exponent.clamp(min=-60))
        norm = (part.double() * factor[:, None]).square().sum(1).sqrt()
        pow2[a : a + _CHUNK] = factor
        row_scale[a : a + _CHUNK] = torch.where(norm / factor > ZERO_NORM, factor / norm, 0.0)
    return pow2, row_scale


def _common_scale(x: Tensor, sets: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return pow2 and row_scale for the Euclidean distance: one power of two for all vectors."""
    largest = max(float(s.abs().max()) for s in sets)
    factor = float(np.ldexp(1.0, -int(np.frexp(largest)[1]))) if largest > 0 else 1.0
    pow2 = torch.full((len(x),), factor, dtype=torch.float64, device=x.device)
    return pow2, pow2


def _scaled_mean(x: Tensor, row_scale: Tensor) -> Tensor:
    total = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
    for a in range(0, len(x), _CHUNK):
        total += x[a : a + _CHUNK].double().T @ row_scale[a : a + _CHUNK]
    return total / len(x)


def _centred_norms(x: Tensor, row_scale: Tensor, centre: Tensor) -> Tensor:
    parts = [
        (x[a : a + _CHUNK].double() * row_scale[a : a + _CHUNK, None]).sub_(centre).square_().sum(1).sqrt()
        for a in range(0, len(x), _CHUNK)
    ]
    return torch.cat(parts)


def pair_keys(query: VectorSet, gallery: VectorSet, i: Ints, j: Ints) -> Floats:
    """Compute the keys of pairs (i, j) in float64."""
    out = np.empty(len(i))
    for a in range(0, len(i), 8192):
        rows, cols = (torch.as_tensor(index[a : a + 8192], device=query.x.device) for index in (i, j))
        products = (query.centred(rows) * gallery.centred(cols)).sum(1)
        out[a : a + 8192] = (products + query.bias[rows] + gallery.bias[cols]).cpu().numpy()
    return out


def comparable_distance(query: VectorSet, gallery: VectorSet, i: Ints, j: Ints, key: Floats) -> Floats:
    """Compute a number that orders the items j of a query i as `exact_distance` does, given their float64 keys."""
    if query.codes is None or gallery.codes is None:
        return exact_distance(query, gallery, i, j)
    a = np.rint((key + query.codes.offset) * query.codes.root[i] * gallery.codes.root[j])
    return np.asarray(-a * np.abs(a) / gallery.codes.weight[j])


def code_products(keys: Any, query: VectorSet, gallery: VectorSet, i: Ints, j: Ints) -> None:
    """Turn the keys [n, m] of query rows i and gallery rows j into a|a|, in place; see `Codes`."""
    assert query.codes is not None
    assert gallery.codes is not None
    keys += query.codes.offset
    keys *= query.codes.root[i][:, None]
    keys *= gallery.codes.root[j]
    np.rint(keys, out=keys)
    keys *= np.abs(keys)


def exact_distance(query: VectorSet, gallery: VectorSet, i: Ints, j: Ints) -> Floats:
    """Compute the distance of pairs (i, j) as if exactly, rounded to float64: 1 - cosine, or |x - y|^2.

    Sums are carried as two float64 with their rounding errors (Ogita, Rump and Oishi 2005), about 30 digits. Pairs
    that are mathematically equal then come out equal, also for binary or quantised codes, where plain float64 sums in
    another order differ in the last bit. Near 0 a cosine distance has few correct digits left, so it is rounded to a
    multiple of 2^-80, about 8e-25: parallel vectors get exactly 0. The value is the same for (j, i). Identical rows
    give identical values by construction, and are computed once.
    """
    pair = query.row_id[i] * (int(gallery.row_id.max()) + 1) + gallery.row_id[j]
    _, index, inverse = np.unique(pair, return_index=True, return_inverse=True)
    out = np.empty(len(index))
    for a in range(0, len(index), 8192):
        chunk = index[a : a + 8192]
        out[a : a + 8192] = _exact(query, gallery, i[chunk], j[chunk])
    return out[inverse]


def _exact(query: VectorSet, gallery: VectorSet, i: Ints, j: Ints) -> Floats:
    x, y = _columns(query, i), _columns(gallery, j)
    if not query.cosine:
        # All vectors share one power of two. Undoing it would be exact and would not change the order.
        return np.asarray(sum_squares(x, y))
    is_zero = np.asarray((query.row_scale[i].cpu() == 0) | (gallery.row_scale[j].cpu() == 0))
    (xx, xx_low), (yy, yy_low) = sum_products(x, x), sum_products(y, y)
    one = np.where(is_zero, 1.0, 0.0)  # keeps the division defined; the result is overwritten
    distance = cosine_distance(sum_products(x, y), (xx + one, xx_low), (yy + one, yy_low))
    return np.where(is_zero, 1.0, distance)


def _columns(vectors: VectorSet, rows: Ints) -> Floats:
    index = torch.as_tensor(rows, device=vectors.x.device)
    scaled = vectors.x[index].double() * vectors.pow2[index, None]
    return np.ascontiguousarray(scaled.cpu().numpy().T)


# The functions below take numbers or arrays of them; _tile_kernels compiles them for numbers. A sum is two float64: its
# value and what rounding took away.


def two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    """Return a + b and its rounding error."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def two_product(a: Any, b: Any) -> tuple[Any, Any]:
    """Return a * b and its rounding error."""
    p = a * b
    t = _SPLITTER * a
    a1 = t - (t - a)
    a2 = a - a1
    t = _SPLITTER * b
    b1 = t - (t - b)
    b2 = b - b1
    return p, a2 * b2 - (((p - a1 * b1) - a2 * b1) - a1 * b2)


def sum_products(x: Any, y: Any) -> tuple[Any, Any]:
    """Return the sum of x * y over the first axis."""
    total = low = 0.0
    for a, b in zip(x, y):  # noqa: B905  (numba knows no strict=)
        p, e = two_product(a, b)
        total, r = two_sum(total, p)
        low = low + (e + r)
    return total, low


def sum_squares(x: Any, y: Any) -> Any:
    """Return the sum of (x - y)^2 over the first axis, rounded to float64."""
    total = low = 0.0
    for a, b in zip(x, y):  # noqa: B905
        d, e = two_sum(a, -b)
        p, q = two_product(d, d)
        total, r = two_sum(total, p)
        low = low + ((q + 2.0 * d * e) + r)
    return total + low


def cosine_distance(xy: Any, xx: Any, yy: Any) -> Any:
    """Return 1 - xy / sqrt(xx * yy) for three sums, rounded to the grid."""
    p, e = two_product(xx[0], yy[0])
    e = e + (xx[0] * yy[1] + xx[1] * yy[0])
    root = np.sqrt(p)
    f, g = two_product(root, root)
    low = (((p - f) - g) + e) / (2.0 * root)
    q = xy[0] / root
    f, g = two_product(q, root)
    rest = (((xy[0] - f) - g) + xy[1] - q * low) / root
    d, e = two_sum(1.0, -q)
    return np.rint((d + (e - rest)) * COSINE_GRID) / COSINE_GRID
