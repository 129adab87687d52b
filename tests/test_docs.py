"""Whatever the documentation shows, runs: Python blocks, doctests, commands and make targets."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import nearkin
from nearkin import cli

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = [info.name for info in pkgutil.walk_packages(nearkin.__path__, "nearkin.") if "__main__" not in info.name]


# What examples in docstrings may use without importing it.
SHOWN = {"nk": nearkin, "torch": torch, "pair_up": nearkin.pair_up}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_and_targets_exist(page):
    makefile = (ROOT / "Makefile").read_text()
    for line in "".join(blocks(page, "sh")).splitlines():
        command = line.partition("#")[0].split()
        if command[:1] == ["nearkin"]:
            assert command[1] in cli.COMMANDS or command[1].startswith("-"), line
        elif command[:1] == ["make"]:
            assert re.search(rf"^{command[1]}:", makefile, re.MULTILINE), line


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=flags, extraglobs=SHOWN)
    assert failed == 0
