"""What the documentation shows works: Python blocks, doctests, commands, make targets, links and file names."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch
from helpers.paths import ROOT

import nearkin
from nearkin import cli

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = [info.name for info in pkgutil.walk_packages(nearkin.__path__, "nearkin.") if "__main__" not in info.name]

# Names that examples in docstrings may use without importing them.
SHOWN = {"nk": nearkin, "torch": torch, "pair_up": nearkin.pair_up}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


# add-a-loss.md registers losses: test_loss_pages.py runs it and removes them again.
RUN_HERE = [page for page in PAGES if page.name != "add-a-loss.md"]


@pytest.mark.parametrize("page", RUN_HERE, ids=lambda p: str(p.relative_to(ROOT)))
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # The examples of the loss pages share one batch.
    names = {**SHOWN, "emb": torch.randn(8, 512), "labels": torch.arange(4).repeat_interleave(2)}
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


def test_relative_links_work():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_files_that_pages_name_exist():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        text = page.read_text(encoding="utf-8")
        for path in re.findall(r"`(?:python )?((?:nearkin|tests|docs|examples|benchmarks)/[\w./-]+)", text):
            if "NAME" not in path and path != "nearkin/metrics/verification.py":  # planned
                assert (ROOT / path).exists(), f"{page.name}: {path}"


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=flags, extraglobs=SHOWN)
    assert failed == 0
