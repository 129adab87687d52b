"""Registry of named components, and checks of their numeric settings."""

import math
from collections import UserDict
from typing import Any, TypeVar

from nearkin._common.plugins import HINT, load_plugins
from nearkin.errors import UnknownNameError, did_you_mean

T = TypeVar("T")


class Registry(UserDict[str, T]):  # not a subclass of dict: torch 2.6 cannot compile a look-up in one
    """A mapping from names to components that rejects duplicates and suggests the nearest name on a miss.

    A name that is missing may be that of a plugin: plugins are imported then, and not before.
    """

    def __init__(self, category: str) -> None:
        super().__init__()
        self.category = category

    def add(self, name: str, item: T) -> T:
        if name in self.data:
            raise KeyError(f"a {self.category} named {name!r} is already registered")
        self.data[name] = item
        return item

    def __getitem__(self, name: str) -> T:
        if name not in self.data and name not in self:
            hint = did_you_mean(name, self.data) or f" Available: {', '.join(sorted(self.data))}."
            raise UnknownNameError(f"No {self.category} named '{name}'.{hint} {HINT}")
        return self.data[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.data[name] if name in self else default

    def __contains__(self, name: object) -> bool:
        if name not in self.data:
            load_plugins()
        return name in self.data


def to_python_scalar(value: Any) -> Any:
    """Convert a 0-dim tensor or NumPy number to a Python number. Returns the number; any other value unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def is_number(value: object, number_type: type) -> bool:
    """Return whether a value is an integer or a finite number; booleans are neither."""
    if isinstance(value, bool):
        return False
    return isinstance(value, int) if number_type is int else isinstance(value, int | float) and math.isfinite(value)
