"""Devices: choose one, seed its generator, and end a step on it."""

import importlib
import sys
from typing import Any

import torch

from nearkin.errors import ConfigError


def choose_device(name: str) -> torch.device:
    """Return a usable device.

    Args:
        name: "cpu", "cuda", "cuda:1", "mps", or "auto" for a GPU if there is one. Other devices of torch work as well;
            if a package adds them ("xla" is in torch_xla), it is imported.

    Returns:
        The device.

    Raises:
        ConfigError: It cannot be used here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        if not hasattr(torch, device.type):
            importlib.import_module(f"torch_{device.type}")
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ConfigError(f"device '{name}' cannot be used here ({str(error).splitlines()[0]}). Try cpu.") from None


def seed_device(device: torch.device, seed: int) -> None:
    if device.type != "cpu":
        _device_module(device).manual_seed(seed)


def end_step(device: torch.device) -> None:
    """Run the pending operations of a device that defers them (XLA): else every step would run all before it again."""
    module = _device_module(device)
    if module is not None and hasattr(module, "sync"):
        module.sync()


def _device_module(device: torch.device) -> Any:
    """Return torch.cpu, torch.cuda, torch.mps, ..., or the package that added the device."""
    return getattr(torch, device.type, None) or sys.modules[f"torch_{device.type}"]
