"""Frozen dataclasses to and from plain values (TOML, JSON): typed, and strict about unknown keys."""

import dataclasses
import functools
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from nearkin.errors import ConfigError, did_you_mean

Suggest = Callable[[str, str], str]
T = TypeVar("T")


def load_toml(path: Path, what: str, parse: Callable[[dict[str, Any]], T]) -> T:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such {what} file.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}.") from None
    except (OSError, ValueError, RecursionError) as error:  # not UTF-8, numbers or nesting without end
        raise ConfigError(f"{path}: cannot be read as a {what} ({error}).") from None
    try:
        return parse(values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def from_dict(cls: type[T], values: Mapping[str, Any], prefix: str, *, suggest: Suggest | None = None) -> T:
    """Build a frozen dataclass from plain values; a nested one by its own `from_dict` or `from_list`, if it has one."""
    assert dataclasses.is_dataclass(cls)
    hints = typing.get_type_hints(cls)
    known = [field.name for field in dataclasses.fields(cls)]
    for key in values:
        if key not in known:
            hint = suggest(prefix, key) if suggest else did_you_mean(key, known)
            available = f" Available: {', '.join(known)}."
            raise ConfigError(f"{prefix}{key}: no such setting.{hint or available}")
    for field in dataclasses.fields(cls):
        is_required = field.default is field.default_factory is dataclasses.MISSING
        if is_required and field.name not in values:
            raise ConfigError(f"{prefix}{field.name}: missing.")
    return cls(**{key: _convert(hints[key], value, f"{prefix}{key}", suggest) for key, value in values.items()})


def _convert(hint: Any, value: Any, name: str, suggest: Suggest | None) -> Any:
    if isinstance(hint, types.UnionType):  # X | None
        if value is None:
            return None
        hint = next(t for t in typing.get_args(hint) if t is not type(None))
    origin = typing.get_origin(hint)
    is_section = isinstance(hint, type) and dataclasses.is_dataclass(hint)
    if isinstance(value, list) and hasattr(hint, "from_list"):
        return hint.from_list(value, name)
    if (is_section or origin is Mapping) and not isinstance(value, Mapping):
        raise ConfigError(f"{name}: expected a section [{name}], got {value!r}.")
    if is_section:
        own = getattr(hint, "from_dict", None)
        return own(value, name) if own else from_dict(hint, value, f"{name}.", suggest=suggest)
    if origin is Mapping:
        if typing.get_args(hint)[1] is str:
            return {key: _convert(str, item, f"{name}.{key}", suggest) for key, item in value.items()}
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{name}: expected a list, got {value!r}.")
        element = typing.get_args(hint)[0]
        return tuple(_convert(element, item, f"{name}[{i}]", suggest) for i, item in enumerate(value))
    if origin is Literal:
        allowed = typing.get_args(hint)
        if value not in allowed:
            raise ConfigError(f"{name}: expected one of {', '.join(map(repr, allowed))}, got {value!r}.")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        expected = {int: "an integer", float: "a number", bool: "true or false", str: "a string in quotes"}
        raise ConfigError(f"{name}: expected {expected.get(hint, hint)}, got {value!r}.")
    return value


def to_plain_dict(config: Any, *, keyed_only: bool = False) -> dict[str, Any]:
    """Turn a dataclass into nested plain values; a nested one with its own `to_dict()` by that method."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        in_key = field.metadata.get("in_key", True)
        if in_key == "changed":  # settings that came later: runs from before keep their keys
            in_key = value != field.default
        if value is None or (keyed_only and not in_key):
            continue
        if hasattr(value, "to_dict"):
            value = value.to_dict()
        elif dataclasses.is_dataclass(value):
            value = to_plain_dict(value, keyed_only=keyed_only)
        elif isinstance(value, Path):
            value = str(value)
        elif isinstance(value, int) and field.name in _float_fields(config.__class__):
            value = float(value)
        values[field.name] = value
    return values


@functools.cache
def _float_fields(cls: type) -> frozenset[str]:
    hints = typing.get_type_hints(cls)
    return frozenset(name for name, hint in hints.items() if float in (hint, *typing.get_args(hint)))
