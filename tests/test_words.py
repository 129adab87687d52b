"""Words that a reader of the field would have to translate do not appear in strings, comments or documentation.

Each pattern has the standard term beside it. Where a word is right in its place, add it to `ALLOWED` with its file.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest
from helpers.paths import ROOT

WORDS = {
    r"judg(?:e|es|ed|ing|ement)s?": "evaluate",
    r"yardsticks?": "baseline",
    r"entrants?": "method",
    r"badges?": "protocol label",
    r"(?<!near)kin": "same class",
    r"kinds of": "classes, types",
    r"(?:of|its|their|same|one|own|other|another) kinds?": "class",
    r"pictures?": "image",
    r"lone": "singleton",
    r"mend(?:s|ed|ing)?": "fix",
    r"cures?": "fix",
    r"troubles?": "error, known issue",
    r"amiss": "wrong",
    r"(?:goes?|going|went) on where": "resumes",
    r"same command goes on": "resumes",
    r"there are:": "available:",
    r"(?:losses|names|sources|recipes|metrics) there are": "available",
    r"(?:is|are|was|were|be|been) (?:told|said)": "reported",
    r"(?:tells?|told) apart": "distinguish",
    r"asks": "queries",
    r"asked": "queried, requested",
    r"numbers (?:each|per vector)": "dimensions",
    r"vectors? of [\d,]+ numbers": "dimensions",
    r"as it (?:came|comes|stands)": "pretrained, unchanged",
    r"settled": "significant",
    r"whoever": "the caller",
    r"in a blink": "fast",
    r"brought nothing better": "no improvement",
    r"teaches itself": "see --help",
    r"own affair": "does not apply",
}
PATTERNS = {re.compile(rf"\b{word}(?!\w)", re.IGNORECASE | re.MULTILINE): term for word, term in WORDS.items()}

# (end of the file's path, phrase): the word is a name in the code, or means what it says.
ALLOWED: set[tuple[str, str]] = set()

GENERATED = {"docs/reference/commands.md"}  # from the help texts, which are checked themselves
PAGES = [
    *(p for p in sorted((ROOT / "docs").rglob("*.md")) if p.parent.name != "losses"),  # losses: from the docstrings
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")),
    ROOT / "mkdocs.yml",
    ROOT / "Makefile",
]
PAGES = [p for p in PAGES if p.relative_to(ROOT).as_posix() not in GENERATED]
SOURCES = [*sorted((ROOT / "nearkin").rglob("*.py")), *sorted((ROOT / "docs").glob("*.py"))]
TEMPLATES = [p for p in sorted((ROOT / "nearkin").rglob("*")) if p.suffix in {".html", ".js", ".css"}]


def texts(path: Path) -> list[tuple[int, str]]:
    """Return (line, text) of everything in a file that people read: of Python only strings and comments."""
    source = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return list(enumerate(source.splitlines(), 1))
    found = [
        (node.lineno, node.value)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found += [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
    return sorted(found)


def findings(path: Path) -> list[str]:
    """Return one line per forbidden word in a file, with the term to use."""
    name = path.relative_to(ROOT).as_posix()
    allowed = [phrase for file, phrase in ALLOWED if name.endswith(file)]
    found = []
    for line, text in texts(path):
        if path.suffix == ".py" and re.fullmatch(r"[\w.-]+", text):  # a name or a key, not a sentence
            continue
        for phrase in allowed:
            text = text.replace(phrase, "")
        for pattern, term in PATTERNS.items():
            found += [f"{name}:{line}: '{match}' -> {term}" for match in pattern.findall(text)]
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_words_in_documentation(path):
    assert findings(path) == []


@pytest.mark.parametrize("path", [*SOURCES, *TEMPLATES], ids=lambda p: p.relative_to(ROOT).as_posix())
def test_words_in_the_package(path):
    assert findings(path) == []
