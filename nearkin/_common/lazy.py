"""Names that a package exports but loads only when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_exports(package: str, exports: Mapping[str, Sequence[str]]) -> tuple[Callable[[str], Any], Callable[[], Any]]:
    """Make `__getattr__` and `__dir__` of a package whose names are loaded on first use.

    Importing such a package costs nothing, so `nearkin --help` stays instant and the losses never pull in torchvision.

    Args:
        package: The package's `__name__`.
        exports: Module, relative to the package, to the names it provides. A module whose own last name is listed is
            itself the export.

    Returns:
        The two functions, to be assigned in the package's `__init__`.
    """
    homes = {name: f"{package}.{module}" for module, names in exports.items() for name in names}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(homes[name])
        value = module if homes[name].endswith(f".{name}") else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return load, names
