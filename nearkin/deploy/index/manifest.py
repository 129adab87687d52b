"""The manifest of an index: its state as JSON, with format version and checksum."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nearkin.errors import DataError

FORMAT, VERSION = "nearkin index", 2
RESTORE_HINT = "Restore it, or index again into another folder."


@dataclass(frozen=True)
class StoredFile:
    """A data file that the manifest names."""

    name: str  # file name in the index folder
    bytes: int  # size
    sha256: str  # hash of the content


@dataclass(frozen=True)
class ModelInfo:
    """The model that made the vectors."""

    fingerprint: str  # hash of its weights
    image_shape: tuple[int, ...]  # input size (C, H, W)
    run: str | None = None  # run folder it was loaded from, if any


@dataclass(frozen=True)
class Manifest:
    """The state of an index."""

    items: int
    dim: int  # number of dimensions per vector
    files: dict[str, StoredFile] = field(default_factory=dict)  # data files by role: "vectors", "items", "graph"
    model: ModelInfo | None = None  # the model that made the vectors, if known
    root: str | None = None  # the folder that item ids are relative to, if the items are files
    threshold: dict[str, Any] | None = None  # `openset.Threshold` as a dict, if calibrated
    rerank: dict[str, Any] | None = None  # re-ranking method and its settings, if one was chosen
    graph: dict[str, Any] | None = None  # `graph.GraphStats` as a dict, if a graph was built
    store: str | None = None  # name of the external store that holds the same items, if any

    def to_json(self) -> str:
        """Return the manifest as JSON text with format, version and checksum."""
        body = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return json.dumps({**body, "sha256": _checksum(body)}, indent=1)

    @classmethod
    def from_json(cls, text: str, path: Path) -> Manifest:
        """Parse and verify a manifest."""
        try:
            body = json.loads(text)
            if not isinstance(body, dict) or body.get("format") != FORMAT:
                raise DataError(f"{path}: not the manifest of a nearkin index.")
            _check_version(body["version"], path)
            if body.pop("sha256") != _checksum(body):
                raise ValueError("checksum mismatch")
            del body["format"], body["version"]
            body["files"] = {role: StoredFile(**values) for role, values in body["files"].items()}
            model = body["model"]
            if model is not None:
                body["model"] = ModelInfo(**{**model, "image_shape": tuple(model["image_shape"])})
            return cls(**body)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{path}: damaged ({error}). {RESTORE_HINT}") from None


def _check_version(version: int, path: Path) -> None:
    if version > VERSION:
        raise DataError(
            f"{path}: written by a newer nearkin (format {version}, this version reads {VERSION}). Upgrade nearkin."
        )
    if version < VERSION:
        raise DataError(
            f"{path}: written by an older nearkin (format {version}, this version reads {VERSION}). "
            "Index again into another folder."
        )


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
