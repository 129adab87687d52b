"""Registry of named components, and checks of their numeric settings."""

import math
from typing import Any, Generic, TypeVar

from nearkin.errors import UnknownNameError, did_you_mean

T = TypeVar("T")


class Registry(dict[str, T], Generic[T]):
    """A mapping from names to components that rejects duplicates and suggests the nearest name on a miss.

    Example:
        >>> losses = Registry[int]("loss")
        >>> losses.add("triplet", 3)
        3
        >>> losses["triplet"]
        3
        >>> losses["triplett"]
        Traceback (most recent call last):
        nearkin.errors.UnknownNameError: No loss named 'triplett'. Did you mean 'triplet'?
    """

    def __init__(self, category: str) -> None:
        super().__init__()
        self.category = category

    def add(self, name: str, item: T) -> T:
        if name in self:
            raise KeyError(f"a {self.category} named {name!r} is already registered")
        self[name] = item
        return item

    def __missing__(self, name: str) -> T:
        hint = did_you_mean(name, self) or f" Available: {', '.join(sorted(self))}."
        raise UnknownNameError(f"No {self.category} named '{name}'.{hint}")


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
