"""The documentation site: up-to-date generated pages, a build without warnings, a complete API reference."""

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter

import pytest
from helpers.paths import ROOT
from helpers.public_api import public_names


def load_script(name):
    """Import docs/NAME.py, which is not part of a package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_commands_page_matches_the_help_texts():
    generator = load_script("generate_reference")
    stored = generator.PAGE.read_text(encoding="utf-8")
    assert stored == generator.commands_page(), "commands.md is out of date. Run: python docs/generate_reference.py"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site; fails on any warning of mkdocs."""
    pytest.importorskip("mkdocstrings", reason="needs nearkin[dev]")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # a notice of the theme's authors, not about our pages
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.mark.slow
def test_site_builds_without_warnings(site):
    assert (site / "index.html").exists()


@pytest.mark.slow
def test_every_public_name_has_one_entry_in_the_api_reference(site):
    html = "".join(page.read_text(encoding="utf-8") for page in (site / "reference").glob("*.html"))
    anchors = Counter(re.findall(r'id="(nearkin[\w.]*)"', html))
    entries = {f"{package}.{name}": anchors[path] for package, name, path in public_names()}
    assert {name: count for name, count in entries.items() if count != 1} == {}


def test_doctests_become_code_blocks():
    pytest.importorskip("griffe", reason="needs nearkin[dev]")
    module = load_script("griffe_doctests")
    text = "Add.\n\nExample:\n    >>> 1 + 1\n    2\n\nMore."
    fenced = "Add.\n\nExample:\n    ```pycon\n    >>> 1 + 1\n    2\n    ```\n\nMore."
    assert module.fence_doctests(text) == fenced


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in (ROOT / "docs").rglob("*.md"):
        assert page.relative_to(ROOT / "docs").as_posix() in navigation, f"{page.name} is not in mkdocs.yml"
