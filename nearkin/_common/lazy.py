"""Package exports that are imported on first use."""

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def attach_stub(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make `__getattr__`, `__dir__` and `__all__` for a package whose exports are the imports of its __init__.pyi."""
    modules: dict[str, str] = {}
    for node in ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8")).body:
        assert isinstance(node, ast.ImportFrom)
        if node.level:  # of this package
            modules |= {alias.name: f".{node.module or ''}" for alias in node.names}

    def getattribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        source = modules[name]
        value = vars(importlib.import_module(source, package)).get(name)
        if value is None:  # a module, which becomes an attribute of its package when it is imported
            value = importlib.import_module(f"{source.rstrip('.')}.{name}", package)
        setattr(sys.modules[package], name, value)
        return value

    def directory() -> list[str]:
        # Without our own imports and submodules, which would hide the public names in a notebook's completion.
        dunders = {name for name in vars(sys.modules[package]) if name.startswith("__")}
        return sorted(dunders | set(modules))

    return getattribute, directory, sorted(modules)
