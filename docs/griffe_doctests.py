"""Griffe extension for the API reference: render doctests in docstrings as code blocks.

Griffe itself does so only below a heading `Examples:`. Elsewhere `>>>` would become a Markdown quotation.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

# A run of lines from the first `>>>` to the next blank line, with its indentation.
DOCTEST = re.compile(r"^([ \t]*)>>> .*(?:\n(?![ \t]*$).*)*", re.MULTILINE)
EXAMPLE = re.compile(r"^Examples?:\n", re.MULTILINE)


def fence_doctests(text: str) -> str:
    """Return the docstring with every doctest as a fenced block."""

    def fence(match: re.Match[str]) -> str:
        indent = match[1]
        return f"{indent}```pycon\n{match[0]}\n{indent}```"

    return EXAMPLE.sub("Example:\n", DOCTEST.sub(fence, text))


class Doctests(griffe.Extension):
    """Change docstrings as they are collected."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fence_doctests(obj.docstring.value)
