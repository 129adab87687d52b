"""The documentation as a site: its generated pages are up to date, and it builds without a warning."""

import importlib.util
import os
import subprocess
import sys

import pytest
from helpers.paths import ROOT


@pytest.mark.slow
def test_the_reference_says_what_the_source_says():
    spec = importlib.util.spec_from_file_location("generate_reference", ROOT / "docs" / "generate_reference.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    for name, text in made.pages().items():
        stored = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
        assert stored.rstrip() == text.rstrip(), f"{name} is out of date. Run: python docs/generate_reference.py"


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="needs nearkin[docs]")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # a notice of the theme's authors, not about these pages
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    assert (tmp_path / "site" / "index.html").exists()


def test_every_page_is_in_the_navigation():
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in (ROOT / "docs").rglob("*.md"):
        assert page.relative_to(ROOT / "docs").as_posix() in listed, f"{page.name} is not in mkdocs.yml"
