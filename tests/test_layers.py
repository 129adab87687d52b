"""The package's shape: layers that import only downwards, no cycles, nothing loose at the top."""

from __future__ import annotations

import ast
import importlib
import pkgutil

import pytest
from helpers.paths import ROOT

import nearkin

PACKAGE = ROOT / "nearkin"
FOLDERS = sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists())
PUBLIC = ["nearkin", *(f"nearkin.{name}" for name in FOLDERS if not name.startswith("_"))]


def imports() -> dict[str, set[str]]:
    """Module -> the modules of the package that it imports, at the top, inside functions and for types."""
    modules = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        modules[name] = ast.parse(path.read_text(encoding="utf-8"))
    found: dict[str, set[str]] = {}
    for name, tree in modules.items():
        found[name] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names if alias.name in modules}
            elif isinstance(node, ast.ImportFrom) and node.module in modules:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    found[name].add(inner if inner in modules else node.module)
    return found


def test_only_four_files_beside_the_folders():
    loose = sorted(path.name for path in PACKAGE.iterdir() if path.is_file())
    assert loose == ["__init__.py", "__init__.pyi", "__main__.py", "errors.py", "py.typed"]


def test_no_import_cycles():
    graph = imports()
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("package", PUBLIC)
def test_every_export_exists_and_is_listed_once(package: str):
    module = importlib.import_module(package)
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None
    assert set(module.__all__) <= set(dir(module))
    with pytest.raises(AttributeError, match="no attribute"):
        module.no_such_name  # noqa: B018


def test_every_module_imports():
    for info in pkgutil.walk_packages(nearkin.__path__, "nearkin."):
        if info.name != "nearkin.__main__":
            importlib.import_module(info.name)
