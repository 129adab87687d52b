"""What an index is made of: the model that made its vectors, file stamps, and checks of ids and labels."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from nearkin.data.own import as_table, is_pair_of_columns
from nearkin.deploy.index.search import Label, Vectors, check_vectors
from nearkin.errors import DataError


class EmbeddingModel(Protocol):
    """The model interface an index needs; `nearkin.Embedder` implements it."""

    image_shape: tuple[int, ...]  # of one input: (C, H, W) for images

    def embed(self, images: Any) -> Tensor:
        """Return one vector per image, float32 [N, D]."""
        ...

    def fingerprint(self) -> str:
        """Return a hash of the weights."""
        ...


@dataclass(frozen=True)
class ModelInfo:
    fingerprint: str  # hash of its weights
    run: str | None = None  # run folder it was loaded from, if any


def get_model_info(model: EmbeddingModel, run: str | Path | None = None) -> ModelInfo:
    return ModelInfo(model.fingerprint(), None if run is None else str(Path(run).resolve()))


def check_model(model_info: ModelInfo | None, fingerprint: str, what: str) -> None:
    if model_info is not None and model_info.fingerprint != fingerprint:
        raise DataError(
            f"{what}: built with a different model (weights {model_info.fingerprint[:12]}, got {fingerprint[:12]}).\n"
            "Use the run it was built with, or index again into another folder."
        )


class FileStamp(NamedTuple):
    """Identifies a file's content. The hash is compared only where size or modification time changed."""

    size: int  # in bytes
    mtime_ns: int  # modification time in nanoseconds
    sha256: str  # hash of the content


def embed_images(model: EmbeddingModel, images: Any, ids: Sequence[str]) -> Vectors:
    """Embed images, and check that there is one id for each."""
    vectors = check_vectors(model.embed(images), None, "the model's vectors")
    check_count("ids", len(ids), "image", len(vectors))
    return vectors


def read_labelled(model: Any, data: Any) -> tuple[Any, list[Label], list[str]] | None:
    """Return the images (or tensors), labels and ids of data that `as_table` reads; None for images without labels."""
    if isinstance(data, list | tuple):
        has_labels = is_pair_of_columns(data) or (len(data) > 0 and isinstance(data[0], list | tuple | dict))
    else:
        has_labels = not isinstance(data, str | os.PathLike | np.ndarray | Tensor) and not hasattr(data, "read")
    if not has_labels:
        return None
    if not hasattr(model, "data_config"):
        raise DataError(f"model: {type(model).__name__} is no nearkin.Embedder. Pass images, labels= and ids= apart.")
    table = as_table(data, model.data_config(), channels=model.channels, min_classes=1)
    ids = [str(path) for path in table.paths] or [str(row) for row in table.row_numbers]
    labels: list[Label] = [table.class_names[label] for label in table.labels]
    return table.images if table.features is None else table.features, labels, ids


def ids_of(images: Sequence[Any]) -> list[str]:
    if isinstance(images, str | os.PathLike):
        raise DataError(f"{images}: expected a list of images, got a single path. Wrap it in a list.")
    if not all(isinstance(image, str | os.PathLike) for image in images):
        raise DataError("ids: required for images that are not files. Pass ids=[...], one per image.")
    return [os.fsdecode(image) for image in images]


def relative_id(path: str, root: Path | None) -> str:
    """Return the id of a path, which may be relative to the current folder, in an index with this root."""
    if root is None or os.path.isabs(path) or root == Path.cwd():
        return path
    absolute = Path(os.path.abspath(path))
    return absolute.relative_to(root).as_posix() if absolute.is_relative_to(root) else str(absolute)


def as_labels(labels: Any, count: int) -> list[Label]:
    """Convert a list, array or tensor of labels to plain Python values; None means no labels."""
    if labels is None:
        return [None] * count
    values = labels.tolist() if hasattr(labels, "tolist") else list(labels)
    check_count("labels", len(values), "item", count)
    return [value.item() if isinstance(value, np.generic) else value for value in values]


def row_by_id(ids: Sequence[str], labels: Sequence[Label], count: int) -> dict[str, int]:
    """Map ids to rows, after checking that there are `count` distinct strings, and the types of the labels."""
    types = {type(label).__name__ for label in labels} - {"NoneType"}
    if types not in (set(), {"str"}, {"int"}):
        raise DataError(f"labels: expected all strings or all integers (or None), got {', '.join(sorted(types))}.")
    check_count("ids", len(ids), "vector", count)
    rows: dict[str, int] = {}
    for row, id in enumerate(ids):
        if not isinstance(id, str):
            raise DataError(f"ids: expected strings, got {type(id).__name__} ({id!r}).")
        if rows.setdefault(id, row) != row:
            raise DataError(f"ids: {id!r} appears twice. Ids must be unique.")
    return rows


def check_count(what: str, given: int, of: str, count: int) -> None:
    if given != count:
        raise DataError(f"{what}: expected one per {of}, got {given} for {count}.")
