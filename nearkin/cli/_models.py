"""The model that a command works with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nearkin.errors import ConfigError

if TYPE_CHECKING:
    from nearkin.deploy.index.index import Index
    from nearkin.models.embedder import Embedder


def load_model(run: str | Path, device: str) -> Embedder:
    """The model of a run on the device that was asked for."""
    from nearkin.models.embedder import load
    from nearkin.training.factory import choose_device

    return load(run).to(choose_device(device))


def run_of(opened: Index) -> str:
    """The run folder whose model made the index, or how to name another place."""
    if opened.mark is None or opened.mark.run is None:
        raise ConfigError("the index names no run folder. Give it with --run RUN.")
    if not Path(opened.mark.run).exists():
        raise ConfigError(f"{opened.mark.run}: the run of this index is not there. Give its place with --run RUN.")
    return opened.mark.run
