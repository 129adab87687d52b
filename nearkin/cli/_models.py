"""Load the model of a command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nearkin.errors import ConfigError

if TYPE_CHECKING:
    from nearkin.deploy.index.index import Index
    from nearkin.models.embedder import Embedder

INDEX_FOLDER = "an index folder (made with: nearkin index RUN FOLDER -o DIR)"


def load_model(run: str | Path, device: str) -> Embedder:
    """Load the model of a run. Returns the model on that device."""
    from nearkin.models.embedder import load
    from nearkin.training.device import choose_device

    return load(run).to(choose_device(device))


def run_of(index: Index) -> str:
    """Return the run folder whose model built an index."""
    run = None if index.model_info is None else index.model_info.run
    if run is None:
        raise ConfigError("the index records no run folder. Pass it with --run RUN.")
    if not Path(run).exists():
        raise ConfigError(f"{run}: the run of this index does not exist. Pass its new location with --run RUN.")
    return run
