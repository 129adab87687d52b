"""Identify models by their weights, and files by size, modification time and content."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from nearkin.deploy.index.manifest import ModelInfo
from nearkin.errors import DataError


class EmbeddingModel(Protocol):
    """The model interface an index needs; `nearkin.Embedder` implements it.

    Attributes:
        image_shape: Input size (C, H, W).
    """

    image_shape: tuple[int, int, int]

    def embed(self, images: Any) -> Tensor:
        """Return one vector per image, float32 [N, D]."""
        ...

    def fingerprint(self) -> str:
        """Return a hash of the weights."""
        ...


@dataclass(frozen=True)
class FileStamp:
    """Identifies a file's content. The hash is compared only where size or modification time changed.

    Attributes:
        size: In bytes.
        mtime_ns: Modification time in nanoseconds.
        sha256: Hash of the content.
    """

    size: int
    mtime_ns: int
    sha256: str


def check_model(model_info: ModelInfo | None, fingerprint: str, what: str) -> None:
    """Check that a model made the vectors it is to be used with.

    Args:
        model_info: The model that made the vectors; None skips the check.
        fingerprint: Of the model to be used.
        what: Subject of the error message.

    Raises:
        DataError: If the fingerprints differ.
    """
    if model_info is not None and model_info.fingerprint != fingerprint:
        raise DataError(
            f"{what}: built with a different model (weights {model_info.fingerprint[:12]}, got {fingerprint[:12]}).\n"
            "Use the run it was built with, or index again into another folder."
        )


def get_model_info(model: EmbeddingModel, run: Path | None = None) -> ModelInfo:
    """Describe a model for the manifest of an index.

    Args:
        model: The model that embeds the images.
        run: Its run folder, if any.

    Returns:
        Fingerprint, image shape and absolute run path.
    """
    return ModelInfo(model.fingerprint(), tuple(model.image_shape), None if run is None else str(run.resolve()))
