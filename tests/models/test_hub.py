"""Models on the Hugging Face Hub, against a stand-in for it."""

from __future__ import annotations

import time

import pytest
import torch
from helpers.hub import COMMIT, connect, hub  # noqa: F401  (a fixture)

import nearkin as nk
from nearkin.config import ModelConfig
from nearkin.errors import ConfigError, RunError


def make_model() -> nk.Embedder:
    torch.manual_seed(0)
    return nk.Embedder(ModelConfig(backbone="small_conv", width=4, dim=8), (3, 16, 16))


def test_a_pushed_model_is_loaded_bit_for_bit(hub):  # noqa: F811
    model = make_model()
    address = model.push_to_hub("me/birds")
    assert address.endswith(COMMIT)
    assert set(hub["me/birds"]) == {"README.md", "model.json", "model.safetensors"}
    assert "nk.load" in hub["me/birds"]["README.md"].decode()
    pixels = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    assert torch.equal(nk.load("hf:me/birds").embed(pixels), model.embed(pixels))
    hub["me/birds"]["README.md"] = b""
    assert torch.equal(nk.load("hf:me/birds@main").embed(pixels), model.embed(pixels))


def test_what_cannot_be_loaded_is_named(hub):  # noqa: F811
    with pytest.raises(RunError, match=r"hf:me/nosuch: \w+: .*\nCheck the name, the connection and your token"):
        nk.load("hf:me/nosuch")
    hub["me/other"] = {"config.json": b"{}"}
    with pytest.raises(RunError, match=r"hf:me/other: has no model\.json, so it is not a model of nearkin"):
        nk.load("hf:me/other")
    for name in ("birds", "a/b/c", "me/b rds", ""):
        with pytest.raises(ConfigError, match=r"not the name of a model .* Expected USER/NAME\."):
            nk.load(f"hf:{name}")
    with pytest.raises(ConfigError, match="push without a revision"):
        make_model().push_to_hub("me/birds@v1")


def test_no_connection_fails_within_seconds(monkeypatch, tmp_path):
    connect(monkeypatch, tmp_path, "http://127.0.0.1:9")  # nothing listens there
    start = time.monotonic()
    with pytest.raises(RunError, match="hf:me/birds: "):
        nk.load("hf:me/birds")
    assert time.monotonic() - start < 5
