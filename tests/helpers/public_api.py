"""The public names of the package and where each is defined."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from helpers.paths import ROOT

PACKAGES = ["nearkin", *sorted(f"nearkin.{p.parent.name}" for p in (ROOT / "nearkin").glob("[!_]*/__init__.py"))]


def public_names() -> Iterator[tuple[str, str, str]]:
    """Yield (package, name, dotted path of the definition) for every name in the `__all__` of every public package.

    The path is read from the import statements of the package or its stub: constants do not know their module.
    """
    for package in PACKAGES:
        module = importlib.import_module(package)
        stub = Path(module.__file__).with_suffix(".pyi")
        tree = ast.parse((stub if stub.exists() else Path(module.__file__)).read_text(encoding="utf-8"))
        homes = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                home = ".".join(filter(None, [package if node.level else "", node.module]))
                homes |= {alias.name: f"{home}.{alias.name}" for alias in node.names}
        for name in module.__all__:
            yield package, name, homes.get(name, f"{package}.{name}")
