"""Write the pages under docs/reference: every command's own help, every public name's own docstring.

    python docs/generate_reference.py

The pages say nothing that the source does not: edit the docstring or the help, then run this.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import textwrap
from pathlib import Path
from unittest import mock

import nearkin as nk
from nearkin import cli

HERE = Path(__file__).parent / "reference"
# Commands that have commands of their own.
BELOW = {"data": ("list", "check", "get"), "bench": ("plan", "run", "status", "work")}
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def commands_page() -> str:
    """The help of every command."""
    lines = ["# Command line", "", "```text", help_of([]).rstrip(), "```", ""]
    for name in cli.COMMANDS:
        for words in [[name, below] for below in BELOW.get(name, ())] or [[name]]:
            lines += [f"## nearkin {' '.join(words)}", "", "```text", help_of(words).rstrip(), "```", ""]
    return "\n".join(lines)


def help_of(words: list[str]) -> str:
    out = io.StringIO()
    plain = {"COLUMNS": "110", "LINES": "50", "NO_COLOR": "1", "TERM": "dumb"}
    with mock.patch.dict(os.environ, plain), contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli.main([*words, "--help"])
    text = COLOUR.sub("", out.getvalue())
    return "\n".join(line.rstrip() for line in text.splitlines())


def python_page() -> str:
    """Every public name: how it is called and what it says of itself."""
    lines = ["# Python", "", "`import nearkin as nk`; what is listed here stays.", ""]
    for name in nk.__all__:
        thing = getattr(nk, name)
        lines += [f"## nk.{name}", ""]
        if inspect.ismodule(thing):
            lines += [(inspect.getdoc(thing) or "").partition("\n")[0], ""]
            continue
        lines += ["```text", *signature(f"nk.{name}", thing), "```", "", *documented(thing), ""]
        if inspect.isclass(thing):
            for below, member in public_members(thing):
                called = signature(f".{below}", member)
                lines += ["```text", *called, "```", "", *documented(member), ""]
    return "\n".join(lines)


def public_members(kind: type) -> list[tuple[str, object]]:
    """Methods and properties that the class itself defines and explains."""
    found = []
    for name, member in vars(kind).items():
        plain = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        explained = inspect.isfunction(plain) or isinstance(plain, property)
        if not name.startswith("_") and explained and plain.__doc__:  # its own words, not inherited ones
            found.append((name, plain))
    return found


def signature(name: str, thing: object) -> list[str]:
    if isinstance(thing, property):
        return [name]
    try:
        said = str(inspect.signature(thing))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        said = "(...)"
    said = re.sub(r"(: |-> )'([^']*)'", r"\1\2", said)  # annotations are stored as text
    said = said.replace("self, ", "").replace("(self)", "()").replace("cls, ", "")
    return textwrap.wrap(f"{name}{said}", 108, subsequent_indent="    ", break_long_words=False)


def documented(thing: object) -> list[str]:
    """A docstring as Markdown: its first paragraph as text, the rest as it stands."""
    first, _, rest = (inspect.getdoc(thing) or "").partition("\n\n")
    lines = [" ".join(first.split())]
    return [*lines, "", "```text", rest.rstrip(), "```"] if rest.strip() else lines


def pages() -> dict[str, str]:
    """File name -> text, for every page."""
    return {"commands.md": commands_page(), "python.md": python_page()}


def main() -> None:
    HERE.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (HERE / name).write_text(text.rstrip("\n") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
