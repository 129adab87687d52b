"""Exceptions raised for input that cannot be used: what is wrong, where, what was given and how to fix it.

The command line prints a `UserError` and exits with code 2. Bugs of ours are plain `assert`s.
"""

import difflib
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType


class UserError(ValueError):
    """Anything the user can fix. As it is a `ValueError`, library users may catch either."""


class ConfigError(UserError):
    """An invalid recipe, setting or name."""


class UnknownNameError(ConfigError):
    """A name that is not registered."""


class DataError(UserError):
    """Images, labels, features or folders that cannot be used."""


class RunError(UserError):
    """A run folder that cannot be written, read or resumed."""


class RunBusyError(RunError):
    """Another process is using the run."""


class TrainingFailedError(UserError):
    """Training diverged, for example the loss is not finite."""


class TrainingStoppedError(UserError):
    """A callback, `fit(on_epoch_end=...)`, stopped the run early."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path


class ProcessLostError(UserError):
    """In distributed training, a process died or does not respond."""


class MissingExtraError(UserError):
    """An optional package is not installed."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Suggest the known name nearest to a misspelt one.

    Example:
        >>> did_you_mean("proxyanchor", ["proxy_anchor", "triplet"])
        " Did you mean 'proxy_anchor'?"
    """
    names = {_normalized(k): k for k in known}
    near = difflib.get_close_matches(_normalized(name), names, n=1, cutoff=0.6)
    return f" Did you mean '{names[near[0]]}'?" if near else ""


def _normalized(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def import_extra(module: str, extra: str) -> ModuleType:
    """Import a module of an optional dependency.

    Example:
        >>> import_extra("json", extra="images").__name__
        'json'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name != package:
            raise
        raise _missing(package, extra) from None


def require_extra(extra: str, *packages: str) -> None:
    """Check that packages of an extra are installed, without importing them."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise _missing(package, extra)


def _missing(package: str, extra: str) -> MissingExtraError:
    return MissingExtraError(f"{package} is not installed. Run: pip install 'nearkin[{extra}]'")
