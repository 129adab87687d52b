"""Near-duplicate images: a 64-bit perceptual hash (dHash) and all pairs of hashes within a Hamming distance.

dHash shrinks an image to 9 x 8 grey values and stores for each position whether the next value to the right is
brighter. Scaling, recompression and light edits change a few bits at most. Different photos on plain backgrounds can
have similar hashes too, so candidate pairs are confirmed on 16 x 16 grey thumbnails.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_HAMMING = 3  # hashes that differ in at most this many of 64 bits are candidates
THUMB_SIZE = 16
# Minimum correlation of two candidates' thumbnails. Among CUB's 11,788 photos there are ten candidate pairs: nine
# correlate at 0.996 or more and are duplicates to the eye; the tenth correlates at 0.54 and is not.
MIN_CORRELATION = 0.95
MIN_STD = 3.0  # grey levels; an image with a lower standard deviation has no structure to compare
_BUCKET_ROWS = 2048  # rows of a bucket compared at once, which bounds memory


def dhash(grey: NDArray[np.uint8]) -> int:
    """Compute the dHash of a 9 x 8 (width x height) grey image.

    Example:
        >>> dhash(np.tile(np.arange(9, dtype=np.uint8), (8, 1))) == 2**64 - 1
        True
    """
    assert grey.shape == (8, 9)
    bits = grey[:, 1:] > grey[:, :-1]
    return int.from_bytes(np.packbits(bits).tobytes(), "big")


def hash_image(image: Any) -> tuple[int, NDArray[np.uint8]]:
    """Compute the hash and the thumbnail of an image. Returns the 64-bit hash and a uint8 [16, 16] thumbnail."""
    from PIL import Image

    box = Image.Resampling.BOX
    return dhash(np.asarray(image.resize((9, 8), box))), np.asarray(image.resize((THUMB_SIZE, THUMB_SIZE), box))


def near_pairs(hashes: NDArray[np.uint64], max_hamming: int = MAX_HAMMING) -> NDArray[np.int64]:
    """Find all pairs of rows within a Hamming distance.

    The hashes are cut into max_hamming + 1 bands. Two hashes within the distance share at least one band, so only rows
    that share a band are compared. Remove blank images first (`is_flat`): their hashes agree without meaning anything.
    """
    assert 0 <= max_hamming <= 15
    values, inverse = np.unique(hashes, return_inverse=True)
    first, second = _near_values(values, max_hamming)
    ends = np.cumsum(np.bincount(inverse, minlength=len(values)))
    rows_of = np.split(np.argsort(inverse, kind="stable"), ends[:-1])
    pairs = [_pairs_within(rows) for rows in rows_of if len(rows) > 1]
    pairs += [_pairs_between(rows_of[a], rows_of[b]) for a, b in zip(first.tolist(), second.tolist(), strict=True)]
    if not pairs:
        return np.empty((0, 2), np.int64)
    result = np.sort(np.concatenate(pairs), axis=1)
    return result[np.lexsort((result[:, 1], result[:, 0]))]


def is_flat(thumbs: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return which thumbnails have too little contrast to be compared."""
    std = thumbs.reshape(len(thumbs), THUMB_SIZE * THUMB_SIZE).std(axis=1, dtype=np.float32)
    flat: NDArray[np.bool_] = std < MIN_STD
    return flat


def confirm_pairs(pairs: NDArray[np.int64], thumbs: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Keep the pairs whose thumbnails correlate. Returns the confirmed pairs, in order."""
    confirmed = []
    for chunk in np.array_split(pairs, max(1, len(pairs) // 65_536)):
        a, b = (thumbs[chunk[:, i]].reshape(len(chunk), THUMB_SIZE * THUMB_SIZE).astype(np.float64) for i in (0, 1))
        a -= a.mean(axis=1, keepdims=True)
        b -= b.mean(axis=1, keepdims=True)
        norm = np.sqrt((a * a).sum(axis=1) * (b * b).sum(axis=1))
        confirmed.append(chunk[(a * b).sum(axis=1) >= MIN_CORRELATION * norm])
    return np.concatenate(confirmed)


def _near_values(values: NDArray[np.uint64], max_hamming: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Near pairs among distinct hashes."""
    edges = np.linspace(0, 64, max_hamming + 2).astype(int)
    firsts, seconds = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        band = (values >> np.uint64(low)) & np.uint64(2 ** (high - low) - 1)
        order = np.argsort(band, kind="stable")
        starts = np.flatnonzero(np.diff(band[order], prepend=~band[order[:1]]) != 0)
        for bucket in np.split(order, starts[1:]):
            for start in range(0, len(bucket) if len(bucket) > 1 else 0, _BUCKET_ROWS):
                rows = bucket[start : start + _BUCKET_ROWS]
                differing = values[rows][:, None] ^ values[bucket[start:]][None, :]
                for _ in range(max_hamming):  # np.bitwise_count would need NumPy 2
                    differing &= differing - np.uint64(1)  # clears the lowest bit that is set
                i, j = np.nonzero(np.triu(differing == 0, k=1))
                firsts.append(rows[i])
                seconds.append(bucket[start:][j])
    # A pair is found once for every band it shares.
    pairs = np.unique(np.sort(np.stack([np.concatenate(firsts), np.concatenate(seconds)], axis=1), axis=1), axis=0)
    return pairs[:, 0], pairs[:, 1]


def _pairs_within(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    i, j = np.triu_indices(len(rows), k=1)
    return np.stack([rows[i], rows[j]], axis=1)


def _pairs_between(a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.stack([np.repeat(a, len(b)), np.tile(b, len(a))], axis=1)
