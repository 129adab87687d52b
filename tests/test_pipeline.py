"""The whole way, small: train on glyphs by command, judge, write the page, look at it in a real browser."""

import re

import pytest

from nearkin import cli
from nearkin.progress import Reporter
from nearkin.report.page import write_page
from nearkin.runs import Run

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


@pytest.fixture(scope="module")
def small_run(tmp_path_factory, glyphs_table) -> Run:
    runs = tmp_path_factory.mktemp("runs")
    flags = ["--runs", str(runs), "--train.epochs", "1", "--model.width", "8", "--quiet"]
    cli.main(["train", "glyphs_small", *flags])
    [path] = runs.iterdir()
    return Run(path)


def test_one_short_epoch_already_beats_the_untrained_network(small_run):
    test = small_run.result["test"]
    assert test["trained"]["R@1"]["interval"][0] > test["untrained"]["R@1"]["interval"][1]


def test_report_command_writes_one_file_without_outside_references(small_run, tmp_path, capsys):
    page = tmp_path / "deep" / "page.html"
    cli.main(["report", str(small_run.path), "--out", str(page)])
    assert str(page) in capsys.readouterr().out
    text = page.read_text()
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:|\#)""", text)
    assert "url(" not in text
    assert "@import" not in text
    assert len(text) < 2_000_000


def test_class_names_are_shown_as_text(tiny_recipe, photo_folder, tmp_path, quiet, monkeypatch):
    import nearkin as nk
    from nearkin.data import sources

    run = nk.fit(tiny_recipe, tmp_path, reporter=quiet)
    real = sources.load

    def renamed(*args):
        from dataclasses import replace

        table = real(*args)
        return replace(table, class_names=tuple("<script>document.title='run'</script>" for _ in table.class_names))

    monkeypatch.setattr(sources, "load", renamed)
    page = write_page(run, tmp_path / "p.html", reporter=quiet).read_text()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1100])
def test_the_page_in_a_browser(small_run, tmp_path, chromium, scheme, width):
    from playwright.sync_api import sync_playwright

    page_file = write_page(small_run, tmp_path / "page.html", reporter=Reporter(quiet=True))
    troubles: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(chromium), args=BROWSER_FLAGS)
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda r: r.url.startswith(("data:", "file:")) or troubles.append(r.url))
        page.goto(page_file.as_uri())
        assert page.locator("tbody tr").count() == 3
        assert page.locator("svg polyline").count() == 2
        assert page.locator(".row").count() >= 8
        broken = page.evaluate("[...document.images].filter(i => !(i.complete && i.naturalWidth)).length")
        assert broken == 0
        sideways = page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
        assert not sideways
        browser.close()
    assert troubles == []
