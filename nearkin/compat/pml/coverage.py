"""What of pytorch-metric-learning 2.9 is covered: coverage.toml, which the documentation shows and the tests check."""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

from nearkin.errors import UnknownNameError, did_you_mean

__all__ = ["COVERAGE", "DIFFERENCES", "Coverage", "absent_names"]


@dataclass(frozen=True)
class Coverage:
    """How a class is covered.

    Attributes:
        status: "same": equal values and gradients; "differs": equal except for what the note says; "absent".
        note: What differs and why, or what to use instead.
    """

    status: Literal["same", "differs", "absent"]
    note: str = ""


def _rows(table: dict[str, Any]) -> dict[str, Coverage]:
    rows = {name: Coverage("same") for name in table.get("same", ())}
    rows |= {name: Coverage("differs", note) for name, note in table.get("differs", {}).items()}
    rows |= {name: Coverage("absent", note) for name, note in table.get("absent", {}).items()}
    return dict(sorted(rows.items()))


_DATA = tomllib.loads(files("nearkin.compat.pml").joinpath("coverage.toml").read_text(encoding="utf-8"))
COVERAGE: dict[str, dict[str, Coverage]] = {module: _rows(table) for module, table in _DATA["coverage"].items()}
DIFFERENCES: dict[str, str] = _DATA["differences"]


def absent_names(module: str) -> Callable[[str], Any]:
    """Make a module's `__getattr__`, which says what to use instead of a name that is not covered.

    Args:
        module: Below `nearkin.compat.pml`, for example "losses"; "" for the package itself.

    Returns:
        The function. It raises UnknownNameError for such a name, and AttributeError for any other.
    """
    path = f"nearkin.compat.pml{'.' if module else ''}{module}"
    absent = {**_DATA["modules"].get(module, {}), **_DATA["coverage"].get(module, {}).get("absent", {})}

    def getattribute(name: str) -> Any:
        if name in absent:
            raise UnknownNameError(f"{path} has no {name}. Use instead: {absent[name]}.")
        hint = "" if name.startswith("_") else did_you_mean(name, COVERAGE.get(module, ()))
        raise AttributeError(f"module {path!r} has no attribute {name!r}.{hint}")

    return getattribute
