"""Registry of named components, and checks of their numeric settings."""

import math
from collections.abc import Iterator, MutableMapping
from typing import Any, Generic, TypeVar

from nearkin._common.plugins import HINT, load_plugins
from nearkin.errors import UnknownNameError, did_you_mean

T = TypeVar("T")


class Registry(MutableMapping[str, T], Generic[T]):
    """A mapping from names to components that rejects duplicates and suggests the nearest name on a miss.

    A name that is missing may be that of a plugin: plugins are imported then, and not before.

    Example:
        >>> losses = Registry[int]("loss")
        >>> losses.add("triplet", 3)
        3
        >>> losses["triplet"]
        3
        >>> losses["triplett"]
        Traceback (most recent call last):
        nearkin.errors.UnknownNameError: No loss named 'triplett'. Did you mean 'triplet'? Your own: --import FILE.py.
    """

    def __init__(self, category: str) -> None:
        self.category = category
        self._items: dict[str, T] = {}  # not a subclass of dict: torch 2.6 cannot compile a look-up in one

    def add(self, name: str, item: T) -> T:
        if name in self._items:
            raise KeyError(f"a {self.category} named {name!r} is already registered")
        self._items[name] = item
        return item

    def __getitem__(self, name: str) -> T:
        if name not in self._items and name not in self:
            hint = did_you_mean(name, self._items) or f" Available: {', '.join(sorted(self._items))}."
            raise UnknownNameError(f"No {self.category} named '{name}'.{hint} {HINT}")
        return self._items[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self._items[name] if name in self else default

    def __setitem__(self, name: str, item: T) -> None:
        self._items[name] = item

    def __delitem__(self, name: str) -> None:
        del self._items[name]

    def __contains__(self, name: object) -> bool:
        if name not in self._items:
            load_plugins()
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def to_python_scalar(value: Any) -> Any:
    """Convert a 0-dim tensor or NumPy number to a Python number. Returns the number; any other value unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def is_number(value: object, number_type: type) -> bool:
    """Return whether a value is an integer or a finite number; booleans are neither.

    Example:
        >>> is_number(2, float), is_number(2.0, int), is_number(True, int)
        (True, False, False)
    """
    if isinstance(value, bool):
        return False
    return isinstance(value, int) if number_type is int else isinstance(value, int | float) and math.isfinite(value)
