"""The page of `nearkin serve` in a real browser: choose, drop, paste, go on from a neighbour, by mouse and by keys."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from conftest import BROWSER_FLAGS
from helpers.serving import TOKEN, Server, picture

pytestmark = pytest.mark.slow

pytest.importorskip("uvicorn", reason="needs nearkin[serve]")
ODD = "<b>bold</b> & é"


@contextmanager
def browsing(
    server: Server, chromium: Any, *, width: int = 1100, scheme: str = "light", but: tuple[str, ...] = ()
) -> Iterator[Any]:
    """A page of the server. Console messages and requests elsewhere are troubles, and there must be none."""
    from playwright.sync_api import sync_playwright

    troubles: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(chromium), args=BROWSER_FLAGS)
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.set_default_timeout(15_000)
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda r: r.url.startswith((server.url, "blob:", "data:")) or troubles.append(r.url))
        yield page
        assert page.context.cookies() == []
        browser.close()
    assert [trouble for trouble in troubles if not any(word in trouble for word in but)] == []


def until(page: Any, true: str) -> None:
    """Wait for an expression to be true; asked from outside, since the page forbids its own window to evaluate text."""
    end = time.monotonic() + 15
    while not page.evaluate(true):
        assert time.monotonic() < end, true
        page.wait_for_timeout(30)


def all_pictures_shown(page: Any) -> None:
    until(page, "[...document.images].every(i => i.offsetParent === null || i.naturalWidth > 0)")


def neighbours_of(page: Any, title: str, count: int) -> None:
    until(page, f"document.getElementById('said').textContent.endsWith({' of ' + title!r})")
    assert page.locator("#grid li").count() == count
    assert page.locator("#title").inner_text() == title


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1100, "dark")])
def test_choose_a_file_and_go_on_from_a_neighbour(server, served, chromium, tmp_path, width, scheme):
    with browsing(server, chromium, width=width, scheme=scheme) as page:
        page.goto(server.url)
        page.wait_for_selector("#grid a")
        assert "25 pictures of 4 kinds" in page.locator("header").inner_text()
        all_pictures_shown(page)
        page.screenshot(path=tmp_path / f"start-{width}.png", full_page=True)

        page.set_input_files("#file", served.photos / ODD / "1.png")
        neighbours_of(page, "1.png", 12)
        all_pictures_shown(page)
        first = page.locator("#grid a").first
        assert first.locator(".caption span").inner_text() == ODD  # as text, not as a tag
        assert first.locator(".caption b").inner_text() == "1.000"
        page.screenshot(path=tmp_path / f"upload-{width}.png", full_page=True)

        other = page.locator("#grid a").nth(1)
        title = other.get_attribute("title")
        other.click()
        neighbours_of(page, other_label := title.rpartition("/")[0], 12)
        assert page.locator("#detail").inner_text() == title
        marks = page.locator("#grid .caption b").all_inner_texts()
        assert all(mark[0] in "✓✗0-" for mark in marks)
        assert page.locator("#grid a.right").count() >= 1
        all_pictures_shown(page)
        page.screenshot(path=tmp_path / f"item-{width}.png", full_page=True)
        assert other_label

        page.select_option("#count", "24")
        until(page, "document.querySelectorAll('#grid li').length === 24")
        page.go_back()  # to the picture that was chosen
        neighbours_of(page, "1.png", 24)
        sideways = page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
        assert not sideways


def chooser_by_space(page: Any) -> Any:
    """A busy headless browser loses a key press now and then; a person presses again."""
    from playwright.sync_api import TimeoutError

    for _ in range(2):
        with suppress(TimeoutError):
            with page.expect_file_chooser(timeout=5_000) as opened:
                page.keyboard.press("Space")
            return opened.value
    with page.expect_file_chooser() as opened:
        page.keyboard.press("Space")
    return opened.value


def test_with_keys_alone(server, served, chromium):
    with browsing(server, chromium) as page:
        page.goto(server.url)
        page.wait_for_selector("#grid a")
        all_pictures_shown(page)
        focused = "document.activeElement.id || document.activeElement.className || document.activeElement.tagName"
        for _ in range(3):
            page.keyboard.press("Tab")
            if page.evaluate(focused) == "file":
                break
        assert page.evaluate(focused) == "file"
        chooser_by_space(page).set_files(served.photos / "class 1" / "2.png")
        neighbours_of(page, "2.png", 12)
        assert page.evaluate(focused) == "title"  # so that the next Tab is about the answer
        page.keyboard.press("Tab")
        assert page.evaluate(focused) == "count"
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.closest('#grid') !== null")
        page.keyboard.press("Enter")
        neighbours_of(page, "class 1", 12)
        page.go_back()  # Alt and the left arrow belong to the browser's window, which a headless one has not
        neighbours_of(page, "2.png", 12)


def test_drop_and_paste_and_what_is_no_picture(server, chromium):
    give = """([kind, type, data, name]) => {
        const carried = new DataTransfer();
        if (data !== null) {
            const bytes = Uint8Array.from(atob(data), c => c.charCodeAt(0));
            carried.items.add(new File([bytes], name, {type}));
        }
        const how = {bubbles: true, cancelable: true};
        document.body.dispatchEvent(kind === "drop"
            ? new DragEvent("drop", {...how, dataTransfer: carried})
            : new ClipboardEvent("paste", {...how, clipboardData: carried}));
    }"""
    jpeg = base64.b64encode(picture()).decode()
    text = base64.b64encode(b"no picture at all").decode()
    large = base64.b64encode(bytes(4_100_000)).decode()
    with browsing(server, chromium, but=("422",)) as page:  # the browser notes the refusal in its console
        page.goto(server.url)
        page.wait_for_selector("#grid a")
        page.evaluate(give, ["drop", "image/jpeg", jpeg, "dropped.jpg"])
        neighbours_of(page, "dropped.jpg", 12)
        page.evaluate(give, ["paste", "image/png", jpeg, "image.png"])
        neighbours_of(page, "image.png", 12)
        for given, said in (
            (["drop", "", None, ""], "not a picture file"),
            (["paste", "", None, ""], "not a picture file"),
            (["drop", "image/jpeg", large, "large.jpg"], "larger than 4 MB"),
            (["drop", "image/jpeg", text, "text.jpg"], "not a JPEG"),
        ):
            page.evaluate(give, given)
            until(page, f"document.getElementById('said').textContent.includes({said!r})")
            assert page.locator("#said.bad").count() == 1
        page.evaluate(give, ["drop", "image/jpeg", jpeg, "again.jpg"])  # and it goes on
        neighbours_of(page, "again.jpg", 12)
        assert page.locator("#said.bad").count() == 0


def test_the_page_asks_for_the_token(locked, chromium):
    with browsing(locked, chromium, but=("401",)) as page:
        page.goto(locked.url)
        page.wait_for_selector("#lock:not([hidden])")
        page.fill("#token", "wrong")
        page.keyboard.press("Enter")
        until(page, "document.getElementById('said').textContent.includes('not the right one')")
        page.fill("#token", TOKEN)
        page.keyboard.press("Enter")
        page.wait_for_selector("#grid a")
        all_pictures_shown(page)
        assert page.locator("#lock").is_hidden()
    with browsing(locked, chromium) as page:
        page.goto(f"{locked.url}#token={TOKEN}")
        page.wait_for_selector("#grid a")
        assert page.evaluate("location.href") == locked.url  # the token does not stay in the address
        page.locator("#grid a").first.click()
        neighbours_of(page, "class 0", 12)
        all_pictures_shown(page)
