"""Identify models by their weights, and files by size, modification time and content."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from nearkin.deploy.index.manifest import ModelInfo
from nearkin.errors import DataError


class EmbeddingModel(Protocol):
    """The model interface an index needs; `nearkin.Embedder` implements it."""

    image_shape: tuple[int, int, int]  # input size (C, H, W)

    def embed(self, images: Any) -> Tensor:
        """Return one vector per image, float32 [N, D]."""
        ...

    def fingerprint(self) -> str:
        """Return a hash of the weights."""
        ...


@dataclass(frozen=True)
class FileStamp:
    """Identifies a file's content. The hash is compared only where size or modification time changed."""

    size: int  # in bytes
    mtime_ns: int  # modification time in nanoseconds
    sha256: str  # hash of the content


def check_model(model_info: ModelInfo | None, fingerprint: str, what: str) -> None:
    """Check that a model made the vectors it is to be used with."""
    if model_info is not None and model_info.fingerprint != fingerprint:
        raise DataError(
            f"{what}: built with a different model (weights {model_info.fingerprint[:12]}, got {fingerprint[:12]}).\n"
            "Use the run it was built with, or index again into another folder."
        )


def get_model_info(model: EmbeddingModel, run: Path | None = None) -> ModelInfo:
    """Describe a model for the manifest of an index. Returns fingerprint, image shape and absolute run path."""
    return ModelInfo(model.fingerprint(), tuple(model.image_shape), None if run is None else str(run.resolve()))
