"""Fixtures that several test files share. Nothing is written outside pytest's own temporary folders."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.postgres import pgvector_url, postgres_server, postgres_url  # noqa: F401  (fixtures)

# Before nearkin is imported: the glyphs of a test session are drawn once, into a folder that goes with it. The workers
# of pytest-xdist inherit the folder of the process that starts them.
_IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
_CACHE = os.environ["NEARKIN_CACHE"] if _IS_WORKER else tempfile.mkdtemp(prefix="nearkin-tests-")
os.environ["NEARKIN_CACHE"] = _CACHE

# A shell makes background jobs (`nohup make test &`) ignore SIGINT, and children inherit that. The tests of Ctrl-C
# need the usual handler.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A session of its own, with nothing that would look for the network.
BROWSER_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def pytest_sessionfinish() -> None:
    if not _IS_WORKER:
        shutil.rmtree(_CACHE, ignore_errors=True)


@pytest.fixture(scope="session")
def glyphs_table():
    from nearkin.data import glyphs

    return glyphs.load()


@pytest.fixture(scope="session")
def photo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten classes of twelve small colour images: a class is a pattern of two colours, its images are noisy."""
    from PIL import Image

    root = tmp_path_factory.mktemp("photos") / "shapes with spaces é"
    rng = np.random.default_rng(0)
    for c in range(10):
        folder = root / f"class {c}"
        folder.mkdir(parents=True)
        stripes = (np.arange(24) // (2 + c % 3) % 2)[:, None] if c % 2 else (np.arange(24) // (2 + c % 3) % 2)[None, :]
        colours = rng.uniform(0, 255, (2, 3))
        for i in range(12):
            pixels = np.where(stripes[..., None] > 0, *colours) + rng.normal(0, 40, (24, 24, 3))
            Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(folder / f"{i:02d}.png")
    return root


@pytest.fixture
def tiny_recipe(photo_folder: Path):
    """A run of a second or two on `photo_folder`."""
    from nearkin.training import recipes

    recipe = recipes.from_scratch()
    return replace(
        recipe,
        data=replace(recipe.data, root=photo_folder, image_size=16, val_fraction=0.2),
        model=replace(recipe.model, width=4, dim=8),
        train=replace(recipe.train, epochs=3, batch_size=8, samples_per_class=2),
    )


@pytest.fixture
def quiet():
    from nearkin._common.progress import Reporter

    return Reporter(quiet=True)


@pytest.fixture(scope="session")
def chromium() -> Path:
    """Debian's Chromium; tests that look at a page skip where there is none."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("Chromium is not installed (Debian: apt-get install chromium)")
    return Path(found)


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory, photo_folder: Path):
    """An index on the disk, for `server` and `locked`."""
    from helpers.serving import make_index

    return make_index(tmp_path_factory.mktemp("served"), photo_folder)


@pytest.fixture(scope="session")
def server(served):
    """`nearkin serve` in a process of its own, for all tests that leave it as it is."""
    pytest.importorskip("uvicorn", reason="needs nearkin[serve]")
    from helpers.serving import serving

    with serving(served.folder, "--upload-timeout", "1.5", "--max-upload-bytes", "4000000") as running:
        yield running
        assert running.alive()


@pytest.fixture(scope="session")
def locked(served):
    """One that asks for a token."""
    pytest.importorskip("uvicorn", reason="needs nearkin[serve]")
    from helpers.serving import TOKEN, serving

    with serving(served.folder, NEARKIN_TOKEN=TOKEN) as running:
        yield running


@pytest.fixture(scope="module")
def browser(chromium):
    """Chromium, started once for a module: playwright does not start twice in one process."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=str(chromium), args=BROWSER_FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def visit(browser):
    """Open a page file; at the end of the test nothing may have been fetched or complained of."""
    troubles: list[str] = []
    opened = []

    def go(path, **settings):
        page = browser.new_page(**{"viewport": {"width": 1100, "height": 900}, **settings})
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda r: r.url.startswith(("data:", "file:")) or troubles.append(r.url))
        page.goto(path.as_uri())
        opened.append(page)
        return page

    yield go
    for page in opened:
        page.close()
    assert troubles == []
