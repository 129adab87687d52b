"""Marks by which things are known again: a model by its weights, a file by its size, time and content."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from nearkin.deploy.index.files import ModelInfo
from nearkin.errors import DataError


class Embeds(Protocol):
    """What an index needs of a model; `nearkin.Embedder` has it."""

    image_shape: tuple[int, int, int]

    def embed(self, images: Any) -> Tensor: ...

    def fingerprint(self) -> str: ...


@dataclass(frozen=True)
class FileStamp:
    """By what a file is known to be unchanged: its size and time, and if the time differs, its content."""

    size: int
    mtime_ns: int
    sha256: str


def check_model(mark: ModelInfo | None, found: str, what: str) -> None:
    """Refuse vectors and a model that do not belong together."""
    if mark is not None and mark.fingerprint != found:
        raise DataError(
            f"{what}: its vectors were made by another model (weights {mark.fingerprint[:12]}, this one has "
            f"{found[:12]}).\nUse the run it was made with, or index again into another folder."
        )


def model_info(model: Embeds, run: Path | None = None) -> ModelInfo:
    return ModelInfo(model.fingerprint(), tuple(model.image_shape), None if run is None else str(run.resolve()))
