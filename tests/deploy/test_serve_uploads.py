"""`nearkin serve` with hostile images and slow uploads: a clear 4xx status, bounded memory and time."""

from __future__ import annotations

import io
import socket
import struct
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache

import numpy as np
import pytest
from helpers.serving import HEADERS, JPEG, encode, png, random_image, send_raw, serving
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


def many_scans(data: bytes, count: int) -> bytes:
    """A progressive JPEG whose last scan is repeated."""
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * count + data[-2:]


@cache
def large_jpeg() -> bytes:
    """49 million pixels in 0.3 MB."""
    return encode(Image.new("RGB", (7000, 7000)), "JPEG", progressive=True)


def many_parts(image_format: str) -> bytes:
    """A small image after 200,000 empty parts, which took Pillow half a second to skip."""
    data = random_image(image_format)
    first = {"JPEG": 2, "PNG": 33, "GIF": 13 + 3 * 2 ** ((data[10] & 7) + 1)}[image_format]
    part = {
        "JPEG": b"\xff\xfe\0\2",
        "PNG": bytes(4) + b"prVt" + struct.pack(">I", zlib.crc32(b"prVt")),
        "GIF": b"!\xfe\0",
    }
    return data[:first] + part[image_format] * 200_000 + data[first:]


def test_a_jpeg_within_the_limits(server):
    """It is decoded at reduced size, so it may have twice as many pixels as other formats."""
    assert server.request("POST", "/search", large_jpeg(), JPEG)[0] == 200


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
    "WebP that claims 16,383 x 16,383": (huge_webp(), 422),  # but holds a smaller image
    "TIFF of 100,000 wide": (huge_tiff(), 422),
    "PNG of 7,000 x 7,000, slow to decode": (png(7000, 7000, colour=6), 413),
    "JPEG of 150 scans": (many_scans(random_image("JPEG", progressive=True), 150), 422),
    "JPEG of 7,000 x 7,000 and 25 scans": (many_scans(large_jpeg(), 17), 422),
    **{f"{name} of 200,000 parts": (many_parts(name), 422) for name in ("JPEG", "PNG", "GIF")},
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


# --- size and time ---------------------------------------------------------------------------------------------------


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


def test_a_slow_upload_times_out(server):
    status, body, took = send_raw(server, HEADERS + b"Content-Length: 1000\r\n\r\n", *[b"x"] * 12, wait=0.25)
    assert status == 408
    assert "within 1.5 seconds" in body["error"]
    assert took < 6


def test_interrupted_uploads_do_no_harm(server):
    for _ in range(20):
        with socket.create_connection((server.host, server.port)) as line:
            line.sendall(HEADERS + b"Content-Length: 100000\r\n\r\n" + bytes(50))
    assert server.alive()


def test_slow_clients_do_not_block_search(served):
    """200 uploads that stall after 100 bytes, 200 clients that stall in the headers, 30 that stall at the last byte."""
    stalled = HEADERS + b"Content-Length: 1000000\r\n\r\n"
    with serving(served.folder, "--max-upload-bytes", "1000000") as running, ExitStack() as stack:

        def stall(start: bytes) -> socket.socket:
            line = stack.enter_context(socket.create_connection((running.host, running.port), timeout=30))
            line.sendall(start)
            return line

        for start in [stalled + bytes(100)] * 200 + [HEADERS] * 200:
            stall(start)
        latencies = []
        for _ in range(5):
            lines = [stall(stalled + bytes(999_999)) for _ in range(6)]  # memory is for 8
            began = time.monotonic()
            status, _, body = running.request("POST", "/search?k=3", random_image("BMP", (400, 400)), JPEG)
            latencies.append(time.monotonic() - began)
            assert status == 200, body
            assert len(body["hits"]) == 3
        print(f"searches took {max(latencies) * 1000:.0f} ms at most")
        assert max(latencies) < 5  # the stalled uploads have 20 s
        assert running.alive()
        lines[-1].sendall(b"x")  # one of the last is complete, and answered: it is not an image
        assert lines[-1].recv(100).startswith(b"HTTP/1.1 422")


def test_large_images_do_not_block_search(served):
    """Images that take a second each wait for each other, not other searches for them."""
    with serving(served.folder) as running, ThreadPoolExecutor(3) as many:
        large = png(5000, 5000, colour=6)
        began = time.monotonic()
        uploads = [many.submit(running.request, "POST", "/search", large, JPEG) for _ in range(3)]
        time.sleep(0.5)
        for _ in range(3):
            assert running.request("POST", "/search?k=3", random_image(), JPEG)[0] == 200
        searched = time.monotonic() - began
        assert not uploads[-1].done()
        assert {upload.result()[0] for upload in uploads} == {200}
        print(f"3 searches after {searched:.1f} s, 3 large images after {time.monotonic() - began:.1f} s")


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
    # One at a time, with RGBA (4 bytes per pixel), composite (3), transposed for scaling (3) and some overhead, and the
    # strip that is being converted.
    assert allowed < (25 * 12 + 250) * MB


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
