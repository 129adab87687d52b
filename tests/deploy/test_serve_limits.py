"""`nearkin serve` with hostile input: a clear 4xx status, bounded memory, and the server survives."""

from __future__ import annotations

import io
import json
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from helpers.serving import JPEG, Server, encode, png, random_image, serving
from PIL import Image

pytestmark = pytest.mark.slow

pytest.importorskip("uvicorn", reason="needs nearkin[serve]")
MB = 1_000_000


def patch(data: bytes, offset: int, fmt: str, *values: int) -> bytes:
    """Overwrite numbers in the header of a file."""
    packed = struct.pack(fmt, *values)
    return data[:offset] + packed + data[offset + len(packed) :]


def huge_jpeg() -> bytes:
    data = random_image("JPEG")
    frame = data.index(b"\xff\xc0")
    return patch(data, frame + 5, ">HH", 60_000, 60_000)


def huge_gif() -> bytes:
    return patch(random_image("GIF"), 6, "<HH", 65_535, 65_535)


def huge_frame() -> bytes:
    """A small GIF whose first frame declares a huge size."""
    data = random_image("GIF")
    return patch(data, data.index(b"\x2c", 13 + 3 * 2 ** ((data[10] & 7) + 1)) + 5, "<HH", 60_000, 60_000)


def huge_webp() -> bytes:
    head = b"VP8X" + struct.pack("<I", 10) + bytes(4) + (16_382).to_bytes(3, "little") * 2
    body = head + random_image("WEBP", lossless=True)[12:]
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def huge_tiff() -> bytes:
    image = Image.new("L", (8, 8))
    return encode(image, "TIFF", tiffinfo={}).replace(
        struct.pack("<HHIHH", 256, 4, 1, 8, 0), struct.pack("<HHII", 256, 4, 1, 100_000)
    )


def many_scans() -> bytes:
    """A progressive JPEG whose last scan is repeated."""
    data = random_image("JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * 150 + data[-2:]


def test_a_jpeg_within_the_limits(server):
    """It is decoded at reduced size, so it may have twice as many pixels as other formats."""
    large = encode(Image.new("RGB", (7000, 7000)), "JPEG", progressive=True)
    assert server.request("POST", "/search", large, JPEG)[0] == 200


INVALID = {
    "empty": (b"", 422),
    "text named .jpg": (b"hello, this is text\n" * 100, 422),
    "html": (b"<html><script>alert(1)</script></html>", 422),
    "svg": (b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>', 422),
    "pdf": (b"%PDF-1.4\n%%EOF", 422),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n", 422),
    "zip": (b"PK\x03\x04" + bytes(60), 422),
    "zeros": (bytes(10_000), 422),
    "one byte": (b"\xff", 422),
    "only a JPEG's first bytes": (b"\xff\xd8\xff\xe0", 422),
    "half a JPEG": (random_image("JPEG", (200, 150))[:3000], 422),
    "half a PNG": (random_image("PNG", (200, 150))[:3000], 422),
    "half a GIF": (random_image("GIF", (200, 150))[:3000], 422),
    "half a WebP": (random_image("WEBP", (200, 150))[:3000], 422),
    "PNG without rows": (png(100, 100, rows=0), 422),
    "PNG of 60,000 x 60,000": (png(60_000, 60_000, rows=2), 413),
    "PNG of 4,294,967,295": (patch(png(9, 9), 16, ">II", 2**32 - 1, 2**32 - 1), 422),  # more than the format allows
    "PNG of 0 x 0": (patch(png(9, 9), 16, ">II", 0, 0), 422),
    "JPEG of 60,000 x 60,000": (huge_jpeg(), 413),
    "GIF of 65,535 x 65,535": (huge_gif(), 413),
    "GIF with a huge frame": (huge_frame(), 413),
    "WebP of 16,383 x 16,383": (huge_webp(), 413),
    "TIFF of 100,000 wide": (huge_tiff(), 422),
    "PNG of 7,000 x 7,000, slow to decode": (png(7000, 7000, colour=6), 413),
    "JPEG of 150 scans": (many_scans(), 422),
    "TIFF of floats": (encode(Image.new("F", (9, 9)), "TIFF"), 422),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_uploads_get_a_clear_error(server, name):
    upload, expected = INVALID[name]
    status, headers, body = server.request("POST", "/search", upload, JPEG)
    assert status == expected, body
    assert headers["content-type"] == "application/json"
    assert list(body) == ["error"]
    assert 10 < len(body["error"]) < 250


@pytest.mark.parametrize("image_format", ["GIF", "PNG", "WEBP"])
def test_only_the_first_frame_of_an_animation_is_decoded(server, served, image_format):
    first = Image.open(served.photos / "class 2" / "1.png")
    others = [Image.new("RGB", first.size, (i, 255 - i, 0)) for i in range(250)]
    lossless = {"lossless": True} if image_format == "WEBP" else {}
    upload = encode(first, image_format, save_all=True, append_images=others, **lossless)
    assert Image.open(io.BytesIO(upload)).n_frames > 200
    status, _, body = server.request("POST", "/search?k=1", upload, JPEG)
    assert status == 200
    if image_format != "GIF":  # which has only 256 colours
        assert body["hits"][0]["id"] == "class 2/1.png"
        assert body["hits"][0]["similarity"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    "content_type",
    [
        *(None, "text/plain", "application/x-www-form-urlencoded"),
        *("image/svg+xml", "image/*", "é"),
    ],
)
def test_unsupported_content_types_are_rejected(server, content_type):
    headers = {} if content_type is None else {"Content-Type": content_type.encode("latin-1")}
    status, _, body = server.request("POST", "/search", random_image(), headers)
    assert status == 415
    assert "Content-Type" in body["error"]


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
def test_invalid_paths_are_not_found(server, path):
    status, _, body = server.request("GET", path)
    assert status == 404
    assert list(body) == ["error"]
    assert len(body["error"]) < 250


@pytest.mark.parametrize(
    "query",
    [
        *("/search?k=0", "/search?k=201", "/search?k=-1", "/search?k=ten", "/search?k=", "/search?k=1&k=2"),
        *("/search?k=%EF%BC%93", "/search?k=1_0", "/search?k=99999999999999999999", "/search?kk=3"),
    ],
)
def test_invalid_parameters_are_rejected(server, query):
    status, _, body = server.request("POST", query, random_image(), JPEG)
    assert status == 400
    assert "k" in body["error"]


def test_unsupported_methods_are_rejected(server):
    for method, path in (
        ("GET", "/search"),
        ("DELETE", "/items"),
        ("PUT", "/"),
        ("OPTIONS", "/search"),
        ("TRACE", "/"),
    ):
        status, headers, body = server.request(method, path)
        assert status == 405
        assert headers["allow"]
        assert "Method not allowed" in body["error"]


# --- size and time ---------------------------------------------------------------------------------------------------


def send_raw(server: Server, *parts: bytes, wait: float = 0.0) -> tuple[int, Any, float]:
    """Send raw bytes with pauses; returns status, body (parsed if it is JSON) and elapsed seconds."""
    began = time.monotonic()
    with socket.create_connection((server.host, server.port), timeout=30) as line:
        for part in parts:
            try:
                line.sendall(part)
            except OSError:
                break
            time.sleep(wait)
        data = b""
        while b"\r\n\r\n" not in data or not data.endswith((b"}", b"received.")):
            more = line.recv(65536)
            if not more:
                break
            data += more
        took = time.monotonic() - began
    head, _, body = data.partition(b"\r\n\r\n")
    is_json = b"content-type: application/json" in head.lower()
    return int(head.split()[1]), json.loads(body) if is_json else body, took


HEADERS = b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/jpeg\r\n"


def test_a_large_upload_is_rejected_by_its_headers(server):
    status, body, took = send_raw(server, HEADERS + b"Content-Length: 10000000000\r\n\r\n" + bytes(1000))
    assert status == 413
    assert "larger than 4 MB" in body["error"]
    assert took < 1


def test_a_large_chunked_upload_is_rejected(server):
    chunks = [b"%x\r\n" % 500_000 + bytes(500_000) + b"\r\n" for _ in range(40)]
    status, body, _ = send_raw(server, HEADERS + b"Transfer-Encoding: chunked\r\n\r\n", *chunks)
    assert status == 413
    assert "larger than 4 MB" in body["error"]


def test_a_standard_client_receives_the_rejection_of_a_large_upload(server):
    status, _, body = server.request("POST", "/search", bytes(30 * MB), JPEG)
    assert status == 413
    assert "larger than 4 MB" in body["error"]


@pytest.mark.parametrize("length", [b"-5", b"abc", b"1e9", b"5, 6", b""])
def test_an_invalid_content_length_is_rejected(server, length):
    status, body, _ = send_raw(server, HEADERS + b"Content-Length: " + length + b"\r\n\r\n")
    assert status == 400
    assert body == b"Invalid HTTP request received."  # by uvicorn, in plain text


def test_a_slow_upload_times_out(server):
    status, body, took = send_raw(server, HEADERS + b"Content-Length: 1000\r\n\r\n", *[b"x"] * 12, wait=0.25)
    assert status == 408
    assert "within 1.5 seconds" in body["error"]
    assert took < 6


def test_too_long_headers_are_rejected(server):
    status, body, _ = send_raw(server, b"GET /health HTTP/1.1\r\nX: " + b"y" * 100_000)
    assert status == 400
    assert body == b"Invalid HTTP request received."


def test_other_protocols_are_rejected(server):
    status, _, _ = send_raw(server, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")
    assert status == 400


def test_interrupted_uploads_do_no_harm(server):
    for _ in range(20):
        with socket.create_connection((server.host, server.port)) as line:
            line.sendall(HEADERS + b"Content-Length: 100000\r\n\r\n" + bytes(50))
    assert server.alive()


def test_slow_clients_do_not_block_search(served):
    """200 uploads that announce the largest size and stall, and 200 clients that stall in the headers."""
    upload = HEADERS + b"Content-Length: 20000000\r\n\r\n" + random_image()[:100]
    with serving(served.folder) as running, ExitStack() as stack:
        for start in [upload] * 200 + [HEADERS] * 200:
            line = stack.enter_context(socket.create_connection((running.host, running.port)))
            line.sendall(start)
        for _ in range(5):
            status, _, body = running.request("POST", "/search?k=3", random_image(), JPEG)
            assert status == 200, body
            assert len(body["hits"]) == 3
        assert running.alive()


@pytest.fixture
def busy_client(served):
    """A client of an application whose only worker is busy until the event is set."""
    from starlette.testclient import TestClient

    import nearkin as nk
    from nearkin.deploy.serve.app import Service, make_app
    from nearkin.deploy.serve.request_limits import RequestLimits

    service = Service(
        nk.Index.load(served.folder),
        workers=1,
        limits=RequestLimits(max_requests=1, max_upload_bytes=10_000, buffered_uploads=1),
    )
    release = threading.Event()
    service.pool.submit(release.wait)
    with TestClient(make_app(service)) as client:
        yield client, service, release
    release.set()
    service.close()


def test_too_many_requests_get_503_while_health_responds(busy_client):
    client, service, release = busy_client
    with ThreadPoolExecutor(1) as background:
        waiting = background.submit(client.post, "/search", content=random_image(), headers=JPEG)
        while service.active == 0:
            time.sleep(0.01)
        for response in (
            client.post("/search", content=random_image(), headers=JPEG),
            client.get("/items/thumbnail", params={"id": "class 0/0.png"}),
        ):
            assert (response.status_code, response.headers["retry-after"]) == (503, "1")
            assert "Try again" in response.json()["error"]
        assert client.get("/health").json() == {"status": "ok"}
        release.set()
        assert waiting.result().status_code == 200
    assert client.post("/search", content=random_image(), headers=JPEG).status_code == 200
    assert (service.active, service.uploads.buffered_bytes) == (0, 0)


def test_uploads_in_memory_are_bounded(busy_client):
    client, service, release = busy_client
    with ThreadPoolExecutor(1) as background:
        waiting = background.submit(client.post, "/search", content=random_image("BMP"), headers=JPEG)  # 3,654 bytes
        while service.active == 0:
            time.sleep(0.01)
        response = client.post("/search", content=bytes(9_000), headers=JPEG)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        release.set()
        assert waiting.result().status_code == 200
    assert service.uploads.buffered_bytes == 0


# --- forms -----------------------------------------------------------------------------------------------------------


def form(name: str, data: bytes, boundary: bytes = b"x-x") -> tuple[bytes, dict[str, str]]:
    head = f'Content-Disposition: form-data; name="{name}"; filename="a.jpg"\r\nContent-Type: image/jpeg'.encode()
    body = b"--" + boundary + b"\r\n" + head + b"\r\n\r\n" + data + b"\r\n--" + boundary + b"--\r\n"
    return body, {"Content-Type": f"multipart/form-data; boundary={boundary.decode()}"}


def test_a_form_gives_the_same_result_as_a_body(server, served):
    data = (served.photos / "class 2" / "3.png").read_bytes()
    assert server.request("POST", "/search", *form("file", data))[2] == server.request("POST", "/search", data, JPEG)[2]


def test_invalid_forms_get_a_clear_error(server):
    headers = {"Content-Type": "multipart/form-data; boundary=x-x"}
    for body, given, expected, message in (
        (*form("image", random_image()), 422, "no file named 'file'. Send it as curl -F"),
        (*form("file", b""), 422, "empty"),
        (*form("file", b"text"), 422, "not a valid JPEG"),
        (
            b"--x-x\r\nContent-Disposition: form-data; name=file\r\n\r\ntext\r\n--x-x--\r\n",
            headers,
            422,
            "no file named",
        ),
        (random_image(), headers, 422, "form cannot be read"),
        (random_image(), {"Content-Type": "multipart/form-data"}, 422, "form cannot be read"),
        (*form("file", bytes(5 * MB)), 413, "larger than 4 MB"),
    ):
        status, _, error = server.request("POST", "/search", body, given)
        assert status == expected, error
        assert message in error["error"]


# --- memory ----------------------------------------------------------------------------------------------------------


def test_memory_is_bounded(server):
    for _ in range(4):
        assert server.request("POST", "/search", random_image("JPEG", (1000, 750)), JPEG)[0] == 200
    server.reset_peak_memory()
    before = server.peak_memory()
    bomb = png(60_000, 60_000, rows=50)
    with ThreadPoolExecutor(8) as many:
        statuses = list(many.map(lambda _: server.request("POST", "/search", bomb, JPEG)[0], range(40)))
        assert set(statuses) == {413}
        rejected = server.peak_memory() - before
        # Within the limit: 25 million pixels with transparency, several at once.
        large = png(5000, 5000, colour=6)
        statuses = list(many.map(lambda _: server.request("POST", "/search", large, JPEG)[0], range(3)))
    assert set(statuses) == {200}
    allowed = server.peak_memory() - before
    print(f"bombs cost {rejected / MB:.0f} MB, the largest allowed images {allowed / MB:.0f} MB at peak")
    assert rejected < 60 * MB
    # Two workers, each with RGBA (4 bytes per pixel), composite (3), transposed for scaling (3) and some overhead, and
    # the strip that is being converted.
    assert allowed < 2 * (25 * 12 + 150) * MB


def test_concurrent_requests_succeed_while_health_responds(server):
    body = random_image("JPEG", (500, 400))
    latencies: list[float] = []
    done = threading.Event()

    def poll_health() -> None:
        while not done.is_set():
            began = time.monotonic()
            assert server.request("GET", "/health")[0] == 200
            latencies.append(time.monotonic() - began)
            time.sleep(0.02)

    poller = threading.Thread(target=poll_health)
    poller.start()
    with ThreadPoolExecutor(8) as many:
        statuses = list(many.map(lambda _: server.request("POST", "/search", body, JPEG)[0], range(200)))
    done.set()
    poller.join()
    assert set(statuses) == {200}
    assert len(latencies) > 3
    assert np.median(latencies) < 0.5


# --- damaged images, in this process ---------------------------------------------------------------------------------


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF"])
def test_damaged_images_are_read_or_rejected(served, image_format):
    from starlette.exceptions import HTTPException

    import nearkin as nk
    from nearkin.deploy.serve.app import Service
    from nearkin.deploy.serve.request_limits import RequestLimits

    service = Service(nk.Index.load(served.folder), limits=RequestLimits(max_pixels=100_000))
    whole = random_image(image_format, (60, 45))
    rng = np.random.default_rng(0)
    outcomes = {200: 0, 413: 0, 422: 0}
    try:
        for _ in range(60):
            data = bytearray(whole)
            for n in rng.integers(0, min(len(data), 400), rng.integers(1, 6)):
                data[n] = rng.integers(0, 256)
            cut = len(data) if rng.random() < 0.7 else int(rng.integers(1, len(data)))
            try:
                service.search_image(bytes(data[:cut]), 3)
                outcomes[200] += 1
            except HTTPException as rejected:
                outcomes[rejected.status_code] += 1
    finally:
        service.close()
    assert outcomes[422] > 5


def test_exif_orientation_is_applied(server, served):
    upright = Image.open(served.photos / "class 0" / "4.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    rotated = encode(upright.rotate(90, expand=True), "PNG", exif=exif)
    status, _, body = server.request("POST", "/search?k=1", rotated, JPEG)
    assert status == 200
    assert body["hits"][0]["id"] == "class 0/4.png"
    assert body["hits"][0]["similarity"] == pytest.approx(1, abs=1e-6)
    assert Image.open(io.BytesIO(rotated)).size == upright.size[::-1]
