"""Search ranges of the settings of a loss."""

import math
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Range:
    """The values of a setting that a tuner searches, and the wider interval that the formula accepts.

    Attributes:
        kind: "log" or "linear" for an interval on that scale, "integer" or "choice".
        low: Lower end of the search interval.
        high: Upper end of the search interval.
        options: The values of a choice.
        legal: The interval that the formula accepts, such as "[0, 1)"; values outside are rejected.
    """

    kind: Literal["log", "linear", "integer", "choice"]
    low: float = math.nan
    high: float = math.nan
    options: tuple[Any, ...] = ()
    legal: str = "(-inf, inf)"

    def __str__(self) -> str:
        if self.kind == "choice":
            return "one of " + ", ".join(map(str, self.options))
        scale = {"log": ", log scale", "linear": "", "integer": ", integer"}[self.kind]
        return f"{self.low:g} to {self.high:g}{scale}"

    def __contains__(self, value: object) -> bool:
        if self.kind == "choice":
            return value in self.options
        return isinstance(value, int | float) and self.low <= value <= self.high

    def allows(self, value: float) -> bool:
        """Return whether a number is legal, inside the search range or not."""
        low, high = map(float, self.legal[1:-1].split(","))
        at_closed_end = (self.legal[0] == "[" and value == low) or (self.legal[-1] == "]" and value == high)
        return at_closed_end or low < value < high


def log(low: float, high: float, *, legal: str = "(0, inf)") -> Range:
    """Return a range on a log scale, for positive settings.

    Args:
        low: Lower end of the search interval.
        high: Upper end of the search interval.
        legal: What the formula accepts; "[0, inf)" for a weight that may be switched off.

    Returns:
        The range.

    Example:
        >>> str(log(0.5, 50)), 2.0 in log(0.5, 50)
        ('0.5 to 50, log scale', True)
    """
    return Range("log", low, high, legal=legal)


def linear(low: float, high: float, *, legal: str = "(-inf, inf)") -> Range:
    """Return a range on a linear scale.

    Args:
        low: Lower end of the search interval.
        high: Upper end of the search interval.
        legal: What the formula accepts.

    Returns:
        The range.
    """
    return Range("linear", low, high, legal=legal)


def integer(low: int, high: int) -> Range:
    """Return a range of integers.

    Args:
        low: The smallest legal value, and the lower end of the search interval.
        high: Upper end of the search interval.

    Returns:
        The range.
    """
    return Range("integer", low, high, legal=f"[{low}, inf)")


def choice(*options: Any) -> Range:
    """Return a range of a few values.

    Args:
        *options: The values.

    Returns:
        The range.
    """
    return Range("choice", options=options)
