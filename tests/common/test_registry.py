"""Registries of named components, and the checks of their numbers."""

import pytest

from nearkin._common.registry import Registry, is_number
from nearkin.errors import UnknownNameError


def test_a_registry_returns_what_was_added_and_suggests_the_nearest_name():
    losses = Registry[int]("loss")
    assert losses.add("triplet", 3) == losses["triplet"] == 3
    with pytest.raises(
        UnknownNameError, match=r"No loss named 'triplett'. Did you mean 'triplet'\? Your own: --import FILE.py."
    ):
        losses["triplett"]


def test_booleans_are_no_numbers_and_floats_no_integers():
    assert [is_number(2, float), is_number(2.0, int), is_number(True, int)] == [True, False, False]
