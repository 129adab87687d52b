"""What every command shares: flags as a dataclass, a leading argument, and printing to the terminal."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from nearkin.errors import ConfigError, did_you_mean

T = TypeVar("T")


def parse(kind: type[T], argv: list[str], prog: str, default: T | None = None) -> T:
    """Flags as a dataclass; one that does not exist is refused with the nearest that does."""
    import tyro

    given = {} if default is None else {"default": default}
    parsed, unknown = tyro.cli(kind, args=argv, prog=prog, return_unknown_args=True, **given)  # type: ignore[call-overload]
    if unknown:
        name = unknown[0].partition("=")[0]
        known = _flag_names(kind)
        tail = [flag for flag in known if flag.endswith(f".{name.lstrip('-')}")]  # --lr means --train.lr
        hint = f" Did you mean '{tail[0]}'?" if tail else did_you_mean(name, known)
        raise ConfigError(
            f"{name}: no such {'setting' if name.startswith('-') else 'argument'}.{hint} See: {prog} --help."
        )
    return parsed  # type: ignore[no-any-return]


def _flag_names(kind: type, prefix: str = "--") -> list[str]:
    import typing

    names: list[str] = []
    for name, hint in typing.get_type_hints(kind).items():
        flag = prefix + name.replace("_", "-")
        names += _flag_names(hint, f"{flag}.") if isinstance(hint, type) and dataclasses.is_dataclass(hint) else [flag]
    return names


def leading(argv: list[str], what: str, prog: str, kind: type) -> tuple[str, list[str]]:
    """The first argument, which must be there, and the rest."""
    if argv and argv[0] in {"-h", "--help"}:
        parse(kind, argv, prog)
    if not argv or argv[0].startswith("-"):
        raise ConfigError(f"{prog}: {what} is needed first.")
    return argv[0], argv[1:]


def show(*parts: object) -> None:
    """Print tables and lines to standard output, in colour on a terminal. Brackets are text: names may hold them."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, markup=False)
    for part in parts:
        console.print(part)
