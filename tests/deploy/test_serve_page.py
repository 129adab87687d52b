"""The page of `nearkin serve` in a real browser: choose, drop and paste images, follow neighbours, use the keyboard."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from conftest import BROWSER_FLAGS
from helpers.serving import TOKEN, Server, random_image

pytestmark = pytest.mark.slow

pytest.importorskip("uvicorn", reason="needs nearkin[serve]")
HTML_LIKE = "<b>bold</b> & é"


@contextmanager
def browsing(
    server: Server, chromium: Any, *, width: int = 1100, scheme: str = "light", ignore: tuple[str, ...] = ()
) -> Iterator[Any]:
    """Open a page of the server, and fail on console messages and on requests to other servers."""
    from playwright.sync_api import sync_playwright

    problems: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(chromium), args=BROWSER_FLAGS)
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.set_default_timeout(15_000)
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda r: r.url.startswith((server.url, "blob:", "data:")) or problems.append(r.url))
        yield page
        assert page.context.cookies() == []
        browser.close()
    assert [problem for problem in problems if not any(word in problem for word in ignore)] == []


def wait_until(page: Any, condition: str) -> None:
    """Wait for a JavaScript condition by polling, since the page's policy forbids evaluating text inside it."""
    end = time.monotonic() + 15
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(30)


def wait_for_images(page: Any) -> None:
    wait_until(page, "[...document.images].every(i => i.offsetParent === null || i.naturalWidth > 0)")


def expect_neighbours(page: Any, title: str, count: int) -> None:
    wait_until(page, f"document.getElementById('status').textContent.endsWith({' of ' + title!r})")
    assert page.locator("#grid li").count() == count
    assert page.locator("#title").inner_text() == title


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1100, "dark")])
def test_choose_a_file_and_follow_a_neighbour(server, served, chromium, tmp_path, width, scheme):
    with browsing(server, chromium, width=width, scheme=scheme) as page:
        page.goto(server.url)
        page.wait_for_selector("#grid a")
        assert "25 images in 4 classes" in page.locator("header").inner_text()
        wait_for_images(page)
        page.screenshot(path=tmp_path / f"start-{width}.png", full_page=True)

        page.set_input_files("#file", served.photos / HTML_LIKE / "1.png")
        expect_neighbours(page, "1.png", 12)
        wait_for_images(page)
        first = page.locator("#grid a").first
        assert first.locator(".caption span").inner_text() == HTML_LIKE  # as text, not as a tag
        assert first.locator(".caption b").inner_text() == "1.000"
        page.screenshot(path=tmp_path / f"upload-{width}.png", full_page=True)

        other = page.locator("#grid a").nth(1)
        title = other.get_attribute("title")
        other.click()
        expect_neighbours(page, title.rpartition("/")[0], 12)
        assert page.locator("#detail").inner_text() == title
        marks = page.locator("#grid .caption b").all_inner_texts()
        assert all(mark[0] in "✓✗0-" for mark in marks)
        assert page.locator("#grid a.correct").count() >= 1
        wait_for_images(page)
        page.screenshot(path=tmp_path / f"item-{width}.png", full_page=True)

        page.select_option("#count", "24")
        wait_until(page, "document.querySelectorAll('#grid li').length === 24")
        page.go_back()  # to the chosen image
        expect_neighbours(page, "1.png", 24)
        overflows = page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
        assert not overflows


def open_chooser_by_space(page: Any) -> Any:
    """Press Space until the file chooser opens; a busy headless browser sometimes loses a key press."""
    from playwright.sync_api import TimeoutError

    for _ in range(2):
        with suppress(TimeoutError):
            with page.expect_file_chooser(timeout=5_000) as opened:
                page.keyboard.press("Space")
            return opened.value
    with page.expect_file_chooser() as opened:
        page.keyboard.press("Space")
    return opened.value


def test_keyboard_only(server, served, chromium):
    with browsing(server, chromium) as page:
        page.goto(server.url)
        page.wait_for_selector("#grid a")
        wait_for_images(page)
        focused = "document.activeElement.id || document.activeElement.className || document.activeElement.tagName"
        for _ in range(3):
            page.keyboard.press("Tab")
            if page.evaluate(focused) == "file":
                break
        assert page.evaluate(focused) == "file"
        open_chooser_by_space(page).set_files(served.photos / "class 1" / "2.png")
        expect_neighbours(page, "2.png", 12)
        assert page.evaluate(focused) == "title"  # so that the next Tab goes to the results
        page.keyboard.press("Tab")
        assert page.evaluate(focused) == "count"
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.closest('#grid') !== null")
        page.keyboard.press("Enter")
        expect_neighbours(page, "class 1", 12)
        page.go_back()  # Alt+Left needs a browser window, which a headless browser lacks
        expect_neighbours(page, "2.png", 12)


def test_drop_and_paste_images_and_other_files(server, chromium):
    dispatch = """([event, type, data, name]) => {
        const transfer = new DataTransfer();
        if (data !== null) {
            const bytes = Uint8Array.from(atob(data), c => c.charCodeAt(0));
            transfer.items.add(new File([bytes], name, {type}));
        }
        const options = {bubbles: true, cancelable: true};
        document.body.dispatchEvent(event === "drop"
            ? new DragEvent("drop", {...options, dataTransfer: transfer})
            : new ClipboardEvent("paste", {...options, clipboardData: transfer}));
    }"""
    jpeg = base64.b64encode(random_image()).decode()
    text = base64.b64encode(b"not an image at all").decode()
    large = base64.b64encode(bytes(4_100_000)).decode()
    with browsing(server, chromium, ignore=("422",)) as page:  # the browser logs the rejection to its console
        page.goto(server.url)
        page.wait_for_selector("#grid a")
        page.evaluate(dispatch, ["drop", "image/jpeg", jpeg, "dropped.jpg"])
        expect_neighbours(page, "dropped.jpg", 12)
        page.evaluate(dispatch, ["paste", "image/png", jpeg, "image.png"])
        expect_neighbours(page, "image.png", 12)
        for args, message in (
            (["drop", "", None, ""], "not an image file"),
            (["paste", "", None, ""], "not an image file"),
            (["drop", "image/jpeg", large, "large.jpg"], "larger than 4 MB"),
            (["drop", "image/jpeg", text, "text.jpg"], "not a valid JPEG"),
        ):
            page.evaluate(dispatch, args)
            wait_until(page, f"document.getElementById('status').textContent.includes({message!r})")
            assert page.locator("#status.error").count() == 1
        page.evaluate(dispatch, ["drop", "image/jpeg", jpeg, "again.jpg"])  # and it still works
        expect_neighbours(page, "again.jpg", 12)
        assert page.locator("#status.error").count() == 0


def test_the_page_requires_the_token(locked, chromium):
    with browsing(locked, chromium, ignore=("401",)) as page:
        page.goto(locked.url)
        page.wait_for_selector("#token-form:not([hidden])")
        page.fill("#token", "wrong")
        page.keyboard.press("Enter")
        wait_until(page, "document.getElementById('status').textContent.includes('Wrong token')")
        page.fill("#token", TOKEN)
        page.keyboard.press("Enter")
        page.wait_for_selector("#grid a")
        wait_for_images(page)
        assert page.locator("#token-form").is_hidden()
    with browsing(locked, chromium) as page:
        page.goto(f"{locked.url}#token={TOKEN}")
        page.wait_for_selector("#grid a")
        assert page.evaluate("location.href") == locked.url  # the token is removed from the URL
        page.locator("#grid a").first.click()
        expect_neighbours(page, "class 0", 12)
        wait_for_images(page)


def test_the_api_description_works_offline(locked, chromium):
    """`browsing` fails on requests to other servers and on violations of the page's policy."""
    with browsing(locked, chromium, width=1100) as page:
        page.goto(f"{locked.url}docs")
        page.locator(".authorize").first.click()
        page.fill(".modal-ux input", TOKEN)
        page.click(".modal-ux button.authorize")
        page.click(".modal-ux button.btn-done")
        page.click("#operations-default-info_info_get")
        page.click("#operations-default-info_info_get .try-out__btn")
        page.click("#operations-default-info_info_get .execute")
        page.wait_for_selector(".live-responses-table")
        assert '"classes": 4' in page.locator(".live-responses-table").inner_text()
