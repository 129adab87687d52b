"""The second device of tests/device, named by the environment variable DEVICE (cuda, mps, xla), and how to compare."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nearkin.training.device import choose_device

if not os.environ.get("DEVICE"):
    pytest.skip(
        "no second device is named: run `make device`, or `make test DEVICE=cuda`",
        allow_module_level=True,
    )

DEVICE = choose_device(os.environ["DEVICE"])  # refuses a device that this machine does not have
assert DEVICE.type != "cpu", "DEVICE: name a second device, not the CPU that it is compared with."

# MPS has no float64.
DTYPE = torch.float32 if DEVICE.type == "mps" else torch.float64
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5} if DEVICE.type == "mps" else {"rtol": 1e-9, "atol": 1e-10}


def random_batch(n: int = 20, dim: int = 8, classes: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return embeddings and labels on the CPU."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, dim, generator=g, dtype=DTYPE), torch.randint(0, classes, (n,), generator=g)


def tied_batch() -> tuple[Tensor, Tensor]:
    """Return embeddings with many equal similarities: copies, a zero vector and coordinates of 1 and -1."""
    emb = random_batch(24, dim=5, classes=4, seed=3)[0].sign()
    emb[20:], emb[7] = emb[:4], 0
    return emb, torch.arange(24) % 4


def assert_agree(actual: Any, expected: Any, what: str, **tolerance: float) -> None:
    """Compare a result of the second device with that of the CPU."""
    if isinstance(expected, Tensor):
        assert actual.device.type == DEVICE.type, f"{what} is on {actual.device}"
        actual, expected = actual.detach().cpu(), expected.detach()
        assert actual.dtype == expected.dtype, what
        torch.testing.assert_close(actual, expected, **(tolerance or TOLERANCE), msg=lambda m: f"{what}: {m}")
    else:
        np.testing.assert_allclose(actual, expected, **(tolerance or TOLERANCE), err_msg=what)
