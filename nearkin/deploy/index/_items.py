"""Checks and conversions of the ids, labels and vectors given to an index."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from nearkin.deploy.index.provenance import EmbeddingModel, FileStamp
from nearkin.deploy.index.search import Label, Vectors, check_vectors
from nearkin.errors import DataError


def embed_images(model: EmbeddingModel, images: Any, ids: Sequence[str]) -> Vectors:
    """Embed images, and check that there is one id for each."""
    vectors = check_vectors(model.embed(images), None, "the model's vectors")
    if len(vectors) != len(ids):
        raise DataError(f"ids: expected one per image, got {len(ids)} for {len(vectors)}.")
    return vectors


def ids_of(images: Sequence[Any], ids: Sequence[str] | None) -> list[str]:
    """Return the given ids, or the paths of the images."""
    if ids is not None:
        return list(ids)
    if isinstance(images, str | os.PathLike):
        raise DataError(f"{images}: expected a list of images, got a single path. Wrap it in a list.")
    if not all(isinstance(image, str | os.PathLike) for image in images):
        raise DataError("ids: required for images that are not files. Pass ids=[...], one per image.")
    return [os.fsdecode(image) for image in images]


def as_labels(labels: Any, count: int) -> list[Label]:
    """Convert a list, array or tensor of labels to plain Python values; None means no labels."""
    if labels is None:
        return [None] * count
    values = labels.tolist() if hasattr(labels, "tolist") else list(labels)
    if len(values) != count:
        raise DataError(f"labels: expected one per item, got {len(values)} for {count}.")
    return [value.item() if isinstance(value, np.generic) else value for value in values]


def row_by_id(ids: Sequence[str], count: int) -> dict[str, int]:
    """Map ids to rows, after checking that they are distinct strings and match the number of vectors."""
    if len(ids) != count:
        raise DataError(f"ids: expected one per vector, got {len(ids)} for {count}.")
    invalid = next((id for id in ids if not isinstance(id, str)), None)
    if invalid is not None:
        raise DataError(f"ids: expected strings, got {type(invalid).__name__} ({invalid!r}).")
    rows = {id: row for row, id in enumerate(ids)}
    if len(rows) != len(ids):
        duplicate = next(id for row, id in enumerate(ids) if rows[id] != row)
        raise DataError(f"ids: {duplicate!r} appears twice. Ids must be unique.")
    return rows


def check_label_types(labels: Sequence[Label]) -> None:
    """Check that all labels are strings, or all integers (or None)."""
    types = {type(label) for label in labels} - {type(None)}
    if types not in (set(), {str}, {int}):
        names = ", ".join(sorted(cls.__name__ for cls in types))
        raise DataError(f"labels: expected all strings or all integers (or None), got {names}.")


def stamps_to_json(stamps: Sequence[FileStamp | None]) -> list[Any]:
    """Convert file stamps to JSON values."""
    return [None if stamp is None else [stamp.size, stamp.mtime_ns, stamp.sha256] for stamp in stamps]
