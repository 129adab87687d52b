"""Frozen, typed configuration of a training run."""

from nearkin.config.recipe import ComponentConfig, DataConfig, ModelConfig, Recipe, TrainConfig

__all__ = ["ComponentConfig", "DataConfig", "ModelConfig", "Recipe", "TrainConfig"]
