"""Near-duplicate images: pairs of similar 64-bit perceptual hashes (dHash), confirmed on 16 x 16 grey thumbnails.

dHash stores for 9 x 8 grey values whether the next one to the right is brighter. Scaling, recompression and light
edits change a few bits at most; different photos on plain backgrounds can have similar hashes too.
"""

from itertools import pairwise
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


def hash_image(image: Any) -> tuple[int, NDArray[np.uint8]]:
    """Compute the hash and the thumbnail of a grey image. Returns the 64-bit hash and a uint8 [16, 16] thumbnail."""
    from PIL import Image

    grey, thumb = (np.asarray(image.resize(size, Image.Resampling.BOX)) for size in ((9, 8), (THUMB_SIZE, THUMB_SIZE)))
    return int.from_bytes(np.packbits(grey[:, 1:] > grey[:, :-1]).tobytes()), thumb


def near_pairs(hashes: NDArray[np.uint64], max_hamming: int = MAX_HAMMING) -> NDArray[np.int64]:
    """Find all pairs of rows within a Hamming distance, sorted. Blank images (`is_flat`) would all match."""
    edges = np.linspace(0, 64, max_hamming + 2).astype(int).tolist()
    pairs = [np.empty((0, 2), np.int64)]
    for low, high in pairwise(edges):
        band = (hashes >> np.uint64(low)) & np.uint64(2 ** (high - low) - 1)
        order = np.argsort(band, kind="stable")
        for bucket in np.split(order, np.flatnonzero(np.diff(band[order])) + 1):
            for start in range(0, len(bucket) if len(bucket) > 1 else 0, _BUCKET_ROWS):
                rows = bucket[start : start + _BUCKET_ROWS]
                differing = hashes[rows][:, None] ^ hashes[bucket[start:]][None, :]
                for _ in range(max_hamming):  # np.bitwise_count would need NumPy 2
                    differing &= differing - np.uint64(1)  # clears the lowest bit that is set
                i, j = np.nonzero(np.triu(differing == 0, k=1))
                pairs.append(np.stack([rows[i], bucket[start:][j]], axis=1))
    return np.unique(np.sort(np.concatenate(pairs), axis=1), axis=0)  # a pair is found once for every band it shares


def is_flat(thumbs: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return which thumbnails have too little contrast to be compared."""
    flat: NDArray[np.bool_] = thumbs.reshape(len(thumbs), THUMB_SIZE**2).std(axis=1, dtype=np.float32) < MIN_STD
    return flat


def confirm_pairs(pairs: NDArray[np.int64], thumbs: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Keep the pairs whose thumbnails correlate."""
    confirmed = []
    for chunk in np.array_split(pairs, max(1, len(pairs) // 65_536)):
        a, b = (thumbs[chunk[:, i]].reshape(len(chunk), THUMB_SIZE * THUMB_SIZE).astype(np.float64) for i in (0, 1))
        a -= a.mean(axis=1, keepdims=True)
        b -= b.mean(axis=1, keepdims=True)
        norm = np.sqrt((a * a).sum(axis=1) * (b * b).sum(axis=1))
        confirmed.append(chunk[(a * b).sum(axis=1) >= MIN_CORRELATION * norm])
    return np.concatenate(confirmed)
