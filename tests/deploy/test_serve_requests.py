"""`nearkin serve` with hostile requests: a clear 4xx status, and the server survives."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers.serving import HEADERS, JPEG, random_image, send_raw, serving

pytestmark = pytest.mark.slow

pytest.importorskip("uvicorn", reason="needs nearkin[serve]")
MB = 1_000_000


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


@pytest.mark.parametrize("length", [b"-5", b"abc", b"1e9", b"5, 6", b""])
def test_an_invalid_content_length_is_rejected(server, length):
    status, body, _ = send_raw(server, HEADERS + b"Content-Length: " + length + b"\r\n\r\n")
    assert status == 400
    assert body == b"Invalid HTTP request received."  # by uvicorn, in plain text


def test_too_long_headers_are_rejected(server):
    status, body, _ = send_raw(server, b"GET /health HTTP/1.1\r\nX: " + b"y" * 100_000)
    assert status == 400
    assert body == b"Invalid HTTP request received."


def test_a_body_that_is_not_http_leaves_no_traceback(served):
    """Rejected by its type, before the body is read: uvicorn has answered with 400 already."""
    with serving(served.folder) as server:
        request = b"POST /search HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nnot a chunk\r\n"
        assert send_raw(server, request)[0] == 400
        assert server.alive()
        server.process.terminate()
        assert server.process.stderr.read() == ""


def test_other_protocols_are_rejected(server):
    status, _, _ = send_raw(server, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")
    assert status == 400


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
    service.lane.pool.submit(release.wait)
    with TestClient(make_app(service)) as client:
        yield client, service, release
    release.set()
    service.close()


def test_too_many_requests_get_503_while_health_responds(busy_client):
    client, service, release = busy_client
    with ThreadPoolExecutor(1) as background:
        waiting = background.submit(client.post, "/search", content=random_image(), headers=JPEG)
        while service.lane.active == 0:
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
    assert (service.lane.active, service.uploads.buffered_bytes) == (0, 0)


def test_uploads_in_memory_are_bounded(busy_client):
    client, service, release = busy_client
    with ThreadPoolExecutor(1) as background:
        waiting = background.submit(client.post, "/search", content=random_image("BMP"), headers=JPEG)  # 3,654 bytes
        while service.lane.active == 0:
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
