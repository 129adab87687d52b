"""`nearkin serve`: correct responses that reveal nothing about the machine."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from urllib.parse import quote

import numpy as np
import pytest
from helpers.serving import JPEG, ROOT, TOKEN, ServedIndex, Server, encode, launch, random_image, serving
from PIL import Image

import nearkin as nk
from nearkin.cli._arguments import parse
from nearkin.cli.serve import ServeArgs
from nearkin.deploy.serve.service import public_names
from nearkin.errors import ConfigError

pytestmark = pytest.mark.slow

pytest.importorskip("uvicorn", reason="needs nearkin[serve]")


def brute_force(served: ServedIndex, vector: np.ndarray, skip: int | None = None) -> list[tuple[str, float]]:
    """Rank all items by their cosine to a vector, in float64."""
    index = nk.Index.load(served.folder)
    vectors = np.asarray(index.vectors, np.float64)
    cosines = vectors @ vector / np.linalg.norm(vectors, axis=1) / np.linalg.norm(vector)
    rows = [row for row in np.argsort(-cosines, kind="stable") if row != skip]
    return [(index.ids[row], cosines[row]) for row in rows]


# --- responses -------------------------------------------------------------------------------------------------------


def test_search_by_upload_against_brute_force(server, served):
    file = served.photos / "class 2" / "3.png"
    status, headers, body = server.request("POST", "/search?k=8", file.read_bytes(), {"Content-Type": "image/png"})
    assert status == 200
    assert headers["cache-control"] == "no-store"
    vector = nk.load(served.run).embed([file])[0].double().numpy()
    expected = brute_force(served, vector)[:8]
    shown = [(hit["id"], hit["similarity"]) for hit in body["hits"]]
    assert [id.rpartition("/")[2] for id, _ in shown] == [id.rpartition("/")[2] for id, _ in expected]
    np.testing.assert_allclose([cosine for _, cosine in shown], [cosine for _, cosine in expected], atol=1e-6)
    assert shown[0] == ("class 2/3.png", pytest.approx(1, abs=1e-6))
    assert body["hits"][0]["label"] == "class 2"
    assert body["known"] is None
    assert body["nearest"] == pytest.approx(1, abs=1e-6)


def test_the_same_pixels_in_any_format_give_the_same_result(server, served):
    image = Image.open(served.photos / "class 1" / "0.png")
    animated = encode(image, "GIF", save_all=True, append_images=[Image.new("RGB", image.size, "red")])
    first = Image.open(io.BytesIO(animated)).convert("RGB")  # the first frame of an animation counts
    expected = brute_force(served, nk.load(served.run).embed([first])[0].double().numpy())[0]
    status, _, body = server.request("POST", "/search?k=1", animated, {"Content-Type": "image/gif"})
    assert status == 200
    assert body["hits"][0]["similarity"] == pytest.approx(expected[1], abs=1e-6)
    for image_format in ("PNG", "BMP", "TIFF"):  # the content decides, not the declared type
        status, _, body = server.request("POST", "/search?k=1", encode(image, image_format), JPEG)
        assert status == 200
        assert body["hits"][0]["id"] == "class 1/0.png"


def test_search_by_item_against_brute_force(server, served):
    id = "<b>bold</b> & é/2.png"
    index = nk.Index.load(served.folder)
    row = index.row_of(id)
    status, _, body = server.request("GET", f"/items/neighbours?k=200&id={quote(id)}")
    assert status == 200
    assert (body["id"], body["label"]) == (id, "<b>bold</b> & é")
    expected = brute_force(served, np.asarray(index.vectors[row], np.float64), skip=row)
    assert [hit["id"] for hit in body["hits"]][:24] == [
        id if not id.startswith("/") else public_names([id])[0] for id, _ in expected
    ]
    np.testing.assert_allclose([hit["similarity"] for hit in body["hits"]], [c for _, c in expected], atol=1e-6)


def test_list_items_by_page_and_step(server):
    status, _, body = server.request("GET", "/items")
    assert status == 200
    assert body["total"] == len(body["items"]) == 25
    assert body["items"][0] == {"id": "class 0/0.png", "label": "class 0"}
    ids = [item["id"] for item in body["items"]]
    assert [i["id"] for i in server.request("GET", "/items?offset=3&limit=4&step=2")[2]["items"]] == ids[3:11:2]
    assert server.request("GET", "/items?offset=25")[2]["items"] == []


def test_a_thumbnail_is_a_centre_crop(server, served):
    status, headers, data = server.request("GET", f"/items/thumbnail?id={quote('class 0/1.png')}")
    assert (status, headers["content-type"]) == (200, "image/jpeg")
    shown = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), float)
    assert shown.shape == (192, 192, 3)
    stored = Image.open(served.photos / "class 0" / "1.png").resize((192, 192), Image.Resampling.BILINEAR)
    assert np.abs(shown - np.asarray(stored, float)).mean() < 6  # JPEG compression


def test_info_and_health(server):
    status, _, body = server.request("GET", "/info")
    assert status == 200
    assert {name: body[name] for name in ("items", "classes", "dim", "threshold")} == {
        "items": 25,
        "classes": 4,
        "dim": 16,
        "threshold": None,
    }
    assert body["limits"]["max_upload_bytes"] == 4_000_000
    assert server.request("GET", "/health")[2] == {"status": "ok"}


def test_head_is_get_without_its_body(server):
    for path in ("/", "/health", "/docs", "/items/thumbnail?id=class%200/1.png"):
        (status, headers, body), (_, expected, _) = server.request("HEAD", path), server.request("GET", path)
        assert (status, body, headers["content-length"]) == (200, b"", expected["content-length"])


def test_a_calibrated_index_reports_unknown_queries(served, tmp_path):
    from starlette.testclient import TestClient

    from nearkin.deploy.serve.app import Service, make_app

    index = nk.Index.load(served.folder)
    index.calibrate(0.05)
    service = Service(index)
    try:
        client = TestClient(make_app(service), base_url="http://127.0.0.1")
        assert client.get("/info").json()["threshold"] == index.threshold.value
        body = client.post("/search", content=random_image("PNG"), headers=JPEG).json()
        assert body["known"] is (body["nearest"] > index.threshold.value)
    finally:
        service.close()


# --- privacy ---------------------------------------------------------------------------------------------------------


def all_responses(server: Server) -> Iterator[tuple[str, int, object, object]]:
    """Send many valid and invalid requests; yields the request, status, headers and body."""
    requests: list[tuple[str, str, bytes | None]] = [
        ("GET", path, None)
        for path in (
            *("/", "/health", "/openapi.json", "/info", "/items", "/items?limit=0", "/nothing"),
            *("/items/neighbours?id=class%200/0.png", "/items/neighbours?id=none", "/items/thumbnail?id=none"),
            *("/items/thumbnail", "/search", "/items/..%2f..%2f", "/info?x=1"),
        )
    ]
    requests += [("POST", "/search", body) for body in (random_image(), random_image()[:100], b"text", b"")]
    for method, path, body in requests:
        yield f"{method} {path}", *server.request(method, path, body, JPEG if body is not None else {})


def test_no_response_contains_a_path_of_this_machine(server, served):
    words = [str(path) for path in (served.folder, served.run, served.photos, served.outside)]
    words += ["secret place", "Traceback", "/tmp"]
    words += [str(part) for part in served.folder.parents if len(part.parts) > 2]
    for request, _, headers, body in all_responses(server):
        text = f"{headers.items()} {body!r}"
        assert not [word for word in words if word in text], request
        assert "set-cookie" not in headers


def test_a_file_outside_the_folder_is_shown_without_its_path(server, served):
    [name] = [item["id"] for item in server.request("GET", "/items")[2]["items"] if item["label"] is None]
    assert name.startswith("elsewhere/")
    assert name.endswith("/portrait.png")
    assert server.request("GET", f"/items/thumbnail?id={quote(name)}")[0] == 200
    assert server.request("GET", f"/items/neighbours?id={quote(name)}")[2]["id"] == name
    for path in ("neighbours", "thumbnail"):  # its real path does not work, so paths cannot be probed
        assert server.request("GET", f"/items/{path}?id={quote(str(served.outside))}")[0] == 404


def test_names_that_are_not_utf8_are_escaped():
    assert public_names(["a\udcff.jpg", "a\\udcff.jpg"]) == ["a\\udcff.jpg", "a\\udcff.jpg~"]
    assert public_names(["../up.jpg"])[0].startswith("elsewhere/")


def test_security_headers(server):
    _, headers, page = server.request("GET", "/")
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "connect-src 'self'" in policy
    text = page.decode()
    assert "://" not in text  # no external resources
    for _, _, headers, _ in all_responses(server):
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers
        assert "server" not in headers


def test_a_cached_thumbnail_is_revalidated(make_client, served):
    """Another index at the same address may have other images under the same names."""
    client, name = make_client(), {"id": "class 0/1.png"}
    first = client.get("/items/thumbnail", params=name)
    assert first.headers["cache-control"] == "private, no-cache"
    again = client.get("/items/thumbnail", params=name, headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = client.get(
        "/items/thumbnail", params={"id": "class 0/2.png"}, headers={"If-None-Match": first.headers["etag"]}
    )
    assert other.status_code == 200
    assert other.headers["etag"] != first.headers["etag"]


# --- access ----------------------------------------------------------------------------------------------------------


def test_data_require_the_token(locked):
    for path in ("/info", "/items", "/items/neighbours?id=class%200/0.png", "/items/thumbnail?id=x", "/nothing"):
        for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}, {"Cookie": TOKEN}):
            status, headers, body = locked.request("GET", path, headers=given)
            assert (status, headers["www-authenticate"]) == (401, "Bearer")
            assert "token" in body["error"]
    assert locked.request("POST", "/search", random_image(), JPEG)[0] == 401
    for path in ("/", "/health", "/openapi.json", "/docs", "/docs/swagger-ui.css"):
        assert locked.request("GET", path)[0] == 200
    for scheme in ("Bearer", "bearer"):
        right = {"Authorization": f"{scheme} {TOKEN}"}
        assert locked.request("GET", "/info", headers=right)[0] == 200
        assert locked.request("POST", "/search", random_image(), JPEG | right)[0] == 200
    assert locked.request("GET", "/info", headers={"Authorization": "Bearer \xe9\xff"})[0] == 401


@pytest.fixture
def make_client(served):
    """Return a function that creates a client of an application in this process."""
    from starlette.testclient import TestClient

    from nearkin.deploy.serve.app import Service, make_app

    services = []

    def make(url: str = "http://testserver", **settings):
        index = nk.Index.load(served.folder, nk.load(served.run))
        services.append(Service(index, **settings))
        return TestClient(make_app(services[-1]), base_url=url)

    yield make
    for service in services:
        service.close()


def test_an_allowed_host_may_be_given_with_its_port(make_client):
    client = make_client("http://photos.example:8443", hosts=["Photos.example:8443", "::1"])
    assert client.get("/info").status_code == 200
    assert client.get("/info", headers={"Host": "[::1]:9"}).status_code == 200
    assert client.get("/info", headers={"Host": ""}).status_code == 421
    with pytest.raises(ConfigError, match="--allow-host: expected a host name"):
        make_client(hosts=["https://photos.example"])


def test_a_token_that_cannot_be_sent_is_rejected(make_client, monkeypatch):
    from nearkin.cli.serve import _read_token

    for token in ("clé secrète de la maison", "correct horse battery staple", "long enough to be one "):
        with pytest.raises(ConfigError, match="token: expected ASCII characters without spaces"):
            make_client(token=token)
    monkeypatch.setenv("NEARKIN_TOKEN", f" {TOKEN}\r\n")
    assert _read_token(None) == TOKEN
    monkeypatch.setenv("NEARKIN_TOKEN", " ")
    with pytest.raises(ConfigError, match="NEARKIN_TOKEN: is blank"):
        _read_token(None)


def test_unknown_host_names_are_rejected_on_a_loopback_address(server):
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "[::1", "localhost@evil.example:1"):
        status, _, body = server.request("GET", "/info", headers={"Host": host})
        assert status == 421, host
        assert "--allow-host" in body["error"]
    for host in ("localhost", f"127.0.0.1:{server.port}", "[::1]:80", "LOCALHOST:1"):
        assert server.request("GET", "/info", headers={"Host": host})[0] == 200


# --- starting and stopping -------------------------------------------------------------------------------------------


def test_a_port_in_use(served):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = launch(str(served.folder), "--port", str(port))
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    assert stderr.strip() == (f"nearkin: --port {port}: in use on 127.0.0.1. Choose another port, or 0 for a free one.")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "70000"], "--port: expected 0 to 65535, got 70000"),
        (["--host", "256.0.0.1"], "--host 256.0.0.1"),
        (["--workers", "0"], "--workers: expected at least 1"),
        (["--max-pixels", "0"], "--max-pixels: expected more than 0"),
        (["--max-pixels", "400000000"], "--max-pixels: expected at most 178,956,970"),
        (["--token-file", "/none"], "--token-file /none: cannot read"),
        (["--run", "/none"], "/none"),
    ],
)
def test_usage_errors(served, flags, message, monkeypatch):
    from nearkin.cli import serve
    from nearkin.errors import UserError

    with pytest.raises(UserError) as caught:
        serve.run([str(served.folder), "--port", "0", *flags])
    assert message in str(caught.value)


def test_a_short_token_is_rejected(served, monkeypatch, tmp_path):
    from nearkin.cli import serve
    from nearkin.errors import UserError

    (tmp_path / "token").write_text("short\n")
    with pytest.raises(UserError, match="expected at least 16 characters, got 5"):
        serve.run([str(served.folder), "--port", "0", "--token-file", str(tmp_path / "token")])


def test_ctrl_c_finishes_active_requests_and_stops(served):
    body = random_image("PNG", (300, 200))
    with (
        serving(served.folder) as running,
        socket.create_connection((running.host, running.port), timeout=20) as connection,
    ):
        head = f"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: {len(body)}"
        connection.sendall(f"{head}\r\nExpect: 100-continue\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 100")  # now it waits for the body
        running.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        connection.sendall(body)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        stdout, stderr = running.process.communicate(timeout=20)
    assert running.process.returncode == 0
    assert (stdout.strip(), stderr.strip()) == ("stopped", "")


# --- documentation ---------------------------------------------------------------------------------------------------


def test_the_commands_in_serve_md_work(locked, tmp_path):
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    page = (ROOT / "docs" / "serve.md").read_text()
    commands = [line for block in re.findall(r"^```sh\n(.*?)^```", page, re.M | re.S) for line in block.splitlines()]
    [secret] = [line for line in commands if line.startswith("python3 -c")]
    assert subprocess.run(secret, shell=True, cwd=tmp_path).returncode == 0
    assert len((tmp_path / "token.txt").read_text().strip()) > 30
    for line in commands:  # the flags exist
        if line.startswith("nearkin serve"):
            parse(ServeArgs, line.partition("#")[0].split()[3:], "nearkin serve")
    (tmp_path / "new.jpg").write_bytes(random_image())
    (tmp_path / "token.txt").write_text(TOKEN)
    requests = [line for line in commands if line.startswith("curl")]
    assert len(requests) == 6
    for line in requests:
        # As written, except for the address, the item name and the token of this server.
        line = line.replace("http://127.0.0.1:8000/", locked.url).replace("robin/00.jpg", "class 0/0.png")
        if "Authorization" not in line:
            line = line.replace("curl -s", 'curl -s -H "Authorization: Bearer $(cat token.txt)"')
        done = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, line
        if "thumbnail" in line:
            assert Image.open(tmp_path / "robin.jpg").size == (192, 192)
        else:
            body = json.loads(done.stdout)
            assert "error" not in body, line
            assert len(body.get("hits", range(5))) == 5
