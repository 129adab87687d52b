"""Labels of the ranking engine: integers of any size, strings, or sets of labels."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nearkin.errors import DataError
from nearkin.metrics._vectors import Floats, Ints


def as_labels(values: Any, length: int, name: str, of: str, *, several: bool = False) -> NDArray[Any]:
    """Convert labels to a 1-D array of integers or strings, exact for integers of any size, or, if `several` are
    allowed, to bool [N, T]."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    labels = np.asarray(values)
    if labels.dtype.kind == "f" and isinstance(values, list | tuple) and all(isinstance(v, int) for v in values):
        labels = np.array(values, dtype=object)  # integers too large or too mixed for one machine type
    if labels.dtype == object:
        types = {type(v) for v in labels.ravel().tolist()}
        if types <= {str, np.str_}:
            labels = labels.astype(np.str_)
        elif all(issubclass(t, int | np.integer) for t in types):
            labels = np.array([int(v) for v in labels.ravel()], dtype=object).reshape(labels.shape)
        else:
            names = ", ".join(sorted(t.__name__ for t in types))
            raise DataError(f"{name}: expected integers or strings, got {names}.")
    elif labels.dtype.kind not in "iubUS":
        fix = "Convert them, for example labels.astype(int): large ids collide as floats."
        raise DataError(f"{name}: expected integers or strings, got {labels.dtype}. {fix}")
    if labels.dtype.kind == "S":  # some file formats store names as bytes; they must match the same names as text
        try:
            labels = np.char.decode(labels, "utf-8")
        except UnicodeDecodeError:
            raise DataError(f"{name}: byte strings that are not UTF-8. Decode them first.") from None
    if labels.ndim != 1 and not (several and labels.ndim == 2 and labels.dtype == bool):
        fix = " Several labels per row are bool [N, T]; for levels of a hierarchy use score_levels." if several else ""
        raise DataError(f"{name}: expected one label per row, [N]; got {labels.dtype} of shape {labels.shape}.{fix}")
    if len(labels) != length:
        raise DataError(f"{name}: {len(labels)} labels for {length} rows of {of}.")
    return labels


def encode(first: NDArray[Any], second: NDArray[Any] | None, name: str) -> tuple[Ints, Ints, NDArray[Any]]:
    """Encode one or two label arrays as indices into one array of distinct labels.

    Distinct labels are matched as Python objects: NumPy would join int64 and uint64 as float64 and confuse large ids.
    """
    names, codes = np.unique(first, return_inverse=True)
    codes = codes.astype(np.int64)
    if second is None:
        return codes, codes, names
    if (first.dtype.kind in "US") != (second.dtype.kind in "US"):
        raise DataError(
            f"{name}: the query has {first.dtype} labels and the gallery {second.dtype}; nothing can match."
        )
    others, other_codes = np.unique(second, return_inverse=True)
    index = {label: i for i, label in enumerate(names.tolist())}
    extra = [label for label in others.tolist() if label not in index]
    index |= {label: len(names) + i for i, label in enumerate(extra)}
    to_code = np.array([index[label] for label in others.tolist()], dtype=np.int64)
    distinct = list(index)
    joined = np.array(distinct) if isinstance(distinct[0], str | bytes) else np.array(distinct, dtype=object)
    if joined.dtype == object and all(-(2**63) <= int(v) < 2**63 for v in distinct):
        joined = joined.astype(np.int64)
    return codes, to_code[other_codes], joined


def encode_label_sets(first: NDArray[Any], second: NDArray[Any] | None) -> tuple[Ints, Ints, Floats]:
    """Encode one or two bool arrays [N, T] as indices into one array of distinct rows [C, T]."""
    second = first if second is None else second
    if first.shape[1:] != second.shape[1:]:
        raise DataError(f"labels: the query has shape {first.shape} and the gallery {second.shape}; nothing can match.")
    sets, codes = np.unique(np.concatenate([first, second]), axis=0, return_inverse=True)
    codes = codes.reshape(-1).astype(np.int64)  # NumPy 2.0 returns another shape
    return codes[: len(first)], codes[len(codes) - len(second) :], sets.astype(np.float32)
