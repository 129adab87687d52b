"""A dictionary that refuses duplicates and suggests on a miss, and what the settings of its things may be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

from nearkin.errors import UnknownNameError, did_you_mean

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """Names to things of one kind.

    >>> losses = Registry[int]("loss")
    >>> losses.add("triplet", 3)
    3
    >>> losses["triplet"]
    3
    >>> losses["triplett"]
    Traceback (most recent call last):
    nearkin.errors.UnknownNameError: No loss named 'triplett'. Did you mean 'triplet'?
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, T] = {}

    def add(self, name: str, item: T) -> T:
        if name in self._items:
            # Our own mistake, not the user's: two things of one name in the source.
            raise KeyError(f"a {self.kind} named {name!r} is registered already")
        self._items[name] = item
        return item

    def __getitem__(self, name: str) -> T:
        try:
            return self._items[name]
        except KeyError:
            hint = did_you_mean(name, self._items) or f" There are: {', '.join(sorted(self._items))}."
            raise UnknownNameError(f"No {self.kind} named '{name}'.{hint}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def to_python_scalar(value: Any) -> Any:
    """A 0-dim tensor or NumPy number as the Python number it holds; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def is_number(value: object, kind: type) -> bool:
    """Whether a value is a whole number (kind int) or a finite one (any other kind); True and False are neither.

    >>> is_number(2, float), is_number(2.0, int), is_number(True, int)
    (True, False, False)
    """
    if isinstance(value, bool):
        return False
    return isinstance(value, int) if kind is int else isinstance(value, int | float) and math.isfinite(value)
