"""Plugins: a user's own losses, miners, backbones, datasets and recipes, which register themselves when imported.

They are files named with `--import FILE.py`, which worker processes inherit through an environment variable, and
modules of installed packages with an entry point in the group `nearkin.plugins`. A registry imports them when a name
is missing.
"""

import functools
import hashlib
import importlib
import importlib.util
import os
import sys
from importlib.metadata import entry_points
from pathlib import Path

from nearkin.errors import ConfigError

GROUP = "nearkin.plugins"
VARIABLE = "NEARKIN_IMPORT"
HINT = "Your own: --import FILE.py."


def add_plugin_files(files: list[str]) -> None:
    """Have files imported by this process and by those it starts, when a registry misses a name."""
    for file in files:
        if not Path(file).is_file():
            raise ConfigError(f"--import {file}: no such file. Give a .py file that registers your own parts.")
    given = [str(Path(file).absolute()) for file in files]
    known = [path for path in os.environ.get(VARIABLE, "").split(os.pathsep) if path]
    if given:
        os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys([*known, *given]))


def load_plugins() -> None:
    """Import all plugins that are not imported yet, or raise a ConfigError."""
    for path in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        _import_file(Path(path))
    for name, module in _installed():
        if module not in sys.modules:
            try:
                importlib.import_module(module)
            except Exception as error:
                raise ConfigError(f"plugin {name}: {_reason(error)}. Fix or uninstall the package.") from None


@functools.cache
def _installed() -> tuple[tuple[str, str], ...]:
    return tuple((entry.name, entry.module) for entry in entry_points(group=GROUP))


def _import_file(path: Path) -> None:
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"  # not that of an installed module
    if name in sys.modules:  # also while it is being imported
        return
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--import {path}: not a Python file. Its name must end in .py.")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception):
            raise
        raise ConfigError(f"--import {path}: {_reason(error)}.") from error


def _reason(error: Exception) -> str:
    text = error.args[0] if isinstance(error, KeyError) and error.args else str(error)
    line = next(iter(str(text).splitlines()), "").rstrip(".")
    return f"cannot be imported ({type(error).__name__}: {line})"
