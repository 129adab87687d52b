"""Shared by all commands: flags as a dataclass, required arguments, and printing to the terminal."""

from __future__ import annotations

import dataclasses
import typing
from typing import TypeVar

from nearkin.errors import ConfigError, did_you_mean

T = TypeVar("T")


def parse(args_type: type[T], argv: list[str], prog: str, default: T | None = None) -> T:
    """Parse flags into a dataclass."""
    import tyro

    defaults = {} if default is None else {"default": default}
    parsed, unknown = tyro.cli(args_type, args=argv, prog=prog, return_unknown_args=True, **defaults)  # type: ignore[call-overload]
    if unknown:
        name = unknown[0].partition("=")[0]
        known = _flag_names(args_type)
        suffixed = [flag for flag in known if flag.endswith(f".{name.lstrip('-')}")]  # --lr means --train.lr
        hint = f" Did you mean '{suffixed[0]}'?" if suffixed else did_you_mean(name, known)
        what = "setting" if name.startswith("-") else "argument"
        raise ConfigError(f"{name}: no such {what}.{hint} See: {prog} --help.")
    return parsed  # type: ignore[no-any-return]


def _flag_names(args_type: type, prefix: str = "--") -> list[str]:
    names: list[str] = []
    for name, hint in typing.get_type_hints(args_type).items():
        flag = prefix + name.replace("_", "-")
        names += _flag_names(hint, f"{flag}.") if isinstance(hint, type) and dataclasses.is_dataclass(hint) else [flag]
    return names


def leading(argv: list[str], what: str, prog: str, args_type: type) -> tuple[str, list[str]]:
    """Split off the required first argument."""
    if argv and argv[0] in {"-h", "--help"}:
        parse(args_type, argv, prog)
    if not argv or argv[0].startswith("-"):
        raise ConfigError(f"{prog}: missing argument: {what}.")
    return argv[0], argv[1:]


def show(*parts: object) -> None:
    """Print tables and lines, in colour on a terminal. Brackets in names are not read as markup."""
    from rich.console import Console

    from nearkin._common.progress import escape_controls

    console = Console(highlight=False, soft_wrap=True, markup=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    print(escape_controls(capture.get(), keep_colours=console.is_terminal), end="", flush=True)
