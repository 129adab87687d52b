"""Saved models: load them from a run folder, from a folder written by `Embedder.save`, or from the Hugging Face Hub."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

from safetensors import torch as safetensors
from torch import Tensor

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
    if (folder / "model.json").exists():
        return _load_saved(folder, module, preprocess)
    recipe_file, weights_file = folder / "recipe.toml", folder / "best.pt"
    if recipe_file.exists() and (folder / "result.json").exists() and not weights_file.exists():
        raise RunError(
            f"{folder}: the weights of this run were deleted, as studies do with keep_models = false. "
            "Train it again: nearkin train " + str(recipe_file)
        )
    if not recipe_file.exists() or not weights_file.exists():
        raise RunError(
            f"{folder}: no trained model here (recipe.toml and best.pt, or model.json). Give a folder below runs/."
        )
    checkpoint = load_checkpoint(weights_file, keys=("model", "image_shape"))
    recipe = Recipe.from_toml(recipe_file)
    config = dataclasses.replace(recipe.model, weights="none")  # the initial ones may be gone, and are not needed
    shape = tuple(checkpoint["image_shape"])
    backbone = restore_own(folder, config.backbone, shape, checkpoint.get(OWN), module, preprocess)
    model = Embedder(config, shape, augment=recipe.data.augment, backbone=backbone)
    _load_state(model, checkpoint["model"], weights_file)
    return model.eval()


def _load_saved(folder: Path, module: Any, preprocess: Preprocess | None) -> Embedder:
    weights = folder / "model.safetensors"
    try:
        config = read_json(folder / "model.json")
        if config["format"] != FORMAT:
            raise RunError(
                f"{folder / 'model.json'}: format {config['format']}, but this version of nearkin reads "
                f"format {FORMAT}. Load it with the version that wrote it."
            )
        data = weights.read_bytes()
        if hashlib.sha256(data).hexdigest() != config["sha256"]:
            raise RunError(f"{weights}: does not match model.json (its checksum differs). Copy both files again.")
        state = safetensors.load(data)
        shape = tuple(config["image_shape"])
        settings = from_dict(ModelConfig, config["model"], "model.")
        backbone = restore_own(folder, settings.backbone, shape, config.get(OWN), module, preprocess)
        model = Embedder(settings, shape, augment=config["augment"], backbone=backbone)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, RunError):
            raise
        raise RunError(f"{folder}: not a readable model ({type(error).__name__}: {error}).") from None
    _load_state(model, state, weights)
    return model.eval()


def _load_state(model: Embedder, state: dict[str, Tensor], path: Path) -> None:
    try:
        model.load_state_dict(state)
    except (RuntimeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        what = "the configuration in the same folder" if model.own is None else "the module that you passed"
        raise RunError(f"{path}: does not fit {what} ({reason}).") from None
