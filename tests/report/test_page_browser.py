"""The page in a browser: it fetches nothing, logs no errors, and its controls work."""

from dataclasses import replace

import numpy as np
import pytest

import nearkin as nk
from nearkin import cli
from nearkin._common.progress import Reporter
from nearkin.report import gallery
from nearkin.report.page import build_report, write_report
from nearkin.training import recipes

pytestmark = pytest.mark.slow

QUIET = Reporter(quiet=True)


NASTY = (
    "</script><script>document.title='run'</script>",
    "<img src=x onerror=\"document.title='run'\">",
    "\"quotes\" 'and' `ticks` ${document.title='run'}",
    "{{ 7 * 7 }} & &amp; <b>",
    "עברית العربية",
    "👩‍👩‍👧 emoji 🦉",
    "line\u2028break\u2029s",
    "=cmd|' /C calc'!A0",
    "</style><style>body{display:none}",
    "a very long name " + "w" * 300,
)


@pytest.fixture(scope="module")
def glyphs_page(tmp_path_factory, glyphs_table):
    """A short run on the built-in glyphs, from the command line."""
    folder = tmp_path_factory.mktemp("glyphs")
    flags = ["--train.epochs", "1", "--model.width", "4", "--runs", str(folder / "runs"), "--quiet"]
    cli.main(["train", "glyphs_small", *flags])
    [run] = (folder / "runs").iterdir()
    cli.main(["report", str(run), "--out", str(folder / "page.html"), "--quiet"])
    return folder / "page.html"


@pytest.fixture(scope="module")
def pair_page(tmp_path_factory, photo_folder):
    """Two short runs on colour images."""
    folder = tmp_path_factory.mktemp("pair")
    runs = [nk.fit(replace(photo_recipe(photo_folder), seed=seed), folder, reporter=QUIET) for seed in (0, 1)]
    return write_report(build_report(runs, reporter=QUIET), folder / "page.html")


def photo_recipe(photo_folder):
    recipe = recipes.from_scratch()
    return replace(
        recipe,
        data=replace(recipe.data, root=photo_folder, image_size=16, test_fraction=0.6, val_fraction=0.2),
        model=replace(recipe.model, width=4, dim=8),
        train=replace(recipe.train, epochs=1, batch_size=8, samples_per_class=2),
    )


@pytest.fixture(scope="module")
def nasty_page(tmp_path_factory):
    """A run on features whose class names contain markup and code."""
    folder = tmp_path_factory.mktemp("nasty")
    names = [f"{name} {i}" for i in range(2) for name in NASTY]
    rng = np.random.default_rng(0)
    codes = np.repeat(np.arange(20), 6)
    features = (rng.normal(size=(20, 12))[codes] + 0.8 * rng.normal(size=(120, 12))).astype(np.float32)
    np.savez(folder / "f.npz", features=features, labels=np.array(names)[codes])
    recipe = recipes.features_default()
    recipe = replace(
        recipe,
        data=replace(recipe.data, root=folder / "f.npz", split="by_class", test_fraction=0.7),
        model=replace(recipe.model, dim=8),
        train=replace(recipe.train, epochs=1),
    )
    return write_report(build_report([nk.fit(recipe, folder, reporter=QUIET)], reporter=QUIET), folder / "page.html")


def label(tile) -> str:
    return (
        tile.get_attribute("aria-label").partition(": ")[2].rpartition(", similarity")[0]
        or tile.get_attribute("aria-label").partition(": ")[2]
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1100])
def test_the_page_fits_the_screen(visit, glyphs_page, pair_page, scheme, width):
    for path, models in ((glyphs_page, 3), (pair_page, 4)):
        page = visit(path, viewport={"width": width, "height": 800}, color_scheme=scheme)
        assert not page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
        assert page.locator("#metrics tbody tr").count() == models  # two baselines, and the runs
        assert page.locator("#query-rows .row").count() >= 1
        light = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(251, 250, 248)"
        assert light == (scheme == "light")
    assert glyphs_page.stat().st_size < 10_000_000


def test_clicking_a_neighbour_makes_it_the_query(visit, glyphs_page):
    page = visit(glyphs_page)
    shown = page.locator("#query-rows")
    for position in (3, 5):
        chosen = label(shown.locator(".row").first.locator(".tile").nth(position))
        shown.locator(".row").first.locator(".tile").nth(position).click()
        assert label(shown.locator(".tile.query").first) == chosen
        assert shown.locator(".row").first.locator(".tile").count() == 9
    assert shown.locator(".row").count() == 2
    assert page.locator("#query-choices [aria-pressed=true]").inner_text() == "Selected images"
    for view in ("Hardest", "Random", "Confused", "Confident"):
        page.locator("#query-choices button", has_text=view).click()
        assert shown.locator(".row").count() >= 1
    # Confident errors: every first neighbour is of another class.
    assert shown.locator(".row .tile:nth-child(2).right").count() == 0
    before = shown.locator(".row").count()
    page.locator("#query-more").click()
    assert shown.locator(".row").count() > before


def test_tables_sort_and_search(visit, glyphs_page):
    page = visit(glyphs_page)
    table = page.locator("#class-table")

    def column(n):
        return table.locator(f"tbody tr > :nth-child({n})").all_inner_texts()

    recall = [float(text) for text in column(3)]
    assert recall == sorted(recall)
    assert len(recall) == 20
    page.locator("#class-more").click()
    assert len(column(1)) > 20
    table.locator("th button", has_text="MAP@R").click()
    precision = [float(text) for text in column(4)]
    assert precision == sorted(precision, reverse=True)
    assert table.locator("th[aria-sort=descending]").inner_text().startswith("MAP@R")
    table.locator("th button", has_text="MAP@R").click()
    assert table.locator("th[aria-sort=ascending]").count() == 1
    name = column(1)[4]
    page.locator("#class-search").fill(name)
    assert name in column(1)
    assert len(column(1)) < len(recall)
    page.locator("#class-search").fill("no such class at all")
    assert column(1) == []
    page.locator("#class-search").fill(name)
    table.locator("tbody th .link", has_text=name).first.click()
    assert page.locator("#query-note").inner_text().startswith("All ")


def test_the_map_shows_the_image_under_the_mouse(visit, glyphs_page):
    page = visit(glyphs_page)
    page.locator("#canvas").scroll_into_view_if_needed()
    box = page.locator("#canvas").bounding_box()
    found = False
    for step in range(40):  # somewhere along the middle there is a point
        page.mouse.move(box["x"] + box["width"] * (0.3 + 0.01 * step), box["y"] + box["height"] / 2)
        if page.locator("#tip").is_visible():
            found = True
            break
    assert found
    chosen = label(page.locator("#tip .tile"))
    page.mouse.down()
    page.mouse.up()
    assert label(page.locator("#query-rows .tile.query").first) == chosen
    page.locator("#map-class").fill(page.locator("#class-table tbody th").first.inner_text())


def test_everything_is_reachable_by_keyboard(visit, glyphs_page):
    page = visit(glyphs_page)
    focused = "document.activeElement.closest('#query-rows') !== null"
    page.locator("#class-choice").focus()
    page.keyboard.press("Tab")
    assert page.evaluate(focused)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    chosen = page.evaluate("document.activeElement.getAttribute('aria-label')")
    second = page.locator("#query-rows .row").nth(1).locator(".tile").nth(2).get_attribute("aria-label")
    assert chosen == second
    page.keyboard.press("Enter")
    assert page.evaluate(focused)
    assert label(page.locator("#query-rows .tile.query").first) in chosen
    page.locator("#canvas").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator("#tip").is_visible()
    chosen = label(page.locator("#tip .tile"))
    page.keyboard.press("Enter")
    assert label(page.locator("#query-rows .tile.query").first) == chosen
    page.locator("#class-table th button").nth(1).focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.closest('th').getAttribute('aria-sort')") == "descending"


def test_comparison_of_two_runs(visit, pair_page):
    page = visit(pair_page)
    changed = page.locator("#changed-rows")
    for change, correct_run in (("fixed", 1), ("broken", 0)):
        page.locator("#change-choices button", has_text=change).click()
        rows = changed.locator(".row")
        for at in range(min(4, rows.count())):
            right = rows.nth(at).locator(".tile").nth(1).get_attribute("class")
            assert ("right" in right) == (at % 2 == correct_run)
    gains = [float(t) for t in page.locator("#gain-table tbody tr > :nth-child(5)").all_inner_texts()]
    assert gains == sorted(gains, reverse=True)
    assert page.locator("#training .of-run:visible").count() == 1
    first = page.locator("#class-table tbody").inner_text()
    page.locator("#run-choices button").nth(1).click()
    assert page.locator("#training .of-run[data-run='1']").is_visible()
    assert page.locator("#training .of-run[data-run='0']").is_hidden()
    assert page.locator("#class-table tbody").inner_text() != first
    assert page.evaluate("document.activeElement.textContent").startswith("B: ")


def test_a_page_with_a_part_of_the_images(visit, photo_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(gallery, "MAX_IMAGES", 40)
    report = build_report([nk.fit(photo_recipe(photo_folder), tmp_path, reporter=QUIET)], reporter=QUIET)
    page = visit(write_report(report, tmp_path / "page.html"))
    # The map: a dot where the nearest neighbour is right, a cross of two lines where it is wrong.
    drawn = page.evaluate("""() => {
        const counts = { arc: 0, moveTo: 0 }, pen = CanvasRenderingContext2D.prototype;
        for (const name of Object.keys(counts)) {
            const before = pen[name];
            pen[name] = function (...given) { counts[name] += 1; return before.apply(this, given); };
        }
        document.getElementById("map-class").dispatchEvent(new Event("input"));
        return counts;
    }""")
    recall = report.analyses[0]["R@1"]
    assert drawn == {"arc": recall.count(1), "moveTo": 2 * recall.count(0)}
    assert len(recall) == 40
    assert 0 < recall.count(0) < 40
    # Neighbours that are not on the page have a tile, a class and a similarity, but cannot be selected.
    rows = page.locator("#query-rows .row")
    absent = page.locator("#query-rows .tile.absent")
    assert rows.first.locator(".tile").count() == 9
    assert absent.count() > 0
    assert "not on this page" in absent.first.inner_text()
    assert absent.first.locator(".thumb").evaluate("box => getComputedStyle(box).backgroundImage") == "none"
    before = page.locator("#query-rows").inner_text()
    absent.first.click()
    assert page.locator("#query-rows").inner_text() == before
    # Arrow keys skip them.
    line = rows.filter(has=page.locator(".absent")).first
    line.locator("button.tile").first.focus()
    for _ in range(8):
        page.keyboard.press("ArrowRight")
    last = line.locator("button.tile").last
    assert page.evaluate("document.activeElement.title") == last.get_attribute("title")
    on_page = np.bincount(report.items["labels"], minlength=6)
    smallest = int(on_page.argmin())
    page.locator("#class-choice").fill(report.items["class_names"][smallest])
    assert page.locator("#query-note").inner_text().startswith(f"{on_page[smallest]} of the 12 images of this class")


def test_names_are_text_and_run_no_code(visit, nasty_page):
    page = visit(nasty_page)
    assert page.title().startswith("nearkin: norm_softmax")
    names = page.locator("#class-table tbody th bdi").all_text_contents()
    assert len(names) == 14
    assert all(name.rpartition(" ")[0] in NASTY for name in names)
    for text in names[:6]:
        page.locator("#class-search").fill(text[:8])
        page.locator("#class-table tbody th .link").first.click()
        assert page.locator("#query-rows .row").count() >= 1
    for view in ("Hardest", "Random"):
        page.locator("#query-choices button", has_text=view).click()
    page.locator("#canvas").focus()
    page.keyboard.press("ArrowRight")
    assert page.title().startswith("nearkin: norm_softmax")
    assert page.locator("script").count() == 2
    assert page.locator("#query-rows img").count() == 0
    for opened in (page, visit(nasty_page, viewport={"width": 390, "height": 800})):
        assert not opened.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")


def test_the_csv_can_be_downloaded(visit, nasty_page):
    page = visit(nasty_page)
    with page.expect_download() as waited:
        page.locator("a[download]").click()
    text = waited.value.path().read_text(encoding="utf-8")
    assert waited.value.suggested_filename == "label_errors.csv"
    assert text.startswith("rank,row,path,label,suggested")
    assert "'=cmd" in text
    assert ",=cmd" not in text


def test_the_page_prints(visit, nasty_page, tmp_path):
    page = visit(nasty_page)
    page.pdf(path=str(tmp_path / "page.pdf"))
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
