"""Package exports that are imported on first use."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_exports(package: str, exports: Mapping[str, Sequence[str]]) -> tuple[Callable[[str], Any], Callable[[], Any]]:
    """Make `__getattr__` and `__dir__` for a package that imports its exports on first use, to start fast."""
    modules = {name: f"{package}.{module}" for module, names in exports.items() for name in names}

    def getattribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(modules[name])
        value = module if modules[name].endswith(f".{name}") else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    def directory() -> list[str]:
        # Without our own imports and submodules, which would hide the public names in a notebook's completion.
        dunders = {name for name in vars(sys.modules[package]) if name.startswith("__")}
        return sorted(dunders | set(modules))

    return getattribute, directory
