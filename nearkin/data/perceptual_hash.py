"""Images that are the same to the eye: a 64-bit hash of an image's shading, and all pairs of hashes that are near.

The hash (dHash) shrinks an image to 9 x 8 grey values and keeps, for each place, whether it is brighter to the right.
Scaling, recompression and light edits move a few bits at most. Different photos on plain grounds can agree as well,
so pairs are confirmed on 16 x 16 grey thumbnails before they are reported.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

NEAR_BITS = 3  # hashes that differ in at most this many of 64 bits are candidates
THUMB = 16
# The correlation of two candidates' thumbnails. Among CUB's 11,788 photos there are ten candidate pairs: nine agree at
# 0.996 or better and are copies to the eye; the tenth agrees at 0.54 and is not.
CONFIRMED = 0.95
FLAT = 3.0  # grey levels of standard deviation below which an image has no shading to compare
_BUCKET_ROWS = 2048  # rows of a bucket compared at once; bounds memory whatever the data


def shading_hash(grey: NDArray[np.uint8]) -> int:
    """The dHash of a 9 x 8 (width x height) grey image.

    >>> shading_hash(np.tile(np.arange(9, dtype=np.uint8), (8, 1))) == 2**64 - 1
    True
    """
    assert grey.shape == (8, 9)
    bits = grey[:, 1:] > grey[:, :-1]
    return int.from_bytes(np.packbits(bits).tobytes(), "big")


def hash_image(image: Any) -> tuple[int, NDArray[np.uint8]]:
    """Hash and thumbnail [16, 16] of a PIL image in mode L."""
    from PIL import Image

    box = Image.Resampling.BOX
    return shading_hash(np.asarray(image.resize((9, 8), box))), np.asarray(image.resize((THUMB, THUMB), box))


def near_pairs(hashes: NDArray[np.uint64], bits: int = NEAR_BITS) -> NDArray[np.int64]:
    """All pairs of rows whose hashes differ in at most `bits` bits, as rows i < j of an int64 [P, 2].

    Cut into bits + 1 bands, two such hashes have at least one band in common, so only rows that share a band are
    compared. Leave out blank images first (`is_flat`): their hashes agree and mean nothing.
    """
    assert 0 <= bits <= 15
    values, owner = np.unique(hashes, return_inverse=True)
    first, second = _near_values(values, bits)
    members = np.split(np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner, minlength=len(values)))[:-1])
    pairs = [_within(rows) for rows in members if len(rows) > 1]
    pairs += [_between(members[a], members[b]) for a, b in zip(first.tolist(), second.tolist(), strict=True)]
    if not pairs:
        return np.empty((0, 2), np.int64)
    found = np.sort(np.concatenate(pairs), axis=1)
    return found[np.lexsort((found[:, 1], found[:, 0]))]


def is_flat(thumbs: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Which thumbnails [N, 16, 16] are of one shade, so that nothing can be said about them."""
    flat: NDArray[np.bool_] = thumbs.reshape(len(thumbs), THUMB * THUMB).std(axis=1, dtype=np.float32) < FLAT
    return flat


def confirm(pairs: NDArray[np.int64], thumbs: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The pairs whose thumbnails [N, 16, 16] agree."""
    kept = []
    for chunk in np.array_split(pairs, max(1, len(pairs) // 65_536)):
        a, b = (thumbs[chunk[:, side]].reshape(len(chunk), THUMB * THUMB).astype(np.float64) for side in (0, 1))
        a -= a.mean(axis=1, keepdims=True)
        b -= b.mean(axis=1, keepdims=True)
        spread = np.sqrt((a * a).sum(axis=1) * (b * b).sum(axis=1))
        kept.append(chunk[(a * b).sum(axis=1) >= CONFIRMED * spread])
    return np.concatenate(kept)


def _near_values(values: NDArray[np.uint64], bits: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Near pairs among different hashes."""
    edges = np.linspace(0, 64, bits + 2).astype(int)
    firsts, seconds = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        band = (values >> np.uint64(low)) & np.uint64(2 ** (high - low) - 1)
        order = np.argsort(band, kind="stable")
        starts = np.flatnonzero(np.diff(band[order], prepend=~band[order[:1]]) != 0)
        for bucket in np.split(order, starts[1:]):
            for start in range(0, len(bucket) if len(bucket) > 1 else 0, _BUCKET_ROWS):
                rows = bucket[start : start + _BUCKET_ROWS]
                apart = np.bitwise_count(values[rows][:, None] ^ values[bucket[start:]][None, :])
                i, j = np.nonzero(np.triu(apart <= bits, k=1))
                firsts.append(rows[i])
                seconds.append(bucket[start:][j])
    # A pair is found once for every band it shares.
    pairs = np.unique(np.sort(np.stack([np.concatenate(firsts), np.concatenate(seconds)], axis=1), axis=1), axis=0)
    return pairs[:, 0], pairs[:, 1]


def _within(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    i, j = np.triu_indices(len(rows), k=1)
    return np.stack([rows[i], rows[j]], axis=1)


def _between(a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.stack([np.repeat(a, len(b)), np.tile(b, len(a))], axis=1)
