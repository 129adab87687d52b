"""Saved models: load them from a run folder, from a folder written by `Embedder.save`, or from the Hugging Face Hub."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

from safetensors import torch as safetensors

from nearkin._common.files import read_json
from nearkin.config._parsing import from_dict
from nearkin.config.recipe import ModelConfig, Recipe
from nearkin.errors import RunError
from nearkin.models import hub
from nearkin.models.embedder import FORMAT, Embedder
from nearkin.models.own import OWN, Preprocess, restore_own
from nearkin.models.weights import load_checkpoint


def load(path: str | Path, module: Any = None, preprocess: Preprocess | None = None) -> Embedder:
    """Load a trained model.

    Args:
        path: A run folder, a folder written by `Embedder.save`, or a model on the Hugging Face Hub: "hf:USER/NAME".
        module: For a model that `Embedder.wrap` made: an instance of your network, which is copied and gets the stored
            weights; or a wrapped model, with its preprocessing.
        preprocess: The function that was passed to `Embedder.wrap`, if it was a function.

    Returns:
        The model in evaluation mode.

    Raises:
        RunError: The folder has no model, its files are damaged, or they need a `module` that does not fit.
    """
    folder = hub.download(str(path)) if str(path).startswith(hub.PREFIX) else Path(path)
    is_saved = (folder / "model.json").exists()
    weights = folder / ("model.safetensors" if is_saved else "best.pt")
    try:
        stored = _read_saved(folder, weights) if is_saved else _read_run(folder, weights)
        config, shape = stored["config"], tuple(stored["image_shape"])
        backbone = restore_own(folder, config.backbone, shape, stored.get(OWN), module, preprocess)
        model = Embedder(config, shape, augment=stored["augment"], backbone=backbone)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, RunError) or not is_saved:
            raise
        raise RunError(f"{folder}: not a readable model ({type(error).__name__}: {error}).") from None
    try:
        model.load_state_dict(stored["state"])
    except (RuntimeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        what = "the configuration in the same folder" if model.own is None else "the module that you passed"
        raise RunError(f"{weights}: does not fit {what} ({reason}).") from None
    return model.eval()


def _read_run(folder: Path, weights: Path) -> dict[str, Any]:
    recipe_file = folder / "recipe.toml"
    if recipe_file.exists() and (folder / "result.json").exists() and not weights.exists():
        raise RunError(
            f"{folder}: the weights of this run were deleted, as studies do with keep_models = false. "
            f"Train it again: nearkin train {recipe_file}"
        )
    if not recipe_file.exists() or not weights.exists():
        raise RunError(f"{folder}: no trained model here (best.pt or model.json). Give a folder below runs/.")
    checkpoint = load_checkpoint(weights, keys=("model", "image_shape"))
    recipe = Recipe.from_toml(recipe_file)
    config = dataclasses.replace(recipe.model, weights="none")  # the initial ones may be gone, and are not needed
    return {**checkpoint, "state": checkpoint["model"], "config": config, "augment": recipe.data.augment}


def _read_saved(folder: Path, weights: Path) -> dict[str, Any]:
    stored = read_json(folder / "model.json")
    if stored["format"] != FORMAT:
        raise RunError(
            f"{folder / 'model.json'}: format {stored['format']}, but this version of nearkin reads format {FORMAT}. "
            "Load it with the version that wrote it."
        )
    data = weights.read_bytes()
    if hashlib.sha256(data).hexdigest() != stored["sha256"]:
        raise RunError(f"{weights}: does not match model.json (its checksum differs). Copy both files again.")
    return {**stored, "state": safetensors.load(data), "config": from_dict(ModelConfig, stored["model"], "model.")}
