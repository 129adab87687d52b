"""Choosing a device, and devices that torch itself does not know. tests/device runs everything on a second device."""

import sys

import pytest
import torch

from nearkin.errors import ConfigError
from nearkin.ops.geometry import full_precision
from nearkin.training.device import choose_device


@pytest.mark.parametrize("name", ["meta", "maia", "xpu:7", "nonsense", "cpu:x"])
def test_a_device_that_cannot_be_used_is_refused(name):
    with pytest.raises(ConfigError, match=rf"^device '{name}' cannot be used here \(.+\)\. Try cpu\.$"):
        choose_device(name)


def test_a_device_of_another_package_names_the_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_xla", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"^device 'xla' cannot be used here \(.*torch_xla.*\)\. Try cpu\.$"):
        choose_device("xla")


def test_losses_run_on_devices_without_autocast():
    assert not torch.amp.is_autocast_available("meta")
    with full_precision(torch.empty(1, device="meta")):
        pass
