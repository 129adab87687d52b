"""Write docs/reference/commands.md from the help texts of the commands.

    python docs/generate_reference.py

To change the page, edit the help text in nearkin/cli and run this again.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path
from unittest import mock

from nearkin import cli

PAGE = Path(__file__).parent / "reference" / "commands.md"
SUBCOMMANDS = {
    "data": ("list", "check", "get"),
    "bench": ("plan", "run", "status", "work"),
    "cache": ("list", "prune"),
}
ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def commands_page() -> str:
    """Return the page: the general help, then one section per command."""
    lines = ["# Command line", "", "```text", help_text([]), "```", ""]
    for command in cli.COMMANDS:
        for argv in [[command, name] for name in SUBCOMMANDS.get(command, ())] or [[command]]:
            lines += [f"## nearkin {' '.join(argv)}", "", "```text", help_text(argv), "```", ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def help_text(argv: list[str]) -> str:
    """Return what `nearkin ARGV --help` prints, 110 columns wide and without colours."""
    out = io.StringIO()
    terminal = {"COLUMNS": "110", "LINES": "50", "NO_COLOR": "1", "TERM": "dumb"}
    with mock.patch.dict(os.environ, terminal), contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli.main([*argv, "--help"])
    text = ANSI_COLOUR.sub("", out.getvalue())
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


if __name__ == "__main__":
    PAGE.write_text(commands_page(), encoding="utf-8")
