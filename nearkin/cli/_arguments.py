"""Shared by all commands: flags as a dataclass, required arguments, models, and printing to the terminal."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import shlex
import shutil
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stderr
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from typing_extensions import Doc

from nearkin._common.plugins import HINT, load_plugins
from nearkin.errors import ConfigError, DataError, UnknownNameError, did_you_mean

if TYPE_CHECKING:
    from nearkin.deploy.index.index import Index
    from nearkin.models.embedder import Embedder

# Flags that people expect, and ours.
ALIASES = {"--model": "--model.backbone", "--gpu": "--device", "--output": "--out", "--budget": "--train.steps"}
T = TypeVar("T")
Device = Annotated[str, Doc("cpu, cuda, cuda:1, mps, or auto: a GPU if there is one.")]
Quiet = Annotated[bool, Doc("Print only the result.")]
Runs = Annotated[Path, Doc("Folder of the run folders, which other commands share.")]
INDEX_FOLDER = "an index folder (made with: nearkin index RUN FOLDER -o DIR)"


def parse(args_type: type[T], argv: list[str], prog: str, default: T | None = None) -> T:
    """Parse flags into a dataclass."""
    parsed, unknown = parse_known(args_type, argv, prog, default)
    if unknown:
        name = unknown[0].partition("=")[0]
        known = _flag_names(args_type)
        suffixed = [flag for flag in known if flag.endswith(f".{name.lstrip('-')}")]  # --lr means --train.lr
        meant = [flag for flag in (ALIASES.get(name), *suffixed) if flag in known]
        hint = f" Did you mean '{meant[0]}'?" if meant else did_you_mean(name, known)
        what = "setting" if name.startswith("-") else "argument"
        raise ConfigError(f"{name}: no such {what}.{hint} See: {prog} --help.")
    return parsed


def parse_known(args_type: type[T], argv: list[str], prog: str, default: T | None = None) -> tuple[T, list[str]]:
    """Parse flags into a dataclass; also return the words that it does not know."""
    import tyro

    defaults = {} if default is None else {"default": default}
    box = io.StringIO()
    try:
        with redirect_stderr(box):
            return tyro.cli(args_type, args=argv, prog=prog, return_unknown_args=True, **defaults)  # type: ignore[call-overload, no-any-return]
    except SystemExit as stop:
        if stop.code != 2:
            raise
    raise ConfigError(f"{_first_part(box.getvalue())} See: {prog} --help.") from None


def _first_part(box: str) -> str:
    """Return the message of tyro's error: the text below the title of a box, and above a line with usage and help."""
    rows = [row.strip("│| ") for row in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()[1:]]
    parts = groupby(rows, key=lambda row: bool(row.strip("─-╰╯")))
    message = next((" ".join(part).replace(" .", ".") for is_text, part in parts if is_text), "invalid arguments")
    message = re.sub(r"^Error parsing ((\w+): (?=\2\.))?", "", message)  # --model.dim: "model: model.dim: ..."
    if message.startswith("Missing from "):  # ... COMMAND: -o PATH, --out PATH What it is. (required)
        message = "missing " + " ".join(message.partition(": ")[2].split()[:2]).rstrip(",")
    message = message.replace("invalid literal for int() with base 10:", "expected an integer, got")
    return f"{message.rstrip('.')}."


def _flag_names(args_type: type, prefix: str = "--") -> list[str]:
    names: list[str] = []
    for name, hint in typing.get_type_hints(args_type).items():
        flag = prefix + name.replace("_", "-")
        names += _flag_names(hint, f"{flag}.") if isinstance(hint, type) and dataclasses.is_dataclass(hint) else [flag]
    return names


def leading(args_type: type, argv: list[str], prog: str, what: str, *, exists: bool = True) -> tuple[str, list[str]]:
    """Split off the required first argument, by default an existing path."""
    if argv and argv[0] in {"-h", "--help"}:
        parse(args_type, argv, prog)
    if not argv or argv[0].startswith("-"):
        raise ConfigError(f"{prog}: missing argument: {what}.")
    if exists:
        require_path(argv[0], what)
    return argv[0], argv[1:]


def parse_target(args_type: type[T], argv: list[str], prog: str, what: str, *, exists: bool = True) -> tuple[str, T]:
    """Split off the required first argument and parse the flags after it."""
    target, flags = leading(args_type, argv, prog, what, exists=exists)
    return target, parse(args_type, flags, prog)


def run_action(command: str, actions: Mapping[str, Callable[[list[str]], None]], argv: list[str], usage: str) -> None:
    """Run `nearkin COMMAND ACTION`, or print the usage if there is no action."""
    if argv[:1] in ([], ["-h"], ["--help"]):
        print(usage)
    elif argv[0] in actions:
        actions[argv[0]](argv[1:])
    else:
        hint = did_you_mean(argv[0], actions) or f" Available: {', '.join(actions)}."
        raise ConfigError(f"nearkin {command}: no action named '{argv[0]}'.{hint}")


def load_model(run: str | Path, device: str) -> Embedder:
    """Load the model of a run onto a device."""
    from nearkin.models.saved import load
    from nearkin.training.device import choose_device

    return load(run).to(choose_device(device))


def load_index(folder: str, *, run: Path | None, device: str, model: bool) -> Index:
    """Load an index, with the model of the run that built it if needed; `run` is its new location if it has moved."""
    from nearkin.deploy.index.index import Index

    index = Index.load(folder)
    if not model:
        return index
    path = run if run is not None or index.model_info is None else index.model_info.run
    if path is None:
        raise ConfigError("the index records no run folder. Pass it with --run RUN.")
    if run is None and not Path(path).exists():
        raise ConfigError(f"{path}: the run of this index does not exist. Pass its new location with --run RUN.")
    index.set_model(load_model(path, device))
    return index


def require_path(path: str | Path, expected: str) -> None:
    """Refuse a path that does not exist, before torch is imported, which takes seconds."""
    if not os.path.lexists(path):
        raise DataError(f"{path}: no such file or folder. Expected {expected}.")


def require_names(kind: str, names: Iterable[str]) -> None:
    """Refuse names that are no "loss" or "miner", before torch is imported: those of the package are in its sources."""
    load_plugins()
    if "nearkin.losses" in sys.modules:  # the registries are loaded, perhaps with a user's own, and check the names
        return
    sources = (path.read_text(encoding="utf-8") for path in (Path(__file__).parent.parent / "losses").glob("*.py"))
    defined = re.compile(rf"^@{kind}\b.*?^def (\w+?)_?\(", re.DOTALL | re.MULTILINE)
    known = sorted({name for source in sources for name in defined.findall(source)})
    for name in names:
        if known and name not in known:
            hint = did_you_mean(name, known) or f" Available: {', '.join(known)}."
            raise UnknownNameError(f"No {kind} named '{name}'.{hint} {HINT}")


def command_line(*words: str) -> str:
    """Return a nearkin command as it can be pasted into this shell, where `nearkin` may not be on the path."""
    started_as = sys.argv[0]
    if "UV_RUN_RECURSION_DEPTH" in os.environ:  # the path that uv sets ends with its command
        program = ["uv", "run", "nearkin"]
    elif os.path.basename(started_as) == "__main__.py":
        program = [sys.executable, "-m", "nearkin"]
    else:
        on_path = shutil.which("nearkin")
        same = on_path is not None and os.path.exists(started_as) and os.path.samefile(on_path, started_as)
        # A program that calls `main` itself, such as a test, is not one to name.
        program = ["nearkin" if same or not os.path.basename(started_as).startswith("nearkin") else started_as]
    return shlex.join([*program, *words])


def show(*parts: object) -> None:
    """Print tables and lines, in colour on a terminal. Brackets in names are not read as markup."""
    from rich.console import Console

    from nearkin._common.progress import escape_controls
    from nearkin.report.tables import Grid, rich_table

    console = Console(highlight=False, soft_wrap=True, markup=False)
    with console.capture() as capture:
        for part in parts:
            console.print(rich_table(part) if isinstance(part, Grid) else part)
    print(escape_controls(capture.get(), keep_colours=console.is_terminal), end="", flush=True)
