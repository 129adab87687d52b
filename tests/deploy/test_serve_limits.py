"""`nearkin serve` under strangers: whatever is sent, the answer is a clear 4xx, memory stays bounded, it lives on."""

from __future__ import annotations

import io
import json
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers.serving import JPEG, Server, encoded, picture, png
from PIL import Image

pytestmark = pytest.mark.slow

pytest.importorskip("uvicorn", reason="needs nearkin[serve]")
MB = 1_000_000


def sized(data: bytes, offset: int, form: str, *numbers: int) -> bytes:
    """A file with other numbers written into its head."""
    packed = struct.pack(form, *numbers)
    return data[:offset] + packed + data[offset + len(packed) :]


def lying_jpeg() -> bytes:
    data = picture("JPEG")
    frame = data.index(b"\xff\xc0")
    return sized(data, frame + 5, ">HH", 60_000, 60_000)


def lying_gif() -> bytes:
    return sized(picture("GIF"), 6, "<HH", 65_535, 65_535)


def lying_frame() -> bytes:
    """A small GIF whose first frame says that it is large."""
    data = picture("GIF")
    return sized(data, data.index(b"\x2c", 13 + 3 * 2 ** ((data[10] & 7) + 1)) + 5, "<HH", 60_000, 60_000)


def lying_webp() -> bytes:
    head = b"VP8X" + struct.pack("<I", 10) + bytes(4) + (16_382).to_bytes(3, "little") * 2
    body = head + picture("WEBP", lossless=True)[12:]
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def lying_tiff() -> bytes:
    image = Image.new("L", (8, 8))
    return encoded(image, "TIFF", tiffinfo={}).replace(
        struct.pack("<HHIHH", 256, 4, 1, 8, 0), struct.pack("<HHII", 256, 4, 1, 100_000)
    )


ODD = {
    "empty": (b"", 422),
    "text called .jpg": (b"hello, I am a text\n" * 100, 422),
    "html": (b"<html><script>alert(1)</script></html>", 422),
    "svg": (b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>', 422),
    "pdf": (b"%PDF-1.4\n%%EOF", 422),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n", 422),
    "zip": (b"PK\x03\x04" + bytes(60), 422),
    "zeros": (bytes(10_000), 422),
    "one byte": (b"\xff", 422),
    "only a JPEG's first bytes": (b"\xff\xd8\xff\xe0", 422),
    "half a JPEG": (picture("JPEG", (200, 150))[:3000], 422),
    "half a PNG": (picture("PNG", (200, 150))[:3000], 422),
    "half a GIF": (picture("GIF", (200, 150))[:3000], 422),
    "half a WebP": (picture("WEBP", (200, 150))[:3000], 422),
    "PNG without rows": (png(100, 100, rows=0), 422),
    "PNG of 60,000 x 60,000": (png(60_000, 60_000, rows=2), 413),
    "PNG of 4,294,967,295": (sized(png(9, 9), 16, ">II", 2**32 - 1, 2**32 - 1), 422),  # more than the format allows
    "PNG of 0 x 0": (sized(png(9, 9), 16, ">II", 0, 0), 422),
    "JPEG of 60,000 x 60,000": (lying_jpeg(), 413),
    "GIF of 65,535 x 65,535": (lying_gif(), 413),
    "GIF with a huge frame": (lying_frame(), 413),
    "WebP of 16,383 x 16,383": (lying_webp(), 413),
    "TIFF of 100,000 wide": (lying_tiff(), 422),
    "TIFF of fractions": (encoded(Image.new("F", (9, 9)), "TIFF"), 422),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_uploads_get_a_clear_refusal(server, name):
    body, expected = ODD[name]
    status, headers, answer = server.ask("POST", "/search", body, JPEG)
    assert status == expected, answer
    assert headers["content-type"] == "application/json"
    assert list(answer) == ["error"]
    assert 10 < len(answer["error"]) < 250


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_of_an_animation_only_the_first_picture_is_unpacked(server, served, kind):
    first = Image.open(served.photos / "class 2" / "1.png")
    others = [Image.new("RGB", first.size, (i, 255 - i, 0)) for i in range(250)]
    lossless = {"lossless": True} if kind == "WEBP" else {}
    body = encoded(first, kind, save_all=True, append_images=others, **lossless)
    assert Image.open(io.BytesIO(body)).n_frames > 200
    status, _, answer = server.ask("POST", "/search?k=1", body, JPEG)
    assert status == 200
    if kind != "GIF":  # which has 256 colours only
        assert answer["hits"][0]["id"] == "class 2/1.png"
        assert answer["hits"][0]["similarity"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    "kind",
    [
        *(None, "text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded"),
        *("image/svg+xml", "image/*", "é"),
    ],
)
def test_a_wrong_content_type_is_refused(server, kind):
    headers = {} if kind is None else {"Content-Type": kind.encode("latin-1")}
    status, _, answer = server.ask("POST", "/search", picture(), headers)
    assert status == 415
    assert "Content-Type" in answer["error"]


@pytest.mark.parametrize(
    "path",
    [
        *("/items/..%2f..", "/items/..%2f..%2fetc%2fpasswd", "/..", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd"),
        *("/items/thumbnail?id=../../../etc/passwd", "/items/thumbnail?id=/etc/passwd", "/items/thumbnail?id=%00"),
        *("/items/thumbnail?id=..%2F..%2Fmanifest.json", "/items/thumbnail?id=%ff%fe", "/items/neighbours?id="),
        *("/items/", "/items/class%200/0.png", "/search/", "/static/x.js", "/favicon.ico", "/%00", "/" + "x" * 5000),
        "/items/thumbnail?id=" + "%2e%2e%2f" * 200,
    ],
)
def test_odd_paths_lead_nowhere(server, path):
    status, _, answer = server.ask("GET", path)
    assert status == 404
    assert list(answer) == ["error"]
    assert len(answer["error"]) < 250


@pytest.mark.parametrize(
    "query",
    [
        *("/search?k=0", "/search?k=201", "/search?k=-1", "/search?k=ten", "/search?k=", "/search?k=1&k=2"),
        *("/search?k=%EF%BC%93", "/search?k=1_0", "/search?k=99999999999999999999", "/search?kk=3"),
    ],
)
def test_odd_parameters_are_refused(server, query):
    status, _, answer = server.ask("POST", query, picture(), JPEG)
    assert status == 400
    assert "k" in answer["error"]


def test_odd_methods_are_refused(server):
    for method, path in (
        ("GET", "/search"),
        ("DELETE", "/items"),
        ("PUT", "/"),
        ("OPTIONS", "/search"),
        ("TRACE", "/"),
    ):
        status, headers, answer = server.ask(method, path)
        assert status == 405
        assert headers["allow"]
        assert "takes" in answer["error"]


# --- how much and how long -------------------------------------------------------------------------------------------


def talk(server: Server, *parts: bytes, wait: float = 0.0) -> tuple[int, dict[str, object], float]:
    """Send bytes as they are, with pauses; the answer's status and JSON, and after how many seconds it came."""
    began = time.monotonic()
    with socket.create_connection((server.host, server.port), timeout=30) as line:
        for part in parts:
            try:
                line.sendall(part)
            except OSError:
                break
            time.sleep(wait)
        data = b""
        while b"\r\n\r\n" not in data or not data.endswith(b"}"):
            more = line.recv(65536)
            if not more:
                break
            data += more
        took = time.monotonic() - began
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body), took


HEAD = b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/jpeg\r\n"


def test_a_large_upload_is_refused_by_its_head_alone(server):
    status, answer, took = talk(server, HEAD + b"Content-Length: 10000000000\r\n\r\n" + bytes(1000))
    assert status == 413
    assert "larger than 4 MB" in answer["error"]
    assert took < 1


def test_a_large_upload_in_pieces_is_cut_off(server):
    pieces = [b"%x\r\n" % 500_000 + bytes(500_000) + b"\r\n" for _ in range(40)]
    status, answer, _ = talk(server, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *pieces)
    assert status == 413
    assert "larger than 4 MB" in answer["error"]


def test_an_ordinary_client_sees_why_its_large_upload_is_refused(server):
    status, _, answer = server.ask("POST", "/search", bytes(30 * MB), JPEG)
    assert status == 413
    assert "larger than 4 MB" in answer["error"]


@pytest.mark.parametrize("length", [b"-5", b"abc", b"1e9", b"5, 6", b""])
def test_a_length_that_is_none_is_refused(server, length):
    status, answer, _ = talk(server, HEAD + b"Content-Length: " + length + b"\r\n\r\n")
    assert status == 400
    assert answer["error"]


def test_a_slow_upload_times_out(server):
    status, answer, took = talk(server, HEAD + b"Content-Length: 1000\r\n\r\n", *[b"x"] * 12, wait=0.25)
    assert status == 408
    assert "within 1.5 seconds" in answer["error"]
    assert took < 6


def test_a_head_that_never_ends_times_out(server):
    status, _, took = talk(server, b"GET /health HTTP/1.1\r\n", *[b"X: y\r\n"] * 10, wait=0.25)
    assert status == 408
    assert took < 6


def test_an_endless_head_is_refused(server):
    status, answer, _ = talk(server, b"GET /health HTTP/1.1\r\nX: " + b"y" * 100_000)
    assert status == 400
    assert "not an HTTP request" in answer["error"]


def test_what_is_not_http_is_refused(server):
    status, _, _ = talk(server, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")
    assert status == 400


def test_an_upload_that_breaks_off_harms_nobody(server):
    for _ in range(20):
        with socket.create_connection((server.host, server.port)) as line:
            line.sendall(HEAD + b"Content-Length: 100000\r\n\r\n" + bytes(50))
    assert server.alive()


def test_more_than_can_wait_are_sent_away_while_health_answers(server):
    held = [socket.create_connection((server.host, server.port)) for _ in range(64)]
    for line in held:
        line.sendall(HEAD + b"Content-Length: 1000\r\nExpect: 100-continue\r\n\r\n")
    for line in held:
        assert line.recv(100).startswith(b"HTTP/1.1 100")  # admitted, and waiting for its body
    status, headers, answer = server.ask("POST", "/search", picture(), JPEG)
    assert (status, headers["retry-after"]) == (503, "1")
    assert "Try again" in answer["error"]
    assert server.alive()
    for line in held:
        line.close()
    until = time.monotonic() + 5
    while (status := server.ask("POST", "/search", picture(), JPEG)[0]) == 503 and time.monotonic() < until:
        time.sleep(0.1)
    assert status == 200


# --- memory ----------------------------------------------------------------------------------------------------------


def test_memory_stays_bounded_whatever_is_sent(server):
    for _ in range(4):
        assert server.ask("POST", "/search", picture("JPEG", (1000, 750)), JPEG)[0] == 200
    server.forget_memory()
    before = server.memory()
    bomb = png(60_000, 60_000, rows=50)
    with ThreadPoolExecutor(8) as many:
        statuses = list(many.map(lambda _: server.ask("POST", "/search", bomb, JPEG)[0], range(40)))
        assert set(statuses) == {413}
        refused = server.memory() - before
        # What is allowed: 49 million pixels with transparency, several at once.
        large = png(7000, 7000, colour=6)
        statuses = list(many.map(lambda _: server.ask("POST", "/search", large, JPEG)[0], range(3)))
    assert set(statuses) == {200}
    allowed = server.memory() - before
    print(f"bombs cost {refused / MB:.0f} MB, the largest allowed pictures {allowed / MB:.0f} MB at their peak")
    assert refused < 60 * MB
    # Two workers, each with a picture's bytes (4 per pixel), laid over white (3), turned for scaling (3), and some.
    assert allowed < 2 * 49 * 15 * MB


def test_many_at_once_without_an_error_and_health_answers_meanwhile(server):
    body = picture("JPEG", (500, 400))
    slowest: list[float] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            began = time.monotonic()
            assert server.ask("GET", "/health")[0] == 200
            slowest.append(time.monotonic() - began)
            time.sleep(0.02)

    watching = threading.Thread(target=watch)
    watching.start()
    with ThreadPoolExecutor(8) as many:
        statuses = list(many.map(lambda _: server.ask("POST", "/search", body, JPEG)[0], range(200)))
    done.set()
    watching.join()
    assert set(statuses) == {200}
    assert len(slowest) > 3
    assert np.median(slowest) < 0.5


# --- damaged pictures of every kind, in this process -----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF"])
def test_damaged_pictures_are_read_or_refused_never_worse(served, kind):
    import nearkin as nk
    from nearkin.deploy.serve.app import Service
    from nearkin.deploy.serve.request_limits import RequestLimits, RequestRejected

    service = Service(nk.Index.load(served.folder), limits=RequestLimits(pixels=100_000))
    whole = picture(kind, (60, 45))
    rng = np.random.default_rng(0)
    outcomes = {200: 0, 413: 0, 422: 0}
    try:
        for _ in range(60):
            data = bytearray(whole)
            for place in rng.integers(0, min(len(data), 400), rng.integers(1, 6)):
                data[place] = rng.integers(0, 256)
            cut = len(data) if rng.random() < 0.7 else int(rng.integers(1, len(data)))
            try:
                service.search_image(bytes(data[:cut]), 3)
                outcomes[200] += 1
            except RequestRejected as refused:
                outcomes[refused.status] += 1
    finally:
        service.close()
    assert outcomes[422] > 5


def test_pictures_turned_by_their_camera_are_searched_upright(server, served):
    upright = Image.open(served.photos / "class 0" / "4.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # stored on its side
    turned = encoded(upright.rotate(90, expand=True), "PNG", exif=exif)
    status, _, answer = server.ask("POST", "/search?k=1", turned, JPEG)
    assert status == 200
    assert answer["hits"][0]["id"] == "class 0/4.png"
    assert answer["hits"][0]["similarity"] == pytest.approx(1, abs=1e-6)
    assert Image.open(io.BytesIO(turned)).size == upright.size[::-1]
