"""What nearkin raises when something the user gave cannot be used.

    UserError                 anything a person can mend; the command line prints it and exits with 2
    ├── ConfigError           a recipe, setting or name that does not exist or does not fit
    │   └── UnknownNameError       a name missing from a registry, with a suggestion
    ├── DataError             images, labels, features or folders that cannot be used
    ├── RunError              a run folder that cannot be written, read or resumed
    │   └── RunBusyError           another process holds it
    ├── TrainingFailedError        a run that went wrong by itself (a loss that is not finite)
    ├── TrainingStoppedError       a run that its watcher ended early, as a search ends those that promise little
    ├── ProcessLostError           of several processes that train together one has died or does not answer
    └── MissingExtraError          an optional package is not installed

`UserError` is a `ValueError`, so library users may catch either. A message says what, where, what was
got and how to cure it, in one or two lines. Mistakes of our own are plain `assert`s.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType


class UserError(ValueError):
    """Something the user gave cannot be used; the message says how to mend it."""


class ConfigError(UserError):
    """A recipe, setting or name that does not exist or does not fit."""


class UnknownNameError(ConfigError):
    """A name that is not registered."""


class DataError(UserError):
    """Images, labels, features or folders that cannot be used."""


class RunError(UserError):
    """A run folder that cannot be written, read or resumed."""


class RunBusyError(RunError):
    """Another process holds the run."""


class TrainingFailedError(UserError):
    """A run that went wrong by itself, for example a loss that is not finite."""


class TrainingStoppedError(UserError):
    """A run that whoever watches it (`fit(on_epoch_end=...)`) ended early; `path` is its folder."""

    def __init__(self, path: Path, text: str) -> None:
        super().__init__(f"{path}: {text}")
        self.path = path


class ProcessLostError(UserError):
    """Of several processes that train together one has died or does not answer."""


class MissingExtraError(UserError):
    """An optional package is not installed."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence that names the nearest of `known`, or an empty string when none is near.

    >>> did_you_mean("proxyanchor", ["proxy_anchor", "triplet"])
    " Did you mean 'proxy_anchor'?"
    """
    by_plain = {_plain(k): k for k in known}
    near = difflib.get_close_matches(_plain(name), by_plain, n=1, cutoff=0.6)
    return f" Did you mean '{by_plain[near[0]]}'?" if near else ""


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def import_extra(module: str, extra: str) -> ModuleType:
    """Import an optional module, or say which extra brings it.

    >>> import_extra("json", extra="vision").__name__
    'json'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name != package:
            raise
        raise MissingExtraError(f"{package} is not installed. Run: pip install 'nearkin[{extra}]'") from None
