"""What of pytorch-metric-learning 2.9 is covered: coverage.toml, which the documentation shows and the tests check."""

import tomllib
from collections.abc import Callable
from importlib.resources import files
from typing import Any, Literal, NamedTuple

from nearkin.errors import UnknownNameError, did_you_mean

__all__ = ["COVERAGE", "DIFFERENCES", "Coverage"]


class Coverage(NamedTuple):
    """How a class is covered.

    Attributes:
        status: "same": equal values and gradients; "differs": equal except for what the note says; "absent".
        note: What differs and why, or what to use instead.
    """

    status: Literal["same", "differs", "absent"]
    note: str = ""


_DATA = tomllib.loads(files("nearkin.compat.pml").joinpath("coverage.toml").read_text(encoding="utf-8"))
DIFFERENCES: dict[str, str] = _DATA["differences"]
COVERAGE: dict[str, dict[str, Coverage]] = {
    module: {name: Coverage("same") for name in table["same"]}
    | {name: Coverage("differs", note) for name, note in table.get("differs", {}).items()}
    | {name: Coverage("absent", note) for name, note in table.get("absent", {}).items()}
    for module, table in _DATA["coverage"].items()
}


def absent_names(path: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__`, which says what to use instead of a name that is not covered."""
    module = path.removeprefix("nearkin.compat.pml").removeprefix(".")
    absent = {**_DATA["modules"].get(module, {}), **_DATA["coverage"].get(module, {}).get("absent", {})}

    def getattribute(name: str) -> Any:
        if name in absent:
            raise UnknownNameError(f"{path} has no {name}. Use instead: {absent[name]}.")
        hint = "" if name.startswith("_") else did_you_mean(name, COVERAGE.get(module, ()))
        raise AttributeError(f"module {path!r} has no attribute {name!r}.{hint}")

    return getattribute
